"""Where everything stands that was asked for: reads only, and loads nothing that judges."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.control.approvals import standing
from posttrain.control.channels import policy_of
from posttrain.control.stores import Stores
from posttrain.domain.approvals import ApprovalRequest, Standing
from posttrain.domain.errors import IntegrityError
from posttrain.store.snapshot import Snapshot


def standings(stores: Stores, *, channel: str | None = None, run_id: str | None = None) -> tuple[Standing, ...]:
    """Where everything stands that was asked for on a channel, or for a run, oldest first."""
    with stores.ledger.snapshot() as now:
        return tuple(_each(stores, now, now.approval_requests(channel, run_id)))


def _each(stores: Stores, now: Snapshot, requests: list[ApprovalRequest]) -> Iterator[Standing]:
    for request in requests:
        try:
            asked = request.asked["policy"]
            pinned = policy_of(stores, request.channel, asked) if asked else None
        except IntegrityError:  # a document of before that is gone: whoever asks for the channel's own is told
            continue
        found = standing(now, request, pinned)
        if found is not None:
            yield found
