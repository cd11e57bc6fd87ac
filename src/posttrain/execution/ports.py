"""The two ports of the execution plane: where a job runs (`Executor`) and what the job is (`Trainer`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.domain.jobs import (
    Capacity,
    JobOrder,
    JobResult,
    JobSpec,
    LogPage,
    Observation,
    Signal,
    Submission,
)
from posttrain.domain.kinds import StageContract
from posttrain.domain.requests import JobRef, JobRequest, Listed
from posttrain.store.attempts import AttemptFolder


class Executor(Protocol):
    """Runs jobs somewhere. Every implementation:

    - knows a job by its name and its attempt folder; it needs nothing that a caller remembered, so any process may
      submit, observe, signal or kill, before and after crashes of its own and of the executor's helpers;
    - says what it knows and no more: a submission that may have arrived is Unknown, an absence that proves nothing is
      NOT_VISIBLE_YET, and a job is LOST only on proof that nothing of it runs;
    - never starts a job that ended or was lost again of a caller's accord: that is a new attempt. What it does of its
      own accord (a requeue) keeps the name, and counts as another incarnation;
    - lets the job outlive the process that submitted it;
    - gives no device to two jobs, whoever submitted them: a job has those of its `gang` from its start until it is
      gone;
    - refuses a request that it cannot meet in full, and drops none of it in silence;
    - ends a job whose `max_seconds` are over, and waits `grace_seconds` before it kills one;
    - passes `environment` and the values of `secrets` on top of its own environment and runs
      `python -m MODULE ATTEMPT_DIR`;
    - bounds every wait.

    Only `submit` needs the request; everything else finds the job by a `JobRef`.
    """

    @property
    def name(self) -> str:
        """`local`, `ray` …: what an attempt's record says."""

    @property
    def attests(self) -> bool:
        """Whether its jobs run in this environment, and compare it with the one that their order names."""

    @property
    def idempotent(self) -> bool:
        """Whether submitting a name again finds the job that is there, also when two processes submit at once.

        Where it does not, a caller that submits anew before absence is proven may start a second job of that name.
        """

    @property
    def images(self) -> bool:
        """Whether its jobs can run in an image that a request names, and reach nothing of the machine but their own
        folder and what their order names. Where they cannot, a request with an image is refused.
        """

    def submit(self, request: JobRequest) -> Submission:
        """Create the job of that name, or find it.

        Raises:
            InputError: it asks for something that this executor never gives.
            CapacityError: devices that it needs are taken; it was not started, and trying again is safe.
            InfrastructureError: it was refused or could not be started; nothing runs, and trying again is safe.
            WorkspaceError: the attempt folder cannot be written.
        """

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """One look at each of the jobs, in their order, with as few questions to whoever runs them as can be.

        Raises:
            InfrastructureError: nobody answers; that says nothing of the jobs.
        """

    def signal(self, job: JobRef, word: Signal) -> None:
        """Ask the job for something by its channel; return at once. A job that starts late finds the request and obeys.

        Where the channel is, `job.channel` says: the order in the job's folder may be the job's own by then.

        Raises:
            InfrastructureError, WorkspaceError: the request could not be left.
        """

    def kill(self, job: JobRef) -> None:
        """End the job: terminate, a while later kill. Whether it is gone, `observe` says; a job nobody has is no error.

        Raises:
            InfrastructureError: it may not have been reached.
            DeadlineError: it survived being killed (a process stuck in the kernel, an unreachable node).
        """

    def list(self, prefix: str) -> list[Listed]:
        """Its jobs whose names begin with `prefix` and are not known to have ended."""

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """What the job printed, from `cursor` on: whole lines, as many as fit a page; nothing where there is no log."""

    def capacity(self) -> Capacity:
        """The devices it deals out, and who has them now.

        Raises:
            InfrastructureError: that cannot be told.
        """


class Trainer(Protocol):
    """Knows what a stage kind means and compiles it to a process. Every implementation is pure but for `collect`."""

    @property
    def name(self) -> str:
        """The word of `trainer:` in run.yaml."""

    def code_digest(self) -> str:
        """Digest of the sources, engine versions and platform that decide results: part of every stage's cache key."""

    def check(self, kind: str, params: Mapping[str, Any]) -> StageContract:
        """Validate and normalise a stage.

        Raises:
            InputError: naming the field, the constraint and the value.
        """

    def devices(self, kind: str, params: Mapping[str, Any]) -> int:
        """The accelerators of its machine that a job of the stage computes on, where there are any.

        Args:
            params: as `check` normalised them.
        """

    def compile(self, order: JobOrder, attempt_dir: Path) -> JobSpec:
        """The module to run, the devices and the environment it needs before its first import."""

    def collect(self, attempt: AttemptFolder) -> JobResult | None:
        """How the job ended by its own word; None while there is no word."""
