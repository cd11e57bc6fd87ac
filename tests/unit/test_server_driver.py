"""The driver of a served workspace: every project's runs, at a price that does not grow with those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from posttrain.app import driver as loop
from posttrain.app.driver import Driver
from posttrain.app.workspace import Workspace, init_workspace
from posttrain.control.reconciler import Reconciler
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.server import driver as module
from posttrain.server.driver import OpenRuns
from posttrain.store.work import open_runs
from posttrain.views.status import RunSummary, read_newest


@dataclass
class Seconds:
    """A clock that a test moves."""

    now: float = field(default=1000.0)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = init_workspace(tmp_path)
    yield made
    made.close()


def waiting(workspace: Workspace, project: str, name: str) -> str:
    seen = workspace.seen_by("user:ann", project, "os")
    with seen.ledger.transaction("user:ann") as transaction:
        if project not in transaction.snapshot.projects():
            transaction.add_project()
    run = RunRecord(f"{name}-22222222", name, digest_json(name), "pending", "ann", 0.0, project=project)
    with seen.ledger.transaction("user:ann") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    return run.id


def counted(workspace: Workspace, do: Any) -> int:
    seen: list[str] = []

    def count(_: Any, __: Any, statement: str, *___: Any) -> None:
        seen.append(statement)

    engine = workspace.ledger.database._engine
    event.listen(engine, "before_cursor_execute", count)
    try:
        do()
    finally:
        event.remove(engine, "before_cursor_execute", count)
    return len(seen)


def test_one_statement_finds_the_open_runs_of_every_project(workspace: Workspace) -> None:
    names = {project: [waiting(workspace, project, f"{project}-{n}") for n in range(9)] for project in ("a", "b")}
    found: dict[str, list[str]] = {}
    assert counted(workspace, lambda: found.update(open_runs(workspace.ledger.database))) == 1
    assert found == names


@pytest.mark.parametrize("many", [1, 40])
def test_a_list_of_runs_costs_the_same_statements_however_many_they_are(workspace: Workspace, many: int) -> None:
    ids = [waiting(workspace, "a", f"a-{number}") for number in range(many)]
    seen = workspace.seen_by("user:ann", "a", "os")
    shown: list[RunSummary] = []
    assert counted(workspace, lambda: shown.extend(read_newest(seen, 100))) <= 7
    assert sorted(one.id for one in shown) == sorted(ids)


def test_an_idle_minute_costs_less_than_two_statements_a_second(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        waiting(workspace, "a", f"a-{number}")
    workspace.seal()
    clock = Seconds()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    passed: list[list[str]] = []
    monkeypatch.setattr(Reconciler, "worth", lambda self, runs: bool(passed.append(runs)) or [])
    driver = Driver(workspace, OpenRuns(workspace, print), print, served=True)

    def minute() -> None:
        for _ in range(600):
            clock.now += 0.1
            driver.look()

    assert counted(workspace, minute) <= 120
    assert [len(runs) for runs in passed] == [5] * 600
    driver._leave(0.0)


def test_an_event_of_any_project_is_sealed(workspace: Workspace) -> None:
    driver = Driver(workspace, OpenRuns(workspace, print), print, served=True)
    waiting(workspace, "a", "a-1")
    driver._look_after()
    with workspace.seen_by("user:ann", "a", "os").ledger.snapshot() as now:
        assert now.pending_events() == []
        assert any(event.kind == "run.pending" for event in now.events(limit=1000))
    driver._leave(0.0)


def test_a_run_that_was_given_up_rests_and_is_looked_at_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Seconds()
    monkeypatch.setattr(module, "time", clock)
    one, two = waiting(workspace, "a", "one"), waiting(workspace, "a", "two")
    runs = OpenRuns(workspace, print)
    assert runs.wanted() == {"a": [one, two]}
    runs.give_up(one, "no reason")
    assert runs.wanted() == {"a": [two]}
    clock.now += 1.0
    runs.done(two, lambda: True)
    assert runs.wanted() == {"a": []}
    clock.now += 59.0
    assert runs.wanted() == {"a": [one, two]}, "whoever has ended is not open any more: this one was let go on"


def test_a_ledger_that_is_away_is_said_and_asked_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said, found = Seconds(), list[str](), {"a": ["one"]}
    monkeypatch.setattr(module, "time", clock)

    def away(*_: object) -> dict[str, list[str]]:
        raise WorkspaceError("away")

    monkeypatch.setattr(module, "open_runs", lambda *_: found)
    runs = OpenRuns(workspace, said.append)
    assert runs.wanted() == found
    monkeypatch.setattr(module, "open_runs", away)
    clock.now += 1.5
    assert (runs.wanted(), runs.errors, said) == (found, 1, ["the ledger cannot be used: away"])


def test_jobs_of_another_project_are_nobodys_orphans(workspace: Workspace) -> None:
    from posttrain.domain.records import AttemptRecord

    run_id = waiting(workspace, "a", "a-1")
    seen = workspace.seen_by("user:ann", "a", "os")
    with seen.ledger.transaction("user:ann") as transaction:
        transaction.insert_attempt(AttemptRecord(run_id, "hold", 1, f"{run_id}-hold-1", "runs/x", "planned"))
    for project in ("default", "a"):
        with workspace.seen_by("user:ann", project, "os").ledger.snapshot() as now:
            assert now.live_attempts() == {f"{run_id}-hold-1"}
