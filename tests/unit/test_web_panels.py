"""Axes that make no drama out of noise, and panels that are small and whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posttrain.web.panels import HEIGHT, WIDTH, CurveSeries, Panel, brief, extent, panel, rank, steps_of, ticks

NOISE = list(np.random.default_rng(1).normal(size=200))


@pytest.mark.parametrize(
    ("metric", "values", "wanted"),
    [
        ("probe/accuracy", [0.501, 0.502], (0, 1)),
        ("truncated", [0.0, 0.001], (0, 1)),
        ("groups/zero_std", [1.0], (0, 1)),
        ("heldout/pass@4", [0.9], (0, 1)),
        ("reward/mean", [0.31, 0.33], (0, 1)),
        ("clip_fraction", [0.0, 0.002], (0, 0.1)),
        ("response_tokens/mean", [500.0, 520.0], (0, 546)),
        ("grad_norm", [1.0, 9.0], (0, 9.45)),
        ("reward/mean", [0.0, 2.0], (0, 2.1)),
        ("kl", [0.0, 0.0], (0, 1)),
        ("loss", [-2.0, -1.0], (-2.1, 0)),
        ("loss", [], (0, 1)),
        ("loss", [float("nan"), float("inf")], (0, 1)),
    ],
)
def test_ranges_are_those_of_the_quantity(metric: str, values: list[float], wanted: tuple[float, float]) -> None:
    assert extent(metric, values) == pytest.approx(wanted)


def test_noise_around_zero_fills_a_third_and_a_trend_the_height() -> None:
    low, high = extent("loss", NOISE)
    inner = np.percentile(NOISE, 97.5) - np.percentile(NOISE, 2.5)
    assert inner / (high - low) < 1 / 3
    assert low < min(NOISE)
    assert max(NOISE) < high
    trend = list(np.linspace(-1, 1, 100) + 0.001 * np.array(NOISE[:100]))
    low, high = extent("reward/mean", trend)
    assert (low, high) == pytest.approx((-1.1, 1.1), abs=0.01)


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    high = low + width
    found = ticks(low, high)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * width <= at <= high + 1e-6 * width for at in found)
    assert found == sorted(found)


def test_numbers_of_ticks_are_short() -> None:
    assert [brief(v) for v in (0, 0.25, 1200, 12_000, 3e-5, 2_500_000, 1e12)] == [
        "0", "0.25", "1200", "12k", "3e-05", "2.5M", "1e+12",
    ]  # fmt: skip


def test_what_matters_most_is_drawn_first() -> None:
    assert sorted(["own", "tokens_per_second", "loss", "reward/mean", "another"], key=rank) == [
        "reward/mean", "loss", "tokens_per_second", "another", "own",
    ]  # fmt: skip


def test_a_panel_stays_in_its_frame_and_is_small() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=100_000)
    values[5], values[6] = np.nan, 40
    made = panel("loss", [CurveSeries("loss", "run", range(100_000), list(values), metric="loss")], 240)
    (line,) = made.lines
    assert len(line.path) < 3_500
    assert "greatest 40" in made.told
    assert "1 value that is not finite is left out" in made.told
    for path in (line.path, line.mean):
        for point in path[1:].split("L"):
            x, y = map(float, point.split())
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    assert made.zero is not None


def test_known_noise_is_a_band_or_bars() -> None:
    steps = list(range(40))
    dense = CurveSeries("r", "run", steps, [0.5] * 40, [0.4] * 40, [0.6] * 40, metric="reward/mean")
    assert panel("reward/mean", [dense], 240).lines[0].band.endswith("Z")
    sparse = CurveSeries("r", "run", steps[:5], [0.5] * 5, [0.4] * 5, [0.6] * 5, metric="probe/accuracy")
    (line,) = panel("probe/accuracy", [sparse], 240).lines
    assert len(line.marks) == 5
    assert line.marks[0].low is not None
    assert line.marks[0].high is not None
    assert line.marks[0].high < line.marks[0].y < line.marks[0].low, "y grows downwards"
    assert not panel("loss", [CurveSeries("r", "run", [1], [0.5])], 240).lines[0].band


def test_several_lines_have_colours_of_their_own() -> None:
    made = panel("loss", [CurveSeries("loss", name, [0, 1], [1, 2]) for name in "AB"], 240)
    assert [(line.name, line.tone) for line in made.lines] == [("A", 0), ("B", 1)]
    assert made.told == ""


def test_a_running_mean_is_that_of_all_points_where_it_is_given() -> None:
    steps, spiky = list(range(100)), [1.0, 9.0] * 50
    given = CurveSeries("loss", "run", steps, spiky, smooth=([0, 99], [2.0, 2.0]))
    (line,) = panel("loss", [given], 240).lines
    assert len({point.split()[1] for point in line.mean[1:].split("L")}) == 1
    assert len(line.mean) < 40


def test_a_panel_has_a_logarithmic_axis_where_all_values_are_positive() -> None:
    def made(*values: float) -> Panel:
        return panel("loss", [CurveSeries("loss", "run", range(len(values)), values, metric="loss")], 240)

    found = made(1.0, 0.1, 0.01).log
    assert found is not None
    heights = [mark.y for mark in found.lines[0].marks]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)  # a decade has one height
    assert [text for _, text in found.across] == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"][::2]
    assert made(1.0, 0.0).log is None
    assert made(1.0, -2.0).log is None
    assert made(1.0, 1.1).log is None
    for extreme in (
        (1.0, 1.7e308),
        (5e-324, 1.5e-323),
        (5e-324, 1e300),
        (2.1, 9.9),
        (float("nan"), 1.0, 9.0, float("inf")),
    ):
        drawn = made(*extreme).log
        assert drawn is not None
        assert len(drawn.across) >= 2, extreme
    assert len(made(1e-9, 1e9).log.across) <= 7  # type: ignore[union-attr]


def test_panels_share_their_axis_of_steps() -> None:
    early, late = CurveSeries("a", "run", [0, 10], [1, 2]), CurveSeries("b", "run", [10, 20], [1, 2])
    span = steps_of([[early], [late]])
    assert span == (0.0, 20.0)
    first, second = (panel(one.quantity, [one], 240, span=span) for one in (early, late))
    assert first.along == second.along
    assert first.lines[0].marks[1].x == second.lines[0].marks[0].x
    assert steps_of([]) == (0.0, 1.0)
