"""Values that `Control` returns.

Values of lower packages are re-exported for modules that must not import these packages; at run time, this module
imports nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from posttrain.control.comparison import (
        Cell as Cell,
        Comparison as Comparison,
        Difference as Difference,
        MetricRow as MetricRow,
    )
    from posttrain.control.lineage import Downstream as Downstream, Node as Node
    from posttrain.control.plan import Planned as Planned
    from posttrain.control.scores import Scores as Scores
    from posttrain.control.verification import VerifyReport as VerifyReport
    from posttrain.data.imports import Curve as Curve, Imported as Imported
    from posttrain.decision.power import PowerNote, Ranking as Ranking
    from posttrain.domain.gates import GateReport
    from posttrain.domain.kinds import Load
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
    from posttrain.domain.runspec import Passes
    from posttrain.planner.prospects import Estimate
    from posttrain.planner.residency import Residency
    from posttrain.planner.sizes import Size
    from posttrain.store.erasure import Erased as Erased
    from posttrain.store.garbage import SweptBlobs as SweptBlobs
    from posttrain.telemetry.symptoms import Finding as Finding
    from posttrain.telemetry.timeline import StageTimeline as StageTimeline
    from posttrain.trackers.choice import TrackerState as TrackerState
    from posttrain.views.logs import LogFile as LogFile, Move as Move
    from posttrain.views.report import Written as Written
    from posttrain.views.status import RunStatus as RunStatus, RunSummary as RunSummary, StageStatus as StageStatus
    from posttrain.views.trace import RecordedSample as RecordedSample, WrittenTrace as WrittenTrace
    from posttrain.web.report import ComparePage as ComparePage, RunReport as RunReport
    from posttrain.workspace.background import RunDriver as RunDriver


_INPUT = ("slot", "name", "digest")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage before it runs."""

    name: str
    kind: str
    inputs: tuple[tuple[str, str, str | None], ...]  # slot, name, digest (None: unknown until the stage starts)
    cached_from: str | None  # "<run>/<stage>" of the reused result
    estimate: Estimate
    load: Load | None = None  # for a training stage, its placement
    residency: Residency | None = None  # memory by phase; None: no training, or a model of unknown shape
    passes: Passes | None = None  # `epochs` converted to steps, if the file sets `epochs`
    stall_after: float | None = None  # seconds without progress after which the job counts as hung; None: no job
    packages: tuple[str, ...] = ()  # installed packages of its kind and its trainer, with versions
    sizes: tuple[Size, ...] = ()  # sizes of the job's micro-batches and caches, and time-outs
    flavour: str = ""  # the flavour of its nodes, and their executor: `h100 (slurm-a)`; empty: none


@dataclass(frozen=True, slots=True)
class PlanView:
    """Everything that `posttrain plan` prints."""

    manifest: Manifest
    stages: tuple[StagePlan, ...]
    power: tuple[PowerNote, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...]  # changes to make before the run starts
    trackers: tuple[tuple[str, str], ...]  # kind, target
    existing: RunRecord | None  # the run of the same manifest, to which a submission attaches
    gates: tuple[tuple[str, str], ...] = ()  # name, origin; empty if all gates are in the run file
    evaluators: tuple[tuple[str, str], ...] = ()  # suite, digest of its evaluator for the released model
    approvals: int = 0  # number of approvals that the release needs
    approvers: tuple[str, ...] = ()  # principals who may approve

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "name": self.manifest.name,
            "digest": self.manifest.digest,
            "existing": self.existing.id if self.existing else None,
            "stages": [_stage_json(stage) for stage in self.stages],
            "power": [asdict(note) for note in self.power],
            "warnings": list(self.warnings),
            "changes": list(self.changes),
            "trackers": [{"kind": kind, "where": where} for kind, where in self.trackers],
            "gates": [{"name": name, "from": whose} for name, whose in self.gates],
            "evaluators": dict(self.evaluators),
            "approvals": self.approvals,
            "approvers": list(self.approvers),
            **({"image": self.manifest.image} if self.manifest.image else {}),
            "manifest": self.manifest.to_json(),
        }


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    plain = {
        "name": stage.name,
        "kind": stage.kind,
        "inputs": [dict(zip(_INPUT, row, strict=True)) for row in stage.inputs],
        "cached_from": stage.cached_from,
        "estimate": asdict(stage.estimate),
        **({"passes": asdict(stage.passes)} if stage.passes else {}),
        **({"stall_after": stage.stall_after} if stage.stall_after else {}),
        **({"packages": list(stage.packages)} if stage.packages else {}),
        **({"sizes": [asdict(size) for size in stage.sizes]} if stage.sizes else {}),
    }
    if stage.load is None:
        return plain
    pools = stage.load.placement.pools(stage.load.names)
    placed = [{"pool": name, "ranks": p.ranks, "roles": list(p.roles)} for name, p in pools.items()]
    return {**plain, "pools": placed, "residency": asdict(stage.residency) if stage.residency else None}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A recorded run, either new or existing."""

    run: RunRecord
    attached: bool = True  # the run was submitted before, and nothing was started
    warnings: tuple[str, ...] = ()  # from planning, or from attaching


@dataclass(frozen=True, slots=True)
class Locked:
    """The locked manifest of a run file."""

    manifest: Manifest
    warnings: tuple[str, ...]
    changes: tuple[str, ...]  # changes to make to the run file before it runs
    place: Path  # the default path of the locked manifest

    def write(self, path: Path) -> None:
        """Write the manifest; the file's SHA-256 is the digest. Errors: see `preflight.locks.write_lock`."""
        from posttrain.preflight.locks import write_lock

        write_lock(self.manifest, path)


@dataclass(frozen=True, slots=True)
class Why:
    """The state of a run and the reasons for it."""

    status: RunStatus
    report: GateReport | None
    lost: tuple[AttemptRecord, ...]  # attempts that failed, were lost or were stopped
    scores: Scores
    compared_with: str | None  # the run that produced the baseline model of the run's gates
    next_action: str
    trackers: tuple[TrackerState, ...]
    findings: tuple[Finding, ...] = ()  # symptoms of its stages; docs/remedies.md describes each of them


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The differences between two runs."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    metrics: tuple[Mapping[str, float], Mapping[str, float]]  # for each run: `stage/metric` → value
    measured: frozenset[str]  # stages of the first run that measure a model


@dataclass(frozen=True, slots=True)
class ChannelView:
    """A release channel with everything recorded about it."""

    record: ChannelRecord
    live: ReleaseEntry | None  # None: the channel has never had a release
    moves: int  # number of all moves; `history` returns them
    states: Mapping[str, ReleaseState]  # model digest → state
    deployments: tuple[Deployment, ...]
    quarantine: tuple[Quarantine, ...]
    looks: tuple[Look, ...]  # evaluations of the data that judged the live release
    frozen: Event | None  # the event of the current freeze; None: not frozen


@dataclass(frozen=True, slots=True)
class Dead:
    """An object that was set aside because its processing failed repeatedly."""

    object: str  # RUN, or RUN/STAGE
    kind: str
    tries: int
    since: float | None  # time of the first failure
    set_aside_at: float
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Erasure:
    """The result of an erasure, and the places that may still contain copies."""

    target: str
    done: Erased
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a garbage collection, or of its dry run."""

    dry_run: bool
    blobs: SweptBlobs
    folders: int  # number of deleted folders: cached copies, and checkpoints of ended runs
    folder_bytes: int
    requests: int  # number of deleted answers to requests that are too old to be repeated


@dataclass(frozen=True, slots=True)
class Marked:
    """The status that was set on an asset version, and its uses."""

    said: AssetStatus | None
    runs: tuple[str, ...] = ()  # runs that used the version, or anything made from it
    running: tuple[str, ...] = ()  # those that have not ended
    live: tuple[tuple[str, int | None], ...] = ()  # channel that points at such a model, release to return to
    still: AssetStatus | None = None  # another recall that still bars the version's bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled response."""

    prompt: int  # position among the prompts, from 0
    sample: int
    text: str
    tokens: int
    truncated: bool  # by max_new_tokens
    logprob: float  # of the whole response, at its temperature (at 1 if the temperature is 0)


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was exported as a folder."""

    folder: Path
    name: str  # run:sort-b0ed9b49/grpo, channel:prod@3, model:base@1
    digest: str  # of the model in the workspace
    dtype: str
    cast: bool  # whether the weights were converted
    files: tuple[str, ...]
    bytes: int
    card: bool  # false: no run of this workspace made the model, so its own model card was copied
    opened_by: str  # the class of transformers or peft that loads the folder
    base: str = ""  # of a model with an adapter: the base's name


@dataclass(frozen=True, slots=True)
class Asked:
    """A model that was sampled, and its responses as they arrive."""

    name: str
    digest: str
    form: str  # chat | text
    why: str  # the reason for this form
    answers: Iterator[Answer | str]  # a string is a warning


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    place: int  # position of the setting in the sweep, from 0
    setting: Setting
    seed: int
    planned: Planned  # the resolved run


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points of a sweep, by setting and then seed, and the ranking metric."""

    source: Path
    points: tuple[Point, ...]
    metric: str
    better: str  # higher | lower
    model: str  # the ranked model, as the file names it: grpo, grpo/best
    notes: tuple[str, ...]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Each setting once, in order."""
        return tuple({point.place: point.setting for point in self.points}.values())

    @property
    def seeds(self) -> tuple[int, ...]:
        """Each seed once, in order."""
        return tuple(dict.fromkeys(point.seed for point in self.points))

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning if the sweep has too few seeds to distinguish its settings."""
        from posttrain.domain.kinds import few_seeds

        return few_seeds(len(self.seeds)) if len(self.settings) > 1 else ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """The settings of a sweep, ranked by the measurements so far."""

    ranking: Ranking
    troubles: tuple[str, ...]  # errors of runs that could not be read

    def to_json(self, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return plain JSON; `own`: further fields of each setting."""
        from posttrain.control.comparison import ranking_json

        return {**ranking_json(self.ranking, own), "troubles": list(self.troubles)}
