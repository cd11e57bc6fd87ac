"""How likely each gate is to pass a model that is as good as hoped, before a token is spent.

The answer needs assumptions about results nobody has yet; every note states them. Absolute rules on rates are exact:
the Wilson limit meets a threshold t precisely when the number of right items reaches n t + z sqrt(n t (1 - t)). Paired
rules use the normal approximation n = (z_confidence + z_power)² · variance / distance², which for non-inferiority of an
equal model at 95 % and 80 % is 6.18 · discordance / margin².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from posttrain.domain.gates import GateRule

ENOUGH = 0.8  # the customary power; below it a good model is turned away more than one time in five
_NORMAL = NormalDist()
_SEARCHED = 1_000_000  # items; beyond it the normal approximation is exact enough


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is assumed about the candidate; None takes the default that the field's comment names."""

    rate: float | None = None  # true rate under an absolute rule: halfway between the threshold and perfect
    discordance: float = 0.1  # share of items that exactly one of candidate and baseline gets right
    improvement: float | None = None  # true gain under `better_than`, metric's units: twice `by`, at least 0.05


@dataclass(frozen=True, slots=True)
class PowerNote:
    """The power of one gate on a suite of `items` items."""

    gate: str
    items: int
    power: float | None  # P(pass) under the assumption; None: not known before the metric's spread is
    needed: int | None  # items for a power of 80 %; None: no number of items is enough, or not known
    assumption: str  # what the two numbers rest on
    warning: str | None = None  # one sentence when a good model would probably be turned away


def gate_power(
    rule: GateRule, items: int, *, binary: bool, channel_empty: bool = False, expectation: Expectation | None = None
) -> PowerNote:
    """The power of `rule` on `items` items.

    Args:
        rule: the gate.
        items: of the evaluation suite.
        binary: the metric is 0 or 1 per item (accuracy); otherwise a mean of numbers.
        channel_empty: there is nothing to compare with yet.
        expectation: what to assume; `Expectation()` when left out.
    """
    hoped = expectation or Expectation()
    if rule.needs_baseline and channel_empty:
        return _empty_channel(rule, items)
    if not binary:
        return _unknown_spread(rule, items)
    power, needed, assumption = _paired(rule, items, hoped) if rule.needs_baseline else _absolute(rule, items, hoped)
    if items < rule.min_items:
        power = 0.0
    needed = max(needed, rule.min_items) if needed is not None else None
    return PowerNote(rule.name, items, power, needed, assumption, _warning(rule, items, power, needed, assumption))


def _warning(rule: GateRule, items: int, power: float, needed: int | None, assumption: str) -> str | None:
    if power >= ENOUGH:
        return None
    if items < rule.min_items:
        return f"gate {rule.name} cannot pass: the suite has {items} items, the rule wants min_items: {rule.min_items}"
    remedy = f"{needed} items give {ENOUGH:.0%}" if needed is not None else "no number of items is enough"
    return (
        f"gate {rule.name} passes a good model only {power:.0%} of the time on {items} items ({assumption}); {remedy}"
    )


def _absolute(rule: GateRule, items: int, hoped: Expectation) -> tuple[float, int | None, str]:
    """A rule that wants a small rate is the mirror image: the rate of the other outcome must be large."""
    threshold = rule.threshold if rule.higher_is_better else 1 - rule.threshold
    rate = (threshold + 1) / 2
    if hoped.rate is not None:
        rate = hoped.rate if rule.higher_is_better else 1 - hoped.rate
    shown = rate if rule.higher_is_better else 1 - rate
    z = _NORMAL.inv_cdf(rule.confidence)
    assumption = f"assumed true {rule.metric} {shown:.4g}"
    return _rate_power(items, threshold, rate, z), _rate_items(threshold, rate, z), assumption


def _rate_power(items: int, threshold: float, rate: float, z: float) -> float:
    """P(the Wilson limit meets the threshold) for a true rate, exactly."""
    if threshold <= 0:
        return 1.0
    if threshold >= 1 or items < 1:
        return 0.0
    wanted = math.ceil(items * threshold + z * math.sqrt(items * threshold * (1 - threshold)) - 1e-9)
    return _binomial_tail(items, wanted, min(max(rate, 0.0), 1.0))


def _rate_items(threshold: float, rate: float, z: float) -> int | None:
    """Items for 80 %: the first size that reaches it, looked for around the normal approximation in steps of 0.5 %."""
    if threshold <= 0:
        return 1
    if threshold >= 1 or rate <= threshold:
        return None
    z_power = _NORMAL.inv_cdf(ENOUGH)
    spread = z * math.sqrt(threshold * (1 - threshold)) + z_power * math.sqrt(max(0.0, rate * (1 - rate)))
    about = (spread / (rate - threshold)) ** 2
    if about > _SEARCHED:
        return math.ceil(about)
    step = max(1, int(about / 200))
    items = max(1, int(about * 0.7))
    while _rate_power(items, threshold, rate, z) < ENOUGH:
        items += step
    return items


def _binomial_tail(items: int, wanted: int, rate: float) -> float:
    """P(at least `wanted` of `items` succeed), summed away from the mode so that no term that matters underflows."""
    if wanted <= 0 or wanted > items:
        return 1.0 if wanted <= 0 else 0.0
    if rate in (0.0, 1.0):
        return rate
    upper = wanted > items * rate
    count = wanted if upper else wanted - 1
    term = math.exp(
        math.lgamma(items + 1)
        - math.lgamma(count + 1)
        - math.lgamma(items - count + 1)
        + count * math.log(rate)
        + (items - count) * math.log1p(-rate)
    )
    total, odds = 0.0, rate / (1 - rate)
    while 0 <= count <= items and term > total * 1e-16:
        total += term
        if upper:
            term *= (items - count) / (count + 1) * odds
            count += 1
        else:
            term *= count / ((items - count + 1) * odds)
            count -= 1
    return min(1.0, total) if upper else max(0.0, 1 - total)


def _paired(rule: GateRule, items: int, hoped: Expectation) -> tuple[float, int | None, str]:
    """Normal approximation to the paired score test: the difference has variance (discordance - gain²) / n."""
    if rule.margin is not None:
        gain, distance = 0.0, rule.margin
        assumption = f"assumed equal to the channel's model with discordance {hoped.discordance:.4g}"
    else:
        by = rule.by or 0.0
        gain = hoped.improvement if hoped.improvement is not None else max(2 * by, 0.05)
        distance = gain - by
        assumption = f"assumed true improvement {gain:.4g} with discordance {max(hoped.discordance, gain):.4g}"
    variance = max(hoped.discordance, gain) - gain * gain
    z = _NORMAL.inv_cdf(rule.confidence)
    if variance <= 0:
        return (1.0, 1, assumption) if distance > 0 else (0.0, None, assumption)
    power = _NORMAL.cdf(distance * math.sqrt(items / variance) - z)
    needed = math.ceil((z + _NORMAL.inv_cdf(ENOUGH)) ** 2 * variance / distance**2) if distance > 0 else None
    return power, needed, assumption


def _empty_channel(rule: GateRule, items: int) -> PowerNote:
    assumption = "assumed that the channel is still empty when the gate looks"
    if rule.if_channel_empty == "pass":
        return PowerNote(rule.name, items, 1.0, rule.min_items, assumption)
    warning = f"gate {rule.name} cannot pass: the channel is empty and the rule says if_channel_empty: fail"
    return PowerNote(rule.name, items, 0.0, None, assumption, warning)


def _unknown_spread(rule: GateRule, items: int) -> PowerNote:
    distance = (_NORMAL.inv_cdf(rule.confidence) + _NORMAL.inv_cdf(ENOUGH)) / math.sqrt(max(items, 1))
    of = f"the per-item difference in {rule.metric}" if rule.needs_baseline else rule.metric
    assumption = (
        f"spread of {of} not known yet: {ENOUGH:.0%} power when the true value lies {distance:.2g} standard deviations"
        " on the good side of the threshold"
    )
    warning = None
    if items < rule.min_items:
        warning = (
            f"gate {rule.name} cannot pass: the suite has {items} items, the rule wants min_items: {rule.min_items}"
        )
    return PowerNote(rule.name, items, 0.0 if warning else None, None, assumption, warning)
