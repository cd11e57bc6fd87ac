"""What can be done about a run, as values: what `control.decide` says and `control.stages` does."""

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
class _OfStage:
    stage: StageRecord


@dataclass(frozen=True, slots=True)
class _OfAttempt(_OfStage):
    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class StopStage(_OfStage):
    """A stage that had not begun when a person stopped its run."""


@dataclass(frozen=True, slots=True)
class Bind(_OfStage):
    """What a stage takes is there: bind it."""


@dataclass(frozen=True, slots=True)
class Start(_OfStage):
    """Reuse what was computed before, or plan an attempt."""


@dataclass(frozen=True, slots=True)
class Judge(_OfStage):
    """Judge the gates."""


@dataclass(frozen=True, slots=True)
class Release(_OfStage):
    """Move the channel."""


@dataclass(frozen=True, slots=True)
class EndWait(_OfStage):
    """What a stage waited for has come, or is waited for no longer."""

    state: StageState  # succeeded | failed
    reason: Reason
    message: str
    next_action: str = ""


@dataclass(frozen=True, slots=True)
class Launch(_OfAttempt):
    """Submit a planned attempt."""


@dataclass(frozen=True, slots=True)
class RecordLaunch(_OfAttempt):
    """The executor has the job already."""

    handle: str


@dataclass(frozen=True, slots=True)
class Say(_OfStage):
    """Write down what a stage waits for."""

    reason: Reason
    message: str
    next_action: str = "none needed"


@dataclass(frozen=True, slots=True)
class AskToStop(_OfAttempt):
    """Ask a job to checkpoint and end."""

    cause: StopCause


@dataclass(frozen=True, slots=True)
class KeepWatch(_OfAttempt):
    """Write down how long a job has been silent."""

    watch: Watch
    goes_on: bool = False  # it was asked to checkpoint, and moves again
    said: str = ""  # it is going to be killed: why


@dataclass(frozen=True, slots=True)
class AskToCheckpoint(_OfAttempt):
    """Ask a job that seems to hang for a checkpoint, and say that it does."""

    watch: Watch
    message: str


@dataclass(frozen=True, slots=True)
class Kill(_OfAttempt):
    """End a job that did not end by itself; whether it is gone, the next look says."""


@dataclass(frozen=True, slots=True)
class Collect(_OfAttempt):
    """Publish what a job left, and end the attempt."""

    result: JobResult


@dataclass(frozen=True, slots=True)
class End(_OfAttempt):
    """End an attempt that leaves nothing."""

    result: JobResult
    why: str = ""  # for the tombstone
    unless_begun: bool = False  # not if a job of it computes after all
    cause: StopCause | None = None  # of a stop that no order told the attempt of


@dataclass(frozen=True, slots=True)
class TryAgain(_OfAttempt):
    """End an attempt that infrastructure broke; another follows after `wait` seconds."""

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
