"""Values that a job wrote, of the types that a dataclass names: whatever else stands there raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

MOST_NUMBER = 1 << 53  # that anything counts: sums of them still fit a database
_LARGE = 1 << 63  # beyond it no database holds a whole number
MOST_TEXT = 1 << 14  # characters of what is kept in rows
T = TypeVar("T")


def shaped(form: Callable[..., T], raw: Mapping[str, Any]) -> T:
    """A dataclass of these fields. Elements of lists are not looked at: there may be millions.

    Raises:
        TypeError, ValueError: a field is missing, unknown, or of another type.
    """
    known = _checks(form)
    for name, value in raw.items():
        if name in known and not known[name](value):
            raise TypeError(f"{name} must be of type {_types(form)[name]}, got {repr(value)[:60]}")
    return form(**raw)


def count(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        TypeError: it is none.
    """
    if not _is_int(value) or not 0 <= value <= MOST_NUMBER:
        raise TypeError(f"must be a whole number from 0 to {MOST_NUMBER}, got {repr(value)[:60]}")
    return int(value)


def duration(value: Any) -> float:
    """Seconds: a number from 0 on, neither infinite nor NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value) or not 0 <= value < math.inf:
        raise TypeError(f"must be seconds, got {repr(value)[:60]}")
    return float(value)


def real(value: Any) -> float:
    """A number, which may be NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value):
        raise TypeError(f"must be a number, got {repr(value)[:60]}")
    return value  # type: ignore[no-any-return]


def text(value: Any, most: int = MOST_TEXT) -> str:
    """Text that every database takes: no NUL, no half of a surrogate pair, cut where it is too long.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"must be text, got {repr(value)[:60]}")
    return value[:most].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGE


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, Any]": _is_table,
    "Mapping[str, float]": lambda value: _is_table(value) and all(map(_is_number, value.values())),
    **{f"Sequence[{one}]": lambda value: isinstance(value, list | tuple) for one in ("int", "float", "str", "bool")},
}


@cache
def _types(form: Any) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(form)}


@cache
def _checks(form: Any) -> dict[str, Callable[[Any], bool]]:
    return {name: _KINDS[kind] for name, kind in _types(form).items()}
