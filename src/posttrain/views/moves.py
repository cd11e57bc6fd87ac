"""The moves of a channel, the newest first: what became of each, who requested it, why, and who approved it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain.decision.releases import moves as moving
from posttrain.domain.approvals import APPROVED
from posttrain.domain.errors import InputError
from posttrain.domain.ids import DRIVER
from posttrain.domain.lifecycle import ReleaseState
from posttrain.domain.records import ReleaseEntry
from posttrain.store.hosts import Ledger
from posttrain.store.snapshot import Snapshot

_DIGITS = 18  # of the number of a release, at most
_KINDS = ("channel.promote", "channel.rollback")


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a channel. Exactly one, the last, is live, however often its model was before."""

    entry: ReleaseEntry
    state: ReleaseState  # of this move, not of its model
    why: str = ""
    approved_by: tuple[str, ...] = ()  # where it needed approvals

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self.entry), "state": self.state, "why": self.why, "approved_by": list(self.approved_by)}


def moves(ledger: Ledger, name: str, limit: int | None = None, before: str | None = None) -> list[Move]:
    """The newest `limit` moves.

    Args:
        before: the number of a release: only those that are older.

    Raises:
        InputError: `before` is no number.
    """
    if before is not None and not (before.isdecimal() and len(before) <= _DIGITS):
        raise InputError(f"channel {name}: before must be the number of a release, got {before[:80]!r}")
    with ledger.snapshot() as now:
        history = moving(now.history(name))
        events = [event for kind in _KINDS for event in now.events_about(name, kind)]
        told = {event.payload.get("sequence"): event.payload for event in events}
        ended = {"rollback": ReleaseState.ROLLED_BACK}  # by the action of the move that followed
        states = [ended.get(follower.action, ReleaseState.SUPERSEDED) for follower in history[1:]]
        states += [ReleaseState.LIVE] * bool(history)
        moved = zip(history, states, strict=True)
        rows = [(one, state) for one, state in moved if before is None or one.sequence < int(before)]
        return [
            Move(_requested(now, one), state, str(said.get("why") or ""), _approvers(now, said.get("approved")))
            for one, state in rows[::-1][:limit]
            for said in [told.get(one.sequence, {})]
        ]


def _requested(now: Snapshot, one: ReleaseEntry) -> ReleaseEntry:
    """A release with who asked for it: entries of older versions name the account of the server's driver."""
    if one.actor != DRIVER or one.run_id is None:
        return one
    return replace(one, actor=now.known_submitter(one.run_id) or one.actor)


def _approvers(now: Snapshot, request: Any) -> tuple[str, ...]:
    if not request:
        return ()
    last = {said.actor: said.verdict for said in now.approvals(str(request))}
    return tuple(sorted(actor for actor, verdict in last.items() if verdict == APPROVED))
