"""Calls of verbs: arguments from what was sent, JSON from what a verb answers, pages of lists, and progress.

A verb's declaration decides the rest: files that it writes are fetched, items that it streams are sent one by one, and
lists are answered in pages. Progress of a verb goes to whoever waits for it, where somebody does.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_origin

import pydantic_core
from pydantic import ValidationError

from posttrain.api.codec import adapter
from posttrain.api.control import OPERATIONS, Control
from posttrain.api.verbs import (
    CURSOR,
    LIMIT,
    USUAL,
    FileRef,
    RunFile,
    Verb,
    cursor,
    named_function,
    place,
    refuse_unknown,
)
from posttrain.domain.errors import CursorError, InputError, PosttrainError
from posttrain.domain.ids import Role
from posttrain.server.uploads import Bundles

ASKED, ANSWER, PROGRESS = "asked", "answer", "progress"
Told = Callable[[str, Any], None]  # kind and value
_TOLD: ContextVar[Told | None] = ContextVar("posttrain_told", default=None)
_OUT = "out"  # where a verb writes, in the folder of its request
_SHOWN = 80  # characters of what was sent
_MOST_NUMBER = 1 << 63  # what a database counts to


def page(
    verb: Verb[..., Any], named: Mapping[str, Any], project: str, ask: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """The things behind a cursor, and the cursor behind them; None: there are no more.

    Args:
        named: the request's parameters.
        ask: the verb, by its parameters.

    Raises:
        CursorError: it is no place in this list.
    """
    limit = int(named.get(LIMIT, USUAL))
    behind = place(named[CURSOR], project, verb, named) if named.get(CURSOR) else None
    if verb.newest is not None:
        found = ask({**named, LIMIT: limit + 1, **({"before": behind[0]} if behind else {})})
        keys = [(verb.newest(one),) for one in found[:limit]]
    else:
        found, key = ask(named), verb.key
        assert key is not None, "a list has an order"
        whole = sorted(found.items() if isinstance(found, dict) else found, key=key)
        try:
            rest = [one for one in whole if behind is None or key(one) > behind]
        except TypeError as error:
            raise CursorError("cursor must be the `next` of the page before; ask without one for the first") from error
        keys = [key(one) for one in rest[:limit]]
        found = dict(rest[: limit + 1]) if isinstance(found, dict) else rest
    items = dict(list(found.items())[:limit]) if isinstance(found, dict) else list(found[:limit])
    return {"items": items, "next": cursor(project, verb, named, keys[-1]) if len(found) > limit else None}


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """For the length of the block `tell` reaches this."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def tell(kind: str, value: Any) -> None:
    """Tell it to whoever waits; nobody may."""
    if told := _TOLD.get():
        told(kind, value)


def _streamed(verb: Verb[..., Any], found: Any) -> dict[str, Any]:
    """An answer whose things come one by one: each is told as it comes, and all are answered at the end."""
    said = {one.name: getattr(found, one.name) for one in fields(found) if one.name != verb.streams}
    tell(ASKED, said)
    things = []
    for one in getattr(found, verb.streams):
        tell(ANSWER, one)
        things.append(one)
    return {**said, verb.streams: things}


def _written(verb: Verb[..., Any], found: Any, bundles: Bundles) -> dict[str, Any]:
    """An answer with the files that were written, which are in the store from now on: whoever asked fetches them by
    their digests. Paths in the answer are relative.
    """
    out = Path(_OUT).absolute()
    paths = {one.name: getattr(found, one.name) for one in fields(found)}
    inside = {name: path.absolute().relative_to(out) for name, path in paths.items() if isinstance(path, Path)}
    files = {
        path.relative_to(out).as_posix(): {
            "digest": bundles.keep(path, to_viewers=verb.needs is Role.VIEWER),
            "bytes": path.stat().st_size,
        }
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    return {"value": replace(found, **inside), "files": files}


def to_json(value: Any) -> bytes:
    """A verb's answer. Numbers that JSON has not are words: "NaN", "Infinity"."""
    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=_numbers)


def _numbers(value: Any) -> Any:
    """An array as a list, without a look at numpy, which the server itself does not load."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no form as JSON")
    return value.tolist()


def arguments(operation: Verb[..., Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's arguments, by name and of their types.

    Raises:
        InputError: one is missing, unknown, or of another type.
    """
    known = operation.parameters
    refuse_unknown(operation.name, sent, known)
    found = {}
    for name, one in known.items():
        value = sent.get(name, one.default)
        kinds = adapter(one.annotation)
        if value is inspect.Parameter.empty:
            value = None
            if not _takes_none(kinds):
                raise InputError(f"{operation.name}: {name} is required; add it")
        try:
            found[name] = checked = kinds.validate_python(value)
            if isinstance(checked, int) and not -_MOST_NUMBER <= checked < _MOST_NUMBER:
                raise InputError(f"{operation.name}: {name} must fit 64 bits, got a larger number")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in (name, *first["loc"]))
            shown = "" if isinstance(first["input"], dict | list) else f", got {str(first['input'])[:_SHOWN]!r}"
            raise InputError(f"{operation.name}: {place}: {first['msg']}{shown}") from error
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
        return page(OPERATIONS[verb], named, project, lambda asked: _call(control, verb, asked, bundles))
    return _call(control, verb, named, bundles)


def _call(control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    declared = OPERATIONS[verb]
    taken = declared.signature.parameters
    with bundles.opened() if bundles else nullcontext():
        given = {name: _laid_down(value, bundles) for name, value in named.items()}
        if declared.meant:
            given = named_function(declared.meant)(control, **given)
        if declared.writes:
            Path(_OUT).mkdir()
            given[declared.writes] = Path(_OUT, declared.file) if given.get(declared.writes, True) else None
        given |= {
            name: partial(tell, PROGRESS) for name, one in taken.items() if get_origin(one.annotation) is Callable
        }
        known = OrderedDict((name, given[name]) for name in taken if name in given)
        bound = inspect.BoundArguments(declared.signature, known)
        found = getattr(control, verb)(*bound.args, **bound.kwargs)
        if declared.writes:
            if bundles is None:
                raise PosttrainError("a verb that writes files was asked of the server itself")
            return _written(declared, found, bundles)
        return _streamed(declared, found) if declared.streams else found


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
