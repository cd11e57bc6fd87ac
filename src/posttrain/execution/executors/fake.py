"""An executor whose jobs are what a test says they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from posttrain.domain.jobs import Capacity, JobSpec, JobState, Observation
from posttrain.store.attempts import AttemptFolder

_TERMINATED = -15


class FakeExecutor:
    """Jobs in memory.

    A launched job is RUNNING until `finish` or `lose`, or until `on_launch` ends it at once. `on_launch` is given each
    new job's spec, may write into its attempt folder like a job (results, facts), and returns the exit code, or None to
    leave it running.
    """

    name: ClassVar[str] = "fake"
    attests: ClassVar[bool] = False

    def __init__(
        self, on_launch: Callable[[JobSpec], int | None] | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self.launched: list[JobSpec] = []  # each job once, in order
        self.cancelled: list[str] = []
        self.room = Capacity()
        self._on_launch = on_launch
        self._jobs: dict[str, Observation] = {}
        self._now = now
        self._times: dict[str, tuple[float, float | None]] = {}  # name → start, end

    def launch(self, spec: JobSpec) -> str:
        """See `Executor.launch`."""
        if spec.name not in self._jobs:
            self._jobs[spec.name] = Observation(JobState.RUNNING)
            self._times[spec.name] = (self._now(), None)
            self.launched.append(spec)
            code = self._on_launch(spec) if self._on_launch else None
            if code is not None:
                self.finish(spec.name, code)
        return f"fake-{spec.name}"

    def capacity(self) -> Capacity:
        """See `Executor.capacity`: what a test says it is; by default it deals out nothing."""
        return self.room

    def observe(self, spec: JobSpec) -> Observation:
        """See `Executor.observe`."""
        return self._jobs.get(spec.name, Observation(JobState.UNKNOWN))

    def seconds(self, spec: JobSpec) -> float | None:
        """See `Executor.seconds`."""
        if spec.name not in self._times:
            return None
        start, end = self._times[spec.name]
        return (self._now() if end is None else end) - start

    def cancel(self, spec: JobSpec, grace_seconds: float) -> Observation:
        """See `Executor.cancel`; nothing is waited for: a running job is terminated."""
        if Path(spec.attempt_dir).is_dir():
            AttemptFolder(Path(spec.attempt_dir)).request_stop()
        if self.observe(spec).state == JobState.RUNNING:
            self.cancelled.append(spec.name)
            self.finish(spec.name, _TERMINATED)
        return self.observe(spec)

    def finish(self, name: str, exit_code: int = 0) -> None:
        """Let the job exit."""
        self._over(name, Observation(JobState.EXITED, exit_code=exit_code))

    def lose(self, name: str) -> None:
        """Let the job vanish."""
        self._over(name, Observation(JobState.LOST, detail="its supervisor is gone"))

    def _over(self, name: str, seen: Observation) -> None:
        self._jobs[name] = seen
        start, end = self._times.get(name, (self._now(), None))
        self._times[name] = (start, self._now() if end is None else end)
