"""What a run has spent of its budget, and what the next attempt may still spend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.domain.lifecycle import is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, StageRecord

_ROUNDING = 0.001  # seconds
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
    return Spending(
        sum(stage.tokens for stage in stages) + taken_over, sum(attempt.seconds for attempt in attempts) + running
    )


@dataclass(frozen=True, slots=True)
class Share:
    """What one attempt may spend of its run's budget; None: there is no such limit."""

    tokens: int | None = None
    seconds: float | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is left of a limit."""
        return any(limit is not None and limit <= 0 for limit in (self.tokens, self.seconds))


def limited(manifest: Manifest) -> bool:
    """Whether a run's attempts reserve what they may spend."""
    return manifest.budget.tokens is not None or manifest.budget.wall_clock is not None


def living(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Those that have not ended: what they reserve is nobody else's."""
    return [attempt for attempt in attempts if not is_final("attempt", attempt.state)]


def left(manifest: Manifest, spent: Spending, others: Sequence[AttemptRecord]) -> Share:
    """What of the budget is neither spent nor reserved by these attempts.

    An attempt that a release without reservations planned has all of it.
    """
    tokens, seconds = manifest.budget.tokens, manifest.budget.wall_clock
    if tokens is not None:
        tokens -= spent.tokens + sum(tokens if one.reserved_tokens is None else one.reserved_tokens for one in others)
    if seconds is not None:
        held = (seconds if one.reserved_seconds is None else one.reserved_seconds for one in others)
        seconds -= spent.seconds + sum(held)
    return Share(tokens, seconds)


def divided(whole: Share, by: int) -> Share:
    """An equal part of it, never less than nothing."""
    tokens = None if whole.tokens is None else max(0, whole.tokens // by)
    return Share(tokens, None if whole.seconds is None else max(0.0, whole.seconds / by))


def share_of(manifest: Manifest, attempt: AttemptRecord, spent: Spending) -> Share:
    """What an attempt reserved; of one that a release before planned, all that is left.

    Args:
        spent: by attempts that have ended.
    """
    whole = left(manifest, spent, ())
    tokens = whole.tokens if attempt.reserved_tokens is None else attempt.reserved_tokens
    return Share(tokens, whole.seconds if attempt.reserved_seconds is None else attempt.reserved_seconds)


def overdrawn(share: Share, tokens: int, seconds: float) -> str | None:
    """One sentence where a live attempt has spent more than it may, else None.

    Args:
        tokens: that it reports to have spent itself; a job that keeps to its limit never reports more.
        seconds: that it ran.
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
    """Whether an attempt that kept to its share, and ended for it, would get a larger one.

    Args:
        own: what the attempt itself spent.
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
    """Tokens that a run's stages got with checkpoints of other runs; of several a stage took, those in the largest."""
    most: dict[str, int] = {}
    for one in attempts:
        if one.resumed_from not in (None, f"{one.run_id}/{one.stage}"):
            most[one.stage] = max(most.get(one.stage, 0), one.resumed_tokens or 0)
    return sum(most.values())


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
