"""Conversion of values to JSON and back, by the type annotations of verbs.

pydantic does the conversion. This module resolves names that other modules import only for the type checker: a package
of values must not load lower packages, but decoding a value requires them. The import lines of those modules locate
the names.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation


class _Names(dict[str, Any]):
    """Names that modules import only for the type checker, each loaded when it is used.

    The imports of a module are recorded when one of its verbs is read, or when one of its names is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[str, str] = {}  # name → the module that exports it

    def enter(self, module: str) -> None:
        """Record the imports of a module; of two equal names, the name that was recorded first counts."""
        self._rooms = {**_imported(module), **self._rooms}

    def __missing__(self, name: str) -> Any:
        room = self._rooms[name]
        while not hasattr(import_module(room), name):  # that module, too, imports the name only for the type checker
            room = _imported(room)[name]
        self.enter(room)
        self[name] = found = getattr(import_module(room), name)
        return found


@functools.cache
def _imported(module: str) -> dict[str, str]:
    """Return name → exporting module, for all imports in a module's bytecode, even those under `if TYPE_CHECKING`."""
    found, room = {}, ""
    for step in dis.get_instructions(import_module(module).__loader__.get_code(module)):  # type: ignore[union-attr]
        if step.opname == "IMPORT_NAME":
            room = str(step.argval)
        elif step.opname == "IMPORT_FROM":
            found[str(step.argval)] = room
    return found


_NAMES = _Names()


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the reader and writer of values of a type; names in the type are loaded as they occur."""
    found: TypeAdapter[Any] = TypeAdapter(kind)
    known: dict[str, Any] = {}
    while not found.pydantic_complete:
        try:
            found.rebuild(force=True, _types_namespace=known)
        except PydanticUndefinedAnnotation as error:
            known[str(error.name)] = _NAMES[str(error.name)]
    return found


@functools.cache
def signature(declared: Callable[..., Any]) -> inspect.Signature:
    """Return a verb's parameters after `self`, with resolved types; the return annotation stays as written."""
    own = inspect.signature(declared)
    hints = _hints(declared, lambda name: name != "return")
    named = [one.replace(annotation=hints[one.name]) for one in own.parameters.values() if one.name != "self"]
    return own.replace(parameters=named)


@functools.cache
def answer(declared: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return the decoder of a verb's answer, which only clients need: the decoder imports the values' packages."""
    return adapter(_hints(declared, lambda name: name == "return")["return"])


def _hints(declared: Callable[..., Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    written = {name: word for name, word in declared.__annotations__.items() if wanted(name)}
    holder = types.SimpleNamespace(__annotations__=written)
    _NAMES.enter(declared.__module__)
    return get_type_hints(holder, vars(import_module(declared.__module__)), _NAMES)
