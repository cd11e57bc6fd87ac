"""Requests that carry a key, so that one which is sent again is answered again and not carried out again."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from posttrain.store.ledger import Ledger
from posttrain.store.schema import requests

BEGUN, DONE = "begun", "done"
_NOBODY = "nobody"  # in the place of a process


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
