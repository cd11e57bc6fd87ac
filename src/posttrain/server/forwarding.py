"""What is asked of a run whose jobs are on another host of the ledger is asked of that host's server.

Only it can read what a running job says. The request goes on as it came, with the token in it, so the other server
answers whoever asked; it never sends one on again. Nothing goes to an address of which it is not sure that the host's
server has it: one whose certificate says so, or, on this machine, one whose process is seen to live. A server that does
not answer is left alone for a while: then this one answers from the ledger, and says of logs where they are.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from posttrain.access.ports import OS, Identity
from posttrain.control.owners import process_alive, process_name
from posttrain.domain.errors import LimitError, PosttrainError
from posttrain.server.connections import is_loopback
from posttrain.server.limits import PASS_ON, READ, in_thread
from posttrain.store.hosts import Host, Hosts, host_of
from posttrain.store.hosts import Ledger
from posttrain.store.reaching import connected

log = logging.getLogger("posttrain.server")
MARK = "posttrain-forwarded"  # of a request that another server sent on
LOOK_SECONDS = 5.0  # between two looks at who there is
_CONNECT_SECONDS = 2.0
_FIRST_SECONDS = 20.0  # until a peer begins to answer what it need not compute
_ANSWER_SECONDS = 960.0
_MOST = 16  # requests of one principal that other servers answer at once
_PIECE = 1 << 16  # bytes
_SENT = ("authorization", "cookie", "accept", "content-type", "if-none-match", "idempotency-key", "last-event-id")
_GIVEN = ("content-type", "etag", "cache-control", "retry-after", "location", "x-accel-buffering", "www-authenticate")
_AWAY = (OSError, http.client.HTTPException)


class Peers:
    """The servers of the other hosts, as they were a moment ago.

    Args:
        hosts: of the ledger; None: it has one.
    """

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._known: Mapping[str, Host] = {}
        self._away: dict[str, float] = {}  # host → when it did not answer
        self._held: Counter[str] = Counter()  # principal → requests that others answer

    def look(self) -> None:
        """See who there is."""
        if self._hosts is not None:
            others = [one for one in self._hosts.all() if one.id != self._hosts.id and not one.gone]
            self._known = {one.id: one for one in others if is_sure(one)}

    def keep_looking(self, over: threading.Event) -> None:
        """Now and then, until this is over."""
        while not over.wait(LOOK_SECONDS):
            with suppress(PosttrainError):  # a database that is away: the next time
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
        """What the server of a run's host answers; None: this one has to.

        Args:
            ledger: of the asker's project.
            computes: whether the answer may take long to begin.
            who: the asker, who may ask. The workspace's own user is known by a key of this folder, and to no other one.

        Raises:
            LimitError: others answer too much of theirs already.
        """
        if who.auth == OS or not self._known or MARK in request.headers:
            return None
        found: str | None = await in_thread(READ, _host_of, ledger, run_id)
        host = self._known.get(found or "")
        if host is None or time.monotonic() - self._away.get(host.id, -LOOK_SECONDS) < LOOK_SECONDS:
            return None
        if self._held[who.principal] >= _MOST:
            raise LimitError(
                f"{who.principal}: at most {_MOST} requests for runs of other hosts at once; wait a second"
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
            connection.close()
            self._let_go(who)

    def _let_go(self, who: Identity) -> None:
        self._held[who.principal] -= 1
        if not self._held[who.principal]:
            del self._held[who.principal]


def is_sure(host: Host) -> bool:
    """Whether whoever answers at a host's address is its server."""
    parts = urlsplit(host.url)
    if is_loopback(str(parts.hostname or "")):
        return is_near(host.server)
    return parts.scheme == "https" and parts.username is None


def is_near(process: str) -> bool:
    """Whether a server's process, HOSTNAME:PID:START, lives here, with the same loopback as this one."""
    if not process or process.rsplit(":", 2)[0] != process_name().rsplit(":", 2)[0] or not process_alive(process):
        return False
    try:
        return os.readlink(f"/proc/{process.rsplit(':', 2)[1]}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:  # another account's
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
        found = connection.getresponse()
        connection.sock.settimeout(_ANSWER_SECONDS)
        return connection, found
    except BaseException:
        connection.close()
        raise
