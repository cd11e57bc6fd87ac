"""Ends attempts, observes the jobs of a run, and finds orphaned jobs.

When an attempt ends, the collector publishes the job's outputs, bills the job's cost, and records the next state in the
rows. The attempt's `start` object ensures that at most one job of an attempt computes, and that no job of an ended
attempt computes.

To observe a run, one request to the executor observes all jobs of the run; then the result of each job is read.

Orphaned jobs are jobs that no live attempt of the ledger owns.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from posttrain.control import budgets
from posttrain.control.decide import JobStatus, View, uncollectable
from posttrain.control.effects import Collect, End, TryAgain
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.launch import look, tokens_inherited, tokens_taken_over
from posttrain.control.lineage import trained_models
from posttrain.domain.errors import (
    FailureClass,
    InputError,
    IntegrityError,
    NotFoundError,
    PosttrainError,
    trace_in,
)
from posttrain.domain.jobs import ANOTHER_RUNS, MOST_NUMBER, Failure, JobResult, JobState, Observation, Progress
from posttrain.domain.jobspec import RUN, STAGE, WORKSPACE, JobRef, Listed
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import AttemptState, Reason, StageState, StopCause, is_final
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.domain.sinks import BUDGET_WARNED
from posttrain.execution import processes
from posttrain.execution.ports import Executor
from posttrain.store.attempts import AttemptFolder
from posttrain.store.ledger import Ledger, Stores
from posttrain.store.mailbox import EVENTS, ControlKind, Start
from posttrain.store.trees import put_extended, stored_sizes


def give_up(folders: AttemptFolders, attempt: AttemptRecord, why: str, *, begun: bool = True) -> bool:
    """Ensure, before an attempt ends, that no late job of the attempt starts (e.g. by a suspended launcher).

    Args:
        begun: whether the attempt ends even if a job has started.

    Returns:
        True: no job of the attempt computes. False: a job had already started.

    Raises:
        WorkspaceError: the attempt folder cannot be written; the attempt must then not end yet.
    """
    try:
        held = folders.of(attempt).mailbox.bury(attempt.number, why, begun=begun and folders.remote(attempt.executor))
    except IntegrityError:  # a job that cannot read the start object does not start either
        return True
    return held is None or not _may_live(held)


def another_runs(stores: Stores, folders: AttemptFolders, attempt: AttemptRecord, seen: Observation) -> bool:
    """Return whether the executor's job ended because another job of this attempt, which may be alive, computes.

    The result of that other job counts. The other job has ended if its process no longer exists, which cannot be
    observed if the process is on another machine. A job that the executor restarted found `start` claimed by its own
    earlier incarnation, which has ended. An executor on other machines reports a name as ended after all jobs with
    that name have ended.
    """
    ended = seen.state is JobState.EXITED and seen.exit_code == ANOTHER_RUNS and not seen.incarnation
    if not ended or attempt.reason == Reason.ASSUMED_DEAD or folders.remote(attempt.executor):
        return False
    folder = folders.of(attempt)
    held = folder.mailbox.started()
    if held is None or folder.mailbox.answered() is not None or not _may_live(held):
        return False
    if attempt.reason != Reason.ANOTHER_RUNS:
        message = f"process {held.pid} of {held.host} began this attempt before the launched job; its result counts"
        stores.update_attempt(attempt, reason=Reason.ANOTHER_RUNS, message=message)
    return True


def assume_dead(stores: Stores, jobs: Jobs, run_id: str, stage: str) -> AttemptRecord:
    """Record a person's statement that a stage's invisible job is dead, for example because its host is lost.

    Results that the job may still compute are never published.

    Raises:
        NotFoundError: the run has no such stage.
        InputError: the stage does not wait for an invisible job, or the job is alive.
        ConflictError: another process changed the attempt first.
    """
    row = next((one for one in stores.ledger.stages(run_id) if one.name == stage), None)
    if row is None:
        raise NotFoundError(f"run {run_id} has no stage {stage!r}; posttrain get {run_id} shows its stages")
    attempt = next(iter(reversed(stores.ledger.attempts(run_id, stage))), None)
    message = f"{stores.actor} reported its job as dead"
    if attempt is not None and not is_final("attempt", attempt.state) and jobs.elsewhere(attempt):
        return _with_its_host(stores, jobs, attempt, message)
    unseen = row.reason in (Reason.ANOTHER_RUNS, Reason.JOB_NOT_VISIBLE)
    if attempt is None or attempt.state != AttemptState.LAUNCHED or not unseen:
        raise InputError(
            f"{run_id}/{stage}: --assume-dead requires a stage whose job is not visible, but the stage is {row.state} "
            f"({row.reason}); see posttrain why {run_id}"
        )
    held = None
    with suppress(IntegrityError):  # an unreadable start object proves nothing
        held = jobs.folders.of(attempt).mailbox.started()
    if held is not None and held.host == socket.gethostname() and _may_live(held):
        raise InputError(f"{run_id}/{stage}: process {held.pid} of this host is alive; posttrain stop {run_id} ends it")
    return stores.update_attempt(attempt, reason=Reason.ASSUMED_DEAD, message=message)


def _with_its_host(stores: Stores, jobs: Jobs, attempt: AttemptRecord, message: str) -> AttemptRecord:
    """Move the attempt to this host, where no job of the attempt exists.

    If the old host returns, it ends the job, because no attempt of that host owns the job.
    """
    host = next((one for one in jobs.hosts.all() if one.id == attempt.host), None) if jobs.hosts else None
    if host is not None and not host.gone:
        raise InputError(
            f"{attempt.run_id}/{attempt.stage}: its host {host.name} reported {host.silent:.0f} s ago; posttrain "
            f"stop {attempt.run_id} ends it there"
        )
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.leave_to(attempt.run_id, jobs.host)
        return transaction.update_attempt(attempt, reason=Reason.ASSUMED_DEAD, message=message, host=jobs.host)


def unheeded(folders: AttemptFolders, attempt: AttemptRecord) -> str:
    """Return the message for a job that ignored its stop order and was killed; empty if it acknowledged the order."""
    channel = folders.of(attempt).mailbox
    stops = [control.number for control in channel.controls() if control.kind is ControlKind.STOP]
    if not stops or any(channel.acknowledged(number) for number in stops):
        return ""
    return "stopped by a person; the job ignored the stop and was killed, so steps since its last checkpoint are lost"


def _may_live(held: Start) -> bool:
    elsewhere = held.host != socket.gethostname()
    return not held.cancelled and (elsewhere or processes.alive(held.pid, held.process))


def collect(stores: Stores, jobs: Jobs, manifest: Manifest, order: Collect) -> None:
    """Publish a job's outputs, and end the attempt, even if outputs are unreadable, because a retry would not help."""
    stage, attempt, result = order.stage, order.attempt, order.result
    with stores.blobs.holding():
        try:
            outputs = _publish(stores.blobs, jobs.folders, attempt, result, stage.inputs)
            _refuse_lacking(manifest.stage(stage.name), result, outputs)
        except (InputError, IntegrityError) as error:
            _end(stores, jobs, manifest, stage, attempt, uncollectable(error), {})
            return
        crashpoint("collect.after_publish")
        _end(stores, jobs, manifest, stage, attempt, result, outputs)
    crashpoint("collect.after_commit")


def end(stores: Stores, jobs: Jobs, manifest: Manifest, order: End) -> None:
    """End an attempt without outputs."""
    if order.unless_begun:
        if not give_up(jobs.folders, order.attempt, order.why, begun=False):
            return
        if answered(jobs.folders.of(order.attempt)):
            return  # a job started, wrote its result and ended since the last look: the result is read first
    _end(stores, jobs, manifest, order.stage, order.attempt, order.result, {}, order.cause)


def try_again(stores: Stores, jobs: Jobs, manifest: Manifest, order: TryAgain) -> None:
    """End an attempt that may be retried, and record when the next attempt follows, or why no attempt follows."""
    stage, attempt, failure, said = order.stage, order.attempt, order.failure, order.said
    give_up(jobs.folders, attempt, f"it ended: {failure.message}")
    now = stores.clock.now()
    tokens, seconds = _billed(stores, jobs.folders, attempt, said.tokens), _seconds(jobs, attempt, said.seconds, now)
    if order.over:
        state, reason, message = StageState.FAILED, order.over[0], f"{failure.message}; {order.over[1]}"
        action = f"posttrain logs {stage.run_id} {stage.name}; then posttrain retry {stage.run_id}"
    else:
        state, reason, action = StageState.READY, Reason.BACK_OFF, "none needed"
        message = f"{failure.message}; trying again in {order.wait:g} s"
    lost = Reason.LOST if order.ended is AttemptState.LOST else _reason(failure)
    if order.cause is StopCause.STALLED:
        lost = Reason.STALLED
    warning = _warning(stores, jobs, manifest, stage, tokens, seconds)
    with stores.ledger.transaction(stores.actor) as transaction:
        if warning:
            transaction.append_event(BUDGET_WARNED, stage.run_id, warning)
        transaction.update_attempt(
            attempt,
            state=order.ended,
            reason=Reason.PREEMPTED if failure.kind is FailureClass.PREEMPTED else lost,
            message=failure.message,
            failure_signature=failure.signature or None,
            tokens=tokens,
            finished_at=now,
            seconds=seconds,
            stop_cause=attempt.stop_cause or order.cause,
        )
        transaction.update_stage(
            stage,
            state=state,
            reason=reason,
            message=message,
            next_action=action,
            tokens=stage.tokens + tokens,
            not_before=now + order.wait,
        )


def _publish(
    blobs: BlobStore,
    folders: AttemptFolders,
    attempt: AttemptRecord,
    result: JobResult,
    inputs: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, str]]:
    """Put a job's outputs into the store. Only the collector publishes.

    Args:
        inputs: the blobs of the stage's inputs, by slot.

    Raises:
        IntegrityError: an output is missing or outside the attempt's `outputs/`, or is no adapter for its input.
    """
    crashpoint("collect.before_publish")
    if result.status != "succeeded":
        return {}
    folder, found = folders.of(attempt), {}
    for name, output in result.outputs.items():
        digest = folder.store_output(blobs, name, output)
        if output.over:
            if output.form != "tree" or inputs.get(output.over, {}).get("form") != "tree":
                raise IntegrityError(f"output {name} must extend a model of the stage's inputs, got {output.over!a}")
            digest = put_extended(blobs, str(inputs[output.over]["digest"]), digest)
        found[name] = {"digest": digest, "form": output.form}
    return found


def _refuse_lacking(plan: StageManifest, result: JobResult, outputs: Mapping[str, Mapping[str, str]]) -> None:
    """Raise IntegrityError if a successful job lacks an output that its stage declares, or an output's form differs."""
    for name, form in plan.outputs.items() if result.status == "succeeded" else ():
        left = outputs[name]["form"] if name in outputs else "nothing"
        if left != form:
            raise IntegrityError(f"it must leave output {name} as a {form}, as its stage declares, got {left}")


def _end(
    stores: Stores,
    jobs: Jobs,
    manifest: Manifest,
    stage: StageRecord,
    attempt: AttemptRecord,
    result: JobResult,
    outputs: dict[str, dict[str, str]],
    cause: StopCause | None = None,
) -> None:
    cause = cause or (StopCause.PERSON if result.status == "stopped" else None)
    give_up(jobs.folders, attempt, f"it ended: {result.status}")
    now, failure = stores.clock.now(), result.failure
    seconds = _seconds(jobs, attempt, result.seconds, now)
    reason = {"succeeded": Reason.SUCCEEDED, "stopped": Reason.STOPPED}.get(result.status) or _reason(failure)
    default = "stopped by a person" if result.status == "stopped" else "done"
    message = failure.message if failure else result.message or default
    action = "" if result.status == "succeeded" else _next_action(stage, failure)
    tokens = _billed(stores, jobs.folders, attempt, result.tokens)
    sizes = stored_sizes(stores.blobs, {output["digest"]: output["form"] for output in outputs.values()})
    warning = _warning(stores, jobs, manifest, stage, tokens, seconds)
    with stores.ledger.transaction(stores.actor) as transaction:
        if warning:
            transaction.append_event(BUDGET_WARNED, stage.run_id, warning)
        transaction.update_attempt(
            attempt,
            state=AttemptState(result.status),
            reason=reason,
            message=message,
            failure_signature=failure.signature if failure else None,
            tokens=tokens,
            finished_at=now,
            seconds=seconds,
            stop_cause=attempt.stop_cause or cause,
        )
        transaction.update_stage(
            stage,
            state=StageState(result.status),
            reason=reason,
            message=message,
            next_action=action,
            outputs=outputs,
            sizes=sizes,
            models=trained_models(stores, manifest.name, stage, outputs),
            metrics=dict(result.metrics),
            tokens=stage.tokens + tokens,
            finished_at=now,
        )
        if result.status == "succeeded" and stage.cache_key:
            transaction.put_cache(stage.cache_key, stage.run_id, stage.name)


def _warning(
    stores: Stores, jobs: Jobs, manifest: Manifest, stage: StageRecord, tokens: int, seconds: float
) -> Mapping[str, Any] | None:
    """Return the values of a budget warning if billing this attempt crosses the threshold; else None."""
    if not budgets.limited(manifest):
        return None
    attempts = stores.ledger.attempts(stage.run_id)
    before = budgets.spending(
        stores.ledger.stages(stage.run_id), attempts, taken_over=tokens_taken_over(stores, jobs.folders, attempts)
    )
    return budgets.warning(
        manifest, before, replace(before, tokens=before.tokens + tokens, seconds=before.seconds + seconds)
    )


def _reason(failure: Failure | None) -> Reason:
    if failure is None:
        return Reason.JOB_FAILED
    corrupt = failure.signature.startswith(IntegrityError.__name__)  # the signature starts with the exception's class
    return Reason.CORRUPT if corrupt else Reason.of_failure(failure.kind)


def _next_action(stage: StageRecord, failure: Failure | None) -> str:
    if failure is None:
        return f"posttrain retry {stage.run_id} resumes it"
    same = f"if that changes neither the run file nor code, posttrain retry {stage.run_id} suffices"
    return {
        FailureClass.BUDGET: "raise the budget in run.yaml and submit again",
        FailureClass.BAD_INPUT: f"fix what the message names and submit again; {same}",
        FailureClass.OUT_OF_MEMORY: f"{kind_of(stage.kind).fitting} and submit again, or use a machine with more",
        FailureClass.DISK_FULL: f"free some space, then posttrain retry {stage.run_id}",
        FailureClass.DIVERGED: "lower the learning rate and submit again",
    }.get(failure.kind, f"posttrain logs {stage.run_id} {stage.name}; fix the cause and submit again")


def _inherited(blobs: BlobStore, attempt: AttemptRecord) -> int:
    with suppress(InputError, IntegrityError):  # an older version's attempt, with a damaged or deleted checkpoint
        return tokens_inherited(blobs, attempt)
    return 0


def _billed(stores: Stores, folders: AttemptFolders, attempt: AttemptRecord, said: int) -> int:
    """Return the tokens that this attempt spent: the tokens of its lineage less the tokens of its checkpoint.

    The largest of three reports counts: the result, the progress, and the meter, which includes the cost of an
    interrupted step. So retries never spend more than the declared budget.
    """
    progress = _last_progress(folders, attempt)
    words = (said, progress.tokens if progress else 0, folders.of(attempt).spent())
    return max(0, min(MOST_NUMBER, max(words)) - _inherited(stores.blobs, attempt))


def _seconds(jobs: Jobs, attempt: AttemptRecord, said: float, now: float) -> float:
    """Return the seconds that the job ran, from the executor's record, which includes lost jobs.

    Without a record, the job's own report counts, up to the time since the launch.
    """
    measured = look(jobs, attempt).seconds
    if measured is not None:
        return measured
    return min(said, max(0.0, now - (attempt.launched_at or attempt.created_at)))


def answered(folder: AttemptFolder) -> bool:
    """Return whether a job left its result, or an unreadable object in place of the result."""
    try:
        return folder.mailbox.answered() is not None
    except IntegrityError:
        return True


def _last_progress(folders: AttemptFolders, attempt: AttemptRecord) -> Progress | None:
    try:
        return folders.of(attempt).last_progress()
    except IntegrityError:  # a damaged event segment must not prevent the end of a run
        return None


class Looks:
    """The executor's observations of a run's live attempts, from one request for all attempts, made on first use."""

    def __init__(self, jobs: Jobs, seen: Mapping[str, Observation]) -> None:
        self._jobs = jobs
        self._known = seen  # recent observations of the jobs of all runs
        self._seen: Mapping[str, Observation] | None = None

    def of(self, view: View, attempt: AttemptRecord) -> Observation:
        """Return the observation of an attempt, from this pass or just before it."""
        if self._seen is None:
            self._seen = self._all(view)
        return self._seen.get(attempt.name) or look(self._jobs, attempt)

    def _all(self, view: View) -> Mapping[str, Observation]:
        launched = [a for a in view.attempts if a.state == AttemptState.LAUNCHED and a.name not in self._known]
        found = dict(self._known)
        for executor in self._jobs.executors:
            here = [attempt for attempt in launched if attempt.executor == executor.name]
            with suppress(Exception):  # then each job is observed separately, so one error affects one job
                seen = executor.observe([self._jobs.folders.job(attempt) for attempt in here]) if here else []
                found |= {attempt.name: one for attempt, one in zip(here, seen, strict=True)}
        return found


def see(stores: Stores, jobs: Jobs, view: View, name: str, looks: Looks) -> JobStatus:
    """Return the observed status of the live attempt of a running stage.

    Raises:
        InfrastructureError: the executor or the attempt's mailbox does not answer.
    """
    attempt, folder = view.tries(name)[-1], jobs.folders.of(view.tries(name)[-1])
    if attempt.state == AttemptState.PLANNED:
        return _unanswered(jobs, view, name, attempt)
    job = looks.of(view, attempt)  # read before the result, because a job writes its result before it ends
    try:
        word = _word(jobs, view, name, attempt)
        if word is None and job.gone:
            job = look(jobs, attempt)  # the observation may be old, and an executor may restart a job
            if job.gone and another_runs(stores, jobs.folders, attempt, job):
                return JobStatus(job, another_runs=True)
            word = _word(jobs, view, name, attempt)  # the job may have ended between the two looks
        progress = reported(folder, job) if word is None and job.state is JobState.RUNNING else None
        lost = unheeded(jobs.folders, attempt) if word is None and job.gone else ""
        metered = word is None and not job.gone and view.manifest.budget.tokens is not None
        tokens = folder.spent() - tokens_inherited(stores.blobs, attempt) if metered else 0
        trace = trace_in(folder.tail()) if word is None and job.gone else None
        return JobStatus(job, word=word, unheeded=lost, trace=trace, tokens=tokens, progress=progress)
    except (InputError, IntegrityError) as error:  # the folder cannot be read, and a retry would not repair it
        return JobStatus(job, unreadable=str(error))


def _unanswered(jobs: Jobs, view: View, name: str, attempt: AttemptRecord) -> JobStatus:
    """Observe an attempt without a recorded launch, whose job may have run and written its result."""
    if not jobs.folders.of(attempt).has_order():
        return JobStatus(Observation(JobState.UNKNOWN), ordered=False)
    job = look(jobs, attempt)
    if job.state is not JobState.UNKNOWN:
        return JobStatus(job)
    try:
        held = jobs.folders.of(attempt).mailbox.started() if jobs.folders.remote(attempt.executor) else None
        begun = held is not None and not held.cancelled
        return JobStatus(job, begun=begun, word=_word(jobs, view, name, attempt))
    except (InputError, IntegrityError) as error:
        return JobStatus(job, unreadable=str(error))


def reported(folder: AttemptFolder, job: Observation) -> str:
    """Return the progress that the job reports; the part before the first ` | ` is for people."""
    said = folder.mailbox.summary()
    if said is None:  # the job is loading, or its version writes no summary
        return f"its start | {folder.mailbox.last(EVENTS)} | {job.incarnation}"
    place = f"step {said.step} of {said.total}"
    return f"{place} | {said.tokens} | {said.phase} | {said.phases} | {job.incarnation}"


def _word(jobs: Jobs, view: View, name: str, attempt: AttemptRecord) -> JobResult | None:
    return jobs.trainer(view.manifest.stage(name).trainer).collect(jobs.folders.of(attempt))


@dataclass(frozen=True, slots=True)
class Orphans:
    """The jobs of an executor that no live attempt owns."""

    ours: tuple[Listed, ...] = ()  # submitted by this workspace at its current place
    strangers: tuple[Listed, ...] = ()  # of other workspaces, copies, or this workspace's former place; not killed


def find_orphans(ledger: Ledger, jobs: Jobs, executor: Executor) -> Orphans:
    """Return an executor's orphaned jobs without changing anything.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    listed = executor.list("")
    if not listed:
        return Orphans()
    with ledger.snapshot() as now:  # read after the list: an attempt is in the ledger before its job is submitted
        owned = now.live_attempts()  # of every project, because all projects share the executor
    free = [job for job in listed if job.name not in owned]
    mine = jobs.workspace() if free else ""
    ours = tuple(job for job in free if mine and job.labels.get(WORKSPACE) == mine)
    return Orphans(ours, tuple(job for job in free if job not in ours))


def end_orphans(ledger: Ledger, jobs: Jobs, executor: Executor) -> list[str]:
    """Kill this workspace's orphaned jobs of an executor; return one line for each.

    Raises:
        InfrastructureError: the executor does not answer.
    """
    told = []
    for job in find_orphans(ledger, jobs, executor).ours:
        place = job.labels[RUN], job.labels[STAGE], job.epoch
        mailbox = jobs.folders.mailbox_of(*place) or jobs.folders.path(*place).absolute().as_uri()
        try:
            executor.kill(JobRef(job.name, mailbox))
            told.append(f"job {job.name} was ended: no attempt owns it")
        except PosttrainError as error:  # the next orphan is killed nevertheless
            told.append(f"job {job.name}, which no attempt owns, could not be ended: {error}")
    return told
