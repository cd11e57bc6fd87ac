"""What a shell completes, asked as a shell asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import World, make_world
from typer.testing import CliRunner

from posttrain.cli.main import app


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
