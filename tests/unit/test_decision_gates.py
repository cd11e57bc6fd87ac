"""Judging fails closed, mirrors, and says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.decision.gates import Evidence, judge, judge_all
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule, Outcome, Verdict

ACCURACY = GateRule(name="accuracy", metric="heldout/accuracy", at_least=0.9)
MARGIN = GateRule(name="no-regression", metric="heldout/accuracy", not_worse_than="channel", margin=0.02)
SHORTER = GateRule(name="shorter", metric="heldout/tokens", direction="lower", better_than="channel", by=0.5)


def evidence(values: Any, binary: bool = True, prefix: str = "item") -> Evidence:
    array = np.asarray(values, dtype=np.float64)
    return Evidence(tuple(f"{prefix}-{index:04d}" for index in range(len(array))), array, binary)


def rate(right: int, items: int) -> Evidence:
    return evidence([1.0] * right + [0.0] * (items - right))


def absolute(candidate: Evidence | None, rule: GateRule = ACCURACY) -> Verdict:
    return judge(rule, candidate, None, channel_empty=True, seed=1)


def relative(candidate: Evidence | None, baseline: Evidence | None, rule: GateRule = MARGIN, seed: int = 1) -> Verdict:
    return judge(rule, candidate, baseline, channel_empty=False, seed=seed)


@pytest.mark.parametrize(
    ("right", "outcome"), [(200, Outcome.PASS), (195, Outcome.PASS), (184, Outcome.INCONCLUSIVE), (100, Outcome.FAIL)]
)
def test_an_absolute_rule_is_judged_on_the_limit(right: int, outcome: Outcome) -> None:
    verdict = absolute(rate(right, 200))
    assert verdict.outcome is outcome
    assert verdict.estimate == right / 200
    assert verdict.limit is not None
    assert verdict.limit < right / 200 or right == 0
    assert verdict.missed_by == pytest.approx(0.9 - verdict.limit)
    assert (verdict.difference, verdict.baseline_estimate) == (None, None)


def test_the_reason_says_the_numbers() -> None:
    reason = absolute(rate(100, 200)).reason
    assert reason == (
        "heldout/accuracy is 0.5 on 200 items, which misses the required at least 0.9, by 0.4;"
        " its lower 95 % confidence limit 0.4422 misses it by 0.4578."
    )
    reason = relative(rate(100, 200), rate(190, 200)).reason
    assert "is 0.5 against the channel's 0.95 on the same 200 items, a difference of -0.45" in reason


@pytest.mark.parametrize(
    ("rule", "candidate", "baseline"),
    [(ACCURACY, rate(18, 20), None), (MARGIN, rate(180, 200), rate(184, 200))],
)
def test_an_estimate_exactly_on_the_threshold_has_not_failed(
    rule: GateRule, candidate: Evidence, baseline: Evidence | None
) -> None:
    assert judge(rule, candidate, baseline, channel_empty=False, seed=0).outcome is Outcome.INCONCLUSIVE


def test_a_paired_rate_reports_discordance_and_mcnemar() -> None:
    verdict = relative(rate(150, 200), rate(190, 200))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.difference == -0.2
    assert verdict.threshold == -0.02
    assert verdict.details["discordance"] == 0.2
    assert verdict.details["only_baseline"] == 40
    assert verdict.details["mcnemar_p"] < 1e-9
    assert relative(rate(190, 200), rate(190, 200)).outcome is Outcome.PASS


def test_a_mean_is_judged_by_the_bootstrap() -> None:
    generator = np.random.default_rng(3)
    long, short = generator.normal(9, 1, 120), generator.normal(7, 1, 120)
    better = relative(evidence(short, binary=False), evidence(long, binary=False), SHORTER)
    assert better.outcome is Outcome.PASS
    assert better.limit is not None
    assert better.difference is not None
    assert better.difference < better.limit < better.threshold == -0.5
    assert relative(evidence(long, binary=False), evidence(short, binary=False), SHORTER).outcome is Outcome.FAIL
    same = absolute(evidence(short, binary=False), GateRule(name="cap", metric="heldout/tokens", at_most=7.5))
    assert same.outcome is Outcome.PASS


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("direction", ["higher", "lower"])
@pytest.mark.parametrize("right", [0, 150, 200])
def test_an_identical_model_is_never_better(binary: bool, direction: str, right: int) -> None:
    same = evidence([1.0] * right + [0.0] * (200 - right), binary)
    verdict = relative(same, same, GateRule(name="g", metric="m", better_than="channel", direction=direction))
    assert verdict.outcome is Outcome.FAIL
    comparison = "more" if direction == "higher" else "less"
    assert f"a difference of +0, which misses the required {comparison} than +0; its" in verdict.reason


@pytest.mark.parametrize("gain", [-0.5, -0.25])
def test_a_gain_of_just_what_is_asked_is_no_more_than_that(gain: float) -> None:
    values = np.random.default_rng(3).integers(2, 9, 120).astype(float)
    verdict = relative(evidence(values + gain, binary=False), evidence(values, binary=False), SHORTER)
    assert verdict.outcome is Outcome.FAIL
    assert "misses the required less than -0.5" in verdict.reason


@pytest.mark.parametrize("binary", [True, False])
def test_twenty_right_answers_do_not_prove_99_percent(binary: bool) -> None:
    verdict = absolute(evidence([1.0] * 20, binary), GateRule(name="g", metric="heldout/pass@4", at_least=0.99))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.limit == pytest.approx(0.87, abs=0.02)


def test_a_column_that_never_varies_does_not_prove_its_value() -> None:
    cap = GateRule(name="cap", metric="m", at_most=5.05)
    for items, outcome in ((20, Outcome.INCONCLUSIVE), (200, Outcome.INCONCLUSIVE), (2000, Outcome.PASS)):
        verdict = absolute(evidence([5.0] * items, binary=False), cap)
        assert verdict.outcome is outcome
        assert verdict.limit == pytest.approx(5 + 5 * (1 - 0.05 ** (1 / items)), rel=2e-3)
        assert verdict.test == "bounded-mean limit (Gaffke)"


def test_a_constant_gain_is_judged_with_the_worst_that_could_be_counted_in() -> None:
    twelve, six = evidence([12.0] * 100, binary=False), evidence([6.0] * 100, binary=False)
    verdict = relative(six, twelve, SHORTER)
    assert verdict.outcome is Outcome.PASS
    assert verdict.limit == pytest.approx(-6 + 30 * (1 - 0.05 ** (1 / 100)), rel=0.01)
    few = (Evidence(row.item_ids[:20], row.values[:20], False) for row in (six, twelve))
    by_five = GateRule(name="g", metric="m", direction="lower", better_than="channel", by=5)
    assert relative(*few, by_five).outcome is Outcome.INCONCLUSIVE


def test_equal_shares_are_not_worse_only_when_items_are_many() -> None:
    rule = GateRule(name="g", metric="heldout/sampled_accuracy", not_worse_than="channel", margin=0.02)
    outcomes = [
        relative(evidence([0.75] * items, False), evidence([0.75] * items, False), rule).outcome for items in (50, 400)
    ]
    assert outcomes == [Outcome.INCONCLUSIVE, Outcome.PASS]


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (None, "was not measured on the candidate"),
        (evidence([]), "has no items"),
        (evidence([1.0] * 50 + [float("nan")]), "NaN or infinite on 1 items, e.g. 'item-0050'"),
        (evidence([1.0] * 50 + [float("inf")], binary=False), "NaN or infinite"),
        (evidence([1.0] * 50 + [1e300], binary=False), "NaN or infinite"),
        (evidence([1.0] * 50 + [0.5]), "declared binary but"),
        (Evidence(("a", "b", "a"), np.ones(3), True), "1 item ids more than once, e.g. 'a'"),
        (Evidence(("a", "b"), np.ones(3), True), "2 item ids for values of shape"),
        (Evidence(("a",), np.ones((1, 1)), True), "1 item ids for values of shape"),
    ],
)
@pytest.mark.parametrize("rule", [ACCURACY, MARGIN])
def test_unusable_evidence_is_an_error(rule: GateRule, candidate: Evidence | None, words: str) -> None:
    verdict = judge(rule, candidate, rate(50, 51), channel_empty=False, seed=1)
    assert verdict.outcome is Outcome.ERROR
    assert words in verdict.reason
    assert verdict.limit is None


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (None, "was not measured on the channel's model"),
        (evidence([1.0] * 199 + [float("nan")]), "of the channel's model is NaN"),
        (evidence([1.0] * 200, prefix="other"), "different items: 400 are not in both"),
        (evidence([1.0] * 201), "different items: 1 are not in both, e.g. 'item-0200'"),
        (evidence([1.0] * 200, binary=False), "binary on one model and not on the other"),
    ],
)
def test_an_unusable_baseline_is_an_error(baseline: Evidence | None, words: str) -> None:
    verdict = relative(rate(200, 200), baseline)
    assert verdict.outcome is Outcome.ERROR
    assert words in verdict.reason


def test_too_few_items_never_pass() -> None:
    verdict = absolute(rate(19, 19))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "19 items, but the rule wants min_items: 20" in verdict.reason
    assert relative(rate(19, 19), rate(0, 19)).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(("said", "outcome"), [("pass", Outcome.PASS), ("fail", Outcome.FAIL), (None, Outcome.FAIL)])
def test_an_empty_channel_does_what_the_rule_says(said: str | None, outcome: Outcome) -> None:
    rule = GateRule.model_validate({**MARGIN.model_dump(), "if_channel_empty": said})
    verdict = judge(rule, rate(100, 100), None, channel_empty=True, seed=1)
    assert verdict.outcome is outcome
    assert f"if_channel_empty: {outcome.value}" in verdict.reason


def test_an_empty_channel_excuses_no_bad_evidence() -> None:
    rule = GateRule.model_validate({**MARGIN.model_dump(), "if_channel_empty": "pass"})
    outcomes = [
        judge(rule, candidate, baseline, channel_empty=True, seed=1).outcome
        for candidate, baseline in [(None, None), (rate(3, 3), None), (rate(50, 50), rate(50, 50))]
    ]
    assert outcomes == [Outcome.ERROR, Outcome.INCONCLUSIVE, Outcome.ERROR]


bits = st.lists(st.booleans(), min_size=20, max_size=120)
pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=20, max_size=120)
numbers = st.lists(st.floats(-50, 50), min_size=20, max_size=40)


@settings(deadline=None)
@given(pairs, st.integers(0, 10_000))
def test_a_nan_never_passes(rows: list[tuple[bool, bool]], position: int) -> None:
    ours, theirs = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    for binary in (True, False):
        broken = ours.copy()
        broken[position % len(rows)] = np.nan
        assert relative(evidence(broken, binary), evidence(theirs, binary)).outcome is Outcome.ERROR
        assert relative(evidence(theirs, binary), evidence(broken, binary)).outcome is Outcome.ERROR


@settings(deadline=None)
@given(pairs, st.floats(0, 0.5), st.sampled_from(["higher", "lower"]))
def test_only_a_limit_that_meets_the_threshold_passes(
    rows: list[tuple[bool, bool]], margin: float, direction: str
) -> None:
    ours, theirs = (evidence(np.array(column, dtype=np.float64)) for column in zip(*rows, strict=True))
    rule = GateRule(name="g", metric="m", not_worse_than="channel", margin=margin, direction=direction)
    verdict = relative(ours, theirs, rule)
    assert verdict.limit is not None
    assert verdict.difference is not None
    sign = 1 if direction == "higher" else -1
    assert (verdict.outcome is Outcome.PASS) == (sign * verdict.limit >= -margin)
    assert (verdict.outcome is Outcome.FAIL) == (sign * verdict.difference < -margin)


@settings(deadline=None)
@given(st.integers(20, 300), st.floats(0.5, 0.99))
def test_the_last_count_that_does_not_pass_is_one_below_the_first_that_does(items: int, threshold: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=threshold)
    verdicts = [absolute(rate(right, items), rule) for right in range(items + 1)]
    passing = [verdict.outcome is Outcome.PASS for verdict in verdicts]
    assert passing == sorted(passing)
    assert passing == [verdict.limit is not None and verdict.limit >= threshold for verdict in verdicts]


@settings(deadline=None)
@given(pairs, st.floats(0, 0.5))
def test_a_mirrored_rate_is_judged_alike(rows: list[tuple[bool, bool]], margin: float) -> None:
    ours, theirs = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    up = GateRule(name="g", metric="m", not_worse_than="channel", margin=margin)
    down = GateRule(name="g", metric="m", not_worse_than="channel", margin=margin, direction="lower")
    one = relative(evidence(ours), evidence(theirs), up)
    other = relative(evidence(1 - ours), evidence(1 - theirs), down)
    assert one.outcome is other.outcome
    assert one.missed_by == other.missed_by
    assert one.limit is not None
    assert other.limit == -one.limit


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.75, 1.0]), min_size=20, max_size=40), st.floats(0, 1))
def test_a_mirrored_share_is_judged_alike(values: list[float], bound: float) -> None:
    array = np.array(values)
    one = absolute(evidence(array, False), GateRule(name="g", metric="m", at_least=bound))
    other = absolute(evidence(1 - array, False), GateRule(name="g", metric="m", at_most=1 - bound))
    assert one.missed_by == pytest.approx(other.missed_by, abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(numbers, st.floats(-50, 50))
def test_a_mirrored_mean_is_judged_alike(values: list[float], bound: float) -> None:
    array = np.array(values)
    assume(array.min() < 0 or array.max() > 1)  # a share is mirrored at 1/2
    assume(array.min() < -1 or array.max() > 0)
    one = absolute(evidence(array, False), GateRule(name="g", metric="m", at_least=bound))
    other = absolute(evidence(-array, False), GateRule(name="g", metric="m", at_most=-bound))
    assert (one.outcome, one.missed_by) == (other.outcome, other.missed_by)


@settings(deadline=None)
@given(bits, st.integers(0, 2**32))
def test_the_order_of_rows_does_not_matter(values: list[bool], shuffle: int) -> None:
    array = np.array(values, dtype=np.float64)
    order = np.random.default_rng(shuffle).permutation(len(values))
    row = evidence(array, binary=False)
    shuffled = Evidence(tuple(row.item_ids[index] for index in order), array[order], False)
    assert absolute(row) == absolute(shuffled)


@settings(deadline=None)
@given(pairs, st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_wider_margin_never_judges_worse(rows: list[tuple[bool, bool]], one: float, other: float) -> None:
    ours, theirs = (evidence(np.array(column, dtype=np.float64)) for column in zip(*rows, strict=True))
    strict, lenient = (
        relative(ours, theirs, GateRule(name="g", metric="m", not_worse_than="channel", margin=margin)).outcome.severity
        for margin in sorted((one, other))
    )
    assert lenient <= strict


@settings(deadline=None)
@given(bits, st.sampled_from([0.8, 0.9, 0.95]))
def test_more_confidence_never_judges_better(values: list[bool], confidence: float) -> None:
    row = evidence(np.array(values, dtype=np.float64))
    outcomes = [
        absolute(row, GateRule(name="g", metric="m", at_least=0.5, confidence=level)).outcome.severity
        for level in (confidence, confidence + 0.04)
    ]
    assert outcomes[0] <= outcomes[1]


@settings(deadline=None)
@given(bits, st.integers(21, 200))
def test_fewer_items_than_the_minimum_never_pass(values: list[bool], minimum: int) -> None:
    assume(len(values) < minimum)
    rule = GateRule(name="g", metric="m", at_least=0.01, min_items=minimum)
    assert absolute(evidence(np.array(values, dtype=np.float64)), rule).outcome is Outcome.INCONCLUSIVE


def test_the_seed_decides_and_repeats_the_bootstrap() -> None:
    values = evidence(np.random.default_rng(0).normal(7, 2, 60), binary=False)
    rule = GateRule(name="cap", metric="m", at_most=8)
    first, again, other = (judge(rule, values, None, channel_empty=True, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.limit != other.limit


def test_all_gates_are_judged_and_the_worst_counts() -> None:
    report = judge_all(
        [ACCURACY, MARGIN, SHORTER],
        {"heldout/accuracy": rate(200, 200)},
        {"heldout/accuracy": rate(190, 200)},
        candidate_digest="sha256:c",
        baseline_digest="sha256:b",
        evaluator_digest="sha256:e",
        seed=4,
    )
    assert [verdict.outcome for verdict in report.verdicts] == [Outcome.PASS, Outcome.PASS, Outcome.ERROR]
    assert report.outcome is Outcome.ERROR
    assert (report.candidate, report.baseline, report.evaluator) == ("sha256:c", "sha256:b", "sha256:e")


def test_no_rule_is_an_error_and_names_are_unique() -> None:
    def judged(rules: list[GateRule]) -> Outcome:
        return judge_all(
            rules, {"heldout/accuracy": rate(99, 99)}, None, candidate_digest="sha256:c", baseline_digest=None,
            evaluator_digest=None, seed=0,
        ).outcome  # fmt: skip

    assert judged([]) is Outcome.ERROR
    assert judged([ACCURACY]) is Outcome.PASS
    with pytest.raises(InputError, match="names must be unique, got 'accuracy' more than once"):
        judged([ACCURACY, ACCURACY])
