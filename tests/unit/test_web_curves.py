"""The learning-curve picture is a valid PNG of the promised size, deterministic, and survives odd series."""

from __future__ import annotations

import io
import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from posttrain.domain.errors import InputError, WorkspaceError
from posttrain.web.curves import CurveSeries, StageBoundary, _running_mean, draw_learning_curve, learning_curve

STEPS = tuple(range(60))
REWARD = CurveSeries("training reward", "run A", STEPS, tuple(step / 60 for step in STEPS))
ACCURACY = CurveSeries("held-out accuracy", "run A", (0, 30, 60), (0.1, 0.6, 0.9), (0.0, 0.5, 0.85), (0.2, 0.7, 0.94))


def pixels(data: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(data), format="png")


def holds(data: bytes, colour: str) -> bool:
    """Whether some pixel has exactly this colour."""
    wanted = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)])
    return bool(np.any(np.all(np.round(pixels(data)[:, :, :3] * 255) == wanted, axis=2)))


@pytest.mark.parametrize(("series", "width"), [([REWARD], 528), ([REWARD, ACCURACY], 1056)])
def test_the_picture_has_one_panel_per_quantity(tmp_path: Path, series: list[CurveSeries], width: int) -> None:
    path = tmp_path / "curve.png"
    learning_curve(path, series, boundaries=[StageBoundary(0, "sft"), StageBoundary(30, "grpo")], title="a run")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert pixels(path.read_bytes()).shape[:2] == (468, width)
    assert [entry.name for entry in tmp_path.iterdir()] == ["curve.png"]


def test_the_same_series_give_the_same_bytes() -> None:
    assert draw_learning_curve([REWARD, ACCURACY]) == draw_learning_curve([REWARD, ACCURACY])


def test_the_reader_s_own_matplotlib_settings_do_not_matter() -> None:
    expected = draw_learning_curve([ACCURACY])
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "savefig.transparent": True}):
        assert draw_learning_curve([ACCURACY]) == expected
        assert matplotlib.rcParams["axes.facecolor"] == "red"


def test_runs_are_overlaid_in_colours_of_their_own() -> None:
    other = CurveSeries("training reward", "run B", STEPS, tuple(1 - step / 60 for step in STEPS))
    alone, both = draw_learning_curve([REWARD]), draw_learning_curve([REWARD, other])
    assert holds(alone, "#0072B2")
    assert not holds(alone, "#D55E00")
    assert holds(both, "#0072B2")
    assert holds(both, "#D55E00")


def test_limits_boundaries_and_title_are_drawn() -> None:
    bare = CurveSeries(ACCURACY.quantity, ACCURACY.run, ACCURACY.steps, ACCURACY.values)
    pictures = [
        draw_learning_curve([bare]),
        draw_learning_curve([ACCURACY]),
        draw_learning_curve([bare], boundaries=[StageBoundary(30, "grpo")]),
        draw_learning_curve([bare], title="a title"),
    ]
    assert len(set(pictures)) == len(pictures)
    assert draw_learning_curve([bare], boundaries=[StageBoundary(1e6, "elsewhere")]) == pictures[0]


@pytest.mark.parametrize(
    "series",
    [
        CurveSeries("reward", "a", (), ()),
        CurveSeries("reward", "a", (3,), (0.5,)),
        CurveSeries("reward", "a", STEPS, (float("nan"),) * 60),
        CurveSeries("reward", "a", STEPS, tuple(float("inf") if step == 9 else step for step in STEPS)),
        CurveSeries("<b>$x_{</b>" * 20, "$\\frac{" * 20, (0, 1), (1e30, -1e30)),
        CurveSeries("_reward", "_hidden", (0, 1), (0, 1)),
    ],
)
def test_odd_series_still_make_a_picture(series: CurveSeries) -> None:
    assert pixels(draw_learning_curve([series], title="$\\x{")).shape[:2] == (468, 528)


@pytest.mark.parametrize(
    "series",
    [
        CurveSeries("reward", "a", (0, 1), (0.5,)),
        CurveSeries("reward", "a", (0,), (0.5,), low=(0.4,), high=(0.6, 0.7)),
    ],
)
def test_lengths_that_differ_are_refused(series: CurveSeries) -> None:
    with pytest.raises(InputError, match=r"columns of 'reward' must have the same length, got lengths \[1, 2\]"):
        draw_learning_curve([series])


def test_one_bound_alone_is_refused() -> None:
    wanted = "'reward': low and high must be given together or left out together, got only low"
    with pytest.raises(InputError, match=wanted):
        draw_learning_curve([CurveSeries("reward", "a", (0,), (0.5,), low=(0.4,))])


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InputError, match="at least one series"):
        draw_learning_curve([])


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="cannot write"):
        learning_curve(tmp_path / "missing" / "curve.png", [REWARD])


def test_a_running_mean_passes_over_gaps_and_keeps_them() -> None:
    nan = float("nan")
    found = _running_mean([1.0, 2.0, nan, 4.0, 6.0], 3)
    assert found[0] == 1.5
    assert found[1] == 1.5
    assert math.isnan(found[2])
    assert found[3:] == [5.0, 5.0]
