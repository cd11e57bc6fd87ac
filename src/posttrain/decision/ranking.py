"""Settings of a sweep, ranked as far as what was measured allows.

A setting was trained with one or several seeds and each of its models measured on the same items. Two things are then
uncertain: which items the suite happens to have, and which seeds were drawn. The interval of a mean over seeds adds
both, as if they were independent: the distances of its limits from the mean are the square roots of the sums of the
squared distances of the two intervals' limits (MOVER; Zou and Donner 2008). Over items the limits are those of
`intervals`; over seeds they are Student's, and paired by seed for a difference. Item noise is in both, so the sum errs
to the wide side. With one seed there is no second part: then models are compared, not settings. Two seeds that
happen to agree say nothing of a third, so where there are several, fewer than three in common decide nothing.

A setting is ahead of another where the interval of their difference leaves out 0, all pairs held at once (Bonferroni).
Its rank is then a range: from 1 + those that are ahead of it to all less those that it is ahead of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from posttrain.decision.gates import Evidence
from posttrain.decision.intervals import CONFIDENCE, Estimate, decimals, estimate, paired
from posttrain.domain.errors import InputError
from posttrain.domain.measures import ENOUGH_SEEDS, ItemRange, few_seeds

Seeds = Mapping[int, Evidence]  # seed → what was measured of its model


@dataclass(frozen=True, slots=True)
class Ranked:
    """One setting."""

    mean: Estimate | None  # over seeds; None: nothing was measured
    values: Mapping[int, float]  # seed → mean over items
    best: int  # ranks that it may have among those that were measured
    worst: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Setting `second` - setting `first` (places in the sweep), in the metric's units."""

    first: int
    second: int
    value: float
    low: float
    high: float
    seeds: int  # that both have
    enough: bool = True  # seeds to decide by

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0, and rests on enough seeds."""
        return self.enough and (self.low > 0 or self.high < 0)

    def turned(self) -> Difference:
        """The same the other way round."""
        return Difference(self.second, self.first, -self.value, -self.high, -self.low, self.seeds, self.enough)

    def __str__(self) -> str:
        digits = decimals(self.low, self.high)
        return f"{self.value:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Ranking:
    """All settings, in the order of the sweep."""

    settings: tuple[Ranked, ...]
    differences: tuple[Difference, ...]
    confidence: float  # of each mean, and of all differences together
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # that fewer seeds than are enough were compared


def rank(metric: str, settings: Sequence[Seeds], better: str, confidence: float = CONFIDENCE) -> Ranking:
    """Rank settings by a metric.

    Args:
        settings: what was measured, by seed; a setting may lack seeds, or all.
        better: "higher" or "lower".
        confidence: two-sided.
    """
    measured = [place for place, seeds in enumerate(settings) if seeds]
    pairs = list(combinations(measured, 2))
    each = 1 - (1 - confidence) / max(1, len(pairs))
    several = max((len(seeds) for seeds in settings), default=0) > 1
    found, notes = [], []
    for first, second in pairs:
        try:
            found.append(_difference(metric, settings[first], settings[second], first, second, each, several))
        except InputError as error:
            notes.append(f"settings {first + 1} and {second + 1} are not compared: {error}")
    sign = -1 if better == "lower" else 1
    ahead = [(d.second, d.first) if sign * d.value > 0 else (d.first, d.second) for d in found if d.decided]
    ranked = []
    for place, seeds in enumerate(settings):
        best = 1 + sum(loser == place for _, loser in ahead)
        worst = len(measured) - sum(winner == place for winner, _ in ahead)
        values = {seed: float(evidence.values.mean()) for seed, evidence in seeds.items()}
        ranked.append(Ranked(_mean(metric, seeds, confidence) if seeds else None, values, best, worst))
    if len(measured) < len(settings):
        notes.append(f"{len(settings) - len(measured)} of {len(settings)} settings were not measured")
    if not several and any(settings):
        notes.append("with one seed the intervals are of these models; another seed may order the settings otherwise")
    few = sum(not one.enough for one in found)
    if few:
        notes.append(
            f"{few} of {len(found)} pairs have fewer than {ENOUGH_SEEDS} seeds in common, which decide nothing"
        )
    warnings = few_seeds(min(one.seeds for one in found)) if found else ()
    return Ranking(tuple(ranked), tuple(found), confidence, tuple(notes), warnings)


def _mean(metric: str, seeds: Seeds, confidence: float) -> Estimate:
    items = estimate(metric, _over_seeds(list(seeds.values())), confidence)
    if items.low is None or items.high is None or len(seeds) == 1:
        return items
    spread = _spread([float(one.values.mean()) for one in seeds.values()], confidence)
    low = items.value - math.hypot(items.value - items.low, spread)
    high = items.value + math.hypot(items.high - items.value, spread)
    possible = next(iter(seeds.values())).range
    if possible is not None:
        low, high = max(low, possible.low), min(high, possible.high)
    return Estimate(items.value, low, high, items.items, f"{items.method} and Student's t over {len(seeds)} seeds")


def _difference(
    metric: str, mine: Seeds, theirs: Seeds, first: int, second: int, each: float, several: bool
) -> Difference:
    both = [seed for seed in mine if seed in theirs]
    if not both:
        raise InputError("they have no seed in common that was measured")
    ours, others = _over_seeds([mine[seed] for seed in both]), _over_seeds([theirs[seed] for seed in both])
    items = paired(metric, others, ours, each)
    spread = 0.0
    if len(both) > 1:
        gains = [float(theirs[seed].values.mean() - mine[seed].values.mean()) for seed in both]
        spread = _spread(gains, each)
    value = items.difference
    low, high = value - math.hypot(value - items.low, spread), value + math.hypot(items.high - value, spread)
    return Difference(first, second, value, low, high, len(both), not several or len(both) >= ENOUGH_SEEDS)


def _over_seeds(found: Sequence[Evidence]) -> Evidence:
    """Each item's mean over models that were measured on the same items.

    Raises:
        InputError: they were not.
    """
    if len(found) == 1:
        return found[0]
    order = found[0].item_ids
    columns = []
    for one in found:
        place = {item: number for number, item in enumerate(one.item_ids)}
        if place.keys() != set(order) or one.range != found[0].range:
            raise InputError("its seeds were not measured on the same items")
        columns.append(one.values[[place[item] for item in order]])
    possible = found[0].range
    shared = None if possible is None else ItemRange(possible.low, possible.high)  # a mean of seeds is no 0 or 1
    return Evidence(order, np.mean(columns, axis=0), shared)


def _spread(values: Sequence[float], confidence: float) -> float:
    """Half of Student's interval for the mean of what seeds gave."""
    from scipy.stats import t

    count = len(values)
    deviation = math.sqrt(sum((value - math.fsum(values) / count) ** 2 for value in values) / (count - 1))
    return float(t.ppf(1 - (1 - confidence) / 2, count - 1)) * deviation / math.sqrt(count)
