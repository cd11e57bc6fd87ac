"""What a shell completes, asked as a shell asks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_world import World, make_world
from typer.testing import CliRunner

from posttrain.cli.main import app
from posttrain.cli.usage import EXAMPLES, GROUPS, HINTS, VERBS
from posttrain.engine.config import config_class


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


def test_the_paths_of_settings_in_help_exist() -> None:
    lines = [line for lines in EXAMPLES.values() for line in lines if "--set " in line]
    assert len(lines) >= 2
    for line in lines:
        stage, *keys = line.split("--set ")[1].split("=")[0].split(".")
        config: Any = config_class(stage, {})  # stages of the examples have the names of their kinds
        for key in keys:
            config = config.model_fields[key].annotation


def test_every_command_stands_in_one_group_with_two_examples_and_exit_codes() -> None:
    """`posttrain --help` lists all of them; a sixth group or a command beside the groups is noticed."""
    command: Any = typer.main.get_command(app)
    assert sorted(VERBS) == sorted(command.commands)
    leaves = {
        f"{name} {below}".strip(): leaf
        for name, one in command.commands.items()
        for below, leaf in getattr(one, "commands", {"": one}).items()
    }
    assert sorted(EXAMPLES) == sorted(leaves)
    for name, leaf in leaves.items():
        assert len(set(EXAMPLES[name])) == 2, name
        assert "Exit codes: 0, 1, 2, 10, 13" in leaf.epilog
    shown = CliRunner().invoke(app, ["--help"]).stdout
    places = [shown.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert all(shown.count(f"\n  {verb} ") == 1 for verb in VERBS)


@pytest.mark.parametrize("word", ["lora", "status", "metrics", "deploy", "Resume"])
def test_a_word_of_other_tools_is_answered_with_the_command_that_does_its_work(word: str) -> None:
    ended = CliRunner().invoke(app, [word])
    assert ended.exit_code == 2
    assert HINTS[word.lower()] in " ".join(ended.stderr.split())


def test_no_hint_hides_a_command_and_each_names_one_that_there_is() -> None:
    assert not set(HINTS) & set(VERBS)
    for hint in HINTS.values():
        named = re.findall(r"posttrain ([a-z]+)", hint)
        assert set(named) <= set(VERBS), hint
