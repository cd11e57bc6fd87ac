"""How a server that is away is waited for, by clients and by jobs: one rule for both.

How a job of a server asks its server: the address and the token of `access.json`, read anew at each try.

A server that is away for minutes is waited for, which the job's log says. Standard library only.

What a job of a server is told in its attempt's folder, its owner's alone: what lets it in, and where the server is.

::

    access.json     the token, written before the job starts, and by nobody afterwards
    address.json    where the server is, written again where that changed

The job may write both, so nothing of the server reads them: its driver knows by itself what it has told whom.

Standard library only, and what the folder needs: jobs import it.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, insert, not_, select, update

from posttrain.domain.errors import InfrastructureError, IntegrityError, UnavailableError
from posttrain.domain.lifecycle import AttemptState, is_final
from posttrain.domain.ports import Clock
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import read_left, write_json
from posttrain.store.clock import now_in
from posttrain.store.database import Database
from posttrain.store.schema import attempts, grants, runs

FILE, ADDRESS = "access.json", "address.json"
PRIVATE_CACHE = "cache"  # in an attempt's folder: what a job in an image fetches and verifies, nobody else reads
SOCKETS = "sockets"  # below the workspace: where its server listens for jobs that have no network
SOCKET = "server.sock"
INSIDE = "/run/posttrain"  # where such jobs find that folder
_MOST = 1 << 20  # bytes; a certificate with its chain has a few thousand
PATIENCE = 900.0  # seconds that a server may be away
REFUSED = (401, 403)
_CONNECT_SECONDS = 10.0
_STALLED = 90.0  # seconds without a byte: longer than a server lets its store be silent
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between tries, the last one again and again
_TOLD = 3  # tries before the first message
_GONE = (OSError, http.client.HTTPException, UnavailableError)
T = TypeVar("T")
SECONDS = 900.0  # that a grant is good for without being renewed
_KEPT = 86400.0  # seconds that one is kept after that: a driver that comes back renews it
_LIVE = [state for state in AttemptState if not is_final("attempt", state)]


class AwayError(Exception):
    """A server gave no answer, or one that says to ask again.

    Args:
        pause: seconds that the server asks to wait (Retry-After); 0: it names none.
    """

    def __init__(self, words: str, pause: float = 0.0) -> None:
        super().__init__(words)
        self.pause = pause


def patiently(
    ask: Callable[[], T],
    away: type[Exception],
    patience: float,
    hope: str,
    pause: Callable[[float], None] | None = None,
) -> T:
    """Call `ask` until it answers; retry while it raises `away`, and raise that after `patience` seconds.

    Args:
        hope: the end of the message that is printed once, after some tries.
    """
    until, tried = time.monotonic() + patience, 0
    while True:
        try:
            return ask()
        except away as error:
            if time.monotonic() >= until:
                raise
            if tried == _TOLD:
                print(f"{error}; {hope}", file=sys.stderr, flush=True)
            (pause or time.sleep)(getattr(error, "pause", 0.0) or _PAUSES[min(tried, len(_PAUSES) - 1)])
        tried += 1


@dataclass(frozen=True, slots=True)
class JobAccess:
    """What lets a job in."""

    url: str  # of its host's server
    token: str = field(repr=False)
    certificate: str = ""  # what that server shows, in PEM; empty: it has no TLS
    socket: str = ""  # where it is reached instead, by whoever has no network

    def write(self, folder: Path) -> None:
        """Put it where the job finds it.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        tell(folder, self.url, self.certificate)
        write_json(folder / FILE, {"token": self.token, **({"socket": self.socket} if self.socket else {})})


def tell(folder: Path, url: str, certificate: str) -> None:
    """Say where the server is now. Nothing of the folder is read.

    Raises:
        WorkspaceError: the disk is full or read-only. OSError: the job put something there that no file replaces.
    """
    write_json(folder / ADDRESS, {"url": url, **({"certificate": certificate} if certificate else {})})


def read_access(folder: Path) -> JobAccess | None:
    """What lies in its folder, for a job; None: something of it is not there. Whatever is, nobody waits for it.

    Raises:
        IntegrityError: it cannot be read.
    """
    where, key = _read(folder / ADDRESS, {"url", "certificate"}), _read(folder / FILE, {"token", "socket"})
    if where is None or key is None:
        return None
    try:
        return JobAccess(**where, **key)
    except TypeError as error:
        raise IntegrityError(f"{folder / FILE} cannot be read: {error}; it is damaged") from error


def _read(path: Path, known: Set[str]) -> dict[str, str] | None:
    try:
        said = json.loads(read_left(path, _MOST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}; it is damaged") from error
    if not isinstance(said, dict) or set(said) - known or not all(isinstance(one, str) for one in said.values()):
        raise IntegrityError(f"{path} must be an object of texts named {', '.join(sorted(known))}; it is damaged")
    return said


class Reach:
    """To the server of an attempt.

    Args:
        folder: the attempt's.
        patience: seconds that the server may be away.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder, self._patience, self._pause = folder, patience, pause

    def again(
        self, ask: Callable[[JobAccess], T], trouble: Callable[[], None] = lambda: None, *, once: bool = False
    ) -> T:
        """What the server answers, once it does.

        Args:
            trouble: told of each try that failed.
            once: do not wait.

        Raises:
            UnavailableError: the server was away for longer than a job waits.
            InfrastructureError: the attempt has no access any more.
        """
        url = why = ""

        def tried() -> T:
            nonlocal url, why
            access = read_access(self.folder)
            if access is None:
                raise InfrastructureError(f"{self.folder / FILE}: is gone; the attempt has no access any more")
            try:
                return ask(access)
            except _GONE as error:
                url, why = access.url, " ".join(str(error).split()) or type(error).__name__
                trouble()
                raise AwayError(f"server {url} does not answer ({why})") from error

        try:
            return patiently(tried, AwayError, 0.0 if once else self._patience, "waiting for it", self._pause)
        except AwayError as error:
            raise UnavailableError(f"server {url} was away for {self._patience:g} s ({why}); try again") from error


def refusal() -> InfrastructureError:
    """What a server means that takes the token no more."""
    return InfrastructureError("the server refuses this attempt: it has ended, or another one took over")


def reached(access: JobAccess) -> http.client.HTTPConnection:
    """A connection to the server of an attempt, which shows the certificate that the attempt was told."""
    return connected(access.url, access.certificate, pinned=True, local=access.socket)


def connected(url: str, certificate: str = "", *, pinned: bool = False, local: str = "") -> http.client.HTTPConnection:
    """A connection to where a URL leads.

    Args:
        pinned: believe this certificate (PEM) alone, whatever name it is for: a server is asked by an address.
        local: the socket of this machine where it is asked instead.
    """
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port
    made: http.client.HTTPConnection
    context: ssl.SSLContext | None = None
    if parts.scheme == "https":
        context = ssl.create_default_context(cadata=certificate or None)
        if pinned:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        made = http.client.HTTPSConnection(host, port, timeout=_CONNECT_SECONDS, context=context)
    else:
        made = http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
    if local:
        made.sock = _local(local, context, host)
    else:
        made.connect()
    made.sock.settimeout(_STALLED)
    return made


def _local(path: str, context: ssl.SSLContext | None, host: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_CONNECT_SECONDS)
        made.connect(path)
        return context.wrap_socket(made, server_hostname=host) if context else made
    except OSError:
        made.close()
        raise


@dataclass(frozen=True, slots=True)
class Granted:
    """Whose token it is."""

    project: str
    run_id: str
    stage: str
    number: int
    resume: str | None  # digest of the checkpoint that it goes on from


class Grants:
    """Of a ledger, whatever the project."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def add(self, attempt: AttemptRecord, digest: str) -> None:
        """Let whoever shows the secret of this digest be the attempt."""
        with self._database.write() as connection:
            until = now_in(connection, self._clock) + SECONDS
            key = {"run_id": attempt.run_id, "stage": attempt.stage, "number": attempt.number}
            connection.execute(insert(grants).values(digest=digest, expires_at=until, put_bytes=0, **key))

    def known(self, digest: str) -> Granted | None:
        """Whose secret it is; None: nobody's any more."""
        later = attempts.alias()
        newer = exists().where(
            later.c.run_id == grants.c.run_id, later.c.stage == grants.c.stage, later.c.number > grants.c.number
        )
        with self._database.read(across="a secret names its run") as connection:
            query = select(runs.c.project, grants.c.run_id, grants.c.stage, grants.c.number, attempts.c.resume)
            query = query.join(attempts, _of_attempt()).join(runs, runs.c.id == grants.c.run_id)
            good = grants.c.expires_at > now_in(connection, self._clock)
            row = connection.execute(
                query.where(grants.c.digest == digest, good, attempts.c.state.in_(_LIVE), not_(newer))
            ).one_or_none()
        return Granted(*row) if row else None

    def count(self, digest: str, size: int, most: int) -> bool:
        """Count what an attempt puts somewhere; False: it has put as much as it may, and this is too much.

        Args:
            digest: of its secret.
            most: bytes, over the whole attempt.
        """
        with self._database.write(across="a secret names its run") as connection:
            mine = (grants.c.digest == digest) & (grants.c.put_bytes <= most - size)
            done = connection.execute(update(grants).where(mine).values(put_bytes=grants.c.put_bytes + size))
            return done.rowcount == 1

    def renew(self, host: str | None) -> Sequence[str]:
        """Renew those of the living attempts of a host, and forget those of the dead; the folders of the living."""
        with self._database.write(across="a host has jobs of every project") as connection:
            mine = attempts.c.host == host if host else attempts.c.host.is_(None)
            living = select(attempts.c.folder).join(grants, _of_attempt()).where(attempts.c.state.in_(_LIVE), mine)
            folders = list(connection.execute(living.distinct()).scalars())
            self._forget(connection)
            if folders:
                theirs = exists().where(_of_attempt(), attempts.c.state.in_(_LIVE), mine)
                until = now_in(connection, self._clock) + SECONDS
                connection.execute(update(grants).where(theirs).values(expires_at=until))
        return folders

    def _forget(self, connection: Connection) -> None:
        living = exists().where(_of_attempt(), attempts.c.state.in_(_LIVE))
        old = grants.c.expires_at < now_in(connection, self._clock) - _KEPT
        connection.execute(delete(grants).where(not_(living) | old))


def _of_attempt() -> ColumnElement[bool]:
    same = (attempts.c.run_id == grants.c.run_id, attempts.c.stage == grants.c.stage)
    return and_(*same, attempts.c.number == grants.c.number)
