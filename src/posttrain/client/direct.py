"""What goes directly between this machine and the server's store, by presigned URLs, which are secrets."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 10.0  # a store that cannot be reached from here is not waited for
_STALLED = 60.0  # seconds without a byte
_PIECE = 1 << 20  # bytes
_OK = 200


class DirectError(Exception):
    """The store cannot be reached from here, or refuses: the way through the server is left."""


def fetched(url: str) -> Iterator[bytes]:
    """What is at a presigned URL, piece by piece.

    Raises:
        DirectError: it did not come as a whole.
    """
    connection, path, host = _opened(url)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != _OK:
            raise DirectError(f"{host} answers {response.status}")
        while piece := response.read(_PIECE):
            yield piece
        if response.length:
            raise DirectError(f"{host}: its answer broke off")
    except (OSError, http.client.HTTPException) as error:
        raise DirectError(f"{host}: {_words(error)}") from error
    finally:
        connection.close()


def sent(url: str, headers: Mapping[str, str], path: Path) -> None:
    """Send a file to a presigned URL.

    Raises:
        DirectError: it was not taken.
    """
    connection, place, host = _opened(url)
    try:
        with path.open("rb") as file:
            connection.request("PUT", place, body=file, headers=dict(headers))
        response = connection.getresponse()
        response.read()
        if response.status != _OK:
            raise DirectError(f"{host} answers {response.status}")
    except (OSError, http.client.HTTPException) as error:
        raise DirectError(f"{host}: {_words(error)}") from error
    finally:
        connection.close()


def _opened(url: str) -> tuple[http.client.HTTPConnection, str, str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DirectError("the server names no address of a store")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    options: dict[str, Any] = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
    made = kind(parts.hostname, parts.port, timeout=_CONNECT_SECONDS, **options)
    try:
        made.connect()
    except OSError as error:
        raise DirectError(f"{parts.hostname}: {_words(error)}") from error
    made.sock.settimeout(_STALLED)
    return made, f"{parts.path}?{parts.query}", parts.hostname


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
