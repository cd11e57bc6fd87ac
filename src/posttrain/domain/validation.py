"""Turns a pydantic error into one line that names file, field, constraint, offending value and the nearest known
name.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.vocabulary import FIELDS, KINDS, NOT_HERE, UNITS

_SHOWN = 120  # characters of a value
_TARGET = re.compile(r"=|://")  # where a key that was meant as a word with its target begins to hold the target
_TAG = re.compile(r"function-|constrained-|literal\[|lax-or-strict")
_CREDENTIALS = re.compile(r"://\S*@")


def explain(error: ValidationError, source: str, model: type[BaseModel]) -> InputError:
    """The first complaint of a validation as one line; an unknown key comes first, for it explains a missing one.

    Args:
        source: the file (and dotted path in it) the value came from.
        model: the class that was validated; its fields give the nearest known name.
    """
    every = error.errors(include_url=False)
    first = min(every, key=lambda found: found["type"] != "extra_forbidden")
    location = _place(first)
    where = f"{source}: " + ".".join(map(bare, location)) + (": " if location else "")
    reason = NOT_HERE.get(str(location[-1])) if location else None
    if first["type"] == "extra_forbidden" and reason:
        return InputError(f"{where}unknown key here: {reason}; remove it")
    if first["type"] == "extra_forbidden":
        return InputError(f"{where}unknown key{_meant(str(location[-1]), model, location[:-1])}; remove or rename it")
    if first["type"] == "missing":
        return InputError(f"{where}is required; add it")
    message = _words(first["type"], first.get("ctx", {})) or first["msg"].removeprefix("Value error, ")
    message += "".join(
        f", or {one['ctx']['expected']}"
        for one in every
        if one is not first and one["type"] == "literal_error" and _place(one) == location
    )
    given = first.get("input")
    shown = "" if isinstance(given, dict | list) or " got " in message else f", got {_shortened(given)}"
    return InputError(f"{where}{message}{shown}")


def bare(key: object) -> str:
    """A key as an error may show it: what follows `=` or `://` may be a password.

    `mlflow=http://me:secret@host` is shown as `mlflow=…`.
    """
    text = str(key)
    found = _TARGET.search(text)
    return f"{text[: found.end()]}…" if found else text


_PLAIN = {
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "must be a whole number in digits"
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "must be a map"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "invalid_key": "must have words as keys",
}


def _words(kind: str, about: Mapping[str, Any]) -> str | None:
    """What pydantic complains of, in the words of these errors; None: its own."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    sides = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
    sides |= {"greater_than": ("more than", "gt"), "less_than": ("less than", "lt")}
    if kind in sides:
        side, key = sides[kind]
        return f"must be {side} {_plainly(about[key])}"
    if kind == "literal_error":
        return f"must be one of {str(about['expected']).replace(' or ', ', ')}"
    return None


def _plainly(bound: float) -> str:
    """`1000000`, `0.5`, `1e12`."""
    whole = float(bound).is_integer()
    return f"{int(bound)}" if whole and abs(bound) < 1e10 else f"{bound:.17g}" if whole else f"{bound:g}"


def _shortened(given: Any) -> str:
    shown = _CREDENTIALS.sub("://…@", repr(given))
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]}…"


def refuse_truth_values(model: type[BaseModel], value: Any) -> Any:
    """`value` as it is, unless it has true or false where `model` takes a number: pydantic reads them as 1 and 0.

    Raises:
        ValueError: naming field and value.
    """
    for name, field in model.model_fields.items() if isinstance(value, dict) else ():
        given = value.get(field.alias or name)
        found = next((part for part in (given if isinstance(given, list) else [given]) if isinstance(part, bool)), None)
        if found is not None and not _takes(field.annotation, (bool, Any)) and _takes(field.annotation, (int, float)):
            raise ValueError(f"{name} must be a number, got {str(found).lower()}; write the number")
    return value


def _takes(annotation: Any, kinds: tuple[Any, ...]) -> bool:
    if typing.get_origin(annotation) is dict:  # whose own values are another matter
        return False
    return annotation in kinds or any(_takes(part, kinds) for part in typing.get_args(annotation))


def _place(found: Mapping[str, Any]) -> Sequence[int | str]:
    """Where in the file it is, without the names that pydantic gives the members of a union."""
    place = [part for part in found["loc"] if not (isinstance(part, str) and _TAG.match(part))]
    return place[:-1] if len(place) > 1 and place[-1] in ("int", "float", "str", "bool") else place


def unknown_kind(kind: str, known: Iterable[str]) -> str:
    """`unknown stage kind 'rloo': is kind: grpo with advantage: rloo`, or the nearest of those that there are."""
    names = list(known)
    told = KINDS.get(kind.lower())
    if told is None:
        return f"unknown stage kind {kind!r}{nearest(kind, names)}"
    return f"unknown stage kind {kind!r}: it {told} (kinds: {', '.join(names)})"


def _meant(word: str, model: type[BaseModel], place: Sequence[int | str]) -> str:
    """` (did you mean 'learning_rate' under 'optimizer'?)`: by our word or another trainer's, else the nearest here."""
    known = _fields_at(model, place)
    below = {name: _fields_at(model, [*place, name]) for name in known}
    unit = f", {UNITS[word.lower()]}" if word.lower() in UNITS else ""
    for wanted in (word, *FIELDS.get(word.lower(), ())):
        if wanted in known:
            return f" (did you mean {wanted!r}{unit}?)"
        parent = next((name for name, fields in below.items() if wanted in fields), None)
        if parent:
            return f" (did you mean {wanted!r} under {parent!r}{unit}?)"
    return nearest(word, known)


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    current: Any = model
    for part in location:
        found = _model_of(current)
        current = (
            found.model_fields[str(part)].annotation if found and str(part) in found.model_fields else _inner(current)
        )
    found = _model_of(current)
    return [field.alias or name for name, field in found.model_fields.items()] if found else []


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, typing.Annotated):
        return next(filter(None, map(_model_of, typing.get_args(annotation))), None)
    return None


def _inner(annotation: Any) -> Any:
    arguments = typing.get_args(annotation)
    return arguments[-1] if arguments and arguments[-1] is not Ellipsis else arguments[0] if arguments else None


class Frozen(BaseModel):
    """Immutable, and a key nobody knows is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any) -> Any:
        return refuse_truth_values(cls, value)
