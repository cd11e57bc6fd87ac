"""From what was sent to a verb's arguments, and from what it answers to JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pydantic_core
from pydantic import ValidationError

from posttrain.api.codec import adapter, signature
from posttrain.api.operations import OPERATIONS, FileRef, Operation, RunFile
from posttrain.api.versions import UNKNOWN_PARAMETER
from posttrain.domain.errors import InputError, nearest
from posttrain.server.pages import page
from posttrain.server.special import SPECIAL
from posttrain.server.telling import PROGRESS, tell

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.server.bundles import Bundles

_SHOWN = 80  # characters of what was sent
_MOST_NUMBER = 1 << 63  # what a database counts to


def to_json(value: Any) -> bytes:
    """A verb's answer. Numbers that JSON has not are words: "NaN", "Infinity"."""
    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=_numbers)


def _numbers(value: Any) -> Any:
    """An array as a list, without a look at numpy, which the server itself does not load."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no form as JSON")
    return value.tolist()


def arguments(operation: Operation, sent: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's arguments, by name and of their types.

    Raises:
        InputError: one is missing, unknown, or of another type.
    """
    known = operation.parameters
    for name in sent:
        if name not in known:
            raise InputError(
                f"{operation.verb}: {UNKNOWN_PARAMETER} {name!r}{nearest(name, known)}; remove or rename it"
            )
    found = {}
    for name, one in known.items():
        value = sent.get(name, one.default)
        kinds = adapter(one.annotation)
        if value is inspect.Parameter.empty:
            value = None
            if not _takes_none(kinds):
                raise InputError(f"{operation.verb}: {name} is required; add it")
        try:
            found[name] = checked = kinds.validate_python(value)
            if isinstance(checked, int) and not -_MOST_NUMBER <= checked < _MOST_NUMBER:
                raise InputError(f"{operation.verb}: {name} must fit 64 bits, got a larger number")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in (name, *first["loc"]))
            shown = "" if isinstance(first["input"], dict | list) else f", got {str(first['input'])[:_SHOWN]!r}"
            raise InputError(f"{operation.verb}: {place}: {first['msg']}{shown}") from error
    return found


def call(
    control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None = None, project: str = ""
) -> Any:
    """Ask a verb with the arguments that `arguments` gave; of a list a page.

    Args:
        bundles: where files that were sent are laid down; None: the verb takes none.
        project: whose cursors are known.
    """
    if OPERATIONS[verb].paged:
        return page(verb, named, project, lambda asked: _call(control, verb, asked, bundles))
    return _call(control, verb, named, bundles)


def _call(control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    with bundles.opened() if bundles else nullcontext():
        if verb in SPECIAL:
            return SPECIAL[verb](control, {name: _laid_down(value, bundles) for name, value in named.items()}, bundles)
        positional: list[Any] = []
        options: dict[str, Any] = {}
        for name, one in signature(verb).parameters.items():
            if name not in named:
                if name in _CALLBACKS:
                    options[name] = _tell
                continue
            value = _laid_down(named[name], bundles)
            if one.kind is inspect.Parameter.KEYWORD_ONLY:
                options[name] = value
            elif one.kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            else:
                positional.append(value)
        return getattr(control, verb)(*positional, **options)


_CALLBACKS = ("say", "progress")


def _tell(text: str) -> None:
    tell(PROGRESS, text)


def _laid_down(value: Any, bundles: Bundles | None) -> Any:
    if isinstance(value, list) and value and all(isinstance(one, FileRef) for one in value):
        return [_laid_down(one, bundles) for one in value]
    if isinstance(value, dict) and value and all(isinstance(one, FileRef) for one in value.values()):
        return {name: bundles.lay(one, name) for name, one in value.items()} if bundles else {}
    if not isinstance(value, FileRef | RunFile):
        return value
    if bundles is None:
        raise InputError("this verb takes no files")
    return bundles.lay_down(value)


def _takes_none(kinds: Any) -> bool:
    try:
        kinds.validate_python(None)
    except ValidationError:
        return False
    return True
