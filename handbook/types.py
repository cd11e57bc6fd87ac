"""A field's type, bounds and default in terms of YAML."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_PLAIN = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", type(None): "`null`"}
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]*$"  # a name of this file, or a ref
_EACH_ON_ITS_OWN = (list, tuple, frozenset, set)


def described(info: FieldInfo) -> str:
    """Return type and bounds: "whole number, 1 to 10⁹"."""
    return _type(info.annotation, info.metadata)


def default(info: FieldInfo) -> str:
    """Return the default as in YAML; "required" if there is none."""
    if info.default_factory is not None:
        return "`{}`"
    if info.default is PydanticUndefined:
        return "required"
    return _value(info.default)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every model that a type contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        if get_origin(annotation) is not Literal:
            yield from models(part)


def _value(value: Any) -> str:
    if isinstance(value, BaseModel):
        written = value.model_dump(mode="json")
        return f"`{written}`" if isinstance(written, str) else "as below"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, _EACH_ON_ITS_OWN):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, float):
        return f"`{_yaml_number(value)}`"
    return f"`{value}`".replace("\n", "\\n")


def _yaml_number(value: float) -> str:
    """Return the number in a form that YAML reads as a number: 1.0e-5, because 1e-05 is text."""
    mantissa, mark, exponent = f"{value!r}".partition("e")
    return mantissa if not mark else f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], [*_flat(parts[1:]), *metadata])
    if origin in (Union, types.UnionType):
        said = [_type(part, metadata) for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(said))
    if origin is Literal:
        return " · ".join(_value(part) for part in parts)
    if origin is dict:
        return ", ".join([f"map of names to {_type(parts[1])}", *_bounds(metadata)])
    if origin is tuple:
        inner = parts[:1] if len(parts) == 2 and parts[1] is Ellipsis else parts
        every = list(dict.fromkeys(_type(part) for part in inner))
        return f"list of {len(inner)}: {every[0]}" if len(inner) > 1 else f"list of: {every[0]}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{anchor(annotation)})"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " · ".join(f"`{member.value}`" for member in annotation)
    named = _named(metadata) or _PLAIN.get(annotation, "anything" if annotation is Any else str(annotation))
    return ", ".join([named, *_bounds(metadata)])


def anchor(model: type[BaseModel]) -> str:
    """Return the anchor of a section on the page."""
    return f"fields-{model.__name__.lower()}"


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _named(metadata: list[Any] | tuple[Any, ...]) -> str:
    """Return the type into which a Posttrain validator converts text, by the validator's name."""
    known = {
        "parse_duration": "duration (`90s`, `10m`, `2h`, `1d`, or seconds)",
        "parse_amount": "memory (`40GiB`, `512MiB`, `16GB`, or bytes)",
        "parse_count": "whole number (`5000000`, `5e6`)",
        "_readable": "regular expression with a group",
        "_known_role": "name of a role",
    }
    if any(getattr(item, "pattern", None) == _WORD for item in metadata):
        return "name"
    functions = [item.func.__name__ for item in metadata if isinstance(item, BeforeValidator | AfterValidator)]
    return next((known[name] for name in functions if name in known), "")


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            yield f"≥ {_number(item.ge)}"
        elif isinstance(item, annotated_types.Gt):
            yield f"> {_number(item.gt)}"
        elif isinstance(item, annotated_types.Le):
            yield f"≤ {_number(item.le)}"
        elif isinstance(item, annotated_types.Lt):
            yield f"< {_number(item.lt)}"
        elif isinstance(item, annotated_types.MinLen):
            yield "not empty" if item.min_length == 1 else f"at least {item.min_length}"
        elif getattr(item, "pattern", None) == _WORD:
            continue
        elif getattr(item, "pattern", None):
            yield f"matching `{item.pattern}`".replace("|", "\\|")


def _number(value: Any) -> str:
    """Return large powers as powers, which are easier to read than zeros."""
    if value < 0:
        return f"-{_number(-value)}"
    for base in (10, 2):
        exponent = 5 if base == 10 else 20
        while base**exponent < value:
            exponent += 1
        if base**exponent == value:
            return f"{base}{str(exponent).translate(_SUPERSCRIPT)}"
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"
