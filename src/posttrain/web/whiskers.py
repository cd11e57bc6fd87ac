"""Intervals as pictures: a row of points with their limits over one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.decision.intervals import Estimate
from posttrain.web.quantities import brief, extent, is_rate

_EDGE = 2.0  # per cent kept free at both ends


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

    rows = tuple(row(tone, one) for tone, one in found)
    return Whiskers(rows, brief(low), brief(high))
