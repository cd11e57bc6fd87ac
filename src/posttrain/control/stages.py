"""Carry out the effects of a decision, and move a stage from waiting to running.

`act` has one function for each effect; each function is a compare-and-set on the rows on which the effect was decided.
A stage starts by binding its inputs, querying the stage cache, and planning an attempt.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from posttrain.control import attempts, budgets, jobs as environments
from posttrain.control.decide import View, hold_back, not_launched
from posttrain.control.effects import (
    AskToCheckpoint,
    AskToStop,
    Bind,
    Collect,
    Effect,
    End,
    EndWait,
    Judge,
    KeepWatch,
    Kill,
    Launch,
    MoveRun,
    RecordLaunch,
    Release,
    Say,
    Start,
    StopStage,
    TryAgain,
)
from posttrain.control.jobs import Jobs
from posttrain.control.launch import (
    cache_key,
    free_slots,
    launch_attempt,
    plan_attempt,
    record_launch,
    say,
    taken_slots,
    tokens_taken_over,
    usable,
    waits_for_devices,
)
from posttrain.control.verdicts import judge_stage, release_stage
from posttrain.domain.errors import FailureClass, InputError, IntegrityError
from posttrain.domain.jobs import Failure, InputBlob, JobResult
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import Reason, RunState, StageState, is_final
from posttrain.domain.manifest import Manifest, names_of
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import StageRecord
from posttrain.domain.waits import wait_of
from posttrain.execution.ports import called, present_code
from posttrain.store.ledger import Ledger, Stores


def bind_pending(
    stores: Stores, manifest: Manifest, stage: StageRecord, stages: Mapping[str, StageRecord]
) -> StageRecord:
    """Resolve the inputs of a pending stage whose upstream stages are done; make the stage ready, or skip it."""
    plan = manifest.stage(stage.name)
    inputs: dict[str, InputBlob] = {}
    for slot, ref in plan.inputs.items():
        if ref.source == "asset" and ref.digest is not None:
            inputs[slot] = InputBlob(ref.digest, ref.form, ref.name, ref.meta)
        elif ref.source == "stage":
            output = stages[ref.name].outputs.get(ref.output or "")
            if output:  # the output of a skipped stage is empty: the gate has no baseline
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
        message="inputs are available",
        next_action="",
        inputs=bound,
        taken=taken,
        **begun,
    )


def _channel(ledger: Ledger, manifest: Manifest, stages: Mapping[str, StageRecord], channel: str) -> InputBlob | None:
    """Return a channel's model, read once per run, because the gate must compare with the measured baseline."""
    for plan in manifest.stages:
        slot = next((s for s, r in plan.inputs.items() if r.source == "channel" and r.name == channel), None)
        other = stages[plan.name]
        if slot is None or other.state == StageState.PENDING:
            continue
        return InputBlob(**other.inputs[slot]) if slot in other.inputs else None
    live = ledger.channel(channel)
    return InputBlob(live.model_digest, "tree", f"channel:{channel}@{live.sequence}") if live else None


def bound_inputs(stage: StageRecord) -> dict[str, InputBlob]:
    """Return the inputs of a stage that is past pending."""
    return {slot: InputBlob(**blob) for slot, blob in stage.inputs.items()}


def start_ready(stores: Stores, jobs: Jobs, view: View, stage: StageRecord) -> None:
    """Reuse a cached result, or plan the next attempt of a ready stage if slots and budget allow it."""
    manifest = view.manifest
    key = cache_key(manifest, manifest.stage(stage.name), bound_inputs(stage))
    cached, same = stores.ledger.computed(key)
    if cached and _reuse(stores, stage, key, cached):
        return
    if cached:  # the outputs of the cached stage are missing or damaged
        same = stores.ledger.stages_by_key(key)
    twin = _twin(stores, stage, same)
    if twin:
        said = f"{twin} computes the same result, which will be reused"
        say(stores, stage, Reason.WAITING_FOR_IDENTICAL_STAGE, said, cache_key=key)
        return
    # read again: the view is older in a thread, and later spending counts
    attempts = stores.ledger.attempts(stage.run_id) if budgets.limited(manifest) else []
    spent = budgets.spending(view.stages, attempts, taken_over=tokens_taken_over(stores, jobs.folders, attempts))
    # the planning transaction checks slots; they are checked before it too if the stage waits or needs a checkpoint
    before = stage.reason == Reason.WAITING_FOR_SLOT or bool(same) or bool(view.tries(stage.name))
    driven, unwatched = taken_slots(stores, jobs) if before else (0, None)
    plan = manifest.stage(stage.name)
    held = hold_back(manifest, stage, attempts, spent, free=free_slots(jobs, plan, driven + (unwatched or 0)))
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
    """Return how many other stages of a run with a budget could start now and share the rest of the budget."""
    manifest = view.manifest
    if not budgets.limited(manifest):
        return 0
    ready = [one for one in view.stages if one.state == StageState.READY and kind_of(one.kind).driver is Driver.JOB]
    keys = {cache_key(manifest, manifest.stage(one.name), bound_inputs(one)) for one in ready} - {key}
    return sum(stores.ledger.cached_stage(one) is None for one in keys)


def _code_changed(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord) -> bool:
    """Fail the stage if the sources differ from those that the manifest records; return whether they differ."""
    now = {name: present_code(name, jobs.trainers) for name in names_of(manifest.stage(stage.name), manifest.code)}
    name = next((name for name, present in now.items() if present != manifest.code[name]), None)
    if name is None:
        return False
    locked, present = manifest.code[name], now[name]
    message = f"the code of {called(name)} must be {locked[:19]}… as in the manifest, got {present[:19]}…"
    stores.update_stage(
        stage,
        state=StageState.FAILED,
        reason=Reason.CODE_CHANGED,
        message=message,
        next_action=(
            f"restore it, then posttrain retry {stage.run_id}; or submit the run again, which locks the current code"
        ),
    )
    return True


def _environment_changed(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord) -> bool:
    """Fail the stage if the libraries changed since the run started; return whether they changed."""
    image = manifest.image_of(manifest.stage(stage.name))
    here = not image and jobs.executor_for(manifest.stage(stage.name)).attests  # an image pins its own
    message = environments.differs(stores, jobs, manifest, stage.run_id) if here else ""
    if not message:
        return False
    stores.update_stage(
        stage,
        state=StageState.FAILED,
        reason=Reason.ENVIRONMENT_CHANGED,
        message=message,
        next_action=(
            f"posttrain retry {stage.run_id} accepts the current environment; or restore it; if Posttrain's own code "
            "changed, submit the run again, which locks the current code"
        ),
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
    """Return another stage that is computing the same result, in this run or in a run with a live driver."""
    now = stores.clock.now()
    for other in same:
        if other.state != StageState.RUNNING or (other.run_id, other.name) == (stage.run_id, stage.name):
            continue
        run = stores.ledger.run(other.run_id)
        if run.state == RunState.RUNNING and (run.id == stage.run_id or (run.lease_expires or 0.0) >= now):
            return f"{run.id}/{other.name}"
    return None


def act(stores: Stores, jobs: Jobs, view: View, effect: Effect) -> None:
    """Carry out one effect.

    Args:
        view: the rows on which the effect was decided.

    Raises:
        ConflictError: another process changed a row first; decide again.
    """
    stages = {stage.name: stage for stage in view.stages}
    match effect:
        case MoveRun():
            _move_run(stores, effect)
        case StopStage(stage):
            stores.update_stage(
                stage,
                state=StageState.STOPPED,
                reason=Reason.STOPPED,
                message="stopped by a person",
                next_action=f"posttrain retry {stage.run_id} resumes it",
            )
        case Bind(stage):
            bind_pending(stores, view.manifest, stage, stages)
        case Start(stage):
            start_ready(stores, jobs, view, stage)
        case Judge(stage):
            with stores.blobs.holding():
                judge_stage(stores, view.manifest, stage)
        case Release(stage):
            release_stage(stores, view.run, view.manifest, stage, stages)
        case Launch():
            _launch(stores, jobs, view, effect)
        case RecordLaunch(stage, attempt, handle):
            record_launch(stores, attempt, handle, stage)
        case EndWait(stage, state, reason, message, action):
            stores.update_stage(
                stage,
                state=state,
                reason=reason,
                message=message,
                next_action=action,
                finished_at=stores.clock.now(),
            )
        case Say(stage, reason, message, action):
            say(stores, stage, reason, message, action)
        case AskToStop():
            _ask_to_stop(stores, jobs, effect)
        case KeepWatch():
            _keep_watch(stores, effect)
        case AskToCheckpoint():
            _ask_to_checkpoint(stores, jobs, effect)
        case Kill(_, attempt):
            jobs.executor_of(attempt).kill(jobs.folders.job(attempt))
        case Collect():
            attempts.collect(stores, jobs, view.manifest, effect)
        case End():
            attempts.end(stores, jobs, view.manifest, effect)
        case TryAgain():
            attempts.try_again(stores, jobs, view.manifest, effect)


def _launch(stores: Stores, jobs: Jobs, view: View, effect: Launch) -> None:
    stage, attempt = effect.stage, effect.attempt
    try:
        failure = launch_attempt(
            stores, jobs, view, stage, attempt, jobs.trainer(view.manifest.stage(stage.name).trainer)
        )
    except (InputError, IntegrityError) as error:  # the folder cannot be read, and a retry would not repair it
        kind = FailureClass.BAD_INPUT if isinstance(error, InputError) else FailureClass.BUG
        failure = Failure(kind, f"the job cannot be launched: {error}", "collect")
    if failure and not failure.kind.retried:  # the job was never submitted, and a retry would not help
        act(stores, jobs, view, End(stage, attempt, JobResult("failed", failure=failure)))
    elif failure:
        act(stores, jobs, view, not_launched(view, stage, attempt, failure))


def _ask_to_stop(stores: Stores, jobs: Jobs, effect: AskToStop) -> None:
    with suppress(IntegrityError):  # the folder is damaged: the job cannot read the order, and is killed later
        jobs.folders.of(effect.attempt).request_stop()
    reason = effect.attempt.reason if effect.attempt.reason == Reason.ASSUMED_DEAD else Reason.STOP_REQUESTED
    stores.update_attempt(effect.attempt, reason=reason, stop_requested_at=stores.clock.now(), stop_cause=effect.cause)


def _keep_watch(stores: Stores, effect: KeepWatch) -> None:
    stage, attempt = effect.stage, effect.attempt
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.watch(effect.watch)
        if effect.goes_on:
            transaction.update_attempt(attempt, reason=Reason.LAUNCHED, message="")
            transaction.update_stage(stage, reason=Reason.RUNNING, message=f"attempt {attempt.number}", next_action="")
        if effect.said:
            transaction.update_stage(stage, reason=Reason.STALLED, message=effect.said, next_action="none needed")


def _ask_to_checkpoint(stores: Stores, jobs: Jobs, effect: AskToCheckpoint) -> None:
    """Request a checkpoint, then record this. A crash in between repeats the request, but not the checkpoint."""
    with suppress(IntegrityError):  # the folder is damaged: the job cannot read the order
        jobs.folders.of(effect.attempt).request_checkpoint()
    crashpoint("stall.after_signal")
    action = f"posttrain logs {effect.stage.run_id} {effect.stage.name}"
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.watch(effect.watch)
        transaction.update_attempt(effect.attempt, reason=Reason.STALLED, message=effect.message)
        transaction.update_stage(effect.stage, reason=Reason.STALLED, message=effect.message, next_action=action)
    crashpoint("stall.after_ask")


def _move_run(stores: Stores, effect: MoveRun) -> None:
    columns: dict[str, Any] = {}
    if effect.run.state == RunState.PENDING:
        columns["started_at"] = stores.clock.now()
    if is_final("run", effect.state):
        columns["finished_at"] = stores.clock.now()
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_run(effect.run.id)
        for stage in effect.not_reached:
            assert effect.culprit is not None
            said = f"not reached: stage {effect.culprit.name} {effect.culprit.state}"
            transaction.update_stage(stage, reason=Reason.NOT_REACHED, message=said, next_action=effect.next_action)
        transaction.update_run(
            effect.run,
            state=effect.state,
            reason=effect.reason,
            message=effect.message,
            next_action=effect.next_action,
            **columns,
        )
