"""What `plan`, `run` and `lock` say of a run that cannot, or will probably not, come to a good end."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import RUN, World, make_world

from posttrain.app.runs import submit
from posttrain.app.workspace import open_workspace
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobSpec

# sft: 4 steps of 8 documents; grpo: 5 steps of 32 prompts and 256 samples, and the room its sixth may need at the most;
# evaluate: 200 items, read and answered
LEAST = 32 + 5 * (32 + 256) + (32 + 256 * 8) + (256 + 256 * 8) + 200
GATE = "{name: accuracy, metric: heldout/accuracy, at_least: 0.9}"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A workspace with data, model, reward and run file."""
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def refused(world: World, *words: str) -> str:
    """The one line of a command that must be refused, with nothing submitted and nothing to run next."""
    result = world(*words)
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.splitlines()
    assert not result.stdout
    assert world.json("ls")["runs"] == []
    return str(line)


@pytest.mark.parametrize("verb", ["plan", "run", "lock"])
def test_a_budget_below_what_is_spent_at_the_least_is_refused(world: World, verb: str) -> None:
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST - 1}}}\n")
    line = refused(world, verb, "run.yaml")
    assert line.startswith(f"error: run.yaml: budget.tokens must be at least {LEAST}")
    assert f"got {LEAST - 1}; raise it or lower the steps of grpo" in line
    assert not (world.root / "run.lock.json").exists()


def test_a_budget_that_may_do_is_never_refused(world: World) -> None:
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST}}}\n")
    shown = world.ok("plan", "run.yaml")
    assert f"warning:  budget.tokens is {LEAST}, and the run may take up to about" in shown
    last = shown.splitlines()[-1]
    assert last.startswith("next:     raise budget.tokens to ")
    assert last.endswith(", or leave it; then posttrain run run.yaml")
    assert world.json("plan", "run.yaml")["changes"] == [last.removeprefix("next:     ").partition("; then ")[0]]


def test_what_earlier_runs_took_is_held_against_the_budget(world: World) -> None:
    job = world.executor._on_launch

    def slow(spec: JobSpec) -> int | None:
        world.clock.sleep(1.0)  # fifty seconds
        return job(spec)

    world.executor._on_launch = slow
    world.ok("run", "run.yaml")
    for name, budget in (("tokens", "tokens: 700"), ("wall_clock", "wall_clock: 3")):
        world.write("run.yaml", RUN.replace("seed: 17", "seed: 18") + f"budget: {{{budget}}}\n")
        if name == "tokens":  # the scripted jobs spend less than any real one does
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("posttrain.app.outlook.certain_shortfall", lambda limit, least: None)
                shown = world.ok("plan", "run.yaml")
        else:
            shown = world.ok("plan", "run.yaml")
        assert f"warning:  budget.{name} is {budget.split()[1]}" in shown
        assert "and by earlier stages the run takes about" in shown
        last = shown.splitlines()[-1]
        assert f"raise budget.{name} to " in last
        assert last.endswith(" or lower steps; then posttrain run run.yaml")


def test_a_run_says_its_warnings_before_it_begins(world: World) -> None:
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST}}}\n")
    locked = world.ok("lock", "run.yaml").splitlines()
    assert locked[1].startswith("warning: budget.tokens")
    assert locked[-1].startswith("next: raise budget.tokens to ")
    assert locked[-1].endswith("or leave it and lock again; then posttrain run run.lock.json")
    shown = world.ok("run", "run.yaml")
    assert shown.splitlines()[1].startswith(f"warning: budget.tokens is {LEAST}")
    assert "warning: budget.tokens" not in world.ok("run", "run.yaml"), "an attached run was warned of already"


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (
            GATE.replace("0.9", "0.99"),
            "at_least: 0.99 cannot be proven by 200 items at confidence 0.95, not even of a perfect model; "
            "give its suite 299 items or change at_least",
        ),
        (GATE.replace("0.9", "1.0"), "not even of a perfect model; change at_least"),
        (
            GATE.replace("}", ", min_items: 201}"),
            "needs min_items: 201 to be judged, its suite has 200; add items or lower min_items",
        ),
        (
            "{name: accuracy, metric: heldout/response_tokens, at_most: 1.001}",
            None,  # the limit of a mean is drawn, so what is close is left to the gate
        ),
        (
            "{name: accuracy, metric: heldout/accuracy, at_most: 0.001}",
            "at_most: 0.001 cannot be proven by 200 items at confidence 0.95",
        ),
    ],
)
def test_a_gate_that_not_even_a_perfect_model_passes_is_refused(world: World, gate: str, line: str | None) -> None:
    world.write("run.yaml", RUN.replace(GATE, gate))
    if line is None:
        world.ok("plan", "run.yaml")
        return
    for verb in ("plan", "run", "lock"):
        told = refused(world, verb, "run.yaml")
        assert told.startswith("error: run.yaml: gates.accuracy: ")
        assert line in told


def test_a_gate_that_would_turn_away_a_good_model_says_what_to_change_first(world: World) -> None:
    world.write("run.yaml", RUN.replace(GATE, GATE.replace("0.9", "0.98")))
    shown = world.ok("plan", "run.yaml")
    assert "warning:  gate accuracy passes a good model only" in shown
    last = shown.splitlines()[-1]
    assert last.startswith("next:     give the suite of gate accuracy ")
    assert last.endswith(" items; then posttrain run run.yaml")


def test_an_empty_channel_that_fails_the_gate_is_said_first(world: World) -> None:
    """Another run may fill the channel meanwhile, so this is no refusal."""
    world.write("run.yaml", RUN.replace("if_channel_empty: pass", "if_channel_empty: fail"))
    shown = world.ok("plan", "run.yaml")
    assert "cannot pass: the channel is empty" in shown
    assert shown.splitlines()[-1].startswith(
        "next:     release a model to the channel, or set if_channel_empty: pass in gate no-regression; then "
    )


def test_what_was_submitted_before_is_attached_to_and_cached_stages_cost_nothing(world: World) -> None:
    world.ok("run", "run.yaml")
    world.write("run.yaml", RUN + "budget: {tokens: 10}\n")
    world.ok("plan", "run.yaml")  # every stage comes from the cache
    world.ok("run", "run.yaml")
    workspace = open_workspace(world.root)
    with pytest.raises(InputError, match=r"budget\.tokens must be at least"):
        submit(world.root / "run.yaml", workspace=workspace, seed=18)
    assert submit(world.root / "run.yaml", workspace=workspace).attached
    workspace.close()


def test_what_another_run_computes_now_is_not_counted(world: World) -> None:
    """It will be reused."""
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST - 1}}}\n")
    refused(world, "plan", "run.yaml")
    world.hold.add("sft")
    world.write("other.yaml", RUN)
    world("run", "other.yaml", "--timeout", "60")
    assert world("plan", "run.yaml").exit_code == 0
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST - 33}}}\n")
    assert world("plan", "run.yaml").exit_code == 2
