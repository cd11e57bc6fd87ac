"""Parts of uploads that are under way: objects in the store, and rows that say which. Any server goes on with them.

::

    uploads/PROJECT/HEX.START.RANDOM    what came from START on

An upload is a digest with a size: whoever names another size for the same digest has another upload, and takes nothing
from the first. A part counts once its row is there. Of two requests that send the same part one gets the row; the
object of the other is deleted. Objects without a row, as a killed process leaves them, are deleted by `posttrain gc`.

Bytes in the store that a project sent, though no row names them yet: known to every server of the ledger.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import obstore
from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError as ConstraintError

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import ConflictError, NotFoundError
from posttrain.store.answering import answering
from posttrain.store.atomic import write_stream
from posttrain.store.blobs import backend_of, blob_key
from posttrain.store.ledger import Ledger
from posttrain.store.schema import parts, uploads
from posttrain.store.trees import file_digest

PART = 8 << 20  # bytes of a part that is not the last one of its request
LEAST = 256 << 10  # bytes that a request brings unless it brings the last one: what it leaves costs a row and an object
_UPLOADS = "uploads"


class PartStore:
    """Where the parts lie: beside the blobs of a store, by the URL of which it is opened.

    Raises:
        InputError: the URL is none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._backend = backend_of(url)
        self._store = self._backend.open()

    def put(self, name: str, data: bytes) -> None:
        """Write one. Raises as the methods of `BlobStore`."""
        with answering(self.url, name):
            obstore.put(self._store, f"{_UPLOADS}/{name}", data)
            self._backend.settle(f"{_UPLOADS}/{name}")

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of one.

        Raises:
            NotFoundError: it is not there. UnavailableError: the store does not answer.
        """
        with answering(self.url, name):
            yield from self._backend.pieces(self._store, f"{_UPLOADS}/{name}")

    def drop(self, name: str) -> None:
        """Delete one; one that is gone already is no error."""
        with suppress(FileNotFoundError, NotFoundError), answering(self.url, name):
            obstore.delete(self._store, f"{_UPLOADS}/{name}")

    def stored(self) -> dict[str, float]:
        """All that there are, and what clients sent directly: name → when it was written (seconds since the epoch)."""
        with answering(self.url, _UPLOADS):
            every = [one for some in obstore.list(self._store, prefix=_UPLOADS) for one in some]
        return {str(one["path"]).removeprefix(f"{_UPLOADS}/"): one["last_modified"].timestamp() for one in every}


class Parts:
    """Of one project's uploads."""

    def __init__(self, ledger: Ledger, store: PartStore) -> None:
        self._ledger, self._store = ledger, store

    def sizes(self, digest: str) -> dict[int, int]:
        """How many bytes have come of each upload of a digest, by its size."""
        with self._ledger.database.read() as connection:
            query = select(parts.c.total, func.sum(parts.c.size)).where(*self._of(digest)).group_by(parts.c.total)
            return {int(total): int(have) for total, have in connection.execute(query)}

    def add(self, digest: str, total: int, start: int, data: bytes) -> None:
        """Keep what came from `start` on of an upload of `total` bytes: where the part before it ends.

        Raises:
            ConflictError: another request was quicker.
        """
        blob_key(digest)
        project = self._ledger.project
        name = f"{project}/{digest.removeprefix(DIGEST_PREFIX)}.{start:013d}.{secrets.token_hex(8)}"
        self._store.put(name, data)
        row = {"project": project, "digest": digest, "total": total, "start": start, "size": len(data), "object": name}
        try:
            with self._ledger.database.write() as connection:
                have = select(func.coalesce(func.sum(parts.c.size), 0)).where(*self._of(digest, total))
                if int(connection.execute(have).scalar_one()) != start:
                    raise _quicker(digest)
                with connection.begin_nested():
                    connection.execute(insert(parts).values(**row, at=self._ledger.clock.now()))
        except ConstraintError as error:
            self._store.drop(name)
            raise _quicker(digest) from error
        except ConflictError:
            self._store.drop(name)
            raise

    def whole(self, digest: str, total: int, path: Path) -> str:
        """Write all `total` bytes that came to a file; its digest. Empty: other bytes came, or another server, which
        had all of them as well, has made an end of it.

        Raises:
            ConflictError: something of it is gone, so all of it is; it is sent again.
        """
        with self._ledger.database.read() as connection:
            query = select(parts.c.object, parts.c.size).where(*self._of(digest, total)).order_by(parts.c.start)
            found = list(connection.execute(query))
        names = [str(one.object) for one in found]
        if sum(one.size for one in found) != total:
            return ""

        def fill(file: BinaryIO) -> None:
            for name in names:
                for piece in self._store.pieces(name):
                    file.write(piece)

        try:
            write_stream(path, fill)
        except NotFoundError as error:
            self.forget(digest, total)
            raise ConflictError(f"upload {digest}: what came of it is gone; send it again") from error
        return file_digest(path)

    def forget(self, digest: str, total: int | None = None) -> None:
        """Delete what came of an upload; without its size, of all that are of the digest."""
        with self._ledger.database.write() as connection:
            names = list(connection.execute(select(parts.c.object).where(*self._of(digest, total))).scalars())
            connection.execute(delete(parts).where(*self._of(digest, total)))
        for name in names:
            self._store.drop(name)

    def _of(self, digest: str, total: int | None = None) -> tuple[ColumnElement[bool], ...]:
        every = parts.c.project == self._ledger.project, parts.c.digest == digest
        return every if total is None else (*every, parts.c.total == total)


def forget_parts(ledger: Ledger, before: float, *, dry_run: bool = False) -> list[str]:
    """Forget uploads of every project to which nothing was added since a moment; the objects that they had."""
    upload = parts.c.project, parts.c.digest, parts.c.total
    late = select(*upload).group_by(*upload)
    with ledger.database.write(across="garbage of every project") as connection:
        found: list[str] = []
        for project, digest, total in connection.execute(late.having(func.max(parts.c.at) < before)).all():
            mine = (parts.c.project == project) & (parts.c.digest == digest) & (parts.c.total == total)
            found += connection.execute(select(parts.c.object).where(mine)).scalars()
            if not dry_run:
                connection.execute(delete(parts).where(mine))
        return found


def named_parts(ledger: Ledger) -> frozenset[str]:
    """The objects of uploads that are under way, in every project."""
    with ledger.database.read(across="garbage of every project") as connection:
        return frozenset(connection.execute(select(parts.c.object)).scalars())


def _quicker(digest: str) -> ConflictError:
    return ConflictError(f"upload {digest}: another request sent these bytes; ask where it is, and go on there")


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
