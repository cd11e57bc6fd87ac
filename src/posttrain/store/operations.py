"""Operations, repeated requests, parts of uploads and sent bytes, shared by every server of a ledger.

An operation records its status, the server that carries it out, and the time of the last client request for it. The
server reports each change of the status, and reports every `BEAT_SECONDS` that it is alive. After `SILENT_SECONDS`
without a report, or as soon as the server's process is known to have died, the operation counts as lost; until then no
other server takes it over.

A repeated request with the same key gets the same answer, and is not carried out again.

Each part of an unfinished upload is an object in the store, and a row that names the object. Any server can continue an
upload:

::

    uploads/PROJECT/HEX.START.RANDOM    the bytes received from offset START

An upload is identified by digest and size: a request with a different size for the same digest is a different upload
and shares no parts. A part counts only after its row exists. If two requests send the same part, the row of only one
request is stored, and the object of the other request is deleted. Objects that a killed process left without a row are
deleted by `posttrain gc`.

Bytes that a project sent are recorded before any row names them, so every server of the ledger finds them.
"""

import itertools
import math
import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from sqlalchemy import ColumnElement, Connection, Row, delete, exc, func, insert, select, update

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import ConflictError, NotFoundError
from posttrain.domain.ports import Clock
from posttrain.store.atomic import write_stream
from posttrain.store.blobs import answering, backend_of, blob_key
from posttrain.store.database import Database, now_in
from posttrain.store.ledger import Ledger
from posttrain.store.schema import hosts, keyed, operations, parts, requests, uploads
from posttrain.store.trees import file_digest

SILENT_SECONDS = 60.0  # seconds without a report after which an operation counts as lost
BEAT_SECONDS = 15.0  # seconds between two reports of a server on an operation
FORGOTTEN_SECONDS = 3600.0  # seconds without a request for the status after which an operation is deleted
_LOOKED_SECONDS = 2.0  # minimum seconds between two records of a client's request
BEGUN, DONE = "begun", "done"
_NOBODY = "nobody"  # the owner of a released request
PART = 8 << 20  # bytes of every part of a request except the last
LEAST = 256 << 10  # minimum bytes of a request that does not end its upload; each part costs a row and an object
_UPLOADS = "uploads"


@dataclass(frozen=True, slots=True)
class Begun:
    """One operation."""

    id: str
    project: str
    principal: str  # pseudonymous id
    verb: str
    body: str  # digest of the request
    server: str  # process that carries out the operation, HOSTNAME:PID:START
    document: str  # the last reported status, as JSON
    ago: float  # seconds since that report
    over: bool
    lost: bool  # whether no server carries out the operation and its result is unknown


class Operations:
    """The operations of every project of a ledger.

    Args:
        server: this process, HOSTNAME:PID:START.
        alive: returns whether such a process may still be alive, as far as this machine can check.
    """

    def __init__(self, database: Database, clock: Clock, server: str, alive: Callable[[str], bool]) -> None:
        self._database, self._clock, self._server, self._alive = database, clock, server, alive

    def begin(self, number: str, project: str, principal: str, verb: str, body: str, document: str) -> Begun | None:
        """Record that this server carries out an operation; return the existing record if a server already does so.

        Operations that no client has queried for long are deleted.
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
                if known is not None:  # delete only the row that was read, not a row inserted since
                    connection.execute(delete(operations).where(*keyed(operations, id=number, server=known.server)))
                try:
                    with connection.begin_nested():
                        connection.execute(insert(operations).values(**row, **fresh, told_at=now, looked_at=now))
                    return None
                except exc.IntegrityError:  # another server has just inserted it
                    continue

    def tell(self, number: str, document: str, *, over: bool) -> None:
        """Record the status of an operation, and that this server is alive."""
        with self._database.write(across="a server has operations of every project") as connection:
            told = {"document": document, "over": int(over), "told_at": now_in(connection, self._clock)}
            connection.execute(update(operations).where(*self._mine(number)).values(told))

    def heard(self, number: str) -> tuple[float, bool]:
        """Return the seconds since a client last requested the status, and whether the operation was cancelled.

        The result is (inf, False) if this server does not carry out the operation.
        """
        with self._database.read(across="a server has operations of every project") as connection:
            now = now_in(connection, self._clock)
            row = connection.execute(
                select(now - operations.c.looked_at, operations.c.ending).where(*self._mine(number))
            ).one_or_none()
            return (math.inf, False) if row is None else (float(row[0]), bool(row[1]))

    def forget(self, number: str) -> None:
        """Delete an operation that this server will not carry out."""
        with self._database.write(across="a server has operations of every project") as connection:
            connection.execute(delete(operations).where(*self._mine(number)))

    def find(self, number: str, project: str, principal: str) -> Begun | None:
        """Return a principal's operation, which another server may carry out, or None; record the client's request."""
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
        """Request that the server that carries out an operation end the operation."""
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

    def _mine(self, number: str) -> list[ColumnElement[bool]]:
        return keyed(operations, id=number, server=self._server)

    def _is_dead(self, server: str, known: bool) -> bool:
        """Return whether a server is known to be dead: its process here has ended, or its host has a newer server."""
        if server == self._server:  # a server calls this only for operations that it does not carry out
            return True
        near = server.partition(":")[0] == self._server.partition(":")[0]
        return not self._alive(server) or not (near or known)


def _of(number: str, project: str, principal: str) -> ColumnElement[bool]:
    mine = (operations.c.id == number) & (operations.c.project == project)
    return mine & (operations.c.principal == principal)


@dataclass(frozen=True, slots=True)
class Known:
    """A request that was received earlier."""

    body: str  # digest of the request
    state: str  # begun | done
    owner: str  # process that began the request
    status: int | None
    answer: str | None  # None: the answer was not stored
    at: float


class IdempotencyKeys:
    """The keyed requests of one principal in one project.

    Args:
        principal: pseudonymous id.
    """

    def __init__(self, ledger: Ledger, principal: str) -> None:
        self._ledger, self._key = ledger, {"project": ledger.project, "principal": principal}

    def begin(self, key: str, verb: str, body: str, owner: str) -> Known | None:
        """Record that a request is being answered; return the existing record if the request was received earlier."""
        row = {**self._key, "key": key, "verb": verb, "body": body, "state": BEGUN, "owner": owner}
        with self._ledger.database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(requests).values(**row, at=self._ledger.clock.now()))
                return None
            except exc.IntegrityError:
                known = select(*(requests.c[name] for name in Known.__dataclass_fields__)).where(*self._of(key))
                return Known(**connection.execute(known).one()._mapping)

    def take_over(self, key: str, before: str, owner: str) -> bool:
        """Take over a request whose process has ended; return False if another process has taken it over."""
        with self._ledger.database.write() as connection:
            mine = update(requests).where(*self._of(key), requests.c.state == BEGUN, requests.c.owner == before)
            return connection.execute(mine.values(owner=owner, at=self._ledger.clock.now())).rowcount == 1

    def done(self, key: str, status: int, answer: str | None) -> None:
        """Record the answer to a request."""
        with self._ledger.database.write() as connection:
            connection.execute(update(requests).where(*self._of(key)).values(state=DONE, status=status, answer=answer))

    def leave(self, key: str, owner: str) -> None:
        """Release a partly written request, so that another process can continue the request.

        The call has no effect if another process has taken over the request, e.g. because this server was suspended.
        """
        with self._ledger.database.write() as connection:
            connection.execute(
                update(requests).where(*keyed(requests, **self._key, key=key, owner=owner)).values(owner=_NOBODY)
            )

    def forget(self, key: str, owner: str) -> None:
        """Delete a request that `owner` did not carry out, so that it can be retried; no effect for any other owner."""
        with self._ledger.database.write() as connection:
            connection.execute(delete(requests).where(*self._of(key), requests.c.owner == owner))

    def _of(self, key: str) -> list[ColumnElement[bool]]:
        return keyed(requests, **self._key, key=key)


def forget_before(ledger: Ledger, moment: float) -> None:
    """Delete requests of every project that began before a moment (seconds since the epoch)."""
    with ledger.database.write(across="garbage of every project") as connection:
        connection.execute(delete(requests).where(requests.c.at < moment))


class PartStore:
    """The store of the parts, next to the blobs of the artifact store with this URL.

    Raises:
        InputError: the URL is not valid.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._backend = backend_of(url)
        self._store = self._backend.open()

    def put(self, name: str, data: bytes) -> None:
        """Write a part. Errors: see `BlobStore`."""
        with answering(self.url, name):
            obstore.put(self._store, f"{_UPLOADS}/{name}", data)
            self._backend.settle(f"{_UPLOADS}/{name}")

    def pieces(self, name: str) -> Iterator[bytes]:
        """Return the bytes of a part.

        Raises:
            NotFoundError: the part does not exist.
            UnavailableError: the store does not answer.
        """
        with answering(self.url, name):
            yield from self._backend.pieces(self._store, f"{_UPLOADS}/{name}")

    def drop(self, name: str) -> None:
        """Delete a part; an already deleted part is not an error."""
        with suppress(FileNotFoundError, NotFoundError), answering(self.url, name):
            obstore.delete(self._store, f"{_UPLOADS}/{name}")

    def stored(self) -> dict[str, float]:
        """Return the write times (seconds since the epoch) of parts and of directly sent objects, by name."""
        with answering(self.url, _UPLOADS):
            every = [one for some in obstore.list(self._store, prefix=_UPLOADS) for one in some]
        return {str(one["path"]).removeprefix(f"{_UPLOADS}/"): one["last_modified"].timestamp() for one in every}


class Parts:
    """The parts of one project's uploads."""

    def __init__(self, ledger: Ledger, store: PartStore) -> None:
        self._ledger, self._store = ledger, store

    def sizes(self, digest: str) -> dict[int, int]:
        """Return the number of bytes received for each upload of a digest, by the upload's size."""
        with self._ledger.database.read() as connection:
            query = select(parts.c.total, func.sum(parts.c.size)).where(*self._of(digest)).group_by(parts.c.total)
            return {int(total): int(have) for total, have in connection.execute(query)}

    def add(self, digest: str, total: int, start: int, data: bytes) -> None:
        """Store bytes of an upload of `total` bytes; they begin at `start`, which must be the end of the last part.

        Raises:
            ConflictError: another request has stored this part.
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
        except exc.IntegrityError as error:
            self._store.drop(name)
            raise _quicker(digest) from error
        except ConflictError:
            self._store.drop(name)
            raise

    def whole(self, digest: str, total: int, path: Path) -> str:
        """Write all `total` received bytes to a file; return the file's digest.

        The digest is empty if the parts do not add up to `total`, or another server has finished the upload.

        Raises:
            ConflictError: a part was deleted, so all parts are deleted; the client must send the upload again.
        """
        with self._ledger.database.read() as connection:
            query = select(parts.c.object, parts.c.size).where(*self._of(digest, total)).order_by(parts.c.start)
            found = list(connection.execute(query))
        if sum(one.size for one in found) != total:
            return ""
        pieces = itertools.chain.from_iterable(self._store.pieces(str(one.object)) for one in found)
        try:
            write_stream(path, lambda file: file.writelines(pieces))
        except NotFoundError as error:
            self.forget(digest, total)
            raise ConflictError(f"upload {digest}: parts that it received were deleted; send it again") from error
        return file_digest(path)

    def forget(self, digest: str, total: int | None = None) -> None:
        """Delete the parts of an upload; without `total`, of all uploads of the digest."""
        with self._ledger.database.write() as connection:
            names = list(connection.execute(select(parts.c.object).where(*self._of(digest, total))).scalars())
            connection.execute(delete(parts).where(*self._of(digest, total)))
        for name in names:
            self._store.drop(name)

    def _of(self, digest: str, total: int | None = None) -> tuple[ColumnElement[bool], ...]:
        every = parts.c.project == self._ledger.project, parts.c.digest == digest
        return every if total is None else (*every, parts.c.total == total)


def forget_parts(ledger: Ledger, before: float, *, dry_run: bool = False) -> list[str]:
    """Delete the rows of all uploads, in every project, that got no part since a moment; return their objects."""
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
    """Return the objects of unfinished uploads, in every project."""
    with ledger.database.read(across="garbage of every project") as connection:
        return frozenset(connection.execute(select(parts.c.object)).scalars())


def _quicker(digest: str) -> ConflictError:
    return ConflictError(f"upload {digest}: another request sent these bytes; request its offset and continue there")


class PendingUploads:
    """The record of the bytes that one project sent."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def add(self, digest: str, *, shown: bool = False) -> None:
        """Record that the project has sent these bytes.

        Args:
            shown: whether every viewer of the project may read the bytes.
        """
        row = {"project": self._ledger.project, "digest": digest}
        now = self._ledger.clock.now()
        with self._ledger.database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(uploads).values(**row, shown=int(shown), at=now))
            except exc.IntegrityError:
                young = {"at": now, **({"shown": 1} if shown else {})}
                connection.execute(update(uploads).where(*self._of(digest)).values(young))

    def has(self, digest: str) -> bool:
        """Return whether the project has sent these bytes."""
        return self._shown(digest) is not None

    def shown(self, digest: str) -> bool:
        """Return whether every viewer of the project may read these bytes."""
        return bool(self._shown(digest))

    def _shown(self, digest: str) -> int | None:
        with self._ledger.database.read() as connection:
            return connection.execute(select(uploads.c.shown).where(*self._of(digest))).scalar()

    def _of(self, digest: str) -> list[ColumnElement[bool]]:
        return keyed(uploads, project=self._ledger.project, digest=digest)


def forget_pending_uploads(ledger: Ledger, needed: Container[str], before: float) -> None:
    """Delete every project's notes of bytes that were sent before a moment and are not needed."""
    with ledger.database.write(across="garbage of every project") as connection:
        old = connection.execute(select(uploads.c.project, uploads.c.digest).where(uploads.c.at < before)).all()
        for project, digest in old:
            if digest not in needed:
                connection.execute(
                    delete(uploads).where(*keyed(uploads, project=project, digest=digest), uploads.c.at < before)
                )
