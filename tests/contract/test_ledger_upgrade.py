"""An older ledger is upgraded on every database: SQLite in the fast suite, PostgreSQL by `make postgres`."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, create_engine, insert, make_url, text

from posttrain.domain.errors import IntegrityError, WorkspaceError
from posttrain.domain.records import ChannelRecord, Deployment
from posttrain.store import database
from posttrain.store.audit import verify_rows
from posttrain.store.chain import GENESIS, event_hash
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.postgres import with_driver
from posttrain.store.schema import SCHEMA_VERSION, VERSION_TABLE
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.upgrade import upgrade_ledger

SECOND = Path(__file__).parents[1] / "unit" / "fixtures" / "workspace-0002.tar.gz"
MODEL, MANIFEST = (f"sha256:{digit * 64}" for digit in "ab")
_RUN = (
    "INSERT INTO runs VALUES (:id, 'sort', :manifest, 'succeeded', 'ann', :at, 3, 'Succeeded', 'done', '', NULL, NULL, "
    "NULL, NULL, 'running')"
)


def say(connection: Connection, told: list[dict[str, Any]]) -> None:
    """Events as the Posttrain of then wrote and sealed them; the last one is not sealed yet."""
    previous = GENESIS
    for number, event in enumerate(told, 1):
        fields = {"sequence": number, "previous_hash": previous, "actor": "user:ann", "at": 1.5, **event}
        previous = event_hash(fields)
        row = {**fields, "payload": json.dumps(event["payload"]), "hash": previous}
        if number == len(told):
            row |= {"sequence": None, "previous_hash": None, "hash": None}
        else:
            head = {"sequence": number, "hash": previous}
        columns = ", ".join(row)
        connection.execute(
            text(f"INSERT INTO events ({columns}) VALUES ({', '.join(f':{name}' for name in row)})"), row
        )
    connection.execute(text("INSERT INTO chain_head VALUES (1, :sequence, :hash)"), head)


@contextmanager
def opened(address: str) -> Iterator[Connection]:
    """A transaction in a ledger of any schema."""
    engine = create_engine(with_driver(make_url(address if "://" in address else f"sqlite:///{address}")))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def old(ledger_at: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two runs of one manifest, an asset that a service registered, and a release."""
    with opened(ledger_at) as connection:
        with monkeypatch.context() as then:
            then.setattr(database, "SCHEMA_VERSION", "0001")
            database.migrate(connection)
        for name, at in (("sort-aaaaaaaa", 1.0), ("sort-aaaaaaaa.2", 2.0)):
            connection.execute(text(_RUN), {"id": name, "manifest": MANIFEST, "at": at})
        asset = (
            "INSERT INTO assets VALUES ('dataset', 'train', 1, :digest, 'file', 1.0, 'service:posttrain', '{}', '[]')"
        )
        connection.execute(text(asset), {"digest": MODEL, "actor": "service:posttrain"})
        release = "INSERT INTO releases VALUES ('prod', 1, :model, 'sort-aaaaaaaa', 'promote', 'user:ann', 1.5, NULL)"
        connection.execute(text(release), {"model": MODEL})
        runs = [{"manifest": MANIFEST, "name": "sort"}] * 2
        moved = {"model": MODEL, "previous": None, "run": "sort-aaaaaaaa", "report": None, "sequence": 1, "at": 1.5}
        say(
            connection,
            [
                {"kind": "asset.registered", "subject": "dataset:train@1", "payload": {"digest": MODEL, "parents": []}},
                {"kind": "run.pending", "subject": "sort-aaaaaaaa", "payload": runs[0]},
                {"kind": "run.pending", "subject": "sort-aaaaaaaa.2", "payload": runs[1]},
                {"kind": "channel.promote", "subject": "prod", "payload": moved},
            ],
        )
    return ledger_at


def test_what_was_there_is_there_and_proved(old: str) -> None:
    with pytest.raises(
        WorkspaceError, match=f"has schema 0001, this Posttrain needs {SCHEMA_VERSION}; run `posttrain upgrade`"
    ):
        Database(old)
    done = upgrade_ledger(old, lambda owner: True)
    assert (done.came_from, done.runs, done.events) == ("0001", 2, 4)
    assert done.copy
    ledger = Ledger(Database(old))
    assert [(run.id, run.repeat) for run in ledger.runs()] == [("sort-aaaaaaaa.2", 2), ("sort-aaaaaaaa", 1)]
    assert (ledger.asset("dataset", "train").created_by, ledger.history("prod")[0].actor) == (
        "service:posttrain",
        "user:ann",
    )
    assert (verify_chain(ledger).before, verify_chain(ledger).pending) == (4, 0)
    assert verify_rows(ledger) >= 9
    assert ledger.channel_records() == [ChannelRecord("prod", generation=1)]
    assert ledger.deployments("prod") == [Deployment("prod", "live", 1, 1.0, 1)]
    with ledger.transaction("user:bob") as transaction:
        transaction.append_release("prod", MANIFEST, None, "promote", expected=1)
    verify_rows(ledger)
    ledger.close()
    assert upgrade_ledger(old, lambda owner: True).copy == ""


def test_a_row_that_the_old_events_tell_otherwise_is_named_and_nothing_changed(old: str) -> None:
    with opened(old) as connection:
        connection.execute(text("UPDATE releases SET model_digest = 'sha256:other'"))
    with pytest.raises(IntegrityError, match="release 1 of channel prod: model must be"):
        upgrade_ledger(old, lambda owner: True)
    with pytest.raises(WorkspaceError, match="has schema 0001"):
        Database(old)


@pytest.fixture
def second(ledger_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the last commit of schema 0002 wrote, row by row."""
    made = tmp_path / "made"
    with tarfile.open(SECOND) as archive:
        archive.extractall(made, filter="data")
    with opened(ledger_at) as connection, opened(str(made / ".posttrain" / "ledger.db")) as source:
        with monkeypatch.context() as then:
            then.setattr(database, "SCHEMA_VERSION", "0002")
            database.migrate(connection)
        tables = MetaData()
        tables.reflect(connection)
        for name in ("tree_head", "projects"):  # which a revision fills
            connection.execute(tables.tables[name].delete())
        for table in tables.sorted_tables:
            names = ", ".join(column.name for column in table.columns)
            rows = [dict(row) for row in source.execute(text(f"SELECT {names} FROM {table.name}")).mappings()]
            if rows and table.name != VERSION_TABLE:
                connection.execute(insert(table), rows)
        if connection.dialect.name == "postgresql":
            for name in ("events", "work"):
                connection.execute(text(f"SELECT setval('{name}_id_seq', (SELECT max(id) FROM {name}))"))
    return ledger_at


def test_a_ledger_of_0002_goes_on(second: str) -> None:
    with pytest.raises(
        WorkspaceError, match=f"has schema 0002, this Posttrain needs {SCHEMA_VERSION}; run `posttrain upgrade`"
    ):
        Database(second)
    done = upgrade_ledger(second, lambda owner: True)
    assert (done.came_from, done.schema, done.runs, done.events) == ("0002", SCHEMA_VERSION, 3, 0)
    assert done.copy
    ledger = Ledger(Database(second))
    assert (verify_chain(ledger).sealed, verify_chain(ledger).pending) == (122, 0)
    assert [entry.action for entry in ledger.history("prod")] == ["promote", "promote", "rollback"]
    with ledger.transaction("user:bob") as transaction:
        transaction.append_release("prod", MODEL, None, "promote", expected=3)
    verify_rows(ledger)
    ledger.close()
    assert upgrade_ledger(second, lambda owner: True).copy == ""


def test_who_writes_while_a_ledger_of_0002_is_upgraded_goes_on(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of the release before holds the ledger open all the time."""
    with monkeypatch.context() as then:
        then.setattr(database, "SCHEMA_VERSION", "0002")
        older = Ledger(Database(second))
    upgrade_ledger(second, lambda owner: True)
    with older.transaction("user:bob") as transaction:
        transaction.append_release("prod", MODEL, None, "promote", expected=3)
    older.close()
    ledger = Ledger(Database(second))
    seal(ledger)
    assert verify_chain(ledger).pending == 0
    verify_rows(ledger)
    ledger.close()


def test_a_release_that_may_use_a_newer_ledger_uses_it(second: str) -> None:
    upgrade_ledger(second, lambda owner: True)
    with opened(second) as connection:
        connection.execute(text("UPDATE schema_version SET version_num = '0099', usable_since = '0003'"))
    ledger = Ledger(Database(second))
    with ledger.transaction("user:bob") as transaction:
        transaction.append_release("prod", MODEL, None, "promote", expected=3)
    verify_rows(ledger)
    ledger.close()
    with opened(second) as connection:
        connection.execute(text("UPDATE schema_version SET usable_since = '0099'"))
    with pytest.raises(WorkspaceError, match=rf"0099 is newer than this Posttrain \({SCHEMA_VERSION}\)"):
        Database(second)
