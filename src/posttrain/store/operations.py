"""Operations as every server of a ledger sees them: how one stands, who carries it out, whether somebody still asks.

The server that carries one out says how it stands when that changes, and that it lives every `BEAT_SECONDS`. Silence
for `SILENT_SECONDS`, or the known death of that process, means that nobody carries it out any more; until then nobody
takes its place.

Requests that carry a key, so that one which is sent again is answered again and not carried out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from posttrain.domain.ports import Clock
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.store.moments import now_in
from posttrain.store.schema import hosts, operations, requests

SILENT_SECONDS = 60.0  # after which nobody is taken to carry it out
BEAT_SECONDS = 15.0  # within which whoever carries it out says so, though nothing changed
FORGOTTEN_SECONDS = 3600.0  # without a look
_LOOKED_SECONDS = 2.0  # a look is written down once in so many: whoever carries it out hears soon enough
BEGUN, DONE = "begun", "done"
_NOBODY = "nobody"  # in the place of a process


@dataclass(frozen=True, slots=True)
class Begun:
    """One of them."""

    id: str
    project: str
    principal: str  # pseudonymous id
    verb: str
    body: str  # digest of what was asked
    server: str  # process that carries it out, HOSTNAME:PID:START
    document: str  # how it stood when that was last said, as JSON
    ago: float  # seconds since then
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

    def begin(self, number: str, project: str, principal: str, verb: str, body: str, document: str) -> Begun | None:
        """This server carries it out, unless one stands under this id that somebody carries out: that one, then.

        What nobody looks at any more is forgotten.
        """
        row = {"id": number, "project": project, "principal": principal, "verb": verb, "body": body}
        fresh = {"server": self._server, "document": document, "over": 0, "ending": 0}
        while True:
            with self._database.write(across="a server has operations of every project") as connection:
                now = now_in(connection, self._clock)
                connection.execute(delete(operations).where(operations.c.looked_at < now - FORGOTTEN_SECONDS))
                known = self._read(connection, operations.c.id == number)
                if known is not None and not (known.over or known.lost):
                    return known
                if known is not None:  # as it was read, and not what another one put there meanwhile
                    there = (operations.c.id == number) & (operations.c.server == known.server)
                    connection.execute(delete(operations).where(there))
                try:
                    with connection.begin_nested():
                        connection.execute(insert(operations).values(**row, **fresh, told_at=now, looked_at=now))
                    return None
                except IntegrityError:  # another server was quicker
                    continue

    def tell(self, number: str, document: str, *, over: bool) -> None:
        """Say how it stands, and that this server lives."""
        with self._database.write(across="a server has operations of every project") as connection:
            told = {"document": document, "over": int(over), "told_at": now_in(connection, self._clock)}
            connection.execute(update(operations).where(self._mine(number)).values(told))

    def heard(self, number: str) -> tuple[float, bool]:
        """Seconds since somebody looked, and whether somebody cancelled it. Of one that is not this server's: never."""
        with self._database.read(across="a server has operations of every project") as connection:
            now = now_in(connection, self._clock)
            query = select(now - operations.c.looked_at, operations.c.ending).where(self._mine(number))
            row = connection.execute(query).one_or_none()
            return (math.inf, False) if row is None else (float(row[0]), bool(row[1]))

    def forget(self, number: str) -> None:
        """This server does not carry it out after all."""
        with self._database.write(across="a server has operations of every project") as connection:
            connection.execute(delete(operations).where(self._mine(number)))

    def find(self, number: str, project: str, principal: str) -> Begun | None:
        """Somebody's operation that this server does not carry out, at which they look now; None: they have none."""
        mine = _of(number, project, principal)
        with self._database.of(project).read() as connection:
            found = self._read(connection, mine)
            unseen = (now_in(connection, self._clock) - operations.c.looked_at) >= _LOOKED_SECONDS
            look = connection.execute(select(operations.c.id).where(mine, unseen)).first() is not None
        if look:
            with self._database.of(project).write() as connection:
                connection.execute(update(operations).where(mine).values(looked_at=now_in(connection, self._clock)))
        return found

    def cancel(self, number: str, project: str, principal: str) -> None:
        """Ask whoever carries it out to carry it out no further."""
        with self._database.of(project).write() as connection:
            connection.execute(update(operations).where(_of(number, project, principal)).values(ending=1))

    def _read(self, connection: Connection, which: ColumnElement[bool]) -> Begun | None:
        now = now_in(connection, self._clock)
        elsewhere = select(hosts.c.id).where(hosts.c.server == operations.c.server).exists().label("known")
        ago = (now - operations.c.told_at).label("ago")
        row: Row[Any] | None = connection.execute(select(operations, elsewhere, ago).where(which)).one_or_none()
        if row is None:
            return None
        lost = not row.over and (row.ago > SILENT_SECONDS or self._is_dead(row.server, bool(row.known)))
        named = (row.id, row.project, row.principal, row.verb, row.body, row.server, row.document)
        return Begun(*named, max(0.0, float(row.ago)), bool(row.over), lost)

    def _mine(self, number: str) -> ColumnElement[bool]:
        return (operations.c.id == number) & (operations.c.server == self._server)

    def _is_dead(self, server: str, known: bool) -> bool:
        """Whether a server is known to be gone: its process is on this machine, or its host has another one."""
        if server == self._server:  # it asks only for what it does not carry out
            return True
        near = server.partition(":")[0] == self._server.partition(":")[0]
        return not self._alive(server) or not (near or known)


def _of(number: str, project: str, principal: str) -> ColumnElement[bool]:
    mine = (operations.c.id == number) & (operations.c.project == project)
    return mine & (operations.c.principal == principal)


@dataclass(frozen=True, slots=True)
class Known:
    """A request that was seen before."""

    body: str  # digest of what was asked
    state: str  # begun | done
    owner: str  # process that began it
    status: int | None
    answer: str | None  # None: it is not kept
    at: float


class Repeats:
    """Of one principal in one project.

    Args:
        principal: pseudonymous id.
    """

    def __init__(self, ledger: Ledger, principal: str) -> None:
        self._ledger, self._key = ledger, {"project": ledger.project, "principal": principal}

    def begin(self, key: str, verb: str, body: str, owner: str) -> Known | None:
        """Note that a request is being answered; what is known of it if it was seen before."""
        row = {**self._key, "key": key, "verb": verb, "body": body, "state": BEGUN, "owner": owner}
        with self._ledger.database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(requests).values(**row, at=self._ledger.clock.now()))
                return None
            except IntegrityError:
                known = select(*(requests.c[name] for name in Known.__dataclass_fields__)).where(*self._of(key))
                return Known(**connection.execute(known).one()._mapping)

    def take_over(self, key: str, before: str, owner: str) -> bool:
        """Answer what a process began that is gone; False: another one does so."""
        with self._ledger.database.write() as connection:
            mine = update(requests).where(*self._of(key), requests.c.state == BEGUN, requests.c.owner == before)
            return connection.execute(mine.values(owner=owner, at=self._ledger.clock.now())).rowcount == 1

    def done(self, key: str, status: int, answer: str | None) -> None:
        """It is answered."""
        with self._ledger.database.write() as connection:
            values = {"state": DONE, "status": status, "answer": answer}
            connection.execute(update(requests).where(*self._of(key)).values(**values))

    def leave(self, key: str, owner: str) -> None:
        """Who began it carries it out no further, and something of it was written: the next one may go on.

        Nothing happens where another one has taken it over meanwhile: a server that was suspended is taken for gone.
        """
        with self._ledger.database.write() as connection:
            mine = update(requests).where(*self._of(key), requests.c.owner == owner)
            connection.execute(mine.values(owner=_NOBODY))

    def forget(self, key: str, owner: str) -> None:
        """It was not carried out by who began it, and may be tried again; as `leave` where another one is at it."""
        with self._ledger.database.write() as connection:
            connection.execute(delete(requests).where(*self._of(key), requests.c.owner == owner))

    def _of(self, key: str) -> tuple[ColumnElement[bool], ...]:
        columns = {**self._key, "key": key}
        return tuple(requests.c[name] == value for name, value in columns.items())


def forget_before(ledger: Ledger, moment: float) -> None:
    """Forget requests of every project that were begun before a moment (seconds since the epoch)."""
    with ledger.database.write(across="garbage of every project") as connection:
        connection.execute(delete(requests).where(requests.c.at < moment))
