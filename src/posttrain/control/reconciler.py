"""The level-triggered reconciler: look at what should be and what is, act on the difference, record.

Loops and who unblocks whom::

    tick ──▶ each stage in topological order ──▶ settle the run ──▶ when to look again
      ▲        pending  waits for upstream stages (an earlier tick), binds inputs ─▶ ready
      │        ready    waits for a slot, back-off, an identical stage elsewhere ──▶ running | from cache
      │        running  waits for the job's result.json (the job), observes ───────▶ succeeded | failed | ready again
      └── step: looks when the queue says so (somebody changed a row, a time has come), a job is seen to have moved, or
                 something became free; raises where all that is left was set aside for a person

    deciding thread ──an order that hashes, uploads, judges, launches or kills──▶ a thread of `Beside`
      ▲ collects what it raised, and looks at the rows again; no other order of that stage meanwhile ◀──┘ ends

An error in one object ends neither the others nor the driver (`control.pulse`).

Any process may die between any two lines: the next tick, in any process, derives what to do from the ledger and the
attempt folders alone. No outside work happens inside a transaction. Idle, a driver asks the ledger for work less than
twice a second and for nothing else, and the executor once for the jobs of all its runs.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from posttrain.control.attempts import Looks, end_orphans, see
from posttrain.control.decide import View, decide_run, decide_stage, settle
from posttrain.control.jobs import Jobs
from posttrain.control.launching import taken_slots
from posttrain.control.orders import Collect, Judge, Kill, Launch, Order, Release, Start
from posttrain.control.pulse import Beside, Pulse, Troubles, Turns, look_again_after, one_line, record_trouble
from posttrain.control.stages import act
from posttrain.control.stores import Stores
from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import AttemptState, Reason, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, RunRows
from posttrain.domain.sinks import RUN_SET_ASIDE
from posttrain.domain.waits import signals_of
from posttrain.store.journal import RUN, SWEEP
from posttrain.store.work import NEVER, Work, WorkQueue

LEASE_SECONDS = 15.0
SWEEP_SECONDS = 300.0  # between two sweeps for jobs that nobody owns
RACED_SECONDS = 1.0  # until whoever lost a race looks again
UNWOKEN_SECONDS = 604800.0  # an unfinished run is looked at once in seven days, whatever nobody thought of
POLL_SECONDS = 0.7  # between two questions to the queue
SLOT_SECONDS = 5.0  # between two looks for slots that other processes left
_LONG = (Start, Judge, Release, Launch, Collect)  # orders that hash, upload, compute or wait


@dataclass(frozen=True, slots=True)
class Tick:
    """What one pass found: the run afterwards, and whether anything changed (then look again at once)."""

    run: RunRecord
    changed: bool
    again_after: float = 0.0  # seconds, unless something is seen before
    set_aside: tuple[str, ...] = ()  # stages that wait for a person, where nothing else is left
    view: View | None = field(default=None, compare=False, repr=False)  # the rows that the pass decided on last


@dataclass(slots=True)
class _Watched:
    """A run between two passes."""

    last: Tick | None = None
    again_at: float = 0.0
    turn: tuple[int, int] = (0, 0)  # the queue's order
    living: int = 0  # attempts
    slot: bool = False  # whether a stage waits for one
    devices: int = 0  # that a stage waits for


class Reconciler:
    """Brings runs to where they should be.

    Args:
        owner: names this process in the lease.
        alive: whether another owner still lives, when that can be told: a dead one's lease need not run out first.
    """

    def __init__(
        self, stores: Stores, jobs: Jobs, owner: str, alive: Callable[[str], bool] = lambda owner: True
    ) -> None:
        self._stores, self._jobs = stores, jobs
        self.queue = WorkQueue(stores.ledger, owner, alive, LEASE_SECONDS, jobs.host)
        self._manifests: dict[str, Manifest] = {}
        self._held: dict[str, Work] = {}  # run → our claim
        self._watched: dict[str, _Watched] = {}
        self._due: set[str] = set()  # woken
        self._renewed = self._polled = -NEVER
        self._swept = stores.clock.now()
        self._pulse = Pulse(stores.clock, jobs)
        self._beside, self._ending = Beside(jobs.beside), Beside(4 * jobs.beside)  # no end of a job waits for a hash
        self._begun: dict[tuple[str, str], int] = {}  # stage → version of the queue's row when work beside was begun
        self._slots, self._devices = Turns(), Turns()
        self._counted = self._dealt = -NEVER  # when slots and devices were looked for

    def tick(self, run_id: str) -> Tick | None:
        """One pass over one run, due or not; None when another live process holds its lease."""
        over, began = self._over(run_id), self._stores.clock.now()
        rows, now = self._looked_at(run_id)
        if run_id not in rows:  # the run has ended, its row was lost, or another process resumes it right now
            run = self._stores.ledger.run(run_id) if now is None else now.run
            if is_final("run", run.state):
                self._held.pop(run_id, None)
                return Tick(run, changed=False)
        claim = self._claim(run_id, rows.get(run_id))
        if claim is None:
            return None
        if claim is not rows.get(run_id):  # claimed a moment ago: the version that it counts is newer than the rows
            over, began = self._over(run_id), self._stores.clock.now()
            rows, now = self._looked_at(run_id)
        if run_id in self._watched:
            self._watched[run_id].turn = (-claim.priority, claim.id)
        troubles = Troubles(self._stores, self.queue, rows.values())
        try:
            now = self._rows_of(run_id) if now is None else now
            if self._is_elsewhere(now):
                return None
            view = self._told(now)
            after = self._passes(view, troubles, over)
            if _moved(view, after) and not is_final("run", after.run.state):
                return Tick(after.run, changed=True, view=after)  # the pass that finds nothing to do gives it back
            return self._given_back(after, claim, troubles, began)
        except ConflictError:  # a person or another process moved first: read again
            return Tick(self._stores.ledger.run(run_id), changed=True)
        except Exception as error:
            return self._met(self._stores.ledger.run(run_id), claim, error)

    def _over(self, run_id: str) -> Set[str]:
        """Stages whose work beside this thread has ended: asked before the rows are read, which it wrote."""
        return self._beside.over(run_id) | self._ending.over(run_id)

    def _looked_at(self, run_id: str) -> tuple[dict[str, Work], RunRows | None]:
        """The rows of a run, the queue's with its own; None: one is damaged, which is the run's trouble."""
        try:
            return self.queue.look_at(run_id)
        except IntegrityError:
            return self.queue.of_run(run_id), None

    def _given_back(self, view: View, claim: Work, troubles: Troubles, began: float) -> Tick:
        """Whatever was written after `view` was read woke the run: then it is not settled, and looked at again."""
        run = view.run
        if is_final("run", run.state):
            self.queue.finish(run.id)
            self._held.pop(run.id, None)
            return Tick(run, changed=True)
        stages = [stage for stage in view.stages if stage.name not in troubles.set_aside]
        names = {stage.name for stage in stages}
        attempts = [attempt for attempt in view.attempts if attempt.stage in names]
        # of the moment before anything was decided: a time that came meanwhile was not decided on
        after = look_again_after(view.manifest, stages, attempts, min(began, self._stores.clock.now()))
        if troubles.again_after is not None:
            after = min(after, troubles.again_after)
        aside = tuple(sorted(troubles.set_aside)) if after >= NEVER else ()
        after = min(after, RACED_SECONDS if troubles.raced else UNWOKEN_SECONDS)
        said = self._say_set_aside(run, aside)
        hold = self._jobs.host is None or any(attempt.host == self._jobs.host for attempt in view.attempts)
        hold = hold or run.id in self._beside.runs()
        if not hold:  # what no host has yet is for the first that has room
            self._held.pop(run.id, None)
        settled = self.queue.give_back(claim, after, hold=hold)
        return Tick(said, not settled, after, aside if settled else (), view)

    def _say_set_aside(self, run: RunRecord, names: Sequence[str]) -> RunRecord:
        """Say that nothing is left of the run but what was set aside; or that this is over."""
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
        """What concerns the run as a whole, such as a manifest that cannot be had, is the queue's."""
        self._held.pop(run.id, None)
        try:
            known = record_trouble(self.queue, RUN, run.id, error, claim, held=claim)
        except ConflictError:  # the lease ran out meanwhile: whoever has it now looks
            return Tick(run, changed=False, again_after=RACED_SECONDS)
        if known.dead_at is not None:
            with suppress(PosttrainError), self._stores.ledger.transaction(self._stores.actor) as transaction:
                transaction.append_event(RUN_SET_ASIDE, run.id, {"tries": known.failures}, {"error": known.error})
            raise error
        return Tick(run, changed=False, again_after=max(0.0, known.due_in))

    def _claim(self, run_id: str, row: Work | None) -> Work | None:
        """This driver's lease of the run, whose row was read a moment ago, with the row as it is now."""
        held = self._held.get(run_id)
        if row is None:
            self.queue.wake(RUN, [run_id])
        elif row.dead_at is not None:
            raise InfrastructureError(
                f"run {run_id} was set aside after {row.failures} tries: {row.error}; mend the cause, then "
                f"posttrain dead {run_id} --retry"
            )
        elif held is not None and row.lease_token == held.lease_token and (row.lease_in or 0.0) > LEASE_SECONDS / 2:
            self._held[run_id] = row  # still ours for long enough: a renewal costs an fsync
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
        """Whether another host has a job of this run; its row, which had forgotten that, knows it again."""
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
        """Give the lease back, so that another process need not wait for it to expire."""
        self._held.pop(run_id, None)
        self._watched.pop(run_id, None)
        self._forget(run_id)
        self.queue.release([run_id])

    def _forget(self, run_id: str) -> None:
        self._pulse.follow(run_id, None)
        for beside in (self._beside, self._ending):
            beside.forget(run_id)

    def rest(self, seconds: float) -> bool:
        """Wait so long, or until work beside this thread is to be collected; whether some is."""
        if self._beside.runs() or self._ending.runs():
            return self._beside.wait(seconds)
        self._stores.clock.sleep(seconds)
        return False

    def worth(self, run_ids: Sequence[str]) -> list[str]:
        """Those of many runs that are worth a `step` now; executor and queue are asked once for all of them."""
        self._look_around()
        return [run_id for run_id in run_ids if self._is_due(run_id, self._stores.clock.now())]

    def step(self, run_id: str) -> Tick:
        """A pass over a run if it is worth one: its time has come, somebody woke it, one of its jobs moved.

        Else what the last pass found, at no price; executor and queue are asked for all runs at once.

        Raises:
            InfrastructureError: what is left of the run was set aside: it failed again and again.
        """
        self._look_around()
        clock = self._stores.clock
        watched = self._watched.get(run_id) or self._watched.setdefault(run_id, _Watched())
        if watched.last is not None and not self._is_due(run_id, clock.now()):
            return replace(watched.last, changed=False)
        self._due.discard(run_id)
        self._pulse.take(run_id)
        found = self.tick(run_id) or Tick(self._stores.ledger.run(run_id), changed=False, again_after=POLL_SECONDS)
        watched.again_at = clock.now() + (0.0 if found.changed else found.again_after)
        watched.last = replace(found, view=None)
        if found.set_aside:
            watched.last = None  # for whoever asks again once its cause is mended
            raise InfrastructureError(f"run {run_id}: {found.run.message}; {found.run.next_action}")
        self._take_in(run_id, watched, found)
        return found

    def _take_in(self, run_id: str, watched: _Watched, found: Tick) -> None:
        """What the next look around needs to know of a run."""
        if is_final("run", found.run.state):
            self._forget(run_id)
            self._counted = -NEVER
            return
        if found.view is None and found.changed:
            return  # raced: the next pass sees the rows
        if found.view is None:  # another driver has it
            self._forget(run_id)
        self._pulse.follow(run_id, found.view)
        view = found.view
        stages = view.stages if view else ()
        living = sum(not is_final("attempt", one.state) for one in view.attempts) if view else 0
        if living < watched.living:
            self._counted = -NEVER  # a slot is free: somebody waits for it, perhaps
        watched.living = living
        watched.slot = any(one.reason == Reason.WAITING_FOR_SLOT for one in stages)
        wanting = [one.name for one in stages if one.reason == Reason.WAITING_FOR_DEVICES]
        watched.devices = max((self._wanted(view, name) for name in wanting if view), default=0)

    def _wanted(self, view: View, name: str) -> int:
        plan = view.manifest.stage(name)
        return self._jobs.trainer(plan.trainer).devices(plan.kind, plan.params)

    def _look_around(self) -> None:
        """What is due for any run: leases, orphans, the queue, the jobs of all runs, what became free."""
        self.keep()
        self._sweep()
        now = self._stores.clock.now()
        if now - self._polled >= POLL_SECONDS:
            self._polled = now
            with suppress(PosttrainError):  # a database that is away: the look that is due anyway tells of it
                self._due |= self.queue.due(self._watched)
        self._pulse.refresh()
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
            or self._pulse.has_moved(run_id)
            or self._beside.is_over(run_id)
            or self._ending.is_over(run_id)
        )

    def _deal(self) -> None:
        """Wake who is next for devices that are free."""
        waiting = sorted((one.turn, run_id, one.devices) for run_id, one in self._watched.items() if one.devices)
        if not waiting:
            return
        try:
            room = self._jobs.executor.capacity()
        except Exception:  # the look at the run tells of it
            self._due.add(waiting[0][1])
            return
        free = float(room.devices - len(room.held)) if room.devices else NEVER
        woken = self._due | self._beside.runs()
        self._due |= self._devices.next([(run_id, wanted) for _, run_id, wanted in waiting], free, woken)

    def _seat(self) -> None:
        """Wake who is next for slots that are free."""
        waiting = sorted((one.turn, run_id) for run_id, one in self._watched.items() if one.slot)
        if not waiting:
            return
        with suppress(PosttrainError):  # the ledger or the executor is away: later
            free = self._jobs.slots - sum(taken_slots(self._stores, self._jobs))
            self._due |= self._slots.next([(run_id, 1) for _, run_id in waiting], free, self._due | self._beside.runs())

    def _sweep(self) -> None:
        """Now and then one driver of all ends the jobs that no live attempt owns."""
        if self._stores.clock.now() - self._swept < SWEEP_SECONDS:
            return
        self._swept = self._stores.clock.now()
        with suppress(PosttrainError):  # a database that is away: the next sweep
            name = f"executor {self._jobs.executor.name}"
            self._sweep_now(f"{name} {self._jobs.host}" if self._jobs.host else name)

    def _sweep_now(self, name: str) -> None:
        if self.queue.look(SWEEP, name) is None:
            self.queue.wake(SWEEP, [name])
        for one in self.queue.claim([name]):
            try:
                told = end_orphans(self._stores.ledger, self._jobs)
            except Exception as error:  # the executor is away, or what it finds cannot be read: later
                self.queue.failed(SWEEP, name, one_line(error), "", SWEEP_SECONDS, held=one)
                continue
            if told:
                with self._stores.ledger.transaction(self._stores.actor) as transaction:
                    transaction.append_event("orphans.ended", name, {}, {"jobs": told})
            self.queue.give_back(one, SWEEP_SECONDS)

    def keep(self) -> None:
        """Hold on to what is held, where a third of the lease has passed."""
        now = self._stores.clock.now()
        if self._jobs.hosts is not None:
            with suppress(PosttrainError):  # a database that is away: the next time
                self._jobs.hosts.beat()
        if self._held and now - self._renewed >= LEASE_SECONDS / 3:
            self._renewed = now
            with suppress(PosttrainError):  # a database that is away: the next time, or the lease runs out
                self.queue.renew()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The lease is kept through work that takes longer than it lasts, such as the hashing of a model."""
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

    def _passes(self, view: View, troubles: Troubles, over: Set[str]) -> View:
        """Passes over rows that were read once, until nothing is left to do, an attempt begins or one meets trouble.

        What is planned is launched after another read: the run may have been stopped. Every write compares
        generations, so a row that another process changed meanwhile ends the passes with a conflict.
        """
        while True:
            after = self._pass(view, troubles, over)
            settled = not _moved(view, after) or is_final("run", after.run.state)
            if settled or troubles or _planned(view) or _planned(after):
                return after
            view, over = after, frozenset()  # what ends beside meanwhile writes rows that this view does not have

    def _pass(self, view: View, troubles: Troubles, over: Set[str]) -> View:
        """Decide and act: for the run, for each stage by itself, for the run again. The rows afterwards.

        Args:
            over: stages for which work beside had ended before `view` was read.
        """
        run_id = view.run.id
        while orders := decide_run(view):
            view = self._done(view, *orders)
        looks = Looks(self._jobs, self._pulse.seen())
        waiting = [stage.name for stage in view.stages if stage.state == StageState.PENDING]
        for name in (*waiting, *(stage.name for stage in view.stages)):  # who could start now is known before any does
            if troubles.waits(view.stage(name)):
                continue
            with troubles.kept_to(view.stage(name)):
                view = self._advance(view, name, looks, over)
                continue
            view = self._told(self._rows_of(run_id))  # something was raised, after the rows had changed perhaps
        # work beside may start a job after the rows were read: the run ends only after that work is collected
        ending = None if run_id in self._beside.runs() | self._ending.runs() else settle(view)
        return view if ending is None else self._done(view, ending)

    def _advance(self, view: View, name: str, looks: Looks, over: Set[str]) -> View:
        """One step of one stage, unless the last one still goes on beside this thread. The rows afterwards."""
        run_id = view.run.id
        for beside in (self._beside, self._ending):
            if beside.has(run_id, name):
                if name not in over or not beside.collect(run_id, name):
                    return view
                if self._held[run_id].wanted_version == self._begun.pop((run_id, name), None):
                    return view  # nobody woke the run since: what is due is the same, and waits for its time or a sign
        running = view.stage(name).state == StageState.RUNNING
        if running and self._jobs.elsewhere(view.tries(name)[-1]):
            return view  # the run became another host's since this pass began
        sight = see(self._stores, self._jobs, view, name, looks) if running else None
        order = decide_stage(view, name, sight, self._stores.clock.now())
        if order is None:
            return view
        if not self._jobs.beside or not isinstance(order, (*_LONG, Kill)):
            return self._done(view, order)
        beside = self._ending if isinstance(order, Kill) else self._beside
        self._begun[run_id, name] = self._held[run_id].wanted_version
        beside.begin(run_id, name, functools.partial(act, self._stores, self._jobs, view, order))
        return view

    def _done(self, view: View, *orders: Order) -> View:
        """Carry out orders of one run in this thread; return the rows afterwards without a read."""
        with self._stores.ledger.written() as rows:
            for order in orders:
                act(self._stores, self._jobs, view, order)
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
    """Whether rows of a run were changed from one view to the other."""
    return _generations(before) != _generations(after)


def _planned(view: View) -> bool:
    """Whether an attempt waits to be launched."""
    return any(attempt.state == AttemptState.PLANNED for attempt in view.attempts)


def _generations(view: View) -> tuple[int, ...]:
    below = [*(stage.generation for stage in view.stages), *(attempt.generation for attempt in view.attempts)]
    return (view.run.generation, *below)
