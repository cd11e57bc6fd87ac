"""What `plan`, `run` and `lock` say of a run that cannot, or will probably not, come to a good end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import RUN, World, make_world

from posttrain import submit
from posttrain.app.workspace import open_workspace
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import InputError
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import StageState

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
    assert f"got {LEAST - 1}; raise it or lower steps, prompts_per_step or max_new_tokens of grpo" in line
    assert not (world.root / "run.lock.json").exists()


def test_a_budget_that_may_do_is_never_refused(world: World) -> None:
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST}}}\n")
    shown = world.ok("plan", "run.yaml")
    assert f"warning:  budget.tokens is {LEAST}, but the run may take up to about" in shown
    assert shown.splitlines()[-1] == "next:     posttrain run run.yaml", "what is not probable needs no change"
    assert world.json("plan", "run.yaml")["changes"] == []


def test_what_earlier_runs_took_is_held_against_the_budget(world: World) -> None:
    job = world.executor._on_launch

    def slow(spec: JobSpec) -> int | None:
        world.clock.sleep(1.0)  # fifty seconds
        return job(spec)

    world.executor._on_launch, world.executor._now = slow, world.clock.now
    world.ok("run", "run.yaml")
    for name, budget in (("tokens", "tokens: 700"), ("wall_clock", "wall_clock: 3")):
        world.write("run.yaml", RUN.replace("seed: 17", "seed: 18") + f"budget: {{{budget}}}\n")
        if name == "tokens":  # the scripted jobs spend less than any real one does
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("posttrain.preflight.outlook.certain_shortfall", lambda limit, least, kinds: None)
                shown = world.ok("plan", "run.yaml")
        else:
            shown = world.ok("plan", "run.yaml")
        assert f"warning:  budget.{name} is {budget.split()[1]}" in shown
        assert ("but according to earlier stages the run takes about 200 s" in shown) == (name == "wall_clock")
        last = shown.splitlines()[-1]
        assert f"raise budget.{name} to " in last
        assert " or lower steps" in last or " or give evaluate fewer items or samples" in last
        assert last.endswith("; then posttrain run run.yaml")


def test_a_run_says_its_warnings_before_it_begins(world: World) -> None:
    world.write("run.yaml", RUN + f"budget: {{tokens: {LEAST}}}\n")
    locked = world.ok("lock", "run.yaml").splitlines()
    assert locked[1].startswith("warning: budget.tokens")
    assert locked[-1] == "next: posttrain run run.lock.json"
    shown = world.ok("run", "run.yaml")
    assert shown.splitlines()[1].startswith(f"warning: budget.tokens is {LEAST}")
    assert "warning: budget.tokens" not in world.ok("run", "run.yaml"), "an attached run was warned of already"


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (
            GATE.replace("0.9", "0.99"),
            "at_least: 0.99 cannot be proven by 200 items at confidence 0.95, not even for a perfect model; "
            "give its suite 299 items or change at_least",
        ),
        (GATE.replace("0.9", "1.0"), "not even for a perfect model; change at_least"),
        (
            GATE.replace("}", ", min_items: 201}"),
            "requires min_items: 201 to be judged, but its suite has 200 items; add items or lower min_items",
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
    world.ship()
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
    shown = world.ok("plan", world.write("run.yaml", RUN + "budget: {tokens: 33}\n"))
    assert f"{world.newest()}/sft computes it now" in shown
    assert f"the run takes at least about {LEAST - 32}, so the run would stop at its budget, unless an active" in shown
    assert shown.splitlines()[-1] == "next:     posttrain run run.yaml"
    own = RUN.replace("model: sft, data", "model: base, data")  # of this one nothing comes from elsewhere but its sft
    assert "at least" in world("plan", world.write("own.yaml", own + f"budget: {{tokens: {LEAST - 33}}}\n")).stderr


def test_a_run_in_back_off_is_coming_too(world: World) -> None:
    """Its stage is ready, and will run again."""
    world.broken["sft"] = [-9]
    workspace = open_workspace(world.root)
    other = submit(world.root / world.write("other.yaml", RUN), workspace=workspace)
    driver = Reconciler(workspace.stores, workspace.jobs, "another")
    while not workspace.ledger.attempts(other.id) or workspace.ledger.stages(other.id)[0].state != StageState.READY:
        driver.tick(other.id)
    workspace.close()
    assert world("plan", world.write("run.yaml", RUN + "budget: {tokens: 33}\n")).exit_code == 0


@pytest.mark.slow
def test_two_stages_of_one_run_that_are_the_same_are_computed_once(world: World) -> None:
    twin = RUN.replace("  grpo:", "  sft2: {kind: sft, data: train, steps: 4, batch_size: 8}\n  grpo:")
    grpo = twin[twin.index("  grpo:") : twin.index("  evaluate:")]
    tuned = twin.replace(
        "  evaluate:", grpo.replace("grpo:", "grpo2:").replace("model: sft", "model: sft2") + "  evaluate:"
    )
    world.write("run.yaml", tuned + f"budget: {{tokens: {LEAST}}}\n")
    shown = world.ok("plan", "run.yaml")
    assert "the same as sft" in shown
    assert "the same as grpo" in shown
    assert world("plan", world.write("run.yaml", tuned + f"budget: {{tokens: {LEAST - 1}}}\n")).exit_code == 2
    world.write("run.yaml", tuned + "budget: {tokens: 5000}\n")
    with pytest.MonkeyPatch.context() as patch:  # and so it is: the scripted jobs spend less than any real one does
        patch.setattr("posttrain.preflight.outlook.certain_shortfall", lambda limit, least, kinds: None)
        world.ok("run", "run.yaml")
    assert {spec.name.split("-")[-2] for spec in world.executor.launched} & {"sft", "sft2"} != {"sft", "sft2"}
    assert len(world.executor.launched) == 3


@pytest.mark.slow
def test_the_days_that_a_run_was_stopped_are_no_job_time(world: World) -> None:
    world.executor._now = world.clock.now
    world.hold.add("sft")
    world("run", "run.yaml", "--timeout", "50")
    world.ok("stop", world.newest())
    world("wait", world.newest(), "--timeout", "5000")
    world.clock.sleep(3 * 86400 / 50)
    world.hold.clear()
    world.ok("run", "run.yaml")
    other = RUN.replace("seed: 17", "seed: 18") + "budget: {wall_clock: 2h}\n"
    shown = world.ok("plan", world.write("other.yaml", other))
    assert "budget.wall_clock" not in shown
    plan = world.json("plan", "other.yaml")
    assert plan["stages"][0]["estimate"]["history"] == 1
    assert plan["stages"][0]["estimate"]["seconds"] < 7200


@pytest.mark.slow
def test_a_history_of_short_answers_says_nothing_of_long_ones(world: World) -> None:
    """And what earlier stages took never hides what a stage spends at the least, or may spend at the most."""
    long = RUN.replace("max_new_tokens: 8", "max_new_tokens: 400").replace("seed: 17", "seed: 18")
    world.ok("run", "run.yaml")
    world.write("other.yaml", RUN.replace("seed: 17", "seed: 18") + "budget: {tokens: 7000}\n")
    stages = {s["name"]: s["estimate"] for s in world.json("plan", "other.yaml")["stages"]}
    assert stages["grpo"]["history"] == 1
    assert stages["grpo"]["tokens"] == 600
    assert "the run may take up to about" in world.ok("plan", "other.yaml")
    world.write("other.yaml", long + "budget: {tokens: 1e6}\n")
    assert {s["name"]: s["estimate"]["history"] for s in world.json("plan", "other.yaml")["stages"]}["grpo"] == 0
    assert "the run may take up to about" in world.ok("plan", "other.yaml")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A channel that is not empty. What is run here is rejected, and computed once."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("shipped"), patch)
        made.ship()
        yield made


@pytest.mark.parametrize(
    "by", [1e-9, 0.5, 0.9, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.05, 0.3, 0.5000001, 0.51, 0.7))]
)
def test_every_gain_that_may_be_asked_for_has_a_power(
    shipped: World, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    world = shipped
    monkeypatch.chdir(world.root)  # another test's world may have been made since
    world.write("run.yaml", better(by))
    assert re.search(r"power: +gate no-regression: \d+% on 200 items", world.ok("plan", "run.yaml"))
    world.ok("lock", "run.yaml")
    assert world("run", "run.yaml").exit_code == 3, "no model is better than itself"


def better(by: float) -> str:
    """A run that must be better than the last one."""
    rule = "not_worse_than: channel, margin: 0.04, if_channel_empty: pass"
    return RUN.replace("seed: 17", "seed: 3").replace(rule, f"better_than: channel, by: {by}")


def test_a_power_that_cannot_be_computed_stops_no_run_and_a_bug_is_not_hidden(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> float:
        raise error

    monkeypatch.setattr("posttrain.decision.power._rate_power", fails)
    error: Exception = FloatingPointError("no number")
    line = "gate accuracy: power unknown: FloatingPointError: no number; the gate still judges"
    shown = world.ok("plan", "run.yaml")
    assert f"warning:  {line}" in shown
    assert "power:    gate accuracy: unknown on 200 items" in shown
    assert f"warning: {line}" in world.ok("run", "run.yaml")
    error = AttributeError("a bug")
    assert world("plan", "run.yaml").exit_code == 1


@pytest.mark.slow
def test_a_lock_that_cannot_succeed_is_refused_in_another_workspace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written where what it costs was there already."""
    world.ship()
    world.ok("lock", world.write("small.yaml", RUN + "budget: {tokens: 10}\n"))
    world.ok("lock", world.write("enough.yaml", RUN + f"budget: {{tokens: {LEAST}}}\n"))
    (world.root / "other").mkdir()
    other = make_world(world.root / "other", monkeypatch)
    other.prepare()
    for name in ("small", "enough"):
        shutil.copy(world.root / f"{name}.lock.json", other.root)
    told = refused(other, "run", "small.lock.json")
    assert told.startswith(f"error: small.lock.json: budget.tokens must be at least {LEAST}")
    assert told.endswith(" in the run file, and lock it again")
    assert f"warning: budget.tokens is {LEAST}" in other.ok("run", "enough.lock.json")
    other.ok("run", "enough.lock.json")


def test_what_is_advised_may_be_declared(world: World) -> None:
    """Beyond the most of a field there is no advice to raise it; an evaluation has no steps."""
    huge = "{data: heldout, samples: 1000000, max_new_tokens: 100000000}"
    text = RUN.replace("{heldout: {data: heldout}}", f"{{heldout: {huge}}}").replace("suites: heldout", huge)
    line = refused(world, "plan", world.write("run.yaml", text + "budget: {tokens: 1e6}\n"))
    assert line.endswith("raise it or give evaluate fewer items or samples")
    world.write("run.yaml", text + "budget: {tokens: 9e15}\n")
    assert "the run may take up to about 2.0e16" in world.ok("plan", "run.yaml")


@pytest.mark.parametrize(
    ("alpha", "tokens", "most", "better"),
    [(0.05, 20, "0", "1"), (0.05, 40, "0.5", "0.5"), (0.05, 41, None, ""), (0.2, 4, "0", "5")],
)
def test_plan_warns_of_responses_that_are_too_short_for_a_length_adaptive_lambda(
    world: World, alpha: float, tokens: int, most: str | None, better: str
) -> None:
    vapo = f"kind: vapo, critic: {{warmup: 2}}, gae: {{alpha: {alpha}}}"
    world.write("run.yaml", RUN.replace("kind: grpo", vapo).replace("max_new_tokens: 8", f"max_new_tokens: {tokens}"))
    found = [line for line in world.json("plan", "run.yaml")["warnings"] if "gae.alpha" in line]
    line = (
        f"grpo: gae.alpha {alpha} makes λ {most} for responses of max_new_tokens ({tokens}) and lower for shorter "
        f"ones, so advantages are nearly one-step temporal differences; raise gae.alpha to about {better} (λ 0.95)"
    )
    assert found == ([line] if most else [])
