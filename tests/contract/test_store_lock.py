"""Who records from who deletes: by a file on one machine, by the database between hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.domain.errors import DeadlineError
from posttrain.store.atomic import FileLock, StoreLock
from posttrain.store.database import Database
from posttrain.store.ledger import LedgerLock

Make = Callable[[str], StoreLock]
_HOLDER = """
import sys
from pathlib import Path
from posttrain.store.database import Database
from posttrain.store.atomic import FileLock
from posttrain.store.ledger import LedgerLock
place, address = Path(sys.argv[1]), sys.argv[2]
lock = LedgerLock(place, Database(address)) if address else FileLock(place)
with lock.shared():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["file", pytest.param("ledger", marks=pytest.mark.postgres)])
def address(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "file" else str(request.getfixturevalue("postgres_ledger"))


@pytest.fixture
def make(address: str, tmp_path: Path) -> Iterator[Make]:
    """The lock of a host; hosts have no file in common."""
    opened: list[Database] = []

    def _make(host: str) -> StoreLock:
        if not address:
            return FileLock(tmp_path / "store.lock")
        opened.append(Database(address))
        return LedgerLock(tmp_path / host, opened[-1])

    yield _make
    for one in opened:
        one.close()


def test_many_record_and_one_deletes(make: Make) -> None:
    one, two, sweeper = make("one"), make("two"), make("three")
    with one.shared(), two.shared():
        with one.shared():
            pass
        with pytest.raises(DeadlineError, match="nothing is lost"), sweeper.alone(0.0):
            raise AssertionError("somebody records")
    with sweeper.alone(0.0), pytest.raises(DeadlineError), two.alone(0.0):
        raise AssertionError("somebody deletes")
    with two.alone(0.0):
        pass


def test_who_records_waits_for_who_deletes(make: Make) -> None:
    recorder, sweeper = make("one"), make("two")
    told: list[str] = []

    def record() -> None:
        with recorder.shared():
            told.append("recorded")

    with sweeper.alone(0.0):
        thread = threading.Thread(target=record)
        thread.start()
        told.append("deleted")
    thread.join()
    assert told == ["deleted", "recorded"]


@pytest.mark.slow
def test_who_dies_holds_nothing(make: Make, address: str, tmp_path: Path) -> None:
    make("two")  # makes the tables
    place = tmp_path / ("one" if address else "store.lock")
    words = [sys.executable, "-c", _HOLDER, str(place), address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        sweeper = make("two")
        with pytest.raises(DeadlineError), sweeper.alone(0.0):
            raise AssertionError("somebody records")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with sweeper.alone(60.0):
            pass
