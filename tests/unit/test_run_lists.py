"""What a list of runs costs and shows, on runs as the reconciler leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks.real_runs import Builder
from server_bench import KEY, serving
from sqlalchemy import Engine, event
from typer.testing import CliRunner

from posttrain.api.codec import adapter
from posttrain.app.control import control_of
from posttrain.app.workspace import Workspace, init_workspace
from posttrain.cli.main import app
from posttrain.domain.canonical import digest_json
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import Reason
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.views import status as module
from posttrain.views.status import RunSummary, read_newest, read_status
from posttrain.workspace.background import DriverKind, RunDriver

KILOBYTE, WAITS = 1024, "waits for signal go"
NUMBERS = (0, 1, 19, 49)  # released, rejected, a job that failed once, a stage that failed for good


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("runs")
    workspace = init_workspace(folder)
    builder = Builder(workspace, len(NUMBERS), steps=2)
    scratch = folder / "scratch"
    scratch.mkdir()
    builder.assets(scratch)
    ids = [builder.run(number) for number in NUMBERS]
    workspace.seal()
    workspace.close()
    return folder, ids


@pytest.fixture
def workspace(made: tuple[Path, list[str]]) -> Iterator[Workspace]:
    found = Workspace(made[0] / ".posttrain")
    yield found
    found.close()


def counted(do: Callable[[], object]) -> int:
    """Statements that reach the database meanwhile."""
    seen: list[str] = []

    def hear(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", hear)
    try:
        do()
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
    return len(seen)


def test_audit_33_a_list_of_real_runs_takes_a_kilobyte_a_run(made: tuple[Path, list[str]]) -> None:
    folder, ids = made
    with serving(Workspace(folder / ".posttrain")) as bench:
        answer = bench.ask("GET", "/v1/projects/default/runs?limit=20")
        rows = answer.json["items"]
        assert [row["id"] for row in rows] == ids[::-1]
        assert max(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows) <= KILOBYTE
        assert len(answer.body) <= len(ids) * KILOBYTE + 200
        there, here = bench.control(KEY).ls(20), control_of(bench.workspace).ls(20)
        assert there == here, "a client reads what is told in process"
        whole = bench.ask("GET", f"/v1/projects/default/runs/{ids[0]}/status").body
        assert len(whole) > 5 * KILOBYTE, "`get` has the rest"


def test_audit_33_ls_as_json_is_as_small(made: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ids = made
    monkeypatch.chdir(folder)
    told = CliRunner().invoke(app, ["ls", "-o", "json"])
    rows = json.loads(told.stdout)["runs"]
    assert [row["id"] for row in rows] == ids[::-1]
    assert max(len(json.dumps(row).encode()) for row in rows) <= KILOBYTE
    failed, tried, rejected, released = rows
    assert released["stages"] == {"succeeded": 10, "skipped": 1}
    assert (released["state"], released["release"]) == ("succeeded", "prod@1")
    assert released["score"].items() >= {"accuracy/estimate": 0.85, "heldout/accuracy": 0.85}.items()
    assert rejected["reason"] == "GateFailed"
    assert "1 of 3 gates failed" in rejected["message"]
    assert rejected["release"] == ""
    assert rejected["score"].items() >= {"accuracy/estimate": 0.6, "heldout/accuracy": 0.6}.items()
    assert tried["score"].items() >= {"accuracy/estimate": 0.6, "heldout/accuracy": 0.6}.items()
    assert (failed["state"], failed["stages"]["failed"]) == ("failed", 1)
    assert failed["score"].get("heldout/accuracy") == 0.6, (
        "its gate judged nothing; the evaluation of another stage ended"
    )


@pytest.mark.parametrize("letter", ["a", '"', "\n", "é", "試", "🜚"])
def test_audit_33_a_summary_is_a_kilobyte_in_every_writing(workspace: Workspace, letter: str) -> None:
    status = read_status(workspace, workspace.ledger.runs()[0].id)
    words = letter * 900
    run = replace(status.run, state="pending", message=words, owner=words, name="n" * 63)
    driver = RunDriver(DriverKind.BACKGROUND, 123456, "h" * 30, "/srv/team/workspace/.posttrain/logs/" + run.id, words)
    whole = replace(status, run=run, driver=driver, trouble=words, next_action=words)
    shown = RunSummary.of(whole, "c" * 63 + "@123", [f"{number}" * 24 for number in range(8)])
    assert len(json.dumps(asdict(shown), ensure_ascii=False).encode()) <= KILOBYTE
    for said in (shown.message, shown.next_action, shown.owner):
        assert said.endswith("…"), "what is cut says so"
        assert set(said[:-1]) == {letter}
        assert len(said) >= 13, "and is not cut shorter than that takes"
    assert shown.tags[-1] == "…", "some have no room"
    assert RunSummary.of(status, tags=["b", "a"]).tags == ("a", "b")


def test_a_client_reads_summaries_of_the_release_before(workspace: Workspace) -> None:
    said = asdict(RunSummary.of(read_status(workspace, workspace.ledger.runs()[0].id)))
    del said["tags"]
    assert adapter(RunSummary).validate_json(json.dumps(said)).tags == ()


def test_a_file_name_that_is_no_text_hides_no_run(workspace: Workspace) -> None:
    status = replace(read_status(workspace, workspace.ledger.runs()[0].id), trouble="cannot read caf\udce9 " * 40)
    assert RunSummary.of(status).message.startswith("cannot read caf\udce9 ")


@pytest.mark.parametrize("limit", [1, len(NUMBERS)])
def test_audit_33_a_list_costs_the_same_few_statements(workspace: Workspace, limit: int) -> None:
    shown: list[RunSummary] = []
    assert (
        counted(lambda: shown.extend(read_newest(workspace, limit))) == 5
    )  # runs, stages, live attempts, releases, tags
    assert len(shown) == limit


def test_stages_in_brief_are_the_stages_without_what_a_list_leaves_out(workspace: Workspace) -> None:
    with workspace.ledger.snapshot() as now:
        ids = [run.id for run in now.runs()]
        whole, brief = now.stages(*ids), now.stages_in_brief(*ids)
    kept = [kind_of(row.kind).measures or kind_of(row.kind).judges for row in whole]
    assert any(row.metrics for row, keeps in zip(whole, kept, strict=True) if not keeps)
    assert brief == [
        replace(row, inputs={}, outputs={}, metrics=row.metrics if keeps else {})
        for row, keeps in zip(whole, kept, strict=True)
    ]


def test_a_summary_says_what_a_whole_look_says(workspace: Workspace) -> None:
    for one in read_newest(workspace, 20):
        whole = RunSummary.of(read_status(workspace, one.id), one.release)
        assert one == whole


def asking(workspace: Workspace, count: int) -> None:
    """Runs that wait for a person."""
    with workspace.ledger.transaction("user:ann") as transaction:
        for number in range(count):
            run = RunRecord(f"w-{number:08d}", "w", digest_json(number), "running", "ann", 2e9 + number)
            stage = StageRecord(run.id, "go", 0, "wait", "ready", reason=Reason.WAITING_FOR_SIGNAL, message=WAITS)
            transaction.insert_run(run, [stage])


def test_runs_that_ask_a_person_do_not_cost_a_list_ever_more(tmp_path: Path) -> None:
    """Of the newest the words are those of this moment; of others those that were written, and `why` is next."""
    workspace = init_workspace(tmp_path)
    most = module._LOOKED_AT
    asking(workspace, most)
    few = counted(lambda: read_newest(workspace, 100))
    workspace.close()
    (tmp_path / "more").mkdir()
    workspace = init_workspace(tmp_path / "more")
    asking(workspace, 3 * most)
    shown: list[RunSummary] = []
    assert counted(lambda: shown.extend(read_newest(workspace, 100))) == few
    assert len(shown) == 3 * most
    assert {one.message for one in shown[most:]} == {f"stage go {WAITS}"}
    assert [one.next_action for one in shown[most:]] == [f"posttrain why {one.id}" for one in shown[most:]]
    workspace.close()


def test_long_sentences_are_cut(workspace: Workspace) -> None:
    (first, *_) = read_newest(workspace, 1)
    status = read_status(workspace, first.id)
    assert len(RunSummary.of(status).message) <= 200
    assert RunSummary.of(status).message.endswith("…") == (len(status.why) > 200)


def test_audit_33_what_gates_look_up_is_read_once(workspace: Workspace) -> None:
    """Joined to itself, SQLite read what all runs made for every single result."""
    steps = [0]
    with workspace.ledger.snapshot() as now:
        raw = now._connection.connection.dbapi_connection
        assert raw is not None
        raw.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 10)
        found = now.measured("suites.", "metrics")
        raw.set_progress_handler(None, 0)
        edges = raw.execute("SELECT COUNT(*) FROM edges").fetchone()[0]
    assert found
    assert steps[0] * 10 < 20 * edges, "joined to itself it took 42 steps of SQLite for each edge, with four runs"
