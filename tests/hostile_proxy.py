"""A real HTTP server in front of another, which can be told to go wrong."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

WELL, BUSY, HALF, WRONG, SILENT, GONE = "well", "busy", "half", "wrong", "silent", "gone"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_HOP = ("connection", "transfer-encoding", "keep-alive", "content-length", "date", "server")


@dataclass
class HostileProxy:
    """In front of `behind`; `fault(method, path)` says what happens to a request."""

    behind: str
    url: str = ""
    fault: Callable[[str, str], str] = lambda method, path: WELL
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def heal(self) -> None:
        self.fault = lambda method, path: WELL

    def ill(self, how: str, method: str = "", word: str = "") -> None:
        """From now on, for requests of this method that have this word in their path."""
        self.fault = lambda asked, path: how if method in ("", asked) and word in path else WELL


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: HostileProxy

    def _any(self) -> None:
        proxy = self.proxy
        proxy.seen.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}))
        how = proxy.fault(self.command, self.path)
        if how == GONE:
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if how == SILENT:
            proxy.over.wait()
            self.close_connection = True
            return
        if how == BUSY:
            self._send(503, [("content-type", "application/xml")], SLOW_DOWN, SLOW_DOWN)
            return
        status, headers, found = self._behind(body)
        sent = found
        if how == HALF:
            sent = found[: len(found) // 2]
        elif how == WRONG and status < 300:
            sent = bytes(byte ^ 1 for byte in found[:64]) + found[64:]
        self._send(status, headers, found, sent)

    def _behind(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(
            str(urlsplit(self.proxy.behind).hostname), urlsplit(self.proxy.behind).port
        )
        try:
            connection.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _send(self, status: int, headers: list[tuple[str, str]], whole: bytes, sent: bytes) -> None:
        self.send_response(status)
        length = str(len(whole))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(sent)
        if sent != whole and len(sent) != len(whole):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815  # the names that http.server asks for

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextmanager
def hostile_proxy(behind: str) -> Iterator[HostileProxy]:
    """A proxy that does well until it is told otherwise."""
    made = HostileProxy(behind)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
