"""Reading sinks, how far each has come, and the sealed events that they are told of."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from posttrain.domain.errors import NotFoundError, nearest
from posttrain.domain.sinks import Cursor, Envelope, Rule, SinkRecord
from posttrain.store.rows import to_record
from posttrain.store.schema import cursors, events, leaves, payloads, principals, runs, sinks, tree_head
from posttrain.store.scope import across

SINK_ADDED = "sink.added"  # the event
_SINKS = select(sinks, principals.c.name.label("actor")).join(principals, principals.c.id == sinks.c.principal)


class SinkReading:
    """The part of a snapshot that is about sinks."""

    _connection: Connection
    _project: str

    def sinks(self) -> list[SinkRecord]:
        """Every sink, by name."""
        return [_sink(row) for row in self._connection.execute(self._my_sinks().order_by(sinks.c.name))]

    def sink(self, name: str) -> SinkRecord:
        """The sink of this name.

        Raises:
            NotFoundError: there is none.
        """
        row = self._connection.execute(self._my_sinks().where(sinks.c.name == name)).one_or_none()
        if row is None:
            known = [one.name for one in self.sinks()]
            raise NotFoundError(f"there is no sink {name!r}{nearest(name, known)}; posttrain sink ls shows them")
        return _sink(row)

    def cursors(self) -> dict[str, Cursor]:
        """Of each sink that has one."""
        query = select(cursors).where(cursors.c.project == self._project)
        return {row.sink: to_record(Cursor, row) for row in self._connection.execute(query)}

    def sinks_standing(self) -> list[tuple[SinkRecord, Cursor | None, int]]:
        """Every sink with its cursor, and how many events are sealed; one statement."""
        columns = [cursors.c[name] for name in Cursor.__dataclass_fields__]
        here = (cursors.c.project == sinks.c.project) & (cursors.c.sink == sinks.c.name)
        query = self._my_sinks().add_columns(*columns, select(tree_head.c.size).scalar_subquery().label("size"))
        rows = self._connection.execute(query.outerjoin(cursors, here).order_by(sinks.c.name)).all()
        return [(_sink(row), None if row.sink is None else to_record(Cursor, row), int(row.size)) for row in rows]

    def projects_with_sinks(self) -> set[str]:
        """Projects with a sink that is not paused."""
        query = select(sinks.c.project).where(sinks.c.paused == "").distinct()
        return set(self._connection.execute(across(query, "one driver delivers for every project")).scalars())

    def sealed(self) -> int:
        """How many events are sealed."""
        return int(self._connection.execute(select(tree_head.c.size)).scalar_one())

    def events_after(self, after: int) -> tuple[int, float | None]:
        """How many sealed events of this project come after a place, and when the first of them was."""
        count, first = self._connection.execute(
            select(func.count(), func.min(leaves.c.sequence))
            .select_from(leaves)
            .join(events, events.c.id == leaves.c.event)
            .where(leaves.c.sequence > after, events.c.project == self._project)
        ).one()
        if not count:
            return 0, None
        told = select(events.c.at).join(leaves, leaves.c.event == events.c.id).where(leaves.c.sequence == first)
        told = told.where(events.c.project == self._project)
        return int(count), float(self._connection.execute(told).scalar_one())

    def envelopes(self, after: int, limit: int, *, words: bool) -> list[Envelope]:
        """Sealed events with `sequence > after`, in order.

        Args:
            words: their free text too, where it was not erased.
        """
        query: Select[Any] = select(events, leaves.c.sequence).join(leaves, leaves.c.event == events.c.id)
        if words:
            query = query.add_columns(payloads.c.body).outerjoin(payloads, payloads.c.event == events.c.id)
        query = query.where(events.c.project == self._project, leaves.c.sequence > after)
        rows = self._connection.execute(query.order_by(leaves.c.sequence).limit(limit))
        return [_envelope(row, words) for row in rows]

    def run_facts(self, run_id: str) -> tuple[str, str]:
        """Name and owner of a run; empty where there is none."""
        query = select(runs.c.name, runs.c.owner).where(runs.c.project == self._project, runs.c.id == run_id)
        row = self._connection.execute(query).one_or_none()
        return ("", "") if row is None else (str(row.name), str(row.owner))

    def sink_added_at(self, name: str) -> int:
        """The place in the log where a sink was added last; 0: it is not sealed."""
        query = select(func.max(leaves.c.sequence)).join(events, events.c.id == leaves.c.event)
        mine = (events.c.project == self._project, events.c.kind == SINK_ADDED, events.c.subject == name)
        return int(self._connection.execute(query.where(*mine)).scalar() or 0)

    def _my_sinks(self) -> Select[Any]:
        return _SINKS.where(sinks.c.project == self._project)


def _sink(row: Row[*tuple[Any, ...]]) -> SinkRecord:
    rules = tuple(Rule.of(rule) for _, rule in sorted(row.rules.items()))
    return SinkRecord(row.name, row.kind, row.settings, rules, row.created_at, row.actor, row.paused)


def _envelope(row: Row[*tuple[Any, ...]], words: bool) -> Envelope:
    found = row._mapping
    values = {name: found[name] for name in Envelope.__dataclass_fields__ if name not in ("leaf", "words")}
    return Envelope(**values, leaf=found["leaf"].hex(), words=(found["body"] or {}) if words else {})
