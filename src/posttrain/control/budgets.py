"""A run's budget: the spending so far, and the share of the next attempt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.domain.lifecycle import is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, StageRecord

_ROUNDING = 0.001  # seconds
WARNED = 0.8  # fraction of a limit at which an event is recorded


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens and job seconds spent so far. Work that was lost and redone counts twice."""

    tokens: int
    seconds: float


def spending(
    stages: Sequence[StageRecord], attempts: Sequence[AttemptRecord], *, running: float = 0.0, taken_over: int = 0
) -> Spending:
    """Return the spending of a run. Cached stages, time in a queue and the delay in detecting a job's end are free.

    Args:
        running: seconds that live attempts have run so far.
        taken_over: tokens in the checkpoints of other runs that this run resumed; the budget includes work that other
            runs started.
    """
    return Spending(
        sum(stage.tokens for stage in stages) + taken_over, sum(attempt.seconds for attempt in attempts) + running
    )


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a run's budget that one attempt may spend; a field is None if the run has no such limit."""

    tokens: int | None = None
    seconds: float | None = None

    @property
    def empty(self) -> bool:
        """Whether a limit is used up."""
        return any(limit is not None and limit <= 0 for limit in (self.tokens, self.seconds))


def limited(manifest: Manifest) -> bool:
    """Return whether a run has a budget, of which its attempts reserve shares."""
    return manifest.budget.tokens is not None or manifest.budget.wall_clock is not None


def living(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Return the attempts that have not ended; no other attempt can use what they have reserved."""
    return [attempt for attempt in attempts if not is_final("attempt", attempt.state)]


def left(manifest: Manifest, spent: Spending, others: Sequence[AttemptRecord]) -> Share:
    """Return the part of the budget that is neither spent nor reserved by these attempts.

    An attempt planned by an older version, without a reservation, reserves everything.
    """
    tokens, seconds = manifest.budget.tokens, manifest.budget.wall_clock
    if tokens is not None:
        tokens -= spent.tokens + sum(tokens if one.reserved_tokens is None else one.reserved_tokens for one in others)
    if seconds is not None:
        held = (seconds if one.reserved_seconds is None else one.reserved_seconds for one in others)
        seconds -= spent.seconds + sum(held)
    return Share(tokens, seconds)


def divided(whole: Share, by: int) -> Share:
    """Return an equal part of a share, at least 0."""
    tokens = None if whole.tokens is None else max(0, whole.tokens // by)
    return Share(tokens, None if whole.seconds is None else max(0.0, whole.seconds / by))


def share_of(manifest: Manifest, attempt: AttemptRecord, spent: Spending) -> Share:
    """Return an attempt's reservation; for an attempt planned by an older version, the rest of the budget.

    Args:
        spent: the spending of attempts that have ended.
    """
    whole = left(manifest, spent, ())
    tokens = whole.tokens if attempt.reserved_tokens is None else attempt.reserved_tokens
    return Share(tokens, whole.seconds if attempt.reserved_seconds is None else attempt.reserved_seconds)


def overdrawn(share: Share, tokens: int, seconds: float) -> str | None:
    """Return a message if a live attempt exceeds its share, else None.

    Args:
        tokens: tokens that the attempt reported for itself; a job that respects its limit never reports more than its
            share.
        seconds: the run time of the attempt.
    """
    if share.tokens is not None and tokens > share.tokens:
        said = f"{tokens} of {share.tokens} tokens that its attempt reserved"
        return f"token budget spent: {said}; raise budget.tokens and submit again"
    if share.seconds is not None and seconds >= share.seconds:
        said = f"{seconds:.0f} of {share.seconds:.0f} s that its attempt reserved"
        return f"wall-clock budget spent: {said}; raise budget.wall_clock and submit again"
    return None


def can_have_more(
    manifest: Manifest,
    stages: Sequence[StageRecord],
    attempts: Sequence[AttemptRecord],
    ended: AttemptRecord,
    own: Spending,
) -> bool:
    """Return whether an attempt that ended because it used up its share would get a larger share.

    Args:
        own: the attempt's own spending.
    """
    share = Share(ended.reserved_tokens, ended.reserved_seconds)
    if not limited(manifest) or share == Share() or overdrawn(share, own.tokens, 0.0):
        return False
    before = spending(stages, attempts, taken_over=taken_over(attempts))
    rest = left(manifest, replace(before, tokens=before.tokens + own.tokens, seconds=before.seconds + own.seconds), ())
    tokens, seconds = (share.tokens or 0) - own.tokens, (share.seconds or 0.0) - own.seconds
    more = (rest.tokens or 0) > tokens or (rest.seconds or 0.0) > max(0.0, seconds) + _ROUNDING
    return more and not rest.empty


def taken_over(attempts: Sequence[AttemptRecord]) -> int:
    """Return the tokens in checkpoints that a run's stages resumed from other runs; one per stage, the largest."""
    most: dict[str, int] = {}
    for one in attempts:
        if one.resumed_from not in (None, f"{one.run_id}/{one.stage}"):
            most[one.stage] = max(most.get(one.stage, 0), one.resumed_tokens or 0)
    return sum(most.values())


def declared(manifest: Manifest) -> str:
    """Return the limits as in the run file: `tokens: 5000000, wall_clock: 1800 s`."""
    budget = manifest.budget
    tokens = [f"tokens: {budget.tokens}"] if budget.tokens is not None else []
    return ", ".join([*tokens, *([f"wall_clock: {budget.wall_clock:g} s"] if budget.wall_clock is not None else [])])


def exhausted(manifest: Manifest, spent: Spending) -> str | None:
    """Return a message if a limit is reached, else None."""
    budget = manifest.budget
    if budget.tokens is not None and spent.tokens >= budget.tokens:
        return f"token budget spent: {spent.tokens} of {budget.tokens} tokens; raise budget.tokens and submit again"
    if budget.wall_clock is not None and spent.seconds >= budget.wall_clock:
        used = f"{spent.seconds:.0f} of {budget.wall_clock:.0f} s"
        return f"wall-clock budget spent: {used}; raise budget.wall_clock and submit again"
    return None


def warning(manifest: Manifest, before: Spending, after: Spending) -> dict[str, Any] | None:
    """Return the values of a warning, once per run, if the spending crosses the share `WARNED` of a limit; else None.

    Args:
        before: spending before an attempt is billed.
        after: spending including the attempt.
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
