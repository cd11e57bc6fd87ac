"""How a stage gets from waiting to running: bind its inputs, ask the stage cache, plan an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from posttrain.control import budgets
from posttrain.control import jobs as environments
from posttrain.control.decide import View, hold_back
from posttrain.control.jobs import Jobs, called, names_of, present_code
from posttrain.control.launching import (
    cache_key,
    plan_attempt,
    say,
    taken_slots,
    tokens_taken_over,
    usable,
    waits_for_devices,
)
from posttrain.control.stores import Stores
from posttrain.domain.jobs import InputBlob
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import Reason, RunState, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import StageRecord
from posttrain.domain.waits import wait_of
from posttrain.store.ledger import Ledger


def bind_pending(
    stores: Stores, manifest: Manifest, stage: StageRecord, stages: Mapping[str, StageRecord]
) -> StageRecord:
    """Resolve the inputs of a pending stage whose upstream stages are done: it is ready afterwards, or skipped."""
    plan = manifest.stage(stage.name)
    inputs: dict[str, InputBlob] = {}
    for slot, ref in plan.inputs.items():
        if ref.source == "asset" and ref.digest is not None:
            inputs[slot] = InputBlob(ref.digest, ref.form, ref.name, ref.meta)
        elif ref.source == "stage":
            output = stages[ref.name].outputs.get(ref.output or "")
            if output:  # a skipped stage has none: the gate sees that there is no baseline
                inputs[slot] = InputBlob(output["digest"], output["form"], f"{stage.run_id}/{ref.word}")
        elif ref.source == "channel":
            live = _channel(stores.ledger, manifest, stages, ref.name)
            if live:
                inputs[slot] = live
            elif not kind_of(stage.kind).judges:
                return stores.update_stage(
                    stage,
                    state=StageState.SKIPPED,
                    reason=Reason.CHANNEL_EMPTY,
                    message=f"channel {ref.name} has no release yet, so there is no baseline to evaluate",
                    next_action="none needed",
                    finished_at=stores.clock.now(),
                )
    bound = {slot: asdict(blob) for slot, blob in inputs.items()}
    taken = {slot: ref.output for slot, ref in plan.inputs.items() if ref.source == "stage" and ref.output}
    waits = kind_of(stage.kind).driver is Driver.WAIT
    begun: dict[str, Any] = wait_of(manifest, stage.name).begun(stores.clock.now()) if waits else {}
    return stores.update_stage(
        stage,
        state=StageState.READY,
        reason=Reason.READY,
        message="inputs are there",
        next_action="",
        inputs=bound,
        taken=taken,
        **begun,
    )


def _channel(ledger: Ledger, manifest: Manifest, stages: Mapping[str, StageRecord], channel: str) -> InputBlob | None:
    """What a channel points at, looked up once per run: the gate must judge against what the baseline measured."""
    for plan in manifest.stages:
        slot = next((s for s, r in plan.inputs.items() if r.source == "channel" and r.name == channel), None)
        other = stages[plan.name]
        if slot is None or other.state == StageState.PENDING:
            continue
        return InputBlob(**other.inputs[slot]) if slot in other.inputs else None
    live = ledger.channel(channel)
    return InputBlob(live.model_digest, "tree", f"channel:{channel}@{live.sequence}") if live else None


def bound_inputs(stage: StageRecord) -> dict[str, InputBlob]:
    """The inputs of a stage that is past pending."""
    return {slot: InputBlob(**blob) for slot, blob in stage.inputs.items()}


def start_ready(stores: Stores, jobs: Jobs, view: View, stage: StageRecord) -> None:
    """Reuse a cached result, or plan the next attempt of a ready stage when there is a slot and budget."""
    manifest = view.manifest
    key = cache_key(manifest, manifest.stage(stage.name), bound_inputs(stage))
    cached, same = stores.ledger.computed(key)
    if cached and _reuse(stores, stage, key, cached):
        return
    if cached:  # its outputs are gone, or damaged
        same = stores.ledger.stages_by_key(key)
    twin = _twin(stores, stage, same)
    if twin:
        said = f"{twin} computes the same; its result will be reused"
        say(stores, stage, Reason.WAITING_FOR_IDENTICAL_STAGE, said, cache_key=key)
        return
    # of now: beside the deciding thread the view is older, and what was spent since counts
    attempts = stores.ledger.attempts(stage.run_id) if budgets.limited(manifest) else []
    spent = budgets.spending(view.stages, attempts, taken_over=tokens_taken_over(stores, jobs.folders, attempts))
    # in the write that plans it; before, where it waits already, or a checkpoint is looked for first, which takes time
    before = stage.reason == Reason.WAITING_FOR_SLOT or bool(same) or bool(view.tries(stage.name))
    driven, unwatched = taken_slots(stores, jobs) if before else (0, None)
    held = hold_back(manifest, stage, attempts, spent, free=jobs.slots - driven - (unwatched or 0))
    if isinstance(held, tuple):
        say(stores, stage, *held, cache_key=key)
        return
    if _code_changed(stores, jobs, manifest, stage) or _environment_changed(stores, jobs, manifest, stage):
        return
    over = budgets.exhausted(manifest, spent)
    if over:
        stores.update_stage(
            stage,
            state=StageState.FAILED,
            reason=Reason.BUDGET_EXCEEDED,
            message=over,
            next_action="raise the budget",
        )
        return
    if not waits_for_devices(stores, jobs, manifest, stage, jobs.trainer(manifest.stage(stage.name).trainer)):
        with stores.blobs.holding():
            waiting = plan_attempt(
                stores, jobs, view, stage, key, same, unwatched=unwatched, rivals=_rivals(stores, view, key)
            )
        if waiting:
            say(stores, stage, *waiting, cache_key=key)


def _rivals(stores: Stores, view: View, key: str) -> int:
    """How many other stages of a run with a budget could start now: they share what is left of it."""
    manifest = view.manifest
    if not budgets.limited(manifest):
        return 0
    ready = [one for one in view.stages if one.state == StageState.READY and kind_of(one.kind).driver is Driver.JOB]
    keys = {cache_key(manifest, manifest.stage(one.name), bound_inputs(one)) for one in ready} - {key}
    return sum(stores.ledger.cached_stage(one) is None for one in keys)


def _code_changed(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord) -> bool:
    """Refuse to compute with other sources than the manifest names: its digest would vouch for what it did not see."""
    now = {name: present_code(name, jobs.trainers) for name in names_of(manifest, manifest.stage(stage.name))}
    name = next((name for name, present in now.items() if present != manifest.code[name]), None)
    if name is None:
        return False
    locked, present = manifest.code[name], now[name]
    message = f"the code of {called(name)} must be {locked[:19]}… as the manifest says, got {present[:19]}…"
    stores.update_stage(
        stage,
        state=StageState.FAILED,
        reason=Reason.CODE_CHANGED,
        message=message,
        next_action="submit the run file again: it locks the present code",
    )
    return True


def _environment_changed(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord) -> bool:
    """Refuse to compute with other libraries than the run began with: somebody may have written them."""
    image = manifest.image_of(manifest.stage(stage.name))
    message = "" if image else environments.differs(stores, jobs, manifest, stage.run_id)  # an image brings its own
    if not message:
        return False
    stores.update_stage(
        stage,
        state=StageState.FAILED,
        reason=Reason.ENVIRONMENT_CHANGED,
        message=message,
        next_action=f"restore it, or posttrain retry {stage.run_id}, which takes it as it is",
    )
    return True


def _reuse(stores: Stores, stage: StageRecord, key: str, cached: StageRecord) -> bool:
    if not usable(cached, stores.blobs):
        return False
    origin = f"{cached.run_id}/{cached.name}"
    stores.update_stage(
        stage,
        state=StageState.SUCCEEDED,
        reason=Reason.CACHE_HIT,
        message=f"same code, parameters and inputs as {origin}",
        next_action="",
        cache_key=key,
        cached_from=origin,
        outputs=cached.outputs,
        metrics=cached.metrics,
        finished_at=stores.clock.now(),
    )
    return True


def _twin(stores: Stores, stage: StageRecord, same: Iterable[StageRecord]) -> str | None:
    """Another stage that computes the same right now, in this run or one that somebody is driving."""
    now = stores.clock.now()
    for other in same:
        if other.state != StageState.RUNNING or (other.run_id, other.name) == (stage.run_id, stage.name):
            continue
        run = stores.ledger.run(other.run_id)
        if run.state == RunState.RUNNING and (run.id == stage.run_id or (run.lease_expires or 0.0) >= now):
            return f"{run.id}/{other.name}"
    return None
