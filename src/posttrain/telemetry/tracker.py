"""The port of trackers, the ownership of their targets, the points of a stage, and the progress of a run.

A tracker writes a run's metrics for users' tools, and has no state outside its target. `begin` reads the existing
points from the target, and the writer skips them. So after a kill between or during writes, the next process neither
repeats nor omits a point. For each (stage, metric), points arrive by ascending step.

::

    begin(run) ──▶ log(rows) … flush() … log(rows) ──▶ end(ending) ──▶ close()
       ▲ repairs torn records, returns the points         ▲ may be called again after a retry of the run

One process at a time writes a run to a tracker's target, and only for one workspace. Run ids are derived from
manifests, so two workspaces may have a run with the same id. If a target consists of files, there is a file
`.NAME.writer` next to it, which the writer locks and whose line is the workspace's identity. The kernel releases the
lock when the writer dies.

A stage's points come from the facts of its attempts, in the order in which points are written to trackers. For a step
that was lost and redone, the first value counts, because it may already have been written. If the redone step has a
different value, the difference is reported.

A stage's progress, which the live display, `get` and the report show, is read from the attempt folders.
"""

import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, runtime_checkable

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.jobs import Fact, Metric, Note, Progress, Span
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import make_folder, private, taken, writing
from posttrain.store.attempts import AttemptFolder
from posttrain.telemetry.timeline import is_call

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_REMEMBERED = 10_000  # steps per metric whose values are kept; more than between two checkpoints
_OF_THE_MACHINE = ("memory/",)  # prefixes of metrics that differ between processes
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160), 8232, 8233, *range(0xD800, 0xE000)), "_")
_HAND_OFFS = 20_000  # maximum number of hand-offs that are kept, about two thousand steps
_RATE_WINDOW = 20  # number of progress facts for the averages of tokens/s and ETA


class Cursor(dict[tuple[str, str], int]):
    """The points of a target: (stage, metric) → the last step."""

    def saw(self, stage: str, step: int, *metrics: str) -> None:
        """Record that the target has these points."""
        for metric in metrics:
            self[stage, metric] = max(step, self.get((stage, metric), -1))


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one step of a stage: `Row("sft", 12, 1.7e9, {"loss": 0.4})`."""

    stage: str
    step: int
    at: float  # seconds since the epoch
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The description of a run that a tracker receives before its first point."""

    id: str
    name: str
    owner: str
    manifest: str  # digest
    created_at: float
    params: Mapping[str, Any] = field(default_factory=dict)  # "grpo.optimizer.learning_rate" → value; includes the seed
    stages: Sequence[str] = ()  # in their order
    workspace: str = ""  # the identity, 32 hexadecimal digits; "" if unknown, and then not compared


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run."""

    state: str  # succeeded | rejected | failed | stopped
    message: str
    finished_at: float | None
    summary: Mapping[str, float] = field(default_factory=dict)  # "evaluate/heldout/accuracy" → value
    verdicts: Mapping[str, str] = field(default_factory=dict)  # gate → pass | fail | inconclusive | error


@dataclass(frozen=True, slots=True)
class Version:
    """A model that a channel pointed at."""

    digest: str
    run_id: str | None
    tags: Mapping[str, str] = field(default_factory=dict)  # tag → value; includes the lineage as text


@dataclass(frozen=True, slots=True)
class ChannelState:
    """A channel's models, oldest first, and its live model."""

    channel: str
    versions: Sequence[Version]
    live: str  # digest
    source: str  # URL of the artifact store that contains the models


class Tracker(ABC):
    """A target to which a run's points are written.

    In every implementation, `begin` rejects a run that another workspace wrote to the target and, if the target
    consists of files, a run that another process is writing. `begin` also repairs a target that a killed writer left
    incomplete, and returns exactly the target's points. A target's error may have any exception class; after such an
    error, a new tracker may begin again.
    """

    kind: ClassVar[str]
    _held: IO[bytes] | None = None  # the locked `.NAME.writer` if the target consists of files

    @property
    @abstractmethod
    def where(self) -> str:
        """The file, folder or address, for messages."""

    def name(self, metric: str) -> str:
        """Return a metric's name in the target; most targets accept any name."""
        return metric

    @abstractmethod
    def begin(self, run: TrackedRun) -> Cursor:
        """Open the run's target, which is created if it does not exist; return its points."""

    @abstractmethod
    def log(self, rows: Sequence[Row]) -> None:
        """Write points that the target does not have."""

    def flush(self) -> None:  # noqa: B027
        """Write everything that `log` may have buffered."""

    def end(self, ending: Ending) -> None:
        """Write the end of the run, if the target can store it; after this call, all points have been written."""
        self.flush()

    def close(self) -> None:
        """Release files and connections."""
        if self._held is not None:
            self._held.close()


class FileTracker(Tracker):
    """A tracker with one file for each run.

    Raises:
        WorkspaceError: the file cannot be written, or was written by a different program.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = self._path = folder
        self._run = ""

    @property
    def where(self) -> str:
        """See `Tracker.where`."""
        return str(self._path)

    def _own(self, run: TrackedRun, path: Path, mark: str, there: Callable[[], bool] | None = None) -> None:
        """Write the run to the file `path` from now on, after locking the file `mark`.

        Args:
            there: returns whether the target has data (see `hold`); None: a check that the file `path` exists.
        """
        self._run, self._path = run.id, path
        make_folder(path.parent)
        self._held = hold(path.parent / mark, run, self.where, there or path.exists)


class AppendedTracker(FileTracker):
    """A tracker that appends whole records to a file; a record truncated by a kill or a full disk is removed."""

    _file = -1

    def _mend(self, ends: Iterable[int]) -> bool:
        """Open the file and remove incomplete records; return whether any record is left.

        Args:
            ends: the position after each whole record; consumed only after the file exists.
        """
        with writing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            end = max(ends, default=0)
            os.ftruncate(self._file, end)
        return end > 0

    def _append(self, data: bytes) -> None:
        """Append records, in as many writes as the operating system requires."""
        with writing(self._path):
            written = os.write(self._file, data[: len(data) // 2])
            crashpoint("track.inside_log")
            while written < len(data):
                written += os.write(self._file, data[written:])

    def flush(self) -> None:
        """See `Tracker.flush`."""
        with writing(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()


@runtime_checkable
class Registry(Protocol):
    """A tracker that also stores released models."""

    def follow(self, channel: ChannelState) -> None:
        """Store every model of the channel as a version, and point the channel's alias at the live model."""


def missing(rows: Iterable[Row], cursor: Cursor) -> Iterator[Row]:
    """Yield the rows without the values that `cursor` already has, and update `cursor`."""
    for row in rows:
        fresh = {name: value for name, value in row.values.items() if row.step > cursor.get((row.stage, name), -1)}
        cursor.saw(row.stage, row.step, *fresh)
        if fresh:
            yield row if len(fresh) == len(row.values) else replace(row, values=fresh)


def hold(path: Path, run: TrackedRun, target: str, there: Callable[[], bool]) -> IO[bytes]:
    """Lock a target's `.NAME.writer`, which is created if it does not exist, until the file is closed.

    Args:
        target: the target's name for messages.
        there: returns whether the target has any data; if not, an identity in the file is from a removed target.

    Raises:
        WorkspaceError: another process has the lock, another workspace wrote the run, or the file cannot be written.
    """
    with writing(path), ExitStack() as opened:
        file = opened.enter_context(open(path, "a+b", buffering=0, opener=private))
        if not taken(file.fileno()):
            raise WorkspaceError(
                f"{target}: another process writes run {run.id} there; wait until it ends, or name another location"
            )
        file.seek(0)
        known = file.read(100).decode(errors="replace").strip()
        if there():
            refuse_another(known, run, target)
        if run.workspace and known != run.workspace:
            file.truncate(0)
            file.write(f"{run.workspace}\n".encode())
            os.fsync(file.fileno())
        opened.pop_all()  # the lock is held from here on
    return file


def refuse_another(known: str, run: TrackedRun, target: str) -> None:
    """Reject a target to which another workspace wrote this run. A target without a complete identity is accepted.

    Raises:
        WorkspaceError: the target has the identity of another workspace.
    """
    if run.workspace and _IDENTITY.fullmatch(known) and known != run.workspace:
        raise WorkspaceError(
            f"{target}: another workspace has written its run {run.id} to this location; name a different location or "
            "experiment for this run"
        )


def _unseen(
    root: Path, attempts: Sequence[AttemptRecord], seen: dict[str, int], unreadable: Callable[[Exception], None]
) -> Iterator[tuple[str, Fact]]:
    """Yield (folder, fact) for new segments. After each segment, update `seen`: folder → number of the last segment."""
    for attempt in attempts:
        folder = AttemptFolder(root / attempt.folder, attempt.channel or "")
        for facts, number in folder.segments(seen.get(attempt.folder, 0), unreadable):
            for fact in facts:
                yield attempt.folder, fact
            seen[attempt.folder] = number


class StageFeed:
    """Reads the facts of one stage's attempts as they arrive; each segment is read once.

    Args:
        root: the workspace folder.
        stage: the stage's name in rows.
    """

    def __init__(self, root: Path, stage: str) -> None:
        self._root, self._stage = root, stage
        self._seen: dict[str, int] = {}
        self._last: dict[str, int] = {}  # metric → the last step that was yielded
        self._values: dict[str, OrderedDict[int, float]] = {}
        self.differing = 0  # number of values of redone steps that differ from the first values
        self.difference = ""  # a description of the first difference
        self.troubles: list[str] = []  # errors of segments that could not be read

    def read(self, attempts: Sequence[AttemptRecord]) -> Iterator[Row]:
        """Yield the new rows, one segment at a time."""
        for _, fact in _unseen(self._root, attempts, self._seen, lambda error: self.troubles.append(str(error))):
            if isinstance(fact, Metric):
                yield from self.take(fact.step, fact.at, fact.values)

    def take(self, step: int, at: float, values: Mapping[str, float]) -> Iterator[Row]:
        """Yield a row with the new values of a step, if there are any."""
        fresh: dict[str, float] = {}
        for name, value in values.items():
            metric = name.translate(_CONTROLS)
            known = self._values.setdefault(metric, OrderedDict())
            if step > self._last.get(metric, -1):
                fresh[metric] = known[step] = float(value)
                self._last[metric] = step
                if len(known) > _REMEMBERED:
                    known.popitem(last=False)
            elif step in known and not metric.startswith(_OF_THE_MACHINE) and not _same(known[step], float(value)):
                self.differing += 1
                first = f"{self._stage}/{metric} at step {step}: first {known[step]:g}, redone {value:g}"
                self.difference = self.difference or first
        if fresh:
            yield Row(self._stage, step, at, fresh)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of one stage according to its facts."""

    step: int = 0
    total: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    eta: float | None = None  # seconds
    latest: dict[str, float] = field(default_factory=dict)  # metric → newest value
    notes: tuple[Note, ...] = ()
    at: float | None = None  # time at which the job reported its progress
    stale: bool = False  # whether the progress is from an earlier attempt, since the newest has not reported yet


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve."""

    step: int
    value: float


class StageWatcher:
    """Reads the facts of one stage's attempts as they arrive; each segment is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, int] = {}
        self._last: Progress | None = None
        self._recent: deque[Progress] = deque(maxlen=_RATE_WINDOW)  # the newest attempt's progress facts
        self._by = ""  # folder of the attempt that reported these facts
        self._latest: dict[str, float] = {}
        self._of_step: frozenset[str] = frozenset()  # metrics of the newest step that updated the weights
        self._notes: deque[Note] = deque(maxlen=5)
        self.hand_offs: deque[Span] = deque(maxlen=_HAND_OFFS)  # the newest attempt's latest ones
        self._spans_by = ""
        self.curves: dict[str, dict[int, float]] = {}  # metric → step → value; a redone step's value replaces the first

    def read(self, attempts: Sequence[AttemptRecord]) -> StageProgress:
        """Read new facts and return the progress. An unreadable segment becomes a note and does not fail the run."""
        noted = self._notes.append
        told = _unseen(self._root, attempts, self._seen, lambda error: noted(Note(str(error), time.time(), "warning")))
        for folder, fact in told:
            self._take(fact, folder)
        last = self._last
        if last is None:
            return StageProgress(latest=dict(self._latest), notes=tuple(self._notes))
        rate, eta = self._pace() if self._by == attempts[-1].folder else (None, None)
        return StageProgress(
            last.step,
            last.total,
            last.tokens,
            rate,
            eta,
            dict(self._latest),
            tuple(self._notes),
            last.at,
            stale=self._by != attempts[-1].folder,
        )

    def _pace(self) -> tuple[float | None, float | None]:
        """Return tokens per second, and seconds to the end; each is None if too little progress was reported."""
        first, last = self._recent[0], self._recent[-1]
        seconds = last.at - first.at
        if seconds <= 0:
            return None, None
        pace = (last.step - first.step) / seconds
        left = last.total - last.step
        return (last.tokens - first.tokens) / seconds, left / pace if pace > 0 and left > 0 else None

    def curve(self, metric: str) -> list[Point]:
        """Return a metric's points by step; a redone step has one point."""
        return [Point(step, value) for step, value in sorted(self.curves.get(metric, {}).items())]

    def _take(self, fact: object, folder: str) -> None:
        if isinstance(fact, Progress):
            if folder != self._by:
                self._by = folder
                self._recent.clear()  # an earlier attempt does not count for this attempt's pace
            self._last = fact
            self._recent.append(fact)
        elif isinstance(fact, Metric):
            if fact.values.get("updates"):
                self._of_step = frozenset(fact.values)
            elif "updates" in fact.values:  # without an update, a known loss is from an earlier step
                for name in self._of_step - fact.values.keys():
                    self._latest.pop(name, None)
            for name, value in fact.values.items():
                self._latest[name] = value
                self.curves.setdefault(name, {})[fact.step] = value
        elif isinstance(fact, Span):
            if folder != self._spans_by:  # a step that was lost and redone is timed once
                self._spans_by = folder
                self.hand_offs.clear()
            if not is_call(fact):
                self.hand_offs.append(fact)
        elif isinstance(fact, Note):
            self._notes.append(fact)
