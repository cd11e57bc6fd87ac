"""Bytes in the store that a project sent, though no row names them yet: known to every server of the ledger."""

from __future__ import annotations

from collections.abc import Container

from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.exc import IntegrityError as ConstraintError

from posttrain.store.ledger import Ledger
from posttrain.store.schema import uploads


class Noted:
    """Of one project."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def add(self, digest: str, *, shown: bool = False) -> None:
        """These bytes are the project's, from now on.

        Args:
            shown: whoever may look may have them.
        """
        row = {"project": self._ledger.project, "digest": digest}
        now = self._ledger.clock.now()
        with self._ledger.database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(uploads).values(**row, shown=int(shown), at=now))
            except ConstraintError:
                young = {"at": now, **({"shown": 1} if shown else {})}
                connection.execute(update(uploads).where(*self._of(digest)).values(young))

    def has(self, digest: str) -> bool:
        """Whether they are the project's."""
        return self._shown(digest) is not None

    def shown(self, digest: str) -> bool:
        """Whether whoever may look may have them."""
        return bool(self._shown(digest))

    def _shown(self, digest: str) -> int | None:
        with self._ledger.database.read() as connection:
            found: int | None = connection.execute(select(uploads.c.shown).where(*self._of(digest))).scalar()
            return found

    def _of(self, digest: str) -> tuple[ColumnElement[bool], ...]:
        return uploads.c.project == self._ledger.project, uploads.c.digest == digest


def forget_noted(ledger: Ledger, needed: Container[str], before: float) -> None:
    """Forget, in every project, what was sent before a moment and is not needed."""
    with ledger.database.write(across="garbage of every project") as connection:
        old = connection.execute(select(uploads.c.project, uploads.c.digest).where(uploads.c.at < before)).all()
        for project, digest in old:
            if digest not in needed:
                mine = (uploads.c.project == project) & (uploads.c.digest == digest)
                connection.execute(delete(uploads).where(mine, uploads.c.at < before))
