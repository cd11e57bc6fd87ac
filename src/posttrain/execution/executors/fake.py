"""An executor for tests, whose jobs and failures the test controls."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.domain.jobs import (
    Absence,
    Accepted,
    Capacity,
    Cause,
    Exists,
    JobState,
    LogPage,
    Observation,
    PodSeen,
    Submission,
    Unknown,
)
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.execution.environment import read_log

_TERMINATED, _NODE = -15, "somewhere"


@dataclass
class Hostility:
    """Failures of a remote scheduler; seconds are by the fake's clock.

    Each failure decrements its count: `lose_answers=2` loses the next two answers.
    """

    idempotent: bool = True  # False: a name that is submitted twice becomes two jobs
    visible_after: float = 0.0  # seconds from a submission until the job is visible
    settles_after: float = 0.0  # seconds from a submission until the absence of the job is certain
    purges_after: float | None = None  # seconds from the end of a job until the job is dropped
    lose_answers: int = 0  # submissions that arrive but get no answer
    lose_requests: int = 0  # submissions that never arrive
    late_requests: int = 0  # submissions that arrive after `late_after` and get no answer
    late_after: float | None = None  # seconds; None: `visible_after`
    twice: int = 0  # submissions that arrive twice
    silent: int = 0  # observations without an answer
    deaf: int = 0  # kills without effect


@dataclass
class _Job:
    spec: JobSpec
    seen: Observation
    visible: float  # time at which the job becomes visible
    begun: float
    ended: float | None = None
    before: float = 0.0  # seconds that earlier incarnations ran
    culprit: str = ""  # the pod that ended the job


class FakeExecutor:
    """Jobs in memory.

    A submitted job is RUNNING until `finish` or `lose`, or until `on_launch` ends it immediately. `on_launch` gets each
    new job's spec, may write into the job's attempt folder as a job does (results, facts), and returns the exit code,
    or None if the job continues. `hostility` may be changed at any time.
    """

    name: ClassVar[str] = "fake"
    remote: ClassVar[bool] = False
    attests: ClassVar[bool] = False

    def __init__(
        self,
        on_launch: Callable[[JobSpec], int | None] | None = None,
        now: Callable[[], float] = time.time,
        hostility: Hostility | None = None,
    ) -> None:
        self.launched: list[JobSpec] = []  # each job once, in order
        self.cancelled: list[str] = []  # names of live jobs that were killed
        self.room = Capacity()
        self.images = self.avoids = False  # set by tests
        self.hostility = hostility or Hostility()
        self._on_launch = on_launch
        self._jobs: dict[str, list[_Job]] = {}
        self._coming: list[tuple[float, JobSpec]] = []
        self._asked: dict[str, float] = {}  # name → when it was last submitted
        self._now, self._born = now, now()

    @property
    def idempotent(self) -> bool:
        """See `Executor.idempotent`."""
        return self.hostility.idempotent

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`."""
        if spec.image and not self.images:
            raise InputError(f"job {spec.name} requests image {spec.image}; the fake has no images: request none")
        hostility = self.hostility
        self._asked[spec.name] = self._now()
        self._arrive()
        if self._take("lose_requests"):
            return Unknown("no answer")
        if self._take("late_requests"):
            late = hostility.visible_after if hostility.late_after is None else hostility.late_after
            self._coming.append((self._now() + late, spec))
            return Unknown("no answer")
        had = spec.name in self._jobs
        for _ in range(2 if self._take("twice") else 1):
            if not self._jobs.get(spec.name) or not hostility.idempotent:
                self._start(spec, self._now() + hostility.visible_after)
        if self._take("lose_answers"):
            return Unknown("no answer")
        handle = f"fake-{spec.name}"
        return Exists(handle) if had and hostility.idempotent else Accepted(handle)

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        if self._take("silent"):
            raise InfrastructureError("the scheduler does not answer; try again")
        self._arrive()
        return [self._look(job.name) for job in jobs]

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`; the call does not wait."""
        self._arrive()
        if self._take("deaf"):
            return
        if any(one.seen.live for one in self._jobs.get(job.name, ())):
            self.cancelled.append(job.name)
            self.finish(job.name, _TERMINATED)

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        self._arrive()
        names = sorted(name for name in self._jobs if name.startswith(prefix) and self._look(name).live)
        asked = [self._jobs[name][-1].spec for name in names]
        return [Listed(spec.name, spec.labels, spec.epoch) for spec in asked]

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """See `Executor.logs`."""
        return read_log(job.folder / "log.txt", cursor) if job.folder else LogPage("", cursor)

    def capacity(self) -> Capacity:
        """See `Executor.capacity`; the test sets the capacity, which is no devices by default."""
        return self.room

    def finish(self, name: str, exit_code: int = 0, number: int | None = None) -> None:
        """End the jobs with this name, or only the job with this start `number`, counted from 0."""
        self._over(name, Observation(JobState.EXITED, exit_code=exit_code), number)

    def lose(self, name: str, cause: Cause | None = None, number: int | None = None, pod: str = "") -> None:
        """Lose the jobs with this name, or one of these; in a gang, the loss of `pod` ends the other pods."""
        for job in self._those(name, number):
            job.culprit = pod
        self._over(name, Observation(JobState.LOST, detail="its supervisor has ended", cause=cause), number)

    def requeue(self, name: str, number: int | None = None) -> None:
        """Restart the jobs with this name, or one of these, under the same name, as a scheduler's requeue does."""
        now = self._now()
        for job in self._those(name, number):
            job.before += (now if job.ended is None else job.ended) - job.begun
            job.begun, job.ended = now, None
            job.seen = Observation(JobState.RUNNING, incarnation=job.seen.incarnation + 1)

    def _start(self, spec: JobSpec, visible: float) -> None:
        job = _Job(spec, Observation(JobState.RUNNING), visible, self._now())
        self._jobs.setdefault(spec.name, []).append(job)
        self.launched.append(spec)
        code = self._on_launch(spec) if self._on_launch else None
        if code is not None:
            self.finish(spec.name, code)

    def _arrive(self) -> None:
        now = self._now()
        coming, self._coming = self._coming, [(at, spec) for at, spec in self._coming if at > now]
        for at, spec in coming:
            if at <= now and not (self._jobs.get(spec.name) and self.hostility.idempotent):
                self._start(spec, now)

    def _look(self, name: str) -> Observation:
        now, purges = self._now(), self.hostility.purges_after
        kept = [j for j in self._jobs.get(name, []) if j.ended is None or purges is None or now < j.ended + purges]
        visible = [job for job in kept if job.visible <= now]
        if not visible:
            settled = not kept and now >= self._asked.get(name, self._born) + self.hostility.settles_after
            return Observation(JobState.UNKNOWN, absent=Absence.AUTHORITATIVE if settled else Absence.NOT_VISIBLE_YET)
        job = next((job for job in visible if job.seen.live), visible[-1])
        seconds = job.before + (now if job.ended is None else job.ended) - job.begun
        return replace(job.seen, handle=f"fake-{name}", node=_NODE, seconds=seconds, pods=_pods(job))

    def _those(self, name: str, number: int | None) -> Sequence[_Job]:
        jobs = self._jobs.get(name, [])
        return jobs if number is None else jobs[number : number + 1]

    def _over(self, name: str, seen: Observation, number: int | None) -> None:
        jobs = self._those(name, number)
        for job in [job for job in jobs if job.seen.live] or jobs:
            job.seen = replace(seen, incarnation=job.seen.incarnation)
            job.ended = self._now() if job.ended is None else job.ended

    def _take(self, count: str) -> bool:
        left = int(getattr(self.hostility, count))
        setattr(self.hostility, count, max(0, left - 1))
        return left > 0


def _pods(job: _Job) -> tuple[PodSeen, ...]:
    """Return the pods of a gang; if one pod ended the gang, the others were terminated."""
    names, seen = job.spec.pods, job.seen
    if len(names) == 1:
        return ()
    whole = [PodSeen(name, seen.state, seen.exit_code, seen.cause, seen.incarnation, _NODE) for name in names]
    if not job.culprit:
        return tuple(whole)
    others = [pod for pod in whole if pod.name != job.culprit]
    ended = [replace(pod, state=JobState.EXITED, exit_code=_TERMINATED, cause=None) for pod in others]
    return (*(pod for pod in whole if pod.name == job.culprit), *ended)
