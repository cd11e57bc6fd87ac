"""Writing sinks: events tell their rows. A cursor belongs to whoever delivers (`store/cursors.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import delete, insert, update

from posttrain.domain.sinks import SinkRecord
from posttrain.store.journal import CHANGED, REMOVED, Change
from posttrain.store.rows import plain
from posttrain.store.schema import cursors, sinks
from posttrain.store.sinks import SINK_ADDED
from posttrain.store.writing import Writing

SINK_PAUSED, SINK_RESUMED, SINK_REMOVED = "sink.paused", "sink.resumed", "sink.removed"
FRESH: dict[str, Any] = {"failures": 0, "error": "", "failed_since": None, "not_before": None}
FREE: dict[str, Any] = {"lease_owner": None, "lease_until": None}


class SinkWriting(Writing):
    """The part of a transaction that is about sinks."""

    def add_sink(self, sink: SinkRecord, after: int) -> SinkRecord:
        """A new sink.

        Args:
            after: it is told of events after this place in the log.

        Raises:
            ConflictError: there is one of this name.
        """
        columns = {
            "project": self._project,
            "principal": self._journal.own,
            "name": sink.name,
            "kind": sink.kind,
            "settings": plain(sink.settings),
            "rules": {
                str(number): rule.to_json() for number, rule in enumerate(sink.rules, 1)
            },  # an erasure takes whole ones
            "created_at": self._clock.now(),
            "paused": "",
        }
        self._insert(sinks, columns, f"sink {sink.name}", SINK_ADDED, sink.name)
        self._connection.execute(delete(cursors).where(*self._cursor(sink.name)))  # of one of that name of before
        self._connection.execute(
            insert(cursors).values(project=self._project, sink=sink.name, sequence=after, **FRESH, at=None, **FREE)
        )
        return replace(sink, created_at=columns["created_at"], actor=self._journal.author.name)

    def pause_sink(self, name: str, why: str, facts: dict[str, Any] | None = None, error: str = "") -> bool:
        """Deliver nothing to a sink any more; False: it was paused before, or is gone.

        Args:
            why: person | failing.
            error: what stood in the way, in words.
        """
        here = (sinks.c.project == self._project, sinks.c.name == name, sinks.c.paused == "")
        if not self._connection.execute(update(sinks).where(*here).values(paused=why)).rowcount:
            return False
        change = Change(CHANGED, "sinks", {"project": self._project, "name": name}, {"paused": why})
        self._journal.tell(SINK_PAUSED, name, change, facts=facts, said={"error": error} if error else None)
        return True

    def resume_sink(self, name: str, skip_to: int | None = None) -> None:
        """Deliver again, at once.

        Args:
            skip_to: from after this place in the log on; None: from where it stands.
        """
        key = {"project": self._project, "name": name}
        here = (sinks.c.project == self._project, sinks.c.name == name, sinks.c.paused != "")
        if self._connection.execute(update(sinks).where(*here).values(paused="")).rowcount:
            change = Change(CHANGED, "sinks", key, {"paused": ""})
            self._journal.tell(SINK_RESUMED, name, change, facts={} if skip_to is None else {"skipped_to": skip_to})
        moved = {} if skip_to is None else {"sequence": skip_to, **FREE}
        self._connection.execute(update(cursors).where(*self._cursor(name)).values(**FRESH, **moved))

    def remove_sink(self, name: str) -> None:
        """Forget a sink."""
        gone = delete(sinks).where(sinks.c.project == self._project, sinks.c.name == name)
        if self._connection.execute(gone).rowcount:
            self._journal.tell(
                SINK_REMOVED, name, Change(REMOVED, "sinks", {"project": self._project, "name": name}, {})
            )
        self._connection.execute(delete(cursors).where(*self._cursor(name)))

    def _cursor(self, name: str) -> tuple[Any, ...]:
        return cursors.c.project == self._project, cursors.c.sink == name
