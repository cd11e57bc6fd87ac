"""The sealer: a gap-free, tamper-evident order over committed events, whenever anything dies."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from posttrain.domain.errors import IntegrityError
from posttrain.domain.records import RunRecord
from posttrain.store.database import Database
from posttrain.store.journal import FIELDS, Payload, envelope_leaf
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.trees import EMPTY

FIRST = 4  # events of making the ledger, and of naming who writes


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    with ledger.transaction("ann"):
        pass
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


def tamper(tmp_path: Path, *statements: str) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement
    connection.close()


def submit(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.insert_run(RunRecord("run1", "sort", "sha256:" + "a" * 64, "pending", "ann", 1.0), [])


def test_a_new_ledger_holds(ledger: Ledger) -> None:
    assert verify_chain(ledger).root == "sha256:" + EMPTY.hex()
    assert seal(ledger) == 3  # how it was made, its project, and who made it
    assert seal(ledger) == 0
    report = verify_chain(ledger)
    assert (report.sealed, report.pending) == (3, 0)


def test_events_are_numbered_without_gaps(ledger: Ledger) -> None:
    say(ledger, "one", "two")
    with pytest.raises(RuntimeError):
        say_and_fail(ledger)
    assert (seal(ledger), seal(ledger)) == (FIRST + 2, 0)
    say(ledger, "three")
    assert verify_chain(ledger).pending == 1
    seal(ledger)
    events = ledger.events()
    assert [event.sequence for event in events] == list(range(1, FIRST + 4))
    assert [event.payload["word"] for event in events[FIRST:]] == ["one", "two", "three"]


def test_the_leaf_is_of_every_field_of_the_envelope() -> None:
    fields: dict[str, Any] = {name: name for name in FIELDS} | {"at": 1.5, "audited": {"a": 1}}
    told = envelope_leaf(fields)
    whole = hashlib.sha256(
        b'\x00{"at":1.5,"audited":{"a":1},"auth":"auth","kind":"kind","principal":"principal","project":"project",'
        b'"request":"request","subject":"subject","words":"words"}'
    )
    assert told == whole.digest()
    for name in FIELDS:
        assert envelope_leaf({**fields, name: "other"}) != told


def test_equal_words_have_unequal_digests() -> None:
    """Else whoever guesses an erased word could prove it."""
    assert Payload("run", b"1" * 16, {"a": "b"}).digest != Payload("run", b"2" * 16, {"a": "b"}).digest
    assert Payload("run", b"1" * 16, {"a": "b"}).digest != Payload("legal", b"1" * 16, {"a": "b"}).digest


FIFTH = "id = (SELECT event FROM leaves WHERE sequence = 5)"
FORGED = "X'" + "ab" * 32 + "'"


@pytest.mark.parametrize(
    ("statement", "first_bad"),
    [
        (f'UPDATE events SET audited = \'{{"word": "lie"}}\' WHERE {FIFTH}', 5),
        (f"UPDATE events SET audited = '{{' WHERE {FIFTH}", 5),
        *((f"UPDATE events SET {name} = 'x' WHERE {FIFTH}", 5) for name in FIELDS if name not in ("at", "audited")),
        (f"UPDATE events SET at = at + 1 WHERE {FIFTH}", 5),
        (f"UPDATE events SET leaf = {FORGED} WHERE {FIFTH}", 5),
        (f"UPDATE leaves SET leaf = {FORGED} WHERE sequence = 5", 5),
        (f"DELETE FROM events WHERE {FIFTH}", 5),
        ("DELETE FROM leaves WHERE sequence = 5", 5),
        ("DELETE FROM leaves WHERE sequence >= 7", 7),  # the tail: only the head tells
        ("DELETE FROM leaves", 1),
        ("UPDATE leaves SET sequence = 12 WHERE sequence = 8", 8),
        ("UPDATE tree_head SET size = 7", 8),
        (f"UPDATE tree_head SET root = {FORGED}", 9),
        (f"UPDATE tree_head SET peaks = {FORGED}", 9),
        ("DELETE FROM tree_head", 9),
        (f"INSERT INTO tiles VALUES (0, 0, {FORGED})", 8),
        ("INSERT INTO unsealed VALUES (3)", 9),
        ("INSERT INTO unsealed VALUES (4711)", 9),
        ("UPDATE tree_head SET size = 'x'", 9),
    ],
)
def test_whatever_is_changed_the_first_bad_sequence_is_named(
    tmp_path: Path, ledger: Ledger, statement: str, first_bad: int
) -> None:
    say(ledger, "one", "two", "three", "four")
    seal(ledger)
    assert verify_chain(ledger).sealed == 8
    tamper(tmp_path, statement)
    with pytest.raises(IntegrityError, match=f"at sequence {first_bad}:"):
        verify_chain(ledger)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE payloads SET body = replace(body, '\"ann\"', '\"eve\"') WHERE event = 5", "its words do not match"),
        ("UPDATE payloads SET body = '{' WHERE event = 5", "its words cannot be read"),
        ("UPDATE payloads SET retention = 'none' WHERE event = 5", "its words do not match"),
        (f"UPDATE payloads SET salt = {FORGED} WHERE event = 5", "its words do not match"),
        ("DELETE FROM payloads WHERE event = 5", "its words are missing"),
        ("INSERT INTO payloads VALUES (1, 'run', X'00', '{}')", "it has words that its envelope does not name"),
    ],
)
def test_words_are_held_by_their_envelope(tmp_path: Path, ledger: Ledger, statement: str, words: str) -> None:
    submit(ledger)
    tamper(tmp_path, statement)
    with pytest.raises(IntegrityError, match=words):  # before they are sealed too
        verify_chain(ledger)
    seal(ledger)
    with pytest.raises(IntegrityError, match=f"at sequence .: {words}"):
        verify_chain(ledger)


def test_an_event_that_waits_is_held_by_its_leaf(tmp_path: Path, ledger: Ledger) -> None:
    seal(ledger)
    say(ledger, "one")
    last = "id = (SELECT max(id) FROM events)"
    tamper(tmp_path, f"UPDATE events SET kind = 'lie' WHERE {last}")
    with pytest.raises(IntegrityError, match="at sequence 4: of event 5, which waits to be sealed, its env"):
        verify_chain(ledger)
    tamper(tmp_path, f"UPDATE events SET kind = 'note' WHERE {last}", "DELETE FROM unsealed")
    with pytest.raises(IntegrityError, match="is neither sealed nor waiting to be"):
        verify_chain(ledger)


def rewritten(ledger: Ledger, sequence: int) -> str:
    """The leaf of a sealed event as somebody who lies would have it."""
    event = ledger.events()[sequence - 1]
    fields = {name: getattr(event, name) for name in FIELDS if name not in ("audited", "words")}
    return envelope_leaf({**fields, "audited": {"word": "lie"}, "words": None}).hex()


def test_an_event_rewritten_with_a_leaf_of_its_own_is_found_by_the_head(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one", "two", "three")
    seal(ledger)
    leaf = rewritten(ledger, FIRST + 2)
    tamper(
        tmp_path,
        f"UPDATE events SET audited = '{{\"word\": \"lie\"}}', leaf = X'{leaf}' WHERE id = {FIRST + 2}",
        f"UPDATE leaves SET leaf = X'{leaf}' WHERE event = {FIRST + 2}",
    )
    with pytest.raises(IntegrityError, match="at sequence 8: the log ends at 7, its head records 7"):
        verify_chain(ledger)


def test_an_event_rewritten_below_a_tile_is_found_by_it(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, *range(300))
    seal(ledger)
    leaf = rewritten(ledger, FIRST + 2)
    tamper(
        tmp_path,
        f"UPDATE events SET audited = '{{\"word\": \"lie\"}}', leaf = X'{leaf}' WHERE id = {FIRST + 2}",
        f"UPDATE leaves SET leaf = X'{leaf}' WHERE event = {FIRST + 2}",
    )
    with pytest.raises(IntegrityError, match="at sequence 256: tile 0 of level 0 does not match its leaves"):
        verify_chain(ledger)
    tamper(tmp_path, "DELETE FROM tiles")
    with pytest.raises(IntegrityError, match="at sequence 256: tile 0"):
        verify_chain(ledger)


def test_swapped_events_are_found(tmp_path: Path, ledger: Ledger) -> None:
    say(ledger, "one", "two", "three")
    seal(ledger)
    tamper(tmp_path, "UPDATE leaves SET sequence = -sequence WHERE sequence IN (5, 6)")
    tamper(tmp_path, "UPDATE leaves SET sequence = 11 + sequence WHERE sequence < 0")
    with pytest.raises(IntegrityError, match="the log ends at 7, its head records 7"):
        verify_chain(ledger)


def test_more_than_one_batch_is_sealed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.store.sealer._BATCH", 2)
    say(ledger, *range(5))
    assert seal(ledger) == FIRST + 5
    assert (verify_chain(ledger).sealed, verify_chain(ledger).pending) == (FIRST + 5, 0)


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
    assert (report.sealed, report.pending) == (FIRST + 1, 2)
    assert seal(ledger) == 2
    assert [event.payload["word"] for event in ledger.events()[FIRST:]] == ["one", "two", "three"]
    assert verify_chain(ledger).sealed == FIRST + 3


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


def test_what_is_said_may_be_erased_and_facts_not(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.append_event("note", "here", {"items": 3}, {"folder": "host:/srv"})
    seal(ledger)
    assert ledger.events()[-1].payload == {"items": 3, "folder": "host:/srv"}
    verify_chain(ledger)
    with ledger.database.read(across="a test") as connection:
        told = connection.exec_driver_sql("SELECT group_concat(audited) FROM events").scalar()
    assert "host" not in str(told)


@pytest.mark.parametrize("event", [3, 4711])  # sealed already, never written
def test_what_somebody_put_among_the_waiting_holds_nobody_up(tmp_path: Path, ledger: Ledger, event: int) -> None:
    seal(ledger)
    tamper(tmp_path, f"INSERT INTO unsealed VALUES ({event})")
    assert seal(ledger) == 0
    say(ledger, "one")
    assert seal(ledger) == 2  # and who said it
    with pytest.raises(IntegrityError, match=f"event {event} waits to be sealed, but"):
        verify_chain(ledger)
