"""What goes wrong with a PostgreSQL server, said in one line, and healed where it can be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import control_bench
import ledger_workers as work
import pytest

from postgres_server import PASSWORD, Server
from posttrain.control import actions, channels as recalls, plan as submission, verdicts
from posttrain.domain.errors import ConflictError, PosttrainError, WorkspaceError
from posttrain.domain.records import Asset
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.transaction import Transaction

pytestmark = pytest.mark.postgres
LONG = 2 * work.PATIENCE


@pytest.fixture
def own() -> Iterator[Server]:
    """A server of this test's own, which waits for the disk."""
    with Server(durable=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def said(what: Callable[[], object], kind: type[PosttrainError] = WorkspaceError) -> str:
    """The one line that this ends with."""
    with pytest.raises(kind) as caught:
        what()
    line = str(caught.value)
    assert "\n" not in line
    assert PASSWORD not in line
    return line


def test_a_password_comes_from_the_environment_or_a_file(
    postgres: Server, postgres_ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = postgres.over_tcp(postgres_ledger)
    assert "it requires a password; set it in PGPASSWORD or ~/.pgpass" in said(lambda: Database(address))
    monkeypatch.setenv("PGPASSWORD", "wrong")
    assert "it refuses the password; set the right one in PGPASSWORD" in said(lambda: Database(address))
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    Database(address).close()
    monkeypatch.delenv("PGPASSWORD")
    file = tmp_path / "passwords"
    file.write_text(f"127.0.0.1:{postgres.port}:*:*:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    with closing(Database(address)) as database:
        assert database.place == address
        assert database.product()[0].startswith("PostgreSQL ")


def test_a_database_that_is_not_there_is_named(postgres: Server) -> None:
    line = said(lambda: Database(postgres.address("nowhere")))
    assert "/nowhere?host=" in line
    assert "it has no such database or user" in line


def test_a_server_that_is_not_there_is_named(postgres: Server) -> None:
    for address in ("postgresql://ann@127.0.0.1:1/x", f"postgresql://ann@/x?host={postgres.folder}/none"):
        line = said(lambda address=address: Database(address))  # type: ignore[misc]
        assert "it cannot be reached" in line
        assert "check it and run the command again" in line


def test_a_user_that_may_not_make_tables_is_told_so(postgres: Server, postgres_ledger: str) -> None:
    postgres.sql("DROP ROLE IF EXISTS reader")
    postgres.sql("CREATE ROLE reader LOGIN")
    address = postgres_ledger.replace("://posttrain@", "://reader@")
    assert "this user lacks a permission" in said(lambda: Database(address))
    Database(postgres_ledger).close()
    assert "this user lacks a permission" in said(lambda: Database(address))


def test_a_user_that_may_only_read_reads(postgres: Server, postgres_ledger: str) -> None:
    postgres.sql("DROP ROLE IF EXISTS looker")
    postgres.sql("CREATE ROLE looker LOGIN")
    with work.opened(postgres_ledger) as ledger:
        work.submit(ledger)
        seal(ledger)
    postgres.sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO looker", postgres_ledger)
    with work.opened(postgres_ledger.replace("://posttrain@", "://looker@")) as ledger:
        assert ledger.database.read_only
        assert [run.id for run in ledger.runs()] == ["run1"]
        assert verify_chain(ledger).pending == 0
        line = said(lambda: work.submit(ledger, "run2"))
    assert line.endswith("it is read-only; use a user and a server that may write")
    postgres.sql("DROP OWNED BY looker", postgres_ledger)
    postgres.sql("DROP ROLE looker")


def test_a_connection_that_is_lost_in_the_middle_leaves_nothing_and_the_next_heals(own: Server) -> None:
    address = own.create()
    with work.opened(address) as ledger:
        run = work.submit(ledger)

        def write_on() -> None:
            with ledger.transaction("ann") as transaction:
                transaction.update_run(run, message="half done")
                own.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'posttrain'")
                transaction.insert_run(work.a_run("run2"), [])

        assert "or ended the connection" in said(write_on)
        assert [(known.id, known.message) for known in ledger.runs()] == [("run1", "")]
        with ledger.transaction("ann") as transaction:
            transaction.update_run(run, message="whole")
        seal(ledger)
        verify_chain(ledger)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["shut-down", "killed"])
def test_a_server_that_ends_loses_nothing_committed_and_is_found_again(own: Server, how: int) -> None:
    address = own.create()
    with work.opened(address) as ledger:
        run = work.submit(ledger)

        def write_on() -> None:
            with ledger.transaction("ann") as transaction:
                transaction.update_run(run, message="half done")
                own.stop(how)
                transaction.insert_run(work.a_run("run2"), [])

        assert "or ended the connection" in said(write_on)
        assert "it cannot be reached" in said(ledger.runs)
        assert "it cannot be reached" in said(lambda: Database(address))
        own.start()
        assert [(known.id, known.message) for known in ledger.runs()] == [("run1", "")]
        seal(ledger)
        own.stop(how)
        own.start()  # nobody asked meanwhile
        assert (len(ledger.events(subject_prefix="run1")), verify_chain(ledger).pending) == (2, 0)


def test_a_writer_that_is_stopped_is_let_go_before_those_who_wait_for_it(postgres_ledger: str) -> None:
    with work.opened(postgres_ledger, busy_seconds=LONG) as ledger:
        run = work.submit(ledger)
        told = work.PROCESSES.Event()
        writer = work.PROCESSES.Process(target=work.write_and_wait, args=(postgres_ledger, told, 1.0), daemon=True)
        writer.start()
        try:
            assert told.wait(work.PATIENCE)
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGSTOP)
            with ledger.transaction("next") as transaction:
                transaction.update_run(run, message="whole")
        finally:
            writer.kill()
            writer.join(work.PATIENCE)
        assert [known.id for known in ledger.runs()] == ["run1"]


def test_a_row_that_is_refused_is_one_line(postgres_ledger: str) -> None:
    with work.opened(postgres_ledger) as ledger:
        work.submit(ledger)

        def cache_of_nobody() -> None:
            with ledger.transaction("ann") as transaction:
                transaction.put_cache(work.MODEL, "nobody", "train")

        assert "the ledger rejected a row" in said(cache_of_nobody, ConflictError)

        def say_nothing() -> None:
            with ledger.transaction("ann") as transaction:
                transaction.append_event("note", "run\0", {})

        assert "NUL" in said(say_nothing)


def test_a_newer_schema_is_refused(postgres: Server, postgres_ledger: str) -> None:
    Database(postgres_ledger).close()
    postgres.sql("UPDATE schema_version SET version_num = '9999', usable_since = '9999'", postgres_ledger)
    assert "workspace schema 9999 is newer than this Posttrain" in said(lambda: Database(postgres_ledger))


def test_a_server_that_forgets_by_default_is_told_of(postgres_ledger: str) -> None:
    with closing(Database(postgres_ledger)) as database:
        assert database.product()[1] == "fsync"


def test_a_durable_server_is_named_with_its_version_alone(own: Server) -> None:
    with closing(Database(own.create())) as database:
        assert database.product()[1] == ""
        with closing(Ledger(database)) as ledger:
            assert ledger.runs() == []


def test_no_recall_is_committed_while_somebody_looks_whether_there_is_one(
    postgres_ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who begins a run or moves a channel lets others look and nobody recall; who recalls lets nobody look."""
    monkeypatch.setattr(control_bench, "ledger_place", lambda root: postgres_ledger)
    evaluate = control_bench.evaluate(190)
    trains = [control_bench.train(), control_bench.train("better")]
    bench = control_bench.Bench(tmp_path, {"sft": trains, "evaluate": [evaluate], "baseline-evaluate": [evaluate]})
    may: dict[str, tuple[bool, bool]] = {}

    def watched(module: object, name: str, place: str) -> None:
        function = getattr(module, name)

        def looking(*words: object, **named: object) -> object:
            may[place] = free(postgres_ledger, "SHARE"), free(postgres_ledger, "UPDATE")
            return function(*words, **named)

        monkeypatch.setattr(module, name, looking)

    watched(submission, "refuse_recalled", "submit")
    watched(actions, "refuse_recalled", "retry")
    watched(verdicts, "refuse_release", "release")
    watched(actions, "refuse_release", "rollback")
    watched(Transaction, "set_asset_status", "recall")
    stopped = bench.submit(seed=2)
    actions.stop(bench.stores, stopped)
    bench.drive(stopped)
    actions.retry(bench.stores, bench.jobs.folders, stopped)
    bench.drive(stopped)
    bench.drive(bench.submit(seed=3))
    actions.rollback(bench.stores, "prod")
    with bench.ledger.transaction("user:ann") as transaction:
        asset = transaction.insert_asset(Asset("dataset", "train", 1, "sha256:" + "a" * 64, "file", 0.0, "user:ann"))
    recalls.set_status(bench.stores, asset, recalls.RECALLED, "a licence ran out")
    look, recall = (True, False), (False, False)
    assert may == {"submit": look, "retry": look, "release": look, "rollback": look, "recall": recall}
    bench.ledger.close()


def free(address: str, mode: str) -> bool:
    """Whether another connection gets this lock of the project's row at once."""
    import psycopg

    with psycopg.connect(address) as connection:
        try:
            connection.execute(f"SELECT 1 FROM projects FOR {mode} NOWAIT")
        except psycopg.errors.LockNotAvailable:
            return False
        return True
