"""Decisions about a run: pure functions of its rows, of the observations of its jobs, and of the time.

`decide_run`, `decide_stage` and `settle` return effects (`control.effects`), which `control.stages` then carries out.
This module also decides whether another attempt would help. Nothing here reads or writes anything: tests can decide on
any rows, and two drivers with the same observations make the same decision. An effect contains the rows on which it was
decided, and is executed as a compare-and-set on these rows.

Whether a running job hangs is a pure function of the progress that consecutive looks observed. Progress consists of the
job's reports in its mailbox (steps, tokens, the ends of phases); the existence of its process is not progress. Silence
counts only while a driver watches: a look that comes a quarter of `runtime.stall_after` after the last look adds that
quarter, and a look that comes far too late adds nothing. So no job appears hung because a clock jumped, a machine slept
or no driver ran for hours; the job's own clock is not used. After four quarters of silence, the driver requests a
checkpoint from the job; after the fifth quarter, the driver kills the job. A report in between resets the silence, and
a look without an answer delays the end by a quarter. The decision to kill a silent job is recorded before the kill.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.control import budgets
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
from posttrain.domain.errors import FailureClass, Trace
from posttrain.domain.jobs import (
    ANOTHER_RUNS,
    NO_MEMORY,
    NO_SPACE,
    NODE_FAILED,
    PHASE_SECONDS,
    Cause,
    Failure,
    JobResult,
    JobState,
    Observation,
    seconds_short,
)
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import AttemptState, Reason, RunState, StageState, StopCause, is_final, stop_cause
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, RunRecord, Signal, StageRecord, Watch
from posttrain.domain.waits import span, told, wait_of

# the longest silence of a healthy job is one rollout: some hundred responses of 10,000 tokens of a 7B model, decoded in
# several batches, take an hour or more; loading and a suite's largest batch take less
STALL_AFTER = 7200.0
LOOKS = 4  # number of looks within that time
_LATE = 2  # number of planned intervals; a longer gap between looks counts as unwatched
_OVERDUE = 5.0  # seconds between looks at an overdue watch, such as one whose job survives its kill
PREEMPTIONS_PER_ATTEMPT = 4  # a preemption is not the job's fault, but an executor that always preempts is useless
STOP_GRACE_SECONDS = 30.0
LEAVING_SECONDS = 120.0  # from a job's result until its kill, if its process has not ended by itself
BACKOFF_SECONDS = (0.5, 2.0, 8.0, 30.0)
_DONE = (StageState.SUCCEEDED, StageState.SKIPPED)
_ENDED_FOR = {
    Cause.OUT_OF_MEMORY: (FailureClass.OUT_OF_MEMORY, "the job was ended: out of memory", StopCause.OUT_OF_MEMORY),
    Cause.DISK_FULL: (FailureClass.DISK_FULL, "the job could not write a result: the disk is full", None),
    Cause.OVERTIME: (FailureClass.BUDGET, "the executor ended the job", StopCause.BUDGET),
}
_SAID_BY_CODE = {NO_MEMORY: Cause.OUT_OF_MEMORY, NO_SPACE: Cause.DISK_FULL}
# causes that the executor reports; a time limit that the run does not declare is not part of the run's budget
_STOPPED_BY: Mapping[Cause | None, StopCause] = {
    Cause.PREEMPTED: StopCause.PREEMPTED,
    Cause.DRAINED: StopCause.DRAINED,
    Cause.OVERTIME: StopCause.PREEMPTED,
}
_OF_NODES = (f"{Cause.NODE_LOST}@", "gpu_fault@")  # signatures of failures for which a node is the reason
_LOSSES = 2  # of jobs of one stage, after which its node is avoided
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)  # a program's own
_TAKEN_AWAY = (StopCause.PREEMPTED, StopCause.DRAINED, StopCause.SUPERSEDED)  # ends that do not count as attempts


def stall_after(manifest: Manifest, stage: str) -> float:
    """Return how many seconds a stage's jobs may go without progress: its `runtime.stall_after`, else the run's."""
    own = manifest.stage(stage).params.get("runtime")
    limit = own.get("stall_after") if isinstance(own, Mapping) else None
    if isinstance(limit, int | float):
        return float(limit)
    return manifest.runtime.stall_after if manifest.runtime else STALL_AFTER


def phase_seconds(limit: float) -> float:
    """Return the seconds of silence after which a job reports that a phase ended, so that it does not appear hung."""
    return min(PHASE_SECONDS, limit / LOOKS)


def due_in(watch: Watch, limit: float, now: float) -> float:
    """Return the seconds until the next look at a watched job."""
    passed = now - watch.at
    left = 0.0 if _over(watch, limit) else limit / LOOKS - passed
    return left if passed >= 0 and left > 0 else min(limit / LOOKS, _OVERDUE)


def _silence(
    view: View, stage: StageRecord, attempt: AttemptRecord, job_status: JobStatus, now: float
) -> AskToCheckpoint | KeepWatch | Kill | None:
    """Return the effect for a live job's silence; None: there is nothing to do yet."""
    before, limit = view.watch(attempt), stall_after(view.manifest, stage.name)  # last look's watch; None: no look yet
    # None: the job is queued or not visible, so its silence proves nothing
    seen, part = job_status.progress if job_status.job.state is JobState.RUNNING else None, limit / LOOKS
    if before is None:
        return None if seen is None else KeepWatch(stage, attempt, Watch(attempt.name, stage.run_id, seen, 0.0, now))
    if _condemned(view, stage, attempt):
        return Kill(stage, attempt) if seen is not None else None
    passed, asked = now - before.at, attempt.reason == Reason.STALLED
    waits = 0 <= passed < part
    if seen is not None and seen != before.progress and (asked or not waits):
        return KeepWatch(stage, attempt, replace(before, progress=seen, quiet=0.0, at=now), goes_on=asked)
    if waits:
        return None
    if seen is None:
        return KeepWatch(stage, attempt, replace(before, at=now))
    watch = replace(before, quiet=before.quiet + (part if 0 <= passed <= _LATE * part else 0.0), at=now)
    quiet = f"no progress for {span(watch.quiet)} at {_place(watch)}"
    if not asked:
        if watch.quiet < limit:
            return KeepWatch(stage, attempt, watch)
        said = f"{quiet}; asked to checkpoint; killed in {span(part)} unless it makes progress"
        return AskToCheckpoint(stage, attempt, watch, said)
    said = f"{quiet}; asked to checkpoint, and killed" if _over(watch, limit) else ""
    return KeepWatch(stage, attempt, watch, said=said)


def _condemned(view: View, stage: StageRecord, attempt: AttemptRecord) -> bool:
    """Return whether a stalled job will be killed; a request for a checkpoint alone does not count."""
    watch, limit = view.watch(attempt), stall_after(view.manifest, stage.name)
    return attempt.reason == Reason.STALLED and watch is not None and _over(watch, limit)


def _hung(view: View, stage: StageRecord, attempt: AttemptRecord) -> Failure:
    """Return the failure of a job killed because it stalled; the signature repeats if jobs hang at the same place."""
    watch, limit = view.watch(attempt), stall_after(view.manifest, stage.name)
    place = _place(watch) if watch else "its start"
    message = f"no progress for {span(limit)} (runtime.stall_after) at {place}: asked to checkpoint, then killed"
    return Failure(FailureClass.INFRASTRUCTURE, message, f"no progress at {place}")


def _over(watch: Watch, limit: float) -> bool:
    return watch.quiet >= limit + limit / LOOKS


def _place(watch: Watch) -> str:
    return watch.progress.partition(" | ")[0]


def why_not_again(manifest: Manifest, tried: Sequence[AttemptRecord], failure: Failure) -> tuple[Reason, str] | None:
    """Return the reason and message if another attempt is pointless, else None; the last of `tried` just failed."""
    preempted = failure.kind is FailureClass.PREEMPTED
    if failure.kind is FailureClass.BUDGET:
        return None  # retries end, because each attempt gets a larger share of a finite budget
    own = [a for a in tried[:-1] if a.reason not in (Reason.PREEMPTED, Reason.BUDGET_EXCEEDED)]
    same = bool(own) and bool(failure.signature) and own[-1].failure_signature == failure.signature
    if same and not failure.signature.startswith(_OF_NODES):  # the next attempt avoids that node
        return Reason.CIRCUIT_OPEN, "the same failure twice in a row"
    made = len(tried) if preempted else len(own) + 1
    if made >= manifest.budget.attempts * (PREEMPTIONS_PER_ATTEMPT if preempted else 1):
        return Reason.ATTEMPTS_EXHAUSTED, f"{made} attempts, the budget's limit"
    return None


def nodes_to_avoid(tried: Iterable[AttemptRecord]) -> tuple[str, ...]:
    """Return the nodes that lost several jobs of a stage, or on which a GPU failed."""
    found = [str(one.failure_signature) for one in tried if str(one.failure_signature).startswith(_OF_NODES)]
    nodes = Counter(one.partition("@")[2] for one in found)
    faulty = {one.partition("@")[2] for one in found if not one.startswith(Cause.NODE_LOST)}
    return tuple(sorted(node for node, losses in nodes.items() if node in faulty or losses >= _LOSSES))


@dataclass(frozen=True, slots=True)
class View:
    """The rows of one run at one moment."""

    run: RunRecord
    manifest: Manifest
    stages: tuple[StageRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    signals: tuple[Signal, ...] = ()  # signals sent to the run
    watches: tuple[Watch, ...] = ()  # the watches of the run's jobs
    head: tuple[int, bytes] = (0, b"")  # the head of the event log

    def stage(self, name: str) -> StageRecord:
        """Return the stage of this name."""
        return next(stage for stage in self.stages if stage.name == name)

    def tries(self, name: str) -> tuple[AttemptRecord, ...]:
        """Return a stage's attempts, oldest first."""
        return tuple(attempt for attempt in self.attempts if attempt.stage == name)

    def after(self, written: Iterable[RunRecord | StageRecord | AttemptRecord | Watch]) -> View:
        """Return the view with these written rows; rows of other runs are ignored."""
        run, stages, attempts = self.run, {s.name: s for s in self.stages}, {a.name: a for a in self.attempts}
        watches = {watch.attempt: watch for watch in self.watches}
        for row in written:
            if (row.id if isinstance(row, RunRecord) else row.run_id) != run.id:
                continue
            match row:
                case RunRecord():
                    run = row
                case StageRecord():
                    stages[row.name] = row
                case AttemptRecord():
                    attempts[row.name] = row
                case Watch():
                    watches[row.attempt] = row
        tries = tuple(sorted(attempts.values(), key=lambda one: (one.stage, one.number)))
        return replace(self, run=run, stages=tuple(stages.values()), attempts=tries, watches=tuple(watches.values()))

    def watch(self, attempt: AttemptRecord) -> Watch | None:
        """Return the recorded watch of an attempt's silence."""
        return next((watch for watch in self.watches if watch.attempt == attempt.name), None)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The observation of a running stage's live attempt; the executor was queried before the result was read."""

    job: Observation
    ordered: bool = True  # the attempt's order exists, so the job may have been submitted
    begun: bool = False  # a job of an attempt without a recorded launch has begun elsewhere
    word: JobResult | None = None  # the job's result
    unreadable: str = ""  # why the job's result or mailbox cannot be read
    another_runs: bool = False  # the executor's job gave way to another job of this attempt, which may live
    unheeded: str = ""  # the message for a job that ignored its stop order
    trace: Trace | None = None  # the failure that the log of a job without a result reports
    tokens: int = 0  # tokens that the attempt reported, without the tokens before its checkpoint
    progress: str | None = None  # the same text while the job makes no progress; None: not read


def decide_run(view: View) -> list[Effect]:
    """Return the run's own effects, to carry out before its stages are decided."""
    run = view.run
    if run.state == RunState.PENDING:
        return [MoveRun(run, RunState.RUNNING, Reason.RUNNING, "stages are under way")]
    if run.desired == "stopped" and run.state == RunState.RUNNING:
        return [MoveRun(run, RunState.STOPPING, Reason.STOP_REQUESTED, "waiting for jobs to checkpoint and end")]
    return []


def decide_stage(view: View, name: str, job_status: JobStatus | None, now: float) -> Effect | None:
    """Return the effect for one stage; None: there is nothing to do yet.

    Args:
        job_status: the observation of the stage's live attempt, if the stage is running.
    """
    stage = view.stage(name)
    if is_final("stage", stage.state) or is_final("run", view.run.state):  # another driver may just have ended it
        return None
    if stage.state == StageState.RUNNING:
        assert job_status is not None
        attempt = view.tries(name)[-1]
        if attempt.state == AttemptState.PLANNED:
            return _planned(view, stage, attempt, job_status)
        assert attempt.state == AttemptState.LAUNCHED, f"{attempt.name} is {attempt.state} while its stage runs"
        return _launched(view, stage, attempt, job_status, now)
    if view.run.state == RunState.STOPPING:
        return StopStage(stage)
    if any(other.state == StageState.FAILED for other in view.stages):
        return None  # the run will fail, so nothing new starts
    if stage.state == StageState.PENDING:
        upstream = view.manifest.stage(name).upstream()
        return Bind(stage) if all(view.stage(other).state in _DONE for other in upstream) else None
    kind = kind_of(stage.kind)
    if kind.driver is Driver.JOB:
        return None if stage.not_before is not None and now < stage.not_before else Start(stage)
    if kind.driver is Driver.WAIT:
        return _wait(view, stage, now)
    return Judge(stage) if kind.judges else Release(stage)


def settle(view: View) -> MoveRun | None:
    """Return the effect that ends a run; None: the run continues."""
    run, stages = view.run, view.stages
    if is_final("run", run.state) or any(stage.state == StageState.RUNNING for stage in stages):
        return None
    for state, target in ((StageState.FAILED, RunState.FAILED), (StageState.REJECTED, RunState.REJECTED)):
        culprit = next((stage for stage in stages if stage.state == state), None)
        if culprit:
            left = tuple(stage for stage in stages if not is_final("stage", stage.state))
            said = f"stage {culprit.name}: {culprit.message}"
            return MoveRun(run, target, culprit.reason, said, culprit.next_action, left, culprit)
    if all(stage.state in _DONE for stage in stages):
        shipped = next((stage.message for stage in stages if kind_of(stage.kind).ships), "every stage is done")
        return MoveRun(run, RunState.SUCCEEDED, Reason.SUCCEEDED, shipped, f"posttrain get {run.id}")
    if run.state == RunState.STOPPING and all(is_final("stage", stage.state) for stage in stages):
        return MoveRun(
            run, RunState.STOPPED, Reason.STOPPED, "stopped by a person", f"posttrain retry {run.id} resumes it"
        )
    return None


def _wait(view: View, stage: StageRecord, now: float) -> Effect | None:
    """Return the effect for a waiting stage; a signal counts even if it was sent before the wait began."""
    wait = wait_of(view.manifest, stage.name)
    sent = next((signal for signal in view.signals if signal.name == wait.signal), None)
    here = stage.not_before is None or now >= stage.not_before
    if here and (wait.signal is None or sent is not None):
        came = f"signal {sent.name} arrived" if sent else f"waited {span(wait.seconds or 0.0)}"
        return EndWait(stage, StageState.SUCCEEDED, Reason.WAIT_OVER, came)
    ends = wait.given_up_at(stage)
    if sent is None and ends is not None and now >= ends:
        said = f"signal {wait.signal} did not arrive within {span(wait.within or 0.0)}"
        action = f"posttrain retry {stage.run_id} waits again"
        return EndWait(stage, StageState.FAILED, Reason.SIGNAL_MISSED, said, action)
    reason, message, action = told(replace(stage, not_before=None) if here else stage, wait, sent)
    return None if (stage.reason, stage.message) == (reason, message) else Say(stage, reason, message, action)


# --- attempts ---------------------------------------------------------------------------------------------------------


def _planned(view: View, stage: StageRecord, attempt: AttemptRecord, job_status: JobStatus) -> Effect | None:
    """Return the effect for a planned attempt; it waits while a submission by an earlier driver is uncertain."""
    stopping = view.run.state == RunState.STOPPING
    if job_status.ordered and job_status.job.hidden:
        what = "there is a job to stop" if stopping else "the job was submitted"
        said = f"it is not known yet whether {what}; checking again"
        return None if stage.message == said else Say(stage, Reason.SUBMISSION_UNKNOWN, said)
    # the executor may have dropped the job
    left = job_status.begun or job_status.word is not None or bool(job_status.unreadable)
    if job_status.ordered and (left or job_status.job.state is not JobState.UNKNOWN):
        return RecordLaunch(stage, attempt, job_status.job.handle)
    if stopping:
        return End(
            stage, attempt, JobResult("stopped"), "the run was stopped before it was launched", unless_begun=True
        )
    return Launch(stage, attempt)


def _launched(
    view: View, stage: StageRecord, attempt: AttemptRecord, job_status: JobStatus, now: float
) -> Effect | None:
    if job_status.unreadable and not job_status.job.gone:
        return Kill(stage, attempt)  # no further output of the job can be read, and the job occupies devices
    if job_status.unreadable:
        return End(stage, attempt, uncollectable(job_status.unreadable))
    if job_status.word is None:
        return _without_word(view, stage, attempt, job_status, now)
    if not job_status.job.gone:  # the job still holds memory that the next job needs
        since = now - (attempt.launched_at or now)
        since -= job_status.word.seconds if job_status.word.seconds <= since else 0.0  # the job may report a wrong time
        return None if since < LEAVING_SECONDS else Kill(stage, attempt)
    result = _why_stopped(view, stage, attempt, job_status.word)
    if result.status == "failed" and result.failure and result.failure.kind is FailureClass.BUDGET:
        own = budgets.Spending(result.tokens - (attempt.resumed_tokens or 0), result.seconds)
        if budgets.can_have_more(view.manifest, view.stages, view.attempts, attempt, own):
            return _again(view, stage, attempt, replace(result.failure, signature=""), AttemptState.FAILED, result)
    if result.status == "failed" and result.failure and result.failure.kind.retried:
        return _again(view, stage, attempt, result.failure, AttemptState.FAILED, result)
    return Collect(stage, attempt, result)


def uncollectable(why: object) -> JobResult:
    """Return the result of an attempt whose folder cannot be read or has unexpected contents."""
    return _failed(FailureClass.BUG, f"the outputs of the job cannot be collected: {why}", "collect")


def _failed(kind: FailureClass, message: str, signature: str) -> JobResult:
    return JobResult("failed", failure=Failure(kind, message, signature))


def _why_stopped(view: View, stage: StageRecord, attempt: AttemptRecord, result: JobResult) -> JobResult:
    """Turn a stop that no person requested into a failure with the cause of its order; without an order, preemption."""
    if result.status != "stopped" or view.run.desired == "stopped":
        return result
    if _condemned(view, stage, attempt):  # the job still reacted to SIGTERM
        return replace(result, status="failed", failure=_hung(view, stage, attempt))
    if attempt.stop_cause == StopCause.BUDGET:
        spent = f"the budget ({budgets.declared(view.manifest)}) is spent; raise it in run.yaml and submit again"
        return replace(result, status="failed", failure=Failure(FailureClass.BUDGET, spent, "budget"))
    told = "received SIGTERM from outside"
    if attempt.stop_cause is not None:
        told = f"received a stop order: {stop_cause(attempt.stop_cause).meaning}"
    return replace(result, status="failed", failure=Failure(FailureClass.PREEMPTED, f"the job {told}", ""))


def _without_word(
    view: View, stage: StageRecord, attempt: AttemptRecord, job_status: JobStatus, now: float
) -> Effect | None:
    """Return the effect for a job without a result: a person, the budget, the job's silence or its loss can end it."""
    seen = job_status.job
    share = budgets.share_of(view.manifest, attempt, budgets.spending(view.stages, view.attempts))
    over = budgets.overdrawn(share, job_status.tokens, seen.seconds or 0.0)
    asked, stopping = attempt.stop_requested_at, view.run.state == RunState.STOPPING
    if (over or stopping) and asked is None and (job_status.another_runs or not seen.gone):
        return AskToStop(stage, attempt, StopCause.PERSON if stopping else StopCause.BUDGET)
    late = asked is not None and now >= asked + STOP_GRACE_SECONDS
    believed = seen.hidden and attempt.reason == Reason.ASSUMED_DEAD
    if not seen.gone and not believed:
        if late:
            return Kill(stage, attempt)
        quiet = _silence(view, stage, attempt, job_status, now) if asked is None else None
        return _waits(stage, attempt, seen) or quiet
    if job_status.another_runs:
        return _given_way(stage, attempt)
    if stopping:  # a stage that a person stopped is not tried again
        before = "" if asked else f"stopped by a person; its job had already ended ({seen.why})"
        return End(stage, attempt, JobResult("stopped", message=job_status.unheeded or before))
    if late and attempt.stop_cause == StopCause.BUDGET:
        said = over or f"the budget ({budgets.declared(view.manifest)}) is spent"
        return End(stage, attempt, _failed(FailureClass.BUDGET, said, "budget"))
    return _lost(view, stage, attempt, job_status)


def _waits(stage: StageRecord, attempt: AttemptRecord, seen: Observation) -> Effect | None:
    if seen.hidden:
        said = "the executor does not see the job, which does not prove that it ended; checking again"
        return Say(stage, Reason.JOB_NOT_VISIBLE, said) if stage.reason != Reason.JOB_NOT_VISIBLE else None
    if seen.state is JobState.STARTING and seen.detail:
        said = f"attempt {attempt.number}: {seen.detail}"
        return Say(stage, Reason.QUEUED, said) if (stage.reason, stage.message) != (Reason.QUEUED, said) else None
    past = stage.reason in (Reason.JOB_NOT_VISIBLE, Reason.QUEUED)
    return Say(stage, Reason.RUNNING, f"attempt {attempt.number}") if past else None


def _given_way(stage: StageRecord, attempt: AttemptRecord) -> Effect | None:
    """Wait for another process of this attempt that is not visible; its result or `--assume-dead` ends the wait."""
    said = f"attempt {attempt.number}: {attempt.message}"
    if attempt.reason != Reason.ANOTHER_RUNS or (stage.reason, stage.message) == (Reason.ANOTHER_RUNS, said):
        return None
    action = f"none needed; if its host is lost: posttrain dead {stage.run_id}/{stage.name} --assume-dead"
    return Say(stage, Reason.ANOTHER_RUNS, said, action)


def _lost(view: View, stage: StageRecord, attempt: AttemptRecord, job_status: JobStatus) -> Effect:
    """Return the effect for a job that ended without a result."""
    seen, detail = job_status.job, job_status.job.why
    declared = view.manifest.budget.wall_clock
    ended = seen.cause or _SAID_BY_CODE.get(seen.exit_code or 0)
    if attempt.stop_requested_at is not None and ended in _SAID_BY_CODE.values():
        ended = None  # the stop may have caused that exit code
    if ended in _ENDED_FOR and (ended is not Cause.OVERTIME or declared is not None):
        kind, why, cause = _ENDED_FOR[ended]
        why += f": {seconds_short(attempt.reserved_seconds, declared)}" if ended is Cause.OVERTIME else ""
        return End(stage, attempt, _failed(kind, f"{why} ({detail})", ended.value), cause=cause)
    taken = stop_cause(attempt.stop_cause) if attempt.stop_cause else _STOPPED_BY.get(seen.cause)
    if taken is not None and taken in _TAKEN_AWAY:
        gone = Failure(FailureClass.PREEMPTED, f"the job was stopped: {taken.meaning} ({detail})", "")
        return _again(view, stage, attempt, gone, AttemptState.LOST, cause=taken)
    if _condemned(view, stage, attempt):
        return _again(view, stage, attempt, _hung(view, stage, attempt), AttemptState.LOST)
    code = seen.exit_code
    own = code is not None and (code > 0 or -code in _FAULTS) and code not in (ANOTHER_RUNS, NODE_FAILED)
    trace = job_status.trace if own and seen.cause is None and attempt.stop_requested_at is None else None
    if trace is not None:
        why = f"the job ended without a result: {trace.meaning} ({detail})"
        signature = f"{trace.name}@{seen.node}" if trace.of_node and seen.node else trace.name
        if not trace.kind.retried:
            return End(stage, attempt, _failed(trace.kind, why, signature))
        failure = Failure(trace.kind, why, signature)
        return _again(view, stage, attempt, failure, AttemptState.LOST, cause=StopCause.INFRASTRUCTURE)
    # an exit code or a fault of the program would recur; a kill, a duplicate start or a failed node does not
    signature = f"exit {code}" if own else ""
    if seen.cause is Cause.NODE_LOST and seen.node:
        signature = f"{Cause.NODE_LOST}@{seen.node}"
    failure = Failure(FailureClass.INFRASTRUCTURE, f"the job ended without a result ({detail})", signature)
    cause = StopCause.SUPERSEDED if seen.exit_code == ANOTHER_RUNS else StopCause.INFRASTRUCTURE
    return _again(view, stage, attempt, failure, AttemptState.LOST, cause=cause)


def not_launched(view: View, stage: StageRecord, attempt: AttemptRecord, failure: Failure) -> Effect:
    """Return the effect for an attempt whose job the executor rejected."""
    return _again(view, stage, attempt, failure, AttemptState.LOST, cause=StopCause.INFRASTRUCTURE)


def _again(
    view: View,
    stage: StageRecord,
    attempt: AttemptRecord,
    failure: Failure,
    ended: AttemptState,
    said: JobResult | None = None,
    cause: StopCause | None = None,
) -> TryAgain:
    """Back off and try again, unless the attempts are used up or the same failure happened twice in a row."""
    tried = [one for one in view.tries(stage.name) if one.number > stage.retried_after]
    wait = BACKOFF_SECONDS[min(len(tried), len(BACKOFF_SECONDS)) - 1]
    over = why_not_again(view.manifest, tried, failure)
    if failure.kind is FailureClass.INFRASTRUCTURE and _condemned(view, stage, attempt):
        cause = StopCause.STALLED
    elif failure.kind is FailureClass.PREEMPTED and cause is None:
        cause = StopCause.PREEMPTED
    return TryAgain(stage, attempt, failure, ended, said or JobResult("failed"), wait, over, cause)


def hold_back(
    manifest: Manifest,
    stage: StageRecord,
    attempts: Sequence[AttemptRecord],
    spent: budgets.Spending,
    *,
    free: int,
    rivals: int = 0,
) -> tuple[Reason, str] | budgets.Share:
    """Return why a ready stage that duplicates no other stage cannot start yet, or else its attempt's budget share.

    Args:
        attempts: all attempts of the stage's run.
        free: the number of free slots.
        rivals: other stages that could start now: each gets an equal share.
    """
    if free < 1:
        return Reason.WAITING_FOR_SLOT, "every slot of this host is taken"
    if not budgets.limited(manifest):
        return budgets.Share()
    others = budgets.living(attempts)
    mine = [one for one in attempts if one.stage == stage.name and one.number > stage.retried_after]
    whole = bool(mine) and mine[-1].reason == Reason.BUDGET_EXCEEDED  # the last attempt's share was too small
    share = budgets.divided(budgets.left(manifest, spent, others), 1 if whole else 1 + min(rivals, free - 1))
    if others and (whole or share.empty):
        return Reason.WAITING_FOR_BUDGET, f"stage {others[0].stage} has reserved the rest of the budget"
    return share
