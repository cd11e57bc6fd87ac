"""The wall between the command line and the workspace: commands ask `Control`, and nothing that it does not have."""

import ast
import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from cli_world import World, make_world

import posttrain
from posttrain.api import codec, control
from posttrain.app.control import control_of, open_control
from posttrain.app.workspace import open_workspace
from posttrain.domain.errors import ConflictError, InfrastructureError

VERBS = frozenset(control.VERBS)
CLI = Path(control.__file__).parents[1] / "cli"
LOCAL = {
    "chat.py",
    "demo.py",
    "service.py",
    "workspace.py",
}  # init, demo, serve, doctor, chat: they are of this machine


class Far:
    """What a client of a server would be: the verbs of the protocol, and no workspace behind them."""

    def __init__(self) -> None:
        self._near = open_control()

    def __getattr__(self, name: str) -> Any:
        if name not in {*VERBS, "asks", "close"}:
            raise AttributeError(f"Control has no {name}")
        return getattr(self._near, name)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose commands stand before a client."""
    world = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.app.control.open_control", Far)
    return world


def opened() -> Iterator[tuple[Path, str]]:
    """Everything that a command takes from `app`."""
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("posttrain.app"):
                yield from ((path, f"{node.module}.{name.name}") for name in node.names)


def bare(kind: Any) -> Any:
    """A type without what annotates it."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return frozenset(bare(one) for one in get_args(kind))
    return str(kind) if get_args(kind) else kind


def test_what_answers_in_process_takes_what_its_verb_declares(world: World) -> None:
    """Names, kinds, types and defaults; what more it takes has defaults."""
    workspace = open_workspace(world.root / ".posttrain")
    for verb in control.VERBS.values():
        answers = verb.answers(workspace)
        function = inspect.unwrap(getattr(answers, "func", answers))
        function = vars(function)["__init__"] if inspect.isclass(function) else function
        asked, taken = verb.signature.parameters.values(), list(inspect.signature(answers).parameters.values())
        for one, other in zip(asked, taken, strict=False):
            where = f"{verb.name}: {one.name}"
            assert (one.name, one.kind) == (other.name, other.kind), where
            holder = SimpleNamespace(__annotations__={"kind": function.__annotations__[other.name]})
            names = vars(import_module(function.__module__))
            codec._NAMES.enter(function.__module__)
            assert bare(one.annotation) == bare(get_type_hints(holder, names, codec._NAMES)["kind"]), where
            if one.default is not inspect.Parameter.empty and not callable(one.default):
                assert one.default == other.default, where
        assert all(one.default is not inspect.Parameter.empty for one in taken[len(asked) :]), verb.name
        assert len(taken) >= len(asked), verb.name
    workspace.close()


def test_what_a_verb_recorded_before_it_raised_is_sealed_and_a_seal_that_fails_hides_no_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = open_workspace(world.root / ".posttrain")
    asked = control_of(workspace)

    def recorded(self: object, *_: object, **__: object) -> None:
        with workspace.ledger.transaction(workspace.actor) as transaction:
            transaction.append_event("note.told", "x", {})
        raise ConflictError("an approval is missing")

    with monkeypatch.context() as patched:
        patched.setattr("posttrain.control.channels.freeze", recorded)
        with pytest.raises(ConflictError, match="an approval"):
            asked.freeze("prod")
    assert not workspace.ledger.pending_events()
    with monkeypatch.context() as patched:
        patched.setattr(type(workspace), "seal", lambda *_, **__: (_ for _ in ()).throw(InfrastructureError("away")))
        assert asked.issue_token("user:root", "viewer", 1.0).secret
    asked.close()


def test_a_verb_that_seals_leaves_no_event_unsealed(world: World) -> None:
    workspace = open_workspace(world.root / ".posttrain")
    workspace.seal()
    asked = control_of(workspace)
    for does in (
        lambda: asked.set_member("user:root", "admin"),
        lambda: asked.add_dataset(world.root / "train.jsonl", "again"),
        lambda: asked.mark("dataset:again", "approved", "a look"),
    ):
        does()
        assert not workspace.ledger.pending_events()
    asked.close()


def test_commands_take_the_control_of_the_workspace_and_no_workspace() -> None:
    words_only = {"posttrain.app.workspace.read_choice"}  # opens nothing
    local = {
        path.name for path, name in opened() if name.startswith("posttrain.app.workspace.") and name not in words_only
    }
    assert local <= LOCAL
    assert "posttrain.app.control.open_control" in {name for _, name in opened()}
    assert not {name for _, name in opened() if name.endswith(".Local")}


@pytest.mark.slow
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


def test_a_day_in_python_needs_nothing_but_the_protocol(far: World, monkeypatch: pytest.MonkeyPatch) -> None:
    far.prepare()
    monkeypatch.chdir(far.root)
    client: Any = Far()
    planned = posttrain.plan("run.yaml", client)
    assert planned.existing is None
    run = posttrain.submit("run.yaml", workspace=client)
    assert (run.attached, run.state, run.manifest.digest) == (False, "pending", planned.manifest.digest)
    seen: list[str] = []
    assert run.wait(check=True, watch=lambda now: seen.append(now.state)).state == "succeeded"
    assert seen[-1] == "succeeded"
    assert posttrain.submit("run.yaml", workspace=client).attached
    assert run.metrics["evaluate/heldout/accuracy"] > 0
    assert run.why().status.run == run.record
    assert run.diff(posttrain.run(run.id[:-2], client)) == []
    prod = posttrain.channel("prod", client)
    assert prod.live is not None
    assert (prod.live.run_id, [move.sequence for move in prod.history]) == (run.id, [1])
    assert prod.states == {prod.live.model_digest: "live"}
    assert prod.freeze(why="a look").frozen == "releases"
    assert prod.told("channel.frozen") is not None
    assert prod.unfreeze().frozen == ""
    assert (prod.policy, prod.policies, prod.record.frozen) == (None, [], "")
    assert prod.lineage() == client.lineage("prod")
    assert prod.verify().problems == ()
    with pytest.raises(posttrain.PosttrainError, match="prod has released no other model"):
        prod.rollback()


def test_python_handles_find_the_nearest_workspace(far: World, monkeypatch: pytest.MonkeyPatch) -> None:
    far.prepare()
    monkeypatch.chdir(far.root)
    run = posttrain.submit("run.yaml")
    run.stop()
    assert posttrain.run(run.id).wait().state == "stopped"
    with pytest.raises(posttrain.PosttrainError, match="stopped"):
        run.wait(check=True)
    assert run.retry().wait(check=True).state == "succeeded"
    again = posttrain.channel("other").record
    assert again.generation == 0
    assert run.promote("prod") == posttrain.channel("prod").live


def test_a_channel_is_told_from_a_run_of_its_name(far: World) -> None:
    far.prepare()
    far.ok("run", "run.yaml")
    assert far.ok("lineage", "channel:prod") == far.ok("lineage", "prod")
    far.ok("verify", "channel:prod")
    name = far.newest().rpartition("-")[0]
    assert "is unknown" in far("lineage", f"channel:{name}").stderr
