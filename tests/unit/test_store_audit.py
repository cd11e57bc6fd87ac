"""Rows against the event log: an edited row is found though the log holds, whichever column it is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.domain.approvals import Action, request_of
from posttrain.domain.errors import IntegrityError
from posttrain.domain.ids import Role
from posttrain.domain.records import Asset, AttemptRecord, RunRecord, StageRecord, Token
from posttrain.domain.sinks import Rule, SinkRecord
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.journal import TABLES
from posttrain.store.ledger import Ledger
from posttrain.store.schema import looks
from posttrain.store.sealer import seal, verify_chain

MODEL, OTHER, MANIFEST = (f"sha256:{digit * 64}" for digit in "abc")


def fill(ledger: Ledger) -> None:
    """A run whose stage failed, was retried and made a model, which was promoted over another and rolled back."""
    stage = StageRecord("run1", "sft", 0, "sft", "pending")
    attempt = AttemptRecord("run1", "sft", 1, "run1-sft-1", "runs/run1/sft/001", "planned", created_at=1.0)
    with ledger.transaction("user:ann") as transaction:
        made = transaction.insert_asset(
            Asset("dataset", "train", 0, OTHER, "file", 1.5, "user:ann", {"rows": 3}, ("dataset:raw@1",))
        )
        transaction.set_asset_status(made, "recalled", "a licence ran out")
        transaction.insert_run(RunRecord("run1", "run", MANIFEST, "pending", "ann", 1.5), [stage])
        for state in ("ready", "running", "failed", "pending", "ready", "running"):
            inputs = {"inputs": {"data": {"digest": OTHER, "meta": {"share": 1.0}}}} if state == "ready" else {}
            stage = transaction.update_stage(stage, state=state, message=f"now {state}", **inputs)
        transaction.insert_attempt(attempt)
        launched = transaction.update_attempt(attempt, state="launched", handle="17", launched_at=2.0)
        transaction.update_attempt(launched, state="succeeded", tokens=7, seconds=90.25, message="done")
        outputs = {"model": {"digest": MODEL, "form": "tree"}}
        transaction.update_stage(
            stage, state="succeeded", outputs=outputs, metrics={"loss": float("nan")}, tokens=2**60
        )
        transaction.put_cache("sha256:key", "run1", "sft")
        transaction.send_signal("run1", "go", "it looks well")
        transaction.note("run1", "look at the loss")
        for tag in ("keep", "drop"):
            transaction.note("run1", tag=tag)
        transaction.untag(transaction.snapshot.notes("run1")[-1])
        transaction.append_release("prod", OTHER, None, "promote", expected=0)
        transaction.append_release("prod", MODEL, "run1", "promote", expected=1, report_digest=MANIFEST)
    with ledger.transaction("user:bob") as transaction:
        transaction.append_release("prod", OTHER, None, "rollback", expected=2)
        transaction.put_cache("sha256:key", "run1", "sft")
        request = request_of(Action.RELEASE, "prod", "user:ann", 3.0, "run1", live=3)
        transaction.ask_approval(request)
        transaction.say_approval(request, "rejected", "not yet")
        transaction.say_approval(request, "approved", "now")
        transaction.set_role("user:bob", Role.ADMIN)
        transaction.set_role("user:cy", Role.VIEWER)
        transaction.set_role("user:cy", Role.APPROVER)
        token = Token("t1", "user:cy", {"default": "viewer"}, 4.0, 5.0)
        transaction.add_token(token, OTHER)
        transaction.add_token(replace(token, id="t2", replaces="t1"), MODEL)
        transaction.revoke_token("t1")
        transaction.set_role("user:cy", None)
        rules = (Rule(on=("run-ended",), owner="ann"),)
        transaction.allow_image("localhost/train@*")
        transaction.add_sink(SinkRecord("chat", "webhook", {"url": "https://example.org/"}, rules, 4.0, ""), 0)
        transaction.pause_sink("chat", "person")
        looked = {
            "channel": "prod",
            "number": 1,
            "items": OTHER,
            "lineage": MODEL,
            "candidate": MODEL,
            "run_id": "run1",
        }
        looked |= {"project": "default", "outcome": "pass", "owner": "ann", "at": 4.0}  # as older versions counted
        transaction._insert(looks, looked, "look 1 of channel prod", "channel.looked", "prod")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a ledger in which all of that happened, and is sealed."""
    path = tmp_path_factory.mktemp("filled") / "ledger.db"
    ledger = Ledger(Database(path))
    fill(ledger)
    seal(ledger)
    ledger.close()
    return path.read_bytes()


@pytest.fixture
def ledger(tmp_path: Path, filled: bytes) -> Iterator[Ledger]:
    (tmp_path / "ledger.db").write_bytes(filled)
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    yield ledger
    ledger.close()


def test_what_happened_is_what_the_rows_say(ledger: Ledger) -> None:
    before = verify_rows(ledger)
    # project, principals, run, stage, attempt, signal, asset, its status, releases, channel, deployment, quarantine,
    # look, cache, request, approval, role, tokens, sink; artifacts, edges, holds
    assert before == 1 + 4 + 1 + 1 + 1 + 1 + 1 + 1 + 3 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 2 + 1 + 3 + 9 + 2 + 2
    with ledger.transaction("user:ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=3, lift="it was not the model")
    assert verify_rows(ledger) == before + 2  # not sealed yet: a release, and what it serves


JSON = ("inputs", "outputs", "metrics", "meta", "parents", "asked", "scopes", "settings", "rules", "images")
COLUMNS = [(name, column) for name, one in TABLES.items() for column in one.columns]


def lie(table: str, column: str) -> str:
    """SQL for another value of a column."""
    if column in JSON:
        return f"replace(replace({column}, '}}', ', \"x\": 1}}'), '[', '[1, ')"
    number = str(TABLES[table].table.c[column].type).startswith(("INTEGER", "BIGINT", "FLOAT"))
    return f"coalesce({column}, 0) + 50" if number else f"coalesce({column}, '') || 'x'"


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_any_edited_column_of_any_row_is_named(tmp_path: Path, ledger: Ledger, table: str, column: str) -> None:
    first = f"rowid = (SELECT min(rowid) FROM {table})"
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        statement = f"UPDATE {table} SET {column} = {lie(table, column)} WHERE {first}"
        assert connection.execute(statement).rowcount == 1
    connection.close()
    verify_chain(ledger)
    with pytest.raises(IntegrityError) as caught:
        verify_rows(ledger)
    assert "\n" not in str(caught.value)
    if column not in TABLES[table].key:
        assert f": {column} must be" in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            f"UPDATE releases SET model_digest = '{MODEL}' WHERE sequence = 3",
            f"release 3 of channel prod: model_digest must be '{OTHER}' as the event log records, got '{MODEL}'",
        ),
        ("DELETE FROM releases WHERE sequence = 3", "release 3 of channel prod: an event records it, but it is not in"),
        ("UPDATE releases SET channel = 'canary' WHERE sequence = 1", "release 1 of channel canary: is in the"),
        (f"UPDATE stages SET outputs = replace(outputs, '{MODEL}', '{OTHER}')", "stage run1/sft: outputs must be"),
        ("DELETE FROM stage_cache", "cache entry sha256:key: an event records it"),
        ("UPDATE stage_cache SET stage = 'grpo'", "cache entry sha256:key: stage must be 'sft'"),
        ("UPDATE stages SET metrics = '{\"loss\": 0.5}'", "stage run1/sft: metrics must be {'loss': 'nan'}"),
        ("UPDATE attempts SET seconds = 61", "attempt run1/sft/1: seconds must be 90.25"),
        ("UPDATE runs SET owner = 'eve'", "run run1: owner must be 'ann'"),
        ("DELETE FROM approval_requests", "approval request sha256:"),
        ("DELETE FROM attempts", "attempt run1/sft/1: an event records it, but it is not in"),
        (
            "INSERT INTO projects (id, created_at) VALUES ('x', 1)",
            "project x: is in the ledger, but no event records it",
        ),
    ],
)
def test_an_edited_row_is_named_though_the_log_holds(
    tmp_path: Path, ledger: Ledger, statement: str, words: str
) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()
    verify_chain(ledger)
    with pytest.raises(IntegrityError) as caught:
        verify_rows(ledger)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_table_that_holds_state_is_told() -> None:
    """A new table is either told or one of the log's own."""
    from posttrain.store.schema import metadata

    log = {"events", "payloads", "unsealed", "leaves", "tiles", "tree_head", "events_before", "chain_head"}
    assert set(metadata.tables) == set(TABLES) | log | {
        "work",
        "watches",
        "requests",
        "sessions",
        "grants",
        "cursors",
        "hosts",
        "operations",
        "parts",
        "uploads",
        "schema_version",
    }  # made again, or expired


@pytest.mark.parametrize("table", TABLES)
def test_a_row_that_is_gone_is_named_by_its_key(table: str) -> None:
    spec = TABLES[table]
    assert spec.name({column: f"<{column}>" for column in spec.key})


def test_another_project_is_not_there(tmp_path: Path, ledger: Ledger) -> None:
    other = Ledger(Database(tmp_path / "ledger.db"), project="other")
    assert other.runs() == other.assets() == other.channels() == other.events() == []
    assert (other.channel("prod"), other.cached_stage("sha256:key"), other.history("prod")) == (None, None, [])
    assert (other.assets_by_digest(OTHER), other.stages_by_key("sha256:key")) == ([], [])
    with other.transaction("user:ann") as transaction:
        transaction.insert_run(RunRecord("run2", "run", MANIFEST, "pending", "ann", 1.5, project="other"), [])
        transaction.append_release("prod", MODEL, "run2", "promote", expected=0)
    assert [run.id for run in ledger.runs(manifest_digest=MANIFEST)] == ["run1"]
    assert [entry.sequence for entry in other.history("prod")] == [1]
    seal(other)
    verify_chain(ledger)
    verify_rows(ledger)
    other.close()


def test_a_row_rolled_back_by_swapping_events_is_found(tmp_path: Path, ledger: Ledger) -> None:
    """Rows are rebuilt in the order that the log proves: the ids of events are in no leaf."""
    (first, second) = (e.id for e in ledger.events(limit=1000) if e.kind == "channel.promote")
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for table, column in (("events", "id"), ("payloads", "event"), ("leaves", "event")):
            for was, becomes in ((first, -1), (second, first), (-1, second)):
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (becomes, was))
    connection.close()
    assert verify_rows(ledger)  # told in the same order as before
    verify_chain(ledger)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE assets SET meta = 'x'", "asset dataset:train@1: meta is 'x', which is not JSON"),
        ("UPDATE stages SET outputs = '{'", r"stage run1/sft: outputs is '\{', which is not JSON"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, ledger: Ledger, statement: str, words: str) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(IntegrityError, match=words):
        verify_rows(ledger)
