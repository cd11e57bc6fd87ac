"""The two ports of the execution plane: where a job runs (`Executor`) and what the job is (`Trainer`).

Results depend on the code of trainers, kinds and engines: its digests (`present_code`) are in a manifest's `code`. Both
sides compare them: the driver before it launches a stage, and the agent of a job on another machine before the job.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from posttrain.domain.engines import ENGINE, engine_words, installed_engine
from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.domain.jobs import (
    Capacity,
    JobCommand,
    JobOrder,
    JobResult,
    LogPage,
    Observation,
    Submission,
)
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.domain.kinds import StageContract, installed_kind
from posttrain.domain.manifest import KIND
from posttrain.store.attempts import AttemptFolder

T = TypeVar("T")
_PAUSE_SECONDS = 30.0
_TRIAL_SECONDS = 5.0
_WAIT_SECONDS = 2.0
_AT_ONCE = 2  # requests to one back-end


class Executor(Protocol):
    """Runs jobs somewhere. Every implementation:

    - identifies a job by its name and its mailbox and needs no state of the caller, so any process may submit,
      observe or kill a job, before and after crashes of that process and of the executor's helpers;
    - reports only proven facts: a submission that may have arrived is Unknown, an absence that proves nothing is
      NOT_VISIBLE_YET, and a job is LOST only on proof that no process of it runs;
    - never restarts an ended or lost job for a caller: that is a new attempt. A restart by the executor itself (a
      requeue) keeps the name, and counts as another incarnation;
    - starts jobs that outlive the process that submitted them;
    - never gives a device to two jobs, even of different users: a job has the devices of its `gang` from its start
      until its end;
    - rejects a spec that it cannot meet in full, and ignores no part of it;
    - ends a job after its `max_seconds`, and waits `grace_seconds` before it kills the job;
    - adds `environment` and the values of `secrets` to the executor's environment and runs
      `python -m MODULE ATTEMPT_DIR`;
    - bounds every wait.

    Only `submit` needs the spec; everything else finds the job by a `JobRef`.
    """

    @property
    def name(self) -> str:
        """`local`, `ray` …, as in an attempt's record."""

    @property
    def remote(self) -> bool:
        """Whether its jobs share no disk with this process: they stage their files (`store.staging`).

        The order and the spec of such a job are in its mailbox, and `python -m posttrain.execution.agent MAILBOX` runs
        it, with the spec's `bootstrap` as POSTTRAIN_BOOTSTRAP, which no other user of the node may read.
        """

    @property
    def attests(self) -> bool:
        """Whether its jobs run in this environment and compare it with the environment that their order names."""

    @property
    def idempotent(self) -> bool:
        """Whether submitting a name again finds the existing job, even if two processes submit at the same time.

        If false, a caller that submits again before absence is certain may start a second job with that name.
        """

    @property
    def images(self) -> bool:
        """Whether its jobs can run in an image that a spec names; false: a spec with an image is rejected.

        Such jobs have access only to their own folder and to the paths that their order names.
        """

    @property
    def avoids(self) -> bool:
        """Whether a spec may name nodes on which its job must not run; false: such a spec is rejected."""

    def submit(self, spec: JobSpec) -> Submission:
        """Create the job with the spec's name, or find the existing job.

        Raises:
            InputError: the spec requires something that this executor never provides.
            CapacityError: devices that the job needs are taken; the job was not started, and a retry is safe.
            InfrastructureError: the job was rejected or could not be started; no job runs, and a retry is safe.
            WorkspaceError: the attempt folder cannot be written.
        """

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """Return one observation for each job, in order, with as few requests to the back-end as possible.

        Raises:
            InfrastructureError: the back-end does not answer, which proves nothing about the jobs.
        """

    def kill(self, job: JobRef) -> None:
        """Terminate the job, then kill it. `observe` returns whether it has ended; an unknown job is not an error.

        Raises:
            InfrastructureError: the request may not have arrived.
            DeadlineError: the job survived the kill (a process stuck in the kernel, an unreachable node).
        """

    def list(self, prefix: str) -> list[Listed]:
        """Return the executor's jobs that may still run and whose names begin with `prefix`."""

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """Return the job's output from `cursor` on: whole lines, as many as fit a page; empty without a log."""

    def capacity(self) -> Capacity:
        """Return the devices that the executor assigns, and their current holders.

        Raises:
            InfrastructureError: the devices cannot be read.
        """


class NotAskedError(InfrastructureError):
    """A request was not sent, because earlier ones were not answered; so it changed nothing."""


class Patience:
    """Sends requests to a back-end that may not answer.

    After an unanswered request, it sends none for `_PAUSE_SECONDS`, and waits `_TRIAL_SECONDS` for the next answer. It
    sends at most `_AT_ONCE` requests at a time. A thread that would have to wait longer than `_WAIT_SECONDS` before its
    request is sent gets an error, so it can work for other back-ends.
    """

    def __init__(self, name: str) -> None:
        self._name, self._until, self._silent = name, 0.0, False
        self._room = threading.BoundedSemaphore(_AT_ONCE)

    def ask(self, request: Callable[[float], T], seconds: float) -> T:
        """Return the answer to a request, which gets its deadline in seconds and raises TimeoutError after it.

        Raises:
            NotAskedError: there was no answer a moment ago, or others wait for one.
            InfrastructureError: there was no answer.
        """
        if time.monotonic() < self._until:
            raise NotAskedError(f"executor {self._name} does not answer; asking again within {_PAUSE_SECONDS:.0f} s")
        if not self._room.acquire(timeout=_WAIT_SECONDS):
            raise NotAskedError(f"executor {self._name} has not answered earlier requests yet; asking again soon")
        limit = min(seconds, _TRIAL_SECONDS) if self._silent else seconds
        try:
            answer = request(limit)
        except TimeoutError as error:
            self._until, self._silent = time.monotonic() + _PAUSE_SECONDS, True
            raise InfrastructureError(f"executor {self._name} did not answer within {limit:g} s") from error
        finally:
            self._room.release()
        self._silent = False
        return answer


class Trainer(Protocol):
    """Compiles stages of its kinds to processes. Every method is pure except `collect`."""

    @property
    def name(self) -> str:
        """The value of `trainer:` in run.yaml."""

    def code_digest(self) -> str:
        """Return the digest of the sources, engine versions and platform that decide results, for every cache key."""

    def check(self, kind: str, params: Mapping[str, Any]) -> StageContract:
        """Validate and normalise a stage.

        Raises:
            InputError: a parameter is invalid; the message names the field, the constraint and the value.
        """

    def devices(self, kind: str, params: Mapping[str, Any]) -> int:
        """Return the number of accelerators on which a job of the stage computes, if the machine has accelerators.

        Args:
            params: the parameters that `check` normalised.
        """

    def compile(self, order: JobOrder) -> JobCommand:
        """Return the module to run, the devices, and the variables that the module needs before its first import."""

    def collect(self, attempt: AttemptFolder) -> JobResult | None:
        """Return the result that the job wrote; None: there is no result yet."""


def present_code(name: str, trainers: Mapping[str, Trainer]) -> str:
    """Return the current digest of a name in `code`.

    Raises:
        InputError: the trainer, kind or engine is no longer installed, or its package is broken.
    """
    if name.startswith(ENGINE):
        return installed_engine(*engine_words(name)).code_digest()
    if name.startswith(KIND):
        kind = name.removeprefix(KIND)
        found = installed_kind(kind)
        if found is None:
            raise InputError(f"kind {kind!r} must be installed; install its package")
        return found.code_digest()
    return trainer_of(name, trainers).code_digest()


def trainer_of(name: str, trainers: Mapping[str, Trainer]) -> Trainer:
    """Return the trainer of this name.

    Raises:
        InputError: the trainer is not installed, or its package is broken.
    """
    if name not in trainers:
        known = ", ".join(sorted(trainers))
        raise InputError(f"trainer {name!r} is not installed (installed: {known}); install its package")
    return trainers[name]


def called(name: str) -> str:
    """Return a name of `code` as errors show it."""
    if name.startswith(ENGINE):
        return "{} engine {!r}".format(*engine_words(name))
    return f"kind {name.removeprefix(KIND)!r}" if name.startswith(KIND) else f"trainer {name!r}"
