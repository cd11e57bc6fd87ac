"""One simulated day: the production control plane, two to four drivers, jobs, people and faults, by a seed."""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

from sim_checks import Unheard, check_budgets, check_end, check_now, check_told
from sim_jobs import Jobs
from sim_people import Drivers, Faults, People
from sim_ports import (
    HostExecutor,
    Outside,
    Process,
    Rows,
    SimBlobs,
    SimDatabase,
    SimExecutor,
    SimFolder,
    SimFolders,
    Weather,
    sim_folders,
)
from sim_world import SimClock, World

from posttrain.control.jobs import Jobs as ControlJobs
from posttrain.execution.executors.fake import Hostility
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.database import Database
from posttrain.store.ledger import Hosts, Ledger, Stores

# A day has as many renewals as leases fit into it, and as many looks at silent jobs: here they are longer, and so is
# what freezes a driver.
LEASE_SECONDS, SWEEP_SECONDS = 300.0, 900.0
BEAT_SECONDS, GONE_SECONDS = 120.0, 400.0
WAITS = {"WaitingForIdenticalStage": 60.0, "SubmissionUnknown": 15.0, "JobNotVisible": 15.0}


@dataclass(frozen=True, slots=True)
class Day:
    """What came of a seed."""

    seed: int
    digest: str
    counts: dict[str, int]
    story: str


class DayFailedError(AssertionError):
    """A seed that broke a rule, with the end of its history."""


class Simulation:
    """The world of one seed, below a folder."""

    def __init__(self, seed: int, root: Path) -> None:
        self.world = world = World(seed, folder=str(root))
        dice = world.random
        world.lease, world.fatal = LEASE_SECONDS, dice.choice((0.0, 0.002, 0.006))
        self.weather = weather = Weather(world, lost_commits=dice.choice((0.0, 0.01, 0.03)))
        (root / "ledger.db").write_bytes(_empty_ledger())
        self.root, self.database = root, SimDatabase(root / "ledger.db", world, weather)
        self.rows = Rows(root / "ledger.db")
        self.channels: dict[str, dict[str, bytes]] = {}
        self.channel = Outside(world, weather, "channel")
        self.blobs, self.jobs = self._made_blobs(), self._made_jobs()
        self.jobs.rates = {"breaks": dice.choice((0.0, 0.1, 0.3))}
        self.executor = self._made_executor()(Outside(world, weather, "executor"), self.jobs.begin, _hostility(world))
        self.executor.rates = {
            "lose_answers": 0.1, "lose_requests": 0.1, "late_requests": 0.1, "twice": 0.1, "deaf": 0.3
        }  # fmt: skip
        self.executor.folder, self.executor.ended, self.jobs.executor = self._folder, self.jobs.ended, self.executor
        self.jobs.changed = self._job_moved
        self.executor.holds = self._holds
        self.executor.launched_by_rows = lambda name: bool(self._handle(name))
        self.trainers = {"native": NativeTrainer()}
        alike = dice.random() < 0.5 and not self.executor.remote
        self.drivers = Drivers(world, lambda: self.rows, self._process, alike)
        # jobs belong to the host that began them
        self.drivers.stays = self.hosts = not alike and not self.executor.remote
        self.people = People(world, lambda: self.rows, self._process, most=dice.randint(3, 6))
        self.executor.doubted = self.people.lose_patience
        self.drivers.looks = self.people.meddle
        self.faults = Faults(world, weather, self.drivers, self.executor, lambda: self.jobs.strike(dice))
        self._event, self._unheard = 0, Unheard()
        self._leases: dict[str, tuple[str | None, float]] = {}
        self.database.committed = self._committed
        world.before_jump = self._look

    def run(self) -> Day:
        """Let the day pass.

        Raises:
            DayFailedError: a rule was broken.
        """
        world = self.world
        for _ in range(world.random.randint(2, 4)):
            self.drivers.start(world.random.uniform(0.0, 30.0))
        world.add("people", self.people.live)
        world.add("weather", self.faults.come)
        try:
            with ExitStack() as stack:
                for one in self._patches():
                    stack.enter_context(one)
                world.run()
                world.close()
                counts = self._end(self._process("end").stores)
        except Exception as error:
            raise DayFailedError(
                f"seed {world.seed}: {error}\n{world.story()}\nagain: SEED={world.seed} make chaos"
            ) from error
        finally:
            self.rows.close()
            self.database.close()
        return Day(world.seed, world.digest(), counts, world.story())

    def _patches(self) -> list[Any]:
        """What is another in this world than in production."""
        return [
            patch("posttrain.control.reconciler.LEASE_SECONDS", LEASE_SECONDS),
            patch("posttrain.control.reconciler.SWEEP_SECONDS", SWEEP_SECONDS),
            patch("posttrain.store.ledger.BEAT_SECONDS", BEAT_SECONDS),
            patch("posttrain.store.ledger.GONE_SECONDS", GONE_SECONDS),
            patch.dict("posttrain.control.wakeups._WAITS", WAITS),
            patch("posttrain.execution.processes.alive", self.jobs.alive),
            patch("os.fsync", lambda handle: None),
        ]

    def _end(self, stores: Stores) -> dict[str, int]:
        """Check the end of the day; return how much of what there was."""
        counts = check_end(self.world, stores, self.rows)
        check_budgets(self.world, self.rows, stores, self.jobs.spent)
        check_told(self.world, self.rows, self.people.told, self.jobs.answered)
        return counts

    def _made_blobs(self) -> Any:
        return SimBlobs(Outside(self.world, self.weather, "store"))

    def _made_executor(self) -> type[SimExecutor]:
        return SimExecutor

    def _made_jobs(self) -> Jobs:
        return Jobs(self.world, self._folder, lambda: self.rows)

    def _folders(self, host: str) -> SimFolders:
        return sim_folders(self.root, self.channel, self.channels)

    def _folder(self, path: Path) -> SimFolder:
        return SimFolder(path, self.channel, self.channels)

    def _process(self, actor: str) -> Process:
        """What a process works with: a ledger of its own over what all share."""
        ledger = Ledger(self.database, SimClock(self.world), entropy=self.world.random.randbytes)
        host = actor.partition(":")[0]
        folders = self._folders(host)
        stores = Stores(ledger, self.blobs, SimClock(self.world), actor)
        if not self.hosts or ":" not in actor:
            return Process(stores, ControlJobs(self.executor, self.trainers, folders, slots=2))
        hosts = Hosts(self.database, SimClock(self.world), host, host)
        mine = cast(Any, HostExecutor(self.executor, host))
        return Process(stores, ControlJobs(mine, self.trainers, folders, slots=2, hosts=hosts))

    def _holds(self, run_id: str) -> bool:
        query = "SELECT lease_owner, lease_until FROM work WHERE kind = 'run' AND object = ?"
        for owner, until in self.rows.all(query, run_id):
            return self.drivers.living.get(owner or "") is self.world.current and until > self.world.now()
        return False

    def _handle(self, name: str) -> str | None:
        handle: str | None = self.rows.one("SELECT handle FROM attempts WHERE name = ?", name)
        return handle

    def _committed(self) -> None:
        """Tell what was committed, and wake whom it concerns."""
        for event, kind, subject in self.rows.all(
            "SELECT id, kind, subject FROM events WHERE id > ? ORDER BY id", self._event
        ):
            self._event = event
            self.world.say(f"commits {kind} {subject}")
        self._compare_leases()
        due = "SELECT lease_owner, lease_until FROM work WHERE kind = 'run' AND dead_at IS NULL AND due_at <= ?"
        now = self.world.now()
        for owner, until in self.rows.all(due, now):
            self.drivers.wake(None if owner is None or until <= now else owner)

    def _compare_leases(self) -> None:
        """Nobody takes what a living driver holds, nor gives up what another one has."""
        now, held = self.world.now(), self._leases
        query = "SELECT object, lease_owner, lease_until FROM work WHERE kind = 'run' AND lease_owner IS NOT NULL"
        self._leases = {name: (owner, until) for name, owner, until in self.rows.all(query)}
        for name, (owner, _) in self._leases.items():
            before, until = held.get(name, (owner, 0.0))
            taken = owner != before and until > now and before in self.drivers.living
            self.world.must(not taken, f"{owner} takes {name}, which {before} holds for {until - now:.0f} s")

    def _job_moved(self, run_id: str) -> None:
        self.drivers.wake(self.rows.one("SELECT lease_owner FROM work WHERE kind = 'run' AND object = ?", run_id))

    def _look(self) -> None:
        check_now(self.world, self.rows, self.people.stops, set(self.drivers.living))
        self._unheard.check(self.world, self.rows, self.people.signals, set(self.drivers.living))


@functools.cache
def _empty_ledger() -> bytes:
    """The file of a ledger that holds nothing yet: made once, for it takes as long as hours of a day."""
    with TemporaryDirectory() as folder:
        place = Path(folder, "ledger.db")
        Database(place).close()
        return place.read_bytes()


def _hostility(world: World) -> Hostility:
    dice = world.random
    visible = dice.choice((0.0, 5.0, 30.0))
    return Hostility(
        idempotent=dice.random() < 0.5,
        visible_after=visible,
        settles_after=visible + dice.choice((10.0, 60.0)),
        purges_after=dice.choice((None, 30.0, 300.0)),
    )


def simulate(seed: int, root: Path, kind: type[Simulation] = Simulation) -> Day:
    """One day below a folder, which need not be there."""
    root.mkdir(parents=True, exist_ok=True)
    return kind(seed, root).run()


def chosen_seeds(usual: int) -> list[int]:
    """The seeds to try: SEED, or the first SEEDS."""
    if os.environ.get("SEED"):
        return [int(os.environ["SEED"])]
    return list(range(int(os.environ.get("SEEDS") or usual)))
