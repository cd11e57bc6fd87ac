"""The level-triggered reconciler, which compares the desired with the observed state, acts on differences, and records.

Loops and what unblocks them::

    tick ──▶ each stage in topological order ──▶ settle the run ──▶ set the time of the next look
      ▲        pending  waits for upstream stages (an earlier tick), binds inputs ─▶ ready
      │        ready    waits for a slot, back-off, an identical stage elsewhere ──▶ running | from cache
      │        running  waits for the job's result.json (the job), observes ───────▶ succeeded | failed | ready again
      └── step: ticks when the run is due in the queue (a row changed, a time has come), a job changed, or a slot or
                 device became free; raises if all remaining stages were set aside for a person

    deciding thread ──an effect that hashes, uploads, judges, launches or kills──▶ a thread of `Beside`
      ▲ collects its exception, and reads the rows again; until then that stage has no other effect ◀──────┘ ends

An error in one object does not end the processing of other objects, or the driver (`control.wakeups`).

Any process may die between any two lines: the next tick, in any process, derives the next action from the ledger and
the attempt folders alone. No outside work happens inside a transaction. An idle driver queries the ledger only for
work, less than twice a second, and queries the executor once for the jobs of all its runs.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from posttrain.control.attempts import Looks, end_orphans, see
from posttrain.control.decide import View, decide_run, decide_stage, settle
from posttrain.control.effects import Collect, Effect, Judge, Kill, Launch, Release, Start
from posttrain.control.jobs import Jobs
from posttrain.control.launch import taken_slots
from posttrain.control.stages import act
from posttrain.control.wakeups import Backoffs, Beside, Turns, Wakeups, look_again_after, one_line, record_failure
from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import AttemptState, Reason, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, RunRows
from posttrain.domain.sinks import RUN_SET_ASIDE
from posttrain.domain.waits import signals_of
from posttrain.execution.ports import Executor
from posttrain.store.journal import RUN, SWEEP
from posttrain.store.ledger import Stores
from posttrain.store.work import NEVER, Work, WorkQueue

LEASE_SECONDS = 15.0
SWEEP_SECONDS = 300.0  # seconds between two sweeps for orphaned jobs
RACED_SECONDS = 1.0  # seconds until the next pass after a lost race
UNWOKEN_SECONDS = 604800.0  # an unfinished run gets a pass at least every seven days, in case a notification was missed
POLL_SECONDS = 0.7  # seconds between two queries of the queue
SLOT_SECONDS = 5.0  # seconds between two checks for slots that other processes released
_LONG = (Start, Judge, Release, Launch, Collect)  # effects that hash, upload, compute or wait


@dataclass(frozen=True, slots=True)
class Tick:
    """The result of one pass: the run afterwards, and whether anything changed (then the next pass is due now)."""

    run: RunRecord
    changed: bool
    again_after: float = 0.0  # seconds until the next pass, unless a change is observed earlier
    set_aside: tuple[str, ...] = ()  # stages that wait for a person, if no other stages are left
    view: View | None = field(default=None, compare=False, repr=False)  # the rows of the pass's last decision


@dataclass(slots=True)
class _Watched:
    """A run between two passes."""

    last: Tick | None = None
    again_at: float = 0.0
    turn: tuple[int, int] = (0, 0)  # sort key in the queue
    living: int = 0  # number of live attempts
    slot: bool = False  # whether a stage waits for a slot
    devices: int = 0  # number of devices that a stage waits for


class Reconciler:
    """Drives runs towards their desired state.

    Args:
        owner: names this process in the lease.
        alive: returns False for an owner that is certainly dead, whose lease need not expire first.
    """

    def __init__(
        self, stores: Stores, jobs: Jobs, owner: str, alive: Callable[[str], bool] = lambda owner: True
    ) -> None:
        self._stores, self._jobs = stores, jobs
        self.queue = WorkQueue(stores.ledger, owner, alive, LEASE_SECONDS, jobs.host)
        self._manifests: dict[str, Manifest] = {}
        self._held: dict[str, Work] = {}  # run → this driver's claim
        self._watched: dict[str, _Watched] = {}
        self._due: set[str] = set()  # runs that were notified
        self._renewed = self._polled = -NEVER
        self._swept = stores.clock.now()
        self._wakeups = Wakeups(stores.clock, jobs)
        self._beside, self._ending = Beside(jobs.beside), Beside(4 * jobs.beside)  # so no kill waits for a hash
        self._begun: dict[tuple[str, str], int] = {}  # stage → version of the queue's row when its work started
        self._slots, self._devices = Turns(), Turns()
        self._counted = self._dealt = -NEVER  # when slots and devices were last checked

    def tick(self, run_id: str) -> Tick | None:
        """Make one pass over a run, even if it is not due; return None if another live process or host has the run."""
        over, began = self._over(run_id), self._stores.clock.now()
        rows, now = self._looked_at(run_id)
        if run_id not in rows:  # the run has ended, its row was lost, or another process is resuming it
            run = self._stores.ledger.run(run_id) if now is None else now.run
            if is_final("run", run.state):
                self._held.pop(run_id, None)
                return Tick(run, changed=False)
        claim = self._claim(run_id, rows.get(run_id))
        if claim is None:
            return None
        if claim is not rows.get(run_id):  # a new claim has a newer version than the rows
            over, began = self._over(run_id), self._stores.clock.now()
            rows, now = self._looked_at(run_id)
        if run_id in self._watched:
            self._watched[run_id].turn = (-claim.priority, claim.id)
        troubles = Backoffs(self._stores, self.queue, rows.values())
        try:
            now = self._rows_of(run_id) if now is None else now
            if self._is_elsewhere(now):
                return None
            view = self._told(now)
            after = self._passes(view, troubles, over)
            if _moved(view, after) and not is_final("run", after.run.state):
                return Tick(after.run, changed=True, view=after)  # only a pass without changes returns the claim
            return self._given_back(after, claim, troubles, began)
        except ConflictError:  # a person or another process changed a row first: read again
            return Tick(self._stores.ledger.run(run_id), changed=True)
        except Exception as error:
            return self._met(self._stores.ledger.run(run_id), claim, error)

    def _over(self, run_id: str) -> Set[str]:
        """Return the stages whose threaded work has ended; call it before reading the rows that the work wrote."""
        return self._beside.over(run_id) | self._ending.over(run_id)

    def _looked_at(self, run_id: str) -> tuple[dict[str, Work], RunRows | None]:
        """Return a run's rows in the queue and its rows in the ledger (None if a row in the ledger is damaged)."""
        try:
            return self.queue.look_at(run_id)
        except IntegrityError:
            return self.queue.of_run(run_id), None

    def _given_back(self, view: View, claim: Work, troubles: Backoffs, began: float) -> Tick:
        """Return the claim; if a row was written after `view` was read, the run has been notified and is due again."""
        run = view.run
        if is_final("run", run.state):
            self.queue.finish(run.id)
            self._held.pop(run.id, None)
            return Tick(run, changed=True)
        stages = [stage for stage in view.stages if stage.name not in troubles.set_aside]
        names = {stage.name for stage in stages}
        attempts = [attempt for attempt in view.attempts if attempt.stage in names]
        # the time before the decisions, which did not consider later due times
        after = look_again_after(view.manifest, stages, attempts, min(began, self._stores.clock.now()))
        if troubles.again_after is not None:
            after = min(after, troubles.again_after)
        aside = tuple(sorted(troubles.set_aside)) if after >= NEVER else ()
        after = min(after, RACED_SECONDS if troubles.raced else UNWOKEN_SECONDS)
        said = self._say_set_aside(run, aside)
        hold = self._jobs.host is None or any(attempt.host == self._jobs.host for attempt in view.attempts)
        hold = hold or run.id in self._beside.runs()
        if not hold:  # a run without jobs may go to the first host with free slots
            self._held.pop(run.id, None)
        settled = self.queue.give_back(claim, after, hold=hold)
        return Tick(said, not settled, after, aside if settled else (), view)

    def _say_set_aside(self, run: RunRecord, names: Sequence[str]) -> RunRecord:
        """Record in the run's row that only stages that were set aside are left, or remove that reason."""
        if not names:
            back = run.reason == Reason.SET_ASIDE and not is_final("run", run.state)
            said = (Reason.RUNNING, "stages are under way", "") if back else (run.reason, run.message, run.next_action)
        else:
            stage = next(stage for stage in self._stores.ledger.stages(run.id) if stage.name in names)
            said = (Reason.SET_ASIDE, f"stage {stage.name}: {stage.message}", stage.next_action)
        if said == (run.reason, run.message, run.next_action):
            return run
        with self._stores.ledger.transaction(self._stores.actor) as transaction:
            return transaction.update_run(run, reason=said[0], message=said[1], next_action=said[2])

    def _met(self, run: RunRecord, claim: Work, error: Exception) -> Tick:
        """Record an error of the whole run, such as an unreadable manifest, in the queue; raise it when set aside."""
        self._held.pop(run.id, None)
        try:
            known = record_failure(self.queue, RUN, run.id, error, claim, held=claim)
        except ConflictError:  # the lease expired: the new holder reads the run
            return Tick(run, changed=False, again_after=RACED_SECONDS)
        if known.dead_at is not None:
            with suppress(PosttrainError), self._stores.ledger.transaction(self._stores.actor) as transaction:
                transaction.append_event(RUN_SET_ASIDE, run.id, {"tries": known.failures}, {"error": known.error})
            raise error
        return Tick(run, changed=False, again_after=max(0.0, known.due_in))

    def _claim(self, run_id: str, row: Work | None) -> Work | None:
        """Claim the run, whose row was just read, and return its current row; None: another driver has the run."""
        held = self._held.get(run_id)
        if row is None:
            self.queue.wake(RUN, [run_id])
        elif row.dead_at is not None:
            raise InfrastructureError(
                f"run {run_id} was set aside after {row.failures} tries: {row.error}; fix the cause, then "
                f"posttrain dead {run_id} --retry"
            )
        elif held is not None and row.lease_token == held.lease_token and (row.lease_in or 0.0) > LEASE_SECONDS / 2:
            self._held[run_id] = row  # not renewed: the lease is valid for long enough, and a renewal costs an fsync
            return row
        claimed = self.queue.claim([run_id], early=True)
        if not claimed and self.queue.succeed_the_dead():
            claimed = self.queue.claim([run_id], early=True)
        if not claimed:
            self._held.pop(run_id, None)
            return None
        self._held[run_id] = claimed[0]
        return claimed[0]

    def _is_elsewhere(self, rows: RunRows) -> bool:
        """Return whether another host has a job of this run; if so, write that host into the queue's row."""
        if self._jobs.host is None:
            return False
        other = next(
            (one for one in rows.attempts if not is_final("attempt", one.state) and self._jobs.elsewhere(one)), None
        )
        if other is not None:
            self._held.pop(rows.run.id, None)
            self.queue.leave_to(rows.run.id, other.host)
        return other is not None

    def release(self, run_id: str) -> None:
        """Release the lease, so that another process need not wait until the lease expires."""
        self._held.pop(run_id, None)
        self._watched.pop(run_id, None)
        self._forget(run_id)
        self.queue.release([run_id])

    def _forget(self, run_id: str) -> None:
        self._wakeups.follow(run_id, None)
        for beside in (self._beside, self._ending):
            beside.forget(run_id)

    def rest(self, seconds: float) -> bool:
        """Wait this long or until threaded work ends; return whether any work ended."""
        if self._beside.runs() or self._ending.runs():
            return self._beside.wait(seconds)
        self._stores.clock.sleep(seconds)
        return False

    def worth(self, run_ids: Sequence[str]) -> list[str]:
        """Return the runs that are due for a `step`, with one query of executor and queue for all runs."""
        self._look_around()
        return [run_id for run_id in run_ids if self._is_due(run_id, self._stores.clock.now())]

    def step(self, run_id: str) -> Tick:
        """Make a pass over a run if it is due: its time has come, a writer scheduled it, or one of its jobs changed.

        Otherwise return the result of the last pass. One query of executor and queue serves all runs.

        Raises:
            InfrastructureError: all remaining stages of the run were set aside after repeated errors.
        """
        self._look_around()
        clock = self._stores.clock
        watched = self._watched.get(run_id) or self._watched.setdefault(run_id, _Watched())
        if watched.last is not None and not self._is_due(run_id, clock.now()):
            return replace(watched.last, changed=False)
        self._due.discard(run_id)
        self._wakeups.take(run_id)
        found = self.tick(run_id) or Tick(self._stores.ledger.run(run_id), changed=False, again_after=POLL_SECONDS)
        watched.again_at = clock.now() + (0.0 if found.changed else found.again_after)
        watched.last = replace(found, view=None)
        if found.set_aside:
            watched.last = None  # the next call reads the run again, since a person may have fixed the cause
            raise InfrastructureError(f"run {run_id}: {found.run.message}; {found.run.next_action}")
        self._take_in(run_id, watched, found)
        return found

    def _take_in(self, run_id: str, watched: _Watched, found: Tick) -> None:
        """Store the facts of a run that the next `_look_around` uses."""
        if is_final("run", found.run.state):
            self._forget(run_id)
            self._counted = -NEVER
            return
        if found.view is None and found.changed:
            return  # lost a race: the next pass reads the rows
        if found.view is None:  # another driver has the run
            self._forget(run_id)
        self._wakeups.follow(run_id, found.view)
        view = found.view
        stages = view.stages if view else ()
        living = sum(not is_final("attempt", one.state) for one in view.attempts) if view else 0
        if living < watched.living:
            self._counted = -NEVER  # a slot became free, and another run may wait for it
        watched.living = living
        watched.slot = any(one.reason == Reason.WAITING_FOR_SLOT for one in stages)
        wanting = [one.name for one in stages if one.reason == Reason.WAITING_FOR_DEVICES]
        watched.devices = max((self._wanted(view, name) for name in wanting if view), default=0)

    def _wanted(self, view: View, name: str) -> int:
        plan = view.manifest.stage(name)
        return self._jobs.trainer(plan.trainer).devices(plan.kind, plan.params)

    def _look_around(self) -> None:
        """Do the due work that concerns all runs: leases, orphans, the queue, jobs, free slots and devices."""
        self.keep()
        self._sweep()
        now = self._stores.clock.now()
        if now - self._polled >= POLL_SECONDS:
            self._polled = now
            with suppress(PosttrainError):  # database unavailable: the next due pass reports the error
                self._due |= self.queue.due(self._watched)
        self._wakeups.refresh()
        if now - self._dealt >= POLL_SECONDS:
            self._dealt = now
            self._deal()
        if now - self._counted >= SLOT_SECONDS:
            self._counted = now
            self._seat()

    def _is_due(self, run_id: str, now: float) -> bool:
        watched = self._watched.get(run_id)
        return (
            watched is None
            or watched.last is None
            or now >= watched.again_at
            or run_id in self._due
            or self._wakeups.has_moved(run_id)
            or self._beside.is_over(run_id)
            or self._ending.is_over(run_id)
        )

    def _deal(self) -> None:
        """Schedule the next runs for the free devices."""
        waiting = sorted((one.turn, run_id, one.devices) for run_id, one in self._watched.items() if one.devices)
        if not waiting:
            return
        try:
            room = self._jobs.executor.capacity()  # others have queues of their own
        except Exception:  # the pass over the run reports the error
            self._due.add(waiting[0][1])
            return
        free = float(room.devices - len(room.held)) if room.devices else NEVER
        woken = self._due | self._beside.runs()
        self._due |= self._devices.next([(run_id, wanted) for _, run_id, wanted in waiting], free, woken)

    def _seat(self) -> None:
        """Schedule the next runs for the free slots."""
        waiting = sorted((one.turn, run_id) for run_id, one in self._watched.items() if one.slot)
        if not waiting:
            return
        with suppress(PosttrainError):  # ledger or executor unavailable: a later call tries again
            free = self._jobs.slots - sum(taken_slots(self._stores, self._jobs))
            self._due |= self._slots.next([(run_id, 1) for _, run_id in waiting], free, self._due | self._beside.runs())

    def _sweep(self) -> None:
        """End orphaned jobs every `SWEEP_SECONDS`; only one driver at a time does so."""
        if self._stores.clock.now() - self._swept < SWEEP_SECONDS:
            return
        self._swept = self._stores.clock.now()
        with suppress(PosttrainError):  # database unavailable: the next sweep tries again
            for executor in self._jobs.executors:
                self._sweep_now(executor, f"executor {executor.name}{f' {self._jobs.host}' if self._jobs.host else ''}")

    def _sweep_now(self, executor: Executor, name: str) -> None:
        if self.queue.look(SWEEP, name) is None:
            self.queue.wake(SWEEP, [name])
        for one in self.queue.claim([name]):
            try:
                told = end_orphans(self._stores.ledger, self._jobs, executor)
            except Exception as error:  # executor unavailable or jobs unreadable: a later sweep tries again
                self.queue.failed(SWEEP, name, one_line(error), "", SWEEP_SECONDS, held=one)
                continue
            if told:
                with self._stores.ledger.transaction(self._stores.actor) as transaction:
                    transaction.append_event("orphans.ended", name, {}, {"jobs": told})
            self.queue.give_back(one, SWEEP_SECONDS)

    def keep(self) -> None:
        """Renew the held leases once a third of their time has passed."""
        now = self._stores.clock.now()
        if self._jobs.hosts is not None:
            with suppress(PosttrainError):  # database unavailable: a later call tries again
                self._jobs.hosts.beat()
        if self._held and now - self._renewed >= LEASE_SECONDS / 3:
            self._renewed = now
            with suppress(PosttrainError):  # database unavailable: a later call tries again, or the lease expires
                self.queue.renew()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the leases during work that takes longer than the leases last, such as hashing a model."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(LEASE_SECONDS / 3):
                self.keep()

        keeper = threading.Thread(target=keep, name="posttrain-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def _passes(self, view: View, troubles: Backoffs, over: Set[str]) -> View:
        """Make passes over rows that were read once, until nothing is left to do, an attempt starts or an error occurs.

        A planned attempt is launched after another read, since the run may have been stopped. Every write compares
        generations, so a row that another process changed ends the passes with a conflict.
        """
        while True:
            after = self._pass(view, troubles, over)
            settled = not _moved(view, after) or is_final("run", after.run.state)
            if settled or troubles or _planned(view) or _planned(after):
                return after
            view, over = after, frozenset()  # work that ends from now on writes rows that this view lacks

    def _pass(self, view: View, troubles: Backoffs, over: Set[str]) -> View:
        """Decide and act for the run, for each stage separately, and for the run again; return the rows afterwards.

        Args:
            over: stages whose threaded work had ended before `view` was read.
        """
        run_id = view.run.id
        while effects := decide_run(view):
            view = self._done(view, *effects)
        looks = Looks(self._jobs, self._wakeups.seen())
        waiting = [stage.name for stage in view.stages if stage.state == StageState.PENDING]
        for name in (*waiting, *(stage.name for stage in view.stages)):  # binds all stages before any starts
            if troubles.waits(view.stage(name)):
                continue
            with troubles.kept_to(view.stage(name)):
                view = self._advance(view, name, looks, over)
                continue
            view = self._told(self._rows_of(run_id))  # the rows may have changed before the exception
        # threaded work may start a job after the rows were read: the run ends only after that work is collected
        ending = None if run_id in self._beside.runs() | self._ending.runs() else settle(view)
        return view if ending is None else self._done(view, ending)

    def _advance(self, view: View, name: str, looks: Looks, over: Set[str]) -> View:
        """Take one step of a stage, unless its last step still runs in a thread; return the rows afterwards."""
        run_id = view.run.id
        for beside in (self._beside, self._ending):
            if beside.has(run_id, name):
                if name not in over or not beside.collect(run_id, name):
                    return view
                if self._held[run_id].wanted_version == self._begun.pop((run_id, name), None):
                    return view  # no notification since the work started: the same step waits for its time or a sign
        running = view.stage(name).state == StageState.RUNNING
        if running and self._jobs.elsewhere(view.tries(name)[-1]):
            return view  # the run moved to another host during this pass
        job_status = see(self._stores, self._jobs, view, name, looks) if running else None
        effect = decide_stage(view, name, job_status, self._stores.clock.now())
        if effect is None:
            return view
        if not self._jobs.beside or not isinstance(effect, (*_LONG, Kill)):
            return self._done(view, effect)
        beside = self._ending if isinstance(effect, Kill) else self._beside
        self._begun[run_id, name] = self._held[run_id].wanted_version
        beside.begin(run_id, name, functools.partial(act, self._stores, self._jobs, view, effect))
        return view

    def _done(self, view: View, *effects: Effect) -> View:
        """Carry out effects of one run in this thread; return the rows afterwards without a read."""
        with self._stores.ledger.written() as rows:
            for effect in effects:
                act(self._stores, self._jobs, view, effect)
        return view.after(rows)

    def _rows_of(self, run_id: str) -> RunRows:
        with self._stores.ledger.snapshot() as now:
            return now.rows_of(run_id)

    def _told(self, rows: RunRows) -> View:
        manifest = self._manifest(rows.run)
        signals = tuple(self._stores.ledger.signals(rows.run.id)) if signals_of(manifest) else ()
        return View(rows.run, manifest, rows.stages, rows.attempts, signals, rows.watches, rows.head)

    def _manifest(self, run: RunRecord) -> Manifest:
        if run.manifest_digest not in self._manifests:
            self._manifests[run.manifest_digest] = self._stores.manifest(run)
        return self._manifests[run.manifest_digest]


def _moved(before: View, after: View) -> bool:
    """Return whether rows of a run changed between two views."""
    return _generations(before) != _generations(after)


def _planned(view: View) -> bool:
    """Return whether an attempt waits for its launch."""
    return any(attempt.state == AttemptState.PLANNED for attempt in view.attempts)


def _generations(view: View) -> tuple[int, ...]:
    below = [*(stage.generation for stage in view.stages), *(attempt.generation for attempt in view.attempts)]
    return (view.run.generation, *below)
