"""Nothing that a file or a job says commands the terminal it is shown on."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_world import RUN, World, make_world
from hypothesis import given, strategies as st
from rich.console import Console

from posttrain.app.workspace import Workspace
from posttrain.cli.console import console, excerpt, harmless
from posttrain.cli.releases import _tree
from posttrain.cli.screens import run_tree
from posttrain.control.lineage import run_lineage
from posttrain.views.status import read_status

ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[31mred\x9b1A\u202egnp\x7f"  # clipboard, wipe, colour, C1, right to left
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def quiet(text: str) -> str:
    found = COMMANDS.search(text)
    assert found is None, (found, text)
    return text


def test_what_a_job_and_a_file_say_is_shown_as_pictures(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write("guide.txt", ESCAPE)
    job = world._job

    def loud(spec: object) -> int | None:
        code = job(spec)  # type: ignore[arg-type]
        for log in (world.root / ".posttrain" / "runs").rglob("log.txt"):
            log.write_text(f"before {ESCAPE}\rover\r\nafter\n")
        return code

    world.executor._on_launch = loud
    world.ok("asset", "add", "reward:loud", "reward.py", "--guideline", "guide.txt")
    quiet(world.ok("run", "run.yaml"))
    shown = quiet(world.ok("logs", "sort"))
    assert "␛" in shown
    assert "\nover\nafter\n" in shown, "lines stay lines"
    for words in (("ls",), ("get", "sort"), ("why", "sort"), ("lineage", "sort"), ("lineage", "prod")):
        quiet(world.ok(*words))
    for words in (("get", "sort"), ("lineage", "sort"), ("asset", "get", "reward:loud"), ("logs", "sort")):
        quiet(world.ok(*words))
        text = quiet(world.ok(*words, "-o", "json"))
        json.loads(text)
    assert json.loads(world.ok("asset", "get", "reward:loud", "-o", "json"))["meta"]["guideline"] == ESCAPE


def test_errors_and_usage_errors_too(world: World) -> None:
    world.write("bad.yaml", RUN.replace("steps: 4", f"steps: {json.dumps(ESCAPE)}"))
    world.write("owner.yaml", RUN.replace("owner: ada", f"owner: {json.dumps(ESCAPE)}"))
    for words in (
        ("plan", "bad.yaml"),
        ("plan", "owner.yaml"),
        ("get", ESCAPE),
        (ESCAPE,),
        ("asset", "ls", ESCAPE),
        ("ls", f"--{ESCAPE}"),
    ):
        result = world(*words)
        assert result.exit_code == 2
        quiet(result.stderr)


@given(st.text())
def test_any_text_is_harmless_and_keeps_its_lines(text: str) -> None:
    shown = harmless(text)
    assert COMMANDS.search(shown) is None
    assert len(shown) == len(text)
    assert harmless(shown) == shown
    assert shown.count("\n") == text.count("\n")
    shown.encode()


def test_a_table_draws_nothing_that_its_cells_say(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("a")
    table.add_row(Text(f"x{ESCAPE}y"))
    screen = console()
    screen.print(table, Text(ESCAPE), ESCAPE)
    quiet(capsys.readouterr().out)


@pytest.mark.slow
def test_trees_are_whole_in_a_pipe_and_end_with_an_ellipsis_on_a_terminal(world: World) -> None:
    guideline = "Words that a person wrote. " * 20
    world.write("long.py", f'"""{guideline.strip()}"""\n\n\ndef score(completion, answer):\n    return 1.0\n')
    world.ok("asset", "add", "reward:sort", "long.py")
    world.ok("run", "run.yaml")
    run = world.newest()
    assert guideline.strip() in world.ok("lineage", "prod")
    assert guideline.strip() in world.ok("lineage", run)
    world.broken["sft"] = [1] * 9
    message = "the job ended without a result (exit code 1); the same failure twice in a row"
    world("run", "run.yaml", "--seed", "18")
    failed = world.newest()
    for verb in ("get", "why"):
        shown = world(verb, failed).stdout
        (line,) = [line for line in shown.splitlines() if " sft  failed" in line]
        assert line.endswith(f"{message}  next: posttrain logs {failed} sft; then posttrain retry {failed}")
    assert "…" not in world.ok("plan", "run.yaml", "--seed", "19")

    workspace = Workspace(world.root / ".posttrain")
    screen = Console(file=io.StringIO(), width=70, force_terminal=False)
    screen.print(run_tree(read_status(workspace, failed)))
    screen.print(_tree(run_lineage(workspace.stores, run)))
    workspace.close()
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line) for line in lines) == 70
    assert all(line.endswith("…") for line in lines if len(line) == 70)
    assert any(" sft  failed" in line and line.endswith("…") for line in lines)
    assert any("reward:sort@2" in line and line.endswith("…") for line in lines)


@pytest.mark.slow
def test_texts_are_whole_in_a_pipe_and_cut_on_a_terminal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `diff` and `trace --samples` show them."""
    guideline = ("Words that a person wrote. " * 20).strip()
    world.ok("run", "run.yaml")
    first = world.newest()
    world.write("long.py", f'"""{guideline}"""\n\n\ndef score(completion, answer):\n    return 0.99\n')
    world.ok("asset", "add", "reward:sort", "long.py")
    world("run", "run.yaml")
    assert guideline in world.ok("diff", first, world.newest())
    assert excerpt("a  b\nc", 3) == "a b c"
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert excerpt("a  b\nc", 3) == "a …"
    assert excerpt("a  b\nc", 5) == "a b c"
