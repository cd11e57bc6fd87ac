"""Gate rules as users write them, and the verdicts of gates. The module has values only; `decision` judges gates.

A rule has exactly one of three forms::

    {name: accuracy,      metric: heldout/accuracy, at_least: 0.9}                       # absolute (or at_most)
    {name: no-regression, metric: heldout/accuracy, not_worse_than: channel, margin: 0.02, if_channel_empty: pass}
    {name: shorter,       metric: heldout/response_tokens, direction: lower, better_than: channel, by: 0.5}
    {name: rl-helped,     metric: heldout/accuracy, better_than: sft, by: 0.02}

`channel` is the model that the run's release channel points at when the gate is judged. Any other name is a stage of
the run, or `base`, as in the `model` of stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import ItemRange
from posttrain.domain.validation import Frozen

MOST_ITEMS = 10**7  # maximum of a rule's `min_items`
CHANNEL = "channel"  # the name of the release channel's model; no stage may have it
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FORMS = ("at_least", "at_most", "not_worse_than", "better_than")
_RELATIVE_KEYS = ("margin", "by", "direction", "if_channel_empty")


class Outcome(StrEnum):
    """The outcome of a gate. Only PASS allows a release."""

    PASS = "pass"  # the confidence limit meets the threshold
    INCONCLUSIVE = "inconclusive"  # the estimate meets the threshold but its limit does not, or there are too few items
    FAIL = "fail"  # the estimate itself misses the threshold
    ERROR = "error"  # the evidence cannot be used

    @property
    def severity(self) -> int:
        """The rank from 0 for PASS to 3 for ERROR."""
        return list(Outcome).index(self)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome of several gates: ERROR > FAIL > INCONCLUSIVE > PASS. No gates: ERROR (fail closed)."""
    return max(outcomes, key=lambda outcome: outcome.severity, default=Outcome.ERROR)


class Direction(StrEnum):
    """The direction in which a metric improves."""

    HIGHER = "higher"
    LOWER = "lower"


# a model, named as in a stage's `model`, or `channel`
Rival = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}(/[a-z0-9_-]{1,62})?$")]


class GateRule(Frozen):
    """One gate of a run.

    Raises:
        pydantic.ValidationError: the rule has two forms or none, a key that its form does not use, or a number out of
            range. The message names gate, field, constraint and value.
    """

    name: str  # unique in the run; lower case
    metric: str  # the evaluation's name for the metric: heldout/accuracy
    at_least: FiniteFloat | None = None  # required minimum, in units of the metric
    at_most: FiniteFloat | None = None  # allowed maximum, in units of the metric
    not_worse_than: Rival | None = None  # non-inferiority: the model is worse by at most `margin`
    better_than: Rival | None = None  # superiority: the model is better by more than `by`
    margin: FiniteFloat | None = None  # in units of the metric; required by `not_worse_than`
    by: FiniteFloat | None = None  # in units of the metric; default of `better_than`: 0
    direction: Direction | None = None  # the direction of improvement; default for relative forms: `higher`
    if_channel_empty: Literal["pass", "fail"] | None = None  # only with `channel`; default: `fail`
    confidence: FiniteFloat = 0.95  # one-sided: at 0.95, the limit is one end of a two-sided 90 % interval
    min_items: Annotated[int, Field(le=MOST_ITEMS)] = (
        20  # with fewer items, the verdict is INCONCLUSIVE: the limit would be too wide
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fill in the defaults of the relative forms, so a locked rule is complete."""
        if not isinstance(data, Mapping) or all(data.get(key) is None for key in ("not_worse_than", "better_than")):
            return data
        filled = {key: value for key, value in data.items() if value is not None}
        filled.setdefault("direction", Direction.HIGHER)
        if CHANNEL in (filled.get("not_worse_than"), filled.get("better_than")):
            filled.setdefault("if_channel_empty", "fail")
        if "better_than" in filled:
            filled.setdefault("by", 0.0)
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"gate {self.name!r}: name must be 1 to 64 characters from a-z 0-9 . _ - and start with a letter or "
                "digit"
            )
        if not self.metric.strip():
            raise ValueError(f"gate {self.name!r}: metric must not be empty, got {self.metric!r}")
        self._check_form()
        for key in ("margin", "by"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"gate {self.name!r}: {key} must be >= 0, got {value}")
        if not 0.5 < self.confidence <= 0.999:
            raise ValueError(f"gate {self.name!r}: confidence must be > 0.5 and <= 0.999, got {self.confidence}")
        if self.min_items < 2:
            raise ValueError(f"gate {self.name!r}: min_items must be >= 2, got {self.min_items}")
        return self

    def _check_form(self) -> None:
        forms = [key for key in _FORMS if getattr(self, key) is not None]
        if len(forms) != 1:
            given = " and ".join(forms) or "none"
            raise ValueError(f"gate {self.name!r}: exactly one of {', '.join(_FORMS)} must be given, got {given}")
        form = forms[0]
        used = {
            "not_worse_than": ("margin", "direction", "if_channel_empty"),
            "better_than": ("by", "direction", "if_channel_empty"),
        }.get(form, ())
        if self.if_channel_empty is not None and self.rival not in (None, CHANNEL):
            raise ValueError(
                f"gate {self.name!r}: if_channel_empty has no meaning with {form}: {self.rival}, since that model is "
                "not read from the channel; remove if_channel_empty"
            )
        for key in _RELATIVE_KEYS:
            if getattr(self, key) is not None and key not in used:
                raise ValueError(f"gate {self.name!r}: {key} has no meaning with {form}; remove {key}")
        if form == "not_worse_than" and self.margin is None:
            raise ValueError(
                f"gate {self.name!r}: not_worse_than needs margin, the amount by which the model may be worse; add it, "
                "such as margin: 0.02"
            )

    def check_range(self, possible: ItemRange) -> None:
        """Reject a threshold that no model could miss, or that no model could meet.

        Args:
            possible: the range of one item's value.

        Raises:
            InputError: the threshold is one of these two; the message has key, constraint, value and next action.
        """
        low, high = (-possible.span, possible.span) if self.needs_baseline else (possible.low, possible.high)
        up, threshold = self.higher_is_better, self.threshold
        key = next(key for key in (*_FORMS[:2], "margin", "by") if getattr(self, key) is not None)
        written, what = getattr(self, key), f"its difference in {self.metric}" if self.needs_baseline else self.metric
        lies = f"{what} is from {low:g} to {high:g}"
        beyond = threshold > high if up else threshold < low
        if beyond or (self.strict and threshold == (high if up else low)):
            raise InputError(f"{key} must be a value that a model can reach, got {written:g}, but {lies}; change {key}")
        if threshold <= low if up else threshold >= high:
            raise InputError(f"{key} must be a value that a model can miss, got {written:g}, but {lies}; change {key}")

    @property
    def needs_baseline(self) -> bool:
        """Whether the rule compares with another model."""
        return self.rival is not None

    @property
    def rival(self) -> str | None:
        """The model that the rule compares with, as written: `channel`, `base` or a stage; None: no model."""
        return self.not_worse_than or self.better_than

    @property
    def meets_channel(self) -> bool:
        """Whether the rule compares with the channel's current model, which may not exist."""
        return self.rival == CHANNEL

    @property
    def higher_is_better(self) -> bool:
        """Whether values above the threshold are good."""
        return self.at_least is not None or self.direction is Direction.HIGHER

    @property
    def strict(self) -> bool:
        """Whether a limit exactly at the threshold misses it, since an identical model is not better."""
        return self.better_than is not None

    @property
    def threshold(self) -> float:
        """The bound for the confidence limit of the metric (absolute forms) or of candidate - baseline (relative)."""
        for bound in (self.at_least, self.at_most):
            if bound is not None:
                return bound
        gain = -self.margin if self.margin is not None else (self.by or 0.0)
        return (gain if self.higher_is_better else -gain) + 0.0  # + 0.0 turns -0.0 into 0.0


def whose_words(rival: str) -> str:
    """Return a gate's baseline as text: `the channel's model`, `the base model`, `the model of stage sft`."""
    return {CHANNEL: "the channel's model", "base": "the base model"}.get(rival) or f"the model of stage {rival}"


class Verdict(Frozen):
    """The verdict of one gate, with the numbers behind it. All numbers are finite, as canonical JSON requires.

    `limit` and `threshold` are in the metric's units; for a relative rule they apply to `difference`, which is
    candidate - baseline.
    """

    gate: str
    metric: str
    outcome: Outcome
    reason: str  # one sentence for a person, with the numbers
    test: str  # the method, such as "bounded-mean limit (Gaffke)"
    confidence: FiniteFloat  # one-sided
    items: int = Field(ge=0)
    estimate: FiniteFloat | None = None  # mean of the candidate over items
    baseline_estimate: FiniteFloat | None = None  # mean of the baseline over the same items
    difference: FiniteFloat | None = None  # candidate - baseline
    limit: FiniteFloat | None = None  # the one-sided confidence limit that is compared with `threshold`
    threshold: FiniteFloat | None = None
    missed_by: FiniteFloat | None = None  # distance from `limit` to the threshold; < 0: the threshold is met
    details: dict[str, FiniteFloat] = Field(default_factory=dict)  # such as discordance, mcnemar_p
    against: str | None = None  # channel | base | a stage: the compared model; None: no model, or a verdict of
    # an older version, which compared with the channel only
    baseline: str | None = None  # digest of that model; None: no model
    look: int | None = None  # 1 for the first evaluation of its items; None: the items are unknown
    asked: FiniteFloat | None = None  # the rule's own confidence, if the number of looks raised `confidence`

    @property
    def against_words(self) -> str:
        """The description of the compared model; empty without a compared model."""
        rival = self.against or (CHANNEL if self.difference is not None else None)
        return whose_words(rival) if rival else ""


class GateReport(Frozen):
    """All verdicts of one gate stage, on which promotions are based. The release history contains the report's digest.

    Raises:
        pydantic.ValidationError: the `outcome` is not the worst outcome of the verdicts.
    """

    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    candidate: str  # digest of the judged model
    baseline: str | None = None  # digest of the channel's model, which a promotion replaces; None: the channel was
    # empty. Each verdict contains the model with which its rule compared
    evaluator: str | None = None  # digest of the evaluator that measured candidate and baselines
    # digest of the run's manifest; None, like the next fields, in reports by older versions
    manifest: str | None = None
    policy: str | None = None  # digest of the channel's policy with its gates; None: no policy
    channel: str | None = None
    release: int | None = None  # number of the release that was live when the gate was judged; 0: no release

    @model_validator(mode="after")
    def _check(self) -> Self:
        expected = worst(verdict.outcome for verdict in self.verdicts)
        if self.outcome is not expected:
            raise ValueError(f"gate report: outcome must be {expected} (the worst of its verdicts), got {self.outcome}")
        return self

    @classmethod
    def of(
        cls, verdicts: Iterable[Verdict], *, candidate: str, baseline: str | None = None, evaluator: str | None = None
    ) -> GateReport:
        """Return the report of these verdicts; without verdicts, its outcome is ERROR."""
        rows = tuple(verdicts)
        return cls(
            outcome=worst(verdict.outcome for verdict in rows),
            verdicts=rows,
            candidate=candidate,
            baseline=baseline,
            evaluator=evaluator,
        )

    @property
    def digest(self) -> str:
        """`sha256:…` of the report's canonical JSON."""
        return digest_json(self.model_dump(mode="json"))

    @property
    def decisive(self) -> tuple[Verdict, ...]:
        """The verdicts with the report's outcome: the gates to inspect first."""
        return tuple(verdict for verdict in self.verdicts if verdict.outcome is self.outcome)
