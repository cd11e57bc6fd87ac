"""What a shell completes, asked as a shell asks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_world import World, make_world
from typer.testing import CliRunner

from posttrain.cli.main import EXAMPLES, app


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.ship()
    return made


def complete(line: str) -> list[str]:
    """The words that bash is given for a line that ends at the cursor."""
    words = line.split(" ")
    environment = {"_POSTTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], prog_name="posttrain", env=environment).stdout.split()


def test_ids_channels_stages_and_assets_are_completed(world: World) -> None:
    run = world.newest()
    assert complete("posttrain get ") == ["prod", run]
    assert complete("posttrain get pr") == ["prod"]
    assert complete("posttrain why so") == [run]
    assert complete("posttrain diff x so") == [run]
    assert complete("posttrain rollback ") == ["prod"]
    assert complete("posttrain export ") == ["prod", "model:sort/grpo", "model:sort/sft", "model:tiny", run]
    assert complete(f"posttrain sample {run}/") == [f"{run}/sft", f"{run}/grpo"]
    assert complete("posttrain sample sort/g") == ["sort/grpo"]
    assert complete("posttrain eval prod dataset:") == ["dataset:heldout", "dataset:train"]
    assert complete("posttrain asset get reward") == ["reward:sort"]
    assert complete("posttrain examples 0") == ["01-sort", "02-count", "03-reward-model", "04-best-of-n"]
    assert complete("posttrain demo --task 03") == ["03-reward-model"]
    assert "attach" in complete("posttrain at")


def test_nothing_is_completed_where_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No workspace, no such run: the line stays as it is, without a word of error in it."""
    empty = make_world(tmp_path, monkeypatch)
    for line in ("posttrain get ", "posttrain sample nobody/", "posttrain rollback p"):
        assert complete(line) == []
    empty.ok("init")
    assert complete("posttrain sample nobody/") == []


def test_audit_32_fields_of_the_run_file_are_completed_behind_set(world: World) -> None:
    for verb in ("run", "plan"):
        found = complete(f"posttrain {verb} run.yaml --set ")
        assert {"seed=", "stages.grpo.steps=", "grpo.steps=", "grpo.probe.every=", "release.channel="} <= set(found)
        assert complete(f"posttrain {verb} run.yaml --set grpo.st") == ["grpo.steps="]
    assert complete("posttrain run nowhere.yaml --set ") == []
    world.write("odd.yaml", "a: [")
    assert complete("posttrain run odd.yaml --set ") == []


def test_audit_32_evaluate_stages_of_a_run_are_completed_behind_compare(world: World) -> None:
    run = world.newest()
    assert complete("posttrain compare so") == [run]
    assert complete(f"posttrain compare {run}/") == [f"{run}/evaluate"]
    assert complete(f"posttrain compare x {run}/ev") == [f"{run}/evaluate"]
    assert complete("posttrain compare nobody/") == []


@pytest.mark.parametrize("verb", EXAMPLES)
def test_audit_32_help_has_examples_and_each_parses(verb: str) -> None:
    shown = CliRunner().invoke(app, [*verb.split(), "--help"]).stdout
    for line in EXAMPLES[verb]:
        assert f"  {line}\n" in shown
        words = shlex.split(line)
        assert words[: 1 + len(verb.split())] == ["posttrain", *verb.split()]
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context(verb, rest).close()  # a usage error is raised here


def test_audit_32_the_ten_most_used_verbs_have_examples() -> None:
    assert {"init", "plan", "run", "ls", "get", "compare", "sample", "eval", "export", "asset add"} <= set(EXAMPLES)
