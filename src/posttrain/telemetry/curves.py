"""Curves made small enough to draw: thinned without losing an extreme, smoothed, and how much of them is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A metric by step, finite values only: `Curve(np.array([1.0, 2.0]), np.array([0.1, 0.3]))`."""

    steps: Floats  # [points], ascending
    values: Floats  # [points]
    dropped: int = 0  # values that were NaN or infinite

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Curve:
        """From what was recorded."""
        x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
        finite = np.isfinite(y) & np.isfinite(x)
        return cls(x[finite], y[finite], int(len(y) - finite.sum()))

    def thinned(self, most: int) -> Curve:
        """At most `most` (≥ 4) points: the first, the last, and of every stretch between its least and its greatest."""
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
        """Centred means over `width` points, fewer at the ends."""
        half = max(0, width // 2)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        places = np.arange(len(self.values))
        first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(self.values))
        return Curve(self.steps, (sums[last] - sums[first]) / np.maximum(last - first, 1), self.dropped)


def step_noise(values: Floats) -> float:
    """Standard deviation of the noise that lies on a trend, by what changes from one value to the next.

    The median of absolute differences over .954, its value for independent normal noise of deviation 1.
    """
    if len(values) < 3:
        return 0.0
    found = float(np.median(np.abs(np.diff(values)))) / 0.954
    return found if math.isfinite(found) else 0.0
