"""Evaluation: what is measured per item, and the job that leaves it as tables."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerFast

from posttrain.control.verdicts import read_evidence
from posttrain.data.rows import read_rows
from posttrain.decision.gates import judge
from posttrain.domain.errors import BudgetExceededError, FailureClass, InputError, IntegrityError
from posttrain.domain.gates import GateRule, Outcome
from posttrain.domain.jobs import InputBlob, JobOrder, JobResult, Note, Progress
from posttrain.domain.kinds import ItemRange
from posttrain.engine.config import InitModelConfig, SuiteConfig
from posttrain.engine.evaluation.evaluate import (
    Extractor,
    Item,
    Meter,
    SuiteResult,
    evaluate_suite,
    pass_at_k,
    suite_items,
)
from posttrain.engine.models.files import character_tokenizer, initial_model, save_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.jobs.bodies import evaluation
from posttrain.jobs.entry import run
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

LAST_ANSWER = r".*A: (.*)$"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(InitModelConfig().characters)


def rows_of(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"prompt": question, "answer": answer} for question, answer in pairs]


def items_of(tokenizer: PreTrainedTokenizerFast, config: SuiteConfig, *pairs: tuple[str, str]) -> list[Item]:
    rows = rows_of(*pairs)
    texts = [row["prompt"] for row in rows]
    return suite_items(rows, texts, tokenizer, config, name="dataset:h@1", context=512)


def says(
    tokenizer: PreTrainedTokenizerFast, answers: Mapping[str, list[str]], *, ended: bool = True
) -> ScriptedRollout:
    """A rollout that answers the question with the sample-th of its answers."""

    def script(prompt: tuple[int, ...], sample: int) -> list[int]:
        text = answers[tokenizer.decode(list(prompt))][sample]
        return tokenizer.encode(text) + [tokenizer.eos_token_id] * ended

    return ScriptedRollout(script, eos_token_id=tokenizer.eos_token_id)


def evaluated(result: SuiteResult | None) -> SuiteResult:
    assert result is not None
    return result


class TestExtraction:
    @pytest.mark.parametrize(
        ("pattern", "response", "expected"),
        [
            (SuiteConfig(data="d").extract, "whole\ntext", "whole\ntext"),
            (SuiteConfig(data="d").extract, "", None),
            (LAST_ANSWER, "sort 31 A: 31 A: 13", "13"),
            (LAST_ANSWER, "A 13", None),
            (r"(\d+)", "3 then 14", "14"),
            (r"(a)|b", "a then b", None),
            (r"#(\d*)", "#1 #", ""),
        ],
    )
    def test_last_match(self, pattern: str, response: str, expected: str | None) -> None:
        assert Extractor(pattern)(response) == expected

    @pytest.mark.parametrize("pattern", [r"((a|aa)+)$", r"((?:a|a)*)$", r"(\w|\w\w)*!$"])
    def test_a_catastrophic_pattern_ends(self, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
        monkeypatch.setattr("posttrain.engine.evaluation.evaluate._SECONDS", 0.2)
        with pytest.raises(InputError, match=r"must search a response in at most 0\.2 s, but .* of 92 characters"):
            Extractor(pattern)("x" * 40 + "!" + "a" * 48 + "!yc")

    def test_what_is_no_pattern(self) -> None:
        with pytest.raises(InputError, match="extract must be a regular expression"):
            Extractor("(")


class TestPassAtK:
    @given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
    def test_equals_enumeration(self, case: tuple[int, int, int]) -> None:
        n, c, k = case
        draws = list(itertools.combinations([i < c for i in range(n)], k))
        assert math.isclose(pass_at_k(n, c, k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)

    def test_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="1 <= k <= samples"):
            pass_at_k(3, 1, 4)


class TestSuite:
    def test_values_per_item(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d", extract=LAST_ANSWER, samples=4, pass_at=(1, 2), max_new_tokens=12)
        items = items_of(tokenizer, config, ("q1", "13"), ("q2", "9"))
        answers = {"q1": ["A: 13", "A: 31", "A: 13", "no"], "q2": ["so A: 8", "A: 9", "A: 8", "A: 8"]}
        meter = Meter()
        result = evaluated(evaluate_suite("h", config, items, says(tokenizer, answers), tokenizer, seed=0, meter=meter))
        assert result.metrics() == {
            "h/accuracy": [1.0, 0.0],
            "h/response_tokens": [6.0, 8.0],
            "h/truncated": [0.0, 0.0],
            "h/sampled_accuracy": [0.5, 0.25],
            "h/pass@1": [0.5, 0.25],
            "h/pass@2": [pytest.approx(5 / 6), pytest.approx(0.5)],
        }
        assert set(result.metrics()) == set(config.metrics("h"))
        read = 2 * sum(len(item.prompt) for item in items)  # once to be answered greedily, once for all samples
        assert meter.tokens == read + sum(r.tokens for r in result.responses)
        first = result.responses[0]
        assert (first.kind, first.text, first.extracted, first.logprob) == ("greedy", "A: 13", "13", -6.0)

    def test_cut_response_is_truncated_and_wrong_unless_it_says_it(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d", extract=LAST_ANSWER, max_new_tokens=5)
        items = items_of(tokenizer, config, ("q", "13"))
        rollout = says(tokenizer, {"q": ["A: 13 and more"]}, ended=False)
        result = evaluated(evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=Meter()))
        assert result.metrics() == {"h/accuracy": [1.0], "h/response_tokens": [5.0], "h/truncated": [1.0]}

    def test_a_response_without_a_match_is_wrong_whatever_the_answer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d", extract=LAST_ANSWER, max_new_tokens=5)
        items = [replace(item, answer="") for item in items_of(tokenizer, config, ("q", "13"))]
        rollout = says(tokenizer, {"q": ["no"]})
        result = evaluated(evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=Meter()))
        assert result.metrics()["h/accuracy"] == [0.0]

    def test_any_of_several_ends_of_sequence_is_no_part_of_the_answer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """The model stops on every id of its generation config; its tokenizer knows only one of them."""
        config = SuiteConfig(data="d")
        items = items_of(tokenizer, config, ("q", "3"))
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        rollout = ScriptedRollout(
            lambda prompt, sample: [*tokenizer.encode("3"), tokenizer.pad_token_id], eos_token_id=tokenizer.pad_token_id
        )
        result = evaluated(evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=Meter()))
        assert [r.text for r in result.responses] == ["3"]
        assert result.metrics()["h/accuracy"] == [1.0]

    def test_identity_is_prompt_and_answer_alone(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d")
        a, b = items_of(tokenizer, config, ("q1", "1"), ("q2", "2"))
        assert [i.id for i in items_of(tokenizer, config, ("q2", "2"), ("q1", "1"))] == [b.id, a.id]
        other = suite_items(
            [{"prompt": "q1", "answer": "1", "level": 9}], ["q1"], tokenizer, config, name="x", context=99
        )
        assert other[0].id == a.id
        assert items_of(tokenizer, config, ("q1", "2"))[0].id not in (a.id, b.id)
        with pytest.raises(InputError, match=f"dataset:h@1: rows of a suite must be distinct, got item {a.id} more"):
            items_of(tokenizer, config, ("q1", "1"), ("q1", "1"))

    def test_refused_rows(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(InputError, match=r"x row 1 needs an `answer`: .* got columns prompt"):
            suite_items([{"prompt": "q"}], ["q"], tokenizer, SuiteConfig(data="d"), name="x", context=99)
        for odd in (["1"], True, {"a": "1"}):
            with pytest.raises(InputError, match=r"x row 1 needs an `answer`: the text or number"):
                suite_items(
                    [{"prompt": "q", "answer": odd}], ["q"], tokenizer, SuiteConfig(data="d"), name="x", context=99
                )
        with pytest.raises(InputError, match=r"row 1: prompt must have at most 65 - 64 \(max_new_tokens\)"):
            suite_items(
                [{"prompt": "q1", "answer": ""}], ["q1"], tokenizer, SuiteConfig(data="d"), name="x", context=65
            )

    def test_budget_is_checked_before_a_batch(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d", max_new_tokens=8, samples=2)
        items = items_of(tokenizer, config, ("q", "1"))
        rollout = says(tokenizer, {"q": ["1", "1"]})
        meter = Meter(limit=19)  # greedy: 1 + 8 at the most, 3 in fact; then 1 + twice 8
        with pytest.raises(BudgetExceededError, match=r"at most 17 tokens\): 3 of the stage's 19 tokens are spent"):
            evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=meter)
        assert meter.tokens == 3
        with pytest.raises(BudgetExceededError, match="deadline passed"):
            evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=Meter(deadline=1.0))

    def test_stops_between_batches(self, tokenizer: PreTrainedTokenizerFast) -> None:
        config = SuiteConfig(data="d", samples=1)
        items = items_of(tokenizer, config, ("q", "1"))
        seen: list[int] = []
        result = evaluate_suite(
            "h", config, items, says(tokenizer, {"q": ["1"]}), tokenizer, seed=0, meter=Meter(),
            between=lambda count: bool(seen.append(count)),
        )  # fmt: skip
        assert result is None
        assert seen == [1]


# --- the job ----------------------------------------------------------------------------------------------------------


class Bench:
    """A store with a tiny random model and a suite, and orders to evaluate them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = open_blobs(root / "blobs")
        config = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1, context_length=64)
        tokenizer = character_tokenizer(config.characters)
        save_model(adopt_module(initial_model(config, tokenizer, 5)), tokenizer, root / "model")
        self.model = put_tree(self.blobs, root / "model")
        draw = random.Random(3)
        self.rows = [{"prompt": f"Q: {draw.randint(0, 10**4)}", "answer": str(draw.randint(0, 9))} for _ in range(24)]

    def order(self, rows: list[dict[str, Any]] | None = None, **suite: object) -> JobOrder:
        data = "".join(json.dumps(row) + "\n" for row in (self.rows if rows is None else rows)).encode()
        asked = {"data": "suites.heldout", "extract": r"(\d)", "samples": 2, "pass_at": [1, 2], "max_new_tokens": 8}
        return JobOrder(
            name="r-evaluate-1",
            kind="evaluate",
            seed=11,
            params={"model": "model", "suites": {"heldout": asked | suite}},
            inputs={
                "model": InputBlob(self.model, "tree", "model:tiny@1"),
                "suites.heldout": InputBlob(self.blobs.put(data), "file", "dataset:heldout@1"),
            },
            store_url=self.blobs.url,
            cache_dir=str(self.root / "cache"),
        )

    def attempt(self, name: str, order: JobOrder) -> AttemptFolder:
        folder = self.root / name
        folder.mkdir()
        attempt = AttemptFolder(folder)
        attempt.write_order(order)
        return attempt


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture
def answered(bench: Bench, request: pytest.FixtureRequest) -> Callable[..., tuple[AttemptFolder, JobResult]]:
    def _run(order: JobOrder, name: str = "") -> tuple[AttemptFolder, JobResult]:
        attempt = bench.attempt(name or request.node.name, order)
        assert run(str(attempt.path), evaluation.body) == 0
        result = attempt.read_result()
        assert result is not None
        return attempt, result

    return _run


Answered = Callable[..., tuple[AttemptFolder, JobResult]]


def test_tables_hold_what_a_gate_reads(bench: Bench, answered: Answered) -> None:
    attempt, result = answered(bench.order())
    assert result.status == "succeeded"
    assert {name: output.form for name, output in result.outputs.items()} == {"metrics": "file", "items": "file"}
    metrics = (attempt.path / result.outputs["metrics"].path).read_bytes()
    evidence = read_evidence(metrics, "metrics")
    assert (
        set(evidence) == set(result.metrics) == set(SuiteConfig(data="d", samples=2, pass_at=(1, 2)).metrics("heldout"))
    )
    ranges = SuiteConfig(data="d", samples=2, pass_at=(1, 2), max_new_tokens=8).metrics("heldout")
    assert {name: found.range for name, found in evidence.items()} == ranges
    assert ranges["heldout/response_tokens"] == ItemRange(1.0, 8.0)
    assert [name for name, possible in ranges.items() if possible.binary] == ["heldout/accuracy", "heldout/truncated"]
    for name, found in evidence.items():
        assert len(set(found.item_ids)) == len(bench.rows)
        assert found.values.mean() == pytest.approx(result.metrics[name])
    table = pq.read_table(attempt.path / result.outputs["items"].path).to_pylist()
    assert len(table) == 3 * len(bench.rows)
    assert [row["answer"] for row in table if row["kind"] == "greedy"] == [row["answer"] for row in bench.rows]
    assert all(row["correct"] == (row["extracted"] == row["answer"]) for row in table)
    assert all(row["tokens"] <= 8 and row["logprob"] < 0 for row in table)
    facts, _ = attempt.facts()
    progress = [fact for fact in facts if isinstance(fact, Progress)]
    assert (progress[-1].step, progress[-1].total, progress[-1].tokens) == (72, 72, result.tokens)


def test_repeated_rows_are_one_item_and_told(bench: Bench, answered: Answered) -> None:
    """20 rows ten times over passed a gate 41 % of the time that a bad model should pass at 5 %."""
    rows = bench.rows[:20]
    once, _ = answered(bench.order(rows=rows), "once")
    attempt, _ = answered(bench.order(rows=rows * 10), "ten-times")
    for name in ("items", "metrics"):
        assert (attempt.outputs / f"{name}.parquet").read_bytes() == (once.outputs / f"{name}.parquet").read_bytes()
    evidence = read_evidence((attempt.outputs / "metrics.parquet").read_bytes(), "metrics")
    assert len(evidence["heldout/accuracy"].item_ids) == 20
    notes = [fact.message for fact in attempt.facts()[0] if isinstance(fact, Note)]
    assert notes == [
        "dataset:heldout@1: 180 of 200 rows repeat another row; repeats count once, so the suite has 20 items"
    ]


def test_several_files_are_one_suite(bench: Bench, answered: Answered) -> None:
    folder = bench.root / "shards"
    folder.mkdir()
    (folder / "a.csv").write_text("prompt,answer\nQ: sort 31,13\n")
    (folder / "b.jsonl").write_text(json.dumps({"prompt": "Q: sort 12", "answer": "12"}) + "\n")
    order = bench.order()
    shards = InputBlob(put_tree(bench.blobs, folder), "tree", "dataset:heldout@2")
    attempt, result = answered(replace(order, inputs={**order.inputs, "suites.heldout": shards}))
    assert result.status == "succeeded", result.failure
    items = pq.read_table(attempt.outputs / "items.parquet").to_pylist()
    assert [row["answer"] for row in items if row["kind"] == "greedy"] == ["13", "12"]


def test_one_prompt_with_two_answers_is_refused(bench: Bench, answered: Answered) -> None:
    other = {**bench.rows[0], "answer": "other"}
    _, result = answered(bench.order(rows=[*bench.rows, other]))
    assert result.failure is not None
    assert "dataset:heldout@1 row 25 repeats the prompt of row 1 but has a different answer" in result.failure.message


def _table(**columns: list[Any]) -> bytes:
    plain = {"metric": ["m"] * 30, "item_id": [f"i{n}" for n in range(30)], "value": [1.0] * 30}
    sink = io.BytesIO()
    declared = {"binary": [True] * 30, "low": [0.0] * 30, "high": [1.0] * 30}
    pq.write_table(pyarrow.table(plain | declared | columns), sink)
    return sink.getvalue()


def test_an_item_without_a_value_is_no_zero() -> None:
    """Judged as 0 it would be one more wrong answer, or under `at_most` a good one; it is an ERROR."""
    for hole in (None, float("nan")):
        evidence = read_evidence(_table(value=[hole] + [0.0] * 29), "metrics")["m"]
        for rule in (GateRule(name="g", metric="m", at_most=0.5), GateRule(name="g", metric="m", at_least=0.1)):
            verdict = judge(rule, evidence, None, channel_empty=True, seed=0)
            assert verdict.outcome is Outcome.ERROR
            assert "is NaN or infinite on 1 items, e.g. 'i0'" in verdict.reason


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"low": [0.0] * 29 + [0.5]}, "metrics: m must declare the same range on all its items, got 2; evaluate again"),
        ({"high": [None] * 30}, "evaluate again"),
        ({"low": [2.0] * 30}, "must be two finite numbers in order, got 2.0 to 1.0; evaluate again"),
        ({"high": [4.0] * 30}, "range of a binary metric must be 0 to 1, got 0.0 to 4.0; evaluate again"),
    ],
)
def test_a_range_that_is_none_is_refused(columns: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(IntegrityError, match=re.escape(words)):
        read_evidence(_table(**columns), "metrics")


def test_a_table_of_an_earlier_version_is_not_judged_without_its_range() -> None:
    table = pq.read_table(io.BytesIO(_table())).drop_columns(["low", "high"])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    with pytest.raises(IntegrityError, match="evaluate again"):
        read_evidence(sink.getvalue(), "metrics")
    undeclared = read_evidence(_table(low=[None] * 30, high=[None] * 30), "metrics")["m"]
    rule = GateRule(name="g", metric="m", at_least=0.1)
    verdict = judge(rule, undeclared, None, channel_empty=True, seed=0)
    assert verdict.outcome is Outcome.ERROR
    assert "has no declared range" in verdict.reason


@pytest.mark.slow
def test_same_bytes_again_and_as_a_process(bench: Bench, answered: Answered) -> None:
    first, _ = answered(bench.order())
    attempt = bench.attempt("as-a-process", bench.order())
    command = [sys.executable, "-m", "posttrain.jobs.stage", str(attempt.path)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result = attempt.read_result()
    assert result is not None
    for output in result.outputs.values():
        assert (attempt.path / output.path).read_bytes() == (first.path / output.path).read_bytes()


def sampled(attempt: AttemptFolder, suite: str = "heldout") -> dict[tuple[str, int], str]:
    """What was sampled for a suite, by item and sample."""
    table = pq.read_table(attempt.path / "outputs" / "items.parquet").to_pylist()
    rows = [row for row in table if row["kind"] == "sample" and row["suite"] == suite]
    return {(row["item_id"], row["sample_index"]): row["response"] for row in rows}


@pytest.mark.parametrize(("suite", "order"), [({}, {"seed": 12}), ({"temperature": 0.05}, {})])
def test_seed_and_temperature_decide_what_is_sampled(
    bench: Bench, answered: Answered, suite: dict[str, Any], order: dict[str, Any]
) -> None:
    usual, _ = answered(bench.order(), f"usual-{len(suite)}")
    other, _ = answered(replace(bench.order(**suite), **order), f"other-{len(suite)}")
    assert sampled(usual).keys() == sampled(other).keys()
    assert sampled(usual) != sampled(other)


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}])
def test_a_suite_that_draws_the_most_likely_alone_says_what_greedy_says(
    bench: Bench, answered: Answered, truncation: dict[str, float]
) -> None:
    attempt, _ = answered(bench.order(**truncation), f"alone-{min(truncation)}")
    table = pq.read_table(attempt.path / "outputs" / "items.parquet").to_pylist()
    greedy = {row["item_id"]: row["response"] for row in table if row["kind"] == "greedy"}
    assert all(text == greedy[item] for (item, _), text in sampled(attempt).items())


def test_a_suite_ends_responses_at_its_strings(bench: Bench, answered: Answered) -> None:
    """Greedy and sampled ones, with the string, which `extract` and a reader see; they are not cut short by a limit."""
    whole, _ = answered(bench.order(), "endless")
    stop = ["1", "2", "3", "Q"]
    attempt, _ = answered(bench.order(stop=stop), "ended")
    before = pq.read_table(whole.path / "outputs" / "items.parquet").to_pylist()
    after = pq.read_table(attempt.path / "outputs" / "items.parquet").to_pylist()
    ended = 0
    for was, row in zip(before, after, strict=True):
        text = was["response"]
        ends = [text.index(one) + len(one) for one in stop if one in text]
        assert row["response"] == (text[: min(ends)] if ends else text)
        if ends:
            ended += 1
            assert not row["truncated"]
            assert row["tokens"] <= was["tokens"]
        else:
            assert (row["tokens"], row["truncated"], row["logprob"]) == (
                was["tokens"],
                was["truncated"],
                was["logprob"],
            )
    assert ended


def test_each_suite_draws_its_own_samples(bench: Bench, answered: Answered) -> None:
    one = bench.order()
    suites = {**one.params["suites"], "again": {**one.params["suites"]["heldout"], "data": "suites.again"}}
    inputs = {**one.inputs, "suites.again": one.inputs["suites.heldout"]}
    both, _ = answered(replace(one, params={**one.params, "suites": suites}, inputs=inputs))
    assert sampled(both).keys() == sampled(both, "again").keys()
    assert sampled(both) != sampled(both, "again")


def test_a_deadline_that_is_past_ends_an_evaluation(bench: Bench, answered: Answered) -> None:
    _, result = answered(replace(bench.order(), seconds_allowance=0.0))
    assert result.failure is not None
    assert result.failure.kind is FailureClass.BUDGET
    assert result.tokens == 0


def test_an_item_is_answered_the_same_in_any_suite_order(bench: Bench, answered: Answered) -> None:
    forward, _ = answered(bench.order(), "forward")
    backward, _ = answered(bench.order(rows=bench.rows[::-1]), "backward")
    assert sampled(forward) == sampled(backward)


def test_stop_is_answered(bench: Bench) -> None:
    attempt = bench.attempt("stopped", bench.order())
    attempt.request_stop()
    assert run(str(attempt.path), evaluation.body) == 0
    result = attempt.read_result()
    assert result is not None
    assert result.status == "stopped"
    assert result.outputs == {}
    assert result.tokens > 0


def test_budget_is_never_passed(bench: Bench, answered: Answered) -> None:
    whole = answered(bench.order(), "whole")[1].tokens
    attempt, result = answered(replace(bench.order(), token_allowance=whole // 2), "half")
    assert result.failure is not None
    assert result.failure.kind is FailureClass.BUDGET
    assert result.tokens <= whole // 2
    assert not (attempt.path / "outputs").exists()


@pytest.mark.parametrize(
    ("rows", "suite", "message"),
    [
        ([{"prompt": "q"}], {}, "dataset:heldout@1 row 1 needs an `answer`"),
        ([{"prompt": "q", "answer": None}], {}, "dataset:heldout@1 row 1 needs an `answer`"),
        (
            [{"prompt": "q" * 60, "answer": "1"}],
            {},
            r"dataset:heldout@1 row 1: prompt must have at most 64 - 8 (max_new_tokens)",
        ),
        ([], {}, "dataset:heldout@1 must contain at least one row, got 0"),
    ],
)
def test_bad_input_is_one_line(
    bench: Bench, answered: Answered, rows: list[dict[str, Any]] | None, suite: dict[str, object], message: str
) -> None:
    _, result = answered(bench.order(rows, **suite))
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.kind is FailureClass.BAD_INPUT
    assert message in result.failure.message
    assert "\n" not in result.failure.message


@pytest.mark.slow
@pytest.mark.parametrize("example", ["01-sort", "02-count"])
def test_example_data_is_disjoint_by_construction(example: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / example / "make_data.py"

    def made(seed: int, name: str) -> dict[str, list[dict[str, Any]]]:
        out = tmp_path / name
        subprocess.run([sys.executable, str(script), "--seed", str(seed), "--out", str(out)], check=True)
        return {split: read_rows(out / f"{split}.jsonl") for split in ("train", "heldout", "failures")}

    one, again, other = made(1, "one"), made(1, "again"), made(2, "other")
    assert one == again
    prompts = {name: {json.dumps(r["prompt"]) for r in rows} for name, rows in one.items()}
    assert {name: len(p) for name, p in prompts.items()} == {"train": 4000, "heldout": 700, "failures": 200}
    assert not prompts["heldout"] & prompts["failures"]
    for later in (one, other):  # whatever seed made the evaluation data, it was never trained on
        for name in ("heldout", "failures"):
            assert not prompts["train"] & {json.dumps(r["prompt"]) for r in later[name]}
    assert one["heldout"] != other["heldout"]
