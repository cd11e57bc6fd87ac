"""Power notes against the gates themselves: exact enumeration and seeded simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from posttrain.decision.gates import Evidence, judge
from posttrain.decision.statistics import wilson_lower
from posttrain.domain.gates import GateRule, Outcome
from posttrain.planner.power import Expectation, gate_power

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
    passing = np.array([wilson_lower(int(count), items, level) >= threshold - 1e-12 for count in right])
    expected = float(stats.binom.pmf(right, items, rate)[passing].sum())
    note = gate_power(rule, items, binary=True, expectation=Expectation(rate=rate))
    assert note.power == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9, 0.98])
def test_the_needed_items_give_the_promised_power(threshold: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=threshold)
    needed = gate_power(rule, 20, binary=True).needed
    assert needed is not None
    reached, halved = (gate_power(rule, items, binary=True).power or 0 for items in (needed, max(needed // 2, 1)))
    assert 0.8 <= reached < 0.9
    assert halved < 0.75


def test_a_rule_that_wants_little_is_the_mirror_image() -> None:
    low = GateRule(name="g", metric="m", at_most=0.1)
    high = GateRule(name="g", metric="m", at_least=0.9)
    one, other = gate_power(low, 150, binary=True), gate_power(high, 150, binary=True)
    assert one.power == pytest.approx(other.power)
    assert one.needed == other.needed
    assert one.assumption == "assumed true m 0.05"
    rates = (Expectation(rate=0.02), Expectation(rate=0.98))
    assert gate_power(low, 99, binary=True, expectation=rates[0]).power == pytest.approx(
        gate_power(high, 99, binary=True, expectation=rates[1]).power
    )


@pytest.mark.parametrize(("items", "expected"), [(500, 0.31), (1500, 0.64)])
def test_paired_power_is_what_was_measured(items: int, expected: float) -> None:
    note = gate_power(MARGIN, items, binary=True, expectation=Expectation(discordance=0.15))
    assert note.power == pytest.approx(expected, abs=0.015)
    assert note.needed == pytest.approx(6.18 * 0.15 / 0.02**2, rel=0.002)
    assert note.warning is not None
    assert "assumed equal to the channel's model with discordance 0.15" in note.warning


def simulated(rule: GateRule, items: int, discordance: float, gain: float, trials: int = 400) -> float:
    """How often the gate itself passes."""
    generator = np.random.default_rng(17)
    ids = tuple(f"{index:05d}" for index in range(items))
    shares = [(discordance + gain) / 2, (discordance - gain) / 2, 1 - discordance]
    passed = 0
    for _ in range(trials):
        better, worse, _ = generator.multinomial(items, shares)
        ours, theirs = np.zeros(items), np.zeros(items)
        ours[:better] = 1
        theirs[better : better + worse] = 1
        verdict = judge(rule, Evidence(ids, ours, True), Evidence(ids, theirs, True), channel_empty=False, seed=0)
        passed += verdict.outcome is Outcome.PASS
    return passed / trials


@pytest.mark.parametrize(
    ("rule", "items", "gain"),
    [
        (MARGIN, 800, 0.0),
        (GateRule(name="g", metric="m", better_than="channel", by=0.01), 500, 0.05),
    ],
)
def test_paired_power_is_what_the_gate_does(rule: GateRule, items: int, gain: float) -> None:
    note = gate_power(rule, items, binary=True, expectation=Expectation(discordance=0.1, improvement=gain or None))
    assert note.power == pytest.approx(simulated(rule, items, 0.1, gain), abs=0.07)


def test_an_underpowered_gate_is_warned_of() -> None:
    note = gate_power(ACCURACY, 50, binary=True)
    assert note.needed is not None
    assert note.warning == (
        f"gate accuracy passes a good model only 28% of the time on 50 items (assumed true heldout/accuracy 0.95);"
        f" {note.needed} items give 80%"
    )
    assert gate_power(ACCURACY, 400, binary=True).warning is None


def test_what_no_number_of_items_can_show() -> None:
    certain = GateRule(name="g", metric="m", at_least=1.0)
    exact = GateRule(name="g", metric="m", not_worse_than="channel", margin=0.0)
    for rule in (certain, exact):
        note = gate_power(rule, 10_000, binary=True)
        assert note.needed is None
        assert note.power is not None
        assert note.power <= 0.06
        assert "no number of items is enough" in (note.warning or "")
    below = gate_power(ACCURACY, 100, binary=True, expectation=Expectation(rate=0.85))
    assert below.needed is None


@pytest.mark.parametrize("binary", [True, False])
def test_a_suite_smaller_than_the_minimum_cannot_pass(binary: bool) -> None:
    note = gate_power(ACCURACY, 10, binary=binary)
    assert note.power == 0.0
    assert note.warning == "gate accuracy cannot pass: the suite has 10 items, the rule wants min_items: 20"


def test_an_empty_channel_is_taken_into_account() -> None:
    lenient = GateRule.model_validate({**MARGIN.model_dump(), "if_channel_empty": "pass"})
    assert gate_power(lenient, 100, binary=True, channel_empty=True).power == 1.0
    refused = gate_power(MARGIN, 100, binary=True, channel_empty=True)
    assert refused.power == 0.0
    assert "the channel is empty" in (refused.warning or "")


def test_a_mean_has_no_power_before_its_spread_is_known() -> None:
    rule = GateRule(name="shorter", metric="heldout/tokens", better_than="channel", direction="lower", by=0.5)
    note = gate_power(rule, 100, binary=False)
    assert (note.power, note.needed, note.warning) == (None, None, None)
    assert "0.25 standard deviations" in note.assumption
    generator = np.random.default_rng(5)
    distance = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) / math.sqrt(100)
    ids = tuple(f"{index:03d}" for index in range(100))
    zero = Evidence(ids, np.zeros(100), False)
    passed = [
        judge(
            rule, Evidence(ids, generator.normal(-0.5 - distance, 1, 100), False), zero, channel_empty=False, seed=trial
        )
        for trial in range(60)
    ]
    assert np.mean([verdict.outcome is Outcome.PASS for verdict in passed]) == pytest.approx(0.8, abs=0.12)


@settings(deadline=None)
@given(st.integers(20, 3000), st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_power_grows_with_the_margin(items: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    notes = [
        gate_power(GateRule(name="g", metric="m", not_worse_than="channel", margin=margin), items, binary=True)
        for margin in (small, large)
    ]
    assert (notes[0].power or 0) <= (notes[1].power or 0)
    assert (notes[0].needed or 0) >= (notes[1].needed or 0)
