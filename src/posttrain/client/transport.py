"""Requests to a server, and direct transfers between this machine and the server's store.

Each thread has one connection to a server. A request is repeated only if its effect cannot occur twice. Direct
transfers use presigned URLs, which are secrets.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from posttrain._version import __version__
from posttrain.api.codec import MEDIA_TYPE, raised
from posttrain.api.verbs import API_VERSION, UNKNOWN_PARAMETER
from posttrain.domain.errors import (
    ApiVersionError,
    BusyError,
    InfrastructureError,
    InputError,
    LedgerUnavailableError,
    LimitError,
    UnavailableError,
)
from posttrain.store.retries import AwayError, KeptConnection, connected, patiently

_STALLED = 60.0  # seconds without a byte
_OK = 200
ANSWER_SECONDS = 960.0  # seconds; longer than a server's limit for a request
_CONNECT_SECONDS = 30.0
_HEARD_SECONDS = 60.0  # the server sends a comment in a silent stream four times a minute
PATIENCE = 120.0  # seconds of retries, because a server or its database may be restarting
HOPE = "trying for two minutes"
_PIECE = 1 << 20  # bytes per read
_LATER = (429, 502, 503, 504)
_MOST_PAUSE = 30.0  # seconds; the longest pause that a server may request
_GONE = (http.client.HTTPException, ConnectionError, socket.gaierror, TimeoutError, OSError)


class DirectError(Exception):
    """The store is unreachable from this machine or rejects the request; the server can still transfer the file."""


def fetched(url: str) -> Iterator[bytes]:
    """Yield the bytes at a presigned URL, piece by piece.

    Raises:
        DirectError: the bytes did not arrive completely.
    """
    with _answer(url, "GET") as response:
        while piece := response.read(_PIECE):
            yield piece
        if response.length:
            raise ConnectionError("the response ended early")


def sent(url: str, headers: Mapping[str, str], path: Path) -> None:
    """Send a file to a presigned URL.

    Raises:
        DirectError: the store did not accept the file.
    """
    with path.open("rb") as file, _answer(url, "PUT", file, headers) as response:
        response.read()


@contextmanager
def _answer(
    url: str, method: str, body: BinaryIO | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[http.client.HTTPResponse]:
    """Yield a successful response.

    Raises:
        DirectError: there is no successful response, or the response ended early.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DirectError("the server names no address of a store")
    try:
        with closing(connected(url, silence=_STALLED)) as connection:
            connection.request(method, f"{parts.path}?{parts.query}", body=body, headers=dict(headers))
            response = connection.getresponse()
            if response.status != _OK:
                raise DirectError(f"{parts.hostname} answers {response.status}")
            yield response
    except (OSError, http.client.HTTPException) as error:
        raise DirectError(f"{parts.hostname}: {' '.join(str(error).split()) or type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class Reply:
    """The response of a server."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """The requests to one server.

    Args:
        url: `http://127.0.0.1:8460`, or a URL with https.
        token: the token that is sent with every request.

    Raises:
        InputError: the URL is invalid, or a token would be sent over the network unencrypted.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = check_address(url)
        self.url = url.rstrip("/")
        self._base, self._token = parts.path.rstrip("/"), token
        self.release = ""  # the server's version, after its first response
        self._kept = KeptConnection()

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request, and repeat it while the server is unreachable; an unsafe request has one key in all tries.

        Raises:
            PosttrainError: the server responded with a problem, which is raised.
            InfrastructureError: the server cannot be reached.
        """
        sent = raw if raw is not None else None if body is None else json.dumps(body).encode()
        named = {"content-type": "application/json"} if body is not None else {}
        if method != "GET":
            named["idempotency-key"] = secrets.token_hex(16)

        def tried() -> Reply:
            try:
                reply = self._once(method, path, query, sent, {**named, **(headers or {})})
            except ssl.SSLError as error:
                raise InfrastructureError(
                    f"server {self.url}: TLS failed: {error.reason or error}; check the scheme (http:// or "
                    "https://) and the server's certificate"
                ) from error
            except _GONE as error:
                self.close()
                raise AwayError(f"server {self.url} does not answer ({_words(error)})") from error
            told = MEDIA_TYPE in reply.headers.get("content-type", "")
            if reply.status not in _LATER or (told and "retry-after" not in reply.headers):
                return reply
            said = raised(json.loads(reply.body)) if told else InfrastructureError(f"status {reply.status}")
            raise AwayError(f"server {self.url}: {said}", _told_later(reply)) from said

        try:
            return self._checked(patiently(tried, AwayError, PATIENCE, HOPE))
        except AwayError as error:
            last = error.__cause__
        if isinstance(last, UnavailableError | LedgerUnavailableError | LimitError | BusyError):
            raise last
        raise InfrastructureError(
            f"server {self.url} cannot be reached: {_words(last)}; check that the server runs and that its address is "
            "correct"
        ) from last

    def look(self, path: str) -> Reply:
        """Return the response to a single GET, whatever its status.

        Raises:
            InfrastructureError: there is no response.
        """
        try:
            with self._asked("GET", path, silence=_CONNECT_SECONDS) as response:
                return _reply(response)
        except _GONE as error:
            raise InfrastructureError(
                f"server {self.url} does not answer: {_words(error)}; check that it runs"
            ) from error

    def stream(
        self, path: str, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the kind and data of each server-sent event, until the server ends the stream.

        Raises:
            PosttrainError: the server responded with a problem, which is raised.
            InfrastructureError: the connection ended too early, or no event arrived in time.
        """
        try:
            yield from self._events(path, query, body)
        except _GONE as error:
            raise InfrastructureError(
                f"server {self.url}: the stream ended early ({_words(error)}); try again"
            ) from error

    def _events(self, path: str, query: Mapping[str, Any] | None, body: Any) -> Iterator[tuple[str, bytes]]:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"accept": "text/event-stream"} | ({"content-type": "application/json"} if sent else {})
        silence = ANSWER_SECONDS if sent else _HEARD_SECONDS
        with self._asked("POST" if sent else "GET", path, query, sent, headers, silence) as response:
            if response.status != http.client.OK:
                self._checked(_reply(response))
            kind, data = "", b""
            for line in response:
                word, _, rest = line.rstrip(b"\n").partition(b": ")
                if word == b"event":
                    kind = rest.decode()
                elif word == b"data":
                    data = rest
                elif not line.strip() and kind:
                    if kind == "problem":
                        raise raised(json.loads(data))
                    yield kind, data
                    if kind == "end":
                        return
                    kind, data = "", b""
            raise ConnectionError("the server ended the stream")

    def pieces(self, path: str, *, direct: bool = False) -> Iterator[bytes]:
        """Yield the bytes at a path, piece by piece.

        Args:
            direct: whether to follow a redirect to the store; the token is not sent there.

        Raises:
            PosttrainError: the server responded with a problem, which is raised.
            InfrastructureError: the response ended early.
            DirectError: the store did not return the bytes.
        """
        try:
            with self._asked("GET", path, {"direct": "yes"} if direct else None) as response:
                if direct and response.status == http.client.TEMPORARY_REDIRECT:
                    yield from fetched(str(response.headers.get("location")))
                    return
                if response.status != http.client.OK:
                    self._checked(_reply(response))
                while piece := response.read(_PIECE):
                    yield piece
                if response.length:
                    raise InfrastructureError(f"server {self.url}: the response ended early; try again")
        except _GONE as error:
            raise InfrastructureError(
                f"server {self.url}: the response ended early ({_words(error)}); try again"
            ) from error

    def _once(
        self, method: str, path: str, query: Mapping[str, Any] | None, sent: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        connection = self._kept.to(ANSWER_SECONDS, self._connect)
        connection.request(method, self._path(path, query), body=sent, headers=self._headers(headers))
        return _reply(connection.getresponse())

    @contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        sent: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        silence: float = ANSWER_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request over a separate connection and yield the response."""
        with closing(self._connect(silence)) as connection:
            connection.request(method, self._path(path, query), body=sent, headers=self._headers(headers))
            yield connection.getresponse()

    def _connect(self, silence: float) -> http.client.HTTPConnection:
        return connected(self.url, patience=_CONNECT_SECONDS, silence=silence)

    def close(self) -> None:
        """Close this thread's connection."""
        self._kept.drop()

    def _path(self, path: str, query: Mapping[str, Any] | None) -> str:
        named = {name: value for name, value in (query or {}).items() if value is not None}
        words = urlencode({name: _word(value) for name, value in named.items()}, doseq=True)
        return f"{self._base}{path}{'?' + words if words else ''}"

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}", "user-agent": f"posttrain/{__version__}", **more}

    def _checked(self, reply: Reply) -> Reply:
        """Return a response if it is successful.

        Raises:
            PosttrainError: the server responded with a problem, which is raised.
            ApiVersionError: the server has another API version.
        """
        spoken = reply.headers.get("posttrain-api", "")
        if spoken and str(API_VERSION) not in spoken.split(", "):
            raise ApiVersionError(
                f"server {self.url} has version {spoken} of the API, and this client (Posttrain {__version__}) has "
                f"version {API_VERSION}; install Posttrain {reply.headers.get('posttrain-version')}, "
                "the server's version"
            )
        self.release = reply.headers.get("posttrain-version", "")
        if reply.status < http.client.BAD_REQUEST:
            return reply
        try:
            document = json.loads(reply.body)
        except ValueError:
            document = {}
        if not isinstance(document, dict) or "type" not in document:
            raise InfrastructureError(f"the server answered with status {reply.status} and no problem document")
        error = raised(document)
        if isinstance(error, InputError) and UNKNOWN_PARAMETER in str(error) and self.release not in ("", __version__):
            raise ApiVersionError(f"{error}; {self.skew}") from error
        raise error

    @property
    def skew(self) -> str:
        """The remedy if the server has another version of Posttrain."""
        return (
            f"server {self.url} is Posttrain {self.release}, this client is {__version__}; install Posttrain "
            f"{self.release}"
        )


def check_address(url: str) -> SplitResult:
    """Return the parts of a server's URL.

    Raises:
        InputError: the URL is not valid, or a token would be sent over the network unencrypted.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InputError(f"server {url[:120]!a}: is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        shown = url if parts.username is None else f"{parts.scheme}://…@{parts.hostname}"
        raise InputError(f"server must be http://HOST:PORT or https://HOST, got {shown[:120]!a}")
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise InputError(f"server {parts.hostname}: a token must not be sent unencrypted over a network; use https://")
    return parts


def in_path(template: str, named: Mapping[str, Any]) -> str:
    """Return a path with its parameters filled in."""
    return template.format_map({name: quote(str(value), safe="") for name, value in named.items()})


def _told_later(reply: Reply) -> float:
    """Return the seconds in a `retry-after` header; 0 without the header."""
    said = reply.headers.get("retry-after", "")
    return min(_MOST_PAUSE, float(said)) if said.isdecimal() else 0.0


def _reply(response: http.client.HTTPResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Reply(response.status, headers, response.read())


def _word(value: Any) -> Any:
    return ("true" if value else "false") if isinstance(value, bool) else value


def _words(error: BaseException | None) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__) if error else "no answer"
