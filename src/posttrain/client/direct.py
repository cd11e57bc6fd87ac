"""What goes directly between this machine and the server's store, by presigned URLs, which are secrets."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO
from urllib.parse import urlsplit

from posttrain.store.reaching import connected

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
    with _answer(url, "GET") as response:
        while piece := response.read(_PIECE):
            yield piece
        if response.length:
            raise ConnectionError("its answer broke off")


def sent(url: str, headers: Mapping[str, str], path: Path) -> None:
    """Send a file to a presigned URL.

    Raises:
        DirectError: it was not taken.
    """
    with path.open("rb") as file, _answer(url, "PUT", file, headers) as response:
        response.read()


@contextmanager
def _answer(
    url: str, method: str, body: BinaryIO | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[http.client.HTTPResponse]:
    """A good answer.

    Raises:
        DirectError: there is none, or it broke off.
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
