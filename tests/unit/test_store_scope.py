"""No statement reaches rows of a project that it does not name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    and_,
    bindparam,
    column,
    event,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    table,
    text,
    true,
    union_all,
    update,
)  # fmt: skip
from sqlalchemy.dialects import sqlite

from posttrain.domain.lifecycle import RunState
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.store import scope
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.schema import attempts, events, leaves, metadata, projects, requests, runs, stages, watches, work
from posttrain.store.scope import CHILDREN, OWN, Scope, UnscopedStatementError, across, of_project, unscoped

OF_NOBODY = frozenset(  # tables whose rows belong to no project; what is in them is named by ids that are
    (
        *("projects", "principals", "tokens", "sessions", "hosts", "tree_head", "tiles", "schema_version"),
        *("chain_head", "events_before"),
    )
)
A = Scope("a")
LATER, OTHERS = attempts.alias(), runs.alias()
SCOPED: dict[str, Any] = {
    "own column": A.select(runs),
    "by its run": A.select(stages),
    "by its event": A.select(leaves),
    "changed": A.update(stages),
    "deleted": A.delete(watches),
    "joined": select(stages).join(runs, runs.c.id == stages.c.run_id).where(runs.c.project == bindparam("p")),
    "alias": select(LATER).join(runs, and_(LATER.c.run_id == runs.c.id, runs.c.project == "a")),
    "subquery": A.select(runs).where(runs.c.id.in_(A.select(stages, stages.c.run_id))),
    "of the same rows": update(work).where(work.c.id.in_(A.select(work, work.c.id))),
    "correlated": A.select(runs, runs.c.id, A.select(attempts, func.count()).scalar_subquery()),
    "added": insert(requests),
    "other tables": text("PRAGMA journal_mode"),
}
UNSCOPED: dict[str, Any] = {
    "no condition": select(stages),
    "another condition": select(stages).where(stages.c.run_id == "x"),
    "changed": update(stages).where(stages.c.run_id == "x"),
    "joined": select(stages).join(runs, runs.c.id == stages.c.run_id),
    "joined with a table of nobody": select(runs).join(projects, projects.c.id == runs.c.project),
    "or": select(runs).where(or_(runs.c.project == "a", runs.c.id == "x")),
    "child or": select(stages).where(or_(of_project(stages, "a"), true())),
    "not": select(runs).where(runs.c.project != "a"),
    "negated": select(runs).where(~exists().where(runs.c.project == "a")),
    "outer join": select(runs).outerjoin(work, and_(runs.c.project == work.c.project, runs.c.project == "a")),
    "subquery": A.select(runs).where(runs.c.id.in_(select(stages.c.run_id))),
    "subquery of the same rows": A.select(runs).where(runs.c.id.in_(select(runs.c.id))),
    "counted": select(select(func.count()).select_from(runs).scalar_subquery()),
    "in the list of columns": select(true()).where(exists(select(runs.c.id))),
    "union": union_all(select(runs.c.id), A.select(runs, runs.c.id)),
    "cte": select(select(runs).cte()),
    "text": text("SELECT * FROM runs"),
    "text with a parameter that it does not compare": text("SELECT * FROM runs WHERE :project = :project").bindparams(
        project="a"
    ),
    "text as a query": text("SELECT id FROM runs").columns(runs.c.id),
    "words for a table": select(table("runs", column("id"))),
    "words for a column": select(literal_column("(SELECT max(id) FROM runs)")),
    "a join inside a subquery": A.select(
        runs, select(func.max(stages.c.name)).select_from(stages.join(runs)).scalar_subquery()
    ),
    "a join beside a table of nobody": A.select(
        runs, select(func.max(stages.c.name)).select_from(stages.join(runs), projects).scalar_subquery()
    ),
    "an answer without a row": select(runs).where(
        exists(select(func.count()).where(runs.c.project == "a").correlate(runs))
    ),
    "full join": select(runs).join(work, and_(runs.c.project == work.c.project, runs.c.project == "a"), full=True),
    "a query of no table": select(runs).where(runs.c.project.in_(select(literal("b")))),
    "a key of no table": select(runs).where(runs.c.id == select(literal("r")).scalar_subquery()),
    "a value of no table": (lambda one: select(runs).where(runs.c.project == one.c.x))(
        select(literal("b").label("x")).subquery()
    ),
    "a literal": select(runs).where(runs.c.project == bindparam("p", "b", literal_execute=True)),
    "rows from a query": insert(runs).from_select(["id"], A.select(runs, runs.c.id)),
    "a project from a query": insert(runs).values(project=select(func.max(projects.c.id)).scalar_subquery()),
    "rows that are there": sqlite.insert(runs)
    .values(project="a")
    .on_conflict_do_update(index_elements=["id"], set_={"name": "x"}),
    "a value of other rows": A.update(runs).values(name=OTHERS.c.name),
}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(Database(tmp_path / "ledger.db"), project="a")
    yield made
    made.close()


def test_audit_1_a_statement_without_its_project_is_refused() -> None:
    assert {name: unscoped(one) for name, one in SCOPED.items()} == dict.fromkeys(SCOPED, "")
    assert {name for name, one in UNSCOPED.items() if not unscoped(one)} == set()


def test_audit_1_no_table_is_left_out() -> None:
    assert OWN | CHILDREN.keys() | OF_NOBODY == metadata.tables.keys()
    assert not OWN & OF_NOBODY


def test_audit_1_every_connection_refuses_and_sends_nothing(ledger: Ledger) -> None:
    sent: list[str] = []
    with ledger.database.read() as connection:
        engine = connection.engine
        event.listen(engine, "after_cursor_execute", lambda *words: sent.append(words[2]))
        for statement in UNSCOPED.values():
            with pytest.raises(UnscopedStatementError, match="in every project"):
                connection.execute(statement)
        with pytest.raises(UnscopedStatementError, match="runs"):
            connection.exec_driver_sql("SELECT * FROM runs")
        with pytest.raises(UnscopedStatementError):
            connection.exec_driver_sql("INSERT INTO telling (project, woken) SELECT 'p2', 'r-1'")
        assert sent == []
        connection.execute(across(select(runs), "a test"))
        with pytest.raises(UnscopedStatementError):
            connection.execute(select(runs))  # which is compiled already, and not marked
    with ledger.database.read(across="a test") as connection:
        connection.execute(select(runs))
    with ledger.database.write() as connection:
        connection.execute(across(select(runs), "a test"))
    with ledger.database.read() as connection, pytest.raises(UnscopedStatementError):
        connection.execute(select(runs))  # a connection of the pool does not stay marked


def test_audit_1_a_connection_of_a_project_refuses_statements_that_name_another(ledger: Ledger) -> None:
    other = Scope("b")
    named = {
        "own column": other.select(runs),
        "by its run": other.select(stages),
        "changed": other.update(stages).values(name="x"),
        "deleted": other.delete(watches),
        "joined": select(stages).join(runs, and_(runs.c.id == stages.c.run_id, runs.c.project == "b")),
        "subquery": A.select(runs).where(runs.c.id.in_(other.select(stages, stages.c.run_id))),
        "several": select(runs).where(runs.c.project.in_(["a", "b"])),
        "added": insert(work).values(project="b"),
        "several added": insert(work).values([{"project": "a", "object": "x"}, {"project": "b", "object": "y"}]),
        "added by another word": insert(work).values(project=bindparam("whose", "b")),
        "moved": A.update(work).values(project="b"),
        "text": text("SELECT * FROM runs WHERE project = :project").bindparams(project="b"),
    }
    with ledger.database.write() as connection:
        connection.execute(A.select(runs))  # the same statement, compiled for the project's own
        connection.execute(select(runs).where(runs.c.project.in_(["a"])))
        for name, statement in named.items():
            with pytest.raises(UnscopedStatementError, match="a statement of project a names"):
                pytest.fail(f"{name}: {connection.execute(statement)}")
        connection.execute(across(other.select(runs), "a test"))
    with Ledger(ledger.database, project="b").database.read() as connection:
        connection.execute(other.select(runs))


def test_audit_1_the_verdict_is_found_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = itertools.count()
    known = scope.unscoped
    monkeypatch.setattr(scope, "unscoped", lambda statement: (next(looked), known(statement))[1])
    with ledger.database.read() as connection:
        for number in range(50):
            connection.execute(A.select(events).where(events.c.at == number))
    assert next(looked) == 1


def test_audit_1_rows_of_a_run_of_another_project_are_absent(ledger: Ledger) -> None:
    other = Ledger(ledger.database, project="b")
    with other.transaction("user:ben") as transaction:
        stage = StageRecord("r-1", "sft", 0, "sft", "pending")
        transaction.insert_run(RunRecord("r-1", "r", "sha256:" + "a" * 64, RunState.PENDING, "ben", 1.0), [stage])
    assert [one.name for one in other.stages("r-1")] == ["sft"]
    assert (ledger.stages("r-1"), ledger.attempts("r-1")) == ([], [])
    with ledger.snapshot() as now:
        assert (now.stages("r-1", "r-2"), now.attempts_of("r-1", "r-2"), now.watches("r-1")) == ([], [], [])
        assert now.last_said("r-1", "r-1/sft") == {}
    with ledger.transaction("user:ann") as transaction, pytest.raises(Exception, match="changed since"):
        transaction.update_stage(other.stages("r-1")[0], state="skipped", finished_at=1.0)
