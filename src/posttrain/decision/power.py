"""The power of gates before a run, and the ranking of a sweep's settings after the sweep.

Power is the probability that a gate passes a model that is as good as hoped; it is computed before training. The
computation needs assumptions about results that do not exist yet; every note states its assumptions. For rates, the
power is exact: the sum of the probabilities of all results that the gate would pass. For means, the power is unknown
until the spread of the values is known.

Settings are ranked as far as the measurements allow. A setting was trained with one or several seeds, and each of its
models was measured on the same items. Two sources of uncertainty remain: the items of the suite, and the drawn seeds.
The interval of a mean over seeds combines an interval over items with an interval over seeds as if these were
independent: the distance of each limit from the mean is the square root of the sum of the two squared distances (MOVER;
Zou and Donner 2008). The interval over items is that of `decision.gates`; the interval over seeds is Student's, paired
by seed for a difference. Item noise is in both intervals, so the combination is conservative (too wide). With one seed,
there is no interval over seeds, so models are compared, not settings. Two seeds that happen to agree are no evidence
about a third seed, so settings with several seeds, but fewer than three in common, are not ordered.

A setting is ahead of another if the interval of their difference excludes 0, with all pairs simultaneous (Bonferroni).
The rank of a setting is a range: from 1 + the number of settings ahead of it to the number of all settings minus the
number of settings behind it.
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

ENOUGH = 0.8  # the customary power; with less, a gate rejects a good model more than one time in five
_EVEN = 0.5  # with less power, a gate rejects a good model more often than not
_NORMAL = NormalDist()
_SEARCHED = 200_000  # items; above this number the normal approximation gives the number that a gate needs
_UNLIKELY = 1e-12  # tail probability of results that an enumeration omits
_MOST_ITEMS = 2**24  # the largest suite that is recommended
_DRAWN = 0.02  # tolerance for a mean's limit, which is simulated, not computed
Seeds = Mapping[int, Evidence]  # seed → the measurements of its model


@dataclass(frozen=True, slots=True)
class Expectation:
    """The assumptions about the candidate; None selects the default that the field's comment describes."""

    rate: float | None = None  # true rate under an absolute rule; None: halfway between threshold and perfect
    discordance: float = 0.1  # share of items that exactly one of candidate and baseline gets right
    improvement: float | None = None  # true gain under `better_than`, in the metric's units; None: twice `by`, at

    # least 0.05, and at most halfway between `by` and 1


@dataclass(frozen=True, slots=True)
class PowerNote:
    """The power of one gate on a suite of `items` items."""

    gate: str
    items: int
    test: str  # the method of the gate, as in `Verdict.test`
    power: float | None  # P(pass) under the assumption; None: unknown until the metric's spread is known
    needed: int | None  # items for a power of 80 %; None: no number of items is enough, or unknown
    assumption: str  # the assumption behind the two numbers
    warning: str | None = None  # a message if the power is too low
    change: str | None = None  # the first change to make, if the gate would more likely reject a good model
    refusal: str | None = None  # a message if not even the best possible evidence would pass


def gate_power(
    rule: GateRule,
    items: int,
    possible: ItemRange,
    *,
    channel_empty: bool = False,
    expectation: Expectation | None = None,
) -> PowerNote:
    """Return the power of `rule` on `items` items.

    Args:
        rule: the gate.
        items: the number of items of the evaluation suite.
        possible: the range of the metric's value for one item, as the evaluation declares it.
        channel_empty: whether the channel has no model to compare with yet.
        expectation: the assumptions; None: `Expectation()`.
    """
    note = _note(rule, items, possible, channel_empty, expectation or Expectation())
    if (rule.meets_channel and channel_empty and items >= rule.min_items) or can_pass(rule, items, possible):
        return note
    return replace(note, refusal=_refusal(rule, items, possible))


def unknown_power(rule: GateRule, items: int, trouble: str) -> PowerNote:
    """Return the note for a gate whose power could not be computed, with the error `trouble`."""
    return PowerNote(
        rule.name,
        items,
        NOT_TESTED,
        None,
        None,
        "not computed",
        f"gate {rule.name}: power unknown: {trouble}; the gate still judges",
    )


def can_pass(rule: GateRule, items: int, possible: ItemRange) -> bool:
    """Return whether the best possible evidence would pass: the candidate's items at best, the baseline's at worst."""
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
        return (
            f"requires min_items: {rule.min_items} to be judged, but its suite has {items} items; add items or lower "
            "min_items"
        )
    key = next(key for key in ("at_least", "at_most", "margin", "by") if getattr(rule, key) is not None)
    enough = _enough(lambda n: can_pass(rule, n, possible), items)
    more = f"give its suite {enough} items or " if enough else ""
    perfect = "a perfect model, against one that gets nothing right," if rule.needs_baseline else "a perfect model"
    return (
        f"{key}: {getattr(rule, key):g} cannot be proven by {items} items at confidence {rule.confidence:g}, not even "
        f"for {perfect}; {more}change {key}"
    )


def _enough(passes: Callable[[int], bool], low: int) -> int | None:
    """Return the smallest number of items that passes; None: it exceeds about `_MOST_ITEMS`. `low` does not pass."""
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
    """Return the worst and the best value of one item, with the sign for which larger is better."""
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
    if power >= ENOUGH or (needed is not None and items >= max(needed, rule.min_items)):  # a sawtooth: see `_needed`
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
    """Return the number of items for a power of 80 %, to half a percent; the power rises with items as a sawtooth.

    Args:
        about: the number from the normal approximation, at which the search starts.
        least: the rule's `min_items`.
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
    """Return the power of an absolute rule; a rule that requires a small rate uses the rate of the other outcome."""
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
    """Return P(the exact limit meets the threshold): P(at least as many right items as the limit requires)."""
    from scipy.special import bdtrc

    # the least number of right items that passes; `items + 1`: no number passes
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
    if distance > 0:  # the maximum: even without a loss the limit is below 1
        about = max(1.0, z * z * variance / distance**2, -math.log(1 - rule.confidence) / (1 - threshold))
    return lambda n: paired_power(n, better, worse, threshold, rule.confidence), about, assumption


def paired_power(items: int, better: float, worse: float, threshold: float, confidence: float) -> float:
    """Return P(the paired limit meets `threshold`), summed over all results that are not negligible.

    Args:
        items: paired items.
        better: true probability that only the candidate gets an item right.
        worse: true probability that only the baseline gets an item right; better + worse ≤ 1.
        threshold: value of candidate - baseline that the lower limit must reach.
        confidence: the one-sided confidence of the limit.
    """
    from scipy.stats import binom

    losses = np.arange(int(binom.ppf(_UNLIKELY, items, worse)), int(binom.isf(_UNLIKELY, items, worse)) + 1)
    wanted = _wanted(items, losses, threshold, 1 - confidence)
    share = min(1.0, better / (1 - worse)) if worse < 1 else 0.0
    return float(binom.pmf(losses, items, worse) @ binom.sf(wanted - 1, items - losses, share))


def _wanted(items: int, losses: np.ndarray, threshold: float, level: float) -> np.ndarray:
    """Return, for each number of losses, the least number of gains that passes; more than the items if none passes.

    The gains grow with the losses, so one pass over the losses finds all these numbers.
    """
    wanted = np.empty_like(losses)
    gains = max(0, math.ceil(losses[0] + items * threshold))  # with fewer gains, even the estimate misses the threshold
    for index, lost in enumerate(losses.tolist()):
        while gains + lost <= items and difference_chance(gains, lost, items, threshold) > level:
            gains += 1
        wanted[index] = gains
    return wanted


def _empty_channel(rule: GateRule, items: int) -> PowerNote:
    assumption = "assumed that the channel is still empty when the gate judges"
    if items < rule.min_items:
        return PowerNote(rule.name, items, NOT_TESTED, 0.0, rule.min_items, assumption, _too_few(rule, items))
    if rule.if_channel_empty == "pass":
        return PowerNote(rule.name, items, NOT_TESTED, 1.0, rule.min_items, assumption)
    warning = f"gate {rule.name} cannot pass: the channel is empty and the rule has if_channel_empty: fail"
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
    return (
        f"gate {rule.name} cannot pass: the suite has {items} items, but the rule requires min_items: {rule.min_items}"
    )


def _unknown_spread(rule: GateRule, items: int, possible: ItemRange) -> PowerNote:
    """Return the note for a mean; the range gives the distance from the threshold that even a constant value needs."""
    worst, _ = _ends(rule, possible)
    threshold = rule.threshold if rule.higher_is_better else -rule.threshold
    least = (threshold - worst) * ((1 - rule.confidence) ** (-1 / max(items, 1)) - 1)
    spreads = (_NORMAL.inv_cdf(rule.confidence) + _NORMAL.inv_cdf(ENOUGH)) / math.sqrt(max(items, 1))
    of = f"the per-item difference in {rule.metric}" if rule.needs_baseline else rule.metric
    assumption = (
        f"the spread of {of} is not known yet; the range alone requires {least:.2g} beyond the threshold,"
        f" and for {ENOUGH:.0%} about {spreads:.2g} standard deviations more"
    )
    warning = _too_few(rule, items) if items < rule.min_items else None
    return PowerNote(rule.name, items, MEAN_LIMIT, 0.0 if warning else None, None, assumption, warning)


@dataclass(frozen=True, slots=True)
class Ranked:
    """One setting."""

    mean: Estimate | None  # mean over seeds; None: the setting was not measured
    values: Mapping[int, float]  # seed → mean over items
    best: int  # possible ranks among the measured settings, from `best` to `worst`
    worst: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Setting `second` - setting `first` (places in the sweep), in the metric's units."""

    first: int
    second: int
    value: float
    low: float
    high: float
    seeds: int  # number of seeds that both settings have
    enough: bool = True  # whether there are enough seeds for a decision

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0, with enough seeds."""
        return self.enough and (self.low > 0 or self.high < 0)

    def turned(self) -> Difference:
        """Return the difference `first` - `second`."""
        return Difference(self.second, self.first, -self.value, -self.high, -self.low, self.seeds, self.enough)

    def __str__(self) -> str:
        digits = decimals(self.low, self.high)
        return f"{self.value:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Ranking:
    """All settings, in the order of the sweep."""

    settings: tuple[Ranked, ...]
    differences: tuple[Difference, ...]
    confidence: float  # confidence of each mean's interval, and of the intervals of all differences together
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # lines about pairs with too few common seeds


def rank(metric: str, settings: Sequence[Seeds], better: str, confidence: float = CONFIDENCE) -> Ranking:
    """Rank settings by a metric.

    Args:
        settings: for each setting, seed → measurements; a setting may lack some seeds, or all.
        better: "higher" or "lower".
        confidence: the two-sided confidence of the intervals.
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
        notes.append("with one seed the intervals are of these models; another seed may order the settings differently")
    few = sum(not one.enough for one in found)
    if few:
        notes.append(
            f"{few} of {len(found)} pairs have fewer than {ENOUGH_SEEDS} seeds in common and are therefore not ordered"
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
        raise InputError("no seed was measured for both")
    ours, others = _over_seeds([mine[seed] for seed in both]), _over_seeds([theirs[seed] for seed in both])
    items = paired(metric, others, ours, each)
    spread = 0.0
    if len(both) > 1:
        spread = _spread([float(theirs[seed].values.mean() - mine[seed].values.mean()) for seed in both], each)
    value = items.difference
    low, high = value - math.hypot(value - items.low, spread), value + math.hypot(items.high - value, spread)
    return Difference(first, second, value, low, high, len(both), not several or len(both) >= ENOUGH_SEEDS)


def _over_seeds(found: Sequence[Evidence]) -> Evidence:
    """Return each item's mean over models that were measured on the same items.

    Raises:
        InputError: the items or ranges of the models differ.
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
    shared = None if possible is None else ItemRange(possible.low, possible.high)  # a mean over seeds is not binary
    return Evidence(order, np.mean(columns, axis=0), shared)


def _spread(values: Sequence[float], confidence: float) -> float:
    """Return half the width of Student's interval for the mean over seeds."""
    from scipy.stats import t

    count = len(values)
    deviation = math.sqrt(sum((value - math.fsum(values) / count) ** 2 for value in values) / (count - 1))
    return float(t.ppf(1 - (1 - confidence) / 2, count - 1)) * deviation / math.sqrt(count)
