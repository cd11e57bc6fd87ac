"""Verdicts of gates, and intervals that show people the uncertainty of measured numbers.

A rule and the evidence give a verdict. Gates fail closed: evidence that cannot be judged does not pass.

::

    evidence unusable ──────────────────────────▶ ERROR         no measurement, NaN, items differ, no baseline
    channel empty (a rule against it) ──────────▶ PASS | FAIL   by the rule's `if_channel_empty`
    fewer than `min_items` ─────────────────────▶ INCONCLUSIVE
    estimate misses the threshold ──────────────▶ FAIL
    estimate meets it, its limit does not ──────▶ INCONCLUSIVE
    limit meets it ─────────────────────────────▶ PASS

A value equal to the threshold meets it, except with `better_than`, where the value must exceed it. A model exactly at
the threshold passes with probability at most `1 - confidence`: docs/gates.md has the measured levels.

An interval shows the uncertainty of a measured number, or of the difference between two models on the same items. Its
two ends are one-sided limits as in gates (`decision.statistics`): an interval of confidence 0.95 has a one-sided limit
of confidence 0.975 at each end. No gate reads an interval.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from posttrain.decision.statistics import RESAMPLES, Array, mcnemar_p, mean_lower, paired_lower, rate_lower
from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.gates import CHANNEL, GateReport, GateRule, Outcome, Verdict, whose_words
from posttrain.domain.kinds import ItemRange
from posttrain.domain.policies import LookBudget

RATE_LIMIT = "exact limit of a rate (Clopper-Pearson)"
CONFIDENCE = 0.95  # two-sided
_Z_POWER = NormalDist().inv_cdf(0.8)  # for the number of items that an inconclusive verdict names
_NONE = 1e-9  # a smaller spread is rounding
_MANY = 500  # distinct values above which fewer resamples are drawn, which keeps tables fast
_FEW_RESAMPLES = 1_999  # 2,000 is a multiple of 1 / level at each end; the limit is valid for any number


PAIRED_LIMIT = "paired limit of two rates (Gaffke; against 0 exact McNemar)"


MEAN_LIMIT = "bounded-mean limit (Gaffke)"


NOT_TESTED = "none"


@dataclass(frozen=True, slots=True)
class Look:
    """The evaluation that a gate judges, by its number among the evaluations of its items."""

    number: int  # from 1
    budget: LookBudget  # from `ChannelPolicy.looks`

    @property
    def spent(self) -> bool:
        """Whether this look is beyond the number that the policy allows."""
        return isinstance(self.budget, int) and self.number > self.budget

    @property
    def words(self) -> str:
        """The look in words, such as `look 3 at these items`."""
        return f"look {self.number} at these items"

    def rule(self, rule: GateRule) -> GateRule:
        """Return the rule with the confidence at which this look is judged."""
        if self.budget == "warn":
            return rule
        shares = self.budget if isinstance(self.budget, int) else self.number * (self.number + 1)
        return rule.model_copy(update={"confidence": 1 - (1 - rule.confidence) / shares})

    def verdict(self, rule: GateRule, judged: Verdict) -> Verdict:
        """Return the verdict of `self.rule(rule)` with this look; a look beyond the policy's budget is an ERROR."""
        update: dict[str, object] = {"look": self.number}
        if self.spent:
            reason = f"{self.words}, of {self.budget} that the channel's policy allows; judge on items that are new."
            update |= {"outcome": Outcome.ERROR, "reason": reason}
        elif judged.limit is None:  # nothing was tested
            pass
        elif judged.confidence != rule.confidence:
            update |= {"asked": rule.confidence, "reason": f"{judged.reason[:-1]} ({self.words})."}
        elif self.budget == "warn" and self.number > 1:
            update["reason"] = f"{judged.reason[:-1]} ({self.words}, judged as if it were the first)."
        return judged.model_copy(update=update)

    def inflated(self, confidence: float) -> float:
        """Return P(at least one of `number` models at the threshold passes), if each is judged at this confidence."""
        return 1 - confidence**self.number


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One metric of one model, item by item: `Evidence(("q1", "q2"), np.array([1.0, 0.0]), RATE)`.

    The value of an item with several samples is their mean, because items are independent but samples of an item are
    not.
    """

    item_ids: tuple[str, ...]  # unique; the same items for candidate and baseline, in any order
    values: Array  # [items]
    range: ItemRange | None  # the range of possible values that the evaluation declared; None: undeclared, not judged


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """A model with which rules compare the candidate, and the model's measurements."""

    digest: str | None  # None: the channel is empty
    evidence: Mapping[str, Evidence] = field(default_factory=dict)  # metric → values


@dataclass(frozen=True, slots=True)
class _Measured:
    """The result of a test: `quantity` is the mean, or candidate - baseline; `limit` is its one-sided limit."""

    test: str
    quantity: float
    limit: float
    estimate: float
    baseline: float | None
    details: Mapping[str, float]


def judge(
    rule: GateRule, candidate: Evidence | None, baseline: Evidence | None, *, channel_empty: bool, seed: int
) -> Verdict:
    """Return the verdict of a rule on the evidence.

    Args:
        rule: the gate.
        candidate: the rule's metric, measured on the candidate; None: not measured.
        baseline: the metric, measured on the model that the rule compares with; ignored for an absolute rule.
        channel_empty: whether the channel has no model; ignored for a rule that does not compare with the channel.
        seed: the run's seed; the seed of a mean's limit is derived from it and the rule's name.
    """
    try:
        ours = _usable(rule, candidate, "the candidate")
        if rule.meets_channel and channel_empty:
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
    baselines: Mapping[str, Baseline],
    *,
    candidate_digest: str,
    evaluator_digest: str | None,
    seed: int,
    looks: Mapping[str, Look] | None = None,
) -> GateReport:
    """Judge all gates of a run.

    Args:
        rules: the rules, with unique names; an empty sequence makes the report an ERROR.
        candidate: metric name → evidence of the candidate.
        baselines: rival of rules (`channel`, `base`, a stage) → that model, measured by the same evaluator on the
            same items. Without `channel`, the channel is empty. A promotion requires that the channel still points at
            the model under `channel`.
        candidate_digest: the digest of the judged model.
        evaluator_digest: the digest of the evaluator that measured candidate and baselines.
        seed: the run's seed.
        looks: rule → the look at its items; a rule without a look is judged at its own confidence.

    Raises:
        InputError: two rules have the same name.
    """
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise InputError(f"gates: names must be unique, got {twice[0]!r} more than once; rename one")
    live = baselines.get(CHANNEL, Baseline(None)).digest
    verdicts = []
    for rule in rules:
        other = baselines.get(rule.rival or "", Baseline(None))
        ours, theirs = candidate.get(rule.metric), other.evidence.get(rule.metric)
        look = (looks or {}).get(rule.name)
        verdict = judge(look.rule(rule) if look else rule, ours, theirs, channel_empty=live is None, seed=seed)
        verdict = look.verdict(rule, verdict) if look else verdict
        verdicts.append(verdict.model_copy(update={"baseline": other.digest}))
    return GateReport.of(verdicts, candidate=candidate_digest, baseline=live, evaluator=evaluator_digest)


def _usable(rule: GateRule, evidence: Evidence | None, whose: str) -> Evidence:
    """Return the evidence in the order of its item ids, so no verdict depends on the order of rows.

    Raises:
        InputError: the evidence cannot be judged; the message becomes the reason of an ERROR verdict.
    """
    if evidence is None:
        raise InputError(f"{rule.metric} was not measured on {whose}; check the metric's name and the evaluate stage")
    return usable(f"{rule.metric} of {whose}", evidence)


def usable(what: str, evidence: Evidence) -> Evidence:
    """Return checked evidence in the order of its item ids.

    Args:
        what: the name of the evidence in errors.

    Raises:
        InputError: there are no items, there is a duplicate item, no range is declared, or a value is not finite or is
            out of range.
    """
    values = np.asarray(evidence.values, dtype=np.float64)
    ids = evidence.item_ids
    if values.ndim != 1 or len(values) != len(ids):
        raise InputError(f"{what} has {len(ids)} item ids for values of shape {values.shape}")
    if not ids:
        raise InputError(f"{what} has no items; check the evaluation suite")
    repeated = [item for item, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InputError(f"{what} contains {len(repeated)} item ids more than once, e.g. {repeated[0]!r}")
    _check_values(what, evidence.range, ids, values)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return Evidence(tuple(ids[index] for index in order), values[order], evidence.range)


def _check_values(what: str, possible: ItemRange | None, ids: Sequence[str], values: Array) -> None:
    if possible is None:
        raise InputError(
            f"{what} has no declared range, so no confidence limit exists; evaluate with a trainer that declares the "
            "range"
        )
    bad = [ids[index] for index in np.flatnonzero(~np.isfinite(values)).tolist()]
    if bad:
        raise InputError(f"{what} is NaN or infinite on {len(bad)} items, e.g. {bad[0]!r}")
    if possible.binary and not np.all((values == 0) | (values == 1)):
        raise InputError(f"{what} is declared binary but has values other than 0 and 1")
    beyond = np.flatnonzero((values < possible.low) | (values > possible.high))
    if len(beyond):
        first = int(beyond[0])
        raise InputError(
            f"{what} has the declared range {possible.low:g} to {possible.high:g}, got {values[first]:g} on"
            f" {ids[first]!r}; correct the metric or its range"
        )


def _usable_baseline(rule: GateRule, ours: Evidence, baseline: Evidence | None) -> Evidence:
    theirs = _usable(rule, baseline, whose_words(str(rule.rival)))
    if ours.range != theirs.range:
        raise InputError(
            f"{rule.metric} has a different declared range on the baseline; measure both models with the same evaluator"
        )
    if ours.item_ids != theirs.item_ids:
        odd = set(ours.item_ids) ^ set(theirs.item_ids)
        raise InputError(
            f"{rule.metric} was measured on different items: {len(odd)} are not in both, e.g. {min(odd)!r};"
            " evaluate both models on one suite"
        )
    return theirs


def _measure(rule: GateRule, ours: Evidence, theirs: Evidence | None, seed: int) -> _Measured:
    """Return the result of the test for the kind of metric and rule; a rule that requires small values is mirrored."""
    possible = ours.range
    assert possible is not None  # `_usable` rejects such evidence
    if theirs is not None:
        if possible.binary:
            return _measure_paired_rates(rule, ours.values, theirs.values)
        return _measure_gains(rule, ours.values, theirs.values, possible.span, seed)
    if possible.binary:
        return _measure_rate(rule, ours.values)
    estimate = float(ours.values.mean())
    limit = _mean_limit(rule, ours.values, possible.low, possible.high, seed)
    return _Measured(MEAN_LIMIT, estimate, limit, estimate, None, {"deviation": float(ours.values.std(ddof=1))})


def _measure_rate(rule: GateRule, values: Array) -> _Measured:
    items, right = len(values), round(float(values.sum()))
    if rule.higher_is_better:
        limit = rate_lower(right, items, rule.confidence)
    else:
        limit = 1 - rate_lower(items - right, items, rule.confidence)
    return _Measured(RATE_LIMIT, right / items, limit, right / items, None, {"right": float(right)})


def _measure_gains(rule: GateRule, values: Array, other: Array, span: float, seed: int) -> _Measured:
    """Return the measured candidate - baseline; differences of values in one range are between -span and span."""
    gains = values - other
    limit = _mean_limit(rule, gains, -span, span, seed)
    return _Measured(
        MEAN_LIMIT,
        float(gains.mean()),
        limit,
        float(values.mean()),
        float(other.mean()),
        {"deviation": float(gains.std(ddof=1))},
    )


def _measure_paired_rates(rule: GateRule, values: Array, other: Array) -> _Measured:
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
    return _Measured(PAIRED_LIMIT, (gained - lost) / items, limit, float(values.mean()), float(other.mean()), details)


def _mean_limit(rule: GateRule, values: Array, low: float, high: float, seed: int) -> float:
    sign = _sign(rule)
    return sign * mean_lower(sign * values, low if sign > 0 else -high, rule.confidence, seed)


def _sign(rule: GateRule) -> int:
    return 1 if rule.higher_is_better else -1


def _decide(rule: GateRule, measured: _Measured, *, items: int) -> Verdict:
    missed_by = _sign(rule) * (rule.threshold - measured.limit)
    missed = Outcome.INCONCLUSIVE if _meets(rule, measured.quantity) else Outcome.FAIL
    outcome = Outcome.PASS if _meets(rule, measured.limit) else missed
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
    """Return the reason of a verdict: the measurement, the requirement, and the limit."""
    if rule.needs_baseline:
        change = _signed(measured.quantity)
        theirs = f"{_whose(str(rule.rival))} {_number(measured.baseline or 0)}"
        seen = f"{rule.metric} is {_number(measured.estimate)} against {theirs}"
        seen += f" on the same {items} items, a difference of {change}"
        needed = f"{'at least' if rule.higher_is_better else 'at most'} {_signed(rule.threshold)}"
        if rule.strict:
            needed = f"{'more' if rule.higher_is_better else 'less'} than {_signed(rule.threshold)}"
    else:
        seen = f"{rule.metric} is {_number(measured.estimate)} on {items} items"
        needed = f"{'at least' if rule.higher_is_better else 'at most'} {_number(rule.threshold)}"
    asked = f"the requirement ({needed})"
    side = "lower" if rule.higher_is_better else "upper"
    shown = _signed(measured.limit) if rule.needs_baseline else _number(measured.limit)
    limit = f"{side} {100 * rule.confidence:.4g} % confidence limit {shown}"
    if outcome is Outcome.PASS:
        return f"{seen}; its {limit} meets {asked}."
    if outcome is Outcome.FAIL:
        short = abs(rule.threshold - measured.quantity)
        return f"{seen}, which misses {asked}{_by(short)}; its {limit} misses it{_by(missed_by)}."
    enough = _enough_items(rule, measured, items)
    return f"{seen}, which meets {asked}, but its {limit} misses it{_by(missed_by)}: judge on {enough}."


def _enough_items(rule: GateRule, measured: _Measured, items: int) -> str:
    """Return text with the number of items on which a model with this estimate passes with a power of about 80 %.

    The normal approximation gives the number; without any spread, the limit's distance shrinks as items are added.
    """
    margin, distance = abs(measured.quantity - rule.threshold), abs(measured.quantity - measured.limit)
    if distance > 1_000 * margin:
        return "more items"
    details, rate = measured.details, measured.quantity
    alike = math.sqrt(max(details.get("discordance", 0.0) - rate**2, 0.0))
    spread = math.sqrt(rate * (1 - rate)) if "right" in details else details.get("deviation", alike)
    z = NormalDist().inv_cdf(rule.confidence)
    if spread < _NONE:
        count = 1.1 * items * distance / margin
    elif "right" in details:
        count = ((z * math.sqrt(rule.threshold * (1 - rule.threshold)) + _Z_POWER * spread) ** 2 / margin + 1) / margin
    else:
        count = ((max(z, distance * math.sqrt(items) / spread) + _Z_POWER) * spread / margin) ** 2
    scale = 10 ** max(0, int(math.log10(max(count, items + 1))) - 1)  # two digits: the estimate will move
    return f"about {math.ceil(max(count, items + 1) / scale) * scale:,} items, on which about 80 % of such models pass"


def _judge_empty_channel(rule: GateRule, ours: Evidence, baseline: Evidence | None) -> Verdict:
    if baseline is not None:
        raise InputError(f"{rule.metric} has a baseline though the channel is empty; evaluate again")
    if len(ours.values) < rule.min_items:
        return _too_few(rule, ours.values)
    mean, items = float(ours.values.mean()), len(ours.values)
    outcome = Outcome.PASS if rule.if_channel_empty == "pass" else Outcome.FAIL
    reason = (
        f"the channel is empty, so {rule.metric} ({_number(mean)} on {items} items) has nothing to be compared with,"
        f" and the rule has if_channel_empty: {rule.if_channel_empty}."
    )
    return _verdict(rule, outcome, reason, items=items, estimate=mean)


def _too_few(rule: GateRule, values: Array) -> Verdict:
    reason = f"{rule.metric} was measured on {len(values)} items, but the rule requires min_items: {rule.min_items}."
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
        against=rule.rival,
        **numbers,
    )


def _whose(rival: str) -> str:
    return {CHANNEL: "the channel's", "base": "the base model's"}.get(rival) or f"stage {rival}'s"


def _by(distance: float) -> str:
    return f" by {_number(distance)}" if distance else ""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.4g}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items with its interval: `Estimate(0.985, 0.957, 0.997, 200, "exact limit of a rate …")`."""

    value: float
    low: float | None  # None: the metric declares no range, so there is no valid limit
    high: float | None
    items: int
    method: str

    def __str__(self) -> str:
        return _shown(self.value, self.low, self.high, "")


@dataclass(frozen=True, slots=True)
class Paired:
    """Candidate - reference over the items on which both were measured."""

    higher: int  # items on which the candidate's value is greater
    lower: int
    same: int
    difference: float  # mean
    low: float
    high: float
    method: str
    mcnemar_p: float | None = None  # exact and two-sided, for a metric that is 0 or 1 on every item

    @property
    def items(self) -> int:
        """The number of all paired items."""
        return self.higher + self.lower + self.same

    def wins(self, better: str | None) -> tuple[int, int]:
        """Return how many items the candidate won and lost; `better`: "lower", or any other text for higher."""
        return (self.lower, self.higher) if better == "lower" else (self.higher, self.lower)

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return _shown(self.difference, self.low, self.high, "+")


def estimate(metric: str, evidence: Evidence, confidence: float = CONFIDENCE) -> Estimate:
    """Return a metric's mean with its interval.

    Raises:
        InputError: the evidence is unusable; see `usable`.
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
    """Return the difference between two models, item by item.

    Raises:
        InputError: the models were measured on different items, or with different or undeclared ranges.
    """
    ours, theirs = usable(metric, candidate), usable(metric, reference)
    if ours.range != theirs.range:
        raise InputError("measured with other settings (the metric's range differs)")
    if ours.item_ids != theirs.item_ids:
        both = len(set(ours.item_ids) & set(theirs.item_ids))
        raise InputError(
            f"measured on other items ({both} of {len(ours.item_ids)} and {len(theirs.item_ids)} are shared)"
        )
    assert ours.range is not None  # `usable` rejects such evidence
    gains, each = ours.values - theirs.values, _each(confidence)
    higher, lower = int(np.count_nonzero(gains > 0)), int(np.count_nonzero(gains < 0))
    same, mean = len(gains) - higher - lower, float(gains.mean())
    if ours.range.binary:
        low, high = paired_lower(higher, lower, len(gains), each), -paired_lower(lower, higher, len(gains), each)
        return Paired(higher, lower, same, mean, low, high, PAIRED_LIMIT, mcnemar_p(higher, lower))
    low, high = _mean_limits(gains, -ours.range.span, ours.range.span, each)
    return Paired(higher, lower, same, mean, low, high, MEAN_LIMIT)


def decimals(low: float, high: float) -> int:
    """Return how many decimals of a number with interval [low, high] are significant: two digits of the width."""
    width = abs(high - low)
    if not (width > 0 and math.isfinite(width)):
        return 3
    return min(6, max(0, 1 - math.floor(math.log10(width))))


def _mean_limits(values: Array, low: float, high: float, each: float) -> tuple[float, float]:
    resamples = RESAMPLES if len(np.unique(values)) <= _MANY else _FEW_RESAMPLES
    seed = derive_seed(0, "interval")  # independent of the metric, so equal values have equal intervals
    return mean_lower(values, low, each, seed, resamples), -mean_lower(-values, -high, each, seed, resamples)


def _each(confidence: float) -> float:
    return 1 - (1 - confidence) / 2


def _shown(value: float, low: float | None, high: float | None, sign: str) -> str:
    if low is None or high is None:
        return f"{value:{sign}.4g}"
    digits = decimals(low, high)
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
