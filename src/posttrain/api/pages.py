"""Lists in pages: a cursor marks where a page ends.

A cursor names the last thing of a page, never how many came before, so the next page begins behind it whatever was
added meanwhile. It is of one list of one project, asked with the same parameters, and means nothing anywhere else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from posttrain.api.verbs import CURSOR, LIMIT, Verb
from posttrain.domain.errors import CursorError

_SUM = 6  # bytes at the beginning of a cursor, by which it is known to be whole


def numbers(sample: str) -> tuple[int, ...]:
    """`(12, 388, 3)` of the id `12.388.3`: its order among the samples of a stage."""
    return tuple(int(part) if part.isdecimal() else -1 for part in sample.split("."))


def cursor(project: str, verb: Verb[..., Any], named: Mapping[str, Any], key: tuple[Any, ...]) -> str:
    """The place behind the thing of this key.

    Args:
        named: the request's parameters.
    """
    body = json.dumps([project, verb.name, _asked(named), key], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:_SUM] + body).decode().rstrip("=")


def place(text: str, project: str, verb: Verb[..., Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key that a cursor was made of.

    Raises:
        CursorError: it is none, or one of another list, project or parameters.
    """
    try:
        whole = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
        body = whole[_SUM:]
        if hashlib.sha256(body).digest()[:_SUM] != whole[:_SUM]:
            raise ValueError("it is not whole")
        of_project, of_verb, asked, key = json.loads(body)
        if not _is_key(verb, key):
            raise ValueError("it names nothing that such a list has")
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise CursorError(
            f"cursor must be the `next` of the page before, got {text[:40]!a}; ask without one for the first page"
        ) from error
    if (of_project, of_verb, asked) != (project, verb.name, _asked(named)):
        raise CursorError(
            "cursor must be of the same list of the same project, asked with the same parameters, got one of another; "
            "ask without one for the first page"
        )
    return tuple(key)


def _is_key(verb: Verb[..., Any], key: Any) -> bool:
    """Whether things of a list can have it: words and numbers, of a run its id."""
    if not isinstance(key, list) or not all(type(one) in (str, int, float) for one in key):
        return False
    return verb.newest is None or (len(key) == 1 and type(key[0]) is str and key[0].isprintable())


def _asked(named: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in named.items() if name not in (LIMIT, CURSOR)}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:12]
