"""The rows of the ledger against its event log, replayed.

Rows are what everybody reads; only events are sealed. Whoever edits a row of the database leaves a log that holds, so a
proof builds every told column of every row again from the events, and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Text, select, type_coerce

from posttrain.domain.errors import IntegrityError
from posttrain.store.database import schema_version
from posttrain.store.journal import ADDED, REMOVED, TABLES, auditable
from posttrain.store.ledger import Ledger
from posttrain.store.schema import SCHEMA_VERSION, JsonText, events, leaves, payloads

_BATCH = 1000
_Key = tuple[Any, ...]
_Rows = dict[str, dict[_Key, dict[str, Any]]]  # table → key → columns


def verify_rows(ledger: Ledger) -> int:
    """Rebuild every table from the event log and compare.

    Seal first and verify the log: what is not sealed yet is believed. Of a ledger that a newer release upgraded, tables
    that this one does not know are left to that one.

    Returns:
        How many rows were compared.

    Raises:
        IntegrityError: a row that no event tells of, or tells otherwise, or that is gone; names it and the column.
    """
    compared = 0
    with ledger.database.read(across="the log is of every project") as connection:
        schema = schema_version(connection) or SCHEMA_VERSION
        told: _Rows = {name: {} for name, spec in TABLES.items() if spec.since <= schema}
        for event, audited, body in _said(connection):
            words = json.loads(body).get("rows", ()) if body else ()
            for place, row in enumerate(json.loads(audited).get("rows", ())):
                if row[1] in told or schema <= SCHEMA_VERSION:
                    _take(told, event, row, words[place] if place < len(words) else {})
        for name, rows in told.items():
            compared += _compare(connection, name, rows, TABLES[name].columns_of(schema))
    return compared


def _said(connection: Connection) -> Iterator[tuple[int, str, str | None]]:
    """Every event in the order that the log proves; what is not sealed yet comes last."""
    columns = (events.c.id, type_coerce(events.c.audited, Text), type_coerce(payloads.c.body, Text))
    sealed = select(*columns).select_from(leaves).join(events, events.c.id == leaves.c.event)
    waiting = select(*columns).outerjoin(leaves, leaves.c.event == events.c.id).where(leaves.c.event.is_(None))
    for query in (sealed.order_by(leaves.c.sequence), waiting.order_by(events.c.id)):
        whole = query.outerjoin(payloads, payloads.c.event == events.c.id)
        for event, audited, body in connection.execute(whole.execution_options(yield_per=_BATCH)):
            yield int(event), audited, body


def _take(told: _Rows, event: int, row: list[Any], words: Mapping[str, Any]) -> None:
    """One row that an event tells of."""
    sign, name, key, values = row
    if name not in told:
        raise IntegrityError(f"event {event} tells of a table {name!r}, which there is not; {_REMEDY}")
    spec, rows = TABLES[name], told[name]
    place = tuple(key)
    if sign == ADDED:
        if place in rows:
            raise IntegrityError(f"{_named(name, place)}: event {event} adds it a second time; {_REMEDY}")
        rows[place] = dict(spec.empty)
    elif place not in rows:
        raise IntegrityError(f"{_named(name, place)}: event {event} changes it, but no event added it; {_REMEDY}")
    if sign == REMOVED:
        del rows[place]
        return
    rows[place].update(values)
    rows[place].update(words)


def _compare(
    connection: Connection, name: str, told: dict[_Key, dict[str, Any]], compared_columns: Sequence[str]
) -> int:
    spec = TABLES[name]
    columns = [spec.table.c[column] for column in compared_columns]
    kept = {column.name for column in columns if isinstance(column.type, JsonText)}
    raw = [type_coerce(column, Text).label(column.name) if column.name in kept else column for column in columns]
    query = select(*raw).order_by(*spec.table.primary_key)
    compared = 0
    for found in connection.execute(query.execution_options(yield_per=_BATCH)).mappings():
        row = dict(found)
        for column in kept:
            row[column] = _read(row[column], f"{spec.name(row)}: {column}")
        key = tuple(row[column] for column in spec.key)
        expected = told.pop(key, None)
        if expected is None:
            raise IntegrityError(f"{spec.name(row)}: stands in the ledger, but no event tells of it; {_REMEDY}")
        for column in compared_columns:
            if column not in spec.key and auditable(row[column]) != expected[column]:
                raise IntegrityError(
                    f"{spec.name(row)}: {column} must be {expected[column]!r} as the event log says, "
                    f"got {row[column]!r}; {_REMEDY}"
                )
        compared += 1
    for key in told:
        raise IntegrityError(f"{_named(name, key)}: an event tells of it, but it is gone from the ledger; {_REMEDY}")
    return compared


def _read(value: Any, what: str) -> Any:
    try:
        return None if value is None else json.loads(value)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{what} cannot be read, got {value!r}; {_REMEDY}") from error


def _named(table: str, key: _Key) -> str:
    spec = TABLES[table]
    return spec.name(dict(zip(spec.key, key, strict=True)))


_REMEDY = "restore the ledger from a copy"
