"""Two terminals drive one run whose ledger is in PostgreSQL, while processes are killed and stopped at random.

Struck are the two commands, their supervisors and jobs, and now and then the server, which a crash ends and which is
started again. A command that ended is typed again. At the end of each run: the undisturbed run's models, one release, a
chain and a lineage that verify, no process left. `make postgres MINUTES=10` goes on with further runs for ten minutes;
without it, it is one run.

    MINUTES  how long; SEED of the first run, 1 without it
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny_run import make_template
from workbench import Workbench

from postgres_server import Server
from posttrain import channel
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import verify_chain

pytestmark = pytest.mark.postgres
MINUTES, SEED = float(os.environ.get("MINUTES") or 0), int(os.environ.get("SEED") or 1)
STRIKES = 6  # a run: of more it would hardly come to its end
LONGEST_STOP = 3.0  # seconds
OVER_LEASE = 20.0  # seconds: longer than a lease and than the server waits for a stopped writer
RETRIED = (9, 10, -signal.SIGKILL)  # somebody was first; the server was away; killed
MOST_COMMANDS = 40
VICTIMS = ("driver", "driver", "driver", "job", "job", "job", "supervisor", "server")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It waits for the disk: it will be ended as by a power cut."""
    with Server(durable=True) as server:
        yield server


@dataclass
class Prepared:
    """A workspace with assets and no run, of which copies are made: folder and database."""

    bench: Workbench
    server: Server
    address: str

    def copy(self, folder: Path) -> Workbench:
        bench = self.bench.copy(folder)
        name = self.address.partition("?")[0].rpartition("/")[2]
        address = self.server.address(f"{name}_{folder.name}")
        self.server.sql(f'CREATE DATABASE "{name}_{folder.name}" TEMPLATE "{name}"')
        settings = json.loads((bench.root / "workspace.json").read_text())
        (bench.root / "workspace.json").write_text(json.dumps({**settings, "ledger": address}))
        return bench


@pytest.fixture(scope="module")
def prepared(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    bench, address = Workbench(tmp_path_factory.mktemp("prepared")), server.create()
    bench.run("init", "--ledger", address)
    make_template(bench)
    return Prepared(bench, server, address)


@dataclass
class Ordeal:
    """One run that is disturbed."""

    bench: Workbench
    server: Server
    rng: random.Random
    seconds: float  # that the undisturbed run took, over which the strikes are spread
    struck: Counter[str] = field(default_factory=Counter)
    stopped: dict[int, float] = field(default_factory=dict)  # pid → when it goes on
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)
    started: int = 0

    def __post_init__(self) -> None:
        self.next = self._drawn()

    def _drawn(self) -> str:
        """Who is struck next, as soon as it is there."""
        return self.rng.choice(VICTIMS)

    def drive(self) -> None:
        """Until both terminals say that the run succeeded."""
        self.drivers = [self._start(), self._start()]
        due = time.monotonic() + self._pause()
        while self.drivers:
            self.bench.live()  # sees to it that no stage has two jobs
            now = time.monotonic()
            self._wake(now)
            if self.struck.total() < STRIKES and now >= due and self._strike(now):
                due, self.next = time.monotonic() + self._pause(), self._drawn()
            self.drivers = [again for driver in self.drivers if (again := self._followed(driver)) is not None]
            time.sleep(0.02)
        self._wake(float("inf"))

    def _pause(self) -> float:
        return self.rng.uniform(0.0, 2 * self.seconds / STRIKES)

    def _start(self) -> subprocess.Popen[str]:
        self.started += 1
        assert self.started <= MOST_COMMANDS, f"not healed by {MOST_COMMANDS} commands; struck: {self.struck}"
        return self.bench.start("run", "run.yaml")

    def _followed(self, driver: subprocess.Popen[str]) -> subprocess.Popen[str] | None:
        """The driver, or the one that is typed after it; None once it succeeded."""
        if driver.poll() is None:
            return driver
        ended = self.bench.finish(driver)
        assert ended.code == 0 or ended.code in RETRIED, f"ended by more than a strike: {ended}"
        if ended.code > 0:
            assert ended.error
        return None if ended.code == 0 else self._start()

    def _strike(self, now: float) -> bool:
        """Strike who was drawn; whether it was there."""
        victims = [("driver", driver.pid) for driver in self.drivers if driver.poll() is None]
        victims += [(process.kind, process.pid) for process in self.bench.live()]
        there = [pid for kind, pid in victims if kind == self.next]
        if self.next == "server":
            self.server.stop(signal.SIGQUIT)
            self.server.start()
            self.struck["server"] += 1
        elif there:
            pid, sent = self.rng.choice(there), self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
                self.struck[f"{sent.name} {self.next}"] += 1
                if sent == signal.SIGSTOP:
                    long = self.next == "driver" and self.rng.randrange(3) == 0
                    self.stopped[pid] = now + (OVER_LEASE if long else self.rng.uniform(0.1, LONGEST_STOP))

        return self.next == "server" or bool(there)

    def _wake(self, now: float) -> None:
        for pid in [pid for pid, until in self.stopped.items() if until <= now]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            del self.stopped[pid]


def test_two_drivers_and_their_jobs_may_die_and_stop_at_any_time(
    prepared: Prepared, server: Server, tmp_path: Path
) -> None:
    undisturbed = prepared.copy(tmp_path / "undisturbed")
    began = time.monotonic()
    undisturbed.run("run", "run.yaml")
    seconds = time.monotonic() - began
    expected = undisturbed.outputs(undisturbed.run_id())
    until, seed, total = time.monotonic() + 60 * MINUTES, SEED, Counter[str]()
    while True:
        bench = prepared.copy(tmp_path / f"seed{seed}")
        ordeal = Ordeal(bench, server, random.Random(seed), seconds)
        try:
            ordeal.drive()
            check(bench, expected)
        except BaseException:
            print(f"\nseed {seed} is not healed; struck: {dict(ordeal.struck)}", flush=True)
            raise
        finally:
            bench.clean()
        total += ordeal.struck
        print(f"\nseed {seed}: {ordeal.started} commands, {dict(sorted(ordeal.struck.items()))}", flush=True)
        seed += 1
        if time.monotonic() >= until:
            break
    print(f"{seed - SEED} runs, {total.total()} strikes: {dict(sorted(total.items()))}", flush=True)


def check(bench: Workbench, expected: dict[str, str]) -> None:
    """One run, its models those of the undisturbed one, released once; chain and lineage hold; nothing is left."""
    run_id = bench.run_id()
    bench.check(run_id)
    assert bench.outputs(run_id) == expected
    with bench.open() as workspace:
        assert [run.id for run in workspace.ledger.runs() if run.name == "tiny"] == [run_id]
        assert [(entry.run_id, entry.action) for entry in workspace.ledger.history("prod")] == [(run_id, "promote")]
        address = workspace.ledger_address
        verified = channel("prod", workspace).verify()
    assert verified.problems == ()
    assert address is not None
    ledger = Ledger(Database(address, create=False))
    assert verify_chain(ledger).pending == 0
    ledger.close()
