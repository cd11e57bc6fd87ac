"""The product over a ledger in SQLite and in PostgreSQL: the same commands, the same answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_world import GOOD_REWARD, World, make_world

from postgres_server import PASSWORD, Server
from posttrain.store.blobs import open_blobs

Make = Callable[[str], World]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A world in a folder of this name, which is where commands run from then on."""
    for name in ("POSTTRAIN_STORE", "POSTTRAIN_LEDGER", "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)

    def _make(name: str) -> World:
        (tmp_path / name).mkdir()
        return make_world(tmp_path / name, monkeypatch)

    return _make


def init(world: World, address: str) -> list[str]:
    """Make the workspace; the lines that `init` says."""
    return world.ok("init", *(["--ledger", address] if "://" in address else [])).splitlines()


def test_a_whole_run_is_the_same_on_every_database(make: Make, ledger_at: str) -> None:
    world = make("world")
    said = init(world, ledger_at)
    assert (f"ledger {ledger_at}" in said) is ("://" in ledger_at)
    world.prepare()  # `init` again, without the option
    shown = world.ok("run", "run.yaml")
    assert "prod" in shown
    run = world.newest()
    assert world.ok("run", "run.yaml").count(run) >= 1  # attaches
    assert [stage["state"] for stage in world.json("get", run)["stages"]].count("succeeded") >= 3
    world.ok("asset", "add", "reward:sort", world.write("reward.py", GOOD_REWARD.replace("1.0", "0.97")))
    world.ok("run", "run.yaml")
    world.ok("rollback", "prod")
    assert world.json("get", "prod")["channel"] == "prod"
    assert world.json("verify", "prod")["ok"] is True
    assert len(world.json("ls")["runs"]) == 2
    for words in (["why", run], ["logs", run], ["lineage", "prod"], ["diff", run, world.newest()], ["asset", "ls"]):
        world.ok(*words)
    stated = {check["name"]: check for check in json.loads(world("doctor", "-o", "json").stdout)}
    name = "PostgreSQL " if "://" in ledger_at else "SQLite "
    assert stated["ledger"]["finding"].startswith(name)
    assert (ledger_at in stated["ledger"]["finding"]) is ("://" in ledger_at)
    assert (world.root / ".posttrain" / "ledger.db").exists() is ("://" not in ledger_at)


@pytest.mark.postgres
def test_the_password_is_in_the_environment_and_nowhere_else(
    make: Make, postgres: Server, postgres_ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = postgres.over_tcp(postgres_ledger)
    monkeypatch.setenv("POSTTRAIN_LEDGER", address)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    world = make("world")
    world.prepare()
    world.ok("run", "run.yaml")
    monkeypatch.delenv("POSTTRAIN_LEDGER")
    world.ok("ls")
    assert json.loads((world.root / ".posttrain" / "workspace.json").read_text())["ledger"] == address
    written = [file for file in world.root.rglob("*") if file.is_file()]
    assert len(written) > 10
    assert not [file for file in written if PASSWORD.encode() in file.read_bytes()]
    monkeypatch.delenv("PGPASSWORD")
    refused = world("ls")
    assert refused.exit_code == 10
    assert refused.stderr.count("\n") <= 2
    assert "it requires a password" in " ".join(refused.stderr.split())


@pytest.mark.postgres
def test_a_database_is_one_workspaces(make: Make, postgres_ledger: str) -> None:
    first = make("first")
    first.ok("init", "--ledger", postgres_ledger)
    first.ok("init", "--ledger", postgres_ledger)
    (first.root / ".posttrain" / "workspace.json").unlink()
    first.ok("init", "--ledger", postgres_ledger)  # the same folder, which forgot
    second = make("second")
    for _ in range(2):
        refused = second("init", "--ledger", postgres_ledger)
        assert refused.exit_code == 10
        assert f"is that of the workspace {_host()}:{first.root}/.posttrain" in " ".join(refused.stderr.split())


def _host() -> str:
    import socket

    return socket.gethostname()


@pytest.mark.postgres
def test_a_copy_on_another_machine_is_refused_while_the_first_is_heard_of(
    make: Make, postgres: Server, postgres_ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make("here")
    world.ok("init", "--ledger", postgres_ledger)
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    refused = world("ls")
    assert refused.exit_code == 10
    assert "is a copy of" in " ".join(refused.stderr.split())
    postgres.sql("UPDATE hosts SET seen_at = seen_at - 61", postgres_ledger)
    world.ok("ls")  # it was moved


@pytest.mark.postgres
def test_garbage_of_one_host_is_what_no_host_needs(
    make: Make, postgres_ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_STORE", str(tmp_path / "shared"))
    monkeypatch.setenv("POSTTRAIN_LEDGER", postgres_ledger)
    first = make("first")
    first.prepare()
    first.ok("run", "run.yaml")
    shared = tmp_path / "shared"
    # heads of the log come and go as it grows
    kept = {path for path in shared.rglob("*") if path.is_file() and path.relative_to(shared).parts[0] != "heads"}
    second = make("second")
    second.ok("init")
    open_blobs(tmp_path / "shared").put(b"nobody's")
    told = second.json("gc", "--older-than", "0s")
    assert told["blobs"]["deleted"] == 1
    assert kept
    assert kept <= {path for path in shared.rglob("*") if path.is_file()}
    monkeypatch.chdir(first.root)
    assert first.json("verify", "prod")["ok"] is True


@pytest.mark.postgres
def test_a_workspace_that_is_moved_keeps_its_database(
    make: Make, postgres_ledger: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = make("here")
    world.ok("init", "--ledger", postgres_ledger)
    world.prepare()
    world.ok("run", "run.yaml")
    shutil.move(tmp_path / "here", tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert len(world.json("ls")["runs"]) == 1
    assert world.json("verify", "prod")["ok"] is True


@pytest.mark.postgres
def test_a_database_that_lost_its_tables_is_no_new_ledger(make: Make, postgres: Server, postgres_ledger: str) -> None:
    world = make("world")
    world.ok("init", "--ledger", postgres_ledger)
    world.prepare()
    world.ok("run", "run.yaml")
    postgres.sql("DROP SCHEMA public CASCADE", postgres_ledger)
    postgres.sql("CREATE SCHEMA public", postgres_ledger)
    for words in (["ls"], ["init"], ["init", "--ledger", postgres_ledger]):
        refused = world(*words)
        assert refused.exit_code == 10, words
        assert "is empty: it was truncated" in " ".join(refused.stderr.split())


@pytest.mark.postgres
def test_another_database_later_is_refused(make: Make, postgres: Server, postgres_ledger: str) -> None:
    world = make("world")
    world.ok("init", "--ledger", postgres_ledger)
    other = postgres.create()
    refused = world("init", "--ledger", other)
    assert refused.exit_code == 10
    assert f"--ledger names {other}" in " ".join(refused.stderr.split())
    postgres.drop(other)
