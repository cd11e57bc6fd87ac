"""Values that `Control` answers with.

Those of the rooms below are named here for whoever may not look into these rooms; at run time that imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from posttrain.control.comparing import (
        Cell as Cell,
        Comparison as Comparison,
        Difference as Difference,
        MetricRow as MetricRow,
    )
    from posttrain.control.downstream import Downstream as Downstream
    from posttrain.control.lineage import Node as Node
    from posttrain.control.planning import Planned as Planned
    from posttrain.control.scores import Scores as Scores
    from posttrain.control.verifying import VerifyReport as VerifyReport
    from posttrain.data.importing import Curve as Curve, Imported as Imported
    from posttrain.decision.power import Ranking as Ranking
    from posttrain.domain.gates import GateReport
    from posttrain.domain.lifecycle import ReleaseState
    from posttrain.domain.manifest import Manifest
    from posttrain.domain.overrides import Setting
    from posttrain.domain.records import (
        AssetStatus,
        AttemptRecord,
        ChannelRecord,
        Deployment,
        Event,
        Look,
        Quarantine,
        ReleaseEntry,
        RunRecord,
    )
    from posttrain.drivers.requests import RunDriver as RunDriver
    from posttrain.store.erasure import Erased as Erased
    from posttrain.store.sweeping import SweptBlobs as SweptBlobs
    from posttrain.telemetry.timeline import StageTimeline as StageTimeline
    from posttrain.trackers.tracking import TrackerState as TrackerState
    from posttrain.views.logs import LogFile as LogFile, Move as Move
    from posttrain.views.plans import PlanView as PlanView, StagePlan as StagePlan
    from posttrain.views.reporting import Written as Written
    from posttrain.views.status import RunStatus as RunStatus, RunSummary as RunSummary, StageStatus as StageStatus
    from posttrain.views.tracing import RecordedSample as RecordedSample, WrittenTrace as WrittenTrace
    from posttrain.web.report import ComparePage as ComparePage, RunReport as RunReport


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run that is recorded, or that was before."""

    run: RunRecord
    attached: bool = True  # submitted before: nothing was started
    warnings: tuple[str, ...] = ()  # of the plan that was made of it, or of what it was attached to


@dataclass(frozen=True, slots=True)
class Locked:
    """A run file as the manifest it stands for."""

    manifest: Manifest
    warnings: tuple[str, ...]
    changes: tuple[str, ...]  # what to change before it is run
    place: Path  # where its lock goes by default

    def write(self, path: Path) -> None:
        """Write it, so that the file's SHA-256 is the manifest's digest. Raises as `preflight.locks.write_lock`."""
        from posttrain.preflight.locks import write_lock

        write_lock(self.manifest, path)


@dataclass(frozen=True, slots=True)
class Why:
    """Why a run is where it is."""

    status: RunStatus
    report: GateReport | None
    lost: tuple[AttemptRecord, ...]  # that did not end well
    scores: Scores
    compared_with: str | None  # the run that made the model its gates compared with
    next_action: str
    trackers: tuple[TrackerState, ...]


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What differs between two runs."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    metrics: tuple[Mapping[str, float], Mapping[str, float]]  # `stage/metric` → value, of each
    measured: frozenset[str]  # stages of the first that measure


@dataclass(frozen=True, slots=True)
class ChannelView:
    """A release channel as a person sees it."""

    record: ChannelRecord
    live: ReleaseEntry | None  # None: nothing was ever released to it
    moves: int  # that it ever made; `history` tells them
    states: Mapping[str, ReleaseState]  # model digest → what has become of it
    deployments: tuple[Deployment, ...]
    quarantine: tuple[Quarantine, ...]
    looks: tuple[Look, ...]  # evaluations of the data that judged the live release
    frozen: Event | None  # of the freeze that holds; None: it may move


@dataclass(frozen=True, slots=True)
class Dead:
    """One object at which looks failed again and again: it waits for a person."""

    object: str  # RUN, or RUN/STAGE
    kind: str
    tries: int
    since: float | None  # the first of the failures
    set_aside_at: float
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was erased of what, and where more of it is."""

    target: str
    done: Erased
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a garbage collection deleted, or would delete."""

    dry_run: bool
    blobs: SweptBlobs
    folders: int  # cached copies, and checkpoints of runs that ended
    folder_bytes: int
    requests: int  # answers to requests that nobody repeats any more


@dataclass(frozen=True, slots=True)
class Marked:
    """What was said of a version, and where it is in use."""

    said: AssetStatus | None
    runs: tuple[str, ...] = ()  # that began with it, or with what was made from it
    running: tuple[str, ...] = ()  # those of them that have not ended
    live: tuple[tuple[str, int | None], ...] = ()  # channels that serve what was made from it; a release to go back to
    still: AssetStatus | None = None  # the recall that bars its bytes all the same


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    prompt: int  # position among the prompts, from 0
    sample: int
    text: str
    tokens: int
    truncated: bool  # by max_new_tokens
    logprob: float  # of the whole response, under the temperature (1 for the most likely tokens)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    name: str  # run:sort-b0ed9b49/grpo, channel:prod@3, model:base@1
    digest: str  # of the model in the workspace
    dtype: str
    cast: bool  # whether the weights were converted
    files: tuple[str, ...]
    bytes: int
    card: bool  # false: no run of this workspace made the model, so it has the card that it came with
    opened_by: str  # the class of transformers that loads it


@dataclass(frozen=True, slots=True)
class Asked:
    """A model that was asked, and what it says, as it comes."""

    name: str
    digest: str
    form: str  # chat | text
    why: str  # it is asked so
    answers: Iterator[Answer | str]  # a text is a warning


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    place: int  # of its setting
    setting: Setting
    seed: int
    planned: Planned  # its run, resolved


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points, by setting and then seed, and how they are ranked."""

    source: Path
    points: tuple[Point, ...]
    metric: str
    better: str  # higher | lower
    model: str  # that is ranked, as the file names it: grpo, grpo/best
    notes: tuple[str, ...]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Each once, in order."""
        return tuple({point.place: point.setting for point in self.points}.values())

    @property
    def seeds(self) -> tuple[int, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys(point.seed for point in self.points))

    @property
    def warnings(self) -> tuple[str, ...]:
        """That it has fewer seeds than are enough to tell settings apart."""
        from posttrain.domain.kinds import few_seeds

        return few_seeds(len(self.seeds)) if len(self.settings) > 1 else ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """The settings of a sweep, ranked by what was measured so far."""

    ranking: Ranking
    troubles: tuple[str, ...]  # what could not be read

    def to_json(self, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Plain JSON; `own`: what else is known of each setting."""
        from posttrain.control.sweeping import ranking_json

        return {**ranking_json(self.ranking, own), "troubles": list(self.troubles)}
