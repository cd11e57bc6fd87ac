"""From a ready stage to a running job: commit the intent, tell the job what to do, launch it exactly once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.control import budgets, environments
from posttrain.control.decide import hold_back
from posttrain.control.jobs import Jobs
from posttrain.control.requests import job_of, request_of
from posttrain.control.resuming import Found, find_checkpoint, origin_of, tokens_inherited, tokens_taken_over
from posttrain.control.stalls import phase_seconds, stall_after
from posttrain.control.stores import Stores
from posttrain.data.external import external_versions, local_copy
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import (
    CapacityError,
    ConflictError,
    FailureClass,
    InfrastructureError,
    InputError,
    IntegrityError,
    WorkspaceError,
)
from posttrain.domain.jobs import Failure, InputBlob, JobOrder, Observation, Unknown
from posttrain.domain.lifecycle import AttemptState, RunState, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.execution.ports import Trainer
from posttrain.store.access import PRIVATE_CACHE
from posttrain.store.atomic import make_folder
from posttrain.store.attempts import AttemptFolder
from posttrain.store.claims import unclaimed


def plan_attempt(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, key: str, rivals: int = 0) -> None:
    """Commit the intent: an attempt with a deterministic external name. Launching it is the next tick's work.

    Raises:
        ConflictError: another driver ended the run, or started what this stage has to wait for, since the rows were
            read: two attempts never reserve the same part of a budget.
    """
    earlier = stores.ledger.attempts(stage.run_id, stage.name)
    number = len(earlier) + 1
    found = find_checkpoint(stores, jobs.folders, stage, key, earlier)
    directory = jobs.folders.path(stage.run_id, stage.name, number)
    now = stores.clock.now()
    attempt = AttemptRecord(
        run_id=stage.run_id,
        stage=stage.name,
        number=number,
        name=f"{stage.run_id}-{stage.name}-{number}",
        folder=directory.relative_to(jobs.folders.root).as_posix(),
        state=AttemptState.PLANNED,
        executor=jobs.executor.name,
        resume=found.digest if found else None,
        channel=jobs.folders.channel_of(stage.run_id, stage.name, number),
        resumed_from=found.origin if found else None,
        resumed_step=found.step if found else None,
        resumed_tokens=found.tokens if found else None,
        reason=Reason.PLANNED,
        created_at=now,
        host=jobs.host,
    )
    _, unwatched = taken_slots(stores, jobs)
    taken_over = tokens_taken_over(stores, jobs.folders, [*stores.ledger.attempts(stage.run_id), attempt])
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_run(stage.run_id)
        state, attempts = transaction.snapshot.run(stage.run_id).state, transaction.snapshot.attempts(stage.run_id)
        spent = budgets.spending(transaction.snapshot.stages(stage.run_id), attempts, taken_over=taken_over)
        driven, _ = transaction.snapshot.occupying(jobs.host, now)
        free = jobs.slots - driven - unwatched
        held = hold_back(manifest, stage, attempts, spent, free=free, rivals=rivals)
        if isinstance(held, tuple) or state != RunState.RUNNING:
            why = held[1] if isinstance(held, tuple) else f"the run is {state}"
            raise ConflictError(f"{stage.run_id}/{stage.name}: is not started now: {why}")
        transaction.insert_attempt(replace(attempt, reserved_tokens=held.tokens, reserved_seconds=held.seconds))
        transaction.update_stage(
            stage,
            state=StageState.RUNNING,
            reason=Reason.RUNNING,
            message=f"attempt {number}" + (_resumes(stage, found) if found else _anew(number)),
            next_action="",
            cache_key=key,
            started_at=stage.started_at or now,
        )


def launch_attempt(
    stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord, trainer: Trainer
) -> Failure | None:
    """Submit an attempt's job, which the executor is seen not to have, and record its handle.

    Returns:
        Why it could not be started; None when it was, or waits.
    """
    folder = jobs.folders.of(attempt)
    if waits_for_devices(stores, jobs, manifest, stage, trainer):
        return None
    refused = _fetch_elsewhere(stores, stage, _cache(jobs, manifest, stage, attempt))
    if refused:
        return refused
    # whoever wrote an order before may have died a day ago, when the workspace lay elsewhere or trusted its rewards
    attempt = _settled(stores, jobs, attempt)
    order = _order(stores, jobs, manifest, stage, attempt)
    if not jobs.folders.root.is_dir():  # nothing is made where a workspace was
        raise WorkspaceError(f"{jobs.folders.root}: is gone; a workspace that was moved is driven where it is now")
    _lay_down(folder, order)
    if jobs.access is not None:
        jobs.access.give(attempt, folder.path, boxed=bool(order.image))
    request = request_of(jobs, attempt, order, trainer)
    crashpoint("attempt.after_intent")
    try:
        answer = jobs.executor.submit(request)
    except CapacityError as error:  # somebody else was quicker
        say(stores, stage, Reason.WAITING_FOR_DEVICES, str(error))
        return None
    except InfrastructureError as error:
        return Failure(FailureClass.INFRASTRUCTURE, str(error), "")  # which says nothing about the job
    if isinstance(answer, Unknown):
        say(stores, stage, Reason.SUBMISSION_UNKNOWN, f"whether the job was submitted is not known ({answer.detail})")
        return None
    crashpoint("attempt.after_launch")
    record_launch(stores, attempt, answer.handle, stage)
    return None


def look(jobs: Jobs, attempt: AttemptRecord) -> Observation:
    """One look at an attempt's job.

    Raises:
        InfrastructureError: nobody answers, or it was submitted to another executor, which this one knows nothing of.
    """
    if attempt.executor != jobs.executor.name:
        raise InfrastructureError(
            f"{attempt.name} was submitted to executor {attempt.executor}, this process has {jobs.executor.name}; "
            f"drive its run with {attempt.executor}"
        )
    return jobs.executor.observe([job_of(jobs.folders, attempt)])[0]


def taken_slots(stores: Stores, jobs: Jobs) -> tuple[int, int]:
    """Slots of this host that jobs of runs have which somebody drives, and those of runs that nobody drives.

    The latter count as long as their jobs live: nobody records their end.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    with stores.ledger.snapshot() as now:
        driven, left = now.occupying(jobs.host, stores.clock.now())
    found = jobs.executor.observe([job_of(jobs.folders, attempt) for attempt in left]) if left else []
    return driven, sum(seen.live for seen in found)


def waits_for_devices(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, trainer: Trainer) -> bool:
    """Whether devices that a job of the stage needs are taken; then the stage says by whom.

    Raises:
        InputError: the machine has fewer than it needs.
        InfrastructureError: the executor cannot tell.
    """
    plan = manifest.stage(stage.name)
    wanted = trainer.devices(plan.kind, plan.params)
    lack = jobs.executor.capacity().lack(wanted) if wanted else ""
    if lack:
        say(stores, stage, Reason.WAITING_FOR_DEVICES, lack)
    return bool(lack)


def say(stores: Stores, stage: StageRecord, reason: Reason, message: str, action: str = "none needed") -> None:
    """Write down what a stage waits for, once."""
    if (stage.reason, stage.message) != (reason, message):
        with stores.ledger.transaction(stores.actor) as transaction:
            transaction.update_stage(stage, reason=reason, message=message, next_action=action)


def record_launch(stores: Stores, attempt: AttemptRecord, handle: str, stage: StageRecord) -> None:
    """Record that the executor has the job."""
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.update_attempt(
            attempt,
            state=AttemptState.LAUNCHED,
            reason=Reason.LAUNCHED,
            handle=handle,
            launched_at=stores.clock.now(),
        )
        if stage.reason in (Reason.WAITING_FOR_DEVICES, Reason.SUBMISSION_UNKNOWN):
            transaction.update_stage(stage, reason=Reason.RUNNING, message=f"attempt {attempt.number}", next_action="")
    crashpoint("attempt.after_handle")


def _order(stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord) -> JobOrder:
    attempts = stores.ledger.attempts(stage.run_id)
    inherited = tokens_inherited(stores.blobs, attempt)
    origin, step = origin_of(stores, jobs.folders, stage, attempt)
    taken_over = tokens_taken_over(stores, jobs.folders, attempts) if budgets.limited(manifest) else 0
    spent = budgets.spending(stores.ledger.stages(stage.run_id), attempts, taken_over=taken_over)
    share = budgets.share_of(manifest, attempt, spent)
    plan = manifest.stage(stage.name)
    image = manifest.image_of(plan)
    return JobOrder(
        name=attempt.name,
        kind=plan.kind,
        seed=manifest.seed,
        params=plan.params,
        inputs={slot: InputBlob(**blob) for slot, blob in stage.inputs.items()},
        store_url="" if jobs.access else stores.blobs.url,
        cache_dir=str(_cache(jobs, manifest, stage, attempt)),
        resume=attempt.resume,
        resumed_from=origin,
        resumed_step=step,
        tokens_inherited=inherited,
        token_allowance=None if share.tokens is None else share.tokens + inherited,
        seconds_allowance=share.seconds,
        tokens_declared=manifest.budget.tokens,
        seconds_declared=manifest.budget.wall_clock,
        environment="" if image else environments.ordered(jobs, stage.run_id),
        trust_rewards=jobs.trust_rewards,
        epoch=attempt.number,
        channel=jobs.folders.channel(attempt),
        phase_seconds=phase_seconds(stall_after(manifest, stage.name)),
        served=jobs.access is not None,
        image=image or "",
    )


def _settled(stores: Stores, jobs: Jobs, attempt: AttemptRecord) -> AttemptRecord:
    """The attempt with its channel where this workspace has them: a copy has a place of its own for what the original
    planned, and a release before wrote none down.
    """
    url = jobs.folders.channel_of(attempt.run_id, attempt.stage, attempt.number)
    if url == attempt.channel:
        return attempt
    with stores.ledger.transaction(stores.actor) as transaction:
        return transaction.update_attempt(attempt, channel=url)


def _lay_down(folder: AttemptFolder, order: JobOrder) -> None:
    if not order.image:
        folder.write_order(order)
        return
    make_folder(folder.path)
    with unclaimed(folder.path) as free:  # a container writes into a job.json that replaced the one it was shown
        if free:
            folder.write_order(order)


def _cache(jobs: Jobs, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord) -> Path:
    """Where a job keeps what it fetched: what an image's programs write there, no other job reads."""
    boxed = manifest.image_of(manifest.stage(stage.name))
    return jobs.folders.of(attempt).path / PRIVATE_CACHE if boxed else jobs.folders.root / "cache"


def _fetch_elsewhere(stores: Stores, stage: StageRecord, cache: Path) -> Failure | None:
    """Put what a job reads and what lies elsewhere where jobs look first: a job gets no key to anybody's store.

    Returns:
        Why that cannot be done; None when it is.
    """
    for blob in stage.inputs.values():
        versions = external_versions(stores.ledger, blob["digest"], blob.get("name", ""))
        try:
            if versions and not stores.blobs.has(blob["digest"]):
                local_copy(versions, cache)
        except (InfrastructureError, InputError, IntegrityError) as error:
            passes = isinstance(error, InfrastructureError)
            return Failure(FailureClass.INFRASTRUCTURE if passes else FailureClass.BAD_INPUT, str(error), "launch")
    return None


def _anew(number: int) -> str:
    return " begins anew: no checkpoint was left" if number > 1 else ""


def _resumes(stage: StageRecord, found: Found) -> str:
    own = found.origin == f"{stage.run_id}/{stage.name}"
    return f" resumes from the checkpoint at step {found.step}" + ("" if own else f" of {found.origin}")
