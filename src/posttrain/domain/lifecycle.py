"""State machines of run, stage, attempt and release as data, and the reason codes of their states.

Every transition is a compare-and-set on (id, generation) with its event. A transition outside these tables is a bug and
raises an error. The diagrams in docs/architecture.md are generated from the tables (`handbook/states.py`).

A reason code states why a run, a stage or an attempt is in its state; each code is listed with its meaning and the next
action. A run that fails has the reason of the stage that failed it. The strings are stored, and scripts read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from posttrain.domain.errors import ConflictError, FailureClass

_NOTHING = "nothing"
_RUN, _STAGE, _ATTEMPT = "run", "stage", "attempt"
_ENDED = (_RUN, _STAGE)  # the reason of a stage that ends, and of its run
_ALL = (_RUN, _STAGE, _ATTEMPT)


class RunState(StrEnum):
    PENDING = "pending"  # submitted; no process drives it yet
    RUNNING = "running"  # its stages are under way
    STOPPING = "stopping"  # a user requested a stop; its jobs write a checkpoint
    STOPPED = "stopped"  # a user stopped it; `posttrain retry` continues it
    SUCCEEDED = "succeeded"  # every stage ended, and the model is released if the file has a release
    REJECTED = "rejected"  # a gate did not pass: the run completed, but the model was not released
    FAILED = "failed"  # a stage failed; `posttrain retry` continues it


class StageState(StrEnum):
    PENDING = "pending"  # its inputs do not exist yet
    READY = "ready"  # its inputs exist; no attempt is live
    RUNNING = "running"  # an attempt is live, or a wait has begun
    SUCCEEDED = "succeeded"  # its outputs exist, computed here or reused
    SKIPPED = "skipped"  # there is nothing to do (for example, no baseline to measure, because the channel is empty)
    REJECTED = "rejected"  # a gate did not pass
    STOPPED = "stopped"  # stopped with its run
    FAILED = "failed"  # its last attempt failed, or its wait reached its deadline


class AttemptState(StrEnum):
    PLANNED = "planned"  # the attempt is recorded; there is no record yet that its job was submitted
    LAUNCHED = "launched"  # the executor has the job
    SUCCEEDED = "succeeded"  # the job wrote its result
    STOPPED = "stopped"  # the job ended on request
    FAILED = "failed"  # the job reported a failure, or could not be launched
    LOST = "lost"  # the job ended without a result: another attempt follows


class ReleaseState(StrEnum):
    PROPOSED = "proposed"  # the channel does not point at it yet
    LIVE = "live"  # the channel points at it
    SUPERSEDED = "superseded"  # a later release is live
    ROLLED_BACK = "rolled_back"  # a user pointed the channel back at an earlier release


Table = Mapping[str, frozenset[str]]


def _table(rows: Mapping[StrEnum, tuple[StrEnum, ...]]) -> Table:
    return {str(source): frozenset(map(str, targets)) for source, targets in rows.items()}


RUN = _table(
    {
        RunState.PENDING: (RunState.RUNNING, RunState.STOPPING, RunState.FAILED),
        RunState.RUNNING: (RunState.STOPPING, RunState.SUCCEEDED, RunState.REJECTED, RunState.FAILED),
        RunState.STOPPING: (RunState.STOPPED, RunState.FAILED, RunState.SUCCEEDED, RunState.REJECTED),
        RunState.STOPPED: (RunState.RUNNING,),
        RunState.FAILED: (RunState.RUNNING,),
        RunState.SUCCEEDED: (),
        RunState.REJECTED: (),
    }
)


STAGE = _table(
    {
        StageState.PENDING: (StageState.READY, StageState.SKIPPED, StageState.SUCCEEDED, StageState.STOPPED),
        StageState.READY: (
            StageState.RUNNING,
            StageState.SUCCEEDED,  # stage cache, or a stage that needs no process
            StageState.SKIPPED,
            StageState.REJECTED,
            StageState.FAILED,
            StageState.STOPPED,
        ),
        StageState.RUNNING: (StageState.SUCCEEDED, StageState.FAILED, StageState.STOPPED, StageState.READY),
        StageState.SUCCEEDED: (),
        StageState.SKIPPED: (),
        StageState.REJECTED: (),
        StageState.STOPPED: (StageState.PENDING,),
        StageState.FAILED: (StageState.PENDING,),
    }
)


ATTEMPT = _table(
    {
        AttemptState.PLANNED: (AttemptState.LAUNCHED, AttemptState.LOST, AttemptState.STOPPED, AttemptState.FAILED),
        AttemptState.LAUNCHED: (AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.STOPPED, AttemptState.LOST),
        AttemptState.SUCCEEDED: (),
        AttemptState.STOPPED: (),
        AttemptState.FAILED: (),
        AttemptState.LOST: (),
    }
)


RELEASE = _table(
    {
        ReleaseState.PROPOSED: (ReleaseState.LIVE,),
        ReleaseState.LIVE: (ReleaseState.SUPERSEDED, ReleaseState.ROLLED_BACK),
        ReleaseState.SUPERSEDED: (ReleaseState.LIVE,),
        ReleaseState.ROLLED_BACK: (ReleaseState.LIVE,),
    }
)


TABLES: Mapping[str, Table] = {"run": RUN, "stage": STAGE, "attempt": ATTEMPT, "release": RELEASE}


INITIAL: Mapping[str, str] = {
    "run": RunState.PENDING,
    "stage": StageState.PENDING,
    "attempt": AttemptState.PLANNED,
    "release": ReleaseState.PROPOSED,
}


def check_transition(machine: str, source: str, target: str) -> None:
    """Check that a transition is in the table.

    Raises:
        ConflictError: `source → target` is not in the table.
    """
    if target not in TABLES[machine].get(source, frozenset()):
        allowed = ", ".join(sorted(TABLES[machine].get(source, ()))) or "nothing: it is final"
        raise ConflictError(f"{machine} cannot go from {source} to {target}; from {source} it can go to {allowed}")


def is_final(machine: str, state: str) -> bool:
    """Return whether the object stays in `state` unless a person acts (`retry`)."""
    if machine in ("run", "stage"):
        return state in ("succeeded", "rejected", "failed", "stopped", "skipped")
    return not TABLES[machine][state]


class Reason(StrEnum):
    """A reason code."""

    of: tuple[str, ...]  # the objects that may have it: run, stage, attempt
    meaning: str  # one sentence
    action: str  # what a user should do next

    def __new__(cls, code: str, of: tuple[str, ...], meaning: str, action: str) -> Self:
        self = str.__new__(cls, code)
        self._value_ = code
        self.of, self.meaning, self.action = of, meaning, action
        return self

    # --- waiting ------------------------------------------------------------------------------------------------------
    SUBMITTED = "Submitted", (_RUN,), "No driver has read the run yet.", "`attach` drives the run"
    WAITING_FOR_INPUTS = (
        "WaitingForInputs",
        (_STAGE,),
        "A stage on which this stage depends has not ended yet.",
        _NOTHING,
    )
    READY = "Ready", (_STAGE,), "The stage's inputs are available; the driver starts it at its next pass.", _NOTHING
    WAITING_FOR_SLOT = (
        "WaitingForSlot",
        (_STAGE,),
        "All job slots of the host are in use.",
        _NOTHING,
    )
    WAITING_FOR_BUDGET = (
        "WaitingForBudget",
        (_STAGE,),
        "Another stage of the run has reserved the rest of the budget.",
        _NOTHING,
    )
    WAITING_FOR_DEVICES = (
        "WaitingForDevices",
        (_STAGE,),
        "The devices that the stage requests are in use.",
        "nothing, or end the jobs that hold them",
    )
    WAITING_FOR_CLUSTER = (
        "WaitingForCluster",
        (_STAGE,),
        "The cluster does not answer, or does not accept the job for now; the job is submitted again.",
        _NOTHING,
    )
    WAITING_FOR_IDENTICAL_STAGE = (
        "WaitingForIdenticalStage",
        (_STAGE,),
        "A stage of another run computes the same result, which will be reused.",
        _NOTHING,
    )
    WAITING_FOR_TIME = (
        "WaitingForTime",
        (_STAGE,),
        "The stage waits until the time in the run file has passed.",
        _NOTHING,
    )
    WAITING_FOR_SIGNAL = (
        "WaitingForSignal",
        (_STAGE,),
        "The stage waits for its signal.",
        "`signal` continues it",
    )
    WAITING_FOR_APPROVAL = (
        "WaitingForApproval",
        (_STAGE,),
        "The channel's policy requires approvals for this release.",
        "`approve`, by an approver that the policy names",
    )
    BACK_OFF = (
        "BackOff",
        (_STAGE,),
        "The stage's attempt was lost, and the next attempt starts after a pause.",
        _NOTHING,
    )
    RETRIED = "Retried", _ENDED, "A user requested another attempt.", _NOTHING

    # --- under way ----------------------------------------------------------------------------------------------------
    RUNNING = "Running", _ENDED, "Run: a stage is being computed. Stage: an attempt is live.", _NOTHING
    PLANNED = (
        "Planned",
        (_ATTEMPT,),
        "The attempt is recorded; there is no record yet that its job was submitted.",
        _NOTHING,
    )
    LAUNCHED = "Launched", (_ATTEMPT,), "The attempt's job is submitted.", _NOTHING
    SUBMISSION_UNKNOWN = (
        "SubmissionUnknown",
        (_STAGE,),
        "The executor did not report whether it has the job; no other job is submitted until this is known.",
        "check that the executor is reachable",
    )
    JOB_NOT_VISIBLE = (
        "JobNotVisible",
        (_STAGE,),
        "The executor does not see the job, which does not prove that it ended.",
        "check that the executor is reachable; if its host is lost, `dead` with `--assume-dead`",
    )
    QUEUED = (
        "Queued",
        (_STAGE,),
        "Its job waits in the queue of its cluster; the message contains the cluster's own reason.",
        "nothing: the cluster starts the job when it has room",
    )
    STALLED = (
        "Stalled",
        (_STAGE, _ATTEMPT),
        "Its job reported no progress for `runtime.stall_after`: it gets a checkpoint request, then it is killed.",
        "nothing: another attempt resumes; `logs` shows where the job hung",
    )
    ANOTHER_RUNS = (
        "AnotherRuns",
        (_STAGE, _ATTEMPT),
        "Another process began the attempt before the launched job did; the result of that process counts.",
        "nothing; if its host is lost, `dead` with `--assume-dead`",
    )
    ASSUMED_DEAD = (
        "AssumedDead",
        (_ATTEMPT,),
        "A user declared the attempt's job dead, because no executor can observe the job.",
        "nothing: another attempt resumes",
    )
    STOP_REQUESTED = (
        "StopRequested",
        (_RUN, _ATTEMPT),
        "A stop was requested: its job writes a checkpoint and ends, or is killed after the grace period.",
        _NOTHING,
    )
    TROUBLED = "Troubled", (_STAGE,), "The driver's processing of the stage raised an error, and is retried.", _NOTHING
    SET_ASIDE = (
        "SetAside",
        _ENDED,
        "The driver's processing of the run or stage failed repeatedly, and continues only when a user requests it.",
        "fix the cause that the message names, then `dead` with `--retry`",
    )

    # --- done ---------------------------------------------------------------------------------------------------------
    SUCCEEDED = "Succeeded", _ALL, "The run, stage or attempt has succeeded.", _NOTHING
    WAIT_OVER = "WaitOver", (_STAGE,), "The stage's wait is over.", _NOTHING
    CACHE_HIT = "CacheHit", (_STAGE,), "The result of an identical stage is reused.", _NOTHING
    CHANNEL_EMPTY = "ChannelEmpty", (_STAGE,), "The channel has no release, so there is no baseline.", _NOTHING
    GATE_PASSED = "GatePassed", (_STAGE,), "Every gate passed.", _NOTHING
    PROMOTED = "Promoted", (_STAGE,), "The channel points at the run's model now.", _NOTHING
    ALREADY_LIVE = "AlreadyLive", (_STAGE,), "The channel already pointed at this model.", _NOTHING
    STOPPED = "Stopped", _ALL, "A user stopped the run.", "`retry` resumes it"
    NOT_REACHED = "NotReached", (_STAGE,), "The run ended before this stage.", "see the run's reason"

    # --- turned away --------------------------------------------------------------------------------------------------
    GATE_FAILED = "GateFailed", _ENDED, "A measured value misses the threshold of its gate.", "`why` shows the numbers"
    GATE_INCONCLUSIVE = (
        "GateInconclusive",
        _ENDED,
        "There are too few items to decide whether a gate passes.",
        "measure on more items",
    )
    GATE_ERROR = "GateError", _ENDED, "A gate could not be judged.", "fix the cause that `why` names, then run again"
    CHANNEL_MOVED = (
        "ChannelMoved",
        _ENDED,
        "The channel got another release after the gates were judged.",
        "`run` with `--again` judges against that release",
    )
    CHANNEL_FROZEN = (
        "ChannelFrozen",
        _ENDED,
        "The channel is frozen or protected.",
        "`channel unfreeze`, then `promote`",
    )
    POLICY_NOT_MET = (
        "PolicyNotMet",
        _ENDED,
        "The gates were judged under a policy other than the channel's current one.",
        "`run` plans the run under the current policy",
    )
    APPROVAL_REJECTED = (
        "ApprovalRejected",
        _ENDED,
        "An approver rejected the release.",
        "`why` shows the approver; `approve` by the same person withdraws the rejection; then `promote`",
    )
    RECALLED = (
        "Recalled",
        _ENDED,
        "The model depends on a recalled asset.",
        "`lineage` shows the asset; train again from another version",
    )
    QUARANTINED = (
        "Quarantined",
        _ENDED,
        "The model was rolled back from this channel.",
        "`promote` with `--lift-quarantine REASON`",
    )

    # --- failed -------------------------------------------------------------------------------------------------------
    LOST = "Lost", (_ATTEMPT,), "Its job ended without a result.", "nothing: another attempt resumes"
    PREEMPTED = (
        "Preempted",
        (_ATTEMPT,),
        "Its job was preempted from outside; this does not count as an attempt.",
        "nothing: another attempt resumes",
    )
    ATTEMPTS_EXHAUSTED = (
        "AttemptsExhausted",
        _ENDED,
        "All attempts that the budget allows were lost.",
        "`logs` shows the cause; then `retry`",
    )
    CIRCUIT_OPEN = (
        "CircuitOpen",
        _ENDED,
        "The same failure occurred twice in a row, so a third attempt would not help.",
        "`logs` shows the cause; fix it, then `retry`",
    )
    BUDGET_EXCEEDED = (
        "BudgetExceeded",
        _ALL,
        "The run's budget is spent.",
        "raise the budget in the run file, and submit the run again",
    )
    SIGNAL_MISSED = (
        "SignalMissed",
        _ENDED,
        "The signal did not arrive within the time in the run file.",
        "`retry` waits again",
    )
    CODE_CHANGED = (
        "CodeChanged",
        _ENDED,
        "The code differs from the code in the manifest.",
        "restore the code, then `retry`; or submit the run again, which locks the current code",
    )
    ENVIRONMENT_CHANGED = (
        "EnvironmentChanged",
        _ENDED,
        "The installed packages differ from those that the run began with.",
        "restore the packages, or accept the current packages with `retry`; if Posttrain's own code changed, submit "
        "the run again, which locks the current code",
    )
    CORRUPT = (
        "Corrupt",
        _ALL,
        "Stored bytes do not match their digest.",
        "`verify` lists the damaged objects; restore these, then `retry`",
    )
    JOB_FAILED = "JobFailed", _ALL, "The job failed without recording a cause.", "`logs` shows the cause; then `retry`"
    JOB_FAILED_INFRASTRUCTURE = (
        "JobFailed:infrastructure",
        (_ATTEMPT,),
        "A failure outside the job ended it, such as that of a process, a node or a disk.",
        "nothing: another attempt resumes",
    )
    JOB_FAILED_OUT_OF_MEMORY = (
        "JobFailed:out_of_memory",
        _ALL,
        "The job requested more memory than the machine has.",
        "lower the stage's batch or micro-batch size, and submit the run again",
    )
    JOB_FAILED_DISK_FULL = (
        "JobFailed:disk_full",
        _ALL,
        "The disk is full.",
        "free some space, then `retry`",
    )
    JOB_FAILED_DIVERGED = (
        "JobFailed:diverged",
        _ALL,
        "Training diverged, for example to a loss that is not finite.",
        "change the parameters, and submit again",
    )
    JOB_FAILED_BAD_INPUT = (
        "JobFailed:bad_input",
        _ALL,
        "Data, a model, a reward or a parameter cannot be used.",
        "fix the cause that the message names, then `retry`",
    )
    JOB_FAILED_BUG = (
        "JobFailed:bug",
        _ALL,
        "The job raised an unexpected exception.",
        "`logs` has the traceback; fix the bug, then `retry`",
    )

    @classmethod
    def of_failure(cls, kind: FailureClass) -> Reason:
        """Return the reason code of a class of failure."""
        special = {FailureClass.BUDGET: cls.BUDGET_EXCEEDED, FailureClass.PREEMPTED: cls.PREEMPTED}
        return special.get(kind) or _BY_CODE[f"{cls.JOB_FAILED}:{kind.value}"]


class StopCause(StrEnum):
    """Why a job was stopped, by an order of the control side or from outside. The attempt's row stores the cause."""

    meaning: str  # one clause

    def __new__(cls, code: str, meaning: str) -> Self:
        self = str.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self

    PERSON = "person", "a person stopped the run"
    BUDGET = "budget", "the attempt has spent its share of the budget"
    STALLED = "stalled", "it reported no progress for `runtime.stall_after`"
    PREEMPTED = "preempted", "a scheduler or a signal from outside preempted it"
    DRAINED = "drained", "its node is being drained"
    SUPERSEDED = "superseded", "another job of the same attempt computes the stage"
    OUT_OF_MEMORY = "out_of_memory", "it exceeded its memory limit"
    INFRASTRUCTURE = "infrastructure", "its process, its supervisor or its node was lost"


def stop_cause(code: str) -> StopCause:
    """Return the cause that an attempt stores."""
    return next(one for one in StopCause if one.value == code)


# of a running stage without visible progress
HELD_UP = (
    *(Reason.STALLED, Reason.QUEUED, Reason.ANOTHER_RUNS, Reason.JOB_NOT_VISIBLE),
    *(Reason.SUBMISSION_UNKNOWN, Reason.TROUBLED, Reason.SET_ASIDE),
)


_BY_CODE: Mapping[str, Reason] = {reason.value: reason for reason in Reason}


def meaning(code: str) -> str:
    """Return the meaning of a stored reason code, or the code itself if only another version of Posttrain has it."""
    return _BY_CODE[code].meaning if code in _BY_CODE else code
