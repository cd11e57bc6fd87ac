"""The statistics of gates against independent references: scipy, brute-force likelihoods, exact coverage."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize_scalar

from posttrain.decision.statistics import (
    bootstrap_lower,
    bounded_lower,
    mcnemar_p,
    paired_lower,
    paired_score,
    wilson_lower,
)

CONFIDENCES = st.sampled_from([0.9, 0.95, 0.975, 0.99])


@settings(deadline=None)
@given(items=st.integers(1, 5000), share=st.floats(0, 1), confidence=CONFIDENCES)
def test_wilson_equals_scipy(items: int, share: float, confidence: float) -> None:
    successes = round(items * share)
    interval = stats.binomtest(successes, items).proportion_ci(confidence_level=2 * confidence - 1, method="wilson")
    assert wilson_lower(successes, items, confidence) == pytest.approx(interval.low, abs=1e-12)
    assert 1 - wilson_lower(items - successes, items, confidence) == pytest.approx(interval.high, abs=1e-12)


def profile_score(better: int, worse: int, items: int, difference: float) -> float:
    """Tango's statistic with its nuisance parameter found by maximising the likelihood numerically."""
    same = items - better - worse

    def loss(only_baseline: float) -> float:
        only_candidate = only_baseline + difference
        neither = 1 - only_candidate - only_baseline
        counts, shares = np.array([better, worse, same]), np.array([only_candidate, only_baseline, neither])
        with np.errstate(divide="ignore"):
            return -float(np.sum(np.where(counts > 0, counts * np.log(np.maximum(shares, 1e-300)), 0.0)))

    low, high = max(0.0, -difference), (1 - difference) / 2
    q = float(minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x)
    return (better - worse - items * difference) / np.sqrt(items * (2 * q + difference * (1 - difference)))


@settings(deadline=None, max_examples=60)
@given(counts=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 100)), difference=st.floats(-0.9, 0.9))
def test_paired_score_has_the_likeliest_nuisance(counts: tuple[int, int, int], difference: float) -> None:
    better, worse, same = counts
    items = better + worse + same
    ours = float(paired_score(better, worse, items, difference))
    if abs(difference) > 1e-3:
        assert ours == pytest.approx(profile_score(better, worse, items, difference), rel=1e-3, abs=1e-3)


@settings(deadline=None)
@given(better=st.integers(0, 60), worse=st.integers(0, 60), same=st.integers(0, 200), confidence=CONFIDENCES)
def test_paired_limit_solves_the_score_equation(better: int, worse: int, same: int, confidence: float) -> None:
    items = better + worse + same
    if items == 0:
        return
    limit = paired_lower(better, worse, items, confidence)
    estimate = (better - worse) / items
    assert -1 <= limit <= estimate
    if limit > -1:
        assert float(paired_score(better, worse, items, limit)) == pytest.approx(stats.norm.ppf(confidence), abs=1e-5)


@pytest.mark.parametrize("items", [10, 50, 500])
def test_paired_limit_of_equal_answers_is_known_in_closed_form(items: int) -> None:
    z = stats.norm.ppf(0.95)
    assert paired_lower(0, 0, items, 0.95) == pytest.approx(-(z**2) / (items + z**2), abs=1e-10)


@pytest.mark.parametrize(("better", "worse"), [(12, 5), (5, 12), (30, 30), (1, 0)])
def test_score_at_no_difference_is_mcnemar(better: int, worse: int) -> None:
    expected = (better - worse) / np.sqrt(better + worse)
    assert float(paired_score(better, worse, 200, 0.0)) == pytest.approx(expected)
    assert mcnemar_p(better, worse) == pytest.approx(stats.binomtest(better, better + worse).pvalue)


def test_mcnemar_of_nothing_discordant_is_one() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert float(paired_score(0, 0, 10, 0.0)) == 0.0


def passing_chance(items: int, discordance: float, difference: float, margin: float) -> float:
    """P(lower 95 % limit of the paired difference ≥ -margin), exactly, over all splits of the discordant items."""
    better_rate, worse_rate = (discordance + difference) / 2, (discordance - difference) / 2
    discordant = np.arange(items + 1)[:, None]
    better = np.arange(items + 1)[None, :]
    weights = stats.binom.pmf(discordant, items, discordance) * stats.binom.pmf(
        better, discordant, better_rate / (better_rate + worse_rate)
    )
    passes = paired_score(better, discordant - better, items, -margin) >= stats.norm.ppf(0.95)
    return float(np.sum(weights[(better <= discordant) & passes]))


@pytest.mark.parametrize(
    ("difference", "items", "expected"),
    [(-0.03, 500, 0.015), (0.0, 500, 0.31), (0.0, 1500, 0.64)],
)
def test_the_paired_gate_passes_as_often_as_was_measured(difference: float, items: int, expected: float) -> None:
    assert passing_chance(items, 0.15, difference, margin=0.02) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("items", [100, 400])
def test_a_model_that_is_worse_by_the_margin_passes_at_most_as_often_as_promised(items: int) -> None:
    assert passing_chance(items, 0.15, -0.02, margin=0.02) <= 0.055


def test_score_and_limit_agree_about_passing() -> None:
    z = stats.norm.ppf(0.95)
    for better, worse in combinations(range(0, 40, 3), 2):
        assert (paired_lower(better, worse, 200, 0.95) >= -0.02) == (
            float(paired_score(better, worse, 200, -0.02)) >= z
        )


@pytest.mark.parametrize("shape", ["normal", "skewed", "left"])
def test_bootstrap_equals_scipy(shape: str) -> None:
    generator = np.random.default_rng(7)
    values = {
        "normal": generator.normal(3, 2, 80),
        "skewed": generator.lognormal(1, 1, 60),
        "left": -generator.lognormal(1, 1, 60),
    }[shape]
    reference = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=40_000, method="BCa", rng=np.random.default_rng(1)
    )
    spread = float(reference.standard_error)
    assert bootstrap_lower(values, 0.95, seed=3, resamples=40_000) == pytest.approx(
        reference.confidence_interval.low, abs=0.06 * spread
    )
    assert -bootstrap_lower(-values, 0.95, seed=3, resamples=40_000) == pytest.approx(
        reference.confidence_interval.high, abs=0.06 * spread
    )


def test_bootstrap_covers_the_mean_about_as_often_as_promised() -> None:
    generator = np.random.default_rng(11)
    below = [
        bootstrap_lower(generator.gamma(2.0, 1.0, 100), 0.95, seed=trial, resamples=999) <= 2.0 for trial in range(600)
    ]
    assert 0.925 <= np.mean(below) <= 0.975


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40).map(np.array),
    scale=st.sampled_from([0.25, 2.0, 1024.0]),
)
@settings(deadline=None, max_examples=40)
def test_bootstrap_is_seeded_and_scales(values: np.ndarray, scale: float) -> None:
    limit = bootstrap_lower(values, 0.95, seed=5, resamples=500)
    assert limit == bootstrap_lower(values, 0.95, seed=5, resamples=500)
    assert values.min() - 1e-6 <= limit <= values.max() + 1e-6
    assert bootstrap_lower(scale * values, 0.95, seed=5, resamples=500) == pytest.approx(scale * limit, rel=1e-9)


def test_bootstrap_of_constant_values_is_the_value() -> None:
    assert bootstrap_lower(np.full(30, 4.5), 0.95, seed=0) == 4.5


@pytest.mark.parametrize("magnitude", [1e-300, 1e-150, 1e99])
def test_bootstrap_survives_extreme_magnitudes(magnitude: float) -> None:
    values = np.random.default_rng(0).normal(1, 1, 50)
    limit = bootstrap_lower(values, 0.95, seed=2, resamples=500)
    assert bootstrap_lower(values * magnitude, 0.95, seed=2, resamples=500) == pytest.approx(
        limit * magnitude, rel=1e-6
    )


def test_memory_bound_does_not_change_the_draws_of_a_small_suite() -> None:
    values = np.random.default_rng(0).normal(size=3000)  # 999 x 3000 draws take two chunks
    assert bootstrap_lower(values, 0.95, seed=1, resamples=999) == pytest.approx(
        values.mean() - 1.645 * values.std() / np.sqrt(3000), abs=0.004
    )


@pytest.mark.parametrize(("right", "items"), [(20, 20), (0, 20), (27, 30), (1, 200), (190, 200)])
def test_the_bounded_limit_of_zeros_and_ones_is_exact(right: int, items: int) -> None:
    values = np.array([1.0] * right + [0.0] * (items - right))
    interval = stats.binomtest(right, items).proportion_ci(confidence_level=0.9, method="exact")
    assert bounded_lower(values, 0.0, 0.95, seed=3, resamples=40_000) == pytest.approx(interval.low, abs=2e-3)


RATES = {  # true mean, and how an item's share of right samples is drawn; most are all ones in a small suite
    "pass@4": (0.95, lambda generator, items: generator.binomial(4, 0.95, items) / 4),
    "rare failures": (0.98, lambda generator, items: (generator.random(items) < 0.98).astype(float)),
    "almost constant": (0.855, lambda generator, items: np.where(generator.random(items) < 0.95, 0.9, 0.0)),
    "even": (0.5, lambda generator, items: generator.random(items)),
    "mostly wrong": (0.05, lambda generator, items: generator.beta(0.05, 0.95, items)),
}


@pytest.mark.parametrize("items", [20, 60, 200])
@pytest.mark.parametrize("rates", RATES)
def test_the_bounded_limit_covers_the_mean_at_least_as_often_as_promised(rates: str, items: int) -> None:
    mean, draw = RATES[rates]
    generator = np.random.default_rng(items)
    below = [
        bounded_lower(draw(generator, items), 0.0, 0.95, seed=trial, resamples=499) <= mean for trial in range(400)
    ]
    assert np.mean(below) >= 0.93  # 0.95 less two standard errors of 400 trials


def test_the_bounded_limit_of_a_paired_difference_covers_it() -> None:
    generator = np.random.default_rng(2)
    below = []
    for trial in range(400):
        ours, theirs = generator.binomial(4, 0.9, 80) / 4, generator.binomial(4, 0.9, 80) / 4
        below.append(bounded_lower(ours - theirs, -1.0, 0.95, seed=trial, resamples=499) <= 0)
    assert np.mean(below) >= 0.93


def test_the_bounded_limit_costs_little_where_items_are_many() -> None:
    values = np.random.default_rng(0).binomial(4, 0.95, 1000) / 4
    bounded, bootstrap = bounded_lower(values, 0.0, 0.95, seed=1), bootstrap_lower(values, 0.95, seed=1)
    assert bootstrap - 0.003 < bounded < bootstrap


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40).map(np.array),
    room=st.floats(0, 1e6),
    scale=st.sampled_from([0.25, 2.0, 1024.0]),
)
@settings(deadline=None, max_examples=40)
def test_the_bounded_limit_is_seeded_scales_and_falls_with_the_worst(
    values: np.ndarray, room: float, scale: float
) -> None:
    worst = float(values.min()) - room
    limit = bounded_lower(values, worst, 0.95, seed=5, resamples=500)
    assert limit == bounded_lower(values[::-1], worst, 0.95, seed=5, resamples=500)
    assert worst <= limit <= values.max()
    assert bounded_lower(values, worst - 1, 0.95, seed=5, resamples=500) < limit + 1e-6
    scaled = bounded_lower(scale * values, scale * worst, 0.95, seed=5, resamples=500)
    assert scaled == pytest.approx(scale * limit, rel=1e-9, abs=1e-6)
