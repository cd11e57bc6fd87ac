"""Cursors: how far each sink has come, whose turn it is to deliver to it, and what stands in its way.

No event tells of them. One that is lost is made again where its sink was added: whoever receives sees events twice, and
misses none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, exc, insert, select, update

from posttrain.domain.errors import StaleWriteError
from posttrain.domain.sinks import Cursor
from posttrain.store.ledger import Ledger
from posttrain.store.rows import plain, to_record
from posttrain.store.schema import cursors
from posttrain.store.snapshot import Snapshot
from posttrain.store.writing import FREE, FRESH

LEASE_SECONDS = 120.0  # longer than one delivery; each one renews it


@dataclass(frozen=True, slots=True)
class Cursors:
    """Cursors of one project's sinks, for one process that delivers.

    Args:
        owner: `host:pid:start` of this process.
        alive: whether another owner may still live: a dead one loses its leases at once.
    """

    ledger: Ledger
    owner: str
    alive: Callable[[str], bool]

    def claim(self, sink: str) -> Cursor | None:
        """Take a sink, so that nobody else delivers to it; None: somebody does, or it is not its time yet.

        Raises:
            InfrastructureError: the answer was lost; what was claimed is this owner's.
        """
        now = self.ledger.clock.now()
        with self.ledger.untold() as connection:
            query = select(cursors).where(*self._here(sink)).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None and not self._made(connection, sink):
                return None
            found = to_record(Cursor, row if row is not None else connection.execute(query).one())
            theirs = found.lease_owner not in (None, self.owner) and (found.lease_until or 0.0) > now
            if theirs and self.alive(str(found.lease_owner)):
                return None
            if found.not_before is not None and found.not_before > now:
                return None
            leased: dict[str, Any] = {"lease_owner": self.owner, "lease_until": now + LEASE_SECONDS}
            connection.execute(update(cursors).where(*self._here(sink)).values(leased))
            return replace(found, **leased)

    def _made(self, connection: Connection, sink: str) -> bool:
        """Make a lost cursor where the sink was added; False: somebody else does."""
        after = Snapshot(connection, self.ledger.project).sink_added_at(sink)
        values = {"project": self.ledger.project, "sink": sink, "sequence": after, **FRESH, "at": None, **FREE}
        with suppress(exc.IntegrityError), connection.begin_nested():
            connection.execute(insert(cursors).values(**values))
            return True
        return False

    def move(self, held: Cursor, sequence: int, *, delivered: bool, keep: bool) -> Cursor:
        """The sink has everything up to a place.

        Args:
            delivered: it was told of something; else nothing of it was for this sink.
            keep: go on holding it.

        Raises:
            StaleWriteError: it is another's by now, who delivers from where the cursor stood.
        """
        now = self.ledger.clock.now()
        values: dict[str, Any] = {"sequence": sequence, **(FRESH | {"at": now} if delivered else {})}
        values |= {"lease_until": now + LEASE_SECONDS} if keep else FREE
        return self._set(held, values)

    def failed(self, held: Cursor, error: str, wait: float) -> Cursor:
        """A delivery failed: the next is after so many seconds. Raises as `move`."""
        now = self.ledger.clock.now()
        since = now if held.failed_since is None else held.failed_since
        values = {"failures": held.failures + 1, "error": plain(error), "failed_since": since, "not_before": now + wait}
        return self._set(held, values | FREE)

    def release(self, held: Cursor) -> None:
        """Let somebody else deliver. Raises as `move`."""
        self._set(held, FREE)

    def _set(self, held: Cursor, values: dict[str, Any]) -> Cursor:
        mine = (*self._here(held.sink), cursors.c.lease_owner == self.owner, cursors.c.sequence == held.sequence)
        with self.ledger.untold() as connection:
            if not connection.execute(update(cursors).where(*mine).values(values)).rowcount:
                raise StaleWriteError(f"sink {held.sink}: another process delivers to it by now")
        return replace(held, **values)

    def _here(self, sink: str) -> tuple[Any, ...]:
        return cursors.c.project == self.ledger.project, cursors.c.sink == sink
