"""What is asked of a run whose jobs are on another host of the ledger is asked of that host's server.

Only it can read what a running job says. The request goes on as it came, with the token in it, so the other server
answers whoever asked; it never sends one on again. A server that does not answer is left alone for a while: then this
one answers from the ledger, and says of logs where they are.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from posttrain.domain.errors import PosttrainError
from posttrain.server.lanes import FOLLOW, READ, in_thread
from posttrain.store.hosts import host_of

if TYPE_CHECKING:
    from posttrain.store.hosts import Host, Hosts
    from posttrain.store.ledger import Ledger

log = logging.getLogger("posttrain.server")
MARK = "posttrain-forwarded"  # of a request that another server sent on
LOOK_SECONDS = 5.0  # between two looks at who there is
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 960.0
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

    def look(self) -> None:
        """See who there is."""
        if self._hosts is not None:
            mine = self._hosts.id
            self._known = {one.id: one for one in self._hosts.all() if one.id != mine and one.url and not one.gone}

    def keep_looking(self, over: threading.Event) -> None:
        """Now and then, until this is over."""
        while not over.wait(LOOK_SECONDS):
            with suppress(PosttrainError):  # a database that is away: the next time
                self.look()

    async def answer(
        self, request: Request, ledger: Callable[[], Ledger], run_id: str, body: bytes = b""
    ) -> Response | None:
        """What the server of a run's host answers; None: this one has to.

        Args:
            ledger: of the asker's project, who may ask.
        """
        if not self._known or MARK in request.headers:
            return None
        found: str | None = await in_thread(READ, _host_of, ledger, run_id)
        host = self._known.get(found or "")
        if host is None or time.monotonic() - self._away.get(host.id, -LOOK_SECONDS) < LOOK_SECONDS:
            return None
        try:
            connection, answer = await in_thread(FOLLOW, _ask, host.url, request, body)
        except _AWAY as error:
            self._away[host.id] = time.monotonic()
            log.warning("host %s at %s does not answer: %s", host.name, host.url, error)
            return None
        headers = {name: value for name in _GIVEN if (value := answer.getheader(name))}
        return StreamingResponse(_pieces(connection, answer), answer.status, headers)


def _host_of(ledger: Callable[[], Ledger], run_id: str) -> str | None:
    project = ledger()
    return host_of(project.database, project.project, run_id)


def _ask(url: str, request: Request, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    options: dict[str, Any] = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=_CONNECT_SECONDS, **options)
    try:
        connection.connect()
        connection.sock.settimeout(_ANSWER_SECONDS)
        path = parts.path.rstrip("/") + request.scope["raw_path"].decode("latin-1")
        headers = {name: value for name in _SENT if (value := request.headers.get(name))}
        target = f"{path}?{request.url.query}" if request.url.query else path
        connection.request(request.method, target, body or None, {**headers, MARK: "1"})
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


async def _pieces(connection: http.client.HTTPConnection, found: http.client.HTTPResponse) -> AsyncIterator[bytes]:
    try:
        while piece := await in_thread(FOLLOW, found.read1, _PIECE):
            yield piece
    finally:
        connection.close()
