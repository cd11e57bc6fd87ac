"""Intervals for people: how well a measured number is known, and by how much two models differ on the same items.

The limits are those that gates rest on (`decision.statistics`), taken from both sides: an interval of confidence 0.95
has a one-sided limit of 0.975 at each end. Nothing is decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from posttrain.decision.gates import MEAN_LIMIT, PAIRED_LIMIT, RATE_LIMIT, Evidence, usable
from posttrain.decision.statistics import RESAMPLES, Array, mcnemar_p, mean_lower, paired_lower, rate_lower
from posttrain.domain.errors import InputError
from posttrain.domain.seeds import derive_seed

CONFIDENCE = 0.95  # two-sided
_MANY = 500  # distinct values from which fewer resamples are drawn: a table must not keep a person waiting
_FEW_RESAMPLES = 1_999  # with one more it divides the level at each end; the limit holds at any number


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items with its interval: `Estimate(0.985, 0.957, 0.997, 200, "exact limit of a rate …")`."""

    value: float
    low: float | None  # None: the metric declares no range, so no limit holds
    high: float | None
    items: int
    method: str

    def __str__(self) -> str:
        return _shown(self.value, self.low, self.high, "")


@dataclass(frozen=True, slots=True)
class Paired:
    """Candidate - reference over the items that both measured."""

    higher: int  # items on which the candidate's value is the greater one
    lower: int
    same: int
    difference: float  # mean
    low: float
    high: float
    method: str
    mcnemar_p: float | None = None  # exact, two-sided, of a metric that is 0 or 1 on every item

    @property
    def items(self) -> int:
        """All paired items."""
        return self.higher + self.lower + self.same

    def wins(self, better: str | None) -> tuple[int, int]:
        """(won, lost) by the candidate, where `better` is "lower" or anything else: higher."""
        return (self.lower, self.higher) if better == "lower" else (self.higher, self.lower)

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return _shown(self.difference, self.low, self.high, "+")


def estimate(metric: str, evidence: Evidence, confidence: float = CONFIDENCE) -> Estimate:
    """A metric's mean with its interval.

    Raises:
        InputError: the evidence says nothing; see `gates.usable`.
    """
    possible = evidence.range
    if possible is None:
        if not len(evidence.values) or not np.isfinite(evidence.values).all():
            raise InputError(f"{metric} has no items or values that are not finite; evaluate again")
        return Estimate(float(evidence.values.mean()), None, None, len(evidence.values), "no declared range")
    values, each = usable(metric, evidence).values, _each(confidence)
    items, mean = len(values), float(values.mean())
    if possible.binary:
        right = round(float(values.sum()))
        low, high = rate_lower(right, items, each), 1 - rate_lower(items - right, items, each)
        return Estimate(mean, low, high, items, RATE_LIMIT)
    low, high = _mean_limits(values, possible.low, possible.high, each)
    return Estimate(mean, low, high, items, MEAN_LIMIT)


def paired(metric: str, candidate: Evidence, reference: Evidence, confidence: float = CONFIDENCE) -> Paired:
    """By how much two models differ, item by item.

    Raises:
        InputError: they were not measured alike: other items, another declared range, or none.
    """
    ours, theirs = usable(metric, candidate), usable(metric, reference)
    if ours.range != theirs.range:
        raise InputError("measured with other settings (the metric's range differs)")
    if ours.item_ids != theirs.item_ids:
        both = len(set(ours.item_ids) & set(theirs.item_ids))
        raise InputError(
            f"measured on other items ({both} of {len(ours.item_ids)} and {len(theirs.item_ids)} are shared)"
        )
    assert ours.range is not None  # `usable` refuses it
    gains, each = ours.values - theirs.values, _each(confidence)
    higher, lower = int(np.count_nonzero(gains > 0)), int(np.count_nonzero(gains < 0))
    same, mean = len(gains) - higher - lower, float(gains.mean())
    if ours.range.binary:
        low, high = paired_lower(higher, lower, len(gains), each), -paired_lower(lower, higher, len(gains), each)
        return Paired(higher, lower, same, mean, low, high, PAIRED_LIMIT, mcnemar_p(higher, lower))
    low, high = _mean_limits(gains, -ours.range.span, ours.range.span, each)
    return Paired(higher, lower, same, mean, low, high, MEAN_LIMIT)


def decimals(low: float, high: float) -> int:
    """How many decimals of a number whose interval is [low, high] say something: two digits of its width."""
    width = abs(high - low)
    if not (width > 0 and math.isfinite(width)):
        return 3
    return min(6, max(0, 1 - math.floor(math.log10(width))))


def _mean_limits(values: Array, low: float, high: float, each: float) -> tuple[float, float]:
    resamples = RESAMPLES if len(np.unique(values)) <= _MANY else _FEW_RESAMPLES
    seed = derive_seed(0, "interval")  # not the metric's: equal values have equal intervals, whatever they are called
    lower = mean_lower(values, low, each, seed, resamples)
    return lower, -mean_lower(-values, -high, each, seed, resamples)


def _each(confidence: float) -> float:
    return 1 - (1 - confidence) / 2


def _shown(value: float, low: float | None, high: float | None, sign: str) -> str:
    if low is None or high is None:
        return f"{value:{sign}.4g}"
    digits = decimals(low, high)
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
