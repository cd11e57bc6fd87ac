"""The port of trackers: where a run's metrics are written for people's own tools.

A tracker's memory is its target. `begin` reads from the target itself which points are there, and whoever writes
leaves those out; so a process that was killed between any two writes, or inside one, is followed by one that neither
repeats nor misses a point. Within a (stage, metric) points come by ascending step.

::

    begin(run) ──▶ log(rows) … flush() … log(rows) ──▶ end(ending) ──▶ close()
       ▲ mends what was torn, says what is there          ▲ may be called again after a retry of the run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

Cursor = Mapping[tuple[str, str], int]  # (stage, metric) → the last step that is there


@dataclass(frozen=True, slots=True)
class Row:
    """What a stage said of one step: `Row("sft", 12, 1.7e9, {"loss": 0.4})`."""

    stage: str
    step: int
    at: float  # seconds since the epoch
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run before its first point."""

    id: str
    name: str
    owner: str
    manifest: str  # digest
    created_at: float
    params: Mapping[str, Any] = field(default_factory=dict)  # "grpo.optimizer.learning_rate" → value; also the seed
    stages: Sequence[str] = ()  # in their order
    workspace: str = ""  # identity: 32 hexadecimal digits; empty: unknown, and nothing is compared


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    state: str  # succeeded | rejected | failed | stopped
    message: str
    finished_at: float | None
    summary: Mapping[str, float] = field(default_factory=dict)  # "evaluate/heldout/accuracy" → value
    verdicts: Mapping[str, str] = field(default_factory=dict)  # gate → pass | fail | inconclusive | error


@dataclass(frozen=True, slots=True)
class Version:
    """A model that a channel was pointed at."""

    digest: str
    run_id: str | None
    tags: Mapping[str, str] = field(default_factory=dict)  # lineage, in words


@dataclass(frozen=True, slots=True)
class ChannelState:
    """A channel's models, oldest first, and the one that is live."""

    channel: str
    versions: Sequence[Version]
    live: str  # digest
    source: str  # of its models, where the artifact store is


class Tracker(Protocol):
    """One place that a run's points are written to.

    Every implementation: `begin` refuses a run that another workspace wrote there, and, where the target is files, one
    that another process writes (`telemetry/holding.py`); it leaves a target that a killed writer left torn whole again,
    and says exactly what is there. Whatever is wrong with the target is an exception of any class, after which a new
    tracker may begin again.
    """

    kind: ClassVar[str]

    @property
    def where(self) -> str:
        """For a person: the file, folder or address."""

    def name(self, metric: str) -> str:
        """What the target calls a metric; most take any name."""

    def begin(self, run: TrackedRun) -> Cursor:
        """Open the run's target, made if it is not there; what it has."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write points that are not there yet."""

    def flush(self) -> None:
        """Bring to the target what `log` may have held back."""

    def end(self, ending: Ending) -> None:
        """Write how the run ended; everything logged is in the target afterwards."""

    def close(self) -> None:
        """Let go of files and connections."""


@runtime_checkable
class Registry(Protocol):
    """A tracker that also keeps released models."""

    def follow(self, channel: ChannelState) -> None:
        """Have every model of the channel as a version, and the channel's name point at the live one."""


def missing(rows: Iterable[Row], cursor: dict[tuple[str, str], int]) -> Iterator[Row]:
    """The rows without the values that `cursor` has; it moves along."""
    for row in rows:
        fresh = {name: value for name, value in row.values.items() if row.step > cursor.get((row.stage, name), -1)}
        for name in fresh:
            cursor[row.stage, name] = row.step
        if fresh:
            yield row if len(fresh) == len(row.values) else replace(row, values=fresh)
