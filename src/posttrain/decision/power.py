"""The power of gates before a run, and the ranking of a sweep's settings after it.

Power: how likely each gate is to pass a model that is as good as hoped, before a token is spent. It needs assumptions
about results nobody has yet; every note states them. For rates it is exact: the chances of all results that the gate
itself would pass are added up. For means it is not known before their spread is.

Ranking: settings are ranked as far as the measurements allow. A setting was trained with one or several seeds and each
of its models measured on the same items. Two things are then uncertain: which items the suite happens to have, and
which seeds were drawn. The interval of a mean over seeds adds both, as if they were independent: the distances of its
limits from the mean are the square roots of the sums of the squared distances of the two intervals' limits (MOVER; Zou
and Donner 2008). Over items the limits are those of the intervals in `decision.gates`; over seeds they are Student's,
and paired by seed for a difference. Item noise is in both, so the sum errs to the wide side. With one seed there is no
second part: then models are compared, not settings. Two seeds that happen to agree are no evidence about a third, so
where there are several, fewer than three in common decide nothing.

A setting is ahead of another where the interval of their difference leaves out 0, all pairs held at once (Bonferroni).
Its rank is then a range: from 1 + those that are ahead of it to all less those that it is ahead of.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist

import numpy as np

from posttrain.decision.gates import (
    CONFIDENCE,
    MEAN_LIMIT,
    NOT_TESTED,
    PAIRED_LIMIT,
    RATE_LIMIT,
    Estimate,
    Evidence,
    decimals,
    estimate,
    paired,
)
from posttrain.decision.statistics import difference_chance, paired_lower, rate_lower
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateRule, whose_words
from posttrain.domain.kinds import ENOUGH_SEEDS, ItemRange, few_seeds

ENOUGH = 0.8  # the customary power; below it a good model is turned away more than one time in five
_EVEN = 0.5  # below it a good model is turned away more often than not
_NORMAL = NormalDist()
_SEARCHED = 200_000  # items; a gate that needs more is told so by the normal approximation
_UNLIKELY = 1e-12  # results with less chance than that in all are left out of an enumeration
_MOST_ITEMS = 2**24  # of a suite that is advised to be made larger
_DRAWN = 0.02  # a mean's limit is drawn, not computed: so far off what would be refused it may lie
Seeds = Mapping[int, Evidence]  # seed → what was measured of its model


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is assumed about the candidate; None takes the default that the field's comment names."""

    rate: float | None = None  # true rate under an absolute rule: halfway between the threshold and perfect
    discordance: float = 0.1  # share of items that exactly one of candidate and baseline gets right
    improvement: float | None = None  # true gain under `better_than`, metric's units: twice `by`, at least 0.05, and at

    # most halfway between `by` and 1


@dataclass(frozen=True, slots=True)
class PowerNote:
    """The power of one gate on a suite of `items` items."""

    gate: str
    items: int
    test: str  # the method that will judge, as in `Verdict.test`
    power: float | None  # P(pass) under the assumption; None: not known before the metric's spread is
    needed: int | None  # items for a power of 80 %; None: no number of items is enough, or not known
    assumption: str  # what the two numbers rest on
    warning: str | None = None  # one sentence when a good model would probably be turned away
    change: str | None = None  # what to change first, where that is more likely than not
    refusal: str | None = None  # one sentence when not even the best evidence there could be would pass


def gate_power(
    rule: GateRule,
    items: int,
    possible: ItemRange,
    *,
    channel_empty: bool = False,
    expectation: Expectation | None = None,
) -> PowerNote:
    """The power of `rule` on `items` items.

    Args:
        rule: the gate.
        items: of the evaluation suite.
        possible: what one item of the metric can be, as its evaluation declares.
        channel_empty: there is nothing to compare with yet.
        expectation: what to assume; `Expectation()` when left out.
    """
    note = _note(rule, items, possible, channel_empty, expectation or Expectation())
    if (rule.meets_channel and channel_empty and items >= rule.min_items) or can_pass(rule, items, possible):
        return note
    return replace(note, refusal=_refusal(rule, items, possible))


def unknown_power(rule: GateRule, items: int, trouble: str) -> PowerNote:
    """The note of a gate whose power could not be computed, with what stood in the way."""
    return PowerNote(
        rule.name,
        items,
        NOT_TESTED,
        None,
        None,
        "not computed",
        f"gate {rule.name}: power unknown: {trouble}; the gate judges all the same",
    )


def can_pass(rule: GateRule, items: int, possible: ItemRange) -> bool:
    """Whether the best evidence there could be would pass: every item at its best, a baseline's at its worst."""
    if items < rule.min_items:
        return False
    wanted = (1 if rule.higher_is_better else -1) * rule.threshold
    if possible.binary and rule.needs_baseline:
        limit = paired_lower(items, 0, items, rule.confidence)
    elif possible.binary:
        limit = rate_lower(items, items, rule.confidence) - (0.0 if rule.higher_is_better else 1.0)
    else:
        worst, best = _ends(rule, possible)
        limit = worst + (best - worst) * ((1 - rule.confidence) ** (1 / items) + _DRAWN)
    return limit > wanted if rule.strict else limit >= wanted


def _refusal(rule: GateRule, items: int, possible: ItemRange) -> str:
    if items < rule.min_items:
        return f"needs min_items: {rule.min_items} to be judged, its suite has {items}; add items or lower min_items"
    key = next(key for key in ("at_least", "at_most", "margin", "by") if getattr(rule, key) is not None)
    enough = _enough(lambda n: can_pass(rule, n, possible), items)
    more = f"give its suite {enough} items or " if enough else ""
    perfect = "a perfect model, against one that gets nothing right," if rule.needs_baseline else "a perfect model"
    return (
        f"{key}: {getattr(rule, key):g} cannot be proven by {items} items at confidence {rule.confidence:g}, not even "
        f"of {perfect}; {more}change {key}"
    )


def _enough(passes: Callable[[int], bool], low: int) -> int | None:
    """The least number of items that passes, above one that does not; None: no number that anybody has."""
    high = 2 * low
    while not passes(high):
        low, high = high, 2 * high
        if low > _MOST_ITEMS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def _ends(rule: GateRule, possible: ItemRange) -> tuple[float, float]:
    """The worst and the best that one item can be, the larger the better."""
    if rule.needs_baseline:
        return -possible.span, possible.span
    return (possible.low, possible.high) if rule.higher_is_better else (-possible.high, -possible.low)


def _note(rule: GateRule, items: int, possible: ItemRange, channel_empty: bool, hoped: Expectation) -> PowerNote:
    if rule.meets_channel and channel_empty:
        return _empty_channel(rule, items)
    if not possible.binary:
        return _unknown_spread(rule, items, possible)
    power_at, about, assumption = _paired(rule, hoped) if rule.needs_baseline else _absolute(rule, hoped)
    if about is not None and about > _SEARCHED:
        assumption += f"; beyond {_SEARCHED} items by the normal approximation"
    power = power_at(items) if items >= rule.min_items else 0.0
    needed = _needed(power_at, about, rule.min_items) if about is not None else None
    test = PAIRED_LIMIT if rule.needs_baseline else RATE_LIMIT
    warning = _warning(rule, items, power, needed, assumption)
    reachable = needed is not None and needed <= _MOST_ITEMS
    change = f"give the suite of gate {rule.name} {needed} items" if reachable else f"change gate {rule.name}"
    return PowerNote(rule.name, items, test, power, needed, assumption, warning, change if power < _EVEN else None)


def _warning(rule: GateRule, items: int, power: float, needed: int | None, assumption: str) -> str | None:
    if power >= ENOUGH or (needed is not None and items >= max(needed, rule.min_items)):  # a tooth of the saw below
        return None
    if items < rule.min_items:
        return _too_few(rule, items)
    remedy = f"{needed} items give {ENOUGH:.0%}" if needed is not None else "no number of items is enough"
    if needed is not None and needed > _MOST_ITEMS:
        remedy = f"{ENOUGH:.0%} would take more than {_MOST_ITEMS} items"
    return (
        f"gate {rule.name} passes a good model only {power:.0%} of the time on {items} items ({assumption}); {remedy}"
    )


_Power = Callable[[int], float]  # items → P(pass)


def _needed(power_at: _Power, about: float, least: int) -> int:
    """Items for 80 %, to half a percent: `power_at` them is enough. Power in items is a saw with rising teeth.

    Args:
        about: by the normal approximation, where the search starts.
        least: items that the rule wants in any case.
    """
    if max(about, least) > _SEARCHED:
        return max(least, math.ceil(about))
    low, high = least - 1, max(least, math.ceil(about))
    while power_at(high) < ENOUGH:
        low, high = high, math.ceil(high * 1.1) + 1
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if power_at(middle) >= ENOUGH else (middle, high)
    return high


def _absolute(rule: GateRule, hoped: Expectation) -> tuple[_Power, float | None, str]:
    """A rule that wants a small rate is the mirror image: the rate of the other outcome must be large."""
    threshold = rule.threshold if rule.higher_is_better else 1 - rule.threshold
    rate = (threshold + 1) / 2
    if hoped.rate is not None:
        rate = hoped.rate if rule.higher_is_better else 1 - hoped.rate
    shown = rate if rule.higher_is_better else 1 - rate
    z, z_power = _NORMAL.inv_cdf(rule.confidence), _NORMAL.inv_cdf(ENOUGH)
    about = None
    if threshold < 1 and rate > threshold:
        spread = z * math.sqrt(threshold * (1 - threshold)) + z_power * math.sqrt(max(0.0, rate * (1 - rate)))
        about = (spread / (rate - threshold)) ** 2
    return lambda n: _rate_power(n, threshold, rate, rule.confidence), about, f"assumed true {rule.metric} {shown:.4g}"


def _rate_power(items: int, threshold: float, rate: float, confidence: float) -> float:
    """P(the exact limit meets the threshold): that of at least as many right items as the limit wants."""
    from scipy.special import bdtrc

    # the least number of right items that passes; `items + 1`: none does
    least = bisect_left(range(items + 1), True, key=lambda right: rate_lower(right, items, confidence) >= threshold)
    if least == 0:
        return 1.0
    return float(bdtrc(least - 1, items, rate)) if least <= items else 0.0


def _paired(rule: GateRule, hoped: Expectation) -> tuple[_Power, float | None, str]:
    if rule.margin is not None:
        gain, threshold = 0.0, -rule.margin
        assumption = f"assumed equal to {whose_words(str(rule.rival))} with discordance {hoped.discordance:.4g}"
    else:
        threshold = rule.by or 0.0
        likely = max(0.05, min(2 * threshold, (threshold + 1) / 2))
        gain = min(likely if hoped.improvement is None else hoped.improvement, 1.0)
        over = "" if rule.meets_channel else f" over {whose_words(str(rule.rival))}"
        assumption = f"assumed true improvement {gain:.4g}{over} with discordance {max(hoped.discordance, gain):.4g}"
    discordance = min(max(hoped.discordance, gain), 1.0)
    better, worse = (discordance + gain) / 2, (discordance - gain) / 2
    distance, variance = gain - threshold, discordance - gain * gain
    z = _NORMAL.inv_cdf(rule.confidence) + _NORMAL.inv_cdf(ENOUGH)
    about = None
    if distance > 0:  # without a loss the limit still stays below 1 by so much
        about = max(1.0, z * z * variance / distance**2, -math.log(1 - rule.confidence) / (1 - threshold))
    return lambda n: paired_power(n, better, worse, threshold, rule.confidence), about, assumption


def paired_power(items: int, better: float, worse: float, threshold: float, confidence: float) -> float:
    """P(the paired limit meets `threshold`), added up over all results that matter.

    Args:
        items: paired items.
        better: true chance that only the candidate gets an item right.
        worse: that only the baseline does; better + worse ≤ 1.
        threshold: of candidate - baseline, which the lower limit must reach.
        confidence: of the limit, one-sided.
    """
    from scipy.stats import binom

    losses = np.arange(int(binom.ppf(_UNLIKELY, items, worse)), int(binom.isf(_UNLIKELY, items, worse)) + 1)
    wanted = _wanted(items, losses, threshold, 1 - confidence)
    share = min(1.0, better / (1 - worse)) if worse < 1 else 0.0
    return float(binom.pmf(losses, items, worse) @ binom.sf(wanted - 1, items - losses, share))


def _wanted(items: int, losses: np.ndarray, threshold: float, level: float) -> np.ndarray:
    """For each number of losses the least gains that pass; more than there are items left where none do.

    It grows with the losses, so one walk along the edge finds them all.
    """
    wanted = np.empty_like(losses)
    gains = max(0, math.ceil(losses[0] + items * threshold))  # fewer do not even reach the threshold on average
    for index, lost in enumerate(losses.tolist()):
        while gains + lost <= items and difference_chance(gains, lost, items, threshold) > level:
            gains += 1
        wanted[index] = gains
    return wanted


def _empty_channel(rule: GateRule, items: int) -> PowerNote:
    assumption = "assumed that the channel is still empty when the gate looks"
    if items < rule.min_items:
        return PowerNote(rule.name, items, NOT_TESTED, 0.0, rule.min_items, assumption, _too_few(rule, items))
    if rule.if_channel_empty == "pass":
        return PowerNote(rule.name, items, NOT_TESTED, 1.0, rule.min_items, assumption)
    warning = f"gate {rule.name} cannot pass: the channel is empty and the rule says if_channel_empty: fail"
    return PowerNote(
        rule.name,
        items,
        NOT_TESTED,
        0.0,
        None,
        assumption,
        warning,
        f"release a model to the channel, or set if_channel_empty: pass in gate {rule.name}",
    )


def _too_few(rule: GateRule, items: int) -> str:
    return f"gate {rule.name} cannot pass: the suite has {items} items, the rule wants min_items: {rule.min_items}"


def _unknown_spread(rule: GateRule, items: int, possible: ItemRange) -> PowerNote:
    """Of a mean the range alone says something: how far off the threshold even a metric that never varies must lie."""
    worst, _ = _ends(rule, possible)
    threshold = rule.threshold if rule.higher_is_better else -rule.threshold
    least = (threshold - worst) * ((1 - rule.confidence) ** (-1 / max(items, 1)) - 1)
    spreads = (_NORMAL.inv_cdf(rule.confidence) + _NORMAL.inv_cdf(ENOUGH)) / math.sqrt(max(items, 1))
    of = f"the per-item difference in {rule.metric}" if rule.needs_baseline else rule.metric
    assumption = (
        f"spread of {of} not known yet: its range alone asks for {least:.2g} beyond the threshold,"
        f" and for {ENOUGH:.0%} about {spreads:.2g} standard deviations more"
    )
    warning = _too_few(rule, items) if items < rule.min_items else None
    return PowerNote(rule.name, items, MEAN_LIMIT, 0.0 if warning else None, None, assumption, warning)


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
        spread = _spread([float(theirs[seed].values.mean() - mine[seed].values.mean()) for seed in both], each)
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
