"""`posttrain dead`: what a driver set aside is listed with its cause, and goes on when a person says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.app.workspace import Workspace
from posttrain.control import wakeups
from posttrain.execution.executors.fake import FakeExecutor


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def broken(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor that breaks at one stage, [again and again], until it is mended."""
    real = FakeExecutor.observe

    def observe(self: FakeExecutor, *asked: Any) -> Any:
        if "-grpo-" in str(asked):
            raise KeyError("[wires]")
        return real(self, *asked)

    monkeypatch.setattr(FakeExecutor, "observe", observe)
    return lambda: monkeypatch.setattr(FakeExecutor, "observe", real)


@pytest.mark.slow
def test_what_breaks_again_and_again_is_set_aside_told_and_goes_on(world: World, broken: Any) -> None:
    assert world.ok("dead") == "nothing was set aside\n"
    ended = world("run", "run.yaml")
    run = world.newest()
    assert ended.exit_code == 6
    (line,) = ended.stderr.strip().splitlines()
    assert "unexpected KeyError: '[wires]'; set aside after 5 tries" in line
    assert line.endswith(f"posttrain dead {run}/grpo --retry")
    listed = world.ok("dead")
    assert f"{run}/grpo: 5 tries, set aside" in listed
    assert "'[wires]'" in listed
    assert "Traceback" not in listed
    assert "Traceback (most recent call last)" in world.ok("dead", "sort")
    (told,) = world.json("dead", "-o", "json")
    assert (told["object"], told["kind"], told["tries"]) == (f"{run}/grpo", "stage", 5)
    assert told["traceback"].rstrip().endswith("KeyError: '[wires]'")
    assert "SetAside" in world.ok("get", "sort", "-o", "json")
    assert "set aside" in world.ok("why", "sort")
    assert "failed repeatedly" in world("doctor").stdout
    assert world("attach", "sort").exit_code == 6, "nothing is mended yet"
    broken()
    assert world.ok("dead", f"{run}/grpo", "--retry").endswith(f"next: posttrain attach {run}\n")
    assert world("attach", "sort").exit_code == 0
    assert world.ok("dead") == "nothing was set aside\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("dead", "nobody"), 2, "there is no run 'nobody'"),
        (("dead", "--retry"), 2, "--retry needs the run or stage"),
        (("dead", "sort"), 2, "was set aside; posttrain dead lists the objects set aside"),
        (("dead", "sort/sft", "--retry"), 2, "was set aside; posttrain dead lists the objects set aside"),
    ],
)
def test_what_was_not_set_aside_is_told_in_one_line(world: World, words: tuple[str, ...], code: int, said: str) -> None:
    world.ship()
    ended = world(*words)
    assert (ended.exit_code, said in ended.stderr) == (code, True), ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_run_whose_manifest_is_corrupt_is_set_aside_as_a_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "PATIENCE_SECONDS", 0.0)
    world.hold.add("sft")
    world("run", "run.yaml", "--timeout", "60")
    run = world.newest()
    workspace = Workspace(world.root / ".posttrain")
    name = workspace.ledger.run(run).manifest_digest.removeprefix("sha256:")
    (path,) = (found for found in (world.root / ".posttrain" / "blobs").rglob("*") if name[4:] in found.name)
    workspace.close()
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole + b" ")
    assert world("attach", run).exit_code == 8
    assert f"{run}: 1 tries" in world.ok("dead")
    again = world("attach", run)
    assert again.exit_code == 6
    assert f"posttrain dead {run} --retry" in again.stderr
    path.write_bytes(whole)
    world.ok("dead", run, "--retry")
    assert "still running" in world("attach", run, "--timeout", "60").stderr
    assert world.ok("dead") == "nothing was set aside\n"
