"""Does the declared budget reach to the end of a run? What is certain refuses, what is probable warns. Pure arithmetic.

Certain is what a stage spends at the least: one token for every document it reads or answers and, before its last step,
the room that the step may need (a job ends before a step that could exceed its budget). Probable is what earlier stages
of its kind took. What a stage spends at the most is neither: a run may end long before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.planner.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Concern:
    """A limit that the run will probably, or may, reach before its end."""

    warning: str  # one sentence
    change: str  # what to change first
    likely: bool  # by what earlier stages took; else only at the most


def certain_shortfall(limit: int | None, least: Mapping[str, int]) -> str | None:
    """Why the run cannot reach its end within so many tokens; None: it may.

    Args:
        limit: declared tokens; None: no limit.
        least: stage → tokens it spends at the least; without stages whose results are reused.
    """
    total = sum(least.values())
    if limit is None or total <= limit:
        return None
    dearest = max(least, key=least.__getitem__)
    return (
        f"budget.tokens must be at least {total}, which the stages spend if every document has one token "
        f"({dearest} {least[dearest]}), got {limit}; raise it or lower the steps of {dearest}"
    )


def token_concern(limit: int | None, estimates: Mapping[str, Estimate], least: Mapping[str, int]) -> Concern | None:
    """Whether the run will probably need more tokens than were declared.

    Args:
        limit: declared tokens; None: no limit.
        estimates: by stage.
        least: as in `certain_shortfall`; stands for a stage without history.
    """
    if limit is None:
        return None
    probable = sum(e.tokens or 0 if e.history else least.get(name, 0) for name, e in estimates.items())
    most = sum(e.tokens or 0 for e in estimates.values())
    if probable > limit:
        enough = _rounded_up(max(probable, most))
        return Concern(
            f"budget.tokens is {limit}, and by earlier stages the run takes about {_short(probable)}: it would stop at"
            " its budget",
            f"raise budget.tokens to {enough} or lower steps",
            likely=True,
        )
    if most > limit:
        return Concern(
            f"budget.tokens is {limit}, and the run may take up to about {_short(most)}: if it does, it stops at its "
            "budget and goes on when that is raised",
            f"raise budget.tokens to {_rounded_up(most)}, or leave it",
            likely=False,
        )
    return None


def time_concern(limit: float | None, seconds: Sequence[float | None]) -> Concern | None:
    """Whether the run will probably need more job time than was declared, by what earlier stages took.

    Args:
        limit: declared seconds; None: no limit.
        seconds: of each stage; None: not known.
    """
    known = sum(one for one in seconds if one is not None)
    if limit is None or known <= limit:
        return None
    more = " and more" if None in seconds else ""
    minutes = math.ceil(1.2 * known / 60)
    return Concern(
        f"budget.wall_clock is {limit:g} s, and by earlier stages the run takes about {known:.0f} s{more}: it would "
        "stop at its budget",
        f"raise budget.wall_clock to {minutes}m or lower steps",
        likely=True,
    )


def _rounded_up(tokens: float) -> str:
    """Two digits and never less: what is advised is enough."""
    power = max(0, math.floor(math.log10(tokens)) - 1)
    return _short(math.ceil(tokens / 10**power) * 10**power)


def _short(tokens: float) -> str:
    """`8200`, `4.5e6`: as it may be written into run.yaml."""
    return f"{tokens:.1e}".replace("e+0", "e").replace("e+", "e") if tokens >= 1e5 else f"{tokens:.0f}"
