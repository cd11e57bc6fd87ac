"""Judging: a rule and the evidence give a verdict. Fails closed: whatever cannot be judged does not pass.

::

    evidence unusable ──────────────────────────▶ ERROR         nothing measured, NaN, items differ, no baseline
    channel empty (relative rule) ──────────────▶ PASS | FAIL   as the rule's `if_channel_empty` says
    fewer than `min_items` ─────────────────────▶ INCONCLUSIVE
    estimate misses the threshold ──────────────▶ FAIL
    estimate meets it, its limit does not ──────▶ INCONCLUSIVE
    limit meets it ─────────────────────────────▶ PASS

A threshold is met from the value itself on, but for `better_than`: what is asked there must be exceeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.decision.statistics import (
    Array,
    bootstrap_lower,
    bounded_lower,
    mcnemar_p,
    paired_lower,
    wilson_lower,
)
from posttrain.domain.errors import InputError
from posttrain.domain.gates import GateReport, GateRule, Outcome, Verdict
from posttrain.domain.seeds import derive_seed

WILSON = "Wilson score limit"
TANGO = "paired score limit (Tango)"
BOOTSTRAP = "BCa bootstrap over items"
BOUNDED = "bounded-mean limit (Gaffke)"
NOT_TESTED = "none"
LARGEST = 1e100  # beyond it a mean of squares is no longer a number


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One metric of one model, item by item: `Evidence(("q1", "q2"), np.array([1.0, 0.0]), binary=True)`.

    An item that was sampled several times is one value, its mean: items are independent, samples of an item are not.
    """

    item_ids: tuple[str, ...]  # unique; the same items for candidate and baseline, in any order
    values: Array  # [items]
    binary: bool  # values are 0 or 1


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a test found. `quantity` is the mean, or candidate - baseline; `limit` is its one-sided confidence limit."""

    test: str
    quantity: float
    limit: float
    estimate: float
    baseline: float | None
    details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Range:
    """What values of a metric, or differences of two, can be; `known` or only assumed."""

    low: float
    high: float
    known: bool


def judge(
    rule: GateRule, candidate: Evidence | None, baseline: Evidence | None, *, channel_empty: bool, seed: int
) -> Verdict:
    """What the rule says about the evidence.

    Args:
        rule: the gate.
        candidate: the rule's metric, measured on the candidate; None when nobody produced it.
        baseline: the same on the channel's current model; not looked at by an absolute rule.
        channel_empty: the channel points at nothing.
        seed: the run's; the bootstrap's seed is derived from it and the rule's name.
    """
    try:
        ours = _usable(rule, candidate, "the candidate")
        if rule.needs_baseline and channel_empty:
            return _judge_empty_channel(rule, ours, baseline)
        theirs = _usable_baseline(rule, ours, baseline) if rule.needs_baseline else None
    except InputError as error:
        return _verdict(rule, Outcome.ERROR, f"{error}.", items=0 if candidate is None else len(candidate.item_ids))
    if len(ours.values) < rule.min_items:
        return _too_few(rule, ours.values)
    measured = _measure(rule, ours, theirs, derive_seed(seed, "gate", rule.name))
    return _decide(rule, measured, items=len(ours.values))


def judge_all(
    rules: Sequence[GateRule],
    candidate: Mapping[str, Evidence],
    baseline: Mapping[str, Evidence] | None,
    *,
    candidate_digest: str,
    baseline_digest: str | None,
    evaluator_digest: str | None,
    seed: int,
) -> GateReport:
    """All gates of a run.

    Args:
        rules: names unique; none at all makes the report an ERROR.
        candidate: metric name → evidence of the candidate.
        baseline: metric name → evidence of the channel's model, measured by the same evaluator on the same items.
        candidate_digest: the model judged.
        baseline_digest: the model the channel points at; None means that the channel is empty.
        evaluator_digest: what measured both.
        seed: the run's.

    Raises:
        InputError: two rules of one name.
    """
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise InputError(f"gates: names must be unique, got {twice[0]!r} more than once; rename one")
    verdicts = [
        judge(
            rule,
            candidate.get(rule.metric),
            (baseline or {}).get(rule.metric),
            channel_empty=baseline_digest is None,
            seed=seed,
        )
        for rule in rules
    ]
    return GateReport.of(verdicts, candidate=candidate_digest, baseline=baseline_digest, evaluator=evaluator_digest)


def _usable(rule: GateRule, evidence: Evidence | None, whose: str) -> Evidence:
    """The evidence in the order of its item ids, so that no verdict depends on the order of rows.

    Raises:
        InputError: it cannot be judged; becomes the reason of an ERROR verdict.
    """
    if evidence is None:
        raise InputError(f"{rule.metric} was not measured on {whose}; check the metric's name and the evaluate stage")
    values = np.asarray(evidence.values, dtype=np.float64)
    ids = evidence.item_ids
    if values.ndim != 1 or len(values) != len(ids):
        raise InputError(f"{rule.metric} of {whose} has {len(ids)} item ids for values of shape {values.shape}")
    if not ids:
        raise InputError(f"{rule.metric} of {whose} has no items; check the evaluation suite")
    repeated = [item for item, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InputError(f"{rule.metric} of {whose} has {len(repeated)} item ids more than once, e.g. {repeated[0]!r}")
    bad = [ids[index] for index in np.flatnonzero(~(np.abs(values) <= LARGEST))]
    if bad:
        raise InputError(f"{rule.metric} of {whose} is NaN or infinite on {len(bad)} items, e.g. {bad[0]!r}")
    if evidence.binary and not np.all((values == 0) | (values == 1)):
        raise InputError(f"{rule.metric} of {whose} is declared binary but has values other than 0 and 1")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return Evidence(tuple(ids[index] for index in order), values[order], evidence.binary)


def _usable_baseline(rule: GateRule, ours: Evidence, baseline: Evidence | None) -> Evidence:
    theirs = _usable(rule, baseline, "the channel's model")
    if ours.binary is not theirs.binary:
        raise InputError(f"{rule.metric} is binary on one model and not on the other; measure both by one evaluator")
    if ours.item_ids != theirs.item_ids:
        odd = set(ours.item_ids) ^ set(theirs.item_ids)
        raise InputError(
            f"{rule.metric} was measured on different items: {len(odd)} are not in both, e.g. {min(odd)!r};"
            " evaluate both models on one suite"
        )
    return theirs


def _measure(rule: GateRule, ours: Evidence, theirs: Evidence | None, seed: int) -> _Measured:
    """Run the test that fits. A rule that wants small numbers is judged on the mirror image."""
    if theirs is not None:
        measure = _measure_paired_rates if ours.binary else _measure_gains
        return measure(rule, ours.values, theirs.values, seed)
    estimate = float(ours.values.mean())
    if not ours.binary:
        possible = _possible(ours.values)
        test, limit = _mean_limit(rule, ours.values, possible, seed)
        return _Measured(test, estimate, limit, estimate, None, {"deviation": float(ours.values.std(ddof=1))})
    items, right = len(ours.values), round(float(ours.values.sum()))
    if rule.higher_is_better:
        limit = wilson_lower(right, items, rule.confidence)
    else:
        limit = 1 - wilson_lower(items - right, items, rule.confidence)
    return _Measured(WILSON, estimate, limit, estimate, None, {"right": float(right)})


def _measure_gains(rule: GateRule, values: Array, other: Array, seed: int) -> _Measured:
    gains = values - other
    one = _possible(np.concatenate([values, other]))
    possible = _Range(one.low - one.high, one.high - one.low, one.known)
    test, limit = _mean_limit(rule, gains, possible, seed)
    details = {"deviation": float(gains.std(ddof=1))}
    return _Measured(test, float(gains.mean()), limit, float(values.mean()), float(other.mean()), details)


def _measure_paired_rates(rule: GateRule, values: Array, other: Array, seed: int) -> _Measured:
    items, sign = len(values), _sign(rule)
    gained, lost = int(np.count_nonzero(values > other)), int(np.count_nonzero(values < other))
    better, worse = (gained, lost) if rule.higher_is_better else (lost, gained)
    details = {
        "only_candidate": float(gained),
        "only_baseline": float(lost),
        "discordance": (gained + lost) / items,
        "mcnemar_p": mcnemar_p(gained, lost),
    }
    limit = sign * paired_lower(better, worse, items, rule.confidence)
    return _Measured(TANGO, (gained - lost) / items, limit, float(values.mean()), float(other.mean()), details)


def _possible(values: Array) -> _Range:
    """What values of this metric can be: a share of samples (pass@k, sampled accuracy) lies in [0, 1]; anything else is
    taken to reach twice as far from zero as what was seen, on the sides that were seen.
    """
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        return _Range(0.0, 1.0, known=True)
    reach = 2 * max(abs(low), abs(high))
    return _Range(0.0 if low >= 0 else -reach, 0.0 if high <= 0 else reach, known=False)


def _mean_limit(rule: GateRule, values: Array, possible: _Range, seed: int) -> tuple[str, float]:
    """The test and the limit of a mean.

    A bootstrap knows nothing of values it has not seen, so it is left to metrics that vary and whose range is not
    known. Where the range is known, and of equal values (their bootstrap limit would be the estimate itself), the worst
    that is possible counts as one more item.
    """
    sign = _sign(rule)
    if possible.known or np.ptp(values) == 0:
        worst = possible.low if rule.higher_is_better else -possible.high
        return BOUNDED, sign * bounded_lower(sign * values, worst, rule.confidence, seed)
    return BOOTSTRAP, sign * bootstrap_lower(sign * values, rule.confidence, seed)


def _sign(rule: GateRule) -> int:
    return 1 if rule.higher_is_better else -1


def _decide(rule: GateRule, measured: _Measured, *, items: int) -> Verdict:
    sign = _sign(rule)
    missed_by = sign * (rule.threshold - measured.limit)
    if _meets(rule, measured.limit):
        outcome = Outcome.PASS
    elif not _meets(rule, measured.quantity):
        outcome = Outcome.FAIL
    else:
        outcome = Outcome.INCONCLUSIVE
    return _verdict(
        rule,
        outcome,
        _sentence(rule, outcome, measured, items, missed_by),
        items=items,
        test=measured.test,
        estimate=measured.estimate,
        baseline_estimate=measured.baseline,
        difference=measured.quantity if rule.needs_baseline else None,
        limit=measured.limit,
        missed_by=missed_by,
        details=dict(measured.details),
    )


def _meets(rule: GateRule, number: float) -> bool:
    gain = _sign(rule) * (number - rule.threshold)
    return gain > 0 if rule.strict else gain >= 0


def _sentence(rule: GateRule, outcome: Outcome, measured: _Measured, items: int, missed_by: float) -> str:
    """What was measured, what was asked, how the limit stands to it."""
    if rule.needs_baseline:
        change = _signed(measured.quantity)
        seen = f"{rule.metric} is {_number(measured.estimate)} against the channel's {_number(measured.baseline or 0)}"
        seen += f" on the same {items} items, a difference of {change}"
        asked = f"the {'least' if rule.higher_is_better else 'most'} allowed, {_signed(rule.threshold)}"
        if rule.strict:
            asked = f"the required {'more' if rule.higher_is_better else 'less'} than {_signed(rule.threshold)}"
    else:
        seen = f"{rule.metric} is {_number(measured.estimate)} on {items} items"
        asked = f"the required {'at least' if rule.higher_is_better else 'at most'} {_number(rule.threshold)}"
    side = "lower" if rule.higher_is_better else "upper"
    shown = _signed(measured.limit) if rule.needs_baseline else _number(measured.limit)
    limit = f"{side} {100 * rule.confidence:.4g} % confidence limit {shown}"
    if outcome is Outcome.PASS:
        return f"{seen}; its {limit} meets {asked}."
    if outcome is Outcome.FAIL:
        short = abs(rule.threshold - measured.quantity)
        return f"{seen}, which misses {asked}{',' if short else ''}{_by(short)}; its {limit} misses it{_by(missed_by)}."
    return f"{seen}, which meets {asked}, but its {limit} misses it{_by(missed_by)}: judge on more items."


def _judge_empty_channel(rule: GateRule, ours: Evidence, baseline: Evidence | None) -> Verdict:
    if baseline is not None:
        raise InputError(f"{rule.metric} has a baseline though the channel is empty; evaluate again")
    if len(ours.values) < rule.min_items:
        return _too_few(rule, ours.values)
    mean, items = float(ours.values.mean()), len(ours.values)
    outcome = Outcome.PASS if rule.if_channel_empty == "pass" else Outcome.FAIL
    reason = (
        f"the channel is empty, so {rule.metric} ({_number(mean)} on {items} items) has nothing to be compared with,"
        f" and the rule says if_channel_empty: {rule.if_channel_empty}."
    )
    return _verdict(rule, outcome, reason, items=items, estimate=mean)


def _too_few(rule: GateRule, values: Array) -> Verdict:
    reason = f"{rule.metric} was measured on {len(values)} items, but the rule wants min_items: {rule.min_items}."
    return _verdict(rule, Outcome.INCONCLUSIVE, reason, items=len(values), estimate=float(values.mean()))


def _verdict(
    rule: GateRule, outcome: Outcome, reason: str, *, items: int, test: str = NOT_TESTED, **numbers: Any
) -> Verdict:
    return Verdict(
        gate=rule.name,
        metric=rule.metric,
        outcome=outcome,
        reason=reason,
        test=test,
        confidence=rule.confidence,
        items=items,
        threshold=rule.threshold,
        **numbers,
    )


def _by(distance: float) -> str:
    return f" by {_number(distance)}" if distance else ""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.4g}"
