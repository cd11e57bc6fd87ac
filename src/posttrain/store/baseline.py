"""The first events of a log: what the rows hold when a ledger is made or upgraded.

Without them, rows of before an upgrade would be told by no event that can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, insert, select

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.ports import Clock
from posttrain.domain.principals import DRIVER
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.audited import ADDED, TABLES, Audited, Change
from posttrain.store.chain import GENESIS, Chain
from posttrain.store.envelopes import CREATED, UPGRADED
from posttrain.store.journal import Author, Entropy, Journal, new_request
from posttrain.store.schema import events_before, principals

_NONE = Chain(0, GENESIS)
_BOUND = select(events_before.c.subject, events_before.c.payload).where(events_before.c.kind == "workspace.bound")
_ROWS = 200  # of one event


def tell_rows(
    connection: Connection, clock: Clock, entropy: Entropy, came_from: str | None = None, chain: Chain = _NONE
) -> None:
    """Tell every row that there is, in a log that holds nothing yet.

    Args:
        came_from: schema of before; None: the ledger was made a moment ago.
        chain: of the events of before, which the first event names.

    Raises:
        IntegrityError: a row cannot be read.
    """
    actor = connection.execute(select(principals.c.id).where(principals.c.name == DRIVER)).scalar()
    if actor is None:
        actor = entropy(8).hex()
        columns = {"id": actor, "kind": "service", "name": DRIVER, "created_at": clock.now()}
        connection.execute(insert(principals).values(**columns))
    author = Author(DRIVER, new_request(entropy), entropy=entropy, known={DRIVER: actor})
    journal = Journal(connection, author, clock, DEFAULT_PROJECT)
    facts: dict[str, Any] = {"chain": {"events": chain.events, "head": chain.head}} if chain.events else {}
    journal.tell(UPGRADED if came_from else CREATED, "ledger", facts={**facts, "from": came_from})
    for name, spec in TABLES.items():
        try:
            for changes in _changes(connection, spec):
                journal.tell("ledger.baseline", name, *changes)
        except (ValueError, InputError) as error:
            raise IntegrityError(f"a row of {name} cannot be read ({error}); restore the ledger from a copy") from error
        journal.flush()
    for subject, payload in connection.execute(_BOUND):  # whose database it is goes on to be known
        journal.tell("workspace.bound", subject, said=payload)
    journal.flush()


def _changes(connection: Connection, spec: Audited) -> Iterator[list[Change]]:
    if connection.exec_driver_sql(f"SELECT 1 FROM {spec.table.name} LIMIT 1").first() is None:
        return  # twenty tables of a new ledger, and each statement below takes a millisecond to be put together
    query = select(*(spec.table.c[name] for name in spec.columns)).order_by(*spec.table.primary_key)
    for rows in connection.execute(query).mappings().partitions(_ROWS):
        yield [Change(ADDED, spec.table.name, {name: row[name] for name in spec.key}, dict(row)) for row in rows]
