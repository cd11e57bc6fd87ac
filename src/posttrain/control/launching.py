"""From a ready stage to a running job: commit the intent, tell the job what to do, launch it exactly once."""

from __future__ import annotations

from posttrain.control import budgets, environments
from posttrain.control.requests import job_of, request_of
from posttrain.control.resuming import Found, find_checkpoint, origin_of, tokens_in, tokens_taken_over
from posttrain.control.stalls import phase_seconds, stall_after
from posttrain.control.wiring import Wiring
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import CapacityError, FailureClass, InfrastructureError, WorkspaceError
from posttrain.domain.jobs import Failure, InputBlob, JobOrder, Observation, Unknown
from posttrain.domain.lifecycle import AttemptState, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.execution.ports import Trainer


def plan_attempt(wiring: Wiring, stage: StageRecord, key: str) -> None:
    """Commit the intent: an attempt with a deterministic external name. Launching it is the next tick's work."""
    earlier = wiring.ledger.attempts(stage.run_id, stage.name)
    number = len(earlier) + 1
    found = find_checkpoint(wiring, stage, key, earlier)
    directory = wiring.attempt_dir(stage.run_id, stage.name, number)
    now = wiring.clock.now()
    attempt = AttemptRecord(
        run_id=stage.run_id,
        stage=stage.name,
        number=number,
        name=f"{stage.run_id}-{stage.name}-{number}",
        folder=directory.relative_to(wiring.root).as_posix(),
        state=AttemptState.PLANNED,
        executor=wiring.executor.name,
        resume=found.digest if found else None,
        reason=Reason.PLANNED,
        created_at=now,
    )
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.insert_attempt(attempt)
        transaction.update_stage(
            stage,
            state=StageState.RUNNING,
            reason=Reason.RUNNING,
            message=f"attempt {number}" + (_resumes(stage, found) if found else ""),
            next_action="",
            cache_key=key,
            started_at=stage.started_at or now,
        )


def launch_attempt(
    wiring: Wiring, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord, trainer: Trainer
) -> Failure | None:
    """Submit an attempt's job, which the executor is seen not to have, and record its handle.

    Returns:
        Why it could not be started; None when it was, or waits.
    """
    folder = wiring.folder(attempt)
    if waits_for_devices(wiring, manifest, stage, trainer):
        return None
    # whoever wrote an order before may have died a day ago, when the workspace lay elsewhere or trusted its rewards
    order = _order(wiring, manifest, stage, attempt)
    if not wiring.root.is_dir():  # nothing is made where a workspace was
        raise WorkspaceError(f"{wiring.root}: is gone; a workspace that was moved is driven where it is now")
    folder.write_order(order)
    request = request_of(wiring, attempt, order, trainer)
    crashpoint("attempt.after_intent")
    try:
        answer = wiring.executor.submit(request)
    except CapacityError as error:  # somebody else was quicker
        say(wiring, stage, Reason.WAITING_FOR_DEVICES, str(error))
        return None
    except InfrastructureError as error:
        return Failure(FailureClass.INFRASTRUCTURE, str(error), "launch")
    if isinstance(answer, Unknown):
        say(wiring, stage, Reason.SUBMISSION_UNKNOWN, f"whether the job was submitted is not known ({answer.detail})")
        return None
    crashpoint("attempt.after_launch")
    record_launch(wiring, attempt, answer.handle, stage)
    return None


def look(wiring: Wiring, attempt: AttemptRecord) -> Observation:
    """One look at an attempt's job.

    Raises:
        InfrastructureError: nobody answers, or it was submitted to another executor, which this one knows nothing of.
    """
    if attempt.executor != wiring.executor.name:
        raise InfrastructureError(
            f"{attempt.name} was submitted to executor {attempt.executor}, this process has {wiring.executor.name}; "
            f"drive its run with {attempt.executor}"
        )
    return wiring.executor.observe([job_of(wiring, attempt)])[0]


def waits_for_devices(wiring: Wiring, manifest: Manifest, stage: StageRecord, trainer: Trainer) -> bool:
    """Whether devices that a job of the stage needs are taken; then the stage says by whom.

    Raises:
        InputError: the machine has fewer than it needs.
        InfrastructureError: the executor cannot tell.
    """
    plan = manifest.stage(stage.name)
    wanted = trainer.devices(plan.kind, plan.params)
    lack = wiring.executor.capacity().lack(wanted) if wanted else ""
    if lack:
        say(wiring, stage, Reason.WAITING_FOR_DEVICES, lack)
    return bool(lack)


def say(wiring: Wiring, stage: StageRecord, reason: Reason, message: str, action: str = "none needed") -> None:
    """Write down what a stage waits for, once."""
    if (stage.reason, stage.message) != (reason, message):
        with wiring.ledger.transaction(wiring.actor) as transaction:
            transaction.update_stage(stage, reason=reason, message=message, next_action=action)


def record_launch(wiring: Wiring, attempt: AttemptRecord, handle: str, stage: StageRecord) -> None:
    """Record that the executor has the job."""
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_attempt(
            attempt,
            state=AttemptState.LAUNCHED,
            reason=Reason.LAUNCHED,
            handle=handle,
            launched_at=wiring.clock.now(),
        )
        if stage.reason in (Reason.WAITING_FOR_DEVICES, Reason.SUBMISSION_UNKNOWN):
            transaction.update_stage(stage, reason=Reason.RUNNING, message=f"attempt {attempt.number}", next_action="")
    crashpoint("attempt.after_handle")


def _order(wiring: Wiring, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord) -> JobOrder:
    attempts = wiring.ledger.attempts(stage.run_id)
    inherited = tokens_in(wiring, attempt.resume)
    origin, step = origin_of(wiring, stage, attempt)
    taken_over = tokens_taken_over(wiring, attempts) if budgets.one_at_a_time(manifest) else 0
    spent = budgets.spending(wiring.ledger.stages(stage.run_id), attempts, taken_over=taken_over)
    plan = manifest.stage(stage.name)
    return JobOrder(
        name=attempt.name,
        kind=plan.kind,
        seed=manifest.seed,
        params=plan.params,
        inputs={slot: InputBlob(**blob) for slot, blob in stage.inputs.items()},
        store_url=wiring.blobs.url,
        cache_dir=str(wiring.root / "cache"),
        resume=attempt.resume,
        resumed_from=origin,
        resumed_step=step,
        tokens_inherited=inherited,
        token_allowance=budgets.token_allowance(manifest, spent, inherited),
        seconds_allowance=budgets.seconds_allowance(manifest, spent),
        tokens_declared=manifest.budget.tokens,
        seconds_declared=manifest.budget.wall_clock,
        environment=environments.ordered(wiring, stage.run_id),
        trust_rewards=wiring.trust_rewards,
        epoch=attempt.number,
        channel=wiring.channel(attempt),
        phase_seconds=phase_seconds(stall_after(manifest, stage.name)),
    )


def _resumes(stage: StageRecord, found: Found) -> str:
    own = found.origin == f"{stage.run_id}/{stage.name}"
    return f" resumes from the checkpoint at step {found.step}" + ("" if own else f" of {found.origin}")
