"""What can be done about a run, as values: what `control.decide` says and `control.actuator` does."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.domain.jobs import Failure, JobResult
from posttrain.domain.lifecycle import AttemptState, Reason, RunState, StageState, StopCause
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord, Watch


@dataclass(frozen=True, slots=True)
class MoveRun:
    """Give the run another state."""

    run: RunRecord
    state: RunState
    reason: str
    message: str
    next_action: str = ""
    not_reached: tuple[StageRecord, ...] = ()  # stages that will not start
    culprit: StageRecord | None = None  # for which stage's sake


@dataclass(frozen=True, slots=True)
class StopStage:
    """A stage that had not begun when a person stopped its run."""

    stage: StageRecord


@dataclass(frozen=True, slots=True)
class Bind:
    """What a stage takes is there: bind it."""

    stage: StageRecord


@dataclass(frozen=True, slots=True)
class Start:
    """Reuse what was computed before, or plan an attempt."""

    stage: StageRecord


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge the gates."""

    stage: StageRecord


@dataclass(frozen=True, slots=True)
class Release:
    """Move the channel."""

    stage: StageRecord


@dataclass(frozen=True, slots=True)
class EndWait:
    """What a stage waited for has come, or is waited for no longer."""

    stage: StageRecord
    state: StageState  # succeeded | failed
    reason: Reason
    message: str
    next_action: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Submit a planned attempt."""

    stage: StageRecord
    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class RecordLaunch:
    """The executor has the job already."""

    stage: StageRecord
    attempt: AttemptRecord
    handle: str


@dataclass(frozen=True, slots=True)
class Say:
    """Write down what a stage waits for."""

    stage: StageRecord
    reason: Reason
    message: str
    next_action: str = "none needed"


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Ask a job to checkpoint and end."""

    stage: StageRecord
    attempt: AttemptRecord
    cause: StopCause


@dataclass(frozen=True, slots=True)
class KeepWatch:
    """Write down how long a job has been silent."""

    stage: StageRecord
    attempt: AttemptRecord
    watch: Watch
    goes_on: bool = False  # it was asked to checkpoint, and moves again
    said: str = ""  # it is going to be killed: why


@dataclass(frozen=True, slots=True)
class AskToCheckpoint:
    """Ask a job that seems to hang for a checkpoint, and say that it does."""

    stage: StageRecord
    attempt: AttemptRecord
    watch: Watch
    message: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a job that did not end by itself; whether it is gone, the next look says."""

    stage: StageRecord
    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class Collect:
    """Publish what a job left, and end the attempt."""

    stage: StageRecord
    attempt: AttemptRecord
    result: JobResult


@dataclass(frozen=True, slots=True)
class End:
    """End an attempt that leaves nothing."""

    stage: StageRecord
    attempt: AttemptRecord
    result: JobResult
    why: str = ""  # for the tombstone
    unless_begun: bool = False  # not if a job of it computes after all
    cause: StopCause | None = None  # of a stop that no order told the attempt of


@dataclass(frozen=True, slots=True)
class TryAgain:
    """End an attempt that infrastructure broke; another follows after `wait` seconds."""

    stage: StageRecord
    attempt: AttemptRecord
    failure: Failure
    ended: AttemptState
    said: JobResult
    wait: float
    over: tuple[Reason, str] | None  # reason and words, where no other attempt would help
    cause: StopCause | None = None  # why it was stopped; None: it ended by itself


Order = (
    MoveRun
    | StopStage
    | Bind
    | Start
    | Judge
    | Release
    | EndWait
    | Launch
    | RecordLaunch
    | Say
    | AskToStop
    | KeepWatch
    | AskToCheckpoint
    | Kill
    | Collect
    | End
    | TryAgain
)
