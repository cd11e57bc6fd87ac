"""The statistics of gates against independent references: scipy, adaptive quadrature, exact levels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats
from scipy.integrate import quad

from posttrain.decision.statistics import difference_chance, mcnemar_p, mean_lower, paired_lower, rate_lower

CONFIDENCES = st.sampled_from([0.9, 0.95, 0.975, 0.99])


@settings(deadline=None)
@given(items=st.integers(1, 5000), share=st.floats(0, 1), confidence=CONFIDENCES)
def test_the_limit_of_a_rate_is_that_of_scipys_binomial_test(items: int, share: float, confidence: float) -> None:
    successes = round(items * share)
    interval = stats.binomtest(successes, items).proportion_ci(confidence_level=2 * confidence - 1, method="exact")
    assert rate_lower(successes, items, confidence) == pytest.approx(interval.low, abs=1e-12)
    assert 1 - rate_lower(items - successes, items, confidence) == pytest.approx(interval.high, abs=1e-12)


def reference_chance(better: int, worse: int, items: int, difference: float) -> float:
    """P(B - W < difference) for B, W of Dirichlet(better, worse + 1, rest), by adaptive quadrature over B."""
    gain, given = stats.beta(better, items - better + 1), stats.beta(worse + 1, items - better - worse)

    def below(share: float) -> float:  # W / (1 - B) is `given` and must exceed (B - difference) / (1 - B)
        return float(gain.pdf(share) * given.sf((share - difference) / (1 - share)))

    edge = (1 + difference) / 2  # beyond it W cannot be large enough
    cuts = sorted(
        {min(max(float(gain.ppf(q)), 0.0), edge) for q in (0, 1e-9, 1e-4, 0.02, 0.5, 0.98, 1 - 1e-4)} | {edge}
    )
    parts = (quad(below, low, high, epsabs=1e-13, epsrel=1e-12, limit=200)[0] for low, high in pairwise(cuts))
    return float(sum(parts))


@pytest.mark.parametrize(
    ("better", "worse", "items", "difference"),
    [(5, 3, 50, -0.02), (5, 3, 50, 0.03), (40, 30, 500, -0.02), (1, 0, 20, 0.01), (3, 17, 21, -0.5), (12, 2, 60, 0.0),
     (30, 25, 700, 0.03), (2, 40, 400, -0.2), (1, 1, 3, 0.9), (260, 250, 3000, -0.01)],
)  # fmt: skip
def test_the_paired_integral_has_the_digits_it_claims(better: int, worse: int, items: int, difference: float) -> None:
    expected = reference_chance(better, worse, items, difference)
    assert difference_chance(better, worse, items, difference) == pytest.approx(expected, abs=1e-10)


@settings(deadline=None, max_examples=60)
@given(better=st.integers(0, 60), worse=st.integers(0, 60), same=st.integers(0, 200), confidence=CONFIDENCES)
def test_the_paired_limit_is_where_the_chance_is_the_level(
    better: int, worse: int, same: int, confidence: float
) -> None:
    items = better + worse + same
    if items == 0:
        return
    limit = paired_lower(better, worse, items, confidence)
    assert -1 <= limit <= (better - worse) / items
    if limit > -1:
        assert difference_chance(better, worse, items, limit) == pytest.approx(1 - confidence, abs=1e-9)
        assert difference_chance(better, worse, items, limit - 1e-3) <= 1 - confidence


@pytest.mark.parametrize(("better", "worse"), [(12, 5), (5, 12), (30, 30), (1, 0), (0, 7)])
def test_against_no_difference_the_paired_limit_is_the_exact_test_of_mcnemar(better: int, worse: int) -> None:
    exact = stats.binomtest(better, better + worse, alternative="greater").pvalue
    assert difference_chance(better, worse, 200, 0.0) == pytest.approx(exact, abs=1e-12)
    assert mcnemar_p(better, worse) == pytest.approx(stats.binomtest(better, better + worse).pvalue)


def test_mcnemar_of_nothing_discordant_is_one() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert difference_chance(0, 0, 10, 0.0) == 1.0


@pytest.mark.parametrize("items", [10, 50, 500])
def test_the_paired_limit_of_equal_answers_is_known_in_closed_form(items: int) -> None:
    assert paired_lower(0, 0, items, 0.95) == pytest.approx(-(1 - 0.05 ** (1 / items)), abs=1e-10)
    assert paired_lower(0, items, items, 0.95) == -1.0


RIGHT = [(20, 20), (0, 20), (27, 30), (1, 200), (190, 200)]


@pytest.mark.parametrize(("right", "items"), RIGHT)
def test_the_bounded_limit_of_zeros_and_ones_is_that_of_the_rate(right: int, items: int) -> None:
    values = np.array([1.0] * right + [0.0] * (items - right))
    limit = mean_lower(values, 0.0, 0.95, seed=3, resamples=39_999)
    assert limit == pytest.approx(rate_lower(right, items, 0.95), abs=2e-3)


@pytest.mark.parametrize(("better", "worse", "items"), [(30, 12, 200), (3, 3, 40), (80, 2, 100)])
def test_the_bounded_limit_of_losses_and_gains_is_the_paired_limit(better: int, worse: int, items: int) -> None:
    values = np.array([1.0] * better + [-1.0] * worse + [0.0] * (items - better - worse))
    limit = mean_lower(values, -1.0, 0.95, seed=3, resamples=39_999)
    assert limit == pytest.approx(paired_lower(better, worse, items, 0.95), abs=3e-3)


def test_the_bounded_limit_is_a_draw_of_the_rank_that_keeps_the_level() -> None:
    """Rank ⌊(draws + 1) α⌋, not the interpolated quantile, which is higher; none of 18 draws is low enough for 5 %."""
    values = np.random.default_rng(0).random(30)
    few = [mean_lower(values, 0.0, 0.95, seed=seed, resamples=19) for seed in range(4000)]
    many = mean_lower(values, 0.0, 0.95, seed=1, resamples=99_999)
    assert np.mean(np.array(few) >= many) <= 0.95**19 + 3 * np.sqrt(0.377 * 0.623 / 4000)
    assert mean_lower(values, 0.0, 0.95, seed=1, resamples=18) == 0.0


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
    below = [mean_lower(draw(generator, items), 0.0, 0.95, seed=trial, resamples=499) <= mean for trial in range(400)]
    assert np.mean(below) >= 0.93  # 0.95 less two standard errors of 400 trials


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
    limit = mean_lower(values, worst, 0.95, seed=5, resamples=499)
    assert limit == mean_lower(values[::-1], worst, 0.95, seed=5, resamples=499)
    assert worst <= limit <= values.max()
    assert mean_lower(values, worst - 1, 0.95, seed=5, resamples=499) < limit + 1e-6
    scaled = mean_lower(scale * values, scale * worst, 0.95, seed=5, resamples=499)
    assert scaled == pytest.approx(scale * limit, rel=1e-9, abs=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    items=st.integers(2, 40),
    difference=st.floats(-0.6, 0.6),
    confidence=CONFIDENCES,
    nuisance=st.floats(0.01, 0.99),
)
def test_no_pair_of_rates_is_passed_above_the_level(
    items: int, difference: float, confidence: float, nuisance: float
) -> None:
    """Over every result, with its chance, for a true difference of just the threshold."""
    low, high = max(0.0, -difference), (1 - difference) / 2
    worse = low + nuisance * (high - low)
    shares = [worse + difference, worse, max(0.0, 1 - 2 * worse - difference)]
    level = 0.0
    for lost in range(items + 1):
        for gained in range(items + 1 - lost):
            if difference_chance(gained, lost, items, difference) <= 1 - confidence:
                more = [[gains, lost, items - gains - lost] for gains in range(gained, items - lost + 1)]
                level += float(np.sum(stats.multinomial.pmf(more, items, shares)))
                break
    assert level <= 1 - confidence + 1e-9
