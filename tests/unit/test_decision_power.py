"""Power notes against the gates themselves: exact enumeration and seeded simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from posttrain.decision.gates import Evidence, judge
from posttrain.decision.power import Expectation, gate_power
from posttrain.decision.statistics import rate_lower
from posttrain.domain.gates import GateRule, Outcome
from posttrain.domain.kinds import RATE, SHARE, ItemRange

ACCURACY = GateRule(name="accuracy", metric="heldout/accuracy", at_least=0.9)
MARGIN = GateRule(name="no-regression", metric="heldout/accuracy", not_worse_than="channel", margin=0.02)


@settings(deadline=None)
@given(
    items=st.integers(20, 400),
    threshold=st.floats(0.05, 0.99),
    rate=st.sampled_from([0.0, 1.0]) | st.floats(1e-3, 0.999),
    level=st.sampled_from([0.9, 0.95]),
)
def test_absolute_power_is_exact(items: int, threshold: float, rate: float, level: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=threshold, confidence=level)
    right = np.arange(items + 1)
    passing = np.array([rate_lower(int(count), items, level) >= threshold for count in right])
    expected = float(stats.binom.pmf(right, items, rate)[passing].sum())
    note = gate_power(rule, items, RATE, expectation=Expectation(rate=rate))
    assert note.power == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9, 0.98])
def test_the_needed_items_give_the_promised_power(threshold: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=threshold)
    needed = gate_power(rule, 20, RATE).needed
    assert needed is not None
    reached, halved = (gate_power(rule, items, RATE).power or 0 for items in (needed, max(needed // 2, 1)))
    assert 0.8 <= reached < 0.9
    assert halved < 0.75


def test_a_rule_that_wants_little_is_the_mirror_image() -> None:
    low = GateRule(name="g", metric="m", at_most=0.1)
    high = GateRule(name="g", metric="m", at_least=0.9)
    one, other = gate_power(low, 150, RATE), gate_power(high, 150, RATE)
    assert one.power == pytest.approx(other.power)
    assert one.needed == other.needed
    assert one.assumption == "assumed true m 0.05"
    rates = (Expectation(rate=0.02), Expectation(rate=0.98))
    assert gate_power(low, 99, RATE, expectation=rates[0]).power == pytest.approx(
        gate_power(high, 99, RATE, expectation=rates[1]).power
    )


def enumerated(rule: GateRule, items: int, better: float, worse: float) -> float:
    """P(pass) over every result there is, each judged by the gate."""
    ids = tuple(f"{index:05d}" for index in range(items))
    total = 0.0
    for gained in range(items + 1):
        for lost in range(items + 1 - gained):
            ours, theirs = np.zeros(items), np.zeros(items)
            ours[:gained] = 1
            theirs[gained : gained + lost] = 1
            candidate, baseline = Evidence(ids, ours, RATE), Evidence(ids, theirs, RATE)
            if judge(rule, candidate, baseline, channel_empty=False, seed=0).outcome is Outcome.PASS:
                shares = [better, worse, 1 - better - worse]
                total += float(stats.multinomial.pmf([gained, lost, items - gained - lost], items, shares))
    return total


@pytest.mark.parametrize(
    ("rule", "gain"),
    [
        (GateRule(name="g", metric="m", not_worse_than="channel", margin=0.2), 0.0),
        (GateRule(name="g", metric="m", better_than="channel", by=0.05), 0.2),
        (GateRule(name="g", metric="m", better_than="channel"), 0.25),
        (GateRule(name="g", metric="m", better_than="channel", by=0.05, direction="lower"), 0.2),
    ],
)
def test_paired_power_is_the_sum_over_all_results_that_the_gate_passes(rule: GateRule, gain: float) -> None:
    items, discordance = 24, 0.3
    note = gate_power(rule, items, RATE, expectation=Expectation(discordance=discordance, improvement=gain or None))
    gained, lost = (discordance + gain) / 2, (discordance - gain) / 2
    if not rule.higher_is_better:
        gained, lost = lost, gained
    assert note.power == pytest.approx(enumerated(rule, items, gained, lost), abs=1e-9)


@pytest.mark.parametrize(("items", "expected"), [(500, 0.274), (1500, 0.614)])
def test_paired_power_is_below_what_the_approximation_claimed(items: int, expected: float) -> None:
    """Discordance .15, margin .02: the normal approximation says .31 and .64, and 80 % at 2318 items."""
    note = gate_power(MARGIN, items, RATE, expectation=Expectation(discordance=0.15))
    assert note.power == pytest.approx(expected, abs=0.001)
    assert note.needed is not None
    assert 6.18 * 0.15 / 0.02**2 < note.needed < 1.2 * 6.18 * 0.15 / 0.02**2
    assert note.warning is not None
    assert "assumed equal to the channel's model with discordance 0.15" in note.warning


@pytest.mark.parametrize(("margin", "discordance"), [(0.02, 0.05), (0.02, 0.15), (0.05, 0.1), (0.1, 0.1), (0.03, 0.02)])
def test_the_items_that_a_paired_gate_needs_give_the_promised_power(margin: float, discordance: float) -> None:
    rule, hoped = MARGIN.model_copy(update={"margin": margin}), Expectation(discordance=discordance)
    needed = gate_power(rule, 20, RATE, expectation=hoped).needed
    assert needed is not None
    assert 0.8 <= (gate_power(rule, needed, RATE, expectation=hoped).power or 0) < 0.85
    assert (gate_power(rule, max(20, needed * 4 // 5), RATE, expectation=hoped).power or 0) < 0.8


def test_a_number_of_items_that_is_not_enumerated_says_so() -> None:
    note = gate_power(MARGIN.model_copy(update={"margin": 0.0005}), 500, RATE)
    assert note.needed == pytest.approx(6.18 * 0.1 / 0.0005**2, rel=0.01)
    assert note.assumption.endswith("discordance 0.1; beyond 200000 items by the normal approximation")


def test_an_underpowered_gate_is_warned_of() -> None:
    note = gate_power(ACCURACY, 50, RATE)
    assert note.needed is not None
    assert note.warning == (
        f"gate accuracy passes a good model only 28% of the time on 50 items (assumed true heldout/accuracy 0.95);"
        f" {note.needed} items give 80%"
    )
    assert gate_power(ACCURACY, 400, RATE).warning is None


def test_what_no_number_of_items_can_show() -> None:
    certain = GateRule(name="g", metric="m", at_least=1.0)
    exact = GateRule(name="g", metric="m", not_worse_than="channel", margin=0.0)
    for rule in (certain, exact):
        note = gate_power(rule, 10_000, RATE)
        assert note.needed is None
        assert note.power is not None
        assert note.power <= 0.06
        assert "no number of items is enough" in (note.warning or "")
    below = gate_power(ACCURACY, 100, RATE, expectation=Expectation(rate=0.85))
    assert below.needed is None


@pytest.mark.parametrize("possible", [RATE, SHARE])
def test_a_suite_smaller_than_the_minimum_cannot_pass(possible: ItemRange) -> None:
    note = gate_power(ACCURACY, 10, possible)
    assert note.power == 0.0
    assert note.warning == "gate accuracy cannot pass: the suite has 10 items, but the rule requires min_items: 20"


def test_an_empty_channel_is_taken_into_account() -> None:
    lenient = GateRule.model_validate({**MARGIN.model_dump(), "if_channel_empty": "pass"})
    assert gate_power(lenient, 100, RATE, channel_empty=True).power == 1.0
    refused = gate_power(MARGIN, 100, RATE, channel_empty=True)
    assert refused.power == 0.0
    assert "the channel is empty" in (refused.warning or "")


def test_a_mean_has_no_power_before_its_spread_is_known() -> None:
    rule = GateRule(name="shorter", metric="heldout/tokens", better_than="channel", direction="lower", by=0.5)
    possible, items = ItemRange(1.0, 64.0), 400
    note = gate_power(rule, items, possible)
    assert (note.power, note.needed, note.warning) == (None, None, None)
    least = (63 + 0.5) * (0.05 ** (-1 / items) - 1)
    spreads = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) / math.sqrt(items)
    assert f"alone requires {least:.2g} beyond the threshold" in note.assumption
    assert f"about {spreads:.2g} standard deviations more" in note.assumption
    ids = tuple(f"{index:03d}" for index in range(items))
    before = Evidence(ids, np.full(items, 30.0), possible)
    for beyond, outcome in ((least * 1.03, Outcome.PASS), (least * 0.97, Outcome.INCONCLUSIVE)):
        after = Evidence(ids, np.full(items, 29.5 - beyond), possible)
        assert judge(rule, after, before, channel_empty=False, seed=0).outcome is outcome


def test_every_note_names_the_method_that_will_judge() -> None:
    better = GateRule(name="g", metric="m", better_than="channel")
    notes = [gate_power(ACCURACY, 99, RATE), gate_power(better, 99, RATE), gate_power(better, 99, SHARE)]
    assert [note.test for note in notes] == [
        "exact limit of a rate (Clopper-Pearson)",
        "paired limit of two rates (Gaffke; against 0 exact McNemar)",
        "bounded-mean limit (Gaffke)",
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(st.integers(20, 1500), st.floats(0.02, 0.2), st.floats(0.02, 0.2))
def test_power_grows_with_the_margin(items: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    notes = [
        gate_power(GateRule(name="g", metric="m", not_worse_than="channel", margin=margin), items, RATE)
        for margin in (small, large)
    ]
    assert (notes[0].power or 0) <= (notes[1].power or 0)
    assert (notes[0].needed or 0) >= (notes[1].needed or 0)


def test_audit_24_no_improvement_beyond_reach_is_assumed() -> None:
    """Nobody gains more than all items, and by default less than halfway between the threshold and all of them."""
    far = GateRule(name="g", metric="m", better_than="channel", by=0.6)
    assumed = gate_power(far, 40, RATE)
    assert assumed.assumption == "assumed true improvement 0.8 with discordance 0.8"
    assert 0.0 < (assumed.power or 0.0) < 1.0
    sure = gate_power(far, 40, RATE, expectation=Expectation(improvement=1.5))
    assert (sure.power, sure.assumption) == (1.0, "assumed true improvement 1 with discordance 1")
    over = gate_power(far, 40, RATE, expectation=Expectation(improvement=0.8, discordance=1.7))
    at_most = gate_power(far, 40, RATE, expectation=Expectation(improvement=0.8, discordance=1.0))
    assert over.power == at_most.power
    assert 0.0 < (over.power or 0.0) < 1.0
