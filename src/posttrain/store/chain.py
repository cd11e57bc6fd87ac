"""The event log of ledgers of schema 0001: verified by its own rule, and sealed for the last time when upgraded.

`hash = sha256(RFC 8785 JSON of {previous_hash, sequence, kind, subject, actor, at, payload})`, and the row `chain_head`
holds the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, MetaData, Text, bindparam, func, insert, select, type_coerce, update

from posttrain.domain.canonical import DIGEST_PREFIX, digest_json
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.store.schema import chain_head, events_before

GENESIS = DIGEST_PREFIX + "0" * 64  # previous_hash of event 1
_FIELDS = ("sequence", "previous_hash", "kind", "subject", "actor", "at", "payload")
_BATCH = 1000
_TO_COME = events_before.to_metadata(MetaData(), name="events")  # where they are before the upgrade


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain that holds."""

    events: int
    head: str  # hash of the last event


def event_hash(fields: Mapping[str, Any]) -> str:
    """`sha256:…` of an event's sealed fields (`sequence, previous_hash, kind, subject, actor, at, payload`)."""
    return digest_json({name: fields[name] for name in _FIELDS})


def seal_before(connection: Connection) -> None:
    """Number and chain what was committed and not sealed, once, when the ledger is about to be upgraded."""
    found = connection.execute(select(chain_head.c.sequence, chain_head.c.hash)).one_or_none()
    sequence, previous = (0, GENESIS) if found is None else (int(found.sequence), str(found.hash))
    pending = select(_TO_COME).where(_TO_COME.c.sequence.is_(None)).order_by(_TO_COME.c.id)
    placed: list[dict[str, Any]] = []
    for row in connection.execute(pending).all():
        sequence += 1
        place = {"sequence": sequence, "previous_hash": previous}
        previous = event_hash({**row._mapping, **place})
        placed.append({"row": row.id, "hash": previous, **place})
    if placed:
        connection.execute(update(_TO_COME).where(_TO_COME.c.id == bindparam("row")), placed)
        if connection.execute(update(chain_head).values(sequence=sequence, hash=previous)).rowcount == 0:
            connection.execute(insert(chain_head).values(id=1, sequence=sequence, hash=previous))


def verify_before(connection: Connection, *, upgraded: bool = True) -> Chain:
    """Recompute the chain; an empty one where the ledger was made later.

    Args:
        upgraded: the old events are in the table that the upgrade put them in.

    Raises:
        IntegrityError: an event was changed, moved, removed or cut off; names the first bad sequence.
    """
    table = events_before if upgraded else _TO_COME
    columns = [table.c[name] for name in _FIELDS if name != "payload"]
    names = [column.name for column in columns]
    query = select(type_coerce(table.c.payload, Text), table.c.hash, *columns)
    query = query.where(table.c.sequence.is_not(None)).order_by(table.c.sequence)
    sequence, previous = 0, GENESIS
    for text, written, *values in connection.execute(query.execution_options(yield_per=_BATCH)):
        sequence += 1
        _check(dict(zip(names, values, strict=True)), text, written, sequence, previous)
        previous = str(written)
    head = connection.execute(select(chain_head.c.sequence, chain_head.c.hash)).one_or_none()
    ends = (0, GENESIS) if head is None else (int(head.sequence), str(head.hash))
    loose = select(func.count()).select_from(table).where(table.c.sequence.is_(None))
    if ends != (sequence, previous) or connection.execute(loose).scalar_one():
        raise _broken(min(sequence, ends[0]) + 1, f"the chain ends at {sequence}, its head says {ends[0]}")
    return Chain(sequence, previous)


def _check(fields: Mapping[str, Any], payload: str, written: str, sequence: int, previous: str) -> None:
    if fields["sequence"] != sequence:
        raise _broken(sequence, f"the next event there is has sequence {fields['sequence']}")
    if fields["previous_hash"] != previous:
        raise _broken(sequence, "it does not name the event before it")
    try:
        found = event_hash({**fields, "payload": json.loads(payload)})
    except (ValueError, InputError, RecursionError) as error:
        raise _broken(sequence, "its payload cannot be read") from error
    if found != written:
        raise _broken(sequence, "its fields do not match its hash")


def _broken(sequence: int, what: str) -> IntegrityError:
    return IntegrityError(
        f"event log of before the upgrade is broken at sequence {sequence}: {what}; restore the ledger from a copy"
    )
