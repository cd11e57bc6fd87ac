"""How a ledger stands in numbers, on every database: SQLite in the fast suite, PostgreSQL by `make postgres`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import update

from posttrain.domain.canonical import digest_json
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.sinks import Rule, SinkRecord
from posttrain.store.database import Database
from posttrain.store.ledger import DELIVERING, FAILING, PAUSED, Ledger, ledger_counts
from posttrain.store.schema import cursors
from posttrain.store.sealer import seal
from posttrain.store.work import WorkQueue


@pytest.fixture
def ledger(ledger_at: str) -> Iterator[Ledger]:
    made = Ledger(Database(ledger_at))
    yield made
    made.close()


def run(ledger: Ledger, name: str) -> str:
    record = RunRecord(f"{name}-22222222", name, digest_json(name), "pending", "ann", 0.0)
    with ledger.transaction("user:ann") as transaction:
        transaction.insert_run(record, [StageRecord(record.id, "hold", 0, "wait", "pending")])
    return record.id


def sink(ledger: Ledger, name: str) -> None:
    with ledger.transaction("user:ann") as transaction:
        transaction.add_sink(SinkRecord(name, "jsonl", {"path": f"/{name}.jsonl"}, (Rule(),), 0.0, "user:ann"), 0)


def test_an_empty_ledger_stands_well(ledger: Ledger) -> None:
    seal(ledger)
    now = ledger_counts(ledger.database, ledger.clock)
    assert set(now.runs.values()) == {0}
    assert (now.due, now.oldest_due, now.leased, now.expired, now.dead, now.unsealed) == (0, 0.0, 0, 0, 0, 0)
    assert now.oldest_unsealed == 0.0
    assert now.sinks == {}


def test_what_waits_is_leased_fails_and_is_set_aside_is_counted(ledger: Ledger) -> None:
    ids = [run(ledger, name) for name in ("a", "b", "c", "d")]
    queue = WorkQueue(ledger, "host:1:1", lease=1e6)
    (leased,) = queue.claim([ids[0]])
    (dead,) = queue.claim([ids[1]])
    queue.failed("run", ids[1], "it broke", "", None, dead)
    queue.wake("run", [ids[1]])  # which lets nobody look at it before a person says so
    (late,) = queue.claim([ids[2]])
    assert queue.give_back(late, after=-500.0)
    (lost,) = WorkQueue(ledger, "host:2:2", lease=-100.0).claim([ids[3]])
    now = ledger_counts(ledger.database, ledger.clock)
    assert now.runs["pending"] == 4
    assert (now.due, now.leased, now.expired, now.dead) == (1, 1, 1, 1)
    assert 400.0 < now.oldest_due < 1e6
    assert now.at_once == frozenset()
    assert (leased.object, lost.object) == (ids[0], ids[3])
    other = run(ledger, "e")
    again = ledger_counts(ledger.database, ledger.clock)
    assert (again.due, len(again.at_once)) == (2, 1), other
    assert again.oldest_due < 1e6
    assert now.unsealed > 0
    assert 0.0 <= now.oldest_unsealed < 1e6
    seal(ledger)
    sealed = ledger_counts(ledger.database, ledger.clock)
    assert sealed.sealed == again.sealed + again.unsealed
    assert sealed.unsealed == 0


def test_sinks_are_told_by_kind_and_state(ledger: Ledger) -> None:
    for name in ("fine", "failing", "paused"):
        sink(ledger, name)
    run(ledger, "a")
    seal(ledger)
    with ledger.transaction("user:ann") as transaction:
        transaction.pause_sink("paused", "person", {}, "")
    with ledger.database.write(across="a test") as connection:
        connection.execute(update(cursors).where(cursors.c.sink == "failing").values(failures=7, sequence=0))
        connection.execute(update(cursors).where(cursors.c.sink == "paused").values(failures=90, sequence=0))
    now = ledger_counts(ledger.database, ledger.clock).sinks["jsonl"]
    assert dict(now.states) == {DELIVERING: 1, FAILING: 1, PAUSED: 1}
    assert now.failures == 7  # of those that somebody may want to mend
    assert now.behind > 0
