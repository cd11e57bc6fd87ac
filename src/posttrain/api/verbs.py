"""Declarations of the verbs that the command line and the Python API call, and cursors of paged lists.

A verb is declared once (`api.control`, `api.assets`). The declaration is a function without a body: parameters, return
type and documentation. Its decorator adds the request, the lowest role, and the function that answers the verb in
process. The in-process call, the check of roles and ids, the route, the entry in the OpenAPI document, the client's
request and the reference page are derived from the declaration.

Each parameter travels by name: in the path, in the query of a GET, or in the JSON body of any other request. The
caller's files are first uploaded by digest, and a `FileRef` or a `RunFile` names them; files that a verb writes are
fetched by digest. Callbacks stay on the client.

Lists have pages, and a cursor marks the end of a page. A cursor contains the key of the last entry, not the number of
entries before it, so the next page begins after that entry even if others were added. A cursor is valid only for one
list of one project with the same parameters.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_origin,
    overload,
)

from posttrain.domain.errors import CursorError, InputError, nearest
from posttrain.domain.ids import Role

if TYPE_CHECKING:
    from pydantic import TypeAdapter

API_VERSION = 1  # the client's version, which is in the path of every request
API_VERSIONS = (1,)  # the versions that a server accepts: its own and that of the previous release
UNKNOWN_PARAMETER = "unknown parameter"  # part of the error message
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
PREFIX = f"/v{API_VERSION}/projects/{{project}}"
MOST, USUAL = 1000, 100  # items of one page


LIMIT, CURSOR = "limit", "cursor"


FILES = "files"  # relative path in the strings of a request → file


_NAMED = re.compile(r"{(\w+)}")


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file or a folder of the caller that was uploaded to the store: `FileRef("train.jsonl", "sha256:…", "file")`."""

    name: str  # the last part of its path on the client
    digest: str
    form: str  # file | tree


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file and the local files that it names; in `text`, their paths are replaced by their names in `files`."""

    name: str  # the run file's name in errors
    text: str
    files: Mapping[str, FileRef] = field(default_factory=dict)  # relative path in the text → file


class Asks(Protocol):
    """The component that carries verbs out: this process, a server, or a guard in front of either."""

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """Carry a verb out."""

    def close(self) -> None:
        """Close the component; no verb may be called afterwards."""


class Verbs:
    """A set of verbs, and the component that carries them out."""

    def __init__(self, asks: Asks) -> None:
        self.asks = asks


@dataclass(frozen=True, eq=False)
class Verb(Generic[P, R]):
    """One declared verb."""

    function: Callable[Concatenate[Any, P], R]  # its declaration
    method: str  # GET | POST | PUT | DELETE; empty: not an HTTP request
    path: str  # the part of the URL's path below the project
    needs: Role  # the lowest role that may call the verb
    answered_by: str  # MODULE[:FUNCTION] of this package, or a path in a workspace: `.ledger.find_run`
    heavy: bool = False  # the verb reads files or computes: a server's worker answers it
    command: str = ""  # the command of the command line, if it is not the verb's name
    newest: Callable[[Any], str] | None = None  # for a list with the newest item first: returns an item's id
    key: Callable[[Any], tuple[Any, ...]] | None = None  # for a list sorted by a unique key: returns an item's key
    run_file: bool = False  # the parameter `path` is a run file
    writes: str = ""  # the parameter with the folder to write; the client fetches the files into that folder
    file: str = ""  # the file's name on the server, if `writes` is an optional file instead of a folder
    streams: str = ""  # the field of the answer whose items may be streamed
    along: Mapping[str, str] = field(
        default_factory=dict
    )  # parameter that may name local files, which are then sent → kind of these files
    sent: Mapping[str, Any] | None = None  # parameters that are sent instead of the verb's own, if those cannot be sent
    meant: str = ""  # MODULE:FUNCTION that converts the sent parameters to the verb's own
    seals: bool = False  # the event log is sealed after the verb

    @overload
    def __get__(self, verbs: None, kind: type) -> Verb[P, R]: ...

    @overload
    def __get__(self, verbs: Verbs, kind: type) -> Callable[P, R]: ...

    def __get__(self, verbs: Verbs | None, kind: type) -> Verb[P, R] | Callable[P, R]:
        return self if verbs is None else self.bound(verbs.asks)

    def bound(self, asks: Asks, *first: Any) -> Callable[..., R]:
        """Return a function that takes the remaining arguments and calls the verb with `first` before them."""

        def asked(*words: Any, **options: Any) -> R:
            return cast("R", asks.ask(self, *first, *words, **options))

        asked.__name__, asked.__doc__ = self.name, self.function.__doc__
        taken = list(self.declared.parameters.values())[len(first) :]
        vars(asked)["__signature__"] = self.declared.replace(parameters=taken)
        return asked

    @property
    def name(self) -> str:
        """The name of the function that declares the verb."""
        return self.function.__name__

    @property
    def typed(self) -> str:
        """The command that calls the verb on the command line."""
        return f"posttrain {self.command or self.name.replace('_', ' ')}"

    @property
    def whole_path(self) -> str:
        """The path with the version and the project."""
        return PREFIX + self.path

    @property
    def in_path(self) -> tuple[str, ...]:
        """The parameters in the path."""
        return tuple(_NAMED.findall(self.path))

    @functools.cached_property
    def declared(self) -> inspect.Signature:
        """The parameters of the verb, with annotations as written."""
        own = inspect.signature(self.function)
        return own.replace(parameters=list(own.parameters.values())[1:])

    def given(self, words: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the verb's arguments by name.

        Raises:
            InputError: an argument is unknown, missing or surplus.
        """
        refuse_unknown(self.name, options, self.declared.parameters)
        try:
            return self.declared.bind(*words, **options).arguments
        except TypeError as error:
            raise InputError(f"{self.name}: {error}; see help({self.name})") from error

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The parameters of the verb, with resolved types; the return annotation is not resolved."""
        from posttrain.api.codec import signature  # loads pydantic

        return signature(self.function)

    @property
    def answer(self) -> TypeAdapter[Any]:
        """The reader of the verb's answer, which a server does not need: it loads the packages of the values."""
        from posttrain.api.codec import answer

        return answer(self.function)

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return a map from name to the parameter as the client sends it, including the parameters in the path."""
        return dict(self._sent())

    @property
    def looks_at_jobs(self) -> bool:
        """Whether the host of a run's jobs should answer: only that host can read the output of the jobs."""
        return "run_id" in self.in_path and (not self.unsafe or self.name == "retry")

    @property
    def unsafe(self) -> bool:
        """Whether the verb may change something, so a repeated request must be recognised."""
        return self.method != "GET"

    @property
    def paged(self) -> bool:
        """Whether the verb returns pages of a list."""
        return self.newest is not None or self.key is not None

    def answers(self, workspace: Any) -> Callable[P, R]:
        """Return the function that answers the verb in this process, on an open workspace."""
        if self.answered_by.startswith("."):
            return cast("Callable[P, R]", functools.reduce(getattr, self.answered_by[1:].split("."), workspace))
        function = named_function(self.answered_by, self.name)
        return functools.partial(function, getattr(workspace, _first(function), workspace))

    def _sent(self) -> Iterator[tuple[str, inspect.Parameter]]:
        if self.sent is not None:
            for name, kind in self.sent.items():
                yield name, _parameter(name, kind)
            return
        for name, one in self.signature.parameters.items():
            kind, many = one.annotation, one.kind is inspect.Parameter.VAR_POSITIONAL
            if (
                get_origin(kind) is Callable
                or (name == LIMIT and self.paged)
                or (name == self.writes and not self.file)
            ):
                continue
            if name == self.writes:
                yield name, _parameter(name, bool)
                continue
            if kind is Path or kind == Path | None:
                kind = RunFile if self.run_file else FileRef if kind is Path else FileRef | None
            yield name, _parameter(name, list[kind] if many else kind, () if many else one.default)  # type: ignore[valid-type]
        if self.along:
            yield FILES, _parameter(FILES, dict[str, FileRef])
        if self.paged:
            yield LIMIT, _parameter(LIMIT, _page_size(), USUAL)
            yield CURSOR, _parameter(CURSOR, str | None, None)


def refuse_unknown(verb: str, given: Iterable[str], known: Collection[str]) -> None:
    """Reject a parameter that a verb does not have.

    Raises:
        InputError: a parameter is unknown.
    """
    for name in given:
        if name not in known:
            raise InputError(f"{verb}: {UNKNOWN_PARAMETER} {name!r}{nearest(name, known)}; remove or rename it")


def named_function(place: str, name: str = "") -> Callable[..., Any]:
    """Return the function that MODULE[:FUNCTION] of this package names."""
    module, _, own = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"posttrain.{module}"), own or name)
    return found


@functools.cache
def _first(function: Callable[..., Any]) -> str:
    """Return the name of a function's first parameter: `workspace`, or the attribute of a workspace that it needs."""
    return next(iter(inspect.signature(function).parameters))


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _page_size() -> Any:
    from pydantic import Field

    return Annotated[int, Field(ge=1, le=MOST)]


def verb(
    request: str,
    needs: Role,
    answered_by: str,
    *,
    heavy: bool = False,
    command: str = "",
    newest: Callable[[Any], str] | None = None,
    key: Callable[[Any], tuple[Any, ...]] | None = None,
    run_file: bool = False,
    writes: str = "",
    file: str = "",
    streams: str = "",
    along: Mapping[str, str] = {},
    sent: Mapping[str, Any] | None = None,
    meant: str = "",
    seals: bool = False,
) -> Callable[[Callable[Concatenate[Any, P], R]], Verb[P, R]]:
    """Declare a verb; the other arguments are fields of `Verb`.

    Args:
        request: method and path below the project; empty: no request; a client composes the verb from others.
    """
    method, _, path = request.partition(" ")
    how = (heavy, command, newest, key, run_file, writes, file, streams, along, sent, meant, seals)
    return lambda function: Verb(function, method, path, needs, answered_by, *how)


def answers(verb: Verb[P, R]) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Mark the function that answers a verb: the type checker compares its signature with the verb's declaration."""
    return lambda function: function


def verbs_of(kind: type[Verbs]) -> dict[str, Verb[..., Any]]:
    """Return a map from name to verb for a set of verbs and its base classes, in the order of declaration."""
    found = [one for part in kind.__mro__ for one in vars(part).values() if isinstance(one, Verb)]
    return {one.name: one for one in found}


_SUM = 6  # bytes of the checksum at the beginning of a cursor


def numbers(sample: str) -> tuple[int, ...]:
    """Return the sort key of a sample in its stage: `(12, 388, 3)` for the id `12.388.3`."""
    return tuple(int(part) if part.isdecimal() else -1 for part in sample.split("."))


def cursor(project: str, verb: Verb[..., Any], named: Mapping[str, Any], key: tuple[Any, ...]) -> str:
    """Return the cursor of the position after the item with this key.

    Args:
        named: the request's parameters.
    """
    body = json.dumps([project, verb.name, _asked(named), key], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:_SUM] + body).decode().rstrip("=")


def place(text: str, project: str, verb: Verb[..., Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key in a cursor.

    Raises:
        CursorError: the text is not a cursor, or it is for another list or project or for other parameters.
    """
    try:
        whole = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
        body = whole[_SUM:]
        if hashlib.sha256(body).digest()[:_SUM] != whole[:_SUM]:
            raise ValueError("it is incomplete")
        of_project, of_verb, asked, key = json.loads(body)
        if not _is_key(verb, key):
            raise ValueError("it belongs to a different list")
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise CursorError(
            f"cursor must be the `next` of the previous page, got {text[:40]!a}; leave it out for the first page"
        ) from error
    if (of_project, of_verb, asked) != (project, verb.name, _asked(named)):
        raise CursorError(
            "the cursor is from a different list or project, or from a request with different parameters; "
            "leave it out for the first page"
        )
    return tuple(key)


def _is_key(verb: Verb[..., Any], key: Any) -> bool:
    """Return whether items of the list can have this key: strings and numbers; for a list of runs, one id."""
    if not isinstance(key, list) or not all(type(one) in (str, int, float) for one in key):
        return False
    return verb.newest is None or (len(key) == 1 and type(key[0]) is str and key[0].isprintable())


def _asked(named: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in named.items() if name not in (LIMIT, CURSOR)}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:12]
