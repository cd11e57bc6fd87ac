"""How a stage gets from waiting to running: bind its inputs, ask the stage cache, plan an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from posttrain.control import budgets
from posttrain.control.cache import cache_key, usable
from posttrain.control.wiring import Wiring
from posttrain.domain.jobs import InputBlob, JobOrder
from posttrain.domain.lifecycle import AttemptState, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import put_tree

_DONE = (StageState.SUCCEEDED, StageState.SKIPPED)


def bind_pending(
    wiring: Wiring, manifest: Manifest, stage: StageRecord, stages: Mapping[str, StageRecord]
) -> StageRecord | None:
    """Resolve the inputs of a pending stage once everything upstream is done.

    Returns:
        The stage as it is now (ready or skipped), or None while it waits.
    """
    plan = manifest.stage(stage.name)
    waiting = sorted(name for name in plan.upstream() if stages[name].state not in _DONE)
    if waiting:
        return None
    inputs: dict[str, InputBlob] = {}
    for slot, ref in plan.inputs.items():
        if ref.source == "asset" and ref.digest is not None:
            inputs[slot] = InputBlob(ref.digest, ref.form, ref.name, ref.meta)
        elif ref.source == "stage":
            output = stages[ref.name].outputs.get(ref.output or "")
            if output:  # a skipped stage has none: the gate sees that there is no baseline
                inputs[slot] = InputBlob(output["digest"], output["form"], f"{stage.run_id}/{ref.name}")
        elif ref.source == "channel":
            live = wiring.ledger.channel(ref.name)
            if live:
                inputs[slot] = InputBlob(live.model_digest, "tree", f"channel:{ref.name}#{live.sequence}")
            elif stage.kind != "gate":
                return _skip(wiring, stage, ref.name)
    bound = {slot: asdict(blob) for slot, blob in inputs.items()}
    with wiring.ledger.transaction(wiring.actor) as transaction:
        return transaction.update_stage(
            stage, state=StageState.READY, reason="Ready", message="inputs are there", next_action="", inputs=bound
        )


def _skip(wiring: Wiring, stage: StageRecord, channel: str) -> StageRecord:
    message = f"channel {channel} has no release yet, so there is no baseline to evaluate"
    with wiring.ledger.transaction(wiring.actor) as transaction:
        return transaction.update_stage(
            stage, state=StageState.SKIPPED, reason="ChannelEmpty", message=message, next_action="none needed"
        )


def bound_inputs(stage: StageRecord) -> dict[str, InputBlob]:
    """The inputs of a stage that is past pending."""
    return {slot: InputBlob(**blob) for slot, blob in stage.inputs.items()}


def start_ready(
    wiring: Wiring, run: RunRecord, manifest: Manifest, stage: StageRecord, stages: Mapping[str, StageRecord]
) -> None:
    """Reuse a cached result, or plan the next attempt of a ready stage when there is a slot and budget."""
    key = cache_key(manifest, manifest.stage(stage.name), bound_inputs(stage))
    if _reuse(wiring, stage, key):
        return
    twin = _twin(wiring, stage, key)
    if twin:
        _wait(wiring, stage, "WaitingForIdenticalStage", f"{twin} computes the same; its result will be reused", key)
        return
    now = wiring.clock.now()
    if stage.not_before is not None and now < stage.not_before:
        return
    if sum(s.state == StageState.RUNNING for s in stages.values()) >= wiring.slots:
        _wait(wiring, stage, "WaitingForSlot", f"all {wiring.slots} slots are taken", key)
        return
    spent = budgets.spending(list(stages.values()), wiring.ledger.attempts(run.id), now)
    over = budgets.exhausted(manifest, spent)
    if over:
        with wiring.ledger.transaction(wiring.actor) as transaction:
            transaction.update_stage(
                stage, state=StageState.FAILED, reason="BudgetExceeded", message=over, next_action="raise the budget"
            )
        return
    _plan_attempt(wiring, manifest, stage, key, spent)


def _reuse(wiring: Wiring, stage: StageRecord, key: str) -> bool:
    cached = wiring.ledger.cached_stage(key)
    if cached is None or not usable(cached, wiring.blobs):
        return False
    origin = f"{cached.run_id}/{cached.name}"
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_stage(
            stage,
            state=StageState.SUCCEEDED,
            reason="CacheHit",
            message=f"same code, parameters and inputs as {origin}",
            next_action="",
            cache_key=key,
            cached_from=origin,
            outputs=cached.outputs,
            metrics=cached.metrics,
            finished_at=wiring.clock.now(),
        )
    return True


def _twin(wiring: Wiring, stage: StageRecord, key: str) -> str | None:
    """A stage elsewhere that computes the same right now, in a run that somebody is driving."""
    now = wiring.clock.now()
    for run in wiring.ledger.runs(state="running"):
        if run.id == stage.run_id or (run.lease_expires or 0.0) < now:
            continue
        for other in wiring.ledger.stages(run.id):
            if other.cache_key == key and other.state == StageState.RUNNING:
                return f"{run.id}/{other.name}"
    return None


def _wait(wiring: Wiring, stage: StageRecord, reason: str, message: str, key: str) -> None:
    if (stage.reason, stage.message) == (reason, message):
        return
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_stage(stage, reason=reason, message=message, next_action="none needed", cache_key=key)


def _plan_attempt(wiring: Wiring, manifest: Manifest, stage: StageRecord, key: str, spent: budgets.Spending) -> None:
    """Commit the intent: an attempt with a deterministic external name. Launching it is the next tick's work."""
    earlier = wiring.ledger.attempts(stage.run_id, stage.name)
    number = len(earlier) + 1
    resume, inherited = _checkpoint(wiring, earlier)
    name = f"{stage.run_id}-{stage.name}-{number}"
    directory = wiring.attempt_dir(stage.run_id, stage.name, number)
    plan, now = manifest.stage(stage.name), wiring.clock.now()
    order = JobOrder(
        name=name,
        kind=plan.kind,
        seed=manifest.seed,
        params=plan.params,
        inputs=bound_inputs(stage),
        store_url=wiring.blobs.url,
        cache_dir=str(wiring.root / "cache"),
        resume=resume,
        tokens_inherited=inherited,
        token_allowance=budgets.token_allowance(manifest, spent, inherited),
        deadline=budgets.deadline(manifest, spent, now),
    )
    AttemptFolder(directory).write_order(order)
    attempt = AttemptRecord(
        run_id=stage.run_id,
        stage=stage.name,
        number=number,
        name=name,
        folder=directory.relative_to(wiring.root).as_posix(),
        state=AttemptState.PLANNED,
        executor=wiring.executor.name,
        resume=resume,
        reason="Planned",
        created_at=now,
    )
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.insert_attempt(attempt)
        transaction.update_stage(
            stage,
            state=StageState.RUNNING,
            reason="Running",
            message=f"attempt {number}" + (" resumes from a checkpoint" if resume else ""),
            next_action="",
            cache_key=key,
            started_at=stage.started_at or now,
        )


def _checkpoint(wiring: Wiring, earlier: Sequence[AttemptRecord]) -> tuple[str | None, int]:
    """The newest committed checkpoint of the stage's attempts (published) and the tokens counted in it."""
    for attempt in reversed(earlier):
        latest = wiring.folder(attempt).latest_checkpoint()
        if latest is not None:
            return put_tree(wiring.blobs, latest.path), latest.tokens
    return None, 0
