"""Small pictures as SVG inside a page: curves in panels, intervals in rows, and the ranges of their axes.

A panel shows one metric, without a script, in the colours of the page's scheme. A picture of intervals has one row for
each estimate: a point with its limits over a common axis.

A drawn metric has a caption and an axis range. Because an axis that is fitted to the data exaggerates noise, rates are
drawn from 0 to 1 and non-negative metrics from 0. For metrics of either sign, the noise between steps fills at most a
third of the height.

Before drawing, curves are thinned without losing an extreme, and smoothed, and their noise is estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from posttrain.decision.gates import Estimate

Floats = NDArray[np.float64]
REWARD = "reward/mean"
_EDGE = 2.0  # per cent of the width that is left free at both ends
WIDTH, HEIGHT = 360.0, 170.0  # user units of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 352.0, 8.0, 146.0
_SPARSE = 25  # with more points, they are not marked; a running mean is drawn over the faint raw line
TONES = 7  # number of line colours in the page's style


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A metric by step, with finite values only: `Curve(np.array([1.0, 2.0]), np.array([0.1, 0.3]))`."""

    steps: Floats  # [points], ascending
    values: Floats  # [points]
    dropped: int = 0  # number of values that were NaN or infinite

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Curve:
        """Return the curve for recorded steps and values."""
        x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
        finite = np.isfinite(y) & np.isfinite(x)
        return cls(x[finite], y[finite], int(len(y) - finite.sum()))

    def thinned(self, most: int) -> Curve:
        """Return at most `most` (≥ 4) points: the first, the last, and the extremes of every interval between them."""
        if len(self.values) <= most:
            return self
        stretches = max(1, (most - 2) // 2)
        kept = {0, len(self.values) - 1}
        for stretch in np.array_split(np.arange(1, len(self.values) - 1), stretches):
            if len(stretch):
                of = self.values[stretch]
                kept |= {int(stretch[of.argmin()]), int(stretch[of.argmax()])}
        places = np.array(sorted(kept))
        return Curve(self.steps[places], self.values[places], self.dropped)

    def smoothed(self, width: int) -> Curve:
        """Return the centred running means over `width` points, with fewer points at the ends."""
        half = max(0, width // 2)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        places = np.arange(len(self.values))
        first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(self.values))
        return Curve(self.steps, (sums[last] - sums[first]) / np.maximum(last - first, 1), self.dropped)


def step_noise(values: Floats) -> float:
    """Return the standard deviation of the noise around a trend, from differences between consecutive values.

    The result is the median of absolute differences, divided by 0.954. For independent normal noise with standard
    deviation 1, this median is 0.954.
    """
    if len(values) < 3:
        return 0.0
    found = float(np.median(np.abs(np.diff(values)))) / 0.954
    return found if math.isfinite(found) else 0.0


COMPONENTS = "reward components"  # the panel of all metrics `reward/NAME/mean`


# metric → caption, in the order of drawing
WORDS = {
    REWARD: "mean training reward",
    "probe/accuracy": "held-out accuracy (probe)",
    "loss": "training loss",
    "accuracy": "pairs ranked correctly",
    "agreement": "tokens on which teacher and student agree",
    "response_tokens/mean": "mean response length, tokens",
    "entropy": "entropy per token, nats (from the samples)",
    "kl": "KL to the reference, nats per token",
    "grad_norm": "gradient norm, before clipping",
    "truncated": "responses cut at the token limit",
    "clip_fraction": "share of tokens whose ratio was clipped",
    "groups/zero_std": "groups without signal",
    "groups/dropped": "groups dropped, share of those sampled",
    "updates": "optimiser steps per step",
    "rollout/rows": "responses decoded together, mean",
    "rollout/preemptions": "responses preempted and resumed",
    "rollout/recomputed_tokens": "tokens recomputed after a preemption",
    "rollout/prefilled_tokens": "prompt tokens computed",
    "reward/overlong": "penalty on long responses, mean",
    "lag/kl": "KL of the policy at the start of the step to the sampling policy, nats per token",
    "lag/ess": "effective sample size under the weights for lag, share of tokens",
    "margin": "preference: mean margin of the chosen response",
    "reference_point": "KTO: reference point, nats per response",
    "reward/std": "reward: standard deviation",
    "learning_rate": "learning rate",
    "mismatch_kl": "KL of training to sampling, nats per token",
    "mismatch_kl/first": "KL of training to sampling before the step's first update, nats per token",
    "reward/unscored": "responses without a score",
    "reward/errors": "responses whose reward failed",
    "reward/timeouts": "responses whose reward took too long",
    "critic/loss": "critic: loss",
    "critic/grad_norm": "critic: gradient norm, before clipping",
    "tokens_per_second": "tokens per second",
    "memory/peak_resident_mib": "peak memory of the job's process, MiB",
    "memory/peak_allocated_mib": "peak memory of its CUDA device, MiB",
    COMPONENTS: "mean of each component of the reward",
}


_COMPONENT = re.compile(r"reward/(.+)/mean", re.DOTALL)


MAIN = 9  # number of main metrics, which are the first in WORDS


_RATES = (
    "accuracy",
    "agreement",
    "truncated",
    "groups/zero_std",
    "groups/dropped",
    "reward/unscored",
    "reward/errors",
    "reward/timeouts",
)


_SHARES = ("clip_fraction",)  # rates that are normally small


_LEAST_SHARE = 0.1  # minimum upper end of the axis for such rates


_NOISE_PART = 3.0  # minimum ratio of the axis's height to the band of noise


_LEAST_RATIO = 2.0  # minimum ratio of the greatest to the smallest value for a logarithmic axis
_MOST_DECADES = 6  # maximum number of ticks on a logarithmic axis
_BAND = 4.0  # width of the noise band, in standard deviations


def rank(metric: str) -> tuple[int, str]:
    """Return the sort key of a metric for the order of drawing."""
    known = list(WORDS)
    return (known.index(metric) if metric in known else len(known), metric)


def component(metric: str) -> str:
    """Return the reward component of which a metric is the mean; "" for any other metric."""
    found = _COMPONENT.fullmatch(metric)
    return found[1] if found else ""


def is_rate(metric: str) -> bool:
    """Return whether the values of a metric are shares of 1."""
    if metric.startswith("reward/") and metric.endswith(("/errors", "/timeouts")):
        return True
    return metric.endswith(_RATES) or metric.partition("/")[2].startswith("pass@")


def extent(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper end of a metric's axis.

    Args:
        values: all drawn values in the order of steps, including confidence limits; non-finite values are ignored.
    """
    drawn = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not len(drawn):
        return 0.0, 1.0
    low, high = float(drawn.min()), float(drawn.max())
    mean = metric == REWARD or metric.startswith(COMPONENTS) or component(metric)
    if is_rate(metric) or (mean and low >= 0 and high <= 1):
        return min(0.0, low), max(1.0, high)
    if metric.endswith(_SHARES) and low >= 0:
        return 0.0, max(_LEAST_SHARE, 1.05 * high)
    if low >= 0:
        return 0.0, 1.05 * high or 1.0
    if high <= 0:
        return 1.05 * low, 0.0
    height = max(1.1 * (high - low), _NOISE_PART * _BAND * step_noise(drawn))
    middle = (low + high) / 2
    return middle - height / 2, middle + height / 2


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high]: at most `most`, and at least two if the range is not empty."""
    span = high - low
    if not (
        math.isfinite(span) and span > max(1e-300, 1e-9 * max(abs(low), abs(high)))
    ):  # the ends cannot be distinguished
        return [low]
    rough = span / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / pace - 1e-9)
    found: list[float] = []
    while first * pace <= high + 1e-9 * span and len(found) <= most:
        found.append(first * pace + 0.0)
        first += 1
    return found


def _decades(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: powers of ten and, on a short axis, 2 and 5 times these powers."""
    powers = range(max(-307, math.floor(math.log10(low))), min(308, math.ceil(math.log10(high))) + 1)
    found = [10.0**power * part for power in powers for part in ((1, 2, 5) if len(powers) <= 3 else (1,))]
    inside = [at for at in found if low * 0.999 <= at <= high]
    inside = inside if len(inside) > 1 else [low, high]
    return inside[:: math.ceil(len(inside) / _MOST_DECADES)]


def brief(value: float) -> str:
    """Format a number for a tick: `0.25`, `1.2k`, `3e-05`."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return f"{value:.2g}"
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if size >= 10 * scale or (size >= scale and unit == "M"):
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Whisker:
    """One value with its limits, in per cent of the picture's width."""

    value: float
    low: float
    high: float
    tone: int


@dataclass(frozen=True, slots=True)
class Whiskers:
    """Values of one metric on one axis."""

    rows: tuple[Whisker, ...]
    low: str  # the label of the left end
    high: str

    @property
    def height(self) -> int:
        """The height in pixels."""
        return 14 * len(self.rows) + 4


def whiskers(metric: str, found: Sequence[tuple[int, Estimate]]) -> Whiskers:
    """Return a picture of estimates.

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
    """One line: a quantity of one run, such as `CurveSeries("held-out accuracy", "run A", (0, 60), (0.4, 0.97))`."""

    quantity: str  # the line's panel; panels appear in the order of their first series
    run: str  # the legend's entry; a run has one colour in all panels
    steps: Sequence[float]  # [points], ascending
    values: Sequence[float]  # [points]; a NaN breaks the line
    low: Sequence[float] | None = None  # [points], confidence limits; `low` and `high` are given together
    high: Sequence[float] | None = None
    smooth: tuple[Sequence[float], Sequence[float]] | None = None  # steps and running means, before thinning
    metric: str = ""  # the recorded name, which determines the axis; if it is "", the quantity does


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """The beginning of a stage on the axis of steps."""

    step: float
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point, with its limits if they are known, in user units."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One series, ready to draw."""

    name: str
    tone: int
    path: str  # SVG path of all points, thinned
    mean: str = ""  # SVG path of a running mean; "" if every point is marked
    band: str = ""  # SVG path of the range of sampling noise
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """The picture of one metric."""

    metric: str
    words: str
    told: str  # the metric's first, last, least and greatest value
    lines: tuple[Line, ...]
    across: tuple[tuple[float, str], ...]  # (y, number)
    along: tuple[tuple[float, str], ...]  # (x, step)
    zero: float | None  # y of 0; None if 0 is at an edge or outside the axis
    upright: tuple[tuple[float, str], ...] = ()  # (x, label) of a marked step
    span: tuple[float, float] = (0.0, 1.0)  # the first and the last step of the axis
    log: Panel | None = None  # the panel on a logarithmic axis, if all values are positive

    width, height, left, right, bottom = WIDTH, HEIGHT, _LEFT, _RIGHT, _BOTTOM


@dataclass(frozen=True, slots=True)
class _Axes:
    first: float
    last: float
    low: float
    high: float
    log: bool = False

    def x(self, step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        low, high, inside = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, inside = math.log(low), math.log(high), math.log(inside)
        return _BOTTOM - (_BOTTOM - _TOP) * (inside - low) / ((high - low) or 1.0)


def steps_of(panels: Iterable[Sequence[CurveSeries]]) -> tuple[float, float]:
    """Return the first and the last step of several panels, which then share their axis of steps."""
    steps = [float(step) for series in panels for one in series for step in (*one.steps[:1], *one.steps[-1:])]
    return min(steps, default=0.0), max(steps, default=1.0)


def panel(
    metric: str,
    series: Sequence[CurveSeries],
    most: int,
    marked: Sequence[tuple[int, str]] = (),
    span: tuple[float, float] | None = None,
) -> Panel:
    """Return the panel of one metric, with a linear axis and, if all values are positive, a logarithmic axis.

    Args:
        series: at least one series; each is a line of a separate colour.
        most: maximum number of points of a line.
        marked: steps to mark, each with its label; steps outside the axis are ignored.
        span: the first and the last step of the axis; None: those of the lines.
    """
    curves = [Curve.of(one.steps, one.values) for one in series]
    limits = [limit for one in series for limit in (*(one.low or ()), *(one.high or ()))]
    values = [float(value) for curve in curves for value in curve.values]
    first, last = span or steps_of([series])
    made = _panel(metric, series, curves, most, marked, _Axes(first, last, *extent(metric, [*values, *limits])))
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low <= 0 or high < _LEAST_RATIO * low:
        return made
    return replace(made, log=_panel(metric, series, curves, most, marked, _Axes(first, last, low, high, log=True)))


def _panel(
    metric: str,
    series: Sequence[CurveSeries],
    curves: Sequence[Curve],
    most: int,
    marked: Sequence[tuple[int, str]],
    axes: _Axes,
) -> Panel:
    low, high = axes.low, axes.high
    return Panel(
        metric=metric,
        words=WORDS.get(metric, ""),
        told=_told(curves[0]) if len(curves) == 1 else "",
        lines=tuple(
            _line(tone, one, curve, axes, most) for tone, (one, curve) in enumerate(zip(series, curves, strict=True))
        ),
        across=tuple((round(axes.y(at), 1), brief(at)) for at in (_decades if axes.log else ticks)(low, high)),
        along=tuple((round(axes.x(at), 1), brief(at)) for at in _whole(axes.first, axes.last)),
        zero=round(axes.y(0.0), 1) if low < 0 < high else None,
        upright=tuple((round(axes.x(step), 1), word) for step, word in marked if axes.first <= step <= axes.last),
        span=(axes.first, axes.last),
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
    """Return the path of a filled strip between limits, which are thinned without losing an extreme."""
    upper = _strip(curve.steps, high, max(24, most // 2))
    lower = _strip(curve.steps, low, max(24, most // 2))
    there, back = _path(upper, axes), _path(Curve(lower.steps[::-1], lower.values[::-1]), axes)
    return f"{there}L{back[1:]}Z" if there and back else ""


def _strip(steps: Floats, limits: Sequence[float], most: int) -> Curve:
    return Curve.of(list(steps), limits).thinned(most)


def _whole(first: float, last: float) -> list[float]:
    """Return the ticks of an axis of steps, which are whole numbers."""
    found = [at for at in ticks(first, last, 6) if float(at).is_integer()]
    return found or [first, *([last] if last > first else [])]


def _told(curve: Curve) -> str:
    if not len(curve.values):
        return "no finite value"
    numbers = curve.values
    said = f"{_number(numbers[0])} → {_number(numbers[-1])}"
    if len(numbers) > 2:
        said += f", least {_number(numbers.min())}, greatest {_number(numbers.max())}"
    if not curve.dropped:
        return said
    left = "1 value that is not finite is" if curve.dropped == 1 else f"{curve.dropped} values that are not finite are"
    return f"{said}; {left} left out"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "–"
