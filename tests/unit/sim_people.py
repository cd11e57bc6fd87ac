"""Who acts in a simulated world beside its jobs: drivers, people, the weather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from control_bench import RUN, resolve
from sim_ports import Process, Rows, SimDatabase, SimExecutor, Weather
from sim_world import FOREVER, Actor, World

from posttrain.control import actions
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler, Tick
from posttrain.domain.errors import PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import ReleaseEntry
from posttrain.domain.runspec import parse_run_spec
from posttrain.store.sealer import seal

CHANNELS = ("prod", "beta")
_FINAL = "('succeeded', 'failed', 'rejected', 'stopped')"
_UNFINISHED = f"SELECT id FROM runs WHERE state NOT IN {_FINAL} ORDER BY id"
_WAITING = (
    "SELECT runs.id FROM runs JOIN stages ON stages.run_id = runs.id AND stages.name = 'approval' "
    f"WHERE runs.state NOT IN {_FINAL} ORDER BY runs.id"
)
_WAITING_NOW = "SELECT run_id FROM stages WHERE name = 'approval' AND state = 'ready'"
_DUE = (
    "SELECT lease_owner FROM work JOIN runs ON runs.id = work.object "
    f"WHERE dead_at IS NULL AND due_at <= ? AND state NOT IN {_FINAL}"
)
_UNSEEN = 60.0  # seconds between looks that found nothing to do
_CONTENT = 0.75  # share of moments at which a driver sees that another one has a run, and does not try to take it
_BROAD = 0.4  # share of runs with two trainings side by side
_WAITS = 0.4  # share of runs that wait for a person's signal
_GO = "go"
_BUDGETED = 0.3  # share of runs with a budget
_BUDGETS = (100, 120, 160, 400)  # tokens; a run needs 100 where nothing breaks
_MEDDLES = 0.5  # share of looks at a run that waits for a signal at which somebody sends it, or stops the run
_IMPATIENT = 0.2  # share of unanswered submissions of which somebody has enough
_BACKOFF = 5.0  # seconds of a driver that could not look at a run


class Driven(Reconciler):
    """The production reconciler; it says when each run is looked at again, so that nobody need ask before."""

    def __init__(self, process: Process, owner: str, alive: Callable[[str], bool], rows: Rows) -> None:
        super().__init__(process.stores, process.jobs, owner, alive)
        self._rows, self._clock = rows, process.stores.clock
        self.again: dict[str, float] = {}
        self.refused: set[str] = set()  # runs that another had at the last look
        self.looks: Callable[[str], None] = lambda run_id: None  # told before each pass over a run

    def tick(self, run_id: str) -> Tick | None:
        """See `Reconciler.tick`."""
        self.looks(run_id)
        found = super().tick(run_id)
        if found is None:
            query = "SELECT lease_until FROM work WHERE kind = 'run' AND object = ? AND lease_owner IS NOT NULL"
            self.again[run_id] = max(self._clock.now() + 0.5, self._rows.one(query, run_id) or 0.0)
            self.refused.add(run_id)
        else:
            self.again[run_id] = self._clock.now() + (0.0 if found.changed else found.again_after)
            self.refused.discard(run_id)
        return found


class Drivers:
    """The processes that drive runs: when one dies, another one of another name comes later.

    Args:
        wire: makes what a process works with.
        alike: whether they are on one host, where a dead one is seen to be dead.
    """

    def __init__(self, world: World, rows: Callable[[], Rows], wire: Callable[[str], Process], alike: bool) -> None:
        self._world, self._rows, self._wire, self._alike = world, rows, wire, alike
        self.living: dict[str, Actor] = {}  # owner → who
        self.stays = False  # whether one that comes later is on the host of the one before: jobs are hosts' own
        self.looks: Callable[[str], None] = lambda run_id: None
        self._count = 0

    def start(self, after: float, where: str | None = None) -> None:
        """A new process."""
        self._count += 1
        host = where or ("host" if self._alike else f"host{self._count % (2 if self.stays else 3)}")
        owner, name = f"{host}:{self._count}:{self._count}", f"driver {self._count}"
        actor = self._world.add(name, lambda: self._drive(owner), after, driver=True)
        self.living[owner] = actor
        actor.at_end = lambda: self._gone(owner)

    def _gone(self, owner: str) -> None:
        self._world.say(f"{self.living[owner].name} is gone")
        del self.living[owner]
        self.start(self._world.random.expovariate(1 / 120), owner.partition(":")[0] if self.stays else None)

    def _alive(self, asking: str, owner: str) -> bool:
        there = owner.partition(":")[0] != asking.partition(":")[0]
        return there or owner in self.living

    def wake(self, owner: str | None) -> None:
        """Work is due: for its holder, or for one of all."""
        actor = self.living.get(owner or "")
        if actor is None and owner is None and self.living:
            actor = self._world.random.choice(list(self.living.values()))
        if actor is not None:
            self._world.signal(actor.name)

    def wake_all(self) -> None:
        """Clocks jumped, or leases ran out."""
        for actor in self.living.values():
            self._world.signal(actor.name)

    def _drive(self, owner: str) -> None:
        world, rows = self._world, self._rows()
        process = self._wire(owner)
        reconciler = Driven(process, owner, lambda other: self._alive(owner, other), rows)
        reconciler.looks = self.looks
        while True:
            changed, later = False, FOREVER
            for (run_id,) in rows.all(_UNFINISHED):
                if not self._worth(reconciler, rows, owner, run_id, world.now()):
                    later = min(later, reconciler.again[run_id])
                    continue
                try:
                    tick = reconciler.step(run_id)
                    if is_final("run", tick.run.state):
                        reconciler.release(run_id)
                        seal(process.stores.ledger)
                    changed = changed or tick.changed
                    if not tick.changed and reconciler.again.get(run_id, 0.0) <= world.now():
                        reconciler.again[run_id] = world.now() + _UNSEEN  # it was not due yet
                except PosttrainError as error:
                    world.say(f"cannot look at {run_id}: {type(error).__name__} {error}")
                    reconciler.again[run_id] = world.now() + _BACKOFF
                later = min(later, reconciler.again.get(run_id, FOREVER))
            self._keep(reconciler)
            if changed:
                world.pause(0.1)
                continue
            held = rows.one("SELECT count(*) FROM work WHERE lease_owner = ?", owner)
            rest = min(later - world.now(), world.lease / 3 if held else _UNSEEN)  # others' leases may run out
            if any(holder in (None, owner) for (holder,) in rows.all(_DUE, world.now())):
                rest = min(rest, 0.6)  # a driver asks the queue twice a second
            world.pause(max(0.1, rest), listening=True)

    def _worth(self, reconciler: Driven, rows: Rows, owner: str, run_id: str, now: float) -> bool:
        """Whether a driver that asks ten times a second would do more now than ask: else asking is left out."""
        if now >= reconciler.again.get(run_id, 0.0) and not (
            run_id in reconciler.refused and self._world.random.random() < _CONTENT
        ):
            return True
        found = rows.all("SELECT due_at, lease_owner, lease_until FROM work WHERE kind = 'run' AND object = ?", run_id)
        if not found:
            return False
        due, holder, until = found[0]
        free = holder is None or until <= now or not self._alive(owner, holder)
        if not free and holder != owner:
            reconciler.again[run_id] = max(until, now + 0.5)
        return holder == owner or (due <= now and free)

    def _keep(self, reconciler: Reconciler) -> None:
        try:
            reconciler.keep()
        except PosttrainError as error:
            self._world.say(f"cannot renew: {error}")


class People:
    """People who submit, stop, retry, promote and roll back; each of their commands is a process of its own."""

    def __init__(self, world: World, rows: Callable[[], Rows], wire: Callable[[str], Process], most: int) -> None:
        self._world, self._rows, self._wire, self._most = world, rows, wire, most
        self._submitted: list[dict[str, Any]] = []
        self._count = 0
        self.stops: dict[str, float] = {}  # run → when a person was told that it will stop
        self.signals: set[str] = set()  # runs of which a person was told that their signal was sent
        self.told: list[tuple[str, ...]] = []  # what a person was told that there is: a run, or a release and its model

    def live(self) -> None:
        """Act now and then, for some hours of calm too."""
        world = self._world
        while world.time < world.calm_after + 3 * 3600:
            self._count += 1
            action = world.random.choice(self._choices())
            world.add(f"person {self._count}", lambda action=action: self._act(action))  # type: ignore[misc]
            world.pause(world.random.expovariate(1 / 1500))
        for (run_id,) in self._rows().all(_WAITING):  # nobody acts after this
            self._act(lambda process, run_id=run_id: self._signal(process, run_id), "signal")  # type: ignore[misc]

    def lose_patience(self, run_id: str) -> None:
        """Somebody may stop a run of which nobody knows whether its job was submitted."""
        if not self._world.calm and self._world.random.random() < _IMPATIENT:
            at = self._world.random.uniform(0.0, 60.0)
            self._world.add("impatient", lambda: self._act(lambda process: self._stop(process, run_id), "stop"), at)

    def meddle(self, run_id: str) -> None:
        """Somebody may act on a run in the very moment in which a driver looks at it."""
        if self._world.random.random() >= _MEDDLES or not self._rows().all(f"{_WAITING_NOW} AND run_id = ?", run_id):
            return
        action = self._signal if self._world.random.random() < 0.5 else self._stop
        name = action.__name__.strip("_")
        self._world.add("meddler", lambda: self._act(lambda process: action(process, run_id), name))

    def _choices(self) -> Sequence[Callable[[Process], object]]:
        if not self._submitted:
            return [self._submit_new]
        new = [self._submit_new] * 2 if len(self._submitted) < self._most else []
        return [*new, self._again, self._stop, self._retry, self._retry, self._promote, self._rollback, self._signal]

    def _act(self, action: Callable[[Process], object], name: str = "") -> None:
        name = name or action.__name__.strip("_")
        try:
            self._world.say(f"{name}: {action(self._wire('person'))}")
        except PosttrainError as error:
            self._world.say(f"{name}: {type(error).__name__}: {error}")

    def _submit_new(self, process: Process) -> object:
        dice = self._world.random
        changes = {"seed": len(self._submitted) % 5, "release": {"channel": dice.choice(CHANNELS), "model": "sft"}}
        stages = dict(RUN["stages"])
        if dice.random() < _BROAD:
            stages["more"] = {**stages["sft"], "steps": 4}
        if dice.random() < _WAITS:
            stages["approval"] = {"kind": "wait", "signal": _GO, "after": "gate"}
            if dice.random() < 0.4:
                stages["approval"]["within"] = dice.choice((3600, 14400))
            changes["release"] |= {"after": "approval"}
        if dice.random() < _BUDGETED:
            changes["budget"] = {"tokens": dice.choice(_BUDGETS)}
        changes["stages"] = stages
        self._submitted.append(changes)
        return self._submit(process, changes, again=False)

    def _again(self, process: Process) -> object:
        return self._submit(
            process, self._world.random.choice(self._submitted), again=self._world.random.random() < 0.3
        )

    def _submit(self, process: Process, changes: dict[str, Any], again: bool) -> object:
        planned = plan_run(parse_run_spec({**RUN, **changes}, "run.yaml"), "run.yaml", resolve, process.jobs.trainers)
        done = submit(process.stores, planned.manifest, again=again)
        self.told.append((done.run.id,))
        return f"{done.run.id}{' (attached)' if done.attached else ''}"

    def _stop(self, process: Process, run_id: str = "") -> object:
        run_id = run_id or self._one(_UNFINISHED)
        actions.stop(process.stores, run_id)
        self.stops[run_id] = self._world.time
        return run_id

    def _retry(self, process: Process) -> object:
        run_id = self._one("SELECT id FROM runs WHERE state IN ('failed', 'stopped') ORDER BY id")
        asked = self.stops.pop(run_id, None)  # before: it may go on before this command has heard of it
        try:
            actions.retry(process.stores, process.jobs.folders, run_id)
        except BaseException:
            if asked is not None:
                self.stops[run_id] = asked
            raise
        return run_id

    def _signal(self, process: Process, run_id: str = "") -> object:
        run_id = run_id or self._one(_WAITING)
        actions.send_signal(process.stores, run_id, _GO)
        self.signals.add(run_id)
        return run_id

    def _promote(self, process: Process) -> object:
        run_id = self._one("SELECT id FROM runs ORDER BY id")
        lift = "better than nothing" if self._world.random.random() < 0.3 else ""
        return self._moved(actions.promote(process.stores, run_id, self._world.random.choice(CHANNELS), lift))

    def _rollback(self, process: Process) -> object:
        if self._world.random.random() < 0.5:
            return "thinks better of it"
        return self._moved(actions.rollback(process.stores, self._world.random.choice(CHANNELS)))

    def _moved(self, entry: ReleaseEntry) -> int:
        self.told.append((entry.channel, str(entry.sequence), entry.model_digest))
        return entry.sequence

    def _one(self, query: str) -> str:
        found = self._rows().all(query)
        if not found:
            raise PosttrainError("there is none")
        return str(self._world.random.choice(found)[0])


class Faults:
    """What goes wrong by itself, until it is calm."""

    def __init__(
        self, world: World, weather: Weather, drivers: Drivers, executor: SimExecutor, strike: Callable[[], None]
    ) -> None:
        self._world, self._weather, self._drivers = world, weather, drivers
        self._executor, self._strike = executor, strike
        self.places = ["database", "store", "executor", "channel"]  # that may be away

    def come(self) -> None:
        """One after the other, at random times."""
        world = self._world
        while True:
            world.pause(world.random.expovariate(1 / 500))
            if world.calm:
                return
            world.random.choice((self._away, self._away, self._jump, self._kill, self._freeze, *[self._strike] * 4))()

    def _away(self) -> None:
        what = self._world.random.choice(self.places)
        seconds = self._world.random.expovariate(1 / 60)
        self._weather.away[what] = self._world.time + seconds
        self._world.say(f"{what} is away for {seconds:.0f} s")

    def _jump(self) -> None:
        dice = self._world.random
        seconds = dice.uniform(1.0, 900.0) if dice.random() < 0.5 else -dice.uniform(0.1, 5.0)
        self._world.jumped += seconds
        self._world.say(f"clocks jump by {seconds:.1f} s")
        self._drivers.wake_all()

    def _kill(self) -> None:
        for actor in self._some():
            self._world.say(f"{actor.name} is killed")
            actor.kill()

    def _freeze(self) -> None:
        for actor in self._some():
            seconds = self._world.lease * self._world.random.uniform(1.0, 5.0)
            self._world.say(f"{actor.name} freezes for {seconds:.0f} s")
            actor.freeze(seconds)

    def _some(self) -> Sequence[Actor]:
        living = [actor for actor in self._drivers.living.values() if not actor.doomed]
        return [self._world.random.choice(living)] if living else []


__all__ = ["CHANNELS", "Drivers", "Faults", "People", "SimDatabase"]
