"""When a run is looked at again: a time that its rows name, or a sign that one of its jobs moved.

One `Pulse` watches the jobs of every run that a driver has. It asks the executor once for all of them, at most twice in
`OBSERVE_SECONDS` where there are many, and reads what each job reports; the ledger is not asked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from posttrain.control import budgets
from posttrain.control.decide import LOOKS, STOP_GRACE_SECONDS, View, due_in, stall_after
from posttrain.control.jobs import Jobs, job_of
from posttrain.control.sights import reported
from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import JobState, Observation
from posttrain.domain.lifecycle import AttemptState, Reason, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.ports import Clock
from posttrain.domain.records import AttemptRecord, StageRecord, Watch
from posttrain.domain.waits import times as due_times
from posttrain.domain.waits import wait_of, waiting
from posttrain.store.attempts import AttemptFolder
from posttrain.store.work import NEVER

OBSERVE_SECONDS = 5.0  # within which what a job reports is seen, and a job that is over its budget is told to stop
_PACE = 25.0  # jobs that are looked at in a second: few are looked at more often
_MOST, _LEAST = 4.0, 0.05  # seconds between two looks at all of them
_REPORTS = 2.0  # seconds between two looks at what jobs report, and at channels in an object store
_LEAVING = 60.0  # seconds between two looks at a job that has left its result and is still there
_SOON = 1.0  # to an attempt whose launch is not recorded
_WAITS: Mapping[str, float] = {  # for what gives no sign: nobody writes a row of this run when it is over
    Reason.WAITING_FOR_IDENTICAL_STAGE: 60.0,  # its end wakes the run; its driver's does not
    Reason.SUBMISSION_UNKNOWN: 2.0,
    Reason.JOB_NOT_VISIBLE: 2.0,
}
_WATCHED = (Reason.LAUNCHED, Reason.STALLED)  # attempts whose silence counts
_LIVE = (AttemptState.PLANNED, AttemptState.LAUNCHED)


def look_again_after(
    manifest: Manifest, stages: Sequence[StageRecord], attempts: Sequence[AttemptRecord], now: float
) -> float:
    """Seconds until these rows of a run alone make it worth a look; the silence of jobs is the `Pulse`'s."""
    times = [NEVER]
    for stage in stages:
        if stage.state in (StageState.READY, StageState.RUNNING):
            times.append(_WAITS.get(stage.reason, NEVER))
        if stage.state == StageState.READY and stage.not_before is not None and stage.not_before > now:
            times.append(stage.not_before - now)
        if (
            waiting(stage) and stage.reason != Reason.WAITING_FOR_APPROVAL
        ):  # `not_before` of it, and until when its signal is waited for
            times += [at - now for at in due_times(wait_of(manifest, stage.name), stage) if at > now]
    for_devices = {stage.name for stage in stages if stage.reason == Reason.WAITING_FOR_DEVICES}  # the scheduler's
    for attempt in attempts:
        if attempt.state == AttemptState.PLANNED and attempt.stage not in for_devices:
            times.append(_SOON)
        elif attempt.state == AttemptState.LAUNCHED and attempt.stop_requested_at is not None:
            times.append(max(_SOON, attempt.stop_requested_at + STOP_GRACE_SECONDS - now))
    if manifest.budget.wall_clock is not None:
        share = {one.name: budgets.share_of(manifest, one, budgets.spending(stages, attempts)) for one in attempts}
        live = [one for one in attempts if one.state in _LIVE]
        times += [max(_SOON, (share[one.name].seconds or 0.0) - _seconds(one, now)) for one in live]
    return min(times)


@dataclass(slots=True)
class _Job:
    """A live job between two looks at it."""

    attempt: AttemptRecord
    most: int | None  # tokens that its lineage may report
    quarter: float  # seconds without progress after which its run is looked at
    quiet_until: float  # when they are over
    sign: tuple[Any, ...] | None = None
    progress: str | None = None
    answered: bool = False
    over: bool = False  # it reports more tokens than it may


class Pulse:
    """The signs that the jobs of a driver's runs give without the ledger: what the executor sees, what they report."""

    def __init__(self, clock: Clock, jobs: Jobs) -> None:
        self._clock, self._jobs = clock, jobs
        self._live: dict[str, _Job] = {}  # by attempt
        self._of: dict[str, list[str]] = {}  # run → its attempts
        self._moved: set[str] = set()
        self._asked = self._read = -NEVER
        self._trouble = ""
        self._seen: dict[str, Observation] = {}

    def follow(self, run_id: str, view: View | None) -> None:
        """Take over which jobs there are, after every look at the run; of a run that others look at (None) no one's.

        What was seen before the look is kept: whatever happened meanwhile is another sign.
        """
        before = {name: self._live.pop(name) for name in self._of.pop(run_id, ())}
        for attempt in view.attempts if view else ():
            if view is None or attempt.state != AttemptState.LAUNCHED:
                continue
            job = self._job(view, attempt)
            if attempt.name in before:
                old = before[attempt.name]
                job.sign, job.progress, job.answered, job.over = old.sign, old.progress, old.answered, old.over
                job.quiet_until = min(job.quiet_until, old.quiet_until) if old.answered else job.quiet_until
            self._live[attempt.name] = job
            self._of.setdefault(run_id, []).append(attempt.name)

    def has_moved(self, run_id: str) -> bool:
        """Whether a sign of the run is another than when somebody took it; one that was never seen is."""
        return run_id in self._moved

    def take(self, run_id: str) -> None:
        """Somebody looks at the run now."""
        self._moved.discard(run_id)

    def seen(self) -> Mapping[str, Observation]:
        """What the executor said of each attempt, where it said so a moment ago."""
        return self._seen if self._clock.now() - self._asked < _LEAST else {}

    def refresh(self) -> None:
        """Look at all jobs, if that is due."""
        now, jobs = self._clock.now(), list(self._live.values())
        if jobs and not 0 <= now - self._asked < min(_MOST, max(_LEAST, len(jobs) / _PACE)):
            self._asked = now
            self._look(jobs, now)

    def _look(self, jobs: Sequence[_Job], now: float) -> None:
        reports = not 0 <= now - self._read < _REPORTS
        far = bool(self._jobs.folders.channels())
        before, self._trouble, self._seen = self._trouble, "", {}
        try:
            found = self._jobs.executor.observe([job_of(self._jobs.folders, job.attempt) for job in jobs])
            self._seen = {job.attempt.name: seen for job, seen in zip(jobs, found, strict=True)}
        except Exception as error:  # the look at a run tells of it
            self._trouble = type(error).__name__
        if self._trouble != before:
            self._moved |= {job.attempt.run_id for job in jobs}
        for job in jobs if self._seen else ():
            try:
                sign = self._hear(job, self._seen[job.attempt.name], now, reports, far)
            except Exception as error:  # as above, of one job
                sign = (type(error).__name__,)
            if sign != job.sign or now >= job.quiet_until:
                self._moved.add(job.attempt.run_id)
                job.quiet_until = max(job.quiet_until, now + (_LEAVING if job.answered else job.quarter))
            job.sign = sign
        self._read = now if reports else self._read

    def _hear(self, job: _Job, seen: Observation, now: float, reports: bool, far: bool) -> tuple[Any, ...]:
        folder = self._jobs.folders.of(job.attempt)
        if (reports or not far) and not job.answered and answered(folder):
            job.answered, job.quiet_until = True, now + _LEAVING
        if reports and seen.state is JobState.RUNNING and not job.answered:
            progress = reported(folder, seen)
            if progress != job.progress:  # a job that was asked to checkpoint moves again: that is looked at now
                job.quiet_until = now + (0.0 if job.attempt.reason == Reason.STALLED else job.quarter)
            job.progress = progress
            job.over = job.most is not None and folder.spent() > job.most
        return seen, job.answered, job.over

    def _job(self, view: View, attempt: AttemptRecord) -> _Job:
        now, limit = self._clock.now(), stall_after(view.manifest, attempt.stage)
        watch: Watch | None = view.watch(attempt) if attempt.reason in _WATCHED else None
        share = budgets.share_of(view.manifest, attempt, budgets.spending(view.stages, view.attempts))
        most = None
        if share.tokens is not None and attempt.stop_requested_at is None:
            most = share.tokens + (attempt.resumed_tokens or 0)
        return _Job(attempt, most, limit / LOOKS, now + due_in(watch, limit, now) if watch else NEVER)


def answered(folder: AttemptFolder) -> bool:
    """Whether a job left its result, or something unreadable in its place."""
    try:
        return folder.channel.answered() is not None
    except IntegrityError:
        return True


class Turns:
    """Who is next where something becomes free: as many as it suffices for, and nobody twice while nothing changes."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._free: float = 0

    def next(self, waiting: Sequence[tuple[str, int]], free: float, woken: Set[str]) -> set[str]:
        """The runs to look at.

        Args:
            waiting: runs and how much each wants, the first in order first.
            woken: those that nobody has looked at since: what they are given is not free.
        """
        if free != self._free or not {run_id for run_id, _ in waiting} - self._given:
            self._given.clear()
        self._free, found = free, set()
        for run_id, wanted in waiting:
            new = run_id not in self._given and wanted <= free
            if new or run_id in woken:
                free -= wanted
            if new:
                found.add(run_id)
        self._given |= found
        return found


class Beside:
    """Does long work (hashing, uploads, waiting for a job to go) beside the thread that decides, which collects it.

    Args:
        threads: at most.
    """

    def __init__(self, threads: int) -> None:
        self._most, self._threads = threads, 0
        self._todo: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._under: dict[tuple[str, str], Future[None]] = {}
        self._over: set[str] = set()  # runs for which some work is over
        self._any = threading.Event()

    def begin(self, run_id: str, stage: str, work: Callable[[], None]) -> None:
        """Begin the work for a stage."""
        future: Future[None] = Future()
        future.add_done_callback(lambda _: self._over.add(run_id))
        self._under[run_id, stage] = future
        self._todo.put((future, work))
        if self._threads < min(self._most, len(self._under)):
            self._threads += 1
            threading.Thread(target=self._work, name="posttrain-beside", daemon=True).start()

    def has(self, run_id: str, stage: str) -> bool:
        """Whether work for a stage goes on, or is to be collected."""
        return (run_id, stage) in self._under

    def collect(self, run_id: str, stage: str) -> bool:
        """Whether the work for a stage is over.

        Raises:
            Exception: whatever it raised.
        """
        future = self._under[run_id, stage]
        if not future.done():
            return False
        del self._under[run_id, stage]
        future.result()
        return True

    def runs(self) -> set[str]:
        """The runs for which work goes on, or is to be collected."""
        return {run_id for run_id, _ in self._under}

    def over(self, run_id: str) -> set[str]:
        """The stages of a run for which work is to be collected."""
        return {stage for (run, stage), one in self._under.items() if run == run_id and one.done()}

    def is_over(self, run_id: str) -> bool:
        """Whether work for a run is to be collected."""
        if run_id not in self._over:
            return False
        left = bool(self.over(run_id))
        if not left:
            self._over.discard(run_id)
        return left

    def forget(self, run_id: str) -> None:
        """Collect nothing for a run that has ended, or is another driver's."""
        self._over.discard(run_id)
        self._under = {key: future for key, future in self._under.items() if key[0] != run_id}

    def wait(self, seconds: float) -> bool:
        """Until any work ends, at most so long; whether it does."""
        ended = self._any.wait(seconds)
        self._any.clear()
        return ended

    def _work(self) -> None:
        while True:
            future, work = self._todo.get()
            try:
                work()
                future.set_result(None)
            except BaseException as error:  # the deciding thread raises it
                future.set_exception(error)
            self._any.set()


def _seconds(attempt: AttemptRecord, now: float) -> float:
    return now - attempt.launched_at if attempt.launched_at is not None else 0.0
