"""Gates against another stage's model: what they add to a run, what they are judged on, and what is said of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN as SORT, World, make_world
from control_bench import Bench, evaluate, train
from hypothesis import given, settings, strategies as st
from test_control_planning import RUN as FILE, changed, manifest

from posttrain.control.launch import cache_key
from posttrain.control.lineage import release_lineage
from posttrain.control.verdicts import explain_run
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule, Verdict
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import InputRef, Manifest

BETTER = {"name": "rl-helped", "metric": "heldout/accuracy", "better_than": "sft", "by": 0.02}


def gated(*rules: dict[str, Any], **stages: Any) -> dict[str, Any]:
    raw = changed("gates", list(rules))
    raw["stages"] |= stages
    return raw


def added(locked: Manifest) -> list[str]:
    return [stage.name for stage in locked.stages if stage.name not in FILE["stages"]]


def test_a_gate_against_a_stage_adds_the_same_evaluation_of_that_stages_model() -> None:
    locked = manifest(gated(BETTER))
    assert added(locked) == ["baseline-sft.evaluate", "gate", "release"]
    ours, theirs = locked.stage("evaluate"), locked.stage("baseline-sft.evaluate")
    assert theirs.inputs == {**ours.inputs, "model": InputRef(source="stage", name="sft", output="model")}
    model = {"model": InputBlob("sha256:m", "tree")}
    assert cache_key(locked, ours, model) == cache_key(locked, theirs, model)
    gate = locked.stage("gate").inputs
    assert gate["against.sft"] == theirs.inputs["model"]
    assert gate["against.sft.evaluate"].name == theirs.name


def test_each_baseline_is_measured_once_and_only_on_what_its_gates_ask_for() -> None:
    other = {"kind": "evaluate", "model": "grpo", "suites": {"more": {"data": "heldout"}}}
    base = {**BETTER, "name": "b", "better_than": "base"}
    again = {**BETTER, "name": "c", "metric": "heldout/truncated", "direction": "lower", "by": 0.1}
    steady = {**BETTER, "name": "d", "better_than": "channel"}
    locked = manifest(gated(BETTER, base, again, steady, other=other))
    assert added(locked) == [
        "other", "baseline-evaluate", "baseline-other", "baseline-sft.evaluate", "baseline-base.evaluate", "gate",
        "release",
    ]  # fmt: skip
    assert locked.stage("baseline-base.evaluate").inputs["model"].name == "model:tiny@1"


def test_an_evaluation_that_the_run_has_is_not_made_twice() -> None:
    mine = {**FILE["stages"]["evaluate"], "model": "sft"}
    locked = manifest(gated(BETTER, mine=mine))
    assert added(locked) == ["mine", "gate", "release"]
    assert locked.stage("gate").inputs["against.sft.evaluate"].name == "mine"
    patient = {**mine, "runtime": {"stall_after": "3h"}}
    assert added(manifest(gated(BETTER, mine=patient))) == ["mine", "gate", "release"], "it measures the same"
    longer = {**mine, "suites": {"heldout": {"data": "heldout", "samples": 2, "max_new_tokens": 5}}}
    assert "baseline-sft.evaluate" in added(manifest(gated(BETTER, mine=longer))), "another evaluation is no baseline"


def test_names_of_added_stages_never_collide() -> None:
    """However stages are called: no name of a run file has a dot."""
    evaluation = FILE["stages"]["evaluate"]
    raw = gated(BETTER, {**BETTER, "name": "other", "metric": "more/accuracy", "better_than": "sft-evaluate"})
    raw["stages"] |= {
        "sft-evaluate": {**FILE["stages"]["sft"], "steps": 9},
        "x": {**evaluation, "suites": {"more": {"data": "heldout"}}},
        "evaluate-x": {**evaluation, "suites": {"again": {"data": "heldout"}}},
    }
    names = [stage.name for stage in manifest(raw).stages]
    assert len(set(names)) == len(names)
    assert {"baseline-sft.evaluate", "baseline-sft-evaluate.x"} <= set(names)


def test_a_rule_against_the_channel_is_what_it_was() -> None:
    """The manifest of a run file of before has the digest of before."""
    rule = manifest(FILE).to_json()["gates"][1]
    assert rule == {
        "name": "steady", "metric": "heldout/accuracy", "at_least": None, "at_most": None, "not_worse_than": "channel",
        "better_than": None, "margin": 0.02, "by": None, "direction": "higher", "if_channel_empty": "fail",
        "confidence": 0.95, "min_items": 20,
    }  # fmt: skip
    assert set(manifest(FILE).stage("gate").inputs) == {
        "candidate",
        "channel",
        "evidence.evaluate",
        "baseline.evaluate",
    }


# fmt: off
REFUSED = [
    (gated({**BETTER, "better_than": "sfd"}),
     "run.yaml: gates.rl-helped.better_than: no stage 'sfd' makes a model (did you mean 'sft'?)"),
    (gated({**BETTER, "better_than": "evaluate"}), "gates.rl-helped.better_than: no stage 'evaluate' makes a model"),
    (gated({"name": "g", "metric": "heldout/accuracy", "not_worse_than": "grpo", "margin": 0.1}),
     "gates.g.not_worse_than: must be a model other than the released one, got 'grpo'; name another stage,"),
    (gated({**BETTER, "better_than": "judge"}, judge={"kind": "reward_model", "data": "train", "steps": 1}),
     "gates.rl-helped.better_than: must be a model that generates, got 'judge', which is a reward model"),
    (gated({**BETTER, "if_channel_empty": "pass"}),
     "if_channel_empty has no meaning with better_than: sft, since that model"),
    (gated({**BETTER, "better_than": "A stage"}), "better_than"),
    (gated(BETTER, channel=FILE["stages"]["sft"]), "stages.channel: this name is reserved"),
]
# fmt: on


@pytest.mark.parametrize(("raw", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_what_a_gate_cannot_compare_with_is_refused_in_one_line(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        manifest(raw)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_base_needs_a_base() -> None:
    raw = gated({**BETTER, "better_than": "base"})
    raw["stages"]["sft"]["model"] = "first"
    raw["stages"]["first"] = {"kind": "init_model"}
    del raw["model"]
    with pytest.raises(InputError, match=r"gates\.rl-helped\.better_than: `base` needs the top-level key `model`"):
        manifest(copy.deepcopy(raw))
    raw["gates"][0]["better_than"] = "first"
    assert "baseline-first.evaluate" in added(manifest(raw))


@settings(max_examples=40, deadline=None)
@given(
    rivals=st.lists(st.sampled_from(["channel", "base", "sft", "other"]), min_size=1, max_size=6),
    shared=st.booleans(),
)
def test_whatever_is_compared_with_has_evidence_of_its_own(rivals: list[str], shared: bool) -> None:
    rules = [{**BETTER, "name": f"g{i}", "better_than": rival} for i, rival in enumerate(rivals)]
    raw = gated(*rules, other={**FILE["stages"]["sft"], "steps": 9})
    if shared:
        raw["stages"]["mine"] = {**FILE["stages"]["evaluate"], "model": "other"}
    locked = manifest(raw)
    names = [stage.name for stage in locked.stages]
    gate = locked.stage("gate").inputs
    assert len(set(names)) == len(names)
    for rival in set(rivals):
        model, slot = (
            (gate["channel"], "baseline.evaluate")
            if rival == "channel"
            else (gate[f"against.{rival}"], f"against.{rival}.evaluate")
        )
        measured = locked.stage(gate[slot].name)
        assert measured.inputs["model"] == model
        assert measured.params == locked.stage("evaluate").params
    assert sum(stage.kind == "evaluate" for stage in locked.stages) <= 1 + len(set(rivals)) + shared


# --- judged -----------------------------------------------------------------------------------------------------------

STAGES = {
    "sft": {"kind": "sft", "data": "train", "steps": 3},
    "more": {"kind": "sft", "model": "sft", "data": "train", "steps": 4},
    "evaluate": {"kind": "evaluate", "model": "more", "suites": {"heldout": {"data": "heldout"}}},
}
RELEASE = {"channel": "prod", "model": "more"}


def judged(bench: Bench, ours: int, theirs: int, *rules: dict[str, Any], **changes: Any) -> Any:
    bench.scripts |= {
        "sft": [train("sft")], "more": [train(f"more {ours}")], "evaluate": [evaluate(ours)],
        "baseline-sft.evaluate": [evaluate(theirs)], "baseline-evaluate": [evaluate(ours)],
    }  # fmt: skip
    return bench.drive(bench.submit(stages=STAGES, gates=list(rules or [BETTER]), release=RELEASE, **changes))


def test_a_gate_judges_against_the_model_of_a_stage(bench: Bench) -> None:
    run = judged(bench, ours=190, theirs=120)
    assert run.state == "succeeded"
    report = explain_run(bench.stores, run.id).report
    assert report is not None
    (verdict,) = report.verdicts
    assert (verdict.estimate, verdict.baseline_estimate) == (0.95, 0.6)
    assert verdict.against == "sft"
    assert verdict.baseline == bench.stage(run.id, "sft").outputs["model"]["digest"]
    assert report.baseline is None, "the channel was empty"
    assert "heldout/accuracy is 0.95 against stage sft's 0.6 on the same 200 items" in verdict.reason
    shipped = bench.ledger.channel("prod")
    assert shipped.model_digest == report.candidate
    again = judged(bench, ours=192, theirs=120, seed=2)
    report = explain_run(bench.stores, again.id).report
    assert report is not None
    assert report.baseline == shipped.model_digest, "a promotion holds on to what the channel pointed at"
    assert again.state == "succeeded"
    details = next(n.details for n in release_lineage(bench.stores, "prod").walk() if n.kind == "report")
    assert details == (("against", f"the model of stage sft {str(report.verdicts[0].baseline)[:19]}…"),)


def test_a_model_that_is_no_better_than_the_stage_before_is_turned_away(bench: Bench) -> None:
    run = judged(bench, ours=120, theirs=120)
    assert (run.state, run.reason) == ("rejected", "GateFailed")
    assert "against stage sft's 0.6" in run.message
    assert bench.ledger.channel("prod") is None


def test_each_verdict_names_its_own_baseline(bench: Bench) -> None:
    judged(bench, ours=150, theirs=120)
    channel = {"name": "steady", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.2}
    absolute = {"name": "enough", "metric": "heldout/accuracy", "at_least": 0.5}
    before = bench.ledger.channel("prod").model_digest
    run = judged(bench, 190, 120, BETTER, channel, absolute, seed=2)
    report = explain_run(bench.stores, run.id).report
    assert report is not None
    sft = bench.stage(run.id, "sft").outputs["model"]["digest"]
    found = {v.gate: (v.against, v.baseline, v.against_words) for v in report.verdicts}
    assert found == {
        "rl-helped": ("sft", sft, "the model of stage sft"),
        "steady": ("channel", before, "the channel's model"),
        "enough": (None, None, ""),
    }
    assert report.baseline == before


def test_an_evaluation_of_an_earlier_run_is_reused(bench: Bench) -> None:
    judged(bench, ours=190, theirs=120)
    bench.launched.clear()
    other = {**BETTER, "by": 0.03}
    assert judged(bench, 190, 120, other).state == "succeeded"
    assert bench.launched == []


def test_a_report_of_before_has_the_words_of_before() -> None:
    """Reports that were written when there was only the channel are read as they are."""
    rule = {"gate": "steady", "metric": "m", "outcome": "pass", "reason": "because.", "test": "t", "confidence": 0.95}
    old = Verdict.model_validate({**rule, "items": 9, "estimate": 0.5, "baseline_estimate": 0.4, "difference": 0.1})
    assert old.against_words == "the channel's model"
    assert Verdict.model_validate({**rule, "items": 9, "estimate": 0.5}).against_words == ""
    assert GateRule(**BETTER).rival == "sft"


# --- said -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


CHANNEL = next(line.removeprefix("  - ") for line in SORT.splitlines() if "no-regression" in line)
AGAINST_SFT = "{name: rl-helped, metric: heldout/accuracy, better_than: sft, by: 0.02}"


def test_plan_run_get_why_and_report_speak_of_that_model(world: World) -> None:
    world.write("run.yaml", SORT.replace(CHANNEL, AGAINST_SFT))
    plan = world.ok("plan", "run.yaml")
    assert "baseline-sft.evaluate" in plan
    powers = [" ".join(line.split()) for line in plan.splitlines() if line.startswith("power:")]
    assert [line.split(":")[1] for line in powers] == [" gate accuracy", " gate rl-helped"], "one note for each gate"
    assert "assumed true improvement 0.05 over the model of stage sft" in plan
    world.ok("run", "run.yaml")
    why = world.ok("why", "sort")
    assert "against stage sft's 0.5" in why
    (row,) = world.json("get", "sort")["scores"]["rows"]
    assert [(one["of"], one["value"]) for one in row["before"]] == [("stage sft", 0.5)]
    verdict = next(v for v in world.json("why", "sort")["gates"]["verdicts"] if v["gate"] == "rl-helped")
    assert (verdict["against"], verdict["baseline"][:7]) == ("sft", "sha256:")
    world.ok("get", "sort", "--report")
    assert "the model of stage sft" in next((world.root / ".posttrain" / "runs").rglob("report.html")).read_text()
    assert json.loads(world.ok("lineage", "prod", "-o", "json"))


def test_a_rival_beside_the_line_is_a_before_too(world: World) -> None:
    """A sibling, which the released model was not trained from."""
    text = SORT.replace(CHANNEL, AGAINST_SFT.replace("better_than: sft", "better_than: other"))
    world.write("run.yaml", text.replace("  grpo:", "  other: {kind: sft, data: train, steps: 5}\n  grpo:"))
    world.ok("run", "run.yaml")
    (row,) = world.json("get", "sort")["scores"]["rows"]
    assert [one["of"] for one in row["before"]] == ["stage other"]
