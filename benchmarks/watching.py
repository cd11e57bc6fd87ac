"""The cost of unchanged runs for a driver: observations of the executor, statements and CPU of a server's driver.

    python -m benchmarks.watching [--against OTHER] [--running N] [--waiting N] [--seconds N] [--json FILE] [--tiny]

It submits N runs whose jobs a scripted executor runs endlessly, and N runs that wait for devices in use. A driver then
passes over all runs ten times in each second of a simulated clock, like a server's driver. Counted are the calls of
`observe`, the statements that reach the database (SQLite), the observed runs, and the CPU time of the passes. OTHER is
the folder of another checkout of this repository: its sources are measured afterwards, in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from benchmarks.judging import at_most, judge
from posttrain.app.driver import Driver
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain.canonical import digest_json
from posttrain.domain.jobs import Capacity, Observation
from posttrain.domain.jobspec import JobRef
from posttrain.domain.manifest import InputRef
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger, Stores

HERE = Path(__file__).resolve().parents[1]
INTERVAL = 5.0  # seconds within which a job's reports are read
OBSERVES, STATEMENTS, SHARE = 2.0, 2.0, 0.2  # maxima: per interval, per second, share of the other's CPU
_PER_SECOND = 10  # passes
_RUN: dict[str, Any] = {
    "name": "r",
    "owner": "ada",
    "model": "model:tiny",
    "data": {"train": "dataset:train"},
    "stages": {"sft": {"kind": "sft", "data": "train", "steps": 3, "placement": "collocated"}},
}


@dataclass(frozen=True)
class Idle:
    """Figures of a period in which nothing changes."""

    running: int
    waiting: int
    seconds: int
    observes_per_interval: float
    statements_per_second: float
    looks: int  # observations of runs
    cpu_per_second: float


class Clock:
    """A clock that advances only by sleeps."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        """See `Clock.now`."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self.time += seconds


class Counting(FakeExecutor):
    """An executor whose jobs never end; it counts observations."""

    observes = 0

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        self.observes += bool(jobs)
        return super().observe(jobs)


class Every:
    """Always wants every run."""

    def __init__(self, project: str) -> None:
        self.runs: list[str] = []
        self._project = project

    def wanted(self) -> dict[str, list[str]]:
        """See `Wanted.wanted`."""
        return {self._project: self.runs}

    def over(self) -> bool:
        """Return False."""
        return False

    def done(self, run_id: str, over: Callable[[], bool]) -> None:
        """Nothing."""

    def give_up(self, run_id: str, trouble: str) -> None:
        """Nothing."""


class Served:
    """The parts of a workspace that a driver uses, without trackers."""

    read_only = True

    def __init__(self, root: Path, stores: Stores, jobs: Jobs) -> None:
        self.root, self.ledger, self.stores, self.jobs = root, stores.ledger, stores, jobs
        self.reconciler = Reconciler(stores, jobs, "here")

    def seal(self) -> None:
        """Nothing."""


class Bench:
    """A driver and its runs."""

    def __init__(self, root: Path, running: int) -> None:
        self.clock = Clock()
        self.executor = Counting(now=self.clock.now)
        ledger = Ledger(Database(root / "ledger.db"), self.clock)
        self.stores = Stores(ledger, open_blobs(str(root / "blobs")), self.clock, "bench")
        self.jobs = Jobs(self.executor, {"native": NativeTrainer()}, AttemptFolders(root), slots=max(1, running))
        self._wanted, served = Every(ledger.project), Served(root, self.stores, self.jobs)
        self.runs = self._wanted.runs
        self.driver = Driver(served, self._wanted, lambda line: None)  # type: ignore[arg-type]

    def submit(self, count: int) -> None:
        """Submit `count` more runs."""
        for _ in range(count):
            raw = {**_RUN, "seed": len(self.runs)}
            planned = plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", _resolve, self.jobs.trainers)
            self.runs.append(submit(self.stores, planned.manifest).run.id)

    def passes(self, seconds: float) -> None:
        """Run the passes of a server's driver."""
        for _ in range(round(seconds * _PER_SECOND)):
            self.driver.look()
            self.clock.sleep(1 / _PER_SECOND)


def _resolve(kind: str, text: str, called: object = None) -> InputRef:
    return InputRef(source="asset", name=f"{text}@1", digest=digest_json(text), form="file")


def scripted(root: Path, running: int, waiting: int, seconds: int) -> Idle:
    """Create the runs in `root`, and count their cost while nothing changes."""
    bench = Bench(root, running)
    bench.submit(running)
    bench.passes(3)
    assert len(bench.executor.launched) == running
    bench.executor.room = Capacity(1, {"0": "another"})
    bench.submit(waiting)
    bench.passes(15)
    statements, looks = [0], [0]

    def hear(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements[0] += not statement.startswith("BEGIN")
        looks[0] += statement.startswith("SELECT") and "FROM stages" in statement

    bench.executor.observes = 0
    event.listen(Engine, "before_cursor_execute", hear)
    began = time.process_time()
    bench.passes(seconds)
    spent = time.process_time() - began
    event.remove(Engine, "before_cursor_execute", hear)
    assert len(bench.executor.launched) == running
    bench.stores.ledger.close()
    return Idle(
        running,
        waiting,
        seconds,
        bench.executor.observes * INTERVAL / seconds,
        statements[0] / seconds,
        looks[0],
        spent / seconds,
    )


def elsewhere(checkout: Path, words: Sequence[str]) -> Idle:
    """Do the same with the sources of a checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(HERE)])}
    command = [sys.executable, "-P", "-m", "benchmarks.watching", "--side", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return Idle(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="OTHER")
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", action="store_true", help="measure the sources that are imported, and print JSON")
    options = parser.parse_args()
    if options.tiny:
        options.running, options.waiting, options.seconds = 5, 20, 10
    if options.side:
        with tempfile.TemporaryDirectory() as folder, suppress(BrokenPipeError):
            print(json.dumps(asdict(scripted(Path(folder), options.running, options.waiting, options.seconds))))
        return
    words = [f"--{name}={getattr(options, name)}" for name in ("running", "waiting", "seconds")]
    found = {"this": elsewhere(HERE, words)}
    if options.against:
        found["other"] = elsewhere(options.against.resolve(), words)
    print(f"{'':8}{'running':>9}{'waiting':>9}{'observes/5 s':>14}{'statements/s':>14}{'looks':>8}{'CPU s/s':>10}")
    for name, idle in found.items():
        print(
            f"{name:8}{idle.running:>9}{idle.waiting:>9}{idle.observes_per_interval:>14.1f}"
            f"{idle.statements_per_second:>14.2f}{idle.looks:>8}{idle.cpu_per_second:>10.4f}"
        )
    if options.json:
        options.json.write_text(json.dumps({name: asdict(idle) for name, idle in found.items()}, indent=1))
    this = found["this"]
    targets = [
        at_most("observe calls per interval", this.observes_per_interval, OBSERVES, ""),
        at_most("statements a second", this.statements_per_second, STATEMENTS, ""),
    ]
    if "other" in found:
        share = this.cpu_per_second / found["other"].cpu_per_second
        targets.append(at_most("CPU, of the other's", share, SHARE))
    judge(targets, full=not options.tiny)


if __name__ == "__main__":
    main()
