"""The two ports of the execution plane: where a job runs (`Executor`) and what the job is (`Trainer`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from posttrain.domain.contracts import StageContract
from posttrain.domain.jobs import Capacity, JobOrder, JobResult, JobSpec, Observation
from posttrain.store.attempts import AttemptFolder


class Executor(Protocol):
    """Runs jobs somewhere. Every implementation:

    - knows a job by `spec.name` and its attempt folder; it needs nothing that a caller remembered, so any process may
      launch, observe or cancel, before and after crashes of its own and of the executor's helpers;
    - starts at most one job per attempt, ever: launching again finds it, running or ended, also when two processes
      launch at once. A job that ended or was lost is never started again: that is a new attempt;
    - lets the job outlive the process that launched it;
    - gives no device to two jobs, whoever launched them: a job has its `spec.devices` from its start until it is gone;
    - passes `spec.environment` on top of its own environment and runs `python -m MODULE ATTEMPT_DIR`;
    - bounds every wait.
    """

    @property
    def name(self) -> str:
        """`local`, `ray` …: what an attempt's record says."""

    @property
    def attests(self) -> bool:
        """Whether its jobs run in this environment, and compare it with the one that their order names."""

    def launch(self, spec: JobSpec) -> str:
        """Find the job of that name or create it; its handle, the same for every call.

        Raises:
            CapacityError: devices that it needs are taken; it was not started, and trying again is safe.
            InfrastructureError: it could not be started; nothing runs, and trying again is safe.
            WorkspaceError: the attempt folder cannot be written.
        """

    def capacity(self) -> Capacity:
        """The devices it deals out, and who has them now.

        Raises:
            InfrastructureError: that cannot be told.
        """

    def observe(self, spec: JobSpec) -> Observation:
        """One look at the job. Reports LOST only when nothing of the job runs any more (what is left is killed first).

        EXITED carries the exit code, negative for the signal that killed the job.
        """

    def seconds(self, spec: JobSpec) -> float | None:
        """How long the job has run, by the executor's own record: from when it started to run until now or its end.

        Time before (in a queue, say) does not count, nor does time in which nobody noticed its end. Of a lost job it
        is at least as long as it ran. Clocks that are set meanwhile change nothing. None: it never ran.
        """

    def cancel(self, spec: JobSpec, grace_seconds: float) -> Observation:
        """Stop the job and wait until it is gone: ask (by its channel), after `grace_seconds` terminate, then kill.

        Returns as soon as the job has ended, with the last observation; UNKNOWN for a job that was never launched. The
        request stays in the channel, so a job that starts late ends at once.

        Raises:
            DeadlineError: it survived being killed (a process stuck in the kernel, an unreachable node).
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
