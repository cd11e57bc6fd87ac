"""Intervals for people, against scipy and against what they must never do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from posttrain.decision.gates import Evidence, decimals, estimate, paired
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import RATE, ItemRange

BITS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)
TOKENS = ItemRange(1, 16)


def evidence(values: list[float], possible: ItemRange | None = RATE, first: int = 0) -> Evidence:
    return Evidence(tuple(f"i{first + n}" for n in range(len(values))), np.array(values), possible)


@settings(deadline=None)
@given(BITS)
def test_a_rates_interval_is_scipys_exact_one(values: list[float]) -> None:
    found = estimate("s/accuracy", evidence(values))
    wanted = stats.binomtest(int(sum(values)), len(values)).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert (found.value, found.items) == (pytest.approx(np.mean(values)), len(values))
    assert "Clopper" in found.method


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 16), min_size=2, max_size=40))
def test_a_means_interval_holds_it_and_stays_in_the_declared_range(values: list[int]) -> None:
    found = estimate("s/response_tokens", evidence([float(v) for v in values], TOKENS))
    assert found.low is not None
    assert found.high is not None
    assert 1 <= found.low <= found.value <= found.high <= 16
    assert found.low < found.high, "equal values do not make it certain"


@pytest.mark.slow
def test_a_means_interval_covers_as_often_as_it_says() -> None:
    rng, missed = np.random.default_rng(7), 0
    for round_ in range(200):
        values = rng.choice([1.0, 2.0, 16.0], size=40, p=[0.6, 0.3, 0.1])
        found = estimate(f"s/{round_}", evidence(list(values), TOKENS))
        missed += not (found.low or 0) <= 0.6 + 0.6 + 1.6 <= (found.high or 0)
    assert missed <= stats.binom.ppf(0.9999, 200, 0.05)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60))
def test_pairs_are_counted_and_the_mirror_image_is_the_mirror_image(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = evidence([a for a, _ in pairs]), evidence([b for _, b in pairs])
    there, back = paired("s/accuracy", ours, theirs), paired("s/accuracy", theirs, ours)
    assert there.higher == sum(a > b for a, b in pairs)
    assert there.lower == sum(a < b for a, b in pairs)
    assert there.items == len(pairs)
    assert there.low <= there.difference <= there.high
    assert (there.higher, there.difference) == (back.lower, -back.difference)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)


def test_pairs_go_by_item_whatever_the_order() -> None:
    ours = Evidence(("a", "b", "c"), np.array([1.0, 0.0, 1.0]), RATE)
    theirs = Evidence(("c", "a", "b"), np.array([1.0, 0.0, 0.0]), RATE)
    found = paired("s/accuracy", ours, theirs)
    assert (found.higher, found.lower, found.same) == (1, 0, 2)
    assert not found.decided


def test_a_clear_difference_is_decided() -> None:
    found = paired("s/accuracy", evidence([1.0] * 50), evidence([0.0] * 50))
    assert found.decided
    assert found.mcnemar_p == pytest.approx(2 * 0.5**50)
    longer = paired("s/t", evidence([9.0] * 50, TOKENS), evidence([2.0] * 50, TOKENS))
    assert longer.decided
    assert longer.difference == 7
    assert longer.mcnemar_p is None


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (evidence([1.0] * 4, first=2), "other items \\(2 of 4 and 4 are shared\\)"),
        (evidence([1.0] * 4, ItemRange(0, 1)), "range differs"),
        (evidence([1.0] * 4, None), "no declared range"),
        (evidence([2.0] * 4), "binary"),
    ],
)
def test_what_was_not_measured_alike_is_not_paired(theirs: Evidence, words: str) -> None:
    with pytest.raises(InputError, match=words):
        paired("s/accuracy", evidence([1.0] * 4), theirs)


def test_without_a_declared_range_there_is_a_mean_and_no_interval() -> None:
    found = estimate("s/score", evidence([0.5, 1.5], None))
    assert (found.value, found.low, found.high) == (1.0, None, None)
    assert str(found) == "1"
    for nothing in ([], [float("nan")]):
        with pytest.raises(InputError):
            estimate("s/score", evidence(nothing, None))


def test_numbers_have_the_digits_that_their_interval_supports() -> None:
    assert [decimals(0.95, 0.99), decimals(0.4, 0.6), decimals(100, 180), decimals(1, 1)] == [3, 2, 0, 3]
    assert str(estimate("s/accuracy", evidence([1.0] * 197 + [0.0] * 3))) == "0.985 [0.957, 0.997]"
    assert str(paired("s/accuracy", evidence([1.0] * 20), evidence([0.0] * 10 + [1.0] * 10))).startswith("+0.50 [+0.")
