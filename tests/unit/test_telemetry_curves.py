"""Thinning keeps every extreme; smoothing is a mean; noise is what changes from step to step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posttrain.web.panels import Curve, step_noise

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@settings(deadline=None)
@given(VALUES, st.integers(4, 60))
def test_a_thinned_curve_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    whole = Curve.of(range(len(values)), values)
    thin = whole.thinned(most)
    assert len(thin.values) <= most
    assert (thin.values.min(), thin.values.max()) == (min(values), max(values))
    assert (thin.steps[0], thin.steps[-1]) == (0, len(values) - 1)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert all(values[int(step)] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_a_hundred_thousand_steps_keep_a_single_spike() -> None:
    values = np.zeros(100_000)
    values[77_777] = 5.0
    thin = Curve.of(range(100_000), values).thinned(240)
    assert len(thin.values) <= 240
    assert dict(zip(thin.steps, thin.values, strict=True))[77_777] == 5.0


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    curve = Curve.of([1, 2, 3, 4], [0.5, float("nan"), float("inf"), 0.25])
    assert (list(curve.steps), list(curve.values), curve.dropped) == ([1, 4], [0.5, 0.25], 2)


def test_a_running_mean_is_the_mean_of_its_window() -> None:
    curve = Curve.of(range(5), [1, 2, 3, 4, 10]).smoothed(3)
    assert list(curve.values) == pytest.approx([1.5, 2, 3, 17 / 3, 7])


def test_noise_is_measured_beside_a_trend() -> None:
    rng = np.random.default_rng(3)
    noisy = 0.2 * rng.normal(size=5_000) + np.linspace(0, 100, 5_000)
    assert step_noise(noisy) == pytest.approx(0.2, rel=0.05)
    assert step_noise(np.linspace(0, 1, 50)) < 0.03
    assert step_noise(np.array([1.0, 2.0])) == 0
