"""Addresses at which servers are reached."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from posttrain.domain.errors import InputError


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_advertised(url: str) -> str:
    """An address by which servers of other hosts reach one, which send it what its users send them.

    Raises:
        InputError: it is none, or others could listen.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InputError(f"--advertise: is no URL: {error}") from error
    safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(str(parts.hostname or "")))
    if not parts.hostname or not safe or parts.username is not None or parts.query or parts.fragment:
        raise InputError(
            f"--advertise must be https://HOST[:PORT], at which other servers send on what their users ask; got {url!r}"
        )
    return url.rstrip("/")
