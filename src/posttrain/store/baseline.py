"""The first events of a log: what the rows hold when a ledger is made or upgraded.

Without them, rows of before an upgrade would be told by no event that can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, insert, select

from posttrain.domain.ports import Clock
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.audited import ADDED, TABLES, Audited, Change
from posttrain.store.chain import Chain, seal_before, verify_before
from posttrain.store.envelopes import CREATED, UPGRADED
from posttrain.store.journal import Author, Entropy, Journal, new_request
from posttrain.store.schema import principals

_ROWS = 200  # of one event
_ACTOR = "service:posttrain"


def tell_rows(connection: Connection, clock: Clock, entropy: Entropy, came_from: str | None) -> None:
    """Tell every row that there is, in a log that holds nothing yet. The first event names the chain of before.

    Args:
        came_from: schema of before; None: the ledger was made a moment ago.

    Raises:
        IntegrityError: the chain of before does not hold.
    """
    chain = Chain(0, "")
    if came_from:
        seal_before(connection)
        chain = verify_before(connection)
    actor = entropy(8).hex()
    columns = {"id": actor, "kind": "service", "name": _ACTOR, "created_at": clock.now()}
    connection.execute(insert(principals).values(**columns))
    author = Author(_ACTOR, new_request(entropy), entropy=entropy, known={_ACTOR: actor})
    journal = Journal(connection, author, clock, DEFAULT_PROJECT)
    facts: dict[str, Any] = {"chain": {"events": chain.events, "head": chain.head}} if chain.events else {}
    journal.tell(UPGRADED if came_from else CREATED, "ledger", facts={**facts, "from": came_from})
    for spec in TABLES.values():
        for changes in _changes(connection, spec):
            journal.tell("ledger.baseline", spec.table.name, *changes)
        journal.flush()


def _changes(connection: Connection, spec: Audited) -> Iterator[list[Change]]:
    query = select(*(spec.table.c[name] for name in spec.columns)).order_by(*spec.table.primary_key)
    for rows in connection.execute(query).mappings().partitions(_ROWS):
        yield [Change(ADDED, spec.table.name, {name: row[name] for name in spec.key}, dict(row)) for row in rows]
