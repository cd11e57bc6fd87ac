"""run.yaml → manifest: what is accepted, what is refused and in which words, and what the digest depends on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.control.launch import cache_key
from posttrain.control.plan import plan_run
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import InputRef, Manifest, manifest_from_json
from posttrain.domain.runspec import load_run_spec, parse_run_spec
from posttrain.execution.trainers.fake import FakeTrainer
from posttrain.execution.trainers.native import NativeTrainer

TRAINERS = {"native": NativeTrainer()}
RUN: dict[str, Any] = {
    "name": "sort",
    "owner": "ada",
    "seed": 17,
    "model": "model:tiny",
    "data": {"train": "dataset:train", "heldout": "dataset:heldout"},
    "rewards": {"exact": "reward:sort"},
    "stages": {
        "sft": {"kind": "sft", "data": "train", "steps": 3},
        "grpo": {"kind": "grpo", "model": "sft", "data": "train", "reward": "exact", "steps": 2},
        "evaluate": {"kind": "evaluate", "model": "grpo", "suites": {"heldout": {"data": "heldout", "samples": 2}}},
    },
    "gates": [
        {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.9},
        {"name": "steady", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.02},
    ],
    "budget": {"tokens": "5e6", "wall_clock": "10m"},
    "release": {"channel": "prod", "model": "grpo"},
}


def resolve(kind: str, text: str) -> InputRef:
    if "missing" in text:
        raise NotFoundError(f"{text}: no {kind} of that name is registered")
    meta = {"entry": "score"} if kind == "reward" else {}
    form = "tree" if kind == "model" else "file"
    return InputRef(source="asset", name=f"{text}@1", digest=digest_json(text), form=form, meta=meta)


def manifest(raw: dict[str, Any]) -> Manifest:
    return plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, TRAINERS).manifest


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RUN)
    *parents, last = path.split(".")
    place = raw
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return raw


def test_stages_come_in_topological_order_with_the_decision_stages_behind() -> None:
    names = [stage.name for stage in manifest(RUN).stages]
    assert names == ["sft", "grpo", "evaluate", "baseline-evaluate", "gate", "release"]


def test_every_word_became_a_digest_or_a_stage() -> None:
    for stage in manifest(RUN).stages:
        for slot, ref in stage.inputs.items():
            assert ref.source != "asset" or ref.digest, (stage.name, slot)
    grpo = manifest(RUN).stage("grpo")
    assert grpo.inputs["model"] == InputRef(source="stage", name="sft", output="model")
    assert grpo.inputs["reward"].meta == {"entry": "score"}
    assert grpo.params["group_size"] == 8, "defaults are written out"


def test_setting_one_optimizer_field_keeps_the_kinds_own_defaults_for_the_others() -> None:
    raw = changed("stages.grpo.optimizer", {"learning_rate": 5e-4})
    optimizer = manifest(raw).stage("grpo").params["optimizer"]
    assert (optimizer["betas"], optimizer["schedule"], optimizer["final_ratio"]) == ([0.9, 0.99], "linear", 0.2)
    assert manifest(RUN).stage("sft").params["optimizer"]["schedule"] == "cosine"


def test_units_are_read() -> None:
    budget = manifest(RUN).budget
    assert (budget.tokens, budget.wall_clock) == (5_000_000, 600.0)


def test_the_digest_survives_the_round_trip_and_sees_every_field() -> None:
    locked = manifest(RUN)
    assert manifest_from_json(json.loads(json.dumps(locked.to_json()))).digest == locked.digest
    others = [
        changed("seed", 18),
        changed("stages.sft.steps", 4),
        changed("gates", RUN["gates"][:1]),
        changed("budget.tokens", 6),
        changed("rewards.exact", "reward:other"),
        changed("rewards.exact", {"ref": "reward:sort", "files": ["words.txt"]}),
        changed("rewards.exact", {"ref": "reward:sort", "network": ["judge.test:80"]}),
    ]
    assert len({locked.digest, *(manifest(other).digest for other in others)}) == len(others) + 1


def test_what_things_are_called_does_not_decide_what_is_computed() -> None:
    renamed = yaml.safe_load(
        yaml.safe_dump(RUN).replace("train: dataset", "rows: dataset").replace("data: train", "data: rows")
    )
    blobs = {"model": InputBlob("sha256:m", "tree"), "data": InputBlob("sha256:d", "file", "dataset:train@1")}
    other = {**blobs, "data": InputBlob("sha256:d", "file", "dataset:copy@4")}
    first, second = manifest(RUN), manifest(renamed)
    assert cache_key(first, first.stage("sft"), blobs) == cache_key(second, second.stage("sft"), other)
    assert cache_key(first, first.stage("sft"), blobs) != cache_key(
        first, first.stage("sft"), {**blobs, "data": InputBlob("sha256:e", "file")}
    )


def test_the_baseline_is_the_same_evaluation_of_the_channels_model() -> None:
    locked = manifest(RUN)
    evaluate, baseline = locked.stage("evaluate"), locked.stage("baseline-evaluate")
    assert baseline.inputs["model"] == InputRef(source="channel", name="prod")
    model = {"model": InputBlob("sha256:m", "tree")}
    assert cache_key(locked, evaluate, model) == cache_key(locked, baseline, model)


def test_without_a_relative_gate_there_is_no_baseline_to_compute() -> None:
    assert "baseline-evaluate" not in [s.name for s in manifest(changed("gates", RUN["gates"][:1])).stages]


def typo(wrong: str, right: str) -> dict[str, Any]:
    return {wrong if key == right else key: value for key, value in RUN.items()}


def gated(metric: str, **rule: Any) -> dict[str, Any]:
    return changed("gates", [{"name": "g", "metric": f"heldout/{metric}", **rule}])


# fmt: off
BAD = [
    (typo("sead", "seed"), "run.yaml: sead: unknown key (did you mean 'seed'?)"),
    (changed("sead", 3), "run.yaml: sead: unknown key (did you mean 'seed'?)"),
    (changed("stages.sft.stepz", 3), "run.yaml: stages.sft: sft: stepz: unknown key (did you mean 'steps'?)"),
    (changed("stages.sft.optimizer", {"learning_rat": 1}),
     "optimizer.learning_rat: unknown key (did you mean 'learning_rate'?)"),
    (changed("stages.sft.steps", 0), "steps: must be at least 1, got 0"),
    (changed("stages.sft.kind", "sftt"), "unknown stage kind 'sftt' (did you mean 'sft'?)"),
    (changed("stages.sft.trainer", "verl"), "stages.sft.trainer: unknown trainer 'verl' (known: native)"),
    (changed("stages.sft.data", "trian"), "stages.sft.data: 'trian' is not in `data` (did you mean 'train'?)"),
    (changed("stages.grpo.reward", "exakt"), "stages.grpo.reward: 'exakt' is not in `rewards` (did you mean 'exact'?)"),
    (changed("stages.grpo.model", "sfd"), "stages.grpo.model: no stage 'sfd' makes a model (did you mean 'sft'?)"),
    (changed("stages.sft.model", "grpo"), "stages: must not wait for each other in a circle, got sft → grpo → sft"),
    (changed("model", None), "`base` needs the top-level key `model`"),
    (changed("data.train", "dataset:missing"), "run.yaml: data.train: dataset:missing: no dataset"),
    (changed("release.model", "evaluate"), "release.model: no stage 'evaluate' makes a model"),
    (changed("gates", None), "release needs at least one gate"),
    (changed("gates", [{"name": "a", "metric": "heldout/acuracy", "at_least": 1}]),
     "measures 'heldout/acuracy' (did you mean 'heldout/accuracy'?)"),
    (changed("gates", [{"name": "a", "metric": "heldout/accuracy"}]), "exactly one of at_least"),
    (changed("gates", RUN["gates"] * 2), "names must be unique, got 'accuracy' twice"),
    (gated("accuracy", at_least=0.0),
     "gates.g: at_least must be a value that a model can miss, got 0, but heldout/accuracy"),
    (gated("accuracy", at_least=-1), "at_least must be a value that a model can miss, got -1, but heldout/accuracy"),
    (gated("accuracy", at_least=90),
     "at_least must be a value that a model can reach, got 90, but heldout/accuracy is from"),
    (gated("truncated", at_most=1.0), "at_most must be a value that a model can miss, got 1, but heldout/truncated is"),
    (gated("truncated", at_most=-0.1), "at_most must be a value that a model can reach, got -0.1"),
    (gated("response_tokens", at_most=64), "can miss, got 64, but heldout/response_tokens is from 1 to 64; change"),
    (gated("response_tokens", at_least=1), "at_least must be a value that a model can miss, got 1"),
    (gated("response_tokens", at_most=0.5), "at_most must be a value that a model can reach, got 0.5"),
    (gated("accuracy", not_worse_than="channel", margin=1),
     "margin must be a value that a model can miss, got 1, but its difference in heldout/accuracy is from -1 to 1"),
    (gated("response_tokens", not_worse_than="channel", margin=63, direction="lower"), "is from -63 to 63"),
    (gated("accuracy", better_than="channel", by=1), "by must be a value that a model can reach, got 1"),
    (gated("accuracy", better_than="channel", by=5, direction="lower"),
     "by must be a value that a model can reach, got 5"),
    (changed("release", None), "gates need a release"),
    (changed("budget.wall_clock", "soon"), "budget.wall_clock: must be a duration such as 90s, 10m or 2h, got 'soon'"),
    (changed("budget.dollars", 5), "budget.dollars: unknown key (known: attempts, tokens, wall_clock)"),
    (changed("seed", None), "run.yaml: seed: is required"),
    (changed("stages", {}), "stages"),
    (changed("stages.gate", {"kind": "sft", "data": "train", "steps": 1}), "stages.gate: this name is reserved"),
    (changed("stages.again", RUN["stages"]["evaluate"]),
     "'heldout/accuracy' is already measured by 'evaluate'; rename a suite"),
    (changed("stages.evaluate.suites.heldout.pass_at", [4]), "pass_at must be <= samples (2), got 4"),
    (changed("stages.evaluate.suites.heldout.stop", "Q:"), "suites.heldout.stop: must be a list, got 'Q:'"),
    (changed("stages.grpo.top_p", 0.9),
     "stages.grpo: grpo: top_p: unknown key here: only suites with samples have it; training samples the full"),
]
# fmt: on


@pytest.mark.parametrize(("raw", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_mistakes_are_one_line_that_names_the_field(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        manifest(raw)
    message = str(caught.value)
    assert words in message
    assert message.startswith("run.yaml: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "key 'a' appears twice"),
        ("[1, 2]", "must be a map of keys, got list"),
        ("a: [", "is not YAML"),
        ("", "must be a map"),
    ],
)
def test_files_that_are_no_run_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="run") as caught:
        load_run_spec(path)
    assert words in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        load_run_spec(tmp_path / "absent.yaml")


def test_a_manifest_of_another_schema_is_refused() -> None:
    with pytest.raises(InputError, match="schema must be 1, got 2"):
        manifest_from_json({**manifest(RUN).to_json(), "manifest": 2})
    with pytest.raises(ValueError, match="extra"):
        manifest_from_json({**manifest(RUN).to_json(), "surprise": 1})


def test_a_channel_may_be_called_almost_like_another_and_a_new_one_is_told() -> None:
    spec = parse_run_spec(RUN, "run.yaml")
    told = "release.channel: prod is new, so there is no baseline yet (channels with releases: prods, staging)"
    assert plan_run(spec, "run.yaml", resolve, TRAINERS, channels=["prods", "staging"]).warnings == (told,)
    for channels in ([], ["prods", "prod"]):
        assert plan_run(spec, "run.yaml", resolve, TRAINERS, channels=channels).warnings == ()


@pytest.mark.parametrize(
    ("metric", "rule"),
    [
        ("accuracy", {"at_least": 1e-9}),
        ("accuracy", {"at_least": 1.0}),  # nothing proves it; the power says so
        ("truncated", {"at_most": 0.0}),
        ("response_tokens", {"at_most": 63.5}),
        ("response_tokens", {"not_worse_than": "channel", "margin": 62.5, "direction": "lower"}),
        ("accuracy", {"better_than": "channel"}),
    ],
)
def test_a_threshold_that_can_be_missed_and_reached_is_a_gate(metric: str, rule: dict[str, Any]) -> None:
    assert manifest(gated(metric, **rule)).gates


def test_a_mean_without_a_declared_range_cannot_be_gated() -> None:
    def planned(ends: list[float] | None) -> Manifest:
        stage = {"kind": "evaluate", "trainer": "fake", "model": "grpo", "means": {"judge/score": ends}}
        raw = {**changed("stages.evaluate", stage), "gates": [{"name": "g", "metric": "judge/score", "at_least": 3}]}
        trainers = {**TRAINERS, "fake": FakeTrainer()}
        return plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, trainers).manifest

    assert planned([1, 5]).gates
    with pytest.raises(InputError) as caught:
        planned(None)
    assert str(caught.value) == (
        "run.yaml: gates.g.metric: 'judge/score' has no declared range in stage"
        " 'evaluate', so no gate can judge it; use another metric, or declare its range in `ranges` if it is a mean of "
        "items"
    )
