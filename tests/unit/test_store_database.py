"""The database: made when first opened, and unusable ones say so in one line."""

from __future__ import annotations

import dataclasses
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from posttrain.domain.errors import ConflictError, DeadlineError, InputError, IntegrityError, WorkspaceError
from posttrain.domain.records import Asset, AttemptRecord, Event, ReleaseEntry, RunRecord, StageRecord
from posttrain.store import journal, schema
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.erasure import erase_principal
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain

NOBODY = 65534


def write(database: Database, words: str = "x") -> None:
    with Ledger(database).transaction("ann") as transaction:
        transaction.append_event("note", "here", {"words": words})


@pytest.mark.parametrize(
    ("table", "record"),
    [
        (schema.runs, RunRecord),
        (schema.stages, StageRecord),
        (schema.attempts, AttemptRecord),
        (schema.assets, Asset),
        (schema.releases, ReleaseEntry),
        (schema.events, Event),
    ],
)
def test_every_field_of_a_record_has_its_column(table: Any, record: Any) -> None:
    hidden = {"assets": {"project", "principal"}, "releases": {"project", "principal"}, "events": {"audited", "words"}}
    joined = {
        "runs": {"lease_owner", "lease_expires"},
        "assets": {"created_by"},
        "releases": {"actor"},
        "events": {"actor", "sequence", "payload"},
    }
    columns = {column.name for column in table.columns} - hidden.get(table.name, set()) | joined.get(table.name, set())
    assert columns == {field.name for field in dataclasses.fields(record)}


def test_a_write_transaction_has_the_lock_from_its_beginning(tmp_path: Path) -> None:
    """A transaction that reads first and takes the lock later would fail if another one wrote in between."""
    database = Database(tmp_path / "ledger.db")
    other = sqlite3.connect(tmp_path / "ledger.db", timeout=0, isolation_level=None)
    with database.read():
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    with database.write(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.close()
    database.close()


@pytest.mark.usefixtures("durable")
def test_a_committed_transaction_is_durable_and_readers_do_not_wait(tmp_path: Path) -> None:
    database = Database(tmp_path / "l.db")
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    with database.write(), database.read(across="a test") as reader:
        assert reader.exec_driver_sql("SELECT count(*) FROM runs").scalar() == 0
    database.close()


def test_a_newer_schema_is_refused_and_an_empty_file_filled(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    sqlite3.connect(path).close()  # an empty file: no schema yet
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version_num = '0099', usable_since = '0098'")
    connection.close()
    with pytest.raises(WorkspaceError) as caught:
        Database(path)
    assert (
        str(caught.value)
        == f"workspace schema 0099 is newer than this Posttrain ({schema.SCHEMA_VERSION}); upgrade posttrain"
    )


def made_newer(path: Path, usable_since: str) -> None:
    """A ledger as a release of schema 0099 leaves it: with a column and a table that this one does not know."""
    ledger = Ledger(Database(path))
    rows = [["+", "extras", ["one"], {"value": 7}]]
    with ledger.transaction("ann") as transaction:
        transaction.append_event("extra.added", "one", {"rows": rows})
    ledger.close()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE extras (name TEXT PRIMARY KEY, value INTEGER)")
        connection.execute("INSERT INTO extras VALUES ('one', 7)")
        connection.execute("ALTER TABLE projects ADD COLUMN colour TEXT")
        connection.execute("UPDATE schema_version SET version_num = '0099', usable_since = ?", (usable_since,))
    connection.close()


def test_a_newer_schema_says_whether_this_release_may_still_use_it(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    made_newer(path, schema.SCHEMA_VERSION)
    database = Database(path)
    ledger = Ledger(database)
    write(database)
    seal(ledger)
    assert verify_chain(ledger).pending == 0
    assert verify_rows(ledger)
    with pytest.raises(
        WorkspaceError, match=rf"has schema 0099, and this Posttrain \({schema.SCHEMA_VERSION}\) cannot find all"
    ):
        erase_principal(ledger, "user:ann", "user:bob", "asked")
    database.close()


def test_what_a_newer_schema_took_away_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    made_newer(path, "0099")
    with pytest.raises(
        WorkspaceError, match=rf"0099 is newer than this Posttrain \({schema.SCHEMA_VERSION}\); upgrade posttrain"
    ):
        Database(path)


def test_an_older_ledger_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version_num = '0003'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(WorkspaceError) as caught:
        Database(path)
    assert str(caught.value) == (
        f"ledger {path} has schema 0003, but this version of Posttrain needs {schema.SCHEMA_VERSION}; "
        "use the Posttrain version that created it, or `posttrain init` in another folder"
    )
    assert path.read_bytes() == before


def test_a_log_that_begins_elsewhere_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that went on from a ledger of schema 0001, whose events nothing verifies any more."""
    monkeypatch.setattr(journal, "CREATED", "ledger.upgraded")
    ledger = Ledger(Database(tmp_path / "l.db"))
    seal(ledger)
    with pytest.raises(IntegrityError, match=r"at sequence 1: a log must begin with ledger\.created, got ledger\.up"):
        verify_chain(ledger)
    ledger.close()


def test_a_table_that_there_is_not_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    made_newer(path, schema.SCHEMA_VERSION)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version_num = ?", (schema.SCHEMA_VERSION,))
    connection.close()
    ledger = Ledger(Database(path))
    with pytest.raises(IntegrityError, match="changes table 'extras', which does not exist"):
        verify_rows(ledger)
    ledger.close()


@pytest.mark.slow
def test_two_processes_may_open_a_new_ledger_at_once(tmp_path: Path) -> None:
    program = "import sys; from posttrain.store.database import Database; Database(sys.argv[1]).close()"
    openers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "l.db")]) for _ in range(2)]
    assert [opener.wait() for opener in openers] == [0, 0]


def test_a_missing_ledger_is_made_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="posttrain init"):
        Database(tmp_path / "l.db", create=False)
    assert not (tmp_path / "l.db").exists()
    with pytest.raises(WorkspaceError, match="cannot be opened"):
        Database(tmp_path / "missing" / "l.db")


def test_a_database_that_holds_no_ledger_is_filled_only_when_asked(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "l.db")
    connection.execute("VACUUM")  # a header and an empty first page
    connection.close()
    assert (tmp_path / "l.db").stat().st_size
    with pytest.raises(WorkspaceError, match="is empty: it was truncated; restore it from a copy"):
        Database(tmp_path / "l.db", create=False)
    Database(tmp_path / "l.db").close()
    Database(tmp_path / "l.db", create=False).close()


@pytest.mark.parametrize("address", ["nonsense://x", "sqlite:///:memory:", "://"])
def test_an_address_that_is_no_ledger_is_refused(address: str) -> None:
    with pytest.raises(WorkspaceError):
        Database(address)


@pytest.mark.parametrize(
    "address",
    [
        "mysql://ann:hidden@host/x",
        "postgresql://ann:hidden@host:port/x",
        "postgresql://ann:hidden@host/x",
        "postgresql://ann@host/x?password=hidden",
        "postgres://ann@host/x?sslpassword=hidden&port=1",
    ],
)
def test_a_password_in_an_address_is_never_shown(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises((InputError, WorkspaceError)) as caught:
        Database(address)
    assert "hidden" not in str(caught.value)
    assert "postgresql://" in str(caught.value)


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(WorkspaceError, match=r"pip install 'posttrain\[postgres\]'"):
        Database("postgresql://ann@host/x")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(WorkspaceError, match="not a database"):
        Database(tmp_path / "l.db")


def test_a_writer_that_waits_too_long_gives_up(tmp_path: Path) -> None:
    first = Database(tmp_path / "l.db")
    second = Database(tmp_path / "l.db", busy_seconds=0.05)
    with first.write(), pytest.raises(DeadlineError, match="locked by another process"):
        write(second)
    write(second)
    first.close()
    second.close()


def test_a_row_the_database_refuses_is_a_conflict(tmp_path: Path) -> None:
    database = Database(tmp_path / "l.db")
    statement = "INSERT INTO stage_cache (project, cache_key, run_id, stage) VALUES ('p', 'k', 'nobody', 'train')"
    with pytest.raises(ConflictError), database.write() as connection:
        connection.exec_driver_sql(statement)
    database.close()


def test_a_full_disk_is_one_line_and_loses_nothing_committed(tmp_path: Path) -> None:
    database = Database(tmp_path / "l.db")
    write(database)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(WorkspaceError, match="cannot use the ledger"):
            write(database, "x" * 400_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    write(database)
    assert [event.kind for event in Ledger(database).pending_events()].count("note") == 2
    database.close()


def test_a_database_that_may_not_grow_says_that_the_disk_is_full(tmp_path: Path) -> None:
    database = Database(tmp_path / "l.db")
    with database.read() as connection:  # the only pooled connection: the limit holds for the writer below
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
    with pytest.raises(WorkspaceError, match="the disk is full"):
        write(database, "x" * 1_000_000)
    database.close()


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder that this process may read and not write; root steps down for the length of the test."""
    folder = Path(tempfile.mkdtemp())
    Database(folder / "l.db").close()
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield folder
    if root:
        os.seteuid(0)
    folder.chmod(0o755)
    rmtree(folder)


def test_a_read_only_workspace_is_one_line(read_only_folder: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"read-only|cannot be opened"):
        write(Database(read_only_folder / "l.db"))
    with pytest.raises(WorkspaceError, match="cannot be opened"):
        Database(read_only_folder / "new.db")
    assert sorted(path.name for path in read_only_folder.iterdir()) == ["l.db"]
