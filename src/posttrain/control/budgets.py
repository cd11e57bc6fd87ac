"""What a run has spent of its budget, and what the next attempt may still spend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, StageRecord


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens and job seconds spent so far. Work that was lost and redone counts twice: it was paid twice."""

    tokens: int
    seconds: float


def spending(stages: Sequence[StageRecord], attempts: Sequence[AttemptRecord], now: float) -> Spending:
    """Sum over a run. A cached stage costs nothing, and neither does the time in which nobody noticed a job's end."""
    tokens = sum(stage.tokens for stage in stages)
    return Spending(tokens, sum(_seconds(attempt, now) for attempt in attempts))


def _seconds(attempt: AttemptRecord, now: float) -> float:
    if attempt.finished_at is not None:
        return attempt.seconds
    return max(0.0, now - attempt.launched_at) if attempt.launched_at is not None else 0.0


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


def deadline(manifest: Manifest, spent: Spending, now: float) -> float | None:
    """When the next attempt must have ended (seconds since the epoch); None: no wall-clock budget."""
    if manifest.budget.wall_clock is None:
        return None
    return now + manifest.budget.wall_clock - spent.seconds


def exhausted(manifest: Manifest, spent: Spending) -> str | None:
    """One sentence when a limit is reached, else None."""
    budget = manifest.budget
    if budget.tokens is not None and spent.tokens >= budget.tokens:
        return f"token budget spent: {spent.tokens} of {budget.tokens} tokens; raise budget.tokens and submit again"
    if budget.wall_clock is not None and spent.seconds >= budget.wall_clock:
        used = f"{spent.seconds:.0f} of {budget.wall_clock:.0f} s"
        return f"wall-clock budget spent: {used}; raise budget.wall_clock and submit again"
    return None
