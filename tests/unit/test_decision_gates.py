"""Judging fails closed, mirrors, and says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy.stats import binomtest

from posttrain.decision.gates import Baseline, Evidence, judge, judge_all
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule, Outcome, Verdict
from posttrain.domain.kinds import RATE, SHARE, ItemRange

ACCURACY = GateRule(name="accuracy", metric="heldout/accuracy", at_least=0.9)
MARGIN = GateRule(name="no-regression", metric="heldout/accuracy", not_worse_than="channel", margin=0.02)
TOKENS = ItemRange(1.0, 64.0)
SHORTER = GateRule(name="shorter", metric="heldout/tokens", direction="lower", better_than="channel", by=0.5)


def evidence(values: Any, possible: ItemRange | None = RATE, prefix: str = "item") -> Evidence:
    array = np.asarray(values, dtype=np.float64)
    return Evidence(tuple(f"{prefix}-{index:04d}" for index in range(len(array))), array, possible)


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
        "heldout/accuracy is 0.5 on 200 items, which misses the requirement (at least 0.9) by 0.4;"
        " its lower 95 % confidence limit 0.4396 misses it by 0.4604."
    )
    reason = relative(rate(100, 200), rate(190, 200)).reason
    assert "is 0.5 against the channel's 0.95 on the same 200 items, a difference of -0.45" in reason


@pytest.mark.parametrize(("right", "items"), [(92, 100), (95, 100), (46, 50), (20, 20), (370, 400), (455, 500)])
def test_an_inconclusive_verdict_names_the_items_that_decide(right: int, items: int) -> None:
    reason = absolute(rate(right, items)).reason
    named = int(reason.rpartition("judge on about ")[2].partition(" items, on which about 80 %")[0].replace(",", ""))
    assert absolute(rate(round(named * right / items), named)).outcome is Outcome.PASS
    fewer = max(items, named // 3)
    assert absolute(rate(round(fewer * right / items), fewer)).outcome is Outcome.INCONCLUSIVE
    found = np.random.default_rng(4).binomial(named, right / items, 400)
    passed = np.mean([absolute(rate(int(one), named)).outcome is Outcome.PASS for one in found])
    assert passed == 1 if right == items else 0.72 < passed < 0.92
    assert absolute(rate(18, 20)).reason.endswith("judge on more items.")  # exactly on the threshold
    twin = relative(rate(90, 100), rate(90, 100)).reason
    named = int(twin.rpartition("judge on about ")[2].partition(" items, on which")[0])
    assert relative(rate(named * 9 // 10, named), rate(named * 9 // 10, named)).outcome is Outcome.PASS
    assert relative(rate(named // 2, named // 2), rate(named // 2, named // 2)).outcome is Outcome.INCONCLUSIVE


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


def test_an_upper_gate_on_a_rate_looks_at_the_upper_limit() -> None:
    """4 of 200 cut short: the upper limit is 0.0452 (scipy), the lower 0.0069."""
    cut = GateRule(name="cut", metric="heldout/truncated", at_most=0.04)
    verdict = absolute(rate(4, 200), cut)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.limit == pytest.approx(binomtest(4, 200).proportion_ci(0.9, "exact").high)
    assert verdict.missed_by == pytest.approx(verdict.limit - 0.04)
    assert "its upper 95 % confidence limit 0.04518 misses it by 0.00518" in verdict.reason
    assert absolute(rate(4, 200), GateRule(name="cut", metric="m", at_most=0.046)).outcome is Outcome.PASS
    assert absolute(rate(196, 200), cut).outcome is Outcome.FAIL
    assert absolute(rate(0, 200), cut).outcome is Outcome.PASS


def test_every_method_is_named() -> None:
    shares, tokens = evidence([0.5] * 50, SHARE), evidence([5.0] * 50, TOKENS)
    tests = [absolute(row).test for row in (rate(45, 50), shares, tokens)]
    tests += [relative(row, row).test for row in (rate(45, 50), shares, tokens)]
    assert tests == [
        "exact limit of a rate (Clopper-Pearson)", "bounded-mean limit (Gaffke)", "bounded-mean limit (Gaffke)",
        "paired limit of two rates (Gaffke; against 0 exact McNemar)", "bounded-mean limit (Gaffke)",
        "bounded-mean limit (Gaffke)",
    ]  # fmt: skip


def test_a_mean_is_judged_by_its_declared_range() -> None:
    generator = np.random.default_rng(3)
    long, short = generator.integers(20, 30, 400).astype(float), generator.integers(5, 12, 400).astype(float)
    better = relative(evidence(short, TOKENS), evidence(long, TOKENS), SHORTER)
    assert better.outcome is Outcome.PASS
    assert better.limit is not None
    assert better.difference is not None
    assert better.difference < better.limit < better.threshold == -0.5
    assert relative(evidence(long, TOKENS), evidence(short, TOKENS), SHORTER).outcome is Outcome.FAIL
    cap = GateRule(name="cap", metric="heldout/tokens", at_most=9.5)
    assert absolute(evidence(short, TOKENS), cap).outcome is Outcome.PASS
    wide = absolute(evidence(short, ItemRange(1.0, 4096.0)), cap)  # nobody has seen a runaway, but one in 400 can be
    assert wide.outcome is Outcome.INCONCLUSIVE
    assert wide.limit is not None
    assert wide.limit > 30


def test_one_runaway_in_a_hundred_is_not_passed_because_the_sample_lacks_it() -> None:
    """The audit's case: 1 % of responses run to the limit. A bootstrap passed 54 % of such models at n = 20."""
    possible, generator = ItemRange(1.0, 1024.0), np.random.default_rng(5)
    mean = 0.99 * 20 + 0.01 * 1024
    rule = GateRule(name="cap", metric="m", at_most=mean)  # a model just on the threshold may pass 5 % of the time
    passed = 0
    for trial in range(200):
        lengths = np.where(generator.random(20) < 0.01, 1024.0, 20.0)
        verdict = judge(rule, evidence(lengths, possible), None, channel_empty=True, seed=trial)
        passed += verdict.outcome is Outcome.PASS
    assert passed <= 0.05 * 200 + 2 * np.sqrt(0.05 * 0.95 * 200)


@pytest.mark.parametrize("possible", [RATE, SHARE])
@pytest.mark.parametrize("direction", ["higher", "lower"])
@pytest.mark.parametrize("right", [0, 150, 200])
def test_an_identical_model_is_never_better(possible: ItemRange, direction: str, right: int) -> None:
    same = evidence([1.0] * right + [0.0] * (200 - right), possible)
    verdict = relative(same, same, GateRule(name="g", metric="m", better_than="channel", direction=direction))
    assert verdict.outcome is Outcome.FAIL
    comparison = "more" if direction == "higher" else "less"
    assert f"a difference of +0, which misses the requirement ({comparison} than +0); its" in verdict.reason


@pytest.mark.parametrize("gain", [-0.5, -0.25])
def test_a_gain_of_just_what_is_asked_is_no_more_than_that(gain: float) -> None:
    values = np.random.default_rng(3).integers(2, 9, 120).astype(float)
    verdict = relative(evidence(values + gain, TOKENS), evidence(values, TOKENS), SHORTER)
    assert verdict.outcome is Outcome.FAIL
    assert "misses the requirement (less than -0.5)" in verdict.reason


@pytest.mark.parametrize("possible", [RATE, SHARE])
def test_twenty_right_answers_do_not_prove_99_percent(possible: ItemRange) -> None:
    verdict = absolute(evidence([1.0] * 20, possible), GateRule(name="g", metric="heldout/pass@4", at_least=0.99))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.limit == pytest.approx(0.861, abs=0.01)


def test_a_column_that_never_varies_does_not_prove_its_value() -> None:
    cap = GateRule(name="cap", metric="m", at_most=5.1)
    for items, outcome in ((20, Outcome.INCONCLUSIVE), (200, Outcome.INCONCLUSIVE), (2000, Outcome.PASS)):
        verdict = absolute(evidence([5.0] * items, TOKENS), cap)
        assert verdict.outcome is outcome
        assert verdict.limit == pytest.approx(5 + 59 * (1 - 0.05 ** (1 / items)), rel=0.02)


def test_a_constant_gain_is_judged_with_the_worst_that_could_be_counted_in() -> None:
    twelve, six = evidence([12.0] * 100, TOKENS), evidence([6.0] * 100, TOKENS)
    verdict = relative(six, twelve, SHORTER)
    assert verdict.outcome is Outcome.PASS
    assert verdict.limit == pytest.approx(-6 + 69 * (1 - 0.05 ** (1 / 100)), rel=0.02)
    few = (Evidence(row.item_ids[:20], row.values[:20], TOKENS) for row in (six, twelve))
    by_five = GateRule(name="g", metric="m", direction="lower", better_than="channel", by=5)
    assert relative(*few, by_five).outcome is Outcome.INCONCLUSIVE


def test_equal_shares_are_not_worse_only_when_items_are_many() -> None:
    rule = GateRule(name="g", metric="heldout/sampled_accuracy", not_worse_than="channel", margin=0.02)
    outcomes = [
        relative(evidence([0.75] * items, SHARE), evidence([0.75] * items, SHARE), rule).outcome for items in (50, 400)
    ]
    assert outcomes == [Outcome.INCONCLUSIVE, Outcome.PASS]


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (None, "was not measured on the candidate"),
        (evidence([]), "has no items"),
        (evidence([1.0] * 50 + [float("nan")]), "NaN or infinite on 1 items, e.g. 'item-0050'"),
        (evidence([1.0] * 50 + [float("inf")], TOKENS), "NaN or infinite"),
        (evidence([1.0] * 50 + [65.0], TOKENS), "range 1 to 64, got 65 on 'item-0050'"),
        (evidence([1.0] * 50 + [0.0], TOKENS), "range 1 to 64, got 0 on 'item-0050'"),
        (evidence([1.0] * 51, None), "has no declared range, so no confidence limit exists"),
        (evidence([1.0] * 50 + [0.5]), "declared binary but"),
        (Evidence(("a", "b", "a"), np.ones(3), RATE), "1 item ids more than once, e.g. 'a'"),
        (Evidence(("a", "b"), np.ones(3), RATE), "2 item ids for values of shape"),
        (Evidence(("a",), np.ones((1, 1)), RATE), "1 item ids for values of shape"),
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
        (evidence([1.0] * 200, SHARE), "has a different declared range on the baseline"),
    ],
)
def test_an_unusable_baseline_is_an_error(baseline: Evidence | None, words: str) -> None:
    verdict = relative(rate(200, 200), baseline)
    assert verdict.outcome is Outcome.ERROR
    assert words in verdict.reason


def test_too_few_items_never_pass() -> None:
    verdict = absolute(rate(19, 19))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "19 items, but the rule requires min_items: 20" in verdict.reason
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
    for possible in (RATE, SHARE):
        broken = ours.copy()
        broken[position % len(rows)] = np.nan
        assert relative(evidence(broken, possible), evidence(theirs, possible)).outcome is Outcome.ERROR
        assert relative(evidence(theirs, possible), evidence(broken, possible)).outcome is Outcome.ERROR


@pytest.mark.slow
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


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.integers(20, 300), st.floats(0.5, 0.99))
def test_the_last_count_that_does_not_pass_is_one_below_the_first_that_does(items: int, threshold: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=threshold)
    verdicts = [absolute(rate(right, items), rule) for right in range(items + 1)]
    passing = [verdict.outcome is Outcome.PASS for verdict in verdicts]
    assert passing == sorted(passing)
    assert passing == [verdict.limit is not None and verdict.limit >= threshold for verdict in verdicts]


@pytest.mark.slow
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
    one = absolute(evidence(array, SHARE), GateRule(name="g", metric="m", at_least=bound))
    other = absolute(evidence(1 - array, SHARE), GateRule(name="g", metric="m", at_most=1 - bound))
    assert one.missed_by == pytest.approx(other.missed_by, abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(numbers, st.floats(-50, 50))
def test_a_mirrored_mean_is_judged_alike(values: list[float], bound: float) -> None:
    array = np.array(values)
    one = absolute(evidence(array, ItemRange(-50, 60)), GateRule(name="g", metric="m", at_least=bound))
    other = absolute(evidence(-array, ItemRange(-60, 50)), GateRule(name="g", metric="m", at_most=-bound))
    assert (one.outcome, one.missed_by) == (other.outcome, other.missed_by)


@settings(deadline=None)
@given(bits, st.integers(0, 2**32))
def test_the_order_of_rows_does_not_matter(values: list[bool], shuffle: int) -> None:
    array = np.array(values, dtype=np.float64)
    order = np.random.default_rng(shuffle).permutation(len(values))
    row = evidence(array, SHARE)
    shuffled = Evidence(tuple(row.item_ids[index] for index in order), array[order], SHARE)
    assert absolute(row) == absolute(shuffled)


@pytest.mark.slow
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


def test_the_seed_decides_and_repeats_the_limit_of_a_mean() -> None:
    values = evidence(np.random.default_rng(0).uniform(4, 9, 60), TOKENS)
    rule = GateRule(name="cap", metric="m", at_most=8)
    first, again, other = (judge(rule, values, None, channel_empty=True, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.limit != other.limit


def test_all_gates_are_judged_and_the_worst_counts() -> None:
    report = judge_all(
        [ACCURACY, MARGIN, SHORTER],
        {"heldout/accuracy": rate(200, 200)},
        {"channel": Baseline("sha256:b", {"heldout/accuracy": rate(190, 200)})},
        candidate_digest="sha256:c",
        evaluator_digest="sha256:e",
        seed=4,
    )
    assert [verdict.outcome for verdict in report.verdicts] == [Outcome.PASS, Outcome.PASS, Outcome.ERROR]
    assert report.outcome is Outcome.ERROR
    assert (report.candidate, report.baseline, report.evaluator) == ("sha256:c", "sha256:b", "sha256:e")


def test_each_rule_is_held_against_its_own_model() -> None:
    """A model that nobody measured is an error, whatever the channel holds; an empty channel is no affair of theirs."""
    rules = [MARGIN.model_copy(update={"name": word, "not_worse_than": word}) for word in ("sft", "base", "gone")]
    rules = [GateRule.model_validate({**rule.model_dump(), "if_channel_empty": None}) for rule in rules]
    known = {
        "sft": Baseline("sha256:s", {"heldout/accuracy": rate(190, 200)}),
        "base": Baseline("sha256:b", {"heldout/accuracy": rate(200, 200)}),
    }
    ours = {"heldout/accuracy": rate(190, 200)}
    for channel in ({}, {"channel": Baseline("sha256:x", {"heldout/accuracy": rate(0, 200)})}):
        report = judge_all(rules, ours, known | channel, candidate_digest="sha256:c", evaluator_digest=None, seed=4)
        assert [v.outcome for v in report.verdicts] == [Outcome.PASS, Outcome.FAIL, Outcome.ERROR]
        assert [v.baseline for v in report.verdicts] == ["sha256:s", "sha256:b", None]
        assert report.baseline == ("sha256:x" if channel else None)
        assert "against the base model's 1 on the same 200 items" in report.verdicts[1].reason
        assert "was not measured on the model of stage gone" in report.verdicts[2].reason


def test_no_rule_is_an_error_and_names_are_unique() -> None:
    def judged(rules: list[GateRule]) -> Outcome:
        return judge_all(
            rules, {"heldout/accuracy": rate(99, 99)}, {}, candidate_digest="sha256:c", evaluator_digest=None, seed=0
        ).outcome  # fmt: skip

    assert judged([]) is Outcome.ERROR
    assert judged([ACCURACY]) is Outcome.PASS
    with pytest.raises(InputError, match="names must be unique, got 'accuracy' more than once"):
        judged([ACCURACY, ACCURACY])


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("possible", [RATE, SHARE])
@pytest.mark.parametrize("lower", [False, True])
def test_more_confidence_is_a_limit_further_away(paired: bool, possible: ItemRange, lower: bool) -> None:
    """In every form of rule: the confidence that was written is the one that is computed with."""
    ours, theirs = evidence([1.0] * 60 + [0.0] * 40, possible), evidence([1.0] * 50 + [0.0] * 50, possible)
    form: dict[str, Any] = {"at_most" if lower else "at_least": 0.5}
    if paired:
        form = {"not_worse_than": "channel", "margin": 0.5, "direction": "lower" if lower else "higher"}
    distances = []
    for confidence in (0.8, 0.95, 0.99):
        rule = GateRule(name="one", metric="heldout/accuracy", confidence=confidence, **form)
        verdict = judge(rule, ours, theirs if paired else None, channel_empty=False, seed=1)
        assert verdict.limit is not None
        distances.append(abs(verdict.limit - (0.1 if paired else 0.6)))
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert distances[2] > 1.5 * distances[0]


def test_two_gates_of_one_run_draw_numbers_of_their_own() -> None:
    values = evidence(np.linspace(0.0, 1.0, 40), SHARE)
    limits = {
        absolute(values, GateRule(name=name, metric="heldout/accuracy", at_least=0.1)).limit for name in ("one", "two")
    }
    assert len(limits) == 2
