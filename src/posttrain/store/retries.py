"""Retries while a server is unreachable, and a job's access to its server: a token and an address in the job's folder.

Clients and jobs retry in the same way. They wait minutes for an unreachable server, and a job's log records the wait.
At each try a job reads the token and the address again from its attempt's folder, which is private to its owner:

::

    access.json     the token, written once, before the job starts
    address.json    the server's URL, written again when it changes

The job can write both files, so no part of the server reads them; the driver keeps their contents in memory.

Jobs import this module, so it imports only the standard library and the modules that access the folder.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Set
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from posttrain.domain.errors import InfrastructureError, IntegrityError, UnavailableError
from posttrain.store.atomic import read_untrusted, write_json

FILE, ADDRESS = "access.json", "address.json"
PRIVATE_CACHE = "cache"  # folder in an attempt's folder; its blobs are for the attempt's job in an image only
SOCKETS = "sockets"  # folder in the workspace: the server's sockets for jobs without a network
SOCKET = "server.sock"
INSIDE = "/run/posttrain"  # the path of that folder in such jobs
_MOST = 1 << 20  # maximum bytes of an access file; a certificate with its chain has a few thousand bytes
PATIENCE = 900.0  # seconds that a server may be unreachable
REFUSED = (401, 403)
REDEEM, PARTS = "/v1/attempt/redeem", "/v1/attempt/parts"
_OK, _DONE = 200, 204
_CONNECT_SECONDS = 10.0
STALLED = 90.0  # seconds without a byte until a connection fails; longer than a server waits for its store
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between tries; the last value repeats
_TOLD = 3  # tries before the first message
_GONE = (OSError, http.client.HTTPException, UnavailableError)
T = TypeVar("T")
W = TypeVar("W")


class RefusedError(InfrastructureError):
    """A server no longer accepts a job's token: the attempt has ended, or another job of it has access now."""


class AwayError(Exception):
    """A server did not answer, or requested a retry.

    Args:
        pause: seconds to wait, as the server requested (Retry-After); 0: not specified.
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
    """Call `ask` until it returns; retry while it raises `away`, and raise the last error after `patience` seconds.

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
    """A job's access to its server."""

    url: str  # URL of the host's server
    token: str = field(repr=False)
    certificate: str = ""  # the server's certificate, in PEM; empty: no TLS
    socket: str = ""  # path of the server's socket, for a job without a network

    def write(self, folder: Path) -> None:
        """Write the access into the job's folder.

        Raises:
            WorkspaceError: the disk is full or read-only.
        """
        tell(folder, self.url, self.certificate)
        write_json(folder / FILE, {"token": self.token, **({"socket": self.socket} if self.socket else {})})


def tell(folder: Path, url: str, certificate: str) -> None:
    """Write the server's current URL, without reading any file of the folder.

    Raises:
        WorkspaceError: the disk is full or read-only.
        OSError: the job created something at the path that no file can replace.
    """
    write_json(folder / ADDRESS, {"url": url, **({"certificate": certificate} if certificate else {})})


def read_access(folder: Path) -> JobAccess | None:
    """Return a job's access from its folder; None if a file is missing. Special files do not block the call.

    Raises:
        IntegrityError: a file cannot be read.
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
        said = json.loads(read_untrusted(path, _MOST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}; it is damaged") from error
    if not isinstance(said, dict) or set(said) - known or not all(isinstance(one, str) for one in said.values()):
        raise IntegrityError(
            f"{path} must be a JSON object with the text fields {', '.join(sorted(known))}; it is damaged"
        )
    return said


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a job on another machine begins with: it redeems the job's token, at any server of the team."""

    token: str = field(repr=False)
    urls: tuple[str, ...]
    certificate: str = ""  # of the first server, in PEM; empty: no TLS, or a certificate of a known authority

    def to_json(self) -> str:
        return json.dumps({"token": self.token, "urls": list(self.urls), "certificate": self.certificate})

    @classmethod
    def from_json(cls, text: str) -> Bootstrap:
        """Return the inverse of `to_json`.

        Raises:
            IntegrityError: the text has another form.
        """
        try:
            said = json.loads(text)
            return cls(str(said["token"]), tuple(map(str, said["urls"])), str(said["certificate"]))
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"POSTTRAIN_BOOTSTRAP cannot be read: {error!r}; submit the job again") from error

    def redeem(self, folder: Path, patience: float = PATIENCE) -> None:
        """Get the job's token from the first server that answers, and write it and the server's URL into a folder.

        Raises:
            InfrastructureError: no server answered, or the attempt has ended.
        """
        tried = itertools.cycle(self.urls)

        def ask() -> None:
            url = next(tried)
            certificate = self.certificate if url == self.urls[0] else ""
            said = self._post(url, certificate, self.token)
            JobAccess(url, json.loads(said)["token"], certificate).write(folder)

        try:
            patiently(ask, AwayError, patience, "waiting for it")
        except AwayError as error:
            raise UnavailableError(f"{error}; check that the node can reach it") from error

    def settle(self, folder: Path) -> None:
        """Revoke the tokens of all other jobs of the attempt, after this one has begun. Errors: see `redeem`."""

        def ask() -> None:
            access = read_access(folder)
            if access is None:
                raise InfrastructureError(f"{folder / FILE}: was deleted; the attempt no longer has access")
            try:
                self._post(access.url, access.certificate, access.token)
            except AwayError:
                self.turn(folder)
                raise

        try:
            patiently(ask, AwayError, PATIENCE, "waiting for it")
        except AwayError as error:
            raise UnavailableError(f"{error}; check that the node can reach it") from error

    @staticmethod
    def _post(url: str, certificate: str, token: str) -> bytes:
        try:
            with closing(connected(url, certificate, pinned=bool(certificate))) as connection:
                connection.request("POST", REDEEM, b"", {"authorization": f"Bearer {token}"})
                response = connection.getresponse()
                said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise AwayError(f"server {url} does not answer ({error})") from error
        if response.status in REFUSED:
            raise refusal()
        if response.status not in (_OK, _DONE):
            raise AwayError(f"server {url} answers {response.status}")
        return said

    def turn(self, folder: Path) -> None:
        """Let the job of a folder use the next server of the team."""
        access = read_access(folder)
        if access is not None and len(self.urls) > 1:
            place = self.urls.index(access.url) if access.url in self.urls else -1  # the job can write its address
            following = self.urls[(place + 1) % len(self.urls)]
            tell(folder, following, self.certificate if following == self.urls[0] else "")


class Reach:
    """Requests to the server of an attempt, with retries.

    Args:
        folder: the attempt's folder.
        patience: seconds that the server may be unreachable.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder, self._patience, self._pause = folder, patience, pause

    def again(
        self, ask: Callable[[JobAccess], T], trouble: Callable[[], None] = lambda: None, *, once: bool = False
    ) -> T:
        """Call `ask` until the server answers; return the answer.

        Args:
            trouble: called after each failed try.
            once: whether to try only once.

        Raises:
            UnavailableError: the server was unreachable for longer than a job waits.
            InfrastructureError: the attempt no longer has access.
        """
        url = why = ""

        def tried() -> T:
            nonlocal url, why
            access = read_access(self.folder)
            if access is None:
                raise InfrastructureError(f"{self.folder / FILE}: was deleted; the attempt no longer has access")
            try:
                return ask(access)
            except _GONE as error:
                url, why = access.url, " ".join(str(error).split()) or type(error).__name__
                trouble()
                raise AwayError(f"server {url} does not answer ({why})") from error

        try:
            return patiently(tried, AwayError, 0.0 if once else self._patience, "waiting for it", self._pause)
        except AwayError as error:
            raise UnavailableError(f"server {url} did not answer within {self._patience:g} s ({why}); retry") from error


def refusal() -> RefusedError:
    """Return the error for a server that no longer accepts the token."""
    return RefusedError("the server rejects this attempt: the attempt has ended, or another attempt has replaced it")


def reached(access: JobAccess) -> http.client.HTTPConnection:
    """Return a connection to the server of an attempt, which must present the certificate in the attempt's access."""
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
    """Return a connection to the server of a URL.

    Args:
        certificate: a certificate in PEM, to trust instead of the default authorities.
        pinned: whether to accept the certificate for any host name, because jobs use the server's address.
        local: a socket on this machine to connect to instead.
        patience: timeout for connecting, in seconds.
        silence: seconds without a byte, once connected, until an operation fails.
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
    """A connection that stays open between requests; each thread has a separate connection."""

    made: http.client.HTTPConnection | None = None
    _way: object = None

    def to(self, way: W, opens: Callable[[W], http.client.HTTPConnection]) -> http.client.HTTPConnection:
        """Return the kept connection to `way`, or a new one if `way` has changed or none was kept."""
        if self.made is None or self._way != way:
            self.drop()
            self._way, self.made = way, opens(way)
        return self.made

    def drop(self) -> None:
        """Close the connection, whose state is unknown after an error."""
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
