"""The sealer: a gap-free, tamper-evident order over committed events, whenever anything dies."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.domain.errors import IntegrityError
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import GENESIS, event_hash, seal, verify_chain


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    yield ledger
    ledger.close()


def say(ledger: Ledger, *words: Any) -> None:
    with ledger.transaction("ann") as transaction:
        for word in words:
            transaction.append_event("note", "run1", {"word": word})


def say_and_fail(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.append_event("note", "run1", {"word": "never happened"})
        raise RuntimeError


def tamper(tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()


def test_an_empty_chain_holds(ledger: Ledger) -> None:
    assert seal(ledger) == 0
    report = verify_chain(ledger)
    assert (report.sealed, report.head, report.pending) == (0, GENESIS, 0)


def test_events_are_numbered_without_gaps_and_chained(ledger: Ledger) -> None:
    say(ledger, "one", "two")
    with pytest.raises(RuntimeError):
        say_and_fail(ledger)
    assert (seal(ledger), seal(ledger)) == (2, 0)
    say(ledger, "three")
    assert verify_chain(ledger).pending == 1
    seal(ledger)
    events = ledger.events()
    assert [(event.sequence, event.payload["word"]) for event in events] == [(1, "one"), (2, "two"), (3, "three")]
    assert [event.previous_hash for event in events] == [GENESIS, events[0].hash, events[1].hash]
    report = verify_chain(ledger)
    assert (report.sealed, report.head, report.pending) == (3, events[-1].hash, 0)


def test_the_hash_is_of_every_field_that_matters(ledger: Ledger) -> None:
    say(ledger, "one")
    seal(ledger)
    event = ledger.events()[0]
    names = ("sequence", "previous_hash", "kind", "subject", "actor", "at", "payload")
    fields = {name: getattr(event, name) for name in names}
    assert event_hash(fields) == event.hash
    for name in names:
        assert event_hash({**fields, name: "other"}) != event.hash


@pytest.mark.parametrize(
    ("statement", "first_bad"),
    [
        ('UPDATE events SET payload = \'{"word": "lie"}\' WHERE sequence = 2', 2),
        ("UPDATE events SET payload = '{' WHERE sequence = 2", 2),
        ("UPDATE events SET actor = 'bob' WHERE sequence = 3", 3),
        ("UPDATE events SET at = at + 1 WHERE sequence = 1", 1),
        ("UPDATE events SET kind = 'run.failed' WHERE sequence = 4", 4),
        ("UPDATE events SET subject = 'run2' WHERE sequence = 1", 1),
        ("UPDATE events SET hash = previous_hash WHERE sequence = 2", 2),
        ("UPDATE events SET previous_hash = hash WHERE sequence = 3", 3),
        ("DELETE FROM events WHERE sequence = 1", 1),
        ("DELETE FROM events WHERE sequence = 3", 3),
        ("DELETE FROM events WHERE sequence >= 3", 3),  # the tail: only the chain head tells
        ("DELETE FROM events", 1),
        ("UPDATE events SET sequence = NULL WHERE sequence = 4", 4),
        ("UPDATE events SET sequence = sequence + 10 WHERE sequence = 4", 4),
        ("UPDATE chain_head SET sequence = 3", 4),
        ("DELETE FROM chain_head", 1),
    ],
)
def test_whatever_is_changed_the_first_bad_sequence_is_named(
    tmp_path: Path, ledger: Ledger, statement: str, first_bad: int
) -> None:
    say(ledger, "one", "two", "three", "four")
    seal(ledger)
    tamper(tmp_path, statement)
    with pytest.raises(IntegrityError, match=f"at sequence {first_bad}:"):
        verify_chain(ledger)


def test_an_event_rewritten_with_a_hash_of_its_own_is_found_by_the_one_behind_it(
    tmp_path: Path, ledger: Ledger
) -> None:
    say(ledger, "one", "two", "three")
    seal(ledger)
    event = ledger.events()[1]
    names = ("sequence", "previous_hash", "kind", "subject", "actor", "at")
    forged = event_hash({**{name: getattr(event, name) for name in names}, "payload": {"word": "lie"}})
    tamper(tmp_path, f"UPDATE events SET payload = '{{\"word\": \"lie\"}}', hash = '{forged}' WHERE sequence = 2")
    with pytest.raises(IntegrityError, match="at sequence 3: it does not name the event before it"):
        verify_chain(ledger)


def forged(ledger: Ledger, number: int, **changes: Any) -> str:
    """The hash of a sealed event as somebody else would have it."""
    event = ledger.events()[number - 1]
    names = ("sequence", "previous_hash", "kind", "subject", "actor", "at", "payload")
    return event_hash({**{name: getattr(event, name) for name in names}, **changes})


def test_the_last_event_is_held_by_the_head(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one", "two")
    seal(ledger)
    lie = forged(ledger, 2, payload={"word": "lie"})
    tamper(tmp_path, f"UPDATE events SET payload = '{{\"word\": \"lie\"}}', hash = '{lie}' WHERE sequence = 2")
    with pytest.raises(IntegrityError, match="at sequence 3: the chain ends at 2, its head says 2"):
        verify_chain(ledger)


def test_more_than_one_batch_is_sealed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.store.sealer._BATCH", 2)
    say(ledger, *range(5))
    assert seal(ledger) == 5
    assert (verify_chain(ledger).sealed, verify_chain(ledger).pending) == (5, 0)


def test_a_last_event_that_was_moved_together_with_its_hash_is_found(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one", "two", "three", "four")
    seal(ledger)
    lie = forged(ledger, 4, sequence=5)
    tamper(tmp_path, f"UPDATE events SET sequence = 5, hash = '{lie}' WHERE sequence = 4")
    tamper(tmp_path, f"UPDATE chain_head SET hash = '{lie}'")
    with pytest.raises(IntegrityError, match="at sequence 4: the next event there is has sequence 5"):
        verify_chain(ledger)


def test_swapped_events_are_found(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one", "two", "three")
    seal(ledger)
    tamper(tmp_path, "UPDATE events SET sequence = -sequence WHERE sequence < 3")
    tamper(tmp_path, "UPDATE events SET sequence = 3 + sequence WHERE sequence < 0")
    with pytest.raises(IntegrityError, match="at sequence 1:"):
        verify_chain(ledger)


def test_a_sealer_that_dies_before_its_commit_leaves_the_events_to_the_next(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one")
    seal(ledger)
    say(ledger, "two", "three")
    program = (
        "import sys; from posttrain.store.database import Database; from posttrain.store.ledger import Ledger;"
        "from posttrain.store.sealer import seal; seal(Ledger(Database(sys.argv[1])))"
    )
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": "sealer.before_commit"}
    died = subprocess.run([sys.executable, "-c", program, str(tmp_path / "ledger.db")], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    report = verify_chain(ledger)
    assert (report.sealed, report.pending) == (1, 2)
    assert seal(ledger) == 2
    assert [event.payload["word"] for event in ledger.events()] == ["one", "two", "three"]
    assert verify_chain(ledger).sealed == 3


_PAYLOADS = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), max_size=4
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(_PAYLOADS, max_size=3), max_size=4), cursor=st.integers(0, 6))
def test_any_payload_seals_and_a_cursor_misses_nothing(
    ledger: Ledger, batches: list[list[dict[str, Any]]], cursor: int
) -> None:
    for batch in batches:
        with ledger.transaction("ann") as transaction:
            for payload in batch:
                transaction.append_event("note", "run1", payload)
        seal(ledger)
    report = verify_chain(ledger)
    seen, after = [], cursor
    while page := ledger.events(after=after, limit=2):
        seen += [event.sequence for event in page]
        after = seen[-1] or 0
    assert seen == list(range(cursor + 1, report.sealed + 1))
