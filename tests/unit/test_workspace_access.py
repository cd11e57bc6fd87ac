"""Who may see a workspace, how one that may only be read is read, and what is left of a ledger that was cut off."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cli_world import World, make_world

from posttrain.domain.errors import WorkspaceError
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.trees import scratch

NOBODY = 65534


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A workspace with a run, made while the umask gave everything to everybody."""
    before = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            made = make_world(tmp_path_factory.mktemp("access"), patch)
            made.prepare(by_commands=True)
            made.ok("run", "run.yaml")
            yield made
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def test_a_workspace_is_its_owners_alone_whatever_the_umask(story: World) -> None:
    root = story.root / ".posttrain"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    job_made = ("outputs", "log.txt", "meter", "report", "curves")  # the fake job writes by the test's own umask
    open_to_others = {
        name: oct(mode) for name, mode in modes(root).items() if mode & 0o077 and not any(w in name for w in job_made)
    }
    assert open_to_others == {}
    assert stat.S_IMODE((root / "ledger.db").stat().st_mode) == 0o600


@contextmanager
def nobody() -> Iterator[None]:
    """Another user, for the length of the block; what commands import lazily was imported before."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared(story: World) -> Iterator[Path]:
    """A copy that its owner opened to readers: nobody may write it. Not below pytest's folder, which every session
    that begins makes private again.
    """
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder = Path(made) / "shared"
        shutil.copytree(story.root, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield folder
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


READING = [
    *(("ls",), ("get", "sort"), ("why", "sort"), ("lineage", "prod"), ("verify", "prod"), ("asset", "ls")),
    *(("logs", "sort"), ("plan", "run.yaml"), ("asset", "get", "model:tiny")),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_a_workspace_that_was_opened_and_writes_nothing(
    story: World, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in READING:
        story.ok(*words)
    monkeypatch.chdir(shared)
    before = modes(shared)
    with nobody():
        for words in READING:
            result = story(*words)
            assert result.exit_code == 0, (words, result.stdout, result.stderr, result.exception)
        assert "everything matches" in story.ok("verify", "prod")
        refused = [story("run", "run.yaml", "--again"), story("asset", "add", "dataset:new", "train.jsonl")]
    for result in refused:
        assert (result.exit_code, len(result.stderr.strip().splitlines())) == (10, 1), result.stderr
        assert "read-only" in result.stderr
    assert modes(shared) == before, "reading left nothing behind"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_private_workspace_is_one_line(story: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_WORKSPACE", str(story.root / ".posttrain"))
    with nobody():
        result = story("ls")
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (10, 1), result.stderr
    assert "only the owner of a workspace can read it" in result.stderr


def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only mount: even root may write nothing."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: real(path, mode, **how) and not mode & os.W_OK)


@pytest.mark.parametrize("left", ["closed", "killed", "log without its index"])
def test_a_ledger_on_a_read_only_mount_is_read_however_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    path = tmp_path / "l.db"
    ledger = Ledger(Database(path))
    with ledger.transaction("ann") as transaction:
        transaction.append_event("note", "here", {"words": "kept"})
    if left == "closed":
        ledger.close()
        place = path
    else:  # as its last process left it when it was killed: the event is in the log only
        place = tmp_path / "killed" / "l.db"
        place.parent.mkdir()
        for suffix in ("", "-wal") if left == "log without its index" else ("", "-wal", "-shm"):
            shutil.copyfile(f"{path}{suffix}", f"{place}{suffix}")
        ledger.close()
    names = sorted(p.name for p in place.parent.iterdir())
    locked(monkeypatch)
    reader = Ledger(Database(place, create=False))
    assert reader.pending_events()[-1].payload == {"words": "kept"}
    with pytest.raises(WorkspaceError, match="it is read-only"), reader.transaction("eve"):
        pass
    reader.close()
    if left != "killed":
        assert sorted(p.name for p in place.parent.iterdir()) == names


# --- a ledger that was cut off ----------------------------------------------------------------------------------------


@pytest.fixture
def copy(story: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    shutil.copytree(story.root, tmp_path / "copy")
    return make_world(tmp_path / "copy", monkeypatch)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.3, 0.9, 0.999])
def test_a_truncated_ledger_is_refused_in_one_line_and_not_replaced(copy: World, share: float) -> None:
    ledger = copy.root / ".posttrain" / "ledger.db"
    size = ledger.stat().st_size
    os.truncate(ledger, int(size * share))
    left = ledger.read_bytes()
    for words in (("ls",), ("verify", "prod"), ("run", "run.yaml"), ("init",), ("asset", "ls")):
        result = copy(*words)
        line = result.stderr.strip()
        assert result.exit_code == 10, (words, result.stdout, line)
        assert len(line.splitlines()) == 1
        assert "restore" in line
    assert ledger.read_bytes() == left


def test_a_lost_ledger_is_not_replaced_by_a_fresh_one(copy: World) -> None:
    (copy.root / ".posttrain" / "ledger.db").unlink()
    result = copy("init")
    assert (result.exit_code, "its ledger is missing; restore" in result.stderr) == (10, True)


def test_an_init_that_died_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.ok("init")
    os.truncate(tmp_path / ".posttrain" / "ledger.db", 0)
    world.ok("init")
    world.ok("ls")


def test_verify_runs_the_databases_own_check(copy: World) -> None:
    """An index that lacks a row: every page reads well and the chain holds."""
    with closing(sqlite3.connect(copy.root / ".posttrain" / "ledger.db")) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'runs (state)', 'runs (name)') WHERE name = 'runs_by_state'"
        )
        connection.commit()
    assert Database(copy.root / ".posttrain" / "ledger.db").check(), "the damage is one that SQLite finds"
    result = copy("verify", "prod")
    assert result.exit_code == 8, result.stdout
    assert "problem: ledger: " in result.stdout
    assert "restore it from a copy" in result.stderr


def test_a_dangling_reference_is_found(copy: World) -> None:
    with closing(sqlite3.connect(copy.root / ".posttrain" / "ledger.db")) as connection:
        connection.execute("INSERT INTO stage_cache VALUES ('default', 'sha256:x', 'no-run', 'sft')")
        connection.commit()
    assert copy("verify", "prod").exit_code == 8


# --- temporary folders ------------------------------------------------------------------------------------------------

KILLED = """
import os, sys, time
from pathlib import Path
from posttrain.store.trees import scratch
with scratch(Path(sys.argv[1]), ".new-") as folder:
    (folder / "half").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_temporary_folder_goes_also_when_its_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = []
    for process in processes:
        assert process.stdout is not None
        folders.append(Path(process.stdout.readline().strip()))
    dead, alive = folders
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    with scratch(tmp_path, ".new-"):
        assert dead.exists(), "one that is so young may be somebody's who does not hold it yet"
    for folder in folders:
        os.utime(folder, (time.time() - 3600, time.time() - 3600))
    with scratch(tmp_path, ".new-") as own:
        assert not dead.exists()
        assert alive.exists(), "its process lives"
        assert own.exists()
    assert not own.exists()
    processes[1].kill()
    processes[1].wait()


def test_a_plan_leaves_no_temporary_folder(story: World) -> None:
    story.ok("plan", "run.yaml")
    assert not list((story.root / ".posttrain" / "cache").glob("scratch/*"))
