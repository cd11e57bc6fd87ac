"""Several rewards with weights: what the sum is, what fails, what is recorded, and that a plan pins all of it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import latest_checkpoint
from cli_world import believe_rewards
from hypothesis import given, strategies as st
from test_preflight_fitting import Bench, Change
from test_train_job import Shop, model_digest, run
from test_web_report import REPORT

from posttrain.app.runs import plan
from posttrain.control.scores import Scores
from posttrain.domain.errors import FailureClass, InputError
from posttrain.domain.jobs import InputBlob, Metric
from posttrain.engine.algorithms.advantages import ESTIMATORS
from posttrain.engine.loop.on_policy import rollout_metrics
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Prompt, Trajectory, groups_of
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.sandbox.port import RewardCall, RewardError, RewardFunction, Score, ScriptedReward
from posttrain.sandbox.process import ParallelReward, WeightedReward
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import put_tree
from posttrain.web.panels import CurveSeries, extent
from posttrain.web.report import StageCurves, render_run_report

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)
SMALL = st.floats(-1e6, 1e6, allow_nan=False)
TWO = (
    "def right(completion, answer):\n    return float(len(set(completion)))\n\n\n"
    "def brief(completion):\n    return {'score': len(completion) / 8, 'letters': sum(map(str.isalpha, completion))}\n"
)


def call(count: int) -> RewardCall:
    return RewardCall([f"p{i}" for i in range(count)], [f"c{i}" for i in range(count)], [{} for _ in range(count)])


def fixed(values: Sequence[float | None]) -> ScriptedReward:
    """Scores completion `cI` with values[I]; raises for NaN."""

    def score(asked: RewardCall) -> list[float | None]:
        found = [values[int(text[1:])] for text in asked.completions]
        if any(value is not None and math.isnan(value) for value in found):
            raise ValueError("no opinion")
        return found

    return ScriptedReward(score)


def weighted(columns: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> WeightedReward:
    return WeightedReward({name: (weights[name], fixed(columns[name])) for name in columns})


# --- the sum ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(SMALL, st.lists(NUMBERS, min_size=3, max_size=3)), min_size=1, max_size=5))
def test_the_total_is_the_exact_sum_rounded_once(parts: list[tuple[float, list[float]]]) -> None:
    """Against rational arithmetic: products are rounded as floats are, their sum once."""
    names = [f"r{i}" for i in range(len(parts))]
    columns = dict(zip(names, (values for _, values in parts), strict=True))
    weights = dict(zip(names, (weight for weight, _ in parts), strict=True))
    scores = weighted(columns, weights).score(call(3))
    for i, score in enumerate(scores):
        exact = sum((Fraction(weight * values[i]) for weight, values in parts), Fraction(0))
        assert score.score == float(exact)
        assert score.components == {name: columns[name][i] for name in names}
    backwards = {name: columns[name] for name in reversed(names)}
    assert weighted(backwards, weights).score(call(3)) == scores, "the order of writing decides nothing"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), min_size=1, max_size=6))
def test_one_reward_with_weight_one_is_the_plain_one_bit_for_bit(values: list[float | None]) -> None:
    plain = fixed(values).score(call(len(values)))
    alone = weighted({"right": values}, {"right": 1.0}).score(call(len(values)))
    bits = [None if s.score is None else np.float64(s.score + 0.0).tobytes() for s in plain]
    assert [None if s.score is None else np.float64(s.score).tobytes() for s in alone] == bits
    assert [s.status for s in alone] == [s.status for s in plain]


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=2, max_size=2),
    st.sampled_from([0.125, 0.5, 2.0, 64.0]),
)
def test_weights_scale_advantages_as_they_must(columns: list[list[float]], factor: float) -> None:
    """Powers of two are exact: what subtracts a baseline grows with the weights, what divides by the spread does not
    (but for its epsilon).
    """
    named = {"right": columns[0], "brief": columns[1]}
    weights = {"right": 1.0, "brief": -0.25}

    def rewards(scale: float) -> torch.Tensor:
        scores = weighted(named, {name: scale * weight for name, weight in weights.items()}).score(call(4))
        return torch.tensor([[s.score for s in scores]], dtype=torch.float64)

    one, more = rewards(1.0), rewards(factor)
    reference = np.array(columns[0]) - 0.25 * np.array(columns[1])
    np.testing.assert_allclose(one[0].numpy(), reference, rtol=1e-12, atol=1e-12)
    for name in ("dr_grpo", "rloo"):
        torch.testing.assert_close(ESTIMATORS[name](more), factor * ESTIMATORS[name](one), rtol=1e-6, atol=1e-5)
    if float(one.std()) * min(1.0, factor) > 1.0:
        torch.testing.assert_close(ESTIMATORS["grpo"](more), ESTIMATORS["grpo"](one), rtol=2e-3, atol=2e-3)


def test_a_reward_without_an_opinion_adds_nothing() -> None:
    scores = weighted({"a": [1.0, None, None], "b": [None, 3.0, None]}, {"a": 2.0, "b": 0.5}).score(call(3))
    assert [(s.score, s.status) for s in scores] == [(2.0, "ok"), (1.5, "ok"), (None, "none")]
    assert [dict(s.components) for s in scores] == [{"a": 1.0}, {"b": 3.0}, {}]


def test_a_weight_of_zero_is_recorded_and_counts_nothing() -> None:
    (score,) = weighted({"a": [5.0], "b": [1.0]}, {"a": 0.0, "b": 1.0}).score(call(1))
    assert (score.score, score.components) == (1.0, {"a": 5.0, "b": 1.0})


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({"a": [1.7e308, 1.0], "b": [0.0, 0.0]}, {"a": 10.0, "b": 1.0}),
        ({"a": [1.7e308, 1.0], "b": [1.7e308, 0.0]}, {"a": 1.0, "b": 1.0}),
        ({"a": [1.7e308, 1.0], "b": [1.7e308, 0.0]}, {"a": 10.0, "b": -10.0}),
    ],
)
def test_a_sum_that_is_no_number_is_a_failure(values: Any, weights: Any) -> None:
    scores = weighted(values, weights).score(call(2), allowed=1)
    assert [s.status for s in scores] == ["error", "ok"]
    assert "the weighted sum of rewards must be finite, got 1" in scores[0].message
    with pytest.raises(RewardError, match="1 of 2 completions failed, at most 0 may"):
        weighted(values, weights).score(call(2))


# --- failures ---------------------------------------------------------------------------------------------------------

BAD = math.nan  # what `fixed` raises for


def test_one_that_fails_leaves_the_completion_without_a_score() -> None:
    columns = {"a": [1.0, 1.0, 1.0, 1.0], "b": [2.0, BAD, 2.0, 2.0]}
    scores = weighted(columns, {"a": 1.0, "b": 1.0}).score(call(4), allowed=1)
    assert [s.status for s in scores] == ["ok", "error", "ok", "ok"]
    assert scores[1].components == {"a": 1.0}
    assert scores[1].parts["a"].score == 1.0
    assert "ValueError: no opinion" in scores[1].message


def test_completions_are_counted_once_and_over_all_rewards() -> None:
    same = {"a": [BAD, 1.0, 1.0, 1.0], "b": [BAD, 1.0, 1.0, 1.0]}
    assert len(weighted(same, {"a": 1.0, "b": 1.0}).score(call(4), allowed=1)) == 4
    others = {"a": [BAD, 1.0, 1.0, 1.0], "b": [1.0, BAD, 1.0, 1.0]}
    with pytest.raises(RewardError, match="2 of 4 completions failed, at most 1 may"):
        weighted(others, {"a": 1.0, "b": 1.0}).score(call(4), allowed=1)
    every = {"a": [BAD, 1.0], "b": [1.0, BAD]}
    with pytest.raises(RewardError, match="2 of 2 completions failed"):
        weighted(every, {"a": 1.0, "b": 1.0}).score(call(2), allowed=2)
    placed = weighted(every, {"a": 1.0, "b": 1.0}).score(call(2), allowed=2, places=[5, 6])
    assert [s.status for s in placed] == ["error", "error"], "whoever asks for a part judges whether all failed"


def test_all_of_them_are_closed_and_told_once() -> None:
    class PendingUploads(ScriptedReward):
        notes = ("no namespaces",)

    one, other = PendingUploads(lambda asked: [0.0] * len(asked)), PendingUploads(lambda asked: [0.0] * len(asked))
    both = WeightedReward({"a": (1.0, one), "b": (1.0, other)})
    assert both.notes == ("no namespaces",)
    both.close()
    both.close()
    for function in (one, other):
        with pytest.raises(InputError, match="is closed"):
            function.score(call(1))


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_components_of_a_step_against_numpy() -> None:
    rng = np.random.default_rng(5)
    right, brief = rng.normal(size=(2, 6)).tolist()
    scores = weighted({"right": [*right[:5], BAD], "brief": [None, *brief[1:]]}, {"right": 1.0, "brief": 0.2})
    found = metrics(scores, 6)
    for name, values in (("right", right[:5]), ("brief", brief[1:])):
        column = np.array(values, dtype=np.float64)
        np.testing.assert_allclose(found[f"reward/{name}/mean"], column.mean(), rtol=1e-12)
        np.testing.assert_allclose(found[f"reward/{name}/std"], column.std(), rtol=1e-12)
    assert (found["reward/right/errors"], found["reward/brief/errors"]) == (1 / 6, 0.0)
    assert (found["reward/right/timeouts"], found["reward/errors"]) == (0.0, 1 / 6)
    totals = np.array([1.0 * right[i] + (0.2 * brief[i] if i else 0.0) for i in range(5)])
    np.testing.assert_allclose(found["reward/mean"], totals.mean(), rtol=1e-12)


def test_components_that_a_function_answers_itself_are_recorded_too() -> None:
    class Own(ScriptedReward):
        def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
            return [Score(1.0, {"format": float(i), "<b>\n": 1.0, "x" * 99: 1.0}) for i in range(len(call))]

    found = metrics(Own(lambda asked: []), 3)
    assert {name for name in found if name.count("/") == 2} == {"reward/format/mean", "reward/format/std"}
    assert found["reward/format/mean"] == 1.0


def metrics(reward: RewardFunction, count: int) -> dict[str, float]:
    scores = tuple(reward.score(call(count), allowed=1))
    members = [Trajectory.answer((1,), (2,), (-0.5,), truncated=False)] * count
    return rollout_metrics([ScoredGroup(Prompt((1,)), *groups_of(members, [0], count), scores)])


def test_the_components_share_one_panel_of_the_report() -> None:
    values = {
        "reward/mean": [0.5, 0.6], "reward/right/mean": [0.2, 0.9], "reward/<i>brief/mean": [0.4, 0.1],
        "reward/right/std": [0.1, 0.1], "reward/right/errors": [0.0, 0.01],
    }  # fmt: skip
    series = {name: CurveSeries(name, "grpo", (1, 2), column, metric=name) for name, column in values.items()}
    html = render_run_report(replace(REPORT, scores=Scores(), curves=(StageCurves("grpo", "grpo", series),)))
    titles = re.findall(r'<h4 class="mono">(.*?)</h4>', html)
    assert titles == ["reward/mean", "reward components", "reward/right/std", "reward/right/errors"]
    panel = html.split("reward components</h4>")[1].split("</section>")[0]
    assert re.findall(r'<i class="key c(\d)"></i>(.*?)</span>', panel) == [("0", "right"), ("1", "&lt;i&gt;brief")]
    assert extent("reward/right/mean", values["reward/right/mean"]) == (0.0, 1.0)
    assert extent("reward/right/errors", [0.0, 0.01]) == (0.0, 1.0), "a share of all completions"


def test_many_components_take_several_panels() -> None:
    series = {f"reward/r{i}/mean": CurveSeries("x", "grpo", (1, 2), (0.0, 1.0)) for i in range(9)}
    html = render_run_report(replace(REPORT, scores=Scores(), curves=(StageCurves("grpo", "grpo", series),)))
    assert re.findall(r'<h4 class="mono">(.*?)</h4>', html) == ["reward components", "reward components 2"]


# --- through the job --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    made = Shop(tmp_path_factory.mktemp("shop"))
    for name in ("right", "brief"):
        blob = made.blobs.put(TWO.encode())
        meta = {"entry": name, "dialect": "auto", "source": "reward.py"}
        made.inputs[f"reward:{name}"] = InputBlob(blob, "file", "path:reward.py", meta)
    made.inputs["reward"] = made.inputs["reward:right"]
    made.inputs["probe"] = made.inputs["data"]
    return made


def grpo(shop: Shop, name: str, reward: Any, **order: Any) -> AttemptFolder:
    options = {
        "model": "model", "data": "data", "reward": reward, "steps": 4, "prompts_per_step": 2, "group_size": 3,
        "max_new_tokens": 6, "runtime": {"checkpoint_every": 2}, "optimizer": {"learning_rate": 1e-2},
    }  # fmt: skip
    slots = ["reward"] if isinstance(reward, str) else [f"reward:{one}" for one in reward]
    return shop.attempt(name, "grpo", options, ["model", "data", *slots], **order)


def told(attempt: AttemptFolder) -> list[dict[str, float]]:
    facts = [fact for fact in attempt.facts()[0] if isinstance(fact, Metric)]
    steps = [fact for fact in facts if "reward/mean" in fact.values]  # the first tells the sizes
    return [{k: v for k, v in fact.values.items() if not k.startswith(("tokens_per", "memory"))} for fact in steps]


def test_two_functions_of_one_file_train_together(shop: Shop) -> None:
    attempt = grpo(shop, "both", {"right": 1.0, "brief": -0.5})
    result = run(attempt)
    assert result.status == "succeeded", result.failure
    samples = list(attempt.some_samples(99))
    assert samples
    for sample in samples:
        distinct, length = len(set(sample.response)), len(sample.response)
        assert sample.components["right"] == distinct
        assert sample.components["brief"] == length / 8
        assert sample.components["brief/letters"] == sum(map(str.isalpha, sample.response))
        assert sample.reward == pytest.approx(distinct - 0.5 * length / 8, rel=1e-12)
    for values in told(attempt):
        mean = values["reward/right/mean"] - 0.5 * values["reward/brief/mean"]
        assert values["reward/mean"] == pytest.approx(mean, rel=1e-9)
        assert {"reward/right/std", "reward/brief/errors", "reward/brief/letters/mean"} <= values.keys()


def test_one_with_weight_one_trains_the_same_model_as_the_plain_form(shop: Shop) -> None:
    plain, alone = grpo(shop, "plain", "reward"), grpo(shop, "alone", {"right": 1.0})
    assert run(plain).status == run(alone).status == "succeeded"
    assert model_digest(plain) == model_digest(alone)
    for one, other in zip(told(plain), told(alone), strict=True):
        assert one == {name: value for name, value in other.items() if not name.startswith("reward/right/")}


def test_weights_decide_the_model(shop: Shop) -> None:
    one, other = grpo(shop, "w1", {"right": 1.0, "brief": 0.0}), grpo(shop, "w2", {"right": 0.0, "brief": 1.0})
    assert run(one).status == run(other).status == "succeeded"
    assert model_digest(one) != model_digest(other)


@pytest.mark.slow
def test_killed_and_resumed_with_weights_gives_the_same_file(shop: Shop) -> None:
    weights = {"right": 1.0, "brief": 0.25}
    whole, lost = grpo(shop, "whole", weights), grpo(shop, "lost", weights)
    assert run(whole).status == "succeeded"
    environment = {**os.environ, "POSTTRAIN_CRASHPOINT": "checkpoint.inside_shard@2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posttrain.jobs.stage", str(lost.path)]
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    latest = latest_checkpoint(lost)
    assert latest is not None
    again = grpo(shop, "again", weights, resume=put_tree(shop.blobs, latest.path), tokens_inherited=latest.tokens)
    assert run(again).status == "succeeded"
    assert model_digest(again) == model_digest(whole)
    other = grpo(shop, "other", {"right": 1.0, "brief": 0.5}, resume=put_tree(shop.blobs, latest.path))
    failure = run(other).failure
    assert failure is not None
    assert "is from a different stage" in failure.message


def test_the_one_that_fails_is_named(shop: Shop) -> None:
    broken = "def brief(completion):\n    return 1 / 0\n"
    shop.inputs["reward:broken"] = InputBlob(
        shop.blobs.put(broken.encode()), "file", "path:reward.py", {"entry": "brief", "source": "reward.py"}
    )
    result = run(grpo(shop, "broken", {"right": 1.0, "broken": 1.0}))
    assert result.failure is not None
    assert (result.failure.kind, result.tokens) == (FailureClass.BAD_INPUT, 0)
    assert result.failure.message.startswith("broken (path:reward.py): reward.py:2")


@pytest.mark.parametrize("kind", ["ppo", "dataflow"])
def test_other_kinds_take_weights(shop: Shop, kind: str) -> None:
    weights = {"right": 1.0, "brief": -0.5}
    options: dict[str, Any] = {
        "model": "model", "data": "data", "reward": weights, "steps": 1, "prompts_per_step": 2, "group_size": 2,
        "max_new_tokens": 4,
    }  # fmt: skip
    slots = ["model", "data", "reward:right", "reward:brief"]
    if kind == "dataflow":
        example = Path(__file__).resolve().parents[2] / "examples" / "04-best-of-n" / "best_of_n.py"
        source = shop.blobs.put(example.read_bytes())
        shop.inputs["recipe"] = InputBlob(
            source, "file", "path:b.py", {"source": "weighing_flow.py", "entry": "BestOfN"}
        )
        options |= {"recipe": "weighing_flow:BestOfN", "settings": {"accept": 0.5}}
        slots.append("recipe")
    attempt = shop.attempt(kind, kind, options, slots)
    result = run(attempt)
    assert result.status == "succeeded", result.failure
    if kind == "ppo":
        assert {"reward/right/mean", "reward/brief/std"} <= result.metrics.keys()


# --- through the plan -------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    believe_rewards(monkeypatch)
    made = Bench(tmp_path)
    (made.folder / "reward.py").write_text(TWO)
    yield made
    made.workspace.close()


def stage_of(reward: Any, kind: str = "grpo") -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["rewards"] = {name: {"ref": "reward.py", "entry": name} for name in ("right", "brief")}
        raw["stages"]["grpo"] |= {"reward": reward, "kind": kind}

    return change


def test_every_reward_is_an_input_and_weights_are_parameters(bench: Bench) -> None:
    planned = plan(bench.file(stage_of({"right": 1, "brief": 0.2})), bench.workspace)
    stage = planned.manifest.stage("grpo")
    assert stage.params["reward"] == {"right": 1.0, "brief": 0.2}
    assert {slot for slot in stage.inputs if slot.startswith("reward")} == {"reward:right", "reward:brief"}
    assert stage.inputs["reward:brief"].meta["entry"] == "brief"
    digests = {
        plan(bench.file(stage_of(reward)), bench.workspace).manifest.digest
        for reward in ({"right": 1, "brief": 0.2}, {"brief": 0.2, "right": 1.0}, {"right": 1, "brief": 0.3}, "right")
    }
    assert len(digests) == 3, "weights decide results, the order of writing does not"


def test_files_and_hosts_belong_to_their_reward(bench: Bench) -> None:
    (bench.folder / "words.txt").write_text("a\n")

    def change(raw: dict[str, Any]) -> None:
        stage_of({"right": 1, "brief": 0.2})(raw)
        raw["rewards"]["brief"] |= {"files": ["words.txt"], "network": ["judge.test:80"]}

    inputs = plan(bench.file(change), bench.workspace).manifest.stage("grpo").inputs
    assert "reward:brief/words.txt" in inputs
    assert inputs["reward:brief"].meta["network"] == ["judge.test:80"]
    assert "network" not in inputs["reward:right"].meta


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({}, "reward: at least one reward must have a weight other than 0, got an empty map"),
        (
            {"right": 0, "brief": 0.0},
            "reward: at least one reward must have a weight other than 0, got only brief, right: 0",
        ),
        ({"right": math.inf}, "reward.right: must be a finite number, got inf"),
        ({"right": math.nan}, "reward.right: must be a finite number, got nan"),
        ({"right": 1e7}, "reward.right: must be at most 1000000, got 10000000.0"),
        ({"right": -1e7}, "reward.right: must be at least -1000000"),
        ({"right": True}, "reward.right: must be a number, got true"),
        ({"right": "much"}, "reward.right: must be a number, got 'much'"),
        ({"right": None}, "reward.right: must be a number, got None"),
        ({"right": [1]}, "reward.right: must be a number"),
        (True, "reward: must be a name, or names with weights such as {right: 1.0, brief: 0.2}, got True"),
        (
            ["right", "brief"],
            "reward: must be a name, or names with weights such as {right: 1.0, brief: 0.2}, got a list",
        ),
        (None, "exactly one of reward and reward_model must be given, got neither"),
        ({f"r{i}": 1.0 for i in range(17)}, "reward: "),
        ({"Right!": 1.0}, "reward.Right!"),
        ({"rigth": 1.0}, "stages.grpo.reward.rigth: 'rigth' is not in `rewards` (did you mean 'right'?)"),
    ],
)
def test_what_is_no_weight_is_refused(bench: Bench, reward: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(bench.file(stage_of(reward)), bench.workspace)
    assert words in str(caught.value)
    assert "function-" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_is_held_against_the_rows(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text(TWO.replace("brief(completion)", "brief(completion, level)"))
    assert "rewards.brief: reward.py (brief): parameter 'level' is neither a column" in bench.refused(
        stage_of({"right": 1, "brief": 0.2})
    )


@pytest.mark.parametrize("kind", ["ppo", "dataflow"])
def test_where_it_may_be_left_out_too(kind: str) -> None:
    params = {"data": "d", "steps": 1, **({"recipe": "a:b"} if kind == "dataflow" else {})}
    with pytest.raises(InputError, match=rf"^{kind}: reward: must be a name, or names with weights .* got a list$"):
        NativeTrainer().check(kind, {**params, "reward": ["right"]})
    with pytest.raises(InputError, match=rf"^{kind}: reward.right: must be a finite number"):
        NativeTrainer().check(kind, {**params, "reward": {"right": math.inf}})


def test_a_reward_model_stands_alone() -> None:
    params = {"data": "d", "steps": 1, "reward": {"right": 1.0}, "reward_model": "judge"}
    with pytest.raises(
        InputError, match="reward needs the term reward_model, the weight of the reward model, got the terms right"
    ):
        NativeTrainer().check("ppo", params)


def test_a_locked_manifest_is_read_back_with_its_weights(bench: Bench) -> None:
    stage = plan(bench.file(stage_of({"right": 1, "brief": 0.2})), bench.workspace).manifest.stage("grpo")
    again = NativeTrainer().check("grpo", json.loads(json.dumps(stage.params)))
    assert dict(again.params) == stage.params
    assert set(again.inputs) == {slot for slot in stage.inputs if "/" not in slot}


def test_where_one_process_fails_nobody_is_left_at_work() -> None:
    """Else the next batch would be asked of a process that still answers this one."""
    begun, failed, ended = threading.Event(), threading.Event(), list[int]()

    def fails(call: RewardCall) -> list[float]:
        assert begun.wait(300)
        failed.set()
        raise ValueError("odd")

    def works(call: RewardCall) -> list[float]:
        begun.set()
        assert failed.wait(300)
        ended.append(sum(range(2_000_000)))
        return [1.0] * len(call)

    reward = ParallelReward([ScriptedReward(fails), ScriptedReward(works)])
    with pytest.raises(RewardError, match="odd"):
        reward.score(RewardCall(prompts=["p", "q"], completions=["a", "b"], rows=[{"n": 1}, {"n": 2}]))
    assert len(ended) == 1
    reward.close()
