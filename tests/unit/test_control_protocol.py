"""The wall between the command line and the workspace: commands ask `Control`, and nothing that it does not have."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.api.control import Control
from posttrain.app.embedded import control as embedded
from posttrain.app.embedded.control import Embedded, open_control

VERBS = {name for name, _ in inspect.getmembers(Control, inspect.isfunction) if not name.startswith("_")}
CLI = Path(embedded.__file__).parents[2] / "cli"
LOCAL = {"demo.py", "workspace.py"}  # init, demo, upgrade, doctor: they are of this machine


class Far:
    """What a client of a server would be: the verbs of the protocol, and no workspace behind them."""

    def __init__(self) -> None:
        self._near = open_control()

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            raise AttributeError(f"Control has no {name}")
        return getattr(self._near, name)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose commands stand before a client."""
    world = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.app.embedded.control.open_control", Far)
    return world


def opened() -> Iterator[tuple[Path, str]]:
    """Everything that a command takes from `app`."""
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("posttrain.app"):
                yield from ((path, f"{node.module}.{name.name}") for name in node.names)


def test_what_answers_in_process_has_every_verb() -> None:
    assert len(VERBS) > 50
    for name in sorted(VERBS):
        asked, answers = getattr(Control, name), getattr(Embedded, name)
        assert list(inspect.signature(asked).parameters) == list(inspect.signature(answers).parameters), name


def test_commands_take_the_control_of_the_workspace_and_no_workspace() -> None:
    local = {path.name for path, name in opened() if name.startswith("posttrain.app.workspace.")}
    assert local <= LOCAL
    assert "posttrain.app.embedded.control.open_control" in {name for _, name in opened()}
    assert not {name for _, name in opened() if name.endswith(".Embedded")}


def test_the_commands_of_a_day_need_nothing_but_the_protocol(far: World) -> None:
    far.prepare(by_commands=True)
    far.ok("plan", "run.yaml")
    far.ok("lock", "run.yaml")
    far.ok("run", "run.yaml")
    far.ok("attach", far.newest())
    far.ok("ls")
    for verb in ("get", "why", "logs", "lineage", "verify"):
        far.ok(verb, far.newest())
    far.ok("get", "prod")
    far.ok("lineage", "prod", "--downstream")
    far.ok("channel", "freeze", "prod", "--reason", "a look")
    far.ok("channel", "unfreeze", "prod")
    far.ok("channel", "policy", "prod")
    far.ok("diff", far.newest(), far.newest())
    far.ok("dead")
    far.ok("asset", "ls")
    found = json.loads(far.ok("ls", "-o", "json"))
    assert [run["state"] for run in found["runs"]][:1] == ["succeeded"]
