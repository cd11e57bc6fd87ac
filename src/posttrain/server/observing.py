"""What is seen of every request from outside: one line in the log, and what is counted of it.

Only what the server itself made of a request is told: its route's name, its status, who it found the asker to be. A
path, a query, a header or a body is never.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.server.logs import facts

if TYPE_CHECKING:
    from posttrain.server.entrance import Asker

log = logging.getLogger("posttrain.server.access")
UNKNOWN, CONSOLE = "none", "console"  # verbs of a request that no route takes, and of a page
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STREAM = "text/event-stream"
_NO_STATUS = 499  # whoever asked left before there was one


@dataclass(slots=True)
class Seen:
    """One request."""

    status: int = 0
    received: int = 0  # bytes of bodies
    sent: int = 0
    follows: bool = False
    request: str = ""


class Meter(Protocol):
    """Counts requests."""

    def begun(self) -> None:
        """A request came."""

    def follows(self, number: int) -> None:
        """So many more follow a stream."""

    def ended(self, verb: str, seen: Seen, seconds: float) -> None:
        """It was answered, or broken off."""


class Observing:
    """Around everything else.

    Args:
        may_name: whether an asker's project is one that they may know of; else it is words that were sent.
        behind_proxy: whether the last address of `X-Forwarded-For` is the client's, as a proxy of ours says; what comes
            before it the client said itself.
    """

    def __init__(
        self, app: ASGIApp, meter: Meter, may_name: Callable[[Asker], bool], behind_proxy: bool = False
    ) -> None:
        self._app, self._meter, self._may_name, self._behind_proxy = app, meter, may_name, behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._believe_proxy(scope)
        seen, began = Seen(), time.perf_counter()

        async def received() -> Message:
            message = await receive()
            seen.received += len(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._started(seen, message)
            seen.sent += len(message.get("body", b""))
            await send(message)

        self._meter.begun()
        try:
            await self._app(scope, received, sent)
        finally:
            seconds, verb = time.perf_counter() - began, verb_of(scope)
            seen.status = seen.status or _NO_STATUS
            if seen.follows:
                self._meter.follows(-1)
            self._meter.ended(verb, seen, seconds)
            log.info("%s %d", verb, seen.status, extra=facts(**self._told(scope, verb, seen, seconds)))

    def _started(self, seen: Seen, message: Message) -> None:
        named = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in message.get("headers", ())}
        seen.status, seen.request = message["status"], named.get(b"posttrain-request", "")
        seen.follows = named.get(b"content-type", "").startswith(_STREAM)
        self._meter.follows(int(seen.follows))

    def _told(self, scope: Scope, verb: str, seen: Seen, seconds: float) -> Mapping[str, Any]:
        state: Mapping[str, Any] = scope.get("state", {})
        who: Asker | None = state.get("asker")
        run = scope.get("path_params", {}).get("run_id") if 200 <= seen.status < 300 else None  # else it may be none
        return {
            "request": seen.request or state.get("id"),
            "principal": state.get("principal"),
            "project": who.project if who and self._may_name(who) else None,
            "verb": verb,
            "method": scope["method"] if scope["method"] in _METHODS else "other",
            "status": seen.status,
            "milliseconds": round(seconds * 1000, 2),
            "run": run,
            "client": scope["client"][0] if scope.get("client") else None,
        }

    def _believe_proxy(self, scope: Scope) -> None:
        """Where a proxy of ours stands in front, it knows the client's address, and whether it ended TLS."""
        if not self._behind_proxy:
            return
        headers = Request(scope).headers
        with suppress(ValueError, IndexError):
            last = headers.getlist("x-forwarded-for")[-1].rpartition(",")[2].strip()
            scope["client"] = (str(ipaddress.ip_address(last)), 0)
        if headers.get("x-forwarded-proto") in ("http", "https"):
            scope["scheme"] = headers["x-forwarded-proto"]


def verb_of(scope: Scope) -> str:
    """The name of the route that took a request; of a page for browsers, that it is one."""
    route = scope.get("route")
    if route is None:
        return CONSOLE if "endpoint" in scope else UNKNOWN
    return str(route.name)
