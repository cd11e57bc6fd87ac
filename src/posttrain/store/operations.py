"""Operations as every server of a ledger sees them: how one stands, who carries it out, whether somebody still asks.

The server that carries one out says every second how it stands. Silence, or the death of that process, means that
nobody carries it out any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, delete, insert, select, update

from posttrain.domain.ports import Clock
from posttrain.store.database import Database
from posttrain.store.moments import now_in
from posttrain.store.schema import hosts, operations

SILENT_SECONDS = 60.0  # after which nobody is taken to carry it out
FORGOTTEN_SECONDS = 3600.0  # without a look
_LOOKED_SECONDS = 2.0  # a look is written down once in so many: whoever carries it out hears soon enough


@dataclass(frozen=True, slots=True)
class Begun:
    """One of them."""

    id: str
    project: str
    principal: str  # pseudonymous id
    verb: str
    body: str  # digest of what was asked
    server: str  # process that carries it out, HOSTNAME:PID:START
    document: str  # how it stands, as JSON
    over: bool
    lost: bool  # nobody carries it out any more, and nothing says what came of it


class Operations:
    """Of every project of a ledger.

    Args:
        server: this process, HOSTNAME:PID:START.
        alive: whether such a process may still live, as far as this machine knows.
    """

    def __init__(self, database: Database, clock: Clock, server: str, alive: Callable[[str], bool]) -> None:
        self._database, self._clock, self._server, self._alive = database, clock, server, alive

    def begin(self, number: str, project: str, principal: str, verb: str, body: str, document: str) -> None:
        """This server carries it out. Whoever did so before is gone; what nobody looks at any more is forgotten."""
        row = {"id": number, "project": project, "principal": principal, "verb": verb, "body": body}
        with self._database.write() as connection:
            now = now_in(connection, self._clock)
            connection.execute(delete(operations).where(operations.c.looked_at < now - FORGOTTEN_SECONDS))
            connection.execute(delete(operations).where(operations.c.id == number))
            fresh = {"server": self._server, "document": document, "over": 0, "ending": 0}
            connection.execute(insert(operations).values(**row, **fresh, told_at=now, looked_at=now))

    def tell(self, number: str, document: str, *, over: bool) -> tuple[float, bool]:
        """Say how it stands; seconds since somebody looked, and whether somebody cancelled it."""
        with self._database.write() as connection:
            now = now_in(connection, self._clock)
            mine = (operations.c.id == number) & (operations.c.server == self._server)
            told = {"document": document, "over": int(over), "told_at": now}
            connection.execute(update(operations).where(mine).values(told))
            query = select(now - operations.c.looked_at, operations.c.ending).where(mine)
            row = connection.execute(query).one_or_none()
            return (0.0, False) if row is None else (float(row[0]), bool(row[1]))

    def find(self, number: str, project: str, principal: str) -> Begun | None:
        """Somebody's operation that this server does not carry out, at which they look now; None: they have none."""
        mine = _of(number, project, principal)
        with self._database.read() as connection:
            now = now_in(connection, self._clock)
            silent = case((operations.c.told_at < now - SILENT_SECONDS, 1), else_=0).label("silent")
            elsewhere = select(hosts.c.id).where(hosts.c.server == operations.c.server).exists().label("known")
            unseen = (now - operations.c.looked_at).label("unseen")
            row = connection.execute(select(operations, silent, elsewhere, unseen).where(mine)).one_or_none()
        if row is None:
            return None
        if row.unseen >= _LOOKED_SECONDS:
            with self._database.write() as connection:
                connection.execute(update(operations).where(mine).values(looked_at=now_in(connection, self._clock)))
        lost = not row.over and (bool(row.silent) or self._is_dead(row.server, bool(row.known)))
        return Begun(
            row.id, row.project, row.principal, row.verb, row.body, row.server, row.document, bool(row.over), lost
        )

    def cancel(self, number: str, project: str, principal: str) -> None:
        """Ask whoever carries it out to carry it out no further."""
        with self._database.write() as connection:
            connection.execute(update(operations).where(_of(number, project, principal)).values(ending=1))

    def _is_dead(self, server: str, known: bool) -> bool:
        """Whether a server is known to be gone: its process is on this machine, or its host has another one."""
        if server == self._server:  # it asks only for what it does not carry out
            return True
        near = server.partition(":")[0] == self._server.partition(":")[0]
        return not self._alive(server) or not (near or known)


def _of(number: str, project: str, principal: str) -> ColumnElement[bool]:
    mine = (operations.c.id == number) & (operations.c.project == project)
    return mine & (operations.c.principal == principal)
