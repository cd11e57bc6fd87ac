"""Small pictures as SVG inside a page: one panel per metric, no script, colours of the page's own scheme.

Intervals as pictures: a row of points with their limits over one axis.

What a picture is drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.decision.gates import Estimate
from posttrain.telemetry.curves import Curve, Floats
from posttrain.web.quantities import WORDS, brief, extent, is_rate, ticks

_EDGE = 2.0  # per cent kept free at both ends
WIDTH, HEIGHT = 360.0, 170.0  # user units
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 352.0, 8.0, 146.0
_SPARSE = 25  # points up to which each is marked; above, a running mean lies over the faint raw line
TONES = 7  # colours of the page's style that tell lines apart


@dataclass(frozen=True, slots=True)
class Whisker:
    """One value; per cent of the width."""

    value: float
    low: float
    high: float
    tone: int


@dataclass(frozen=True, slots=True)
class Whiskers:
    """Values of one metric on one axis."""

    rows: tuple[Whisker, ...]
    low: str  # what stands at the left end
    high: str

    @property
    def height(self) -> int:
        """Pixels."""
        return 14 * len(self.rows) + 4


def whiskers(metric: str, found: Sequence[tuple[int, Estimate]]) -> Whiskers:
    """A picture of estimates.

    Args:
        found: (tone, estimate), from top to bottom.
    """
    limits = [limit for _, one in found for limit in (one.value, one.low, one.high) if limit is not None]
    low, high = (0.0, 1.0) if is_rate(metric) else extent("", limits)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return round(_EDGE + (100 - 2 * _EDGE) * min(max((value - low) / span, 0.0), 1.0), 2)

    def row(tone: int, one: Estimate) -> Whisker:
        low, high = (one.value if limit is None else limit for limit in (one.low, one.high))
        return Whisker(at(one.value), at(low), at(high), tone)

    return Whiskers(tuple(row(tone, one) for tone, one in found), brief(low), brief(high))


@dataclass(frozen=True, slots=True)
class CurveSeries:
    """One line: a quantity of one run, e.g. `CurveSeries("held-out accuracy", "run A", (0, 60), (0.4, 0.97))`."""

    quantity: str  # the panel it belongs to; panels appear in the order of their first series
    run: str  # the legend's entry; a run has one colour in all panels
    steps: Sequence[float]  # [points], ascending
    values: Sequence[float]  # [points]; a NaN breaks the line
    low: Sequence[float] | None = None  # [points] confidence limits, both or none
    high: Sequence[float] | None = None
    smooth: tuple[Sequence[float], Sequence[float]] | None = None  # steps and running means, before thinning
    metric: str = ""  # as it was recorded, which says how its axis is drawn; empty: the quantity


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """Where a stage begins, on the axis of steps."""

    step: float
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point, and its limits where they are known; user units."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One series, ready to draw."""

    name: str
    tone: int
    path: str  # all points of it, thinned
    mean: str = ""  # a running mean; empty where every point is marked
    band: str = ""  # what sampling noise alone may do
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric."""

    metric: str
    words: str
    told: str  # first and last value, least and greatest
    lines: tuple[Line, ...]
    across: tuple[tuple[float, str], ...]  # (y, number)
    along: tuple[tuple[float, str], ...]  # (x, step)
    zero: float | None  # y of 0, where it is neither edge
    upright: tuple[tuple[float, str], ...] = ()  # (x, word) of a step that means something

    width, height, left, right, bottom = WIDTH, HEIGHT, _LEFT, _RIGHT, _BOTTOM


@dataclass(frozen=True, slots=True)
class _Axes:
    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return _BOTTOM - (_BOTTOM - _TOP) * (inside - self.low) / ((self.high - self.low) or 1.0)


def panel(metric: str, series: Sequence[CurveSeries], most: int, marked: Sequence[tuple[int, str]] = ()) -> Panel:
    """The picture of one metric.

    Args:
        series: at least one; each a line of its own colour.
        most: points of a line.
        marked: steps to mark, each with its word; of those the axis has.
    """
    curves = [Curve.of(one.steps, one.values) for one in series]
    limits = [limit for one in series for limit in (*(one.low or ()), *(one.high or ()))]
    low, high = extent(metric, [*(value for curve in curves for value in curve.values), *limits])
    steps = [float(step) for curve in curves for step in curve.steps]
    axes = _Axes(min(steps, default=0.0), max(steps, default=1.0), low, high)
    lines = tuple(
        _line(tone, one, curve, axes, most) for tone, (one, curve) in enumerate(zip(series, curves, strict=True))
    )
    return Panel(
        metric=metric,
        words=WORDS.get(metric, ""),
        told=_told(curves[0]) if len(curves) == 1 else "",
        lines=lines,
        across=tuple((round(axes.y(at), 1), brief(at)) for at in ticks(low, high)),
        along=tuple((round(axes.x(at), 1), brief(at)) for at in _whole(axes.first, axes.last)),
        zero=round(axes.y(0.0), 1) if low < 0 < high else None,
        upright=tuple((round(axes.x(step), 1), word) for step, word in marked if axes.first <= step <= axes.last),
    )


def _line(tone: int, series: CurveSeries, curve: Curve, axes: _Axes, most: int) -> Line:
    sparse = len(curve.values) <= _SPARSE
    known = series.low is not None and series.high is not None and not curve.dropped
    low, high = (series.low or (), series.high or ()) if known else ((), ())
    marks = tuple(_marks(curve, low, high, axes)) if sparse else ()
    mean = ""
    if not sparse:
        means = Curve.of(*series.smooth) if series.smooth else curve.smoothed(max(5, len(curve.values) // 20))
        mean = _path(means.thinned(max(24, most // 2)), axes)
    band = _band(curve, low, high, axes, most) if known and not sparse else ""
    return Line(series.run, tone % TONES, _path(curve.thinned(most), axes), mean, band, marks)


def _marks(curve: Curve, low: Sequence[float], high: Sequence[float], axes: _Axes) -> Iterator[Mark]:
    for place, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True)):
        ends = [round(axes.y(limit[place]), 1) if len(limit) else None for limit in (low, high)]
        yield Mark(round(axes.x(step), 1), round(axes.y(value), 1), *ends)


def _path(curve: Curve, axes: _Axes) -> str:
    points = (f"{axes.x(step):.1f} {axes.y(value):.1f}" for step, value in zip(curve.steps, curve.values, strict=True))
    return "M" + "L".join(points) if len(curve.values) else ""


def _band(curve: Curve, low: Sequence[float], high: Sequence[float], axes: _Axes, most: int) -> str:
    """A filled strip; thinned by its own extremes, so that it is never drawn narrower than it is."""
    upper = _strip(curve.steps, high, max(24, most // 2))
    lower = _strip(curve.steps, low, max(24, most // 2))
    there, back = _path(upper, axes), _path(Curve(lower.steps[::-1], lower.values[::-1]), axes)
    return f"{there}L{back[1:]}Z" if there and back else ""


def _strip(steps: Floats, limits: Sequence[float], most: int) -> Curve:
    return Curve.of(list(steps), limits).thinned(most)


def _whole(first: float, last: float) -> list[float]:
    """Ticks of an axis of steps: whole numbers only."""
    found = [at for at in ticks(first, last, 6) if float(at).is_integer()]
    return found or [first, *([last] if last > first else [])]


def _told(curve: Curve) -> str:
    if not len(curve.values):
        return "no finite value"
    numbers = curve.values
    said = f"{_number(numbers[0])} → {_number(numbers[-1])}"
    if len(numbers) > 2:
        said += f", least {_number(numbers.min())}, greatest {_number(numbers.max())}"
    return said + (f"; {curve.dropped} not finite, left out" if curve.dropped else "")


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "–"
