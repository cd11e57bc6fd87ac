"""Effects of a decision about a run: `control.decide` returns them as values, `control.stages` carries them out."""

from dataclasses import dataclass

from posttrain.domain.jobs import Failure, JobResult
from posttrain.domain.lifecycle import AttemptState, Reason, RunState, StageState, StopCause
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord, Watch


@dataclass(frozen=True, slots=True)
class MoveRun:
    """Change the state of the run."""

    run: RunRecord
    state: RunState
    reason: str
    message: str
    next_action: str = ""
    not_reached: tuple[StageRecord, ...] = ()  # stages that will not start
    culprit: StageRecord | None = None  # the stage that caused the change


@dataclass(frozen=True, slots=True)
class _OfStage:
    stage: StageRecord


@dataclass(frozen=True, slots=True)
class _OfAttempt(_OfStage):
    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class StopStage(_OfStage):
    """Stop a stage that had not started when a person stopped its run."""


@dataclass(frozen=True, slots=True)
class Bind(_OfStage):
    """Bind the inputs of a stage, all of which exist."""


@dataclass(frozen=True, slots=True)
class Start(_OfStage):
    """Reuse a cached result, or plan an attempt."""


@dataclass(frozen=True, slots=True)
class Judge(_OfStage):
    """Judge the gates."""


@dataclass(frozen=True, slots=True)
class Release(_OfStage):
    """Move the channel."""


@dataclass(frozen=True, slots=True)
class EndWait(_OfStage):
    """End a wait: its condition holds, or its time is over."""

    state: StageState  # succeeded | failed
    reason: Reason
    message: str
    next_action: str = ""


@dataclass(frozen=True, slots=True)
class Launch(_OfAttempt):
    """Submit a planned attempt."""


@dataclass(frozen=True, slots=True)
class RecordLaunch(_OfAttempt):
    """Record the launch of a job that the executor already has."""

    handle: str


@dataclass(frozen=True, slots=True)
class Say(_OfStage):
    """Record why a stage waits."""

    reason: Reason
    message: str
    next_action: str = "none needed"


@dataclass(frozen=True, slots=True)
class AskToStop(_OfAttempt):
    """Request that a job write a checkpoint and end."""

    cause: StopCause


@dataclass(frozen=True, slots=True)
class KeepWatch(_OfAttempt):
    """Record how long a job has been silent."""

    watch: Watch
    goes_on: bool = False  # a checkpoint was requested, and the job makes progress again
    said: str = ""  # why the job will be killed


@dataclass(frozen=True, slots=True)
class AskToCheckpoint(_OfAttempt):
    """Request a checkpoint from a job that appears to hang, and record the request in the job's stage."""

    watch: Watch
    message: str


@dataclass(frozen=True, slots=True)
class Kill(_OfAttempt):
    """Kill a job that did not end by itself; the next look observes whether it has ended."""


@dataclass(frozen=True, slots=True)
class Collect(_OfAttempt):
    """Publish a job's outputs, and end the attempt."""

    result: JobResult


@dataclass(frozen=True, slots=True)
class End(_OfAttempt):
    """End an attempt without outputs."""

    result: JobResult
    why: str = ""  # the reason in the tombstone
    unless_begun: bool = False  # whether to skip the effect if a job of the attempt computes
    cause: StopCause | None = None  # the cause of a stop without a stop order


@dataclass(frozen=True, slots=True)
class TryAgain(_OfAttempt):
    """End a failed or lost attempt; the next attempt follows after `wait` seconds unless `over` is set."""

    failure: Failure
    ended: AttemptState
    said: JobResult
    wait: float
    over: tuple[Reason, str] | None  # reason and message if another attempt is pointless
    cause: StopCause | None = None  # why the attempt was stopped; None: it ended by itself


Effect = (
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
