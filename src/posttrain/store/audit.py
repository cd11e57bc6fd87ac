"""Verification of the ledger's rows against its replayed event log.

All readers use rows, but only events are sealed: if a row is edited in the database, the log stays valid. The
verification therefore rebuilds every recorded column of every row from the events, and compares it with the database.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, and_, literal, or_, select, type_coerce

from posttrain.domain.errors import IntegrityError
from posttrain.domain.records import release_of, run_end, stage_end
from posttrain.store.database import schema_version
from posttrain.store.journal import ADDED, ERASED, REMOVED, TABLES, auditable
from posttrain.store.ledger import Ledger
from posttrain.store.schema import (
    SCHEMA_VERSION,
    JsonText,
    approval_requests,
    edges,
    events,
    leaves,
    payloads,
    releases,
    stages,
)
from posttrain.store.sealer import of_subjects

_BATCH = 1000
_VERSIONS = ("assets", "asset_status")
_OF_CHANNELS = ("releases", "channels", "deployments", "quarantine")
_APPROVING = ("approval_requests", "approvals")
# tables from which lineages are read
_PART = ("runs", "stages", "attempts", "signals", "notes", "edges", *_VERSIONS, *_OF_CHANNELS, *_APPROVING)
_Key = tuple[Any, ...]
_Rows = dict[str, dict[_Key, dict[str, Any]]]  # table → key → columns


def verify_rows(ledger: Ledger, names: Collection[str] = ()) -> int:
    """Rebuild every table from the event log and compare it with the database.

    The caller must first seal and verify the log; unsealed events are not verified here. In a ledger of a newer
    version of Posttrain, tables that are unknown to this version are skipped.

    Args:
        names: ids of runs, refs of assets and names of channels; only their rows are rebuilt, from their events.
            Empty: all rows.

    Returns:
        The number of compared rows.

    Raises:
        IntegrityError: no event records a row, a value differs from the recorded value, or a row was deleted. The
            error names the row and the column.
    """
    compared = 0
    with ledger.database.read(across="the log is of every project") as connection:
        schema = schema_version(connection) or SCHEMA_VERSION
        part = _Part(ledger.project, frozenset(names)) if names else None
        told: _Rows = {name: {} for name in (_PART if part else TABLES)}
        for event, audited, body in _said(connection, *(part.events(connection) if part else ())):
            words = json.loads(body).get("rows", ()) if body else ()
            for place, row in enumerate(json.loads(audited).get("rows", ())):
                if part and not part.has(row[1], row[2], row[3]):
                    continue
                if row[1] in told or schema <= SCHEMA_VERSION:
                    _take(told, event, row, words[place] if place < len(words) else {})
        staged = list(told["stages"]) if part else []
        for name, rows in told.items():
            compared += _compare(connection, name, rows, part.rows(name, staged) if part else (), part)
    return compared


def channels_of(ledger: Ledger, names: Collection[str]) -> set[str]:
    """Return the channels to which these runs were released, or for which they request approval."""
    ended, asked = (
        (one.c.project == ledger.project) & one.c.run_id.in_(names) for one in (releases, approval_requests)
    )
    made = literal(run_end("")) + stages.c.run_id + "/" + stages.c.name  # equals `stage_end`
    served = select(edges.c.consumer).join(stages, edges.c.producer == made)
    served = served.where(edges.c.project == ledger.project, stages.c.run_id.in_(names), edges.c.consumer != "")
    with ledger.database.read(across="stages name no project") as connection:
        found = {end[0] for end in map(release_of, connection.execute(served).scalars()) if end}
        for query in (select(releases.c.channel).where(ended), select(approval_requests.c.channel).where(asked)):
            found |= set(connection.execute(query).scalars())
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of some runs, assets and channels of a project."""

    project: str
    names: frozenset[str]
    requests: set[str] = field(default_factory=set)  # digests of the runs' approval requests found so far

    def has(self, table: str, key: Sequence[Any], row: Mapping[str, Any]) -> bool:
        """Return whether a row is in this part."""
        if table in _OF_CHANNELS:
            return key[0] == self.project and key[1] in self.names
        if table in _APPROVING:
            if row.get("run_id") in self.names:
                self.requests.add(key[1])
            return key[0] == self.project and key[1] in self.requests
        if table == "edges":  # an edge is in the part of its consumer, or of its producer if it has no consumer
            end = str(key[1] or key[3])
            return (end.removeprefix("run:").partition("/")[0] if end.startswith("run:") else end) in self.names
        if table in _VERSIONS:
            return f"{key[1]}:{key[2]}@{key[3]}" in self.names
        if table in ("signals", "notes"):
            return key[0] == self.project and key[1] in self.names
        return table in _PART and key[0] in self.names

    def events(self, connection: Connection) -> Iterator[ColumnElement[bool]]:
        """Yield the condition for the events that record these rows and, if words were erased, for all erasures."""
        own = of_subjects(connection, self.project, self.names)
        query = select(events.c.id).outerjoin(payloads, payloads.c.event == events.c.id)
        gone = connection.execute(query.where(own, events.c.words.is_not(None), payloads.c.event.is_(None)).limit(1))
        yield or_(own, *([events.c.kind == ERASED] if gone.first() else []))

    def rows(self, table: str, stages: Iterable[_Key]) -> Iterator[ColumnElement[bool]]:
        """Yield the conditions for these rows in a table; a few other rows may also meet the conditions."""
        columns = TABLES[table].table.c
        if table in _VERSIONS:
            yield columns.project == self.project
            yield columns.name.in_(one.partition(":")[2].rpartition("@")[0] for one in self.names)
        elif table == "edges":
            ends = {*self.names, *map(run_end, self.names), *(stage_end(*stage) for stage in stages)}
            made = and_(columns.consumer == "", columns.producer.in_(ends))
            yield and_(columns.project == self.project, or_(columns.consumer.in_(ends), made))
        elif table in _OF_CHANNELS:
            yield and_(
                columns.project == self.project, columns["name" if table == "channels" else "channel"].in_(self.names)
            )
        elif table in _APPROVING:
            own = columns["digest" if table == "approval_requests" else "request"].in_(self.requests)
            asked = [columns.run_id.in_(self.names)] if table == "approval_requests" else []
            yield and_(columns.project == self.project, or_(own, *asked))
        else:
            yield columns["id" if table == "runs" else "run_id"].in_(self.names)


def _said(connection: Connection, *where: ColumnElement[bool]) -> Iterator[tuple[int, str, str | None]]:
    """Yield every event in the order of the sealed log; unsealed events are last."""
    columns = (events.c.id, type_coerce(events.c.audited, Text), type_coerce(payloads.c.body, Text))
    sealed = select(*columns).select_from(leaves).join(events, events.c.id == leaves.c.event)
    waiting = select(*columns).outerjoin(leaves, leaves.c.event == events.c.id).where(leaves.c.event.is_(None))
    for query in (sealed.where(*where).order_by(leaves.c.sequence), waiting.where(*where).order_by(events.c.id)):
        whole = query.outerjoin(payloads, payloads.c.event == events.c.id)
        yield from (
            (int(event), audited, body)
            for event, audited, body in connection.execute(whole.execution_options(yield_per=_BATCH))
        )


def _take(told: _Rows, event: int, row: list[Any], words: Mapping[str, Any]) -> None:
    """Apply one event's change of a row."""
    sign, name, key, values = row
    if name not in told:
        raise IntegrityError(f"event {event} changes table {name!r}, which does not exist; {_REMEDY}")
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
    connection: Connection,
    name: str,
    told: dict[_Key, dict[str, Any]],
    where: Iterable[ColumnElement[bool]],
    part: _Part | None,
) -> int:
    spec = TABLES[name]
    columns = list(spec.table.c)
    kept = {column.name for column in columns if isinstance(column.type, JsonText)}
    raw = [type_coerce(column, Text).label(column.name) if column.name in kept else column for column in columns]
    query = select(*raw).where(*where).order_by(*spec.table.primary_key)
    compared = 0
    for found in connection.execute(query.execution_options(yield_per=_BATCH)).mappings():
        row = dict(found)
        for column in kept:
            row[column] = _read(row[column], f"{spec.name(row)}: {column}")
        key = tuple(row[column] for column in spec.key)
        if part and not part.has(name, key, row):
            continue
        expected = told.pop(key, None)
        if expected is None:
            raise IntegrityError(f"{spec.name(row)}: is in the ledger, but no event records it; {_REMEDY}")
        for column in spec.columns:
            if column not in spec.key and auditable(row[column]) != expected[column]:
                raise IntegrityError(
                    f"{spec.name(row)}: {column} must be {expected[column]!r} as the event log records, "
                    f"got {row[column]!r}; {_REMEDY}"
                )
        compared += 1
    for key in told:
        raise IntegrityError(f"{_named(name, key)}: an event records it, but it is not in the ledger; {_REMEDY}")
    return compared


def _read(value: Any, what: str) -> Any:
    try:
        return None if value is None else json.loads(value)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{what} is {value!r}, which is not JSON; {_REMEDY}") from error


def _named(table: str, key: _Key) -> str:
    spec = TABLES[table]
    return spec.name(dict(zip(spec.key, key, strict=True)))


_REMEDY = "restore the ledger from a copy"
