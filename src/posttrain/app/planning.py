"""What `posttrain plan` shows: the manifest, what is cached, what it will cost, whether its gates can tell.

Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from posttrain.app.runs import resolve_spec
from posttrain.app.workspace import Workspace
from posttrain.control.approvals import terms
from posttrain.control.conforming import released_evaluators
from posttrain.control.planning import Planned
from posttrain.control.stalls import stall_after
from posttrain.decision.policies import origin
from posttrain.domain.evaluators import measured_suites, suite_evaluator
from posttrain.domain.kinds import Driver, installed_kind, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.domain.runspec import Setting, load_run_spec
from posttrain.execution.trainers.installed import InstalledTrainer
from posttrain.preflight.datasets import repeated, seen_in_training, wide_steps
from posttrain.preflight.locks import refuse_lock
from posttrain.preflight.outlook import look_ahead, refuse_hopeless
from posttrain.preflight.placing import residencies, slower
from posttrain.trackers.tracking import describe, of_workspace
from posttrain.views.plans import PlanView, StagePlan


def view_plan(path: Path, workspace: Workspace, *, seed: int | None = None, setting: Setting = ()) -> PlanView:
    """Validate a run file and look ahead.

    Raises:
        InputError: naming file, field, constraint and value.
    """
    refuse_lock(path)
    spec = load_run_spec(path, setting)
    planned = resolve_spec(spec, workspace, path, seed=seed)
    existing = workspace.ledger.runs(manifest_digest=planned.manifest.digest)
    ahead = look_ahead(planned, spec, workspace, path)
    if not existing:
        refuse_hopeless(planned.manifest, ahead, path)
    found = dict(residencies(planned, spec, workspace, path, ahead.datasets))
    stages = tuple(
        StagePlan(
            stage.name,
            stage.kind,
            tuple((slot, _shown(ref), ref.digest) for slot, ref in stage.inputs.items()),
            _origin(ahead.cached[stage.name]),
            ahead.estimates[stage.name],
            planned.contracts[stage.name].load if stage.name in planned.contracts else None,
            found[stage.name].residency if stage.name in found else None,
            planned.passes.get(stage.name),
            stall_after(planned.manifest, stage.name) if kind_of(stage.kind).driver is Driver.JOB else None,
            tuple(_packages(stage, workspace)),
            found[stage.name].sizes if stage.name in found else (),
        )
        for stage in planned.manifest.stages
    )
    warnings = [*ahead.warnings, *planned.warnings]
    warnings += [*repeated(planned, ahead.datasets), *seen_in_training(planned, ahead.datasets)]
    warnings += wide_steps(planned, ahead.datasets)
    warnings += [f"{name}: {warning}" for name, seen in found.items() for warning in seen.warnings]
    warnings += slower(planned, spec, workspace, path)
    run = existing[0] if existing else None
    trackers = tuple(describe(planned.trackers or of_workspace(workspace)))
    gates = tuple((rule.name, origin(rule, planned.policy)) for rule in planned.manifest.gates if planned.policy)
    evaluators = tuple(_evaluators(planned.manifest))
    asked = _approvals(planned, workspace)
    return PlanView(
        planned.manifest, stages, ahead.power, tuple(warnings), ahead.changes, trackers, run, gates, evaluators, *asked
    )


def _approvals(planned: Planned, workspace: Workspace) -> tuple[int, tuple[str, ...]]:
    """How many approvals the release will wait for, and who may give them."""
    release = planned.manifest.release
    if release is None:
        return 0, ()
    with workspace.ledger.snapshot() as now:
        found = terms(now, now.channel_record(release.channel), planned.policy, workspace.actor)
    return (found.needed, found.approvers) if found else (0, ())


def _evaluators(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Suite and evaluator of everything that is measured of the released model, as a policy names them."""
    for stage in released_evaluators(manifest):
        for suite, _ in measured_suites(stage):
            yield suite, suite_evaluator(stage, manifest.code, suite)


def _packages(stage: StageManifest, workspace: Workspace) -> Iterator[str]:
    """`posttrain-words 1.0`, for what of a stage is not Posttrain's own."""
    kind = installed_kind(stage.kind)
    trainer = workspace.jobs.trainers.get(stage.trainer)
    plugins = [kind.plugin if kind else None, trainer.plugin if isinstance(trainer, InstalledTrainer) else None]
    yield from dict.fromkeys(plugin.distribution for plugin in plugins if plugin)


def _origin(record: StageRecord | None) -> str | None:
    return (record.cached_from or f"{record.run_id}/{record.name}") if record else None


def _shown(ref: InputRef) -> str:
    called = f" ({ref.meta['entry']})" if "dialect" in ref.meta and ref.name.startswith("path:") else ""
    return {"stage": f"stage {ref.word}", "channel": f"channel {ref.name}"}.get(ref.source, ref.name + called)
