"""What a person reads on a terminal of 80 and of 60 columns: no id, digest or number is cut or goes over two lines."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from cli_world import BAD_REWARD, RUN, World, make_world
from rich.console import Console

from posttrain.cli.main import app
from posttrain.cli.screens import Column, Grid

EVALUATE = "  evaluate: {kind: evaluate, model: grpo, suites: {heldout: {data: heldout}}}\n"
BASE = "  base-eval: {kind: evaluate, model: base, suites: {heldout: {data: heldout}}}\n"
SFT = "  sft-eval: {kind: evaluate, model: sft, suites: {heldout: {data: heldout}}}\n"
NAME = "sorting-of-short-lists"
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

Terminal = Callable[..., str]


class Screen(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str, str]]:
    """A run that ships and one that its gates reject, in a workspace that is only read from then on."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("widths"), patch)
        world.prepare()
        world.write("run.yaml", RUN.replace("name: sort", f"name: {NAME}").replace(EVALUATE, BASE + SFT + EVALUATE))
        world.ok("run", "run.yaml")
        good = world.newest()
        world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
        assert world("run", "run.yaml").exit_code == 3
        yield world, good, world.newest()


@pytest.fixture(params=[80, 60])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Runs a command on a terminal so wide; its text."""

    def run(width: int, *words: str) -> str:
        screen = Screen()
        with monkeypatch.context() as patch:
            for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdout", screen)
            app(list(words), standalone_mode=False)
        return CODES.sub("", screen.getvalue()).replace("\r", "\n")

    return partial(run, request.param)


def test_ls_keeps_ids_whole_and_what_succeeded_asks_for_nothing(
    story: tuple[World, str, str], terminal: Terminal
) -> None:
    _, good, bad = story
    text = terminal("ls")
    assert "…" not in text.replace("(look 4…", ""), "but for the end of a sentence of 200 characters"
    assert re.search(rf"✔  {good}  succeeded", text)
    assert re.search(rf"✘  {bad}  rejected", text)
    assert "lineage" not in text
    assert re.search(rf"posttrain why\s+{bad}", text)
    assert "2 of 2 gates failed" in " ".join(text.split()), "the reason of the other one"


def test_the_pipe_has_the_table(story: tuple[World, str, str]) -> None:
    world, good, _ = story
    head, *rows = world.ok("ls").splitlines()
    assert head.split() == ["run", "state", "submitted", "took", "reason", "next", "action"]
    assert next(row for row in rows if good in row).rstrip().endswith("Succeeded")


def test_scores_are_whole(story: tuple[World, str, str], terminal: Terminal) -> None:
    world, good, _ = story
    numbers = re.findall(r"[-+]?\d\.\d+ \[[^\]]+\]", world.ok("get", good))
    assert len(numbers) >= 6
    for words in (("get", good), ("why", good)):
        text = terminal(*words)
        assert not [number for number in numbers if number not in text]
        assert "before: base model:tiny@1" in " ".join(text.split())


def test_a_comparison_is_whole(story: tuple[World, str, str], terminal: Terminal) -> None:
    world, good, bad = story
    numbers = re.findall(r"[-+]?\d\.\d+ \[[^\]]+\]", world.ok("compare", good, bad))
    assert len(numbers) == 3
    text = terminal("compare", good, bad)
    assert "…" not in text
    assert not [number for number in numbers if number not in text]
    assert "reward:sort@2" in text
    for words in ("won 0", "lost 136", "tied 64") if "won 0" in text else ("0   136    64",):
        assert words in text


def test_the_stages_of_an_ended_run_are_whole(story: tuple[World, str, str], terminal: Terminal) -> None:
    """As `run` tells them to who attaches."""
    world, good, _ = story
    text = terminal("attach", good)
    for stage in world.json("get", good)["stages"]:
        assert stage["name"] in text
        for name in ("model", "metrics", "report"):
            made = stage["outputs"].get(name) if name == "model" or "model" not in stage["outputs"] else None
            assert made is None or name == "metrics" or made["digest"][:19] in text
    history = terminal("get", "prod")
    assert world.json("get", "prod")["live"][:19] in history
    assert good in history


def drawn(grid: Grid, width: int) -> list[str]:
    """Its lines, without the spaces at their ends."""
    screen = Console(file=io.StringIO(), width=width, force_terminal=False)
    screen.print(grid)
    return [line.rstrip() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_grid_leaves_out_wraps_and_then_stacks() -> None:
    grid = Grid(
        [Column("run"), Column("kind", spare=True), Column("n", right=True), Column("why", wraps=True), Column("x")]
    )
    grid.row("sort-1", "grpo", "12", "it went well and nobody knows the reason", "")
    assert drawn(grid, 100) == [
        "run     kind   n  why",
        "sort-1  grpo  12  it went well and nobody knows the reason",
    ]
    assert drawn(grid, 40) == [
        "run     kind   n  why",
        "sort-1  grpo  12  it went well and",
        "                  nobody knows the",
        "                  reason",
    ]
    assert drawn(grid, 30) == [
        "run      n  why",
        "sort-1  12  it went well and",
        "            nobody knows the",
        "            reason",
    ]
    assert drawn(grid, 20) == [
        "sort-1",
        "  kind grpo  n 12",
        "  why it went well",
        "  and nobody knows",
        "  the reason",
    ]
    assert drawn(Grid([Column("a")]), 20) == []


@pytest.mark.slow
def test_a_sweep_says_the_last_part_of_a_path_and_what_varies(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    world = make_world(tmp_path_factory.mktemp("sweep"), monkeypatch)
    world.prepare()
    words = ["sweep", "run.yaml", "--set", "grpo.optimizer.learning_rate=1e-4,3e-4", "--set", "sft.steps=4"]
    piped = world.ok(*words).splitlines()
    (head,) = [line for line in piped if line.startswith("rank")]
    assert head.split() == ["rank", "learning_rate", "heldout/accuracy", "↑", "from", "the", "best"]
    assert "all: sft.steps 4" in piped
    numbers = re.findall(r"[-+]?[\d.]+ \[[^\]]+\]", "\n".join(piped))
    assert len(numbers) >= 3
    shown = terminal(*words)
    shown = shown[shown.index("heldout/accuracy ↑") :]  # below what is redrawn while runs are driven
    assert "…" not in shown
    assert not [number for number in numbers if number not in shown]
    assert re.search(r"(?m)^all: sft\.steps 4$", shown)
    both = world.ok("sweep", "run.yaml", "--set", "sft.steps=4,5", "--set", "grpo.steps=5,6")
    (head,) = [line for line in both.splitlines() if line.startswith("rank")]
    assert head.split()[1:3] == ["sft.steps", "grpo.steps"], "where the last part does not tell them apart"
