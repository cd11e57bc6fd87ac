"""Whether a tracker's server answers, asked before its client is, which may try again for minutes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from posttrain.domain.errors import TrackerError

_SECONDS = 5.0  # for a connection
_PORTS = {"http": 80, "https": 443}


def refuse_unreachable(words: Any) -> None:
    """Refuse a tracking server that takes no connection. Behind a proxy, only its client knows.

    Raises:
        TrackerError: with the cause, in a few words.
    """
    from urllib.request import getproxies, proxy_bypass  # only whoever writes needs it

    uri = str(getattr(words, "tracking_uri", None) or "")
    parts = urlsplit(uri)
    host = parts.hostname
    if parts.scheme not in _PORTS or not host or (parts.scheme in getproxies() and not proxy_bypass(host)):
        return
    try:
        socket.create_connection((host, parts.port or _PORTS[parts.scheme]), _SECONDS).close()
    except (OSError, ValueError) as error:
        raise TrackerError(f"cannot reach {uri}: {unreachable(error) or error}") from error


def unreachable(error: BaseException) -> str:
    """The network's own word on why, wherever it is in the chain of causes; empty: it is something else."""
    for cause in _causes(error):
        if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
            return (cause.strerror or str(cause) or "no answer").lower()
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        yield found
        reason = getattr(found, "reason", None)  # urllib3 keeps it there
        found = reason if isinstance(reason, BaseException) else found.__cause__ or found.__context__
