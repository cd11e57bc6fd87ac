"""Whether the environment names an S3 server that can be one: obstore panics at some that cannot."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from posttrain.domain.errors import InputError

VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_LONGEST = 80


def refuse_no_endpoint(url: str) -> None:
    """Look at the variables by which a store at an `s3://` URL is found.

    Raises:
        InputError: one of them is set, and names no server.
    """
    if not url.startswith(("s3://", "s3a://")):
        return
    for name in VARIABLES:
        value = os.environ.get(name)
        if value is not None and not _names_server(value):
            raise InputError(
                f"{name} must be the address of an S3 server, http://HOST or https://HOST, got {value[:_LONGEST]!r}; "
                "correct it, or unset it for Amazon's own"
            )


def _names_server(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and value.isascii()
    except ValueError:  # brackets that do not close, a port that is no number
        return False
