"""What was recalled, and what was made from it: no run begins with that, and no channel is pointed at it.

A recall is of bytes. Below them is what a stage made that used them, then whatever used those bytes, under any name.
What was only compared with them or measured on them is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from posttrain.control.stores import Stores
from posttrain.domain.errors import ConflictError, InputError, RecalledError
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import Asset, AssetStatus
from posttrain.store.ledger import Ledger
from posttrain.store.snapshot import Snapshot

APPROVED, RECALLED = "approved", "recalled"


def set_status(stores: Stores, asset: Asset, status: str, reason: str = "") -> AssetStatus | None:
    """Say what is thought of a version. Saying the same again changes nothing.

    Args:
        status: `approved`, `recalled`, or empty, which takes back what was said.

    Returns:
        What holds now; None: nothing was ever said of it.

    Raises:
        ConflictError: it is recalled, and would be approved; somebody says something of it at this very moment.
    """
    with stores.ledger.transaction(stores.actor) as transaction:
        transaction.lock_recalls(exclusive=True)
        known = next((said for said, _ in transaction.snapshot.asset_status() if _of(said) == _of(asset)), None)
        before = known.status if known else ""
        if (before, status) == (RECALLED, APPROVED):
            raise ConflictError(f"{_of(asset)}: is {known and known.words}; posttrain asset restore {_of(asset)} first")
        if before == status and not (reason and known and known.reason != reason):
            return known
        return transaction.set_asset_status(asset, status, reason)


def recalled(ledger: Ledger, digests: Collection[str]) -> dict[str, AssetStatus]:
    """Of these bytes, those that were recalled or made from something recalled, with what was said of that."""
    with ledger.snapshot() as now:
        return _recalled(now, digests)


def recall_of(now: Snapshot, manifest: Manifest) -> str:
    """Which input of a manifest was recalled, or made from something recalled, and what to do; empty: none."""
    used = {
        str(ref.digest): (stage.name, slot, ref.name)
        for stage in manifest.stages
        for slot, ref in stage.inputs.items()
        if ref.digest
    }
    for digest, said in sorted(_recalled(now, used).items()):
        stage, slot, name = used[digest]
        return (
            f"stages.{stage}.{slot}: {name} {_how(now, said, digest, name)}; use another version, or posttrain asset "
            f"restore {_of(said)}"
        )
    return ""


def refuse_recalled(now: Snapshot, manifest: Manifest, source: str) -> None:
    """Refuse to begin a run with what was recalled.

    Args:
        now: of the transaction that would begin it, so that no recall comes between.

    Raises:
        InputError: naming stage, slot and what was said.
    """
    found = recall_of(now, manifest)
    if found:
        raise InputError(f"{source}: {found}")


def refuse_release(now: Snapshot, channel: str, model: str) -> None:
    """Refuse to point a channel at a model that was recalled, or made from something recalled.

    Args:
        now: of the transaction that would point it there.

    Raises:
        RecalledError: it was.
    """
    for digest, said in _recalled(now, [model]).items():
        raise RecalledError(
            f"channel {channel}: {model[:19]}… {_how(now, said, digest, '')}; train it again from another version, or "
            f"posttrain asset restore {_of(said)}"
        )


def _recalled(now: Snapshot, digests: Collection[str]) -> dict[str, AssetStatus]:
    barred = {digest: said for said, digest in reversed(now.asset_status(RECALLED))}
    return {digest: said for digest, said in _below(now, barred) if digest in digests} if barred else {}


def _below(now: Snapshot, barred: Mapping[str, AssetStatus]) -> Iterator[tuple[str, AssetStatus]]:
    """The recalled bytes and what stages made of them, all of one distance at a time.

    Reports and tables of metrics are among it, and end there: no model is made from one.
    """
    found, new = dict(barred), dict(barred)
    while new:
        yield from new.items()
        by: dict[str, AssetStatus] = {}  # who used them → why
        for edge in now.uses_of_bytes(*new):
            by.setdefault(edge.consumer, new[edge.digest])
        new = {}
        for edge in now.made(*by):
            if edge.digest not in found:
                new[edge.digest] = found[edge.digest] = by[edge.producer]


def _of(one: Asset | AssetStatus) -> str:
    return f"{one.kind}:{one.name}@{one.version}"


def _how(now: Snapshot, said: AssetStatus, digest: str, name: str) -> str:
    if _of(said) == name:
        return f"was {said.words}"
    same = now.asset(said.kind, said.name, said.version).digest == digest
    return f"{'has the bytes of' if same else 'comes from'} {_of(said)}, {said.words}"
