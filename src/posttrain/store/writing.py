"""What every part of a write transaction needs: rows are added and changed, and each change is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Table, update
from sqlalchemy.exc import IntegrityError as ConstraintError

from posttrain.domain.errors import ConflictError
from posttrain.domain.ports import Clock
from posttrain.store.edges import EdgeWriter, addition
from posttrain.store.journal import ADDED, CHANGED, Author, Change, Journal
from posttrain.store.rows import to_columns
from posttrain.store.snapshot import Snapshot
from posttrain.store.waking import settle


class Writing:
    """One open write transaction, and the events that it will tell."""

    def __init__(self, connection: Connection, author: Author, clock: Clock, project: str) -> None:
        self._connection = connection
        self._clock = clock
        self._project = project
        self._woken: set[str] = set()  # runs that somebody has to look at
        self._ended: set[str] = set()  # runs that nobody has to look at any more
        self.written: list[Any] = []  # records of runs, stages and attempts as they are now, in the order of changes
        self._journal = Journal(connection, author, clock, project)
        self._edges = EdgeWriter(connection, project)
        self.snapshot = Snapshot(connection, project)  # reads that see this transaction's own rows

    @property
    def principals(self) -> Mapping[str, str]:
        """Name → id of whoever this transaction named for the first time."""
        return self._journal.found

    def flush(self) -> None:
        """Write the events of what was changed so far, and wake the runs whose rows changed, or let go of them."""
        self._journal.flush(self._woken)
        settle(self._connection, self._project, self._ended)
        self._woken.clear()
        self._ended.clear()

    def _owned(self, record: Any, field: str) -> dict[str, Any]:
        """The record's columns: its project, and who is named in `field` as a principal."""
        columns = to_columns(record)
        return {"project": self._project, "principal": self._journal.principal(columns.pop(field)), **columns}

    def _insert(
        self,
        table: Table,
        columns: Mapping[str, Any],
        what: str,
        kind: str,
        subject: str,
        noted: Callable[[], list[Change]] = list,
        **facts: Any,
    ) -> None:
        """Add a row, and what `noted` writes beside it, in one event."""
        self._journal.tell(kind, subject, self._added(table, columns, what), *noted(), facts=facts)

    def _added(self, table: Table, columns: Mapping[str, Any], what: str) -> Change:
        """Add a row and return the change for its event. If its key is taken, the transaction stays usable.

        Raises:
            ConflictError: its key, or a name or number that it must have for itself, is taken; or it names a row that
                is not there, which ends the transaction.
        """
        try:
            adding = addition(self._connection.dialect.name, table)
            added = self._connection.execute(adding, dict(columns)).first() is not None
        except ConstraintError as error:  # it names a row that is not there
            said = " ".join(str(error.orig).split())
            raise ConflictError(f"{what} cannot be added: {said}; read what is there and decide again") from error
        if not added:
            raise ConflictError(f"{what} cannot be added: its key or its name is taken; read it and decide again")
        return Change(ADDED, table.name, {column.name: columns[column.name] for column in table.primary_key}, columns)

    def _change(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], kind: str, subject: str) -> bool:
        """Set columns of a row without a generation, and tell; False: there is no such row."""
        here = [table.c[name] == value for name, value in key.items()]
        if not self._connection.execute(update(table).where(*here).values(**values)).rowcount:
            return False
        self._journal.tell(kind, subject, Change(CHANGED, table.name, key, values))
        return True

    def _moved(self, table: Table, key: Mapping[str, Any], was: int, values: Mapping[str, Any]) -> Change | None:
        """Set columns of a row that is still of generation `was`; what an event is to tell of it. None: it is not."""
        here = [table.c[name] == value for name, value in key.items()]
        values = {**values, "generation": was + 1}
        moved = update(table).where(*here, table.c.generation == was).values(**values)
        return Change(CHANGED, table.name, key, values) if self._connection.execute(moved).rowcount else None
