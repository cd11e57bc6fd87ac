"""The live display: the table at several widths, the lines for pipes, and the small words of the command line."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from cli_world import World, make_world, train
from rich.console import Console

from posttrain.app.workspace import Workspace
from posttrain.cli.console import ago, count, duration, glyph
from posttrain.cli.live import LineDisplay, TableDisplay, run_table
from posttrain.domain.jobs import JobOrder, Metric, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import RunState
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.views.status import RunStatus, RunWatcher, read_status


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that was made, and one that waits for its evaluation."""
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.hold.add("evaluate")
    made("run", "run.yaml", "--timeout", "60")
    return made


def drawn(workspace: Workspace, run: str, width: int) -> str:
    """The table as text."""
    screen = Console(file=io.StringIO(), width=width, force_terminal=False)
    screen.print(run_table(RunWatcher(workspace, run).read(), width))
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_shows_every_stage_and_fits(world: World) -> None:
    run = world.newest()
    workspace = Workspace(world.root / ".posttrain")
    wide = drawn(workspace, run, 140)
    for words in ("sft", "grpo", "evaluate", "release", "reward", "probe", "length", "loss", "6/6", "almost there"):
        assert words in wide
    assert "waits for evaluate" in wide
    for width in (60, 80, 100):
        lines = drawn(workspace, run, width).splitlines()
        assert all(len(line) <= width for line in lines)
        assert any("evaluate" in line for line in lines)
    assert "loss" not in drawn(workspace, run, 80)
    workspace.close()


@pytest.mark.slow
def test_what_has_ended_has_no_time_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it ended early, and the view of a run that has ended offers no Ctrl-C."""
    world = make_world(tmp_path, monkeypatch)
    world.prepare()

    def early(folder: AttemptFolder, order: JobOrder) -> None:
        train(folder, order)
        with EventWriter(folder) as sink:
            sink(Progress(3, 6, order.kind, 300, 1000.0))
            sink(Progress(4, 6, order.kind, 400, 1001.0))

    monkeypatch.setattr("cli_world.train", early)
    world.hold.add("evaluate")
    world("run", "run.yaml", "--timeout", "60")
    workspace = Workspace(world.root / ".posttrain")
    assert "Ctrl-C leaves it running" in drawn(workspace, world.newest(), 100)
    world.hold.clear()
    shown = world.ok("run", "run.yaml", "--seed", "3")
    assert re.search(r" grpo succeeded; \d+s; 4/6 ", shown)
    assert "eta" not in shown
    assert "eta" not in world.ok("get", world.newest())
    assert "Ctrl-C" not in drawn(workspace, world.newest(), 100)
    workspace.close()


def test_a_running_job_at_its_last_step_has_no_time_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()

    def last(spec: JobSpec) -> int | None:
        with EventWriter(AttemptFolder(spec.folder)) as sink:
            sink(Progress(3, 4, "sft", 300, 1000.0))
            sink(Progress(4, 4, "sft", 400, 1001.0))
        return None

    world.executor._on_launch = last
    world("run", "run.yaml", "--timeout", "60")
    shown = world.ok("get", "sort")
    assert "sft  running  step 4/4" in shown
    assert "eta" not in shown


def test_a_step_without_an_update_shows_no_loss_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    updated = {"reward/mean": 0.5, "updates": 1.0, "loss": 0.25, "grad_norm": 2.0}

    def some(folder: AttemptFolder, order: JobOrder) -> None:
        train(folder, order)
        with EventWriter(folder) as sink:
            sink(Metric(7, {"probe/accuracy": 0.75}, 1000.0))
            sink(Metric(7, updated, 1000.5))
            sink(Metric(8, {"reward/mean": 0.125, "updates": 0.0}, 1001.0))
            sink(Progress(8, 8, order.kind, 400, 1001.0))

    monkeypatch.setattr("cli_world.train", some)
    shown = world.ok("run", "run.yaml", "--seed", "3")
    assert re.search(r" grpo succeeded; \d+s; 8/8 reward 0.125 probe 0.75 no update in step 8", shown)


def test_redrawing_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(world.root / ".posttrain")
    watcher = RunWatcher(workspace, world.newest())
    reads, moment = [], [100.0]
    monkeypatch.setattr(watcher, "read", lambda: reads.append(1) or RunWatcher(workspace, world.newest()).read())
    monkeypatch.setattr("posttrain.cli.live.time", SimpleNamespace(monotonic=lambda: moment[0], time=time.time))
    record = workspace.ledger.runs()[0]
    display = TableDisplay(watcher)
    with display.live:
        for look in range(50):
            moment[0] = 100.0 + look / 100
            display(record)
    assert len(reads) == 4, "eight times a second at the most"
    workspace.close()


def test_lines_are_read_seldom_while_nothing_changes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(world.root / ".posttrain")
    watcher = RunWatcher(workspace, world.newest())
    status, reads, moment = watcher.read(), list[float](), [100.0]

    def read() -> RunStatus:
        reads.append(moment[0])
        moved = [replace(one, record=replace(one.record, message="another")) for one in status.stages]
        return status if moment[0] < 105 else replace(status, stages=tuple(moved))

    monkeypatch.setattr(watcher, "read", read)
    monkeypatch.setattr("posttrain.cli.live.time", Mock(wraps=time, monotonic=lambda: moment[0]))
    display, run = LineDisplay(watcher), replace(status.run, state=RunState.RUNNING)
    for look in range(1000):
        moment[0] = 100 + look / 100
        display(run)
    seen = next(at for at in reads if at >= 105)  # the second change
    for change, until in ((100.0, 105.0), (seen, 110.0)):
        assert sum(change <= at < change + 1 for at in reads) == 8, "a change is often followed by another one"
        assert sum(change + 1.5 <= at < until for at in reads) <= 1 + 2.5 * (until - change - 1.5), reads
    workspace.close()


def test_lines_tell_a_change_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace(world.root / ".posttrain")
    run = workspace.ledger.run(world.newest())
    capsys.readouterr()
    display = LineDisplay(RunWatcher(workspace, run.id))
    for _ in range(5):
        display._looked = 0.0
        display(run)
    lines = capsys.readouterr().out.splitlines()
    assert sum(" grpo succeeded" in line for line in lines) == 1
    assert sum("note: almost there" in line for line in lines) == 2
    assert not any(" gate " in line for line in lines)
    workspace.close()


def test_what_ended_before_somebody_attached_is_told_with_its_own_time(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(world.root / ".posttrain")
    run = workspace.ledger.run(world.newest())
    stages = {stage.name: stage for stage in workspace.ledger.stages(run.id)}
    said = next(e.at for e in workspace.ledger.events(subject_prefix=f"{run.id}/evaluate") if e.kind == "stage.running")
    note = next(note for note in read_status(workspace, run.id).stages[1].progress.notes)
    later = time.time() + 3 * 86400
    monkeypatch.setattr("posttrain.cli.live.time.time", lambda: later)
    LineDisplay(RunWatcher(workspace, run.id))(run)
    lines = capsys.readouterr().out.splitlines()
    for moment, words in (
        (stages["grpo"].finished_at, "grpo succeeded; "),
        (note.at, "grpo note: almost there"),
        (said, "evaluate starting; attempt 1"),
        (stages["baseline-evaluate"].finished_at, "baseline-evaluate skipped; channel prod has no release yet"),
    ):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        assert any(line.startswith(f"{stamp} {words}") for line in lines), (stamp, words, lines)
    workspace.close()


def test_seconds_are_those_in_which_a_job_ran(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(world.root / ".posttrain")
    run, clock = world.newest(), workspace.ledger.clock
    launched = next(a.launched_at for a in workspace.ledger.attempts(run, "evaluate"))
    monkeypatch.setattr(type(clock), "now", lambda self: float(launched or 0.0) + 7.0)
    seconds = {stage.record.name: stage.seconds for stage in read_status(workspace, run).stages}
    [trained] = workspace.ledger.attempts(run, "grpo")
    assert 0 < seconds["grpo"] == trained.seconds, "as its executor measured"
    assert seconds["evaluate"] == pytest.approx(7.0), "it still runs"
    assert seconds["release"] == 0.0
    workspace.close()


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (7, "7"), (999, "999"), (41_000, "41k"), (3_200_000, "3.2M"), (float("nan"), "-")]
)
def test_counts(value: float | None, words: str) -> None:
    assert count(value) == words


@pytest.mark.parametrize(("value", "words"), [(None, "-"), (6.2, "6s"), (125, "2m05s"), (12000, "3h20m"), (-1, "0s")])
def test_durations(value: float | None, words: str) -> None:
    assert duration(value) == words


def test_moments_in_the_past_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.cli.console.time.time", lambda: 1000.0)
    assert ago(1000.0) == "just now"
    assert ago(820.0) == "3 minutes ago"
    assert ago(999.0) == "1 second ago"


def test_glyphs_fall_back_to_ascii() -> None:
    assert glyph("succeeded", "utf-8") == "✔"
    assert glyph("succeeded", "ascii") == "+"
