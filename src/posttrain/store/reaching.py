"""Waiting for a server that is away, and a job's access to its server: a token and an address in its attempt's folder.

Clients and jobs wait by one rule. A server that is away for minutes is waited for, and the job's log records it. At
each try a job reads the token and the address anew from its attempt's folder, which is its owner's alone:

::

    access.json     the token, written before the job starts, and by nobody afterwards
    address.json    where the server is, written again where that changed

The job may write both, so nothing of the server reads them: its driver remembers what it wrote for whom.

Imports are the standard library only, and what the folder needs: jobs import this module.
"""

import http.client
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from posttrain.domain.errors import InfrastructureError, IntegrityError, UnavailableError
from posttrain.store.atomic import read_left, write_json

FILE, ADDRESS = "access.json", "address.json"
PRIVATE_CACHE = "cache"  # in an attempt's folder: what a job in an image fetches and verifies, nobody else reads
SOCKETS = "sockets"  # below the workspace: where its server listens for jobs that have no network
SOCKET = "server.sock"
INSIDE = "/run/posttrain"  # where such jobs find that folder
_MOST = 1 << 20  # bytes; a certificate with its chain has a few thousand
PATIENCE = 900.0  # seconds that a server may be away
REFUSED = (401, 403)
_CONNECT_SECONDS = 10.0
STALLED = 90.0  # seconds without a byte: longer than a server lets its store be silent
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between tries, the last one again and again
_TOLD = 3  # tries before the first message
_GONE = (OSError, http.client.HTTPException, UnavailableError)
T = TypeVar("T")
W = TypeVar("W")


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


def connected(
    url: str,
    certificate: str = "",
    *,
    pinned: bool = False,
    local: str = "",
    patience: float = _CONNECT_SECONDS,
    silence: float = STALLED,
) -> http.client.HTTPConnection:
    """A connection to where a URL leads.

    Args:
        pinned: believe this certificate (PEM) alone, whatever name it is for: a server is asked by an address.
        local: the socket of this machine where it is asked instead.
        patience: seconds until it is there.
        silence: seconds without a byte, from then on.
    """
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port
    made = http.client.HTTPConnection(host, port, timeout=patience)
    context: ssl.SSLContext | None = None
    if parts.scheme == "https":
        context = ssl.create_default_context(cadata=certificate or None)
        if pinned:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        made = http.client.HTTPSConnection(host, port, timeout=patience, context=context)
    if local:
        made.sock = _local(local, context, host)
    else:
        made.connect()
    made.sock.settimeout(silence)
    return made


class KeptConnection(threading.local):
    """A connection that a thread keeps from one request to the next; each thread has its own."""

    made: http.client.HTTPConnection | None = None
    _way: object = None

    def to(self, way: W, opens: Callable[[W], http.client.HTTPConnection]) -> http.client.HTTPConnection:
        """The connection of this way; a new one where it is another way than before, or none was kept."""
        if self.made is None or self._way != way:
            self.drop()
            self._way, self.made = way, opens(way)
        return self.made

    def drop(self) -> None:
        """Close it: nothing that is said over it could be believed."""
        if self.made is not None:
            self.made.close()
            self.made = None


def _local(path: str, context: ssl.SSLContext | None, host: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_CONNECT_SECONDS)
        made.connect(path)
        return context.wrap_socket(made, server_hostname=host) if context else made
    except OSError:
        made.close()
        raise
