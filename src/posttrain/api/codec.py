"""Values as JSON and back, by the types that verbs are annotated with.

pydantic does the work. What is written here is how names are found that modules import for the type checker alone: a
room of values must not load the rooms below, and whoever decodes a value has to. Their own import lines say where.
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
    """Names that modules import for the type checker alone, each loaded when it is asked for.

    Such a module is entered when a verb of it is read, or when a name of it is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[str, str] = {}  # name → the module that it is imported from

    def enter(self, module: str) -> None:
        """Know what a module imports; of two equal names the first one counts."""
        self._rooms = {**_imported(module), **self._rooms}

    def __missing__(self, name: str) -> Any:
        room = self._rooms[name]
        while not hasattr(import_module(room), name):  # it imports the name for the type checker too
            room = _imported(room)[name]
        self.enter(room)
        self[name] = found = getattr(import_module(room), name)
        return found


@functools.cache
def _imported(module: str) -> dict[str, str]:
    """Name → module, of what a module imports, also under `if TYPE_CHECKING`: its bytecode says both."""
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
    """What reads and writes values of a type; names that it needs are loaded as they are met."""
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
    """A verb's parameters, after `self`, with the types themselves; what it answers is left as it is written."""
    own = inspect.signature(declared)
    hints = _hints(declared, lambda name: name != "return")
    named = [one.replace(annotation=hints[one.name]) for one in own.parameters.values() if one.name != "self"]
    return own.replace(parameters=named)


@functools.cache
def answer(declared: Callable[..., Any]) -> TypeAdapter[Any]:
    """What reads a verb's answer. It loads the rooms of the values in it, which a server need not."""
    return adapter(_hints(declared, lambda name: name == "return")["return"])


def _hints(declared: Callable[..., Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    written = {name: word for name, word in declared.__annotations__.items() if wanted(name)}
    holder = types.SimpleNamespace(__annotations__=written)
    _NAMES.enter(declared.__module__)
    return get_type_hints(holder, vars(import_module(declared.__module__)), _NAMES)
