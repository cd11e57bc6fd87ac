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

from sqlalchemy import Connection, Row, Text, func, insert, select, type_coerce, update

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
    for row in connection.execute(pending).all():
        sequence += 1
        place = {"sequence": sequence, "previous_hash": previous}
        previous = event_hash({**row._mapping, **place})
        connection.execute(update(events).where(events.c.id == row.id).values(hash=previous, **place))
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
    query = select(*(c for c in events.c if c.name != "payload"), type_coerce(events.c.payload, Text).label("payload"))
    query = query.where(events.c.sequence.is_not(None)).order_by(events.c.sequence)
    sequence, previous = 0, GENESIS
    with ledger.database.read() as connection:
        for row in connection.execute(query.execution_options(yield_per=_BATCH)):
            sequence += 1
            _check(row, sequence, previous)
            previous = str(row.hash)
        head, head_hash = _head(connection)
        unsealed = select(func.count()).select_from(events).where(events.c.sequence.is_(None))
        pending = int(connection.execute(unsealed).scalar_one())
    if (head, head_hash) != (sequence, previous):
        raise _broken(min(sequence, head) + 1, f"the chain ends at {sequence}, its head says {head}")
    return ChainReport(sealed=sequence, head=previous, pending=pending)


def _check(row: Row[*tuple[Any, ...]], sequence: int, previous: str) -> None:
    if row.sequence != sequence:
        raise _broken(sequence, f"the next event there is has sequence {row.sequence}")
    if row.previous_hash != previous:
        raise _broken(sequence, "it does not name the event before it")
    try:
        found = event_hash({**row._mapping, "payload": json.loads(row.payload)})
    except (ValueError, InputError) as error:
        raise _broken(sequence, "its payload cannot be read") from error
    if found != row.hash:
        raise _broken(sequence, "its fields do not match its hash")


def _broken(sequence: int, what: str) -> IntegrityError:
    return IntegrityError(f"event log is broken at sequence {sequence}: {what}; restore the ledger from a copy")
