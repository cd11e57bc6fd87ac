"""Estimates of the cost of stages, and whether the declared budget suffices for a run. Pure arithmetic.

A run is rejected if it will certainly exceed the budget; if it will probably exceed the budget, a warning is printed.
The certain cost is the minimum that a stage spends: one token for every document that it reads or answers and, before
its last step, the tokens that the step may need (a job ends before a step that could exceed its budget). The probable
cost is estimated from the stage's declared work and the cost of earlier stages of the same kind, and is at least the
certain cost. A stage's maximum cost is not used, because a run may end long before it reaches that maximum.

Without history, seconds are not estimated, and tokens are estimated only if the declared work limits the tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from posttrain.domain.kinds import kind_of
from posttrain.domain.placement import LONGEST
from posttrain.domain.runspec import MOST_TOKENS

_SHARED = ("prompts", "trained")  # entries of `Workload.work` whose ratio to the units is equal in comparable stages


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one stage: `Workload("sft", {"steps": 350, "documents": 22400}, length=38.5)`."""

    kind: str
    # as the trainer declares it: steps, documents (read or answered), max_new_tokens and, where they apply, prompts
    # (documents of one prompt count once), trained (documents trained on after they were answered), rounds (how many
    # times as much may be sampled, because dropped groups are replaced), again (tokens that further turns read again)
    work: Mapping[str, float]
    length: float | None = None  # mean tokens read per document: prompt + completion, or the prompt alone
    counted: bool = False  # by the model's tokenizer; else one token per character is assumed
    longest: float | None = None  # tokens of the longest inspected document

    @property
    def units(self) -> float:
        """The number to which the cost is proportional: documents or, if they are not declared, steps."""
        return self.work.get("documents", self.work.get("steps", 1.0))


@dataclass(frozen=True, slots=True)
class Experience:
    """The work and the cost of an earlier stage."""

    workload: Workload
    tokens: int  # spent on the result, including steps trained in other runs, without lost work
    seconds: float | None  # of the stage's jobs; None: its first steps were trained in another run


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens and job seconds, and the basis of these numbers; None means unknown."""

    tokens: int | None
    seconds: float | None
    basis: str
    history: int = field(default=0)  # number of earlier stages used
    most: int | None = None  # maximum tokens of the declared work, which is the estimate without history; None: unknown


def comparable(one: Workload, other: Workload) -> bool:
    """Return whether a unit of one workload costs the same as a unit of the other.

    The costs differ if answer lengths or passes differ, or if the number of documents is known for only one workload.
    """
    if ("documents" in one.work) != ("documents" in other.work):
        return False
    shares = [{name: w.work.get(name, 0.0) / w.units for name in _SHARED if w.units} for w in (one, other)]
    same = [[w.work.get("max_new_tokens", 0.0), w.work.get("rounds", 1.0)] for w in (one, other)]
    return one.kind == other.kind and same[0] == same[1] and shares[0] == shares[1]


def estimate(workload: Workload, earlier: Sequence[Experience]) -> Estimate:
    """Return the estimated cost of a stage.

    With history, the cost is the median cost per unit of earlier comparable stages, times the units. Without history,
    seconds are unknown, and tokens are counted by the rule of `jobs.Progress` from the lengths of the stage's
    documents, the longest responses and all trained documents.
    """
    most = _most(workload)
    rates = [e for e in earlier if e.workload.units > 0 and comparable(workload, e.workload)]
    if rates:
        tokens = median(e.tokens / e.workload.units for e in rates) * workload.units
        timed = [e.seconds / e.workload.units for e in rates if e.seconds is not None]
        seconds = median(timed) * workload.units if timed else None
        noun = "stage" if len(rates) == 1 else "stages"
        return Estimate(round(tokens), seconds, f"from {len(rates)} earlier {workload.kind} {noun}", len(rates), most)
    if most is None:
        return Estimate(None, None, "no history yet")
    longest = workload.work.get("max_new_tokens", 0.0)
    assumed = ("counted by its tokenizer" if workload.counted else "one per character") + (
        f", responses of {longest:g}" if longest else ""
    )
    return Estimate(most, None, f"no history yet; {assumed}", most=most)


def _most(workload: Workload) -> int | None:
    if workload.length is None or "documents" not in workload.work:
        return None
    longest = workload.work.get("max_new_tokens", 0.0)
    read = workload.work.get("prompts", workload.units) * workload.length
    trained = workload.work.get("trained", 0.0) * (workload.length + longest)
    sampled = (read + workload.units * longest + workload.work.get("again", 0.0)) * workload.work.get("rounds", 1.0)
    return round(sampled + trained)


@dataclass(frozen=True, slots=True)
class Concern:
    """A limit that the run will probably, or may, reach before its end."""

    warning: str  # one sentence
    change: str | None = None  # the suggested change, if the shortfall is probable


def certain_shortfall(limit: int | None, least: Mapping[str, int], kinds: Mapping[str, str]) -> str | None:
    """Return why the run cannot end within its token limit; None if it may end within the limit.

    Args:
        limit: declared tokens; None: no limit.
        least: stage → its minimum of tokens; without stages that may be reused.
        kinds: stage → its kind.
    """
    total = sum(least.values())
    if limit is None or total <= limit:
        return None
    dearest = max(least, key=least.__getitem__)
    remedy = cheaper(dearest, kinds)
    if total <= MOST_TOKENS:
        remedy = f"raise it or {remedy}"
    return (
        f"budget.tokens must be at least {total}, which the stages spend if every document has one token "
        f"({dearest} {least[dearest]}), got {limit}; {remedy}"
    )


def token_concern(
    limit: int | None,
    estimates: Mapping[str, Estimate],
    least: Mapping[str, int],
    kinds: Mapping[str, str],
    *,
    doubtful: bool = False,
) -> Concern | None:
    """Return a concern if the run will probably, or may, need more tokens than declared.

    Args:
        limit: declared tokens; None: no limit.
        estimates: stage → its estimate.
        least: stage → its minimum of tokens if it is computed.
        kinds: stage → its kind.
        doubtful: whether results of some stages may be reused from the stage cache.
    """
    if limit is None:
        return None
    known = {name: e.tokens or 0 if e.history else 0 for name, e in estimates.items()}
    likely = {name: max(tokens, least.get(name, 0)) for name, tokens in known.items()}
    most = {name: max(likely[name], e.most or 0) for name, e in estimates.items()}
    probable, total = sum(likely.values()), sum(most.values())
    if probable > limit:
        basis = (
            "according to earlier stages the run takes about" if any(known.values()) else "the run takes at least about"
        )
        unless = ", unless an active run's result is reused" if doubtful else ""
        return Concern(
            f"budget.tokens is {limit}, but {basis} {_short(probable)}, so the run would stop at its budget{unless}",
            None if doubtful else _raise_tokens(total, cheaper(max(likely, key=likely.__getitem__), kinds)),
        )
    if total > limit:
        return Concern(
            f"budget.tokens is {limit}, but the run may take up to about {_short(total)}; if it takes more than the "
            "budget, the run stops and continues when the budget is raised"
        )
    return None


def time_concern(
    limit: float | None, estimates: Mapping[str, Estimate], kinds: Mapping[str, str], *, doubtful: bool = False
) -> Concern | None:
    """Return a concern if the run will probably need more job time than declared, according to earlier stages.

    Args:
        limit: declared seconds; None: no limit.
        estimates: stage → its estimate.
        kinds: stage → its kind.
        doubtful: whether results of some stages may be reused from the stage cache.
    """
    known = {name: one.seconds for name, one in estimates.items() if one.seconds is not None}
    total = sum(known.values())
    if limit is None or total <= limit:
        return None
    more = " and more" if len(known) < len(estimates) else ""
    unless = ", unless an active run's result is reused" if doubtful else ""
    remedy = cheaper(max(known, key=known.__getitem__), kinds)
    if total <= LONGEST:
        remedy = f"raise budget.wall_clock to {min(math.ceil(1.2 * total / 60), round(LONGEST / 60))}m or {remedy}"
    return Concern(
        f"budget.wall_clock is {limit:g} s, but according to earlier stages the run takes about {total:.0f} s{more}, "
        f"so the run would stop at its budget{unless}",
        None if doubtful else remedy,
    )


def cheaper(stage: str, kinds: Mapping[str, str]) -> str:
    """Return a suggestion for making a stage cheaper."""
    return kind_of(kinds[stage]).cheaper.replace("{}", stage)


def _raise_tokens(enough: int, remedy: str) -> str:
    """Return advice with a budget that is rounded up to two digits, so that it suffices, within the allowed maximum."""
    if enough > MOST_TOKENS:
        return remedy
    power = max(0, math.floor(math.log10(enough)) - 1)
    rounded = math.ceil(enough / 10**power) * 10**power
    return f"raise budget.tokens to {_short(rounded) if rounded <= MOST_TOKENS else MOST_TOKENS} or {remedy}"


def _short(tokens: float) -> str:
    """Return a number in the form of run.yaml: `8200`, `4.5e6`."""
    return f"{tokens:.1e}".replace("e+0", "e").replace("e+", "e") if tokens >= 1e5 else f"{tokens:.0f}"
