"""Does the declared budget reach to the end of a run? What is certain refuses, what is probable warns. Pure arithmetic.

Certain is what a stage spends at the least: one token for every document it reads or answers and, before its last step,
the room that the step may need (a job ends before a step that could exceed its budget). Probable is what earlier stages
of its kind took, and never less than that. What a stage spends at the most is neither: a run may end long before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.domain.amounts import LONGEST
from posttrain.domain.kinds import kind_of
from posttrain.domain.runspec import MOST_TOKENS
from posttrain.planner.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Concern:
    """A limit that the run will probably, or may, reach before its end."""

    warning: str  # one sentence
    change: str | None = None  # what to change first, where that is probable


def certain_shortfall(limit: int | None, least: Mapping[str, int], kinds: Mapping[str, str]) -> str | None:
    """Why the run cannot reach its end within so many tokens; None: it may.

    Args:
        limit: declared tokens; None: no limit.
        least: stage → tokens it spends at the least; without stages that may turn out to be reused.
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
    """Whether the run will probably need more tokens than were declared.

    Args:
        limit: declared tokens; None: no limit.
        estimates: by stage.
        least: stage → tokens it spends at the least if it is computed.
        kinds: stage → its kind.
        doubtful: some of these stages may turn out to be reused.
    """
    if limit is None:
        return None
    known = {name: e.tokens or 0 if e.history else 0 for name, e in estimates.items()}
    likely = {name: max(tokens, least.get(name, 0)) for name, tokens in known.items()}
    most = {name: max(likely[name], e.most or 0) for name, e in estimates.items()}
    probable, total = sum(likely.values()), sum(most.values())
    if probable > limit:
        basis = "by earlier stages the run takes about" if any(known.values()) else "the run takes at least about"
        unless = ", unless what another run makes now is reused" if doubtful else ""
        return Concern(
            f"budget.tokens is {limit}, and {basis} {_short(probable)}: it would stop at its budget{unless}",
            None if doubtful else _raise_tokens(total, cheaper(max(likely, key=likely.__getitem__), kinds)),
        )
    if total > limit:
        return Concern(
            f"budget.tokens is {limit}, and the run may take up to about {_short(total)}: if it does, it stops at its "
            "budget and goes on when that is raised"
        )
    return None


def time_concern(
    limit: float | None, estimates: Mapping[str, Estimate], kinds: Mapping[str, str], *, doubtful: bool = False
) -> Concern | None:
    """Whether the run will probably need more job time than was declared, by what earlier stages took.

    Args:
        limit: declared seconds; None: no limit.
        estimates: by stage.
        kinds: stage → its kind.
        doubtful: some of these stages may turn out to be reused.
    """
    known = {name: one.seconds for name, one in estimates.items() if one.seconds is not None}
    total = sum(known.values())
    if limit is None or total <= limit:
        return None
    more = " and more" if len(known) < len(estimates) else ""
    unless = ", unless what another run makes now is reused" if doubtful else ""
    remedy = cheaper(max(known, key=known.__getitem__), kinds)
    if total <= LONGEST:
        remedy = f"raise budget.wall_clock to {min(math.ceil(1.2 * total / 60), round(LONGEST / 60))}m or {remedy}"
    return Concern(
        f"budget.wall_clock is {limit:g} s, and by earlier stages the run takes about {total:.0f} s{more}: it would "
        f"stop at its budget{unless}",
        None if doubtful else remedy,
    )


def cheaper(stage: str, kinds: Mapping[str, str]) -> str:
    """What may be changed of a stage so that it costs less."""
    return kind_of(kinds[stage]).cheaper.replace("{}", stage)


def _raise_tokens(enough: int, remedy: str) -> str:
    """Two digits and never less: what is advised is enough, and may be declared."""
    if enough > MOST_TOKENS:
        return remedy
    power = max(0, math.floor(math.log10(enough)) - 1)
    rounded = math.ceil(enough / 10**power) * 10**power
    return f"raise budget.tokens to {_short(rounded) if rounded <= MOST_TOKENS else MOST_TOKENS} or {remedy}"


def _short(tokens: float) -> str:
    """`8200`, `4.5e6`: as it may be written into run.yaml."""
    return f"{tokens:.1e}".replace("e+0", "e").replace("e+", "e") if tokens >= 1e5 else f"{tokens:.0f}"
