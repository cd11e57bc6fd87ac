"""What was recalled, and what was made from it: no run begins with that, and no channel is pointed at it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from posttrain.control.wiring import Wiring
from posttrain.domain.errors import InputError, RecalledError
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import Asset, AssetStatus
from posttrain.store.snapshot import Snapshot

APPROVED, RECALLED = "approved", "recalled"


def set_status(wiring: Wiring, asset: Asset, status: str, reason: str = "") -> AssetStatus | None:
    """Say what is thought of a version. Saying the same again changes nothing.

    Args:
        status: `approved`, `recalled`, or empty, which takes back what was said.

    Returns:
        What holds now; None: nothing was ever said of it.

    Raises:
        ConflictError: somebody says something of it at this very moment.
    """
    with wiring.ledger.transaction(wiring.actor) as transaction:
        known = [said for said, _ in transaction.snapshot.asset_status() if _of(said) == _of(asset)]
        if (known[0].status if known else "") == status and not (reason and status and known[0].reason != reason):
            return known[0] if known else None
        return transaction.set_asset_status(asset, status, reason)


def recalled(wiring: Wiring, digests: Collection[str]) -> dict[str, AssetStatus]:
    """Of these bytes, those that were recalled or made from something recalled, with what was said of that."""
    with wiring.ledger.snapshot() as now:
        return _recalled(now, digests)


def _recalled(now: Snapshot, digests: Collection[str]) -> dict[str, AssetStatus]:
    barred = {digest: said for said, digest in reversed(now.asset_status(RECALLED))}
    return {digest: said for digest, said in _spread(now, barred) if digest in digests} if barred else {}


def refuse_recalled(wiring: Wiring, manifest: Manifest, source: str) -> None:
    """Refuse to begin a run with what was recalled.

    Raises:
        InputError: naming stage, slot and what was said.
    """
    used = {
        str(ref.digest): (stage.name, slot, ref.name)
        for stage in manifest.stages
        for slot, ref in stage.inputs.items()
        if ref.digest
    }
    for digest, said in sorted(recalled(wiring, used).items()):
        stage, slot, name = used[digest]
        raise InputError(
            f"{source}: stages.{stage}.{slot}: {name} {_how(said, name)}; use another version, or posttrain asset "
            f"restore {_of(said)}"
        )


def refuse_release(now: Snapshot, channel: str, model: str) -> None:
    """Refuse to point a channel at a model that was recalled, or made from something recalled.

    Args:
        now: of the transaction that would point it there.

    Raises:
        RecalledError: it was.
    """
    for said in _recalled(now, [model]).values():
        raise RecalledError(
            f"channel {channel}: {model[:19]}… {_how(said, '')}; train it again from another version, or posttrain "
            f"asset restore {_of(said)}"
        )


def _spread(now: Snapshot, barred: dict[str, AssetStatus]) -> Iterator[tuple[str, AssetStatus]]:
    """The recalled bytes and all that was made from them, all of one distance at a time."""
    yield from barred.items()
    by: dict[str, AssetStatus] = {}  # consumer → why
    found = [(edge.consumer, barred[edge.digest]) for edge in now.uses_of_bytes(*barred)]
    while found:
        new = {end: said for end, said in reversed(found) if end not in by}
        by |= new
        yield from ((edge.digest, new[edge.producer]) for edge in now.made(*new))
        found = [(edge.consumer, new[edge.producer]) for edge in now.uses(*new)]


def _of(one: Asset | AssetStatus) -> str:
    return f"{one.kind}:{one.name}@{one.version}"


def _how(said: AssetStatus, name: str) -> str:
    return f"was {said.words}" if _of(said) == name else f"comes from {_of(said)}, {said.words}"
