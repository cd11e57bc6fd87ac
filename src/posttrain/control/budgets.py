"""What a run has spent of its budget, and what the next attempt may still spend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, StageRecord

WARNED = 0.8  # of a limit: an event tells of it


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens and job seconds spent so far. Work that was lost and redone counts twice: it was paid twice."""

    tokens: int
    seconds: float


def spending(
    stages: Sequence[StageRecord], attempts: Sequence[AttemptRecord], *, running: float = 0.0, taken_over: int = 0
) -> Spending:
    """Sum over a run. A cached stage costs nothing; neither do a queue and the time before a job's end was noticed.

    Args:
        running: seconds that attempts which have not ended ran so far.
        taken_over: tokens in the checkpoints of other runs that this one went on from: its budget is for all of the
            work, whoever began it.
    """
    tokens = sum(stage.tokens for stage in stages)
    return Spending(tokens + taken_over, sum(attempt.seconds for attempt in attempts) + running)


def one_at_a_time(manifest: Manifest) -> bool:
    """Whether stages may not run side by side: each would be handed all that is left of a limit."""
    return manifest.budget.tokens is not None or manifest.budget.wall_clock is not None


def token_allowance(manifest: Manifest, spent: Spending, inherited: int) -> int | None:
    """The most tokens the next attempt's lineage may have spent when it ends; None: no token budget.

    Args:
        inherited: tokens already counted in the checkpoint it resumes from.
    """
    if manifest.budget.tokens is None:
        return None
    return manifest.budget.tokens - spent.tokens + inherited


def seconds_allowance(manifest: Manifest, spent: Spending) -> float | None:
    """How long the next attempt may run; None: no wall-clock budget."""
    if manifest.budget.wall_clock is None:
        return None
    return manifest.budget.wall_clock - spent.seconds


def declared(manifest: Manifest) -> str:
    """`tokens: 5000000, wall_clock: 1800 s`: the limits as the run file has them."""
    budget = manifest.budget
    tokens = [f"tokens: {budget.tokens}"] if budget.tokens is not None else []
    return ", ".join([*tokens, *([f"wall_clock: {budget.wall_clock:g} s"] if budget.wall_clock is not None else [])])


def exhausted(manifest: Manifest, spent: Spending) -> str | None:
    """One sentence when a limit is reached, else None."""
    budget = manifest.budget
    if budget.tokens is not None and spent.tokens >= budget.tokens:
        return f"token budget spent: {spent.tokens} of {budget.tokens} tokens; raise budget.tokens and submit again"
    if budget.wall_clock is not None and spent.seconds >= budget.wall_clock:
        used = f"{spent.seconds:.0f} of {budget.wall_clock:.0f} s"
        return f"wall-clock budget spent: {used}; raise budget.wall_clock and submit again"
    return None


def warning(manifest: Manifest, before: Spending, after: Spending) -> dict[str, Any] | None:
    """What to tell where spending passes `WARNED` of a limit, once in a run; else None.

    Args:
        before: what was spent before an attempt was billed.
        after: and with it.
    """
    limits = {"tokens": manifest.budget.tokens, "seconds": manifest.budget.wall_clock}
    known = {name: limit for name, limit in limits.items() if limit}

    def share(spent: Spending) -> float:
        return max((getattr(spent, name) / limit for name, limit in known.items()), default=0.0)

    if not share(before) < WARNED <= share(after):
        return None
    facts: dict[str, Any] = {"share": round(share(after), 4)}
    for name, limit in known.items():
        facts |= {name: getattr(after, name), f"of_{name}": limit}
    return facts
