"""Conversion of values to JSON and back, by the type annotations of verbs; and of errors to problem documents.

pydantic converts values. This module resolves names that other modules import only for the type checker: a package of
values must not load lower packages, but decoding a value requires them. The import lines of those modules locate the
names. An error keeps its class, its message and its exit code in a problem document (RFC 9457).
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation

from posttrain.domain import errors
from posttrain.domain.errors import InfrastructureError, PosttrainError

MEDIA_TYPE = "application/problem+json"
TYPE = "urn:posttrain:problem:"  # followed by the name of the error
SERVER_ERRORS = 500  # this status and above: the fault is the server's, not the request's
_LOG = "The server's log contains the reason, in the lines with the id of this request."
UNEXPECTED = "unexpected"  # a bug: the server's log has the details
_STATUS: Mapping[type[PosttrainError], int] = {
    errors.NotFoundError: 404,
    errors.ApiVersionError: 404,
    errors.InputError: 422,
    errors.AccessError: 403,
    errors.ConflictError: 409,
    errors.GateRejectedError: 409,
    errors.GateInconclusiveError: 409,
    errors.BudgetExceededError: 409,
    errors.StoppedError: 409,
    errors.JobFailedError: 409,
    errors.IntegrityError: 500,
    errors.UploadError: 422,
    errors.LimitError: 429,
    errors.SinkError: 424,
    errors.TrackerError: 424,
    errors.CapacityError: 503,
    errors.InfrastructureError: 503,
    errors.WorkspaceError: 503,
    errors.DeadlineError: 504,
    errors.SlowError: 408,
}


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


def _classes(above: type[PosttrainError] = PosttrainError) -> Iterator[type[PosttrainError]]:
    for one in above.__subclasses__():
        yield one
        yield from _classes(one)


def _name(kind: type[BaseException]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__.removesuffix("Error")).lower()


def problem(error: BaseException, request: str = "", status: int | None = None) -> dict[str, Any]:
    """Return the document that describes an error.

    With a status of 500 or more, the document contains only the kind of the error and the request's id, because the
    messages of such errors name databases, users, endpoints and objects.

    Args:
        request: id of the request, which is also in the server's log.
        status: replaces the status of the error's class.
    """
    known = error if isinstance(error, PosttrainError) else None
    kind: type[PosttrainError] = type(known) if known else PosttrainError
    found = next((_STATUS[one] for one in kind.__mro__ if issubclass(one, PosttrainError) and one in _STATUS), 500)
    title = (kind.__doc__ or "").strip().split("\n")[0] if known else "An unexpected error in Posttrain."
    hidden = (status or found) >= SERVER_ERRORS
    return {
        "type": TYPE + (_name(kind) if known else UNEXPECTED),
        "title": title,
        "status": status or found,
        "detail": f"{title} {_LOG}" if hidden else " ".join(str(error).split()),
        "exit_code": kind.exit_code,
        "retryable": kind.retryable,
        **({"request": request} if request else {}),
    }


def raised(document: Mapping[str, Any]) -> PosttrainError:
    """Return the error that a problem document describes."""
    known = {TYPE + _name(one): one for one in _classes()}
    word, detail = str(document.get("type", "")), str(document.get("detail") or document.get("title") or "")
    found = known.get(word)
    code = document.get("exit_code")
    if found is None and detail and code != PosttrainError.exit_code:  # a type that only a newer server has
        found = next((one for one in _classes() if one.exit_code == code), None)
    if found is not None:
        return found(detail)
    request = f" (request {document['request']})" if document.get("request") else ""
    return InfrastructureError(
        f"the server failed with an unexpected error{request}; the server's log contains the details"
    )
