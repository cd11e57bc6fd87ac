"""Canonical JSON (RFC 8785), its digests, and derived seeds.

Seeds are derived, never global: a seed is a hash of the run's seed and of the names of the seed's purpose.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rfc8785

from posttrain.domain.errors import InputError

DIGEST_PREFIX = "sha256:"
DIGEST_LENGTH = len(DIGEST_PREFIX) + 64
_EXACT = 2**53  # from this value on, JSON readers represent whole numbers differently
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


class _UnusualError(Exception):
    """A value that the standard library's encoder writes differently from RFC 8785."""


def canonical_json(value: Any) -> bytes:
    """Serialise `value` by RFC 8785: sorted keys, shortest numbers, no white space.

    Common documents (ASCII keys, numbers without an exponent) use the standard library's encoder, which is three times
    as fast as rfc8785; a property test checks that both give the same bytes.

    Raises:
        InputError: `value` contains NaN, infinity, an integer beyond 2^53, or a type that JSON lacks.
    """
    try:
        return _encode(_usual(value)).encode()
    except (_UnusualError, UnicodeEncodeError, RecursionError):
        pass
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot write canonical JSON: {error}; use finite numbers, strings, lists and maps"
        ) from error


def _usual(value: Any) -> Any:
    """Return `value` with whole floats as integers.

    Raises:
        _UnusualError: `value` contains a value that the two encoders write differently, or that JSON lacks.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None or (kind is int and -_EXACT < value < _EXACT):
        return value
    if kind is float and (value == 0 or 1e-4 <= abs(value) < _EXACT):  # else Python writes an exponent, or NaN
        return int(value) if value.is_integer() else value
    if kind is dict and all(type(key) is str and key.isascii() for key in value):  # ASCII keys sort as in UTF-16
        return {key: _usual(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_usual(item) for item in value]
    raise _UnusualError


def digest_bytes(data: bytes) -> str:
    """Return `sha256:<64 hex digits>` of raw bytes."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def digest_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return name → digest of the bytes of each file."""
    return {name: digest_bytes(path.read_bytes()) for name, path in files.items()}


def digest_chunks(chunks: Iterable[bytes]) -> str:
    """Return `sha256:…` of a stream, in constant memory."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return DIGEST_PREFIX + state.hexdigest()


def verified(chunks: Iterable[bytes], digest: str, wrong: Callable[[str], Exception]) -> Iterator[bytes]:
    """Yield a stream unchanged; raise at its end if the digest differs.

    Args:
        wrong: returns the error for the actual digest.
    """
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
        yield chunk
    found = DIGEST_PREFIX + state.hexdigest()
    if found != digest:
        raise wrong(found)


def digest_json(value: Any) -> str:
    """Return `sha256:…` of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def is_digest(text: str) -> bool:
    """Return whether `text` is a well-formed `sha256:…` digest."""
    body = text[len(DIGEST_PREFIX) :]
    return len(text) == DIGEST_LENGTH and text.startswith(DIGEST_PREFIX) and all(c in "0123456789abcdef" for c in body)


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    Args:
        seed: the manifest's seed.
        purpose: names and counters, for example `("grpo", "prompts", 3)`. Different purposes give independent seeds.
    """
    text = "\x1f".join([str(seed), *(f"{type(p).__name__}:{p}" for p in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
