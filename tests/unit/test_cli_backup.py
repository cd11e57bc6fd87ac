"""`backup` and `restore`: a workspace is kept twice, and comes back elsewhere as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN, World, make_world

from posttrain.app.workspace import open_workspace
from posttrain.domain.records import RunRecord
from posttrain.store.ledger import Ledger


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    home = tmp_path / "home"
    home.mkdir()
    made = make_world(home, monkeypatch)
    made.ship()
    return made


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "elsewhere") -> World:
    (tmp_path / name).mkdir()
    return make_world(tmp_path / name, monkeypatch)


def killed(world: World, place: str, *words: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": place}
    command = [sys.executable, "-m", "posttrain", *words]
    died = subprocess.run(command, env=environment, cwd=cwd or world.root, check=False)
    assert died.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_what_was_backed_up_comes_back_elsewhere(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: world.json(*words) for name, words in (("prod", ("get", "prod")), ("assets", ("asset", "ls")))}
    run = world.newest()
    done = world.json("backup", str(tmp_path / "kept"))
    assert done["added"] == done["artifacts"] > 10
    assert world.json("backup", str(tmp_path / "kept"))["added"] == 0
    world.ok("asset", "add", "dataset:more", world.write("more.jsonl", '{"prompt": "a", "completion": "b"}\n'))
    assert world.json("backup", str(tmp_path / "kept"))["added"] == 1
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0
    other = elsewhere(tmp_path, monkeypatch)
    told = other.ok("restore", str(tmp_path / "kept"))
    assert "unexpired tokens remain valid" in told
    assert "under way" not in told
    assert other.json("get", "prod") == before["prod"]
    assert [row for row in other.json("asset", "ls") if row["ref"] != "dataset:more@1"] == before["assets"]
    for name in (run, "prod", "dataset:more@1"):
        assert "everything matches" in other.ok("verify", name)
    other.write("run.yaml", RUN.replace("seed: 17", "seed: 18"))
    other.ok("run", "run.yaml")
    refused = other("restore", str(tmp_path / "kept"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (9, 1)
    assert "must not exist yet" in refused.stderr


@pytest.mark.slow
def test_a_run_under_way_is_backed_up_and_goes_on_elsewhere(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.hold.add("grpo")
    world.write("held.yaml", RUN.replace("name: sort", "name: held").replace("seed: 17", "seed: 19"))
    command, codes, over = [sys.executable, "-m", "posttrain", "backup", str(tmp_path / "kept")], [], threading.Event()

    def back_up() -> None:
        while not over.is_set() or not codes:
            codes.append(subprocess.run(command, cwd=world.root, stdout=subprocess.DEVNULL, check=False).returncode)

    beside = threading.Thread(target=back_up)
    beside.start()
    world("run", "run.yaml", "--again")
    assert world("run", "held.yaml", "--timeout", "60").exit_code == 12
    over.set()
    beside.join()
    assert set(codes) == {0}
    held = world.newest()
    assert world.json("get", held)["state"] == "running"
    world.ok("backup", str(tmp_path / "kept"))
    other = elsewhere(tmp_path, monkeypatch)
    assert f"run {held} was in progress, and its jobs are not here; posttrain attach {held}" in other.ok(
        "restore", str(tmp_path / "kept")
    )
    other.ok("attach", held)
    assert other.json("get", held)["state"] == "succeeded"
    assert "everything matches" in other.ok("verify", held)


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("backup.after_ledger", marks=pytest.mark.slow), "backup.before_record"])
def test_a_backup_killed_in_the_middle_leaves_the_one_before(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    world.ok("backup", str(tmp_path / "kept"))
    world.ok("asset", "add", "dataset:more", world.write("more.jsonl", '{"prompt": "a", "completion": "b"}\n'))
    killed(world, place, "backup", str(tmp_path / "kept"))
    first = elsewhere(tmp_path, monkeypatch, "first")
    first.ok("restore", str(tmp_path / "kept"))
    assert "no dataset of that name is registered" in first("asset", "get", "dataset:more@1").stderr
    monkeypatch.chdir(world.root)
    world.ok("backup", str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").glob("ledger-*"))) == 1
    second = elsewhere(tmp_path, monkeypatch, "second")
    second.ok("restore", str(tmp_path / "kept"))
    assert "everything matches" in second.ok("verify", "dataset:more@1")


@pytest.mark.slow
def test_a_restore_killed_in_the_middle_begins_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("backup", str(tmp_path / "kept"))
    other = elsewhere(tmp_path, monkeypatch)
    killed(other, "restore.before_rename", "restore", str(tmp_path / "kept"))
    assert not (other.root / ".posttrain").exists()
    other.ok("restore", str(tmp_path / "kept"))
    assert "everything matches" in other.ok("verify", "prod")
    assert not (other.root / ".posttrain.part").exists()


def flipped(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found_and_the_next_backup_mends_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    world.ok("backup", str(kept))
    digest = json.loads((kept / "backup.json").read_text())["blobs"][0].removeprefix("sha256:")
    flipped(kept / "blobs" / "sha256" / digest[:2] / digest[2:])
    other = elsewhere(tmp_path, monkeypatch)
    _refused(other("restore", str(kept)), f"blob sha256:{digest} is corrupt")
    assert not (other.root / ".posttrain").exists()
    monkeypatch.chdir(world.root)
    world.ok("backup", str(kept))
    (ledger,) = kept.glob("ledger-*.db")
    flipped(ledger)
    monkeypatch.chdir(other.root)
    _refused(other("restore", str(kept)), "is not the ledger that was backed up")
    monkeypatch.chdir(world.root)
    world.ok("backup", str(kept))
    monkeypatch.chdir(other.root)
    other.ok("restore", str(kept))


def _refused(result: Any, words: str) -> None:
    assert (result.exit_code, result.stderr.count("\n")) == (8, 1)
    assert words in result.stderr


def test_what_is_no_backup_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    refused = world("backup", str(tmp_path / "other"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "must be empty, or contain a backup" in refused.stderr
    os.rename(world.root / ".posttrain", world.root / "away")
    refused = world("restore", str(tmp_path / "other"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "contains no complete backup" in refused.stderr


@pytest.mark.postgres
def test_a_ledger_in_postgresql_is_pg_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_ledger: str
) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.ok("init", "--ledger", postgres_ledger)
    refused = world("backup", str(tmp_path / "kept"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "copy the database with pg_dump first, then the store (see docs/howto/backup.md" in refused.stderr
    assert not (tmp_path / "kept").exists()


def test_runs_of_every_project_are_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = open_workspace()
    manifest = workspace.ledger.runs()[0].manifest_digest
    with Ledger(workspace.ledger.database, project="other").transaction("user:ann") as transaction:
        transaction.add_project()
        transaction.insert_run(RunRecord("o-1", "o", manifest, "pending", "ann", 1.0, project="other"), [])
    workspace.close()
    world.ok("backup", str(tmp_path / "kept"))
    other = elsewhere(tmp_path, monkeypatch)
    told = other.json("restore", str(tmp_path / "kept"))
    assert (told["runs"], told["under_way"]) == (2, ["o-1"])
