"""The cost of a durable transition, compared with a bare commit and with a step of DBOS.

    python -m benchmarks.transitions [--json FILE] [--postgres URL] [--rounds N] [--tiny]

All have equal durability: a write-ahead log that is synced at every commit (SQLite: WAL, synchronous=FULL; PostgreSQL:
fsync and synchronous_commit on). Rounds are interleaved; figures are medians over rounds:

- `floor`: one transaction of the database's driver that updates a row and inserts a row, with its fsync;
- `transition`: `Transaction.update_attempt` in a separate transaction: a compare-and-set with its event;
- `dbos step`: an empty step of a workflow, recorded by DBOS;
- `grouped`: transitions with 50 per commit; `sealing`: sealed events. Both per second.
"""

from __future__ import annotations

import argparse
import json
import logging
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal

ROUNDS, EACH, GROUP, SEALED = 9, 60, 50, 8_000
_RATES = ("grouped", "sealing")
DIGEST = "sha256:" + "a" * 64


@dataclass(frozen=True)
class Row:
    """One figure: milliseconds per operation, or operations per second."""

    database: str
    what: str
    median: float
    low: float
    high: float
    unit: str


class Bench:
    """A ledger with one attempt whose state changes back and forth."""

    def __init__(self, location: str | Path) -> None:
        self.ledger = Ledger(Database(location))
        run, stage = RunRecord("bench-1", "bench", DIGEST, "pending", "bench", 1.0), "train"
        self.attempt = AttemptRecord("bench-1", stage, 1, "bench-1-train-1", "runs", "planned", created_at=1.0)
        with self.ledger.transaction("user:bench") as transaction:
            transaction.insert_run(run, [StageRecord("bench-1", stage, 0, "sft", "pending")])
            transaction.insert_attempt(self.attempt)

    def transitions(self, count: int, each: int = 1) -> float:
        """Return the seconds of one transition, with `each` transitions per commit."""
        started = time.perf_counter()
        for _ in range(count // each):
            with self.ledger.transaction("user:bench") as transaction:
                for _ in range(each):
                    tokens = self.attempt.tokens + 1
                    self.attempt = transaction.update_attempt(self.attempt, tokens=tokens, reason="Running")
        return (time.perf_counter() - started) / count

    def sealing(self, count: int) -> float:
        """Return the seconds of sealing one event."""
        for _ in range(count // 400):
            with self.ledger.transaction("user:bench") as transaction:
                for number in range(400):
                    transaction.append_event("note", "bench-1", {"number": number})
        started = time.perf_counter()
        sealed = seal(self.ledger)
        return (time.perf_counter() - started) / sealed


def sqlite_floor(path: Path) -> Callable[[int], float]:
    """Return the seconds of one bare commit on a file with the same settings."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL"):
        connection.execute(statement)
    connection.execute("CREATE TABLE state (id INTEGER PRIMARY KEY, value INTEGER)")
    connection.execute("CREATE TABLE told (id INTEGER PRIMARY KEY, words TEXT)")
    connection.execute("INSERT INTO state VALUES (1, 0)")

    def floor(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE state SET value = value + 1 WHERE id = 1")
            connection.execute("INSERT INTO told (words) VALUES (?)", ("x" * 400,))
            connection.execute("COMMIT")
        return (time.perf_counter() - started) / count

    return floor


def postgres_floor(url: str) -> Callable[[int], float]:
    """Return the seconds of one bare commit in the same database."""
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    connection.execute("DROP TABLE IF EXISTS bench_state, bench_told")
    connection.execute("CREATE TABLE bench_state (id INTEGER PRIMARY KEY, value INTEGER)")
    connection.execute("CREATE TABLE bench_told (id SERIAL PRIMARY KEY, words TEXT)")
    connection.execute("INSERT INTO bench_state VALUES (1, 0)")

    def floor(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            with connection.transaction():
                connection.execute("UPDATE bench_state SET value = value + 1 WHERE id = 1")
                connection.execute("INSERT INTO bench_told (words) VALUES (%s)", ("x" * 400,))
        return (time.perf_counter() - started) / count

    return floor


@contextmanager
def dbos_steps(url: str) -> Iterator[Callable[[int], float]]:
    """Return the seconds of one DBOS step: the time of a workflow minus that of a workflow without steps."""
    from dbos import DBOS, DBOSConfig

    if url.startswith("sqlite:///"):  # SQLite's fastest durable settings
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
    config: DBOSConfig = {"name": "bench", "system_database_url": url, "run_admin_server": False}
    DBOS(config=config)
    logging.getLogger("dbos").setLevel(logging.ERROR)

    @DBOS.step()
    def nothing(number: int) -> int:
        return number

    @DBOS.workflow()
    def many(count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            nothing(number)
        return (time.perf_counter() - started) / count

    DBOS.launch()
    try:
        yield many
    finally:
        DBOS.destroy()


def measure(name: str, bench: Bench, floor: Callable[[int], float], url: str, rounds: int, tiny: bool) -> list[Row]:
    """Measure all figures of one database."""
    each, sealed = (4, 400) if tiny else (EACH, SEALED)
    group = 2 if tiny else GROUP
    found: dict[str, list[float]] = {}
    with dbos_steps(url) as steps:
        for _ in range(rounds):
            for what, value in (
                ("floor", floor(each) * 1e3),
                ("transition", bench.transitions(each) * 1e3),
                ("dbos step", steps(each) * 1e3),
                ("grouped", 1 / bench.transitions(4 * group, group)),
                ("sealing", 1 / bench.sealing(sealed)),
            ):
                found.setdefault(what, []).append(value)
    return [
        Row(name, what, statistics.median(values), min(values), max(values), "1/s" if what in _RATES else "ms")
        for what, values in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--postgres", metavar="URL", help="postgresql://user@host/database: also there")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="one small round: that it runs, no figures")
    options = parser.parse_args()
    rounds = 1 if options.tiny else options.rounds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, url = Path(scratch), f"sqlite:///{scratch}/dbos.db"
        bench = Bench(folder / "ledger.db")
        rows += measure("sqlite", bench, sqlite_floor(folder / "floor.db"), url, rounds, options.tiny)
    if options.postgres:
        bench = Bench(options.postgres)
        rows += measure("postgresql", bench, postgres_floor(options.postgres), options.postgres, rounds, options.tiny)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def show(rows: list[Row]) -> None:
    """Print the figures, and the ratios of a transition to the floor and to a step."""
    print(f"{'database':11s} {'what':11s} {'median':>9s} {'(min-max)':>19s}")
    for row in rows:
        span = f"({row.low:.2f}-{row.high:.2f})" if row.unit == "ms" else f"({row.low:.0f}-{row.high:.0f})"
        value = f"{row.median:.2f}" if row.unit == "ms" else f"{row.median:.0f}"
        print(f"{row.database:11s} {row.what:11s} {value:>9s} {span:>19s} {row.unit}")
    for name in dict.fromkeys(row.database for row in rows):
        of: dict[str, Any] = {row.what: row.median for row in rows if row.database == name}
        above, ratio = of["transition"] - of["floor"], of["transition"] / of["dbos step"]
        print(f"{name}: a transition is the floor + {above:.2f} ms, and {ratio:.2f} of a DBOS step")


if __name__ == "__main__":
    main()
