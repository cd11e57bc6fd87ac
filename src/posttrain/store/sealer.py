"""The sealer: gives committed events their place in the hash chain.

Writers append events without a number, so nothing serialises them; afterwards one sealer at a time numbers what is
committed, without gaps, and chains it: `hash = sha256(RFC 8785 JSON of {previous_hash, sequence, kind, subject,
actor, at, payload})`. The row `chain_head` is both the lock (whoever seals holds it for the length of its
transaction) and the proof of the tail: without it, cutting off the last events would leave a valid, shorter chain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Text, bindparam, func, insert, select, type_coerce, update

from posttrain.domain.canonical import DIGEST_PREFIX, digest_json
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.store.ledger import Ledger
from posttrain.store.schema import chain_head, events

GENESIS = DIGEST_PREFIX + "0" * 64  # previous_hash of event 1
_BATCH = 1000
_SEALED_FIELDS = ("sequence", "previous_hash", "kind", "subject", "actor", "at", "payload")


@dataclass(frozen=True, slots=True)
class ChainReport:
    """A chain that holds: `sealed` events up to `head`, and `pending` ones that the sealer has not passed yet."""

    sealed: int
    head: str  # hash of the last sealed event
    pending: int


def event_hash(fields: Mapping[str, Any]) -> str:
    """`sha256:…` of an event's sealed fields (`sequence, previous_hash, kind, subject, actor, at, payload`)."""
    return digest_json({name: fields[name] for name in _SEALED_FIELDS})


def seal(ledger: Ledger) -> int:
    """Seal everything committed so far; how many events that were. Safe to call from anywhere, at any time."""
    total = 0
    while any(ledger.pending_events(limit=1)):
        with ledger.database.write() as connection:
            total += _seal_batch(connection)
            crashpoint("sealer.before_commit")
    return total


def _seal_batch(connection: Connection) -> int:
    sequence, previous = _head(connection, lock=True)
    started = sequence
    pending = select(events).where(events.c.sequence.is_(None)).order_by(events.c.id).limit(_BATCH)
    placed: list[dict[str, Any]] = []
    for row in connection.execute(pending).all():
        sequence += 1
        place = {"sequence": sequence, "previous_hash": previous}
        previous = event_hash({**row._mapping, **place})
        placed.append({"row": row.id, "hash": previous, **place})
    if placed:
        connection.execute(update(events).where(events.c.id == bindparam("row")), placed)
    if connection.execute(update(chain_head).values(sequence=sequence, hash=previous)).rowcount == 0:
        connection.execute(insert(chain_head).values(id=1, sequence=sequence, hash=previous))
    return sequence - started


def _head(connection: Connection, lock: bool = False) -> tuple[int, str]:
    query = select(chain_head.c.sequence, chain_head.c.hash)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return (0, GENESIS) if row is None else (int(row.sequence), str(row.hash))


def verify_chain(ledger: Ledger) -> ChainReport:
    """Recompute the whole chain.

    Raises:
        IntegrityError: an event was changed, moved, removed or cut off; names the first bad sequence.
    """
    columns = [events.c[name] for name in _SEALED_FIELDS if name != "payload"]
    payload = type_coerce(events.c.payload, Text)
    query = select(payload, events.c.hash, *columns).where(events.c.sequence.is_not(None)).order_by(events.c.sequence)
    names = [column.name for column in columns]
    sequence, previous = 0, GENESIS
    with ledger.database.read() as connection:
        for text, written, *values in connection.execute(query.execution_options(yield_per=_BATCH)):
            sequence += 1
            _check(dict(zip(names, values, strict=True)), text, written, sequence, previous)
            previous = str(written)
        head, head_hash = _head(connection)
        unsealed = select(func.count()).select_from(events).where(events.c.sequence.is_(None))
        pending = int(connection.execute(unsealed).scalar_one())
    if (head, head_hash) != (sequence, previous):
        raise _broken(min(sequence, head) + 1, f"the chain ends at {sequence}, its head says {head}")
    return ChainReport(sealed=sequence, head=previous, pending=pending)


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
    return IntegrityError(f"event log is broken at sequence {sequence}: {what}; restore the ledger from a copy")
