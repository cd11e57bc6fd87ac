"""Heads of the log outside the ledger: a lost tail and an older ledger are found, nothing else is."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cli_world import World, make_world

from posttrain.app.workspace import Workspace
from posttrain.domain.errors import WorkspaceError
from posttrain.store.schema import leaves, tiles
from posttrain.store.sealer import find_lost, head_name, keep_head, root_at
from posttrain.store.trees import EMPTY, Tree

SIZES = (0, 1, 2, 255, 256, 257, 511, 512, 700, 65535, 65536, 65537, 66100)


class EnoughError(Exception):
    """Nothing of what was made up stays."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "home").mkdir()
    made = make_world(tmp_path / "home", monkeypatch)
    made.ship()
    return made


def copied(ledger: Path, to: Path) -> None:
    with closing(sqlite3.connect(ledger)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def put_back(kept: Path, ledger: Path) -> None:
    for name in ("", "-wal", "-shm"):
        ledger.with_name(ledger.name + name).unlink(missing_ok=True)
    shutil.copyfile(kept, ledger)


def sealed(workspace: Workspace) -> str:
    """The head that an order of any run would get now."""
    with workspace.ledger.snapshot() as now:
        return head_name(*now.rows_of(workspace.ledger.runs(1)[0].id).head)


def heads(world: World) -> dict[str, str]:
    found = {row["name"]: row for row in json.loads(world("doctor", "-o", "json").output)}
    return found["log heads"]


def test_audit_34_the_root_of_every_earlier_size_comes_from_tiles_and_few_leaves(tmp_path: Path) -> None:
    world = Workspace(tmp_path / "w", create=True)
    placed = [
        {"sequence": i, "event": i, "leaf": hashlib.sha256(str(i).encode()).digest()} for i in range(1, SIZES[-1] + 1)
    ]
    whole, roots = Tree(), {0: EMPTY}
    with suppress(EnoughError), world.ledger.database.write(across="a log is made up") as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        for table in (leaves, tiles):
            connection.execute(table.delete())
        connection.execute(leaves.insert(), placed)
        made = []
        for row in placed:
            made += whole.add([row["leaf"]])
            roots |= {whole.size: whole.root} if whole.size in SIZES else {}
        connection.execute(tiles.insert(), [{"level": t.level, "position": t.position, "hash": t.hash} for t in made])
        assert {size: root_at(connection, size) for size in SIZES} == roots
        assert root_at(connection, SIZES[-1] + 1) is None
        raise EnoughError
    world.close()


def test_audit_34_a_healthy_workspace_its_copy_and_its_restored_backup_report_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heads(world)["state"] == "ok"
    world.ok("backup", str(tmp_path / "kept"))
    assert "everything matches" in world.ok("verify", "prod")
    shutil.copytree(world.root, tmp_path / "copied")
    copy = make_world(tmp_path / "copied", monkeypatch)
    assert heads(copy)["state"] == "ok"
    copy.ok("channel", "freeze", "prod")
    assert heads(copy)["state"] == "ok"
    (tmp_path / "elsewhere").mkdir()
    other = make_world(tmp_path / "elsewhere", monkeypatch)
    other.ok("restore", str(tmp_path / "kept"))
    assert heads(other)["state"] == "ok"
    other.ok("channel", "freeze", "prod")
    assert "everything matches" in other.ok("verify")
    assert heads(other)["state"] == "ok"


def test_audit_34_an_old_copy_of_the_ledger_put_back_after_a_release_is_reported_and_can_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    world = make_world(tmp_path / "home", monkeypatch)
    world.prepare()
    ledger = world.root / ".posttrain" / "ledger.db"
    copied(ledger, tmp_path / "old.db")
    run = world.ship()
    for order in (world.root / ".posttrain" / "runs").glob("*/*/*/job.json"):  # a job may rewrite its folder
        order.write_text(json.dumps({"log_head": 7}))
    put_back(tmp_path / "old.db", ledger)
    told = world("verify")
    assert told.exit_code == 8
    lines = [line for line in " ".join(told.output.split()).split("✗") if "--accept-loss" in line]
    assert any("event log: has" in line and "kept outside the ledger" in line for line in lines)
    assert any("runs/ holds attempts" in line and run in line for line in lines)
    assert heads(world)["state"] == "fail"
    assert run in heads(world)["finding"]
    world.ok(
        "asset", "add", "dataset:more", world.write("more.jsonl", '{"prompt": "a", "completion": "b"}\n')
    )  # unnoticed
    assert heads(world)["state"] == "fail"
    assert world("doctor", "--accept-loss", " ").exit_code == 2
    assert "accepted: event log" in json.dumps(
        json.loads(world("doctor", "--accept-loss", "a test", "-o", "json").output)
    )
    assert heads(world)["state"] == "ok"
    assert world("verify").exit_code == 0
    assert world("doctor", "--accept-loss", "again").exit_code == 2


def test_audit_34_a_head_in_an_order_raises_suspicion(world: World) -> None:
    workspace = Workspace(world.root / ".posttrain")
    order = next((workspace.root / "runs").glob("*/*/*/job.json"))
    said = json.loads(order.read_text())
    assert len(said["log_head"]) == 16 + 1 + 64
    order.write_text(json.dumps({**said, "log_head": f"{9999:016d}-{'ab' * 32}"}))
    lost = workspace.lost()
    assert not lost.attempts
    assert [line for line in lost.lines() if "9999" in line]
    assert not workspace.lost("another-run")
    workspace.close()


def test_audit_34_a_head_costs_one_object_and_is_never_taken_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(world.root / ".posttrain")
    log = f"heads/{workspace.log}"
    (before,) = workspace.blobs.notes(log)
    assert before == sealed(workspace)
    written: list[str] = []
    note = workspace.blobs.note
    monkeypatch.setattr(workspace.blobs, "note", lambda name, said: (written.append(name), note(name, said)))
    for _ in range(3):
        workspace.seal()
    assert not written  # nothing happened
    with workspace.ledger.transaction("user:ann") as transaction:
        transaction.append_event("something", "nothing", {})
    workspace.seal()
    assert list(workspace.blobs.notes(log)) == [sealed(workspace)] != [before]
    assert len(written) == 1
    other = f"{2:016d}-{'ef' * 32}"  # of another log, smaller
    note(f"{log}/{other}", other)
    with workspace.ledger.transaction("user:ann") as transaction:
        transaction.append_event("something", "nothing", {})
    workspace.seal()
    assert sorted(workspace.blobs.notes(log)) == [other, sorted(workspace.blobs.notes(log))[1]]
    workspace.blobs.drop_note(f"{log}/{other}")
    larger = f"{10**6:016d}-{'cd' * 32}"
    note(f"{log}/{larger}", larger)
    with workspace.ledger.transaction("user:ann") as transaction:
        transaction.append_event("something", "nothing", {})
    workspace.seal()
    assert larger in workspace.blobs.notes(log)
    assert find_lost(workspace.ledger, workspace.blobs, workspace.log, workspace.root).heads == (larger,)
    keep_head(workspace.ledger, workspace.blobs, workspace.log)
    assert larger in workspace.blobs.notes(log)
    workspace.close()


@pytest.mark.parametrize("said", ["[" * 200_000, '{"a":' * 200_000, "[]", "\0", '"'])
def test_audit_34_an_order_that_cannot_be_read_is_one_without_a_head(world: World, said: str) -> None:
    next((world.root / ".posttrain" / "runs").glob("*/*/*/job.json")).write_text(said)
    assert heads(world)["state"] == "ok"
    assert "everything matches" in world.ok("verify")


def test_audit_34_only_what_submission_names_counts_as_an_attempt(world: World) -> None:
    runs, run = world.root / ".posttrain" / "runs", world.newest()
    shutil.copytree(runs / run, runs / f"{run}.bak")
    shutil.copytree(runs / run / "sft", runs / run / "sft.old")
    for stray in ("a\nrun evil-1\x1b[31m: everything is fine/s/001", "notes/s/001", f"{run}/sft/1"):
        (runs / stray).mkdir(parents=True)
        (runs / stray / "job.json").write_text("{}")
    assert heads(world)["state"] == "ok"
    assert "everything matches" in world.ok("verify")
    (runs / "lost-abcdefg2" / "sft" / "001").mkdir(parents=True)
    (runs / "lost-abcdefg2" / "sft" / "001" / "job.json").write_text("{}")
    assert "lost-abcdefg2" in heads(world)["finding"]


def test_audit_34_strange_and_forged_objects_do_not_stop_newer_heads(world: World) -> None:
    workspace = Workspace(world.root / ".posttrain")
    log, forged = f"heads/{workspace.log}", f"{'9' * 16}-{'0' * 64}"
    for name in ("x.tmp", f"{'9' * 60}-{'0' * 64}", "1-2"):
        workspace.blobs.note(f"{log}/{name}", name)
    assert heads(world)["state"] == "ok"
    assert "everything matches" in world.ok("verify")
    workspace.blobs.note(f"{log}/{forged}", forged)
    world.ok("channel", "freeze", "prod")
    assert {forged, sealed(workspace)} <= set(workspace.blobs.notes(log))
    assert workspace.lost().heads == (forged,)
    assert heads(world)["state"] == "fail"
    workspace.close()


def test_audit_34_doctor_reports_that_no_head_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(world.root / ".posttrain")
    for head in workspace.blobs.notes(f"heads/{workspace.log}"):
        workspace.blobs.drop_note(f"heads/{workspace.log}/{head}")
    workspace.close()

    def refuse(*_: object) -> None:
        raise WorkspaceError("the store is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(type(workspace.blobs), "note", refuse)
        assert heads(world)["state"] == "warn"
        assert "no head of the event log is stored" in heads(world)["finding"]
    assert heads(world)["state"] == "ok"


def test_audit_34_verify_names_no_runs_where_there_are_several_projects(world: World) -> None:
    lost = world.root / ".posttrain" / "runs" / "secret-abcdefg2" / "sft" / "001"
    lost.mkdir(parents=True)
    (lost / "job.json").write_text("{}")
    told = world("verify")
    assert (told.exit_code, "secret" in told.output) == (8, True)
    world.ok("project", "add", "other")
    for scope in ((), ("--project", "other")):
        told = world(*scope, "verify")
        said = " ".join((told.output + told.stderr).split())
        assert told.exit_code == 8
        assert "attempts that the ledger does not have: 1 (posttrain doctor names the runs)" in said
        assert "secret" not in said
    assert "secret-abcdefg2" in heads(world)["finding"]
