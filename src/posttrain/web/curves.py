"""The learning-curve picture: one panel for each quantity, with several runs overlaid and stages marked.

This module imports Matplotlib, so it is imported only to draw a picture. The Agg canvas is used directly, without
pyplot, so no global state changes. The same series give the same bytes.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posttrain.domain.errors import InputError
from posttrain.web.pages import write_page
from posttrain.web.panels import CurveSeries, StageBoundary, extent

PANEL_WIDTH, HEIGHT, DPI = 4.4, 3.9, 120  # inches of a panel's width and of the height; pixels per inch
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito: colour-blind safe
_STYLES = ("-", "--", "-.", ":")  # distinguish runs when colours repeat
_INK, _MUTED, _FAINT = "#1f2328", "#6e7781", "#d8dee4"
_SPARSE = 25  # with more points, they are not marked; a running mean is drawn over the faint raw line
_SETTINGS = {
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "text.usetex": False,
    "text.parse_math": False,  # a run's name may contain $
}


def learning_curve(
    path: Path, series: Sequence[CurveSeries], *, boundaries: Sequence[StageBoundary] = (), title: str = ""
) -> None:
    """Write the picture as PNG, 468 pixels high and 528 pixels wide for each panel.

    Raises:
        InputError: there is no series, or a series has sequences of different lengths.
        WorkspaceError: `path` cannot be written.
    """
    write_page(path, draw_learning_curve(series, boundaries=boundaries, title=title), "learning curve")


def draw_learning_curve(
    series: Sequence[CurveSeries], *, boundaries: Sequence[StageBoundary] = (), title: str = ""
) -> bytes:
    """Return the picture's PNG bytes.

    Args:
        series: at least one series.
        boundaries: stage boundaries, which are marked in every panel whose range contains them.
        title: the title above the panels.

    Raises:
        InputError: there is no series, or a series has sequences of different lengths.
    """
    if not series:
        raise InputError("learning curve: at least one series is needed, got none; the run has reported no metrics")
    panels: dict[str, list[CurveSeries]] = {}
    for one in series:
        _check(one)
        panels.setdefault(one.quantity, []).append(one)
    looks: dict[str, dict[str, Any]] = {
        run: {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index // len(_COLOURS) % len(_STYLES)]}
        for index, run in enumerate(dict.fromkeys(one.run for one in series))
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS, "backend": "agg"}):
        figure = _figure(panels, looks, boundaries, title)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _check(series: CurveSeries) -> None:
    sizes = {len(column) for column in (series.steps, series.values, series.low, series.high) if column is not None}
    if (series.low is None) != (series.high is None):
        given = "high" if series.low is None else "low"
        raise InputError(
            f"learning curve: {series.quantity!r}: low and high must be given together or left out together, got only "
            f"{given}"
        )
    if len(sizes) != 1:
        raise InputError(
            f"learning curve: the columns of {series.quantity!r} must have the same length, got lengths {sorted(sizes)}"
        )


def _figure(
    panels: Mapping[str, Sequence[CurveSeries]],
    looks: Mapping[str, Mapping[str, Any]],
    boundaries: Sequence[StageBoundary],
    title: str,
) -> Any:
    figure = Figure(figsize=(PANEL_WIDTH * len(panels), HEIGHT), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
    for axis, (quantity, rows) in zip(axes, panels.items(), strict=True):
        for one in rows:
            _draw(axis, one, looks[one.run])
        _dress(axis, quantity)
        _stretch(axis, rows)
    for axis in axes:
        _mark(axis, boundaries)  # after all panels are drawn, since they share the axis of steps
    handles = [matplotlib.lines.Line2D([], [], linewidth=2.2, **look) for look in looks.values()]
    figure.legend(
        handles,
        [_short(run) for run in looks],
        loc="lower center",
        bbox_to_anchor=(0.5, 0.03),
        ncols=min(len(looks), 2 * len(panels)),
        frameon=False,
    )
    if title:
        figure.suptitle(_short(title, 60 * len(panels)), x=0.012, y=0.975, ha="left", fontsize=11, fontweight="bold")
    if any(len(one.values) > _SPARSE for rows in panels.values() for one in rows):
        figure.text(0.5, 0.012, "faint: each step, bold: running mean", ha="center", fontsize=7.5, color=_MUTED)
    width = PANEL_WIDTH * len(panels)
    figure.subplots_adjust(
        left=0.55 / width,
        right=1 - 0.15 / width,
        top=0.80 if title else 0.88,
        bottom=0.17 + 0.045 * math.ceil(len(looks) / (2 * len(panels))),
        wspace=0.17,
    )
    return figure


def _draw(axis: Any, series: CurveSeries, look: Mapping[str, Any]) -> None:
    steps, values = [float(step) for step in series.steps], [float(value) for value in series.values]
    sparse = len(values) <= _SPARSE
    if series.low is not None and series.high is not None:
        low, high = list(map(float, series.low)), list(map(float, series.high))
        if sparse:
            axis.vlines(steps, low, high, color=look["color"], linewidth=5, alpha=0.25, capstyle="round")
        else:
            axis.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    if sparse:
        axis.plot(steps, values, linewidth=1.8, marker="o", markersize=4.5, markeredgecolor="white", **look)
        return
    axis.plot(steps, values, linewidth=0.8, alpha=0.3, **look)
    axis.plot(steps, _running_mean(values, max(5, len(values) // 20)), linewidth=2.0, **look)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the centred running mean over `width` points, with fewer at the ends; gaps remain gaps."""
    drawn = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(drawn)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, drawn, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places, half = np.arange(len(drawn)), width // 2
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(drawn))
    means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return [float(mean) for mean in np.where(finite, means, np.nan)]


def _dress(axis: Any, quantity: str) -> None:
    axis.set_title(_short(quantity, 48), loc="left", fontsize=10, pad=16)
    axis.set_xlabel("step")
    axis.grid(axis="y", color=_FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.margins(x=0.03)


def _stretch(axis: Any, rows: Sequence[CurveSeries]) -> None:
    """Set the axis to a range that suits the quantity and does not magnify noise."""
    drawn = [float(value) for one in rows for value in (*one.values, *(one.low or ()), *(one.high or ()))]
    low, high = extent(rows[0].metric or rows[0].quantity, drawn)
    edge = 0.03 * (high - low)
    axis.set_ylim(low - edge, high + edge)


def _mark(axis: Any, boundaries: Iterable[StageBoundary]) -> None:
    first, last = axis.get_xlim()
    inside = sorted((b for b in boundaries if first <= b.step <= last), key=lambda boundary: boundary.step)
    for index, boundary in enumerate(inside):
        axis.axvline(boundary.step, color=_MUTED, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
        following = inside[index + 1].step if index + 1 < len(inside) else math.inf
        crowded = following - boundary.step < 0.12 * (last - first)  # if so, the name is on the other side of the line
        axis.annotate(
            _short(boundary.name, 14), (boundary.step, 1.0), xycoords=("data", "axes fraction"), va="bottom",
            xytext=(-2 if crowded else 0, 3), textcoords="offset points", ha="right" if crowded else "left",
            fontsize=8, color=_MUTED,
        )  # fmt: skip


def _short(text: str, length: int = 32) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"
