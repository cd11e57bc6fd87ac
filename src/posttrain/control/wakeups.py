"""Schedules when a driver reads runs again, and isolates the errors of single objects.

A run is due again at a time that its rows contain, or when one of its jobs changes. One `Wakeups` watches the jobs of
all runs of a driver. It observes all jobs with one request to each executor, at most twice in `OBSERVE_SECONDS` if
there are many jobs, and reads each job's reports; it does not query the ledger. A remote executor is
asked in a thread, since it may not answer.

An error of one object is recorded, and the pass over the object is retried with back-off; other objects are not
affected. A lost race is not an error: the next pass reads the current rows. Bytes that do not match their digest fail a
stage that had not started, since a retry does not repair them. After any other error (a store that answers 503, a full
disk, two inconsistent reads) the pass is retried for a limited time; then the object is set aside with its traceback
(`posttrain dead`) and stays unchanged, so no work of a job is lost. The work queue stores these records, which outlive
the driver.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from posttrain.control import budgets
from posttrain.control.attempts import answered, reported
from posttrain.control.decide import LOOKS, STOP_GRACE_SECONDS, View, due_in, stall_after
from posttrain.control.jobs import Jobs
from posttrain.domain.errors import (
    ConflictError,
    DeadlineError,
    InfrastructureError,
    InputError,
    IntegrityError,
    PosttrainError,
)
from posttrain.domain.jobs import JobState, Observation
from posttrain.domain.lifecycle import AttemptState, Reason, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.ports import Clock
from posttrain.domain.records import AttemptRecord, StageRecord, Watch
from posttrain.domain.waits import times, wait_of, waiting
from posttrain.execution.ports import Executor
from posttrain.store.journal import STAGE
from posttrain.store.ledger import Stores
from posttrain.store.work import NEVER, Work, WorkQueue

OBSERVE_SECONDS = 5.0  # time within which a job's report is read, and a job over its budget gets a stop order
_PACE = 25.0  # jobs observed per second; the fewer jobs, the more often each is observed
_MOST, _LEAST = 4.0, 0.05  # seconds between two observations of all jobs
_REMOTE = 3.0  # seconds between two observations of a remote executor's jobs
_UNANSWERED = 600.0  # seconds after which an observation that has not ended is given up
_REPORTS = 2.0  # seconds between two reads of the jobs' reports, and of mailboxes in an object store
_LEAVING = 60.0  # seconds between two passes for a job that has left its result but still runs
_SOON = 1.0  # seconds until the next look at an attempt whose launch is not recorded
_WAITS: Mapping[str, float] = {  # seconds between polls for conditions whose end writes no row of this run
    Reason.WAITING_FOR_IDENTICAL_STAGE: 60.0,  # the stage's end notifies the run; its driver's end does not
    Reason.WAITING_FOR_CLUSTER: 15.0,
    Reason.SUBMISSION_UNKNOWN: 2.0,
    Reason.JOB_NOT_VISIBLE: 2.0,
}
_WATCHED = (Reason.LAUNCHED, Reason.STALLED)  # attempts whose silence counts
_LIVE = (AttemptState.PLANNED, AttemptState.LAUNCHED)
BACKOFF_SECONDS = (0.5, 2.0, 8.0, 30.0)
PATIENCE_SECONDS = 3600.0  # seconds of repeated errors before the object is set aside
_UNEXPECTED = 5  # tries after an unexpected error


def look_again_after(
    manifest: Manifest, stages: Sequence[StageRecord], attempts: Sequence[AttemptRecord], now: float
) -> float:
    """Return the seconds until these rows make a run due again; `Wakeups` handles the silence of jobs."""
    waits = [NEVER]
    for stage in stages:
        if stage.state in (StageState.READY, StageState.RUNNING):
            waits.append(_WAITS.get(stage.reason, NEVER))
        if stage.state == StageState.READY and stage.not_before is not None and stage.not_before > now:
            waits.append(stage.not_before - now)
        if (
            waiting(stage) and stage.reason != Reason.WAITING_FOR_APPROVAL
        ):  # a stage's `not_before`, and the end of the wait for its signal
            waits += [at - now for at in times(wait_of(manifest, stage.name), stage) if at > now]
    # these have a turn (see `_deal`), or a separate wait
    refused = {s.name for s in stages if s.reason in (Reason.WAITING_FOR_DEVICES, Reason.WAITING_FOR_CLUSTER)}
    for attempt in attempts:
        if attempt.state == AttemptState.PLANNED and attempt.stage not in refused:
            waits.append(_SOON)
        elif attempt.state == AttemptState.LAUNCHED and attempt.stop_requested_at is not None:
            waits.append(max(_SOON, attempt.stop_requested_at + STOP_GRACE_SECONDS - now))
    if manifest.budget.wall_clock is not None:
        share = {one.name: budgets.share_of(manifest, one, budgets.spending(stages, attempts)) for one in attempts}
        live = [one for one in attempts if one.state in _LIVE]
        waits += [max(_SOON, (share[one.name].seconds or 0.0) - _seconds(one, now)) for one in live]
    return min(waits)


@dataclass(slots=True)
class _Job:
    """A live job between two observations."""

    attempt: AttemptRecord
    most: int | None  # maximum number of tokens that the job's lineage may report
    quarter: float  # seconds without progress after which the job's run is due
    quiet_until: float  # the time at which those seconds have passed
    sign: tuple[Any, ...] | None = None
    progress: str | None = None
    answered: bool = False
    over: bool = False  # whether the job reports more tokens than it may


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the executor and the mailbox of one job report; None: not read."""

    seen: Observation
    answered: bool = False
    progress: str | None = None
    spent: int | None = None
    trouble: str = ""  # the class of the error with which the mailbox was read


class _Observer:
    """Observes the jobs of one executor; those of a remote executor in a thread, since it may not answer for long."""

    def __init__(self, jobs: Jobs, executor: Executor) -> None:
        self._jobs, self.executor = jobs, executor
        self._asked = self._read = self._begun = -NEVER
        self._work: Future[dict[str, _Heard]] | None = None
        self._fresh = _LEAST
        self.trouble = ""  # the class of the error with which the executor answered last
        self._seen: dict[str, Observation] = {}

    def seen(self, now: float) -> Mapping[str, Observation]:
        """Return the last observation of each attempt; empty if it is too old to decide on."""
        return self._seen if now - self._begun < self._fresh else {}

    def turn(self, jobs: Sequence[_Job], now: float) -> Mapping[str, _Heard] | None:
        """Begin an observation if one is due; return what the jobs report if one has ended.

        Raises:
            Exception: the executor does not answer.
            DeadlineError: an observation has not ended in time; the next turn begins another one.
        """
        if self._work is not None and not self._work.done() and now - self._asked >= _UNANSWERED:
            self._work = None  # its thread may wait for ever
            raise DeadlineError(f"executor {self.executor.name}: no answer within {_UNANSWERED:g} s")
        if self._work is not None:
            return self._ended()
        remote = self.executor.remote
        least = _REMOTE if remote else _LEAST
        if not jobs or 0 <= now - self._asked < min(_MOST, max(least, len(jobs) / _PACE)):
            return None
        self._asked, self._fresh = now, 2 * least if remote else _LEAST
        reports = not 0 <= now - self._read < _REPORTS
        self._read = now if reports else self._read
        self._work = Future()
        asked = [(job.attempt, job.answered) for job in jobs]
        if remote:
            threading.Thread(target=self._observe, args=(self._work, asked, reports), daemon=True).start()
            return None
        self._observe(self._work, asked, reports)
        return self._ended()

    def _ended(self) -> Mapping[str, _Heard] | None:
        if self._work is None or not self._work.done():
            return None
        work, self._work, self._seen, self._begun = self._work, None, {}, self._asked
        found = work.result()
        self._seen = {name: one.seen for name, one in found.items()}
        return found

    def _observe(
        self, work: Future[dict[str, _Heard]], asked: Sequence[tuple[AttemptRecord, bool]], reports: bool
    ) -> None:
        try:
            found = self.executor.observe([self._jobs.folders.job(attempt) for attempt, _ in asked])
            every = zip(asked, found, strict=True)
            work.set_result({one.name: self._hear(one, was, seen, reports) for (one, was), seen in every})
        except BaseException as error:  # also the panic of a library in Rust
            work.set_exception(error if isinstance(error, Exception) else InfrastructureError(type(error).__name__))

    def _hear(self, attempt: AttemptRecord, was: bool, seen: Observation, reports: bool) -> _Heard:
        folder, far = self._jobs.folders.of(attempt), bool(self._jobs.folders.mailboxes())
        try:
            done = was or ((reports or not far) and answered(folder))
            if not reports or seen.state is not JobState.RUNNING or done:
                return _Heard(seen, done)
            return _Heard(seen, done, reported(folder, seen), folder.spent())
        except Exception as error:  # the pass over the run reports it
            return _Heard(seen, was, trouble=type(error).__name__)


class Wakeups:
    """Detects changes of a driver's jobs from the executors' observations and the jobs' reports, without the ledger."""

    def __init__(self, clock: Clock, jobs: Jobs) -> None:
        self._clock, self._jobs = clock, jobs
        self._live: dict[str, _Job] = {}  # by attempt
        self._of: dict[str, list[str]] = {}  # run → its attempts
        self._moved: set[str] = set()
        self._by_name: dict[str, _Observer] = {}

    def follow(self, run_id: str, view: View | None) -> None:
        """Set the jobs to watch, after every pass over the run; None: another driver has the run, so drop its jobs.

        The observations from before the pass are retained, so a later change counts as a new sign.
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
        """Return whether a sign of the run changed since the last `take`; the first sign of a job is a change."""
        return run_id in self._moved

    def take(self, run_id: str) -> None:
        """Clear the run's changes, since a pass over it starts now."""
        self._moved.discard(run_id)

    @property
    def _observers(self) -> Iterable[_Observer]:
        """One observer for each executor; executors may be declared while the driver runs."""
        for executor in self._jobs.executors:
            if executor.name not in self._by_name or self._by_name[executor.name].executor is not executor:
                self._by_name[executor.name] = _Observer(self._jobs, executor)
        return self._by_name.values()

    def seen(self) -> Mapping[str, Observation]:
        """Return the recent observations of attempts."""
        now = self._clock.now()
        return {name: one for observer in self._observers for name, one in observer.seen(now).items()}

    def refresh(self) -> None:
        """Observe all jobs, if an observation is due."""
        now = self._clock.now()
        for observer in self._observers if self._live else ():
            jobs = [job for job in self._live.values() if job.attempt.executor == observer.executor.name]
            heard, trouble = None, ""
            try:
                heard = observer.turn(jobs, now)
            except Exception as error:  # the pass over the run reports the error
                trouble = type(error).__name__
            if heard is None and not trouble:
                continue
            if trouble != observer.trouble:
                self._moved |= {job.attempt.run_id for job in jobs}
                observer.trouble = trouble
            for job in jobs if heard else ():
                if heard and job.attempt.name in heard:
                    self._take_in(job, heard[job.attempt.name], now)

    def _take_in(self, job: _Job, heard: _Heard, now: float) -> None:
        if heard.answered and not job.answered:
            job.answered, job.quiet_until = True, now + _LEAVING
        if heard.progress is not None:
            if heard.progress != job.progress:  # a job that had stalled makes progress again: its run is due now
                job.quiet_until = now + (0.0 if job.attempt.reason == Reason.STALLED else job.quarter)
            job.progress = heard.progress
            job.over = job.most is not None and (heard.spent or 0) > job.most
        sign = (heard.trouble,) if heard.trouble else (heard.seen, job.answered, job.over)
        if sign != job.sign or now >= job.quiet_until:
            self._moved.add(job.attempt.run_id)
            job.quiet_until = max(job.quiet_until, now + (_LEAVING if job.answered else job.quarter))
        job.sign = sign

    def _job(self, view: View, attempt: AttemptRecord) -> _Job:
        now, limit = self._clock.now(), stall_after(view.manifest, attempt.stage)
        watch: Watch | None = view.watch(attempt) if attempt.reason in _WATCHED else None
        share = budgets.share_of(view.manifest, attempt, budgets.spending(view.stages, view.attempts))
        most = None
        if share.tokens is not None and attempt.stop_requested_at is None:
            most = share.tokens + (attempt.resumed_tokens or 0)
        return _Job(attempt, most, limit / LOOKS, now + due_in(watch, limit, now) if watch else NEVER)


class Turns:
    """Selects the next runs when a resource becomes free: as many as fit, and each only once while nothing changes."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._free: float = 0

    def next(self, waiting: Sequence[tuple[str, int]], free: float, woken: Set[str]) -> set[str]:
        """Return the runs to read again.

        Args:
            waiting: runs and the amount that each requires, in order of their turn.
            woken: runs without a pass since they were selected, whose amount does not count as free.
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
    """Threads for long work (hashing, uploads, waiting for a job to end); the deciding thread collects the results.

    Args:
        threads: the maximum number of threads.
    """

    def __init__(self, threads: int) -> None:
        self._most, self._threads = threads, 0
        self._todo: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._under: dict[tuple[str, str], Future[None]] = {}
        self._over: set[str] = set()  # runs for which some work has ended
        self._any = threading.Event()

    def begin(self, run_id: str, stage: str, work: Callable[[], None]) -> None:
        """Start the work for a stage."""
        future: Future[None] = Future()
        future.add_done_callback(lambda _: self._over.add(run_id))
        self._under[run_id, stage] = future
        self._todo.put((future, work))
        if self._threads < min(self._most, len(self._under)):
            self._threads += 1
            threading.Thread(target=self._work, name="posttrain-beside", daemon=True).start()

    def has(self, run_id: str, stage: str) -> bool:
        """Return whether work for a stage is running or not collected yet."""
        return (run_id, stage) in self._under

    def collect(self, run_id: str, stage: str) -> bool:
        """Collect the work for a stage if it has ended; return whether the work has ended.

        Raises:
            Exception: any exception that the work raised.
        """
        future = self._under[run_id, stage]
        if not future.done():
            return False
        del self._under[run_id, stage]
        future.result()
        return True

    def runs(self) -> set[str]:
        """Return the runs whose work is running or not collected yet."""
        return {run_id for run_id, _ in self._under}

    def over(self, run_id: str) -> set[str]:
        """Return the stages of a run whose work has ended but is not collected."""
        return {stage for (run, stage), one in self._under.items() if run == run_id and one.done()}

    def is_over(self, run_id: str) -> bool:
        """Return whether ended work for a run is not collected yet."""
        if run_id not in self._over:
            return False
        self._over.discard(run_id)  # first: work that ends during the look adds the run again
        left = bool(self.over(run_id))
        if left:
            self._over.add(run_id)
        return left

    def forget(self, run_id: str) -> None:
        """Drop the work for a run that has ended or that another driver processes."""
        self._over.discard(run_id)
        self._under = {key: future for key, future in self._under.items() if key[0] != run_id}

    def wait(self, seconds: float) -> bool:
        """Wait at most this long until any work ends; return whether any work has ended."""
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


class Backoffs:
    """The failing objects of one run, from the rows of the work queue."""

    def __init__(self, stores: Stores, queue: WorkQueue, rows: Iterable[Work]) -> None:
        self._stores, self._queue = stores, queue
        self.raced = False
        self._open = {one.object: one for one in rows if one.kind == STAGE}

    def __bool__(self) -> bool:
        """Return whether an object fails or a race was lost, so the rows must be read again before the next step."""
        return self.raced or bool(self._open)

    def waits(self, stage: StageRecord) -> bool:
        """Return whether the stage must wait for its back-off, or for a person."""
        known = self._open.get(_name(stage))
        return known is not None and (known.dead_at is not None or known.due_in > 0)

    @property
    def again_after(self) -> float | None:
        """Seconds until the first retry; None: no object waits for a retry."""
        due = [one.due_in for one in self._open.values() if one.dead_at is None]
        return max(0.0, min(due)) if due else None

    @property
    def set_aside(self) -> frozenset[str]:
        """Stages that wait for a person."""
        return frozenset(one.object.partition("/")[2] for one in self._open.values() if one.dead_at is not None)

    @contextmanager
    def kept_to(self, stage: StageRecord) -> Iterator[None]:
        """Confine exceptions that are raised inside the context to this stage."""
        try:
            yield
        except ConflictError:  # another process changed the row: the next pass reads it
            self.raced = True  # the process that won may not have notified this run
            return
        except (InputError, IntegrityError) as error:
            if stage.state == StageState.READY:
                self._fail(stage, error)
            else:
                self._met(stage, error)
            return
        except Exception as error:
            self._met(stage, error)
            return
        if self._open.pop(_name(stage), None) is not None:
            self._over(stage)

    def _met(self, stage: StageRecord, error: Exception) -> None:
        self._open[_name(stage)] = known = record_failure(
            self._queue, STAGE, _name(stage), error, self._open.get(_name(stage))
        )
        if known.dead_at is not None:
            how, action = f"set aside after {known.failures} tries", f"posttrain dead {_name(stage)} --retry"
            self._say(stage, Reason.SET_ASIDE, f"{one_line(error)}; {how}", f"fix the cause, then {action}")
        else:
            how = f"checking again in {known.due_in:.2g} s"
            self._say(stage, Reason.TROUBLED, f"{one_line(error)}; {how}", "none needed")

    def _over(self, stage: StageRecord) -> None:
        """Remove the error from the queue and from the stage's row, unless the row has a newer reason."""
        self._queue.over(STAGE, _name(stage))
        now = next(s for s in self._stores.ledger.stages(stage.run_id) if s.name == stage.name)
        if now.reason in (Reason.TROUBLED, Reason.SET_ASIDE):
            self._say(now, *self._usual(now), "none needed")

    def _say(self, stage: StageRecord, reason: Reason, message: str, action: str) -> None:
        with suppress(ConflictError):  # the stage's newer state is more informative
            self._stores.update_stage(stage, reason=reason, message=message, next_action=action)

    def _usual(self, stage: StageRecord) -> tuple[Reason, str]:
        """Return the reason and message of a stage without an error."""
        if stage.state == StageState.RUNNING:
            return Reason.RUNNING, f"attempt {len(self._stores.ledger.attempts(stage.run_id, stage.name))}"
        pending = stage.state == StageState.PENDING
        return (
            (Reason.WAITING_FOR_INPUTS, "waiting for its turn") if pending else (Reason.READY, "inputs are available")
        )

    def _fail(self, stage: StageRecord, error: Exception) -> None:
        reason = Reason.CORRUPT if isinstance(error, IntegrityError) else Reason.JOB_FAILED_BAD_INPUT
        action = f"fix what the message names, then posttrain retry {stage.run_id}"
        self._stores.update_stage(
            stage, state=StageState.FAILED, reason=reason, message=one_line(error), next_action=action
        )


def record_failure(
    queue: WorkQueue, kind: str, name: str, error: Exception, before: Work | None, held: Work | None = None
) -> Work:
    """Record that a pass over an object raised, and when to retry it or that it is set aside.

    Args:
        before: the object's row, if the row was read.
        held: the claim of the pass, if the object is claimed individually.

    Raises:
        StaleWriteError: another driver has claimed the object.
    """
    times, lasts = (before.failures if before else 0) + 1, (before and before.failed_for) or 0.0
    expected = isinstance(error, PosttrainError | OSError)
    over = lasts >= PATIENCE_SECONDS or (not expected and times >= _UNEXPECTED)
    wait = BACKOFF_SECONDS[min(times, len(BACKOFF_SECONDS)) - 1]
    return queue.failed(
        kind, name, one_line(error), "".join(traceback.format_exception(error)), None if over else wait, held
    )


def one_line(error: Exception) -> str:
    """Return an error's message in one line, with its class if it is not a `PosttrainError`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {text}"


def _name(stage: StageRecord) -> str:
    return f"{stage.run_id}/{stage.name}"
