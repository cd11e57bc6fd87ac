"""Does what was decided about a run. One function for each order; each compares and sets the rows it was decided on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from posttrain.control import attempts
from posttrain.control.decide import View, not_launched
from posttrain.control.jobs import Jobs, job_of
from posttrain.control.judging import judge_stage, release_stage
from posttrain.control.launching import launch_attempt, record_launch, say
from posttrain.control.orders import (
    AskToCheckpoint,
    AskToStop,
    Bind,
    Collect,
    End,
    EndWait,
    Judge,
    KeepWatch,
    Kill,
    Launch,
    MoveRun,
    Order,
    RecordLaunch,
    Release,
    Say,
    Start,
    StopStage,
    TryAgain,
)
from posttrain.control.stages import bind_pending, start_ready
from posttrain.control.stores import Stores
from posttrain.domain.errors import FailureClass, InputError, IntegrityError
from posttrain.domain.jobs import Failure, JobResult, Signal
from posttrain.domain.lifecycle import Reason, RunState, StageState, is_final
from posttrain.domain.ports import crashpoint


def act(stores: Stores, jobs: Jobs, view: View, order: Order) -> None:
    """Carry out one order.

    Args:
        view: the rows that it was decided on.

    Raises:
        ConflictError: somebody moved first; decide again.
    """
    stages = {stage.name: stage for stage in view.stages}
    match order:
        case MoveRun():
            _move_run(stores, order)
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
            _launch(stores, jobs, view, order)
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
            _ask_to_stop(stores, jobs, order)
        case KeepWatch():
            _keep_watch(stores, order)
        case AskToCheckpoint():
            _ask_to_checkpoint(stores, jobs, order)
        case Kill(_, attempt):
            jobs.executor.kill(job_of(jobs.folders, attempt))
        case Collect():
            attempts.collect(stores, jobs, view.manifest, order)
        case End():
            attempts.end(stores, jobs, view.manifest, order)
        case TryAgain():
            attempts.try_again(stores, jobs, view.manifest, order)


def _launch(stores: Stores, jobs: Jobs, view: View, order: Launch) -> None:
    stage, attempt = order.stage, order.attempt
    try:
        failure = launch_attempt(
            stores, jobs, view, stage, attempt, jobs.trainer(view.manifest.stage(stage.name).trainer)
        )
    except (InputError, IntegrityError) as error:  # what is in its folder cannot be read: no retry would mend that
        failure = Failure(FailureClass.BUG, f"the job cannot be launched: {error}", "collect")
    if failure and not failure.kind.retried:  # it was never submitted, and another try would not change that
        act(stores, jobs, view, End(stage, attempt, JobResult("failed", failure=failure)))
    elif failure:
        act(stores, jobs, view, not_launched(view, stage, attempt, failure))


def _ask_to_stop(stores: Stores, jobs: Jobs, order: AskToStop) -> None:
    with suppress(IntegrityError):  # its folder is not what it was: it hears nothing, and is ended after the grace
        jobs.executor.signal(job_of(jobs.folders, order.attempt), Signal.STOP)
    reason = order.attempt.reason if order.attempt.reason == Reason.ASSUMED_DEAD else Reason.STOP_REQUESTED
    stores.update_attempt(order.attempt, reason=reason, stop_requested_at=stores.clock.now(), stop_cause=order.cause)


def _keep_watch(stores: Stores, order: KeepWatch) -> None:
    stage, attempt = order.stage, order.attempt
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.watch(order.watch)
        if order.goes_on:
            transaction.update_attempt(attempt, reason=Reason.LAUNCHED, message="")
            transaction.update_stage(stage, reason=Reason.RUNNING, message=f"attempt {attempt.number}", next_action="")
        if order.said:
            transaction.update_stage(stage, reason=Reason.STALLED, message=order.said, next_action="none needed")


def _ask_to_checkpoint(stores: Stores, jobs: Jobs, order: AskToCheckpoint) -> None:
    """A driver that dies between the two leaves a job that is asked twice: it writes the checkpoint of a step once."""
    with suppress(IntegrityError):  # its folder is not what it was: it hears nothing
        jobs.executor.signal(job_of(jobs.folders, order.attempt), Signal.CHECKPOINT)
    crashpoint("stall.after_signal")
    action = f"posttrain logs {order.stage.run_id} {order.stage.name}"
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.watch(order.watch)
        transaction.update_attempt(order.attempt, reason=Reason.STALLED, message=order.message)
        transaction.update_stage(order.stage, reason=Reason.STALLED, message=order.message, next_action=action)
    crashpoint("stall.after_ask")


def _move_run(stores: Stores, order: MoveRun) -> None:
    columns: dict[str, Any] = {}
    if order.run.state == RunState.PENDING:
        columns["started_at"] = stores.clock.now()
    if is_final("run", order.state):
        columns["finished_at"] = stores.clock.now()
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_run(order.run.id)
        for stage in order.not_reached:
            assert order.culprit is not None
            said = f"not reached: stage {order.culprit.name} {order.culprit.state}"
            transaction.update_stage(stage, reason=Reason.NOT_REACHED, message=said, next_action=order.next_action)
        transaction.update_run(
            order.run,
            state=order.state,
            reason=order.reason,
            message=order.message,
            next_action=order.next_action,
            **columns,
        )
