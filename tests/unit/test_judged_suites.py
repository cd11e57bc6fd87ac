"""Evaluations that a reward scores: what is measured, what fails, what a plan says of rows without answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_world import believe_rewards
from hypothesis import given, strategies as st
from test_evaluate_job import Bench, says
from test_preflight_fitting import Bench as Plans, Change
from transformers import PreTrainedTokenizerFast

from posttrain import submit
from posttrain.app.runs import plan, view_plan
from posttrain.control.scores import Measured, Responses
from posttrain.control.verdicts import read_evidence
from posttrain.data.rows import distinct_items
from posttrain.domain.errors import FailureClass, InputError
from posttrain.domain.jobs import InputBlob, JobResult
from posttrain.domain.kinds import ItemRange, compares
from posttrain.engine.config import InitModelConfig, SuiteConfig
from posttrain.engine.evaluation.evaluate import Meter, RewardJudge, SuiteResult, _mean, evaluate_suite, suite_items
from posttrain.engine.models.files import character_tokenizer
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.jobs.bodies import evaluation
from posttrain.jobs.entry import run
from posttrain.sandbox.port import RewardCall, RewardError, ScriptedReward
from posttrain.store.attempts import AttemptFolder
from posttrain.views.trace import suite_answers

REWARDS = (
    "def digits(completion):\n    return sum(map(str.isdigit, completion)) / max(1, len(completion))\n\n\n"
    "def level(completion, level):\n    return {'score': level / 4, 'long': len(completion)}\n\n\n"
    "def perhaps(completion, level):\n    return 0.0 if level is None else level / 4\n\n\n"
    "def much(completion):\n    return 7.25\n\n\n"
    "def picky(completion):\n    return None\n\n\n"
    "def frail(prompt, completion):\n    return 1 / (len(prompt) - 7)\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(InitModelConfig().characters)


def judged(
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Mapping[str, Any]],
    answers: Mapping[str, list[str]],
    reward: Callable[[RewardCall], Sequence[float | None]],
    **config: Any,
) -> SuiteResult:
    suite = SuiteConfig(data="d", reward="r", max_new_tokens=12, **config)
    items = suite_items(rows, [row["prompt"] for row in rows], tokenizer, suite, name="d", context=512)
    judge = RewardJudge(ScriptedReward(reward), "h", suite.worth)
    found = evaluate_suite("h", suite, items, says(tokenizer, answers), tokenizer, seed=0, meter=Meter(), judge=judge)
    assert found is not None
    return found


def lengths(call: RewardCall) -> list[float]:
    """A tenth for every character, and what the row's level says."""
    return [len(text) / 10 + row.get("level", 0) for text, row in zip(call.completions, call.rows, strict=True)]


# --- the suite --------------------------------------------------------------------------------------------------------


def test_every_response_is_scored_with_its_row(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "q1", "level": 0.5}, {"prompt": "q2"}]
    answers = {"q1": ["1", "12", "123"], "q2": ["1234", "12345", "1"]}
    found = judged(tokenizer, rows, answers, lengths, samples=3)
    said = np.array([[len(text) for text in answers[row["prompt"]]] for row in rows], dtype=np.float64)
    worth = said / 10 + np.array([[0.5], [0.0]])
    metrics = found.metrics()
    np.testing.assert_allclose(metrics["h/reward"], worth[:, 0], rtol=1e-12)
    np.testing.assert_allclose(metrics["h/sampled_reward"], worth.mean(axis=1), rtol=1e-12)
    assert set(metrics) == {"h/reward", "h/sampled_reward", "h/response_tokens", "h/truncated"}, "nothing to compare"
    assert {r.correct for r in found.responses} == {None}


def test_answers_are_compared_where_there_are_some(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "q1", "answer": "1"}, {"prompt": "q2", "answer": None}, {"prompt": "q3", "answer": "2"}]
    answers = {"q1": ["1", "2"], "q2": ["1", "1"], "q3": ["1", "2"]}
    found = judged(tokenizer, rows, answers, lengths, samples=1, pass_at=(1,))
    metrics = found.metrics()
    assert (metrics["h/accuracy"], metrics["h/pass@1"]) == ([1.0, 0.0], [1.0, 0.0])
    assert [item.text for item in found.items_of("h/accuracy")] == ["q1", "q3"]
    assert len(metrics["h/reward"]) == len(found.items_of("h/reward")) == 3
    assert set(metrics) == set(found.config.metrics("h"))


def test_an_answer_that_is_no_text_is_left_to_the_reward(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "q1", "answer": ["1", "2"]}, {"prompt": "q2", "answer": "3"}]
    found = judged(tokenizer, rows, {"q1": ["1"], "q2": ["3"]}, lambda call: [0.5] * len(call))
    assert found.metrics()["h/accuracy"] == [1.0]
    assert [r.correct for r in found.responses] == [None, True]


def test_ranges_are_declared() -> None:
    ranges = SuiteConfig(data="d", reward={"a": 1.0, "b": 2.0}, reward_range=(-1.0, 3.0), samples=2).metrics("h")
    assert ranges["h/reward"] == ranges["h/sampled_reward"] == ItemRange(-1.0, 3.0)
    assert "h/sampled_reward" not in SuiteConfig(data="d", reward="r").metrics("h")
    assert "h/reward" not in SuiteConfig(data="d").metrics("h")


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_a_mean_stays_in_the_range_of_what_it_is_of(values: list[float]) -> None:
    assert min(values) <= _mean(values) <= max(values)
    assert _mean([0.1] * 3) == 0.1  # whose sum divided by three is more


@pytest.mark.parametrize(
    ("worth", "words"),
    [
        (1.0000000000000002, "must have a score from 0 to 1 (reward_range), got 1.0000000000000002 for '12'"),
        (-1e-9, "must have a score from 0 to 1 (reward_range), got -1.0000000000000001e-09"),
        (None, "the reward returned no score for '12'; return a score for every"),
        (float("nan"), "must return finite numbers, got nan"),
        (float("inf"), "must return finite numbers, got inf"),
    ],
)
def test_a_value_outside_of_the_range_is_an_error_and_never_clipped(
    tokenizer: PreTrainedTokenizerFast, worth: float | None, words: str
) -> None:
    rows, answers = [{"prompt": "q1"}, {"prompt": "q2"}], {"q1": ["1"], "q2": ["12"]}
    with pytest.raises(RewardError) as caught:
        judged(tokenizer, rows, answers, lambda call: [worth if text == "12" else 0.5 for text in call.completions])
    assert str(caught.value).startswith("suite h: item sha256:")
    assert "('q2'): " in str(caught.value)
    assert words in str(caught.value)
    assert "reward_errors_max" not in str(caught.value), "an evaluation has no such key"


def test_one_that_fails_fails_the_evaluation(tokenizer: PreTrainedTokenizerFast) -> None:
    def score(call: RewardCall) -> list[float]:
        if "12" in call.completions:
            raise ValueError("no opinion")
        return [0.5] * len(call)

    with pytest.raises(RewardError, match=r"suite h: item sha256:\S+ \('q2'\): .*ValueError: no opinion"):
        judged(tokenizer, [{"prompt": "q1"}, {"prompt": "q2"}], {"q1": ["1"], "q2": ["12"]}, score)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"reward": "r", "reward_range": (1.0, 0.0)}, "reward_range must be two numbers, the smaller one first"),
        ({"reward": "r", "reward_range": (1.0, 1.0)}, "got [1, 1]"),
        ({"reward": "r", "reward_range": (0.0, float("inf"))}, "finite"),
        ({"reward": "r", "reward_range": (0.0, 1e10)}, "1000000000"),
        ({"reward_range": (0.0, 2.0)}, "reward_range needs a reward"),
        ({"reward_timeout": 300.0}, "reward_timeout needs a reward"),
        ({"reward": {"a": 0.0}}, "weight other than 0"),
    ],
)
def test_settings_that_say_nothing_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        SuiteConfig(data="d", **config)


def test_a_prompt_that_is_repeated_is_one_item_only_where_its_row_is() -> None:
    rows = [{"prompt": "q", "level": 1}, {"prompt": "q", "level": 1}, {"prompt": "p", "level": 2}]
    assert len(distinct_items(rows, "d", whole=True)) == 2
    rows[1]["level"] = 3
    assert len(distinct_items(rows, "d")) == 2
    with pytest.raises(InputError, match="d row 2 repeats the prompt of row 1 but has a different level"):
        distinct_items(rows, "d", whole=True)


def test_metrics_that_compare() -> None:
    compared = ["a/accuracy", "a.b/sampled_accuracy", "a/pass@3"]
    assert [compares(name) for name in [*compared, "a/reward", "a/sampled_reward", "accuracy/truncated"]] == [
        *[True] * 3, *[False] * 3,
    ]  # fmt: skip


# --- the job ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("judged"))


def evaluated(
    bench: Bench, name: str, entries: Mapping[str, str], rows: list[dict[str, Any]] | None = None, **suite: Any
) -> tuple[AttemptFolder, JobResult]:
    order = bench.order(rows, **suite)
    for slot, function in entries.items():
        meta = {"entry": function, "dialect": "auto", "source": "rules.py"}
        order.inputs[slot] = InputBlob(bench.blobs.put(REWARDS.encode()), "file", "path:rules.py", meta)  # type: ignore[index]
    attempt = bench.attempt(name, order)
    assert run(str(attempt.path), evaluation.body) == 0
    result = attempt.read_result()
    assert result is not None
    return attempt, result


def one(slot: str = "rewards.heldout") -> dict[str, Any]:
    return {"reward": slot}


def test_tables_hold_rewards_with_their_range(bench: Bench) -> None:
    attempt, result = evaluated(bench, "tables", {"rewards.heldout": "digits"}, **one(), reward_range=[0.0, 2.0])
    assert result.status == "succeeded", result.failure
    evidence = read_evidence((attempt.outputs / "metrics.parquet").read_bytes(), "metrics")
    assert evidence["heldout/reward"].range == evidence["heldout/sampled_reward"].range == ItemRange(0.0, 2.0)
    table = pq.read_table(attempt.outputs / "items.parquet").to_pylist()
    for row in table:
        text = row["response"]
        assert row["reward"] == sum(map(str.isdigit, text)) / max(1, len(text))
    greedy = {row["item_id"]: row["reward"] for row in table if row["kind"] == "greedy"}
    found = evidence["heldout/reward"]
    assert dict(zip(found.item_ids, found.values.tolist(), strict=True)) == greedy
    assert result.metrics["heldout/reward"] == pytest.approx(np.mean(list(greedy.values())), rel=1e-12)
    again, _ = evaluated(bench, "again", {"rewards.heldout": "digits"}, **one(), reward_range=[0.0, 2.0])
    for name in ("metrics", "items"):
        both = [(each.outputs / f"{name}.parquet").read_bytes() for each in (attempt, again)]
        assert both[0] == both[1]


def test_rows_without_answers_are_measured_by_weighted_rewards(bench: Bench) -> None:
    rows = [{"prompt": f"Q: {i}", "level": i % 4} for i in range(8)]
    slots = {"rewards.heldout:digits": "digits", "rewards.heldout:level": "level"}
    weights = {"reward": {"digits": 0.5, "level": 0.5}}
    attempt, result = evaluated(bench, "weighted", slots, rows, **weights, samples=0, pass_at=[])
    assert result.status == "succeeded", result.failure
    assert set(result.metrics) == {"heldout/reward", "heldout/response_tokens", "heldout/truncated"}
    for row, asked in zip(pq.read_table(attempt.outputs / "items.parquet").to_pylist(), rows, strict=True):
        parts = json.loads(row["components"])
        assert parts["level"] == asked["level"] / 4
        assert parts["level/long"] == len(row["response"])
        assert row["reward"] == pytest.approx(0.5 * parts["digits"] + 0.5 * parts["level"], rel=1e-12)
        assert (row["answer"], row["correct"]) == (None, None)
    read = Responses((attempt.outputs / "items.parquet").read_bytes(), "evaluate")
    first = read.texts(read.greedy("heldout")[:1])[0]
    assert (first.answered.correct, first.answer) == (None, "")
    assert first.components["level"] == 0.0
    assert first.answered.reward == pytest.approx(0.5 * first.components["digits"])


@pytest.mark.parametrize(
    ("entry", "words", "spent"),
    [
        ("much", "must have a score from 0 to 1 (reward_range), got 7.25", True),
        ("picky", "the reward returned no score for ", True),
        ("level", "parameter 'level' is neither a column", False),
        ("gone", "rules.py has no function 'gone'", False),
    ],
)
def test_a_reward_that_cannot_judge_fails_with_one_line(bench: Bench, entry: str, words: str, spent: bool) -> None:
    attempt, result = evaluated(bench, f"bad-{entry}", {"rewards.heldout": entry}, **one())
    assert result.failure is not None
    assert (result.failure.kind, bool(result.tokens)) == (FailureClass.BAD_INPUT, spent)
    assert words in result.failure.message
    assert "\n" not in result.failure.message
    assert not (attempt.outputs / "metrics.parquet").exists(), "no gate may judge on what is left"


def test_a_column_that_other_rows_have_is_none(bench: Bench) -> None:
    rows = [{"prompt": "Q: 1", "level": 4}, {"prompt": "Q: 2"}]
    attempt, result = evaluated(bench, "none", {"rewards.heldout": "perhaps"}, rows, **one(), samples=0, pass_at=[])
    assert result.status == "succeeded", result.failure
    table = pq.read_table(attempt.outputs / "items.parquet").to_pylist()
    assert [row["reward"] for row in table] == [1.0, 0.0]


def test_one_failing_item_fails_it_with_its_name(bench: Bench) -> None:
    rows = [{"prompt": "Q: 1234"}, {"prompt": "Q: 12345"}, {"prompt": "Q: 12"}]
    _, result = evaluated(bench, "frail", {"rewards.heldout": "frail"}, rows, **one(), reward_range=[-2.0, 2.0])
    assert result.failure is not None
    assert "('Q: 1234'): path:rules.py: rules.py:" in result.failure.message
    assert "ZeroDivisionError" in result.failure.message


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    believe_rewards(monkeypatch)
    made = Plans(tmp_path)
    (made.folder / "rules.py").write_text(REWARDS)
    yield made
    made.workspace.close()


def suite_of(*gates: dict[str, Any], **suite: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["rewards"] |= {name: {"ref": "rules.py", "entry": name} for name in ("digits", "level")}
        raw["stages"]["grpo"].pop("probe")
        raw["stages"]["evaluate"]["suites"]["heldout"] |= {"reward": "digits", **suite}
        if gates:
            raw |= {"gates": list(gates), "release": {"channel": "prod", "model": "grpo"}}

    return change


def bare(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"Q: sort {i}", **columns} for i in range(count)]


def test_the_reward_of_a_suite_is_an_input(plans: Plans) -> None:
    stage = plan(plans.file(suite_of()), plans.workspace).manifest.stage("evaluate")
    assert stage.inputs["rewards.heldout"].meta["entry"] == "digits"
    assert stage.params["suites"]["heldout"]["reward"] == "rewards.heldout", "what it is called decides nothing"
    stage = plan(plans.file(suite_of(reward={"digits": 2})), plans.workspace).manifest.stage("evaluate")
    assert stage.inputs["rewards.heldout:digits"].meta["entry"] == "digits"
    assert stage.params["suites"]["heldout"]["reward"] == {"digits": 2.0}


def test_each_suite_reward_is_held_against_the_rows(plans: Plans) -> None:
    refused = plans.refused(suite_of(reward={"digits": 1, "level": 0.5}))
    assert "rewards.level: rules.py (level): parameter 'level' is neither a column of dataset:heldout@1" in refused
    assert "stages.evaluate.suites.heldout.reward.nope: 'nope' is not in `rewards`" in plans.refused(
        suite_of(reward={"nope": 1})
    )


def test_rows_without_answers_are_told(plans: Plans) -> None:
    plans.heldout(*bare(3), {"prompt": "Q: sort 77", "answer": "77"})
    told = "evaluate: {} items of {} have no answer to compare with, so heldout/accuracy is {}"
    some = told.format("3 of 4", "dataset:heldout@2", "measured only on the other 1")
    assert some in view_plan(plans.workspace, plans.file(suite_of())).warnings
    plans.heldout(*bare(3))
    none = told.format("3 of 3", "dataset:heldout@3", "not measured")
    assert none in submit(plans.file(suite_of()), workspace=plans.workspace).warnings


def test_without_a_reward_rows_need_answers(plans: Plans) -> None:
    plans.heldout(*bare(3))

    def unjudged(raw: dict[str, Any]) -> None:
        suite_of()(raw)
        del raw["stages"]["evaluate"]["suites"]["heldout"]["reward"]

    assert "must have an answer" in plans.refused(unjudged)


def test_a_gate_on_answers_that_are_not_there_is_refused(plans: Plans) -> None:
    plans.heldout(*bare(90))
    gate = {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.1}
    why = "heldout/accuracy requires answers, and dataset:heldout@2 has none; gate the suite's reward instead"
    assert plans.refused(suite_of(gate)) == f"gates.accuracy: {why}"
    plans.heldout(*bare(60), *({"prompt": f"Q: sort 1{i}", "answer": "1"} for i in range(100, 110)))
    assert "requires min_items: 20 to be judged, but its suite has 10 items" in plans.refused(suite_of(gate))


def test_a_gate_on_the_reward_is_judged_on_its_range(plans: Plans) -> None:
    plans.heldout(*bare(90))
    gate = {"name": "worth", "metric": "heldout/reward", "at_least": 0.5}
    planned = view_plan(plans.workspace, plans.file(suite_of(gate)))
    (note,) = planned.power
    assert (note.gate, note.items) == ("worth", 90)
    assert "at_least" in plans.refused(suite_of({**gate, "at_least": 1.5}))
    plan(plans.file(suite_of({**gate, "at_least": 1.5}, reward_range=[0, 2])), plans.workspace)


def test_repeated_prompts_with_other_columns_are_refused(plans: Plans) -> None:
    plans.heldout({"prompt": "Q: sort 1", "level": 1}, {"prompt": "Q: sort 1", "level": 2})
    assert "repeats the prompt of row 1 but has a different level" in plans.refused(suite_of())


def test_an_evaluation_alone_needs_the_cell_too(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.preflight.confinement._ask", lambda: {"whole": False, "notes": ["no namespaces"]})

    def change(raw: dict[str, Any]) -> None:
        suite_of()(raw)
        raw["stages"] = {"evaluate": {**raw["stages"]["evaluate"], "model": "base"}}

    assert "stages evaluate: rewards and observe must be confined, which is not possible here" in plans.refused(change)


def test_a_baseline_is_scored_by_the_same_reward(plans: Plans) -> None:
    plans.heldout(*bare(90))
    gate = {"name": "worth", "metric": "heldout/reward", "better_than": "channel", "if_channel_empty": "pass"}
    manifest = plan(plans.file(suite_of(gate)), plans.workspace).manifest
    mine, other = manifest.stage("evaluate"), manifest.stage("baseline-evaluate")
    assert mine.inputs["rewards.heldout"] == other.inputs["rewards.heldout"]


def test_a_locked_suite_is_read_back(plans: Plans) -> None:
    for reward in ("digits", {"digits": 1.0}):
        stage = plan(plans.file(suite_of(reward=reward)), plans.workspace).manifest.stage("evaluate")
        again = NativeTrainer().check("evaluate", json.loads(json.dumps(stage.params)))
        assert dict(again.params) == stage.params
        assert set(again.inputs) == set(stage.inputs)


def test_what_another_reward_scored_is_another_measurement(plans: Plans) -> None:
    def identity(change: Change, metric: str) -> tuple[str, str]:
        stage = plan(plans.file(change), plans.workspace).manifest.stage("evaluate")
        return Measured(stage, None, {}).identity(metric)  # type: ignore[arg-type]

    def other(raw: dict[str, Any]) -> None:
        suite_of()(raw)
        raw["rewards"]["digits"]["entry"] = "much"

    def renamed(raw: dict[str, Any]) -> None:
        suite_of(reward="letters")(raw)
        raw["rewards"]["letters"] = raw["rewards"].pop("digits")

    same = identity(suite_of(), "heldout/reward")
    assert same == identity(renamed, "heldout/reward")
    changed = [other, suite_of(reward_range=[0, 2]), suite_of(reward={"digits": 1.0})]
    assert len({same, *(identity(change, "heldout/reward") for change in changed)}) == 4
    assert len({identity(change, "heldout/accuracy") for change in [suite_of(), *changed]}) == 1


def test_answers_of_a_scored_suite_are_shown_by_reward(bench: Bench, plans: Plans) -> None:
    rows = [{"prompt": f"Q: {i}", "level": i % 4} for i in range(8)]
    attempt, _ = evaluated(bench, "shown", {"rewards.heldout": "level"}, rows, **one(), samples=0, pass_at=[])

    def change(raw: dict[str, Any]) -> None:
        suite_of()(raw)

    manifest = plan(plans.file(change), plans.workspace).manifest
    digest = plans.workspace.blobs.put((attempt.outputs / "items.parquet").read_bytes())

    class Row:
        name, outputs = "evaluate", {"items": {"digest": digest}}

    (shown,) = suite_answers(plans.workspace, manifest, [Row()], [])  # type: ignore[list-item]
    assert (shown.items, shown.wrong, shown.scored) == (0, 0, 8)
    low, high = [one.answered.reward for one in shown.low_shown], [one.answered.reward for one in shown.high_shown]
    assert low == sorted(low)
    assert low[0] == 0.0
    assert len(low) + len(high) == 8
