"""Canonical JSON (RFC 8785) and the digests made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import rfc8785

from posttrain.domain.errors import InputError

DIGEST_PREFIX = "sha256:"
DIGEST_LENGTH = len(DIGEST_PREFIX) + 64


def canonical_json(value: Any) -> bytes:
    """Serialise `value` by RFC 8785: sorted keys, shortest numbers, no white space.

    Raises:
        InputError: NaN, infinity, an integer beyond 2^53, or a type JSON does not have.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, TypeError, ValueError) as error:
        raise InputError(
            f"cannot write canonical JSON: {error}; use finite numbers, strings, lists and maps"
        ) from error


def digest_bytes(data: bytes) -> str:
    """`sha256:<64 hex digits>` of raw bytes."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def digest_chunks(chunks: Iterable[bytes]) -> str:
    """`sha256:…` of a stream, in constant memory."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return DIGEST_PREFIX + state.hexdigest()


def digest_json(value: Any) -> str:
    """`sha256:…` of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def is_digest(text: str) -> bool:
    """Whether `text` is a well-formed `sha256:…` digest."""
    body = text[len(DIGEST_PREFIX) :]
    return len(text) == DIGEST_LENGTH and text.startswith(DIGEST_PREFIX) and all(c in "0123456789abcdef" for c in body)
