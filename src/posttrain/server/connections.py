"""Limits on a server's connections, addresses of servers, and forwarding of requests about a run on another host.

A connection ends when the headers of a request are not complete in time; `server.limits` limits the body. A connection
by itself identifies no principal, so at the limit the oldest connection without an identified request is closed.

A request about a run whose jobs are on another host of the ledger is forwarded to that host's server, because only that
server can read the facts of a running job. The request is forwarded unchanged, with its token, so the other server
identifies the caller; a server never forwards a forwarded request. Requests are forwarded only to addresses that
certainly belong to the host's server: an https address, which the server's certificate proves, or, on this machine, the
address of a live process. A server that does not answer is skipped for a while. During this time, this server answers
from the ledger and reports the location of logs.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import ipaddress
import logging
import os
import resource
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.access.ports import OS, Identity
from posttrain.domain.errors import InputError, LimitError, PosttrainError
from posttrain.execution.processes import process_alive, process_name
from posttrain.server.limits import PASS_ON, READ, in_thread
from posttrain.store.ledger import Host, Hosts, Ledger, host_of
from posttrain.store.retries import connected

log = logging.getLogger("posttrain.server")
OF_ATTEMPTS = "/v1/attempt/"  # paths to which a job's token gives access
HEADER_SECONDS = 30.0  # limit for a request's headers, from the connection's start or its last response
MOST = 2048  # maximum number of open connections
_FILES = 1 << 16  # a limit of open files that is sufficient in all cases
_RESERVED = 256  # open files reserved for other uses: files, the database, workers, a store
_TOLD_SECONDS = 60.0  # seconds between two log lines about the same error
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MARK = "posttrain-forwarded"  # marks a request that another server forwarded
LOOK_SECONDS = 5.0  # between two reads of the list of hosts
_CONNECT_SECONDS = 2.0
_FIRST_SECONDS = 20.0  # until a peer begins a response that needs no computation
_ANSWER_SECONDS = 960.0
_MOST = 16  # maximum number of one principal's forwarded requests at the same time
_PIECE = 1 << 16  # maximum bytes per read
_SENT = ("authorization", "cookie", "accept", "content-type", "if-none-match", "idempotency-key", "last-event-id")
_GIVEN = ("content-type", "etag", "cache-control", "retry-after", "location", "x-accel-buffering", "www-authenticate")
_AWAY = (OSError, http.client.HTTPException)


def raise_files() -> int:
    """Raise this process's limit of open files as far as needed and allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def most_of(files: int) -> int:
    """Return how many connections may be open if at most `files` files may be open."""
    return min(MOST, max(files - _RESERVED, files // 2))


class Room:
    """The connections of one server. Only the thread of the server calls this class.

    Args:
        most: maximum number of open connections.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._open: dict[int, weakref.ref[socket.socket]] = {}  # descriptor → socket, oldest first
        self._known: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()
        self._told = Seldom()

    def enter(self, connection: socket.socket) -> bool:
        """Add a connection; above the limit, end the oldest unidentified one. Return whether the limit was exceeded."""
        number = connection.fileno()
        self._open.pop(number, None)
        self._known.pop(number, None)  # a former connection had the same descriptor
        self._open[number] = weakref.ref(connection)
        if len(self._open) <= self.most:
            return False
        self._open = {key: one for key, one in self._open.items() if (sock := one()) and sock.fileno() == key}
        full = len(self._open) > self.most
        if full:
            self._end_one()
        return full

    def begun(self, number: int, connection: Connection) -> None:
        """Register the protocol object of a connection."""
        self._known[number] = connection

    def _end_one(self) -> None:
        for number, one in self._open.items():
            connection, found = self._known.get(number), one()
            if found is not None and (connection is None or not connection.known):
                del self._open[number]
                with suppress(OSError):  # the client has left
                    found.shutdown(socket.SHUT_RDWR)
                break
        if self._told.now():
            log.warning("%d connections are open, which is the limit: the oldest unidentified one is closed", self.most)


class Door(socket.socket):
    """A listening socket that registers each accepted connection in `room`, which limits their number."""

    room: Room | None = None
    _full = False

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`."""
        if self._full:  # the event loop closes ended connections before it accepts more
            self._full = False
            raise BlockingIOError
        found, address = super().accept()
        self._full = self.room is not None and self.room.enter(found)
        return found, address


class Connection(H11Protocol):
    """One connection, which ends when the headers of a request are not complete in time."""

    room: ClassVar[Room | None] = None
    _late: asyncio.TimerHandle | None = None

    @property
    def known(self) -> bool:
        """Whether the principal of the last request on the connection was identified."""
        state = self.scope.get("state", {}) if self.scope else {}
        return "asker" in state or "granted" in state

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        """See `asyncio.Protocol.connection_made`."""
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        if self.room is not None and found is not None:
            self.room.begun(found.fileno(), self)
        if found is not None and found.family == socket.AF_UNIX:
            self.app = _of_jobs(self.app)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
        self._unset()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """See `H11Protocol`."""
        super().handle_events()
        if self.scope:
            self.scope.setdefault("state", {})["transport"] = self.transport  # to end a client that does not read
        self._look()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Set the deadline for headers, which arriving bytes do not postpone; remove it while a request is handled."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._unset()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _unset(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def kind_of(room: Room | None) -> type[Connection]:
    """Return the class of a server's connections."""
    return type("Connection", (Connection,), {"room": room})


def _of_jobs(app: Any) -> Any:
    """Return the application for the socket of jobs, which serves only the paths that accept an attempt's token."""

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith(OF_ATTEMPTS):
            await app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    return asked


class Seldom:
    """Limits how often a repeated line is logged."""

    def __init__(self) -> None:
        self._next, self._lock = 0.0, threading.Lock()

    def now(self) -> bool:
        """Return True at most once in `_TOLD_SECONDS`."""
        with self._lock:
            moment = time.monotonic()
            due = moment >= self._next
            self._next = moment + _TOLD_SECONDS if due else self._next
            return due


def quiet(otherwise: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]) -> Any:
    """Return an exception handler for an event loop that seldom reports that no more files can be opened.

    asyncio reports this error up to 2048 times a second, each time with a traceback.

    Args:
        otherwise: handles all other errors.
    """
    seldom = Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            otherwise(loop, context)
        elif seldom.now():
            log.error("no connection can be accepted: %s; see `ulimit -n` of the server", error.strerror)

    return handle


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address, which only this machine can reach."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def checked_advertised(url: str) -> str:
    """Return an address to which servers of other hosts forward users' requests, after checking it.

    Raises:
        InputError: the address is not a URL, or other machines could read the traffic.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InputError(f"--advertise: is not a URL: {error}") from error
    safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(str(parts.hostname or "")))
    if not parts.hostname or not safe or parts.username is not None or parts.query or parts.fragment:
        raise InputError(
            f"--advertise must be https://HOST[:PORT], the address to which other servers forward requests, got {url!r}"
        )
    return url.rstrip("/")


class Peers:
    """The servers of the other hosts. The list is at most a few seconds old.

    Args:
        hosts: the hosts of the ledger; None if the ledger has only one host.
    """

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._known: Mapping[str, Host] = {}
        self._away: dict[str, float] = {}  # host → time at which its server last did not answer
        self._held: Counter[str] = Counter()  # principal → number of requests that other servers are answering

    def look(self) -> None:
        """Read the list of hosts."""
        if self._hosts is not None:
            others = [one for one in self._hosts.all() if one.id != self._hosts.id and not one.gone]
            self._known = {one.id: one for one in others if is_sure(one)}

    def keep_looking(self, over: threading.Event) -> None:
        """Read the list of hosts periodically, until `over` is set."""
        while not over.wait(LOOK_SECONDS):
            with suppress(PosttrainError):  # the database is unreachable; the next round tries again
                self.look()

    async def answer(
        self,
        request: Request,
        ledger: Callable[[], Ledger],
        run_id: str,
        who: Identity,
        body: bytes = b"",
        *,
        computes: bool = False,
    ) -> Response | None:
        """Forward a request to the server of a run's host; return its response, or None if this server must respond.

        Args:
            ledger: returns the ledger, scoped to the caller's project.
            computes: whether it may take long until the response begins.
            who: the caller, whose permission was checked. Requests of the workspace's own user are not forwarded,
                because only servers of this folder accept that user's key.

        Raises:
            LimitError: too many of the caller's requests are being forwarded already.
        """
        if who.auth == OS or not self._known or MARK in request.headers:
            return None
        found: str | None = await in_thread(READ, _host_of, ledger, run_id)
        host = self._known.get(found or "")
        if host is None or time.monotonic() - self._away.get(host.id, -LOOK_SECONDS) < LOOK_SECONDS:
            return None
        if self._held[who.principal] >= _MOST:
            raise LimitError(
                f"{who.principal}: a user may send at most {_MOST} requests for runs of other hosts at the same "
                "time; wait a second"
            )
        self._held[who.principal] += 1
        try:
            connection, answer = await in_thread(PASS_ON, _ask, host.url, request, body, computes)
        except BaseException as error:
            self._let_go(who)
            if not isinstance(error, _AWAY):
                raise
            self._away[host.id] = time.monotonic()
            log.warning("host %s at %s does not answer: %s", host.name, host.url, error)
            return None
        headers = {name: value for name in _GIVEN if (value := answer.getheader(name))}
        pieces = self._pieces(connection, answer, who)
        return StreamingResponse(pieces, answer.status, headers, background=BackgroundTask(pieces.aclose))

    async def _pieces(
        self, connection: http.client.HTTPConnection, found: http.client.HTTPResponse, who: Identity
    ) -> AsyncGenerator[bytes, None]:
        try:
            while piece := await in_thread(PASS_ON, found.read1, _PIECE):
                yield piece
        finally:
            with suppress(OSError):  # ends a read in a thread, for which `close` would wait
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            self._let_go(who)

    def _let_go(self, who: Identity) -> None:
        self._held[who.principal] -= 1
        if not self._held[who.principal]:
            del self._held[who.principal]


def is_sure(host: Host) -> bool:
    """Return whether a response from a host's address certainly comes from the host's server."""
    parts = urlsplit(host.url)
    if is_loopback(str(parts.hostname or "")):
        return is_near(host.server)
    return parts.scheme == "https" and parts.username is None


def is_near(process: str) -> bool:
    """Return whether a server's process, HOSTNAME:PID:START, is on this machine and in the same network namespace."""
    if not process or process.rsplit(":", 2)[0] != process_name().rsplit(":", 2)[0] or not process_alive(process):
        return False
    try:
        return os.readlink(f"/proc/{process.rsplit(':', 2)[1]}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:  # the process is owned by another account
        return False


def _host_of(ledger: Callable[[], Ledger], run_id: str) -> str | None:
    project = ledger()
    return host_of(project.database, project.project, run_id)


def _ask(
    url: str, request: Request, body: bytes, computes: bool
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = connected(url, patience=_CONNECT_SECONDS, silence=_ANSWER_SECONDS if computes else _FIRST_SECONDS)
    try:
        path = parts.path.rstrip("/") + request.scope["raw_path"].decode("latin-1")
        headers = {name: value for name in _SENT if (value := request.headers.get(name))}
        target = f"{path}?{request.url.query}" if request.url.query else path
        connection.request(request.method, target, body or None, {**headers, MARK: "1"})
        sock = connection.sock
        found = connection.getresponse()
        connection.sock = sock  # None if the peer announces that it closes the connection; the body is still to come
        sock.settimeout(_ANSWER_SECONDS)
        return connection, found
    except BaseException:
        connection.close()
        raise
