"""Who drives a run, and what a background driver is asked: its files, its log, its ears, in this process."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_world import World, make_world

from posttrain.app.background import Ears, _tidy
from posttrain.app.driver import Driver, drive
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import DeadlineError, InfrastructureError, InputError, IntegrityError, WorkspaceError
from posttrain.domain.lifecycle import RunState
from posttrain.execution.processes import process_name
from posttrain.store.atomic import make_folder
from posttrain.store.work import WorkQueue
from posttrain.workspace import background as drivers
from posttrain.workspace.background import (
    MOST_BYTES,
    DriverKind,
    DriverLog,
    Request,
    Veil,
    detach,
    environment_key,
    last_line,
    previous,
    read_request,
    requested,
    requests_held,
    run_driver,
    write_request,
)

KEY = "0123abcd"
DEAD = f"{process_name().partition(':')[0]}:{os.getpid()}:1.00"  # this pid, of another process long ago
AWAY = "elsewhere.example:7:1.00"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def workspace(world: World) -> Iterator[Workspace]:
    found = Workspace(world.root / ".posttrain")
    found.jobs = replace(found.jobs, slots=8, beside=0)  # runs move in lockstep
    make_folder(drivers.runs_folder(found.root))
    yield found
    found.close()


def held(world: World) -> str:
    """A run whose second stage never ends, and that nobody drives."""
    world.hold.add("grpo")
    assert world("run", "run.yaml", "--timeout", "60").exit_code == 12
    return world.newest()


def ask(workspace: Workspace, run_id: str, **changes: Any) -> Request:
    request = replace(Request(run_id, KEY, str(workspace.root)), **changes)
    with requests_held(workspace.root):
        write_request(workspace.root, request)
    return request


def told(world: World, run_id: str) -> dict[str, Any]:
    rows = world.json("ls")["runs"]
    found: dict[str, Any] = next(row for row in rows if row["id"] == run_id)["driver"]
    return found


# --- who drives a run -------------------------------------------------------------------------------------------------


def test_who_drives_a_run_is_told_from_its_lease_and_its_request(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    log = str(drivers.log_path(workspace.root, KEY))
    nobody = {"kind": "none", "pid": None, "host": "", "log": "", "trouble": ""}
    assert told(world, run_id) == nobody
    assert WorkQueue(workspace.ledger, process_name(), lease=1e9).claim([run_id], early=True)
    host = process_name().rpartition(":")[0].rpartition(":")[0]
    mine = {"kind": "foreground", "pid": os.getpid(), "host": host, "log": "", "trouble": ""}
    assert told(world, run_id) == mine
    ask(workspace, run_id, owner=DEAD)
    assert told(world, run_id) == mine, "a background driver that is gone does not matter"
    ask(workspace, run_id, owner=process_name())
    assert told(world, run_id) == {**mine, "kind": "background", "log": log}
    assert f"background, pid {os.getpid()}" in world.ok("ls")
    WorkQueue(workspace.ledger, process_name()).release([run_id])
    assert told(world, run_id) == {**mine, "kind": "background", "log": log}, "between two passes"
    assert f"driver: background, pid {os.getpid()}; log of the background driver: {log}" in world.ok("get", run_id)
    for owner in (DEAD, AWAY, ""):
        ask(workspace, run_id, owner=owner)
        assert told(world, run_id) == {**nobody, "log": log}
    ask(workspace, run_id, trouble="it broke")
    assert "(the background driver gave the run up: it broke)" in world.ok("get", run_id)
    assert f"{run_id} (its background driver gave the run up: it broke; log: {log})" in world.ok("doctor")
    ask(workspace, run_id, owner=process_name(), root="/elsewhere")
    assert told(world, run_id) == nobody, "the workspace is a copy: its run is driven where it came from"


def test_audit_40_a_copy_does_not_show_who_drives_the_original(world: World, workspace: Workspace) -> None:
    """The lease in the copied ledger names a process that lives and has the original open, and nothing of the copy."""
    run_id = held(world)
    program = "import sys; file = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    elsewhere = world.root / "original.db"
    elsewhere.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(elsewhere)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    owner = f"{socket.gethostname()}:{process.pid}:{psutil.Process(process.pid).create_time():.2f}"
    assert WorkQueue(workspace.ledger, owner, lease=1e9).claim([run_id], early=True)
    assert told(world, run_id)["kind"] == "none"
    assert f"pid {process.pid}" not in world.ok("ls") + world.ok("get", run_id)
    process.communicate()
    WorkQueue(workspace.ledger, owner).release([run_id])
    assert WorkQueue(workspace.ledger, process_name(), lease=1e9).claim([run_id], early=True)
    assert told(world, run_id)["pid"] == os.getpid(), "this one has it open"


def test_another_hosts_driver_is_told_by_its_lease(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    assert WorkQueue(workspace.ledger, AWAY, lease=1e9).claim([run_id], early=True)
    ask(workspace, run_id, owner=AWAY)
    assert told(world, run_id)["kind"] == "background"
    assert "background, pid 7 on elsewhere.example" in world.ok("ls")


def test_a_run_that_has_ended_has_no_driver(world: World) -> None:
    world.ok("run", "run.yaml")
    assert told(world, world.newest()) is None
    assert "driver" not in world.ok("ls")
    assert "driver:" not in world.ok("get", "sort")


def test_a_damaged_request_hides_no_run(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    ask(workspace, run_id)
    path = drivers.runs_folder(workspace.root) / f"{run_id}.json"
    for text in ("{", '{"colour": "red"}', "[1]"):
        path.write_text(text)
        with pytest.raises(IntegrityError, match="remove it and run"):
            read_request(workspace.root, run_id)
        assert told(world, run_id)["kind"] == "none"


def test_whoever_holds_the_requests_is_waited_for_and_told(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_LOCK_SECONDS", 0.0)
    with (
        requests_held(workspace.root),
        pytest.raises(InfrastructureError, match="another process has held the lock of this folder"),
        requests_held(workspace.root),
    ):
        pass
    with requests_held(workspace.root):
        pass


# --- asking -----------------------------------------------------------------------------------------------------------


def test_what_ends_or_cannot_be_written_is_not_given_away(
    world: World, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = held(world)
    monkeypatch.setattr(Workspace, "read_only", True)
    with pytest.raises(WorkspaceError, match="is read-only, so nothing can drive run"):
        detach(workspace, run_id)
    assert requested(workspace.root) == []


def test_options_that_contradict_each_other_are_refused(world: World) -> None:
    for words in (("run", "run.yaml"), ("attach", "sort"), ("retry", "sort")):
        result = world(*words, "--detach", "--timeout", "60")
        assert (result.exit_code, "--detach does not wait" in result.stderr) == (2, True), result.stderr


def test_detach_of_a_run_that_has_ended_is_its_outcome(world: World, workspace: Workspace) -> None:
    world.ok("run", "run.yaml")
    run_id = world.newest()
    assert f"attached to run {run_id}: succeeded" in world.ok("run", "run.yaml", "--detach")
    world.ok("attach", run_id, "--detach")
    with pytest.raises(InputError, match=r"has ended \(succeeded\), so there is nothing to drive"):
        detach(workspace, run_id)


def test_who_has_the_run_is_not_asked_twice(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    ask(workspace, run_id, owner=process_name())
    found = detach(workspace, run_id)
    assert (found.kind, found.pid) == (DriverKind.BACKGROUND, os.getpid())
    line = world.ok("attach", run_id, "--detach")
    assert line == f"run {run_id} detached, driven in the {found}; posttrain attach {run_id} returns to it\n"


def test_a_driver_that_never_answers_is_killed_and_the_request_taken_back(
    world: World, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = held(world)
    monkeypatch.setattr(drivers, "TAKEN_SECONDS", 0.0)
    monkeypatch.setattr(drivers, "_MODULE", "this")  # whatever it does, it takes no run
    with pytest.raises(InfrastructureError, match=f"posttrain attach {run_id} drives it here"):
        detach(workspace, run_id)
    assert requested(workspace.root) == []
    assert told(world, run_id)["kind"] == "none"


def test_the_environment_of_jobs_tells_drivers_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment_key(tmp_path)
    for name in ("TERM", "SSH_TTY", "SHLVL", "_", "PWD", "TMUX", "COLUMNS", "POSTTRAIN_WORKSPACE"):
        monkeypatch.setenv(name, "another")
        assert environment_key(tmp_path) == first, name
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HOME", "A_NAME_NOBODY_KNOWS"):
        monkeypatch.setenv(name, "another")
        assert environment_key(tmp_path) != first, name
        monkeypatch.delenv(name)
        assert environment_key(tmp_path) == first
    assert environment_key(tmp_path / "other") != first
    monkeypatch.setattr(sys, "executable", "/elsewhere/python")
    assert environment_key(tmp_path) != first
    monkeypatch.undo()
    monkeypatch.setattr(drivers, "_sources", lambda: "upgraded")
    assert environment_key(tmp_path) != first


def test_no_variable_means_another_thing_in_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/opt/x")
    monkeypatch.setenv("POSTTRAIN_STORE", "store")
    found = drivers.driver_environment()
    assert found["PYTHONPATH"] == f"{tmp_path}/src{os.pathsep}/opt/x"
    assert "POSTTRAIN_STORE" not in found, "it is recorded"


# --- the driver -------------------------------------------------------------------------------------------------------


class Driven:
    """A background driver in this process, a pass at a time."""

    def __init__(self, workspace: Workspace) -> None:
        self.said: list[str] = []
        self.let_go = 0
        self.ears = Ears(workspace.root, KEY, workspace.ledger.project, self.said.append, self.free)
        self.driver = Driver(workspace, self.ears, self.said.append)

    def free(self) -> None:
        """Let the next driver come."""
        self.let_go += 1

    def wanted(self) -> list[str]:
        """The runs to drive."""
        (runs,) = self.ears.wanted().values()
        return runs

    def to_the_end(self) -> None:
        """Until it ends by itself."""
        self.ears.listen()
        self.driver.drive()


@pytest.fixture
def driven(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Driven:
    made = Driven(workspace)

    def rest(seconds: float) -> None:
        workspace.ledger.clock.sleep(1.0)
        for known in made.driver._known.values():
            known.again_at = 0.0

    monkeypatch.setattr(made.driver, "_rest", rest)
    return made


@pytest.mark.slow
def test_it_takes_every_run_of_its_environment_to_its_end(world: World, workspace: Workspace, driven: Driven) -> None:
    first = held(world)
    world("run", "run.yaml", "--seed", "18", "--timeout", "60")
    second = world.newest()
    world("run", "run.yaml", "--seed", "19", "--timeout", "60")
    third = world.newest()
    world.hold.clear()
    for run_id in (first, second):
        world.ok("stop", run_id)
        workspace.ledger.run(run_id)
    ask(workspace, third, key="ffffffff")
    for run_id in (first, second):
        from posttrain.control import actions

        actions.retry(workspace.stores, workspace.jobs.folders, run_id)
        ask(workspace, run_id)
    driven.to_the_end()
    assert driven.let_go == 1
    assert [workspace.ledger.run(run_id).state for run_id in (first, second)] == ["succeeded"] * 2
    assert workspace.ledger.run(third).state == "running", "another environment's"
    assert requested(workspace.root) == [third]
    for run_id in (first, second):
        assert (workspace.root / "runs" / run_id / "report.html").exists()
        assert workspace.ledger.run(run_id).lease_owner is None
        assert f"run {run_id}: stage grpo succeeded" in driven.said
    assert world.json("verify", first)["problems"] == []


def test_one_runs_trouble_stops_no_other(
    world: World, workspace: Workspace, driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = held(world)
    world.hold.clear()
    world("run", "run.yaml", "--seed", "18", "--timeout", "60")
    good = world.newest()
    real = workspace.reconciler.tick

    def tick(run_id: str) -> Any:
        if run_id == bad:
            raise ZeroDivisionError("of a bug")
        return real(run_id)

    monkeypatch.setattr(workspace.reconciler, "tick", tick)
    ask(workspace, bad)
    ask(workspace, good)
    driven.to_the_end()
    assert workspace.ledger.run(good).state == "succeeded"
    assert read_request(workspace.root, bad) == Request(
        bad, KEY, str(workspace.root), trouble="unexpected ZeroDivisionError: of a bug"
    )
    assert sum(f"{bad}: unexpected ZeroDivisionError" in line for line in driven.said) == 1, "told once"
    assert any("given up" in line for line in driven.said)
    assert told(world, bad)["trouble"] == "unexpected ZeroDivisionError: of a bug"
    again = Driven(workspace)
    again.to_the_end()
    assert (again.let_go, again.said) == (1, [])
    assert workspace.ledger.run(bad).state == "running", "a person has to look at it first"


def test_a_run_that_was_let_go_on_meanwhile_is_kept(world: World, workspace: Workspace, driven: Driven) -> None:
    run_id = held(world)
    ask(workspace, run_id)
    driven.ears.listen()
    driven.ears.done(run_id, lambda: False)
    assert (driven.wanted(), requested(workspace.root)) == ([run_id], [run_id])
    assert driven.ears.over() is False
    driven.ears.done(run_id, lambda: True)
    assert (driven.wanted(), requested(workspace.root)) == ([], [])
    ask(workspace, run_id)
    assert driven.ears.over() is False, "it was asked at the last moment"
    with requests_held(workspace.root):
        drivers.remove_request(workspace.root, run_id)
    driven.ears.listen()
    assert (driven.ears.over(), driven.let_go) == (True, 1)
    ask(workspace, run_id)
    driven.ears.listen()
    assert read_request(workspace.root, run_id) == Request(run_id, KEY, str(workspace.root)), "the next driver's"


def test_a_request_that_is_taken_back_is_forgotten(world: World, workspace: Workspace, driven: Driven) -> None:
    run_id = held(world)
    ask(workspace, run_id)
    driven.ears.listen()
    with requests_held(workspace.root):
        drivers.remove_request(workspace.root, run_id)
    driven.ears.listen()
    assert driven.wanted() == []


def test_whoever_ends_a_run_forgets_its_request(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    ask(workspace, run_id, owner=DEAD)
    world.ok("stop", run_id)
    assert workspace.ledger.run(run_id).state == "stopped"
    assert requested(workspace.root) == []


def test_a_run_that_nobody_knows_is_dropped(workspace: Workspace, driven: Driven) -> None:
    ask(workspace, "gone-12345678")
    driven.to_the_end()
    assert requested(workspace.root) == []
    assert any("dropped" in line for line in driven.said)


def test_told_to_end_it_gives_the_leases_back(
    world: World, workspace: Workspace, driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = held(world)
    ask(workspace, run_id)
    monkeypatch.setattr(driven.driver, "_rest", lambda seconds: driven.driver.end(15))
    driven.to_the_end()
    assert (driven.driver.told, driven.let_go) == (15, 0)
    assert workspace.ledger.run(run_id).lease_owner is None
    assert requested(workspace.root) == [run_id]
    assert workspace.ledger.run(run_id).state == RunState.RUNNING


def test_what_long_gone_drivers_left_is_removed(world: World, workspace: Workspace) -> None:
    going = held(world)
    world.hold.clear()
    world.ok("run", "run.yaml", "--seed", "18")
    ended = world.newest()
    ask(workspace, going, key="aaaaaaaa")
    ask(workspace, ended, key="bbbbbbbb")
    folder = workspace.root / drivers.FOLDER
    for age, key in enumerate(["aaaaaaaa", KEY, *(f"{number:08d}" for number in range(12))]):
        for path in (folder / f"{key}.log", folder / f"{key}.1.log"):
            path.write_text("said")
            os.utime(path, (age, age))
    _tidy(workspace, KEY)
    assert requested(workspace.root) == [going]
    kept = ["aaaaaaaa", KEY, *(f"{number:08d}" for number in range(4, 12))]
    assert {path.name for path in folder.glob("*.log")} == {f"{key}{one}.log" for key in kept for one in ("", ".1")}


def test_a_wait_has_a_deadline(world: World, workspace: Workspace) -> None:
    run_id = held(world)
    clock = workspace.ledger.clock
    until = clock.now() + 60

    def watch(_: object) -> None:
        assert clock.now() < until, "long past its deadline"

    with pytest.raises(DeadlineError, match="still running after 20 s; posttrain why"):
        drive(workspace, run_id, timeout=20, watch=watch)
    assert workspace.ledger.run(run_id).lease_owner is None


# --- its log ----------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_the_log_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(os, "write", lambda _, data: written.write(data))
    monkeypatch.setattr(DriverLog, "bound", lambda self: None)
    log = DriverLog(
        tmp_path / "x.log", Veil({"HF_TOKEN": "hf-12345678", "MY_API_KEY": "kkkkkkkk", "HOME": "/home/ada"})
    )
    log.say("refused hf-12345678\nby https://ada:passw0rd@example.com/x of /home/ada")
    for part in ("a trace of kkkk", "kkkk", "\nand more"):
        log.write(part)
    log.write("\n")
    text = written.getvalue().decode()
    assert "refused … by https://…@example.com/x of /home/ada\n" in text
    assert text.endswith("a trace of …\nand more\n")
    assert not any(secret in text for secret in ("hf-12345678", "passw0rd", "kkkk"))


def test_the_log_is_bounded_whoever_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "k.log"
    script = (
        "import os, sys; from pathlib import Path; from posttrain.workspace.background import *; "
        "log = DriverLog(Path(sys.argv[1]), Veil({})); log.take_over(); log.bound()\n"
        "for n in range(40): os.write(1, b'r' * 20000 + b'\\n'); print('line', n)\n"
        "log.say('last')\n"
    )
    import subprocess

    with path.open("ab") as file:
        subprocess.run([sys.executable, "-c", script, str(path)], check=True, stdout=file, stderr=file)
    assert last_line(path, 0).endswith(" last")
    assert previous(path).name == "k.1.log"
    sizes = [one.stat().st_size for one in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < MOST_BYTES + 50_000


def test_the_last_line_is_of_this_start(tmp_path: Path) -> None:
    path = tmp_path / "k.log"
    path.write_text("long ago\n")
    assert last_line(path, path.stat().st_size) == ""
    assert last_line(path, 0) == "long ago"
    assert last_line(tmp_path / "none.log", 0) == ""


def test_json_has_who_drives(world: World) -> None:
    run_id = held(world)
    for found in (world.json("get", run_id), world.json("why", run_id)):
        assert json.dumps(found["driver"])
        assert (found["driver"]["kind"], found["driven"]) == ("none", False)
    workspace = Workspace(world.root / ".posttrain")
    run = workspace.ledger.run(run_id)
    assert run_driver(workspace.root, run, 0.0) is not None
    workspace.close()
