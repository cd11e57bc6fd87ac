"""The best model by the probe as a base, a baseline, a release and a model to take out; what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN, World, make_world, train

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.manifest import model_output
from posttrain.store.attempts import AttemptFolder

PROBE = "probe: {data: tune, every: 2, items: 8}"
BEST = (
    RUN.replace("data: {train", "data: {tune: dataset:tune, train")
    .replace("probe: {data: heldout, every: 2, items: 8}", f"{PROBE}, keep_best: true, early_stopping: {{patience: 1}}")
    .replace("evaluate, model: grpo", "evaluate, model: grpo/best")
    .replace("release: {channel: prod, model: grpo}", "release: {channel: prod, model: grpo/best}")
    .replace("at_least: 0.9", "at_least: 0.8")
)
BAD_REWARD = '"""Half."""\n\n\ndef score(completion, answer):\n    return 0.7\n'


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.ok(
        "asset", "add", "reward:sort", made.write("reward.py", BAD_REWARD)
    )  # the last model is right on 0.7, the best on 0.9
    rows = [{"prompt": f"Q: tune {i}", "answer": str(i)} for i in range(40)]
    made.write("tune.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    made.ok("asset", "add", "dataset:tune", "tune.jsonl")
    return made


def outputs(world: World, run: str = "sort") -> dict[str, Any]:
    return {s["name"]: s["outputs"] for s in world.json("get", run)["stages"]}


def test_words() -> None:
    assert [model_output(word) for word in ("grpo", "grpo/best")] == [("grpo", "model"), ("grpo", "best")]
    for word in ("grpo/bestial", "grpo/best/", "grpo/best/x", "grpo/", "grpo/last", "a/b/best"):
        with pytest.raises(InputError, match="must be named STAGE or STAGE/best, got "):
            model_output(word)


GATE = "- {name: better, metric: heldout/accuracy, better_than: sft/bestial}"


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("stages.evaluate.model", ("evaluate, model: grpo/best", "evaluate, model: grpo/bestial")),
        ("stages.grpo.model", ("{kind: grpo, model: sft", "{kind: grpo, model: sft/bestial")),
        ("release.model", ("prod, model: grpo/best", "prod, model: grpo/bestial")),
        ("gates.better.better_than", ("gates:\n", f"gates:\n  {GATE}\n")),
    ],
)
def test_what_only_begins_like_the_best_model_is_refused(world: World, place: str, change: tuple[str, str]) -> None:
    assert change[0] in BEST
    world.write("run.yaml", BEST.replace(*change))
    refused = world("plan", "run.yaml")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert f"{place}: a stage's model must be named STAGE or STAGE/best, got " in refused.stderr
    assert "/bestial' (did you mean '" in refused.stderr
    assert "/best'?)" in refused.stderr


@pytest.mark.slow
def test_the_best_model_is_judged_and_released_and_everything_names_it(world: World) -> None:
    world.write("run.yaml", BEST)
    assert "model: stage grpo/best" in world.ok("plan", "run.yaml")
    shown = world.ok("run", "run.yaml")
    assert "stopped early at step 4 of 6" in shown
    best = outputs(world)["grpo"]["best"]["digest"]
    assert world.json("get", "prod")["live"] == best
    got = world.ok("get", "sort")
    assert "best: probe/accuracy 0.875 at step 2; stopped early at step 4" in got
    assert "heldout/accuracy  (stage grpo/best)" in got
    assert next(s for s in world.json("get", "sort")["stages"] if s["name"] == "grpo")["message"].startswith(
        "stopped early"
    )
    nodes = world.ok("lineage", "prod")
    assert "/grpo/best" in nodes
    assert "best by its probe: probe/accuracy 0.875 at step 2" in " ".join(nodes.split())
    card = Path(world.root / "out")
    world.ok("export", "prod", str(card))
    text = (card / "README.md").read_text()
    assert (
        "This is the best model of its stage by the probe (probe/accuracy 0.875 at step 2), not the last model." in text
    )
    assert "/grpo/best`" in text
    assert json.loads((card / "lineage.json").read_text())["model"]["output"] == "best"
    world.ok("get", "sort", "--report")
    page = next((world.root / ".posttrain" / "runs").rglob("report.html")).read_text()
    assert "best: probe/accuracy 0.875 at step 2; stopped early at step 4" in page
    assert ">best</text>" in page
    assert ">stopped</text>" in page


@pytest.mark.slow
def test_a_run_s_best_model_is_a_word_everywhere(world: World) -> None:
    world.write("run.yaml", BEST)
    world.ok("run", "run.yaml")
    run, made = world.newest(), outputs(world)["grpo"]
    for word, digest in ((f"{run}/grpo/best", made["best"]), (f"run:{run}/grpo", made["model"]), (run, made["best"])):
        target = world.root / f"out-{word.replace('/', '-').replace(':', '-')}"
        assert world.json("export", word, str(target))["digest"] == digest["digest"], word
    world.write("next.yaml", RUN.replace("model: model:tiny", f"model: run:{run}/grpo/bestial"))
    odd = f"{run}/grpo/bestial"
    for command in (("export", odd, "odd"), ("sample", odd, "hi"), ("eval", odd, "heldout"), ("plan", "next.yaml")):
        refused = world(*command)
        assert refused.exit_code == 2, refused.stdout
        assert "got 'grpo/bestial' (did you mean 'grpo/best'?)" in refused.stderr
    refused = world("export", f"{run}/sft/best", "nowhere")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "stage sft of run" in refused.stderr
    assert "has no best model" in refused.stderr
    assert world("export", f"{run}/grpo/bets", "nowhere").exit_code == 2
    again = RUN.replace("name: sort", "name: next").replace("model: model:tiny", f"model: run:{run}/grpo/best")
    world.write("next.yaml", again)
    assert world("run", "next.yaml").exit_code == 3, "a gate asks for more than it is"
    assert f"run:{run}/grpo/best" in world.ok("plan", "next.yaml")
    assert f"{run}/grpo/best" in world.ok("lineage", "next")


@pytest.mark.slow
def test_a_later_stage_and_a_gate_take_the_best(world: World) -> None:
    more = "  more: {kind: sft, model: grpo/best, data: train, steps: 5}\n"
    text = BEST.replace("  evaluate:", more + "  evaluate:")
    rule = "{name: rl-helped, metric: heldout/accuracy, better_than: grpo, by: 0.02}"
    lines = [f"  - {rule}" if "no-regression" in line else line for line in text.splitlines()]
    world.write("run.yaml", "\n".join(lines) + "\n")
    assert "baseline-grpo.evaluate" in world.ok("plan", "run.yaml"), "the best against the last"
    world.ok("run", "run.yaml")
    why = world.json("why", "sort")
    assert {v["gate"]: (v["against"], v["outcome"]) for v in why["gates"]["verdicts"]}["rl-helped"] == ("grpo", "pass")
    stages = {stage["name"]: stage for stage in world.json("plan", "run.yaml")["stages"]}
    assert next(i for i in stages["more"]["inputs"] if i["slot"] == "model")["name"] == "stage grpo/best"
    assert "more" in outputs(world)
    other = "\n".join(lines).replace("better_than: grpo,", "better_than: grpo/best,").replace(
        "release: {channel: prod, model: grpo/best}", "release: {channel: prod, model: grpo}"
    ).replace("evaluate, model: grpo/best", "evaluate, model: grpo")  # fmt: skip
    world.write("run.yaml", other + "\n")
    assert "baseline-grpo.best.evaluate" in world.ok("plan", "run.yaml")


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("evaluate, model: grpo/best", "evaluate, model: sft/best", "model: stage 'sft' has no best model"),
        ("model: grpo/best}\n", "model: sft/best}\n", "release.model: stage 'sft' has no best model for 'sft/best'"),
        ("model: grpo/best}\n", "model: grpo/bets}\n", "release.model"),
        ("model: grpo/best}\n", "model: nope/best}\n", "release.model: no stage 'nope/best' makes a model"),
        ("evaluate, model: grpo/best", "evaluate, model: base/best", "no stage 'base' makes a model"),
        (", keep_best: true, early_stopping: {patience: 1}", "", "has no best model"),
        (f"{PROBE}, ", "", "early_stopping needs a probe, got none"),
        ("keep_best: true", "load_best_model_at_end: true", "(did you mean 'keep_best'?)"),
        ("{patience: 1}", "{early_stopping_patience: 1}", "(did you mean 'patience'"),
        ("{patience: 1}", "{patience: 0}", "early_stopping.patience: must be at least 1, got 0"),
        ("{patience: 1}", "{min_delta: -1}", "early_stopping.min_delta: must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(world: World, before: str, after: str, line: str) -> None:
    assert before in BEST
    world.write("run.yaml", BEST.replace(before, after))
    result = world("plan", "run.yaml")
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_plan_says_when_what_is_selected_on_is_measured_or_trained_on(world: World) -> None:
    said = "no evidence for it; probe other rows"
    world.write("run.yaml", BEST)
    assert said not in world.ok("plan", "run.yaml")
    world.write("run.yaml", BEST.replace("probe: {data: tune", "probe: {data: heldout"))
    shown = " ".join(world.ok("plan", "run.yaml").split())
    assert (
        f"grpo: the probe's dataset:heldout@1 is the data of a suite: rows that selected the model are {said}" in shown
    )
    world.write("run.yaml", BEST.replace("probe: {data: tune", "probe: {data: train"))
    assert "grpo: the probe's dataset:train@1 is the training data of the stage" in " ".join(
        world.ok("plan", "run.yaml").split()
    )
    held = (world.root / "heldout.jsonl").read_text().splitlines()[:5]
    world.write("some.jsonl", "\n".join(held) + "\n")
    world.write("run.yaml", BEST.replace("tune: dataset:tune", "tune: ./some.jsonl"))
    assert "against dataset:heldout@1: 5 of" in " ".join(world.ok("plan", "run.yaml").split())
    world.write("run.yaml", RUN)  # a probe that decides nothing is a curve
    assert "probe's" not in world.ok("plan", "run.yaml")


@pytest.mark.slow
def test_a_reused_stage_says_what_its_probe_chose(world: World) -> None:
    world.write("run.yaml", BEST)
    world.ok("run", "run.yaml")
    world.ok("run", "run.yaml", "--again")
    assert "best: probe/accuracy 0.875 at step 2; stopped early at step 4" in world.ok("get", world.newest())


def test_the_output_of_a_stage_is_its_last_model_and_the_best_stands_beside_it(world: World) -> None:
    world.write("run.yaml", BEST)
    shown = world.ok("run", "run.yaml")
    made = outputs(world)["grpo"]
    (row,) = [line for line in shown.splitlines() if " grpo " in line and " succeeded " in line and "sha256:" in line]
    assert row.rstrip().endswith(f"{made['model']['digest'][:19]}, best: {made['best']['digest'][:19]}")
    (sft,) = [line for line in shown.splitlines() if " sft " in line and "sha256:" in line]
    assert "best" not in sft
    page = next((world.root / ".posttrain" / "runs").rglob("report.html")).read_text()
    assert f"<code>{made['model']['digest']}</code><br>best: <code>{made['best']['digest']}</code>" in page


@pytest.mark.slow
def test_run_and_why_say_too_that_it_was_selected_on_what_it_is_measured_on(world: World) -> None:
    said = "is the data of a suite: rows that selected the model are no evidence for it; probe other rows"
    world.write("run.yaml", BEST)
    assert "no evidence" not in world.ok("run", "run.yaml") + world.ok("why", "sort")
    world.write("run.yaml", BEST.replace("probe: {data: tune", "probe: {data: heldout"))
    shown = world.ok("run", "run.yaml").splitlines()
    line = f"warning: grpo: the probe's dataset:heldout@1 {said}"
    assert shown.index(line) == 1, "before anything runs"
    assert shown.count(line) == 2, "and at its end"
    assert line in world.ok("why", "sort")
    assert line in world.ok("get", "sort")
    assert world.json("get", "sort")["warnings"] == [line.removeprefix("warning: ")]


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_a_best_model_that_nothing_was_trained_in_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    def untrained(folder: AttemptFolder, order: JobOrder) -> None:
        train(folder, order)
        result = folder.read_result()
        if result is not None and "best/step" in result.metrics:
            (folder.path / "result.json").unlink()
            folder.write_result(replace(result, metrics={**result.metrics, "best/step": 0.0}))

    more = "  more: {kind: sft, model: grpo/best, data: train, steps: 5}\n  evaluate:"
    text = BEST.replace("  evaluate:", more).replace("model: grpo/best, suites", "model: more, suites")
    text = text.replace("prod, model: grpo/best", "prod, model: more").replace("at_least: 0.8", "at_least: 0.4")
    world.write("run.yaml", text if later else BEST)
    said = "grpo: the best model by the probe is the model with which the stage began (step 0)"
    assert said not in world.ok("run", "run.yaml", "--seed", "3")
    monkeypatch.setattr("cli_world.train", untrained)
    world.write("reward.py", BAD_REWARD + "\n")
    world.ok("asset", "add", "reward:sort", "reward.py")
    line = f"warning: {said}, so no update of grpo is released"
    assert line in world.ok("run", "run.yaml").splitlines()
    run = world.newest()
    assert line in world.ok("get", run).splitlines()
    assert line in world.ok("why", run).splitlines()
    assert said in world.json("get", run)["warnings"][0]
    page = next((world.root / ".posttrain" / "runs" / run).rglob("report.html")).read_text()
    assert said in page
    assert world.json("get", "prod")["history"], "it is told, not refused"


def test_a_stage_that_updated_nothing_is_told_wherever_its_run_is_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(folder: AttemptFolder, order: JobOrder) -> None:
        train(folder, order)
        result = folder.read_result()
        if result is not None and order.kind == "grpo":
            (folder.path / "result.json").unlink()
            folder.write_result(replace(result, metrics={**result.metrics, "unchanged": 1.0}))

    monkeypatch.setattr("cli_world.train", idle)
    line = "warning: grpo: no step updated the weights, so its output is the model it began with; check its rewards"
    assert line in world("run", "run.yaml").stdout.splitlines()
    assert line in world.ok("get", "sort").splitlines()
    assert line in world.ok("why", "sort").splitlines()
    assert world.json("get", "sort")["warnings"] == [line.removeprefix("warning: ")]
    page = next((world.root / ".posttrain" / "runs" / world.newest()).rglob("report.html")).read_text()
    assert "no step updated the weights" in page
