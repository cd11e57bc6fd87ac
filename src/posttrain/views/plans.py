"""The plan of a run for people: stages, cached results, cost, power of gates, changes to make."""

from dataclasses import asdict, dataclass
from typing import Any

from posttrain.decision.power import PowerNote
from posttrain.domain.kinds import Load
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord
from posttrain.domain.runspec import Passes
from posttrain.planner.prospects import Estimate
from posttrain.planner.residency import Residency
from posttrain.planner.sizes import Size

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
