"""What the command line says of a stage that goes on from a checkpoint: its pace, its state, who trained the rest."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_world import RUN, World, make_world, train
from test_control_billing import write_checkpoint

from posttrain.app.workspace import Workspace
from posttrain.cli.live import LineDisplay, run_table
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure, JobOrder, JobResult, Metric, Progress, Span
from posttrain.domain.jobspec import JobSpec
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.views.status import RunWatcher

BEGAN = 1_000_000.0  # when the first attempt's steps were
LATER = BEGAN + 1000.0


@dataclass
class Trainee:
    """A GRPO job that says four steps, leaves a checkpoint and ends; what comes after it goes on from there."""

    world: World
    ends: str = "killed"  # killed | budget
    afterwards: str = "says"  # says | silent | finishes
    orders: list[JobOrder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.others = self.world.executor._on_launch
        self.world.executor._on_launch = self

    def __call__(self, spec: JobSpec) -> int | None:
        folder = AttemptFolder(spec.folder)
        order = folder.read_order()
        if order.kind != "grpo":
            return self.others(spec) if self.others else 0
        self.orders.append(order)
        if len(self.orders) == 1:
            self.say(folder, range(1, 5), BEGAN, 100)
            write_checkpoint(folder, 4, 400)
            if self.ends == "killed":
                return -9
            failure = Failure(FailureClass.BUDGET, "token budget must cover the next step", "budget")
            folder.write_result(JobResult("failed", tokens=400, failure=failure))
            return 0
        if self.afterwards == "finishes":
            train(folder, order)
        elif self.afterwards == "says":
            self.say(folder, range(5, 8), LATER, 10)
        return 0 if self.afterwards == "finishes" else None

    def say(self, folder: AttemptFolder, steps: range, at: float, tokens: int) -> None:
        """A step a second, each of so many tokens."""
        with EventWriter(folder) as sink:
            for done, step in enumerate(steps):
                sink(Span("rollout", step, at + done, 0.5))
                sink(Metric(step, {"reward/mean": 0.1}, at + done))
                sink(Progress(step, 60, "grpo", 400 + step * tokens, at + done))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def lines_of(world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What somebody reads who looks at the run for a minute."""
    workspace, moment = Workspace(world.root / ".posttrain"), [100.0]
    looking = SimpleNamespace(
        monotonic=lambda: moment[0], time=time.time, strftime=time.strftime, localtime=time.localtime
    )
    monkeypatch.setattr("posttrain.cli.live.time", looking)
    run = workspace.ledger.run(world.newest())
    capsys.readouterr()
    display = LineDisplay(RunWatcher(workspace, run.id))
    for _ in range(20):
        moment[0] += 3
        display(run)
    workspace.close()
    return [line for line in capsys.readouterr().out.splitlines() if re.search(r" grpo \d+/", line)]


def test_a_resumed_job_is_as_fast_as_it_is_itself(world: World) -> None:
    """Not as fast as the one before it, nor as slow as the time between them."""
    Trainee(world)
    world("run", "run.yaml", "--timeout", "600")
    assert "step 7/60  eta 53s" in world.ok("get", "sort")
    workspace = Workspace(world.root / ".posttrain")
    progress = RunWatcher(workspace, world.newest()).read().stages[1].progress
    assert (progress.tokens_per_second, progress.eta, progress.stale) == (10.0, 53.0, False)
    workspace.close()


def test_what_was_said_before_a_restart_is_not_said_again(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainee(world, afterwards="silent")
    world("run", "run.yaml", "--timeout", "600")
    assert "grpo  starting" in world.ok("get", "sort")
    assert world.json("get", "sort")["stages"][1]["step"] == 4
    workspace = Workspace(world.root / ".posttrain")
    table = run_table(RunWatcher(workspace, world.newest()).read(), 140)
    assert "starting" in str([cell for column in table.renderables[1].columns for cell in column.cells])  # type: ignore[attr-defined]
    workspace.close()
    assert lines_of(world, capsys, monkeypatch) == []


def test_what_has_not_changed_is_said_once(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainee(world)
    world("run", "run.yaml", "--timeout", "600")
    (line,) = lines_of(world, capsys, monkeypatch)
    assert "grpo 7/60 reward 0.1 10 tok/s eta 53s" in line


@pytest.mark.slow
def test_a_stage_that_went_on_from_another_run_says_where_its_first_steps_are(world: World) -> None:
    job = Trainee(world, ends="budget", afterwards="finishes")
    world.write("run.yaml", RUN + "budget: {tokens: 7000}\n")
    assert world("run", "run.yaml").exit_code == 7
    first = world.newest()
    world.write("run.yaml", RUN + "budget: {tokens: 8000}\n")
    world.ok("run", "run.yaml")
    second = world.newest()
    assert (job.orders[1].resumed_from, job.orders[1].resumed_step) == (f"{first}/grpo", 4)
    words = f"steps 1-4 were trained in {first}/grpo"
    for verb in ("get", "why"):
        assert words in world.ok(verb, second)
        assert "were trained in" not in world(verb, first).stdout
    assert {s["name"]: s["begun"] for s in world.json("get", second)["stages"]}["grpo"] == words
    folder = world.root / ".posttrain" / "runs" / second
    assert f"grpo: {words}; the curves and the trace begin after these steps" in (folder / "report.html").read_text()
    job.say(AttemptFolder(folder / "grpo" / "001"), range(5, 7), LATER, 10)
    assert f"note:   grpo: {words}" in world.ok("trace", second, "--out", "traces")
    assert words in (world.root / "traces" / f"{second}-trace.html").read_text()
    assert world.json("trace", second, "--out", "traces")["begun"] == [f"grpo: {words}"]


def test_a_retry_of_its_own_run_says_nothing_of_others(world: World) -> None:
    Trainee(world, afterwards="finishes")
    world.ok("run", "run.yaml")
    assert "were trained in" not in world.ok("get", "sort")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_history_of_a_resumed_stage_is_what_its_result_took(world: World, elsewhere: bool) -> None:
    """What its checkpoint brought along too; how long that took is not known where another run trained it."""
    Trainee(world, ends="budget" if elsewhere else "killed", afterwards="finishes")
    if elsewhere:
        world.write("run.yaml", RUN + "budget: {tokens: 7000}\n")
        assert world("run", "run.yaml").exit_code == 7
        world.write("run.yaml", RUN + "budget: {tokens: 8000}\n")
    world.ok("run", "run.yaml")
    attempts = [one for one in world.json("get", "sort")["stages"] if one["name"] == "grpo"]
    assert attempts[0]["state"] == "succeeded"
    world.write("run.yaml", RUN.replace("seed: 17", "seed: 5"))
    grpo = {one["name"]: one["estimate"] for one in world.json("plan", "run.yaml")["stages"]}["grpo"]
    assert (grpo["history"], grpo["tokens"]) == (1, 600)
    assert (grpo["seconds"] is None) == elsewhere
