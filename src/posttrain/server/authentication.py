"""Authentication of a server's callers, `Control` over one project by the caller's role, and calls of verbs.

Watchers of runs are retained between requests, so a watcher reads only the new facts of a job.

A call converts the sent values to arguments, and a verb's result to JSON. The verb's declaration determines the form of
the response: files that the verb writes are put into the store, items that it streams are sent one by one, and lists
are returned in pages. A verb's progress is sent to the waiting client, if there is one.
"""

from __future__ import annotations

import hmac
import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_origin

import pydantic_core
from pydantic import ValidationError

from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.access.ports import OS, Identity, role_of
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
from posttrain.app.control import Guard, Local
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import (
    AccessError,
    AuthenticationError,
    CursorError,
    InputError,
    NotFoundError,
    PosttrainError,
)
from posttrain.domain.ids import Role
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.server.uploads import Bundles
from posttrain.store.ledger import Ledger
from posttrain.views.status import RunStatus, RunWatcher
from posttrain.workspace.background import RunDriver
from posttrain.workspace.settings import OpenWorkspace

MOST = 256  # maximum number of runs with a cached watcher
_SHARED = 0.4  # seconds for which all clients that watch a run share one read
_SCHEME = "bearer "
_NAMES, _NAMED_SECONDS = 10_000, 60.0  # limits of the cache of names, so a log line needs no statement
ASKED, ANSWER, PROGRESS = "asked", "answer", "progress"
Told = Callable[[str, Any], None]  # kind and value
_TOLD: ContextVar[Told | None] = ContextVar("posttrain_told", default=None)
_OUT = "out"  # the place in the request's folder where a verb writes
_SHOWN = 80  # maximum characters of a value in an error
_MOST_NUMBER = 1 << 63  # the range of a database's integers


@dataclass
class _Known:
    """The cached watcher and status of one run."""

    watcher: RunWatcher
    alone: threading.Lock = field(default_factory=threading.Lock)
    status: RunStatus | None = None
    at: float = 0.0


class Watchers:
    """Has one watcher for each run that was read recently; only one request at a time uses a watcher."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, workspace: OpenWorkspace, run_id: str, age: float = 0.0) -> RunStatus:
        """Return the status of a run.

        Args:
            workspace: the workspace, scoped to the caller's project.
            age: seconds; a status that another request read is reused if it is younger.

        Raises:
            NotFoundError: there is no such run in the project.
        """
        key = workspace.ledger.project, run_id
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        known = known or _Known(RunWatcher(workspace, run_id))
        with known.alone:
            if known.status is None or time.monotonic() - known.at >= age:
                known.status, known.at = known.watcher.read(), time.monotonic()
            status = known.status
        with self._lock:  # only existing runs are cached
            self._known.setdefault(key, known)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return status


class Looking:
    """Implements `Runs.watcher` with shared watchers, so many clients that watch a run cost the same as one client."""

    def __init__(self, watchers: Watchers, workspace: OpenWorkspace, run_id: str) -> None:
        self._watchers, self._workspace, self._run_id = watchers, workspace, run_id

    def read(self) -> RunStatus:
        """Return the run's status, at most `_SHARED` seconds old."""
        return self._watchers.read(self._workspace, self._run_id, _SHARED)


@dataclass(frozen=True, slots=True)
class Asker:
    """A caller: an identity in one project."""

    identity: Identity
    project: str

    def to_json(self) -> dict[str, Any]:
        """Return the caller as JSON for a worker."""
        return {**asdict(self.identity), "in": self.project}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Asker:
        """Read the JSON of `to_json`."""
        return cls(adapter(Identity).validate_python(said), said["in"])


class _Kept(Local):
    """Carries out verbs, and reads runs with cached watchers."""

    def __init__(self, workspace: Workspace, watchers: Watchers) -> None:
        super().__init__(workspace)
        self._watchers = watchers

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """See `Asks.ask`."""
        if verb is Control.status:
            return self._watchers.read(self.workspace, *words, **options)
        if verb is Control.watcher:
            return Looking(self._watchers, self.workspace, *words, **options)
        if verb is Control.detach:
            return _driven(Control(self), *words, **options)
        return super().ask(verb, *words, **options)


def _driven(control: Control, run_id: str) -> RunDriver:
    """Return a run's driver; no request to a driver is needed, because the server drives every run.

    Raises:
        InputError: the run has ended.
    """
    run, found = control.run(run_id), control.driver(run_id)
    if found is None:
        raise InputError(f"run {run.id}: has ended ({run.state}), so there is nothing to drive; posttrain get {run.id}")
    return found


class Authentication:
    """Identifies principals by their tokens, and the workspace's own user by a key in the workspace's folder.

    Args:
        key: the key that identifies a caller as the workspace's own user; "" if there is no key.
    """

    def __init__(self, workspace: Workspace, key: str = "") -> None:
        self._workspace, self._key = workspace, key
        self._tokens = TokenAuthenticator(workspace.ledger)
        self._projects: set[str] = set()  # known projects; a project is never removed
        self._lock = threading.Lock()
        self._watchers = Watchers()
        self._names: dict[str, tuple[str, float]] = {}  # principal → pseudonymous id, valid until

    def identify(self, header: str) -> Identity:
        """Return the identity behind an `Authorization` header.

        Raises:
            AuthenticationError: the header does not identify a principal.
        """
        if not header.lower().startswith(_SCHEME):
            raise AuthenticationError(
                "a request must have a token (Authorization: Bearer …); log in with posttrain login URL"
            )
        proof = header[len(_SCHEME) :].strip()
        if self._key and hmac.compare_digest(proof.encode(), self._key.encode()):
            return Identity(self._workspace.actor, OS)
        try:
            return self._tokens.authenticate(proof)
        except AccessError as error:
            raise AuthenticationError(str(error)) from error

    def control(self, asker: Asker, request: str = "") -> Control:
        """Return the caller's `Control` over the caller's project.

        Args:
            request: id of the current request, for the event log.

        Raises:
            NotFoundError: there is no such project, or the caller has no role in it.
            AccessError: the caller has a role in the project, but the token is for another project.
        """
        scopes = asker.identity.scopes
        if scopes is not None and asker.project not in scopes:
            raise self._elsewhere(asker.identity, asker.project)
        if not self._exists(asker.project):
            raise NotFoundError(
                f"there is no project {asker.project!r} that you may see; "
                f"posttrain --project {DEFAULT_PROJECT} project ls"
            )
        mine = self._workspace.seen_by(asker.identity.principal, asker.project, asker.identity.auth, request)
        known, ledger = asker.identity, mine.ledger
        kept = _Kept(mine, self._watchers)
        return Control(Guard(kept, known.principal, asker.project, lambda: role_of(ledger, known)))

    def projects(self, identity: Identity) -> dict[str, str]:
        """Return project → the highest role that the identity's token has in it."""
        if identity.scopes is not None:
            return {name: str(role) for name, role in sorted(identity.scopes.items())}
        return self._roles(identity.principal)

    def ledger(self, asker: Asker) -> Ledger:
        """Return the ledger, scoped to the caller's project."""
        return self._workspace.seen_by(asker.identity.principal, asker.project, asker.identity.auth).ledger

    def known_as(self, asker: Asker) -> str:
        """Return the caller's pseudonymous id for the log, at most `_NAMED_SECONDS` old."""
        name, now = asker.identity.principal, time.monotonic()
        known = self._names.get(name)
        if known is None or known[1] < now:
            with self._lock:
                if len(self._names) >= _NAMES:
                    self._names.clear()
            known = self._names[name] = self.principal(asker), now + _NAMED_SECONDS
        return known[0]

    def may_name(self, asker: Asker) -> bool:
        """Return whether the caller's project exists and the token covers it; if not, its name is unverified input."""
        scopes = asker.identity.scopes
        return (scopes is None or asker.project in scopes) and asker.project in self._projects

    def principal(self, asker: Asker) -> str:
        """Return the caller's pseudonymous id; for a principal without such an id, the authenticator's name."""
        with self._workspace.ledger.snapshot() as now:
            return now.principal_of(asker.identity.principal) or asker.identity.auth

    def _elsewhere(self, identity: Identity, project: str) -> PosttrainError:
        """Return the error for a token of another project; the error reveals no project that the caller may not see."""
        of = ", ".join(self.projects(identity)) or "no project"
        if project in self._roles(identity.principal):
            return AccessError(
                f"this token is for {of}; log in with a token for {project}: posttrain login URL --project {project}"
            )
        return NotFoundError(
            f"there is no project {project!r} that you may see: this token is for {of}; "
            f"posttrain --project {next(iter(self.projects(identity)), 'NAME')} project ls"
        )

    def _roles(self, principal: str) -> dict[str, str]:
        return {name: str(role) for name, role in self._workspace.ledger.roles_of(principal).items()}

    def _exists(self, project: str) -> bool:
        if project not in self._projects:
            found = set(self._workspace.ledger.projects())
            with self._lock:
                self._projects |= found
        return project in self._projects


def page(
    verb: Verb[..., Any], named: Mapping[str, Any], project: str, ask: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """Return the items after a cursor, and the next cursor, which is None on the last page.

    Args:
        named: the request's parameters.
        ask: calls the verb with the given parameters.

    Raises:
        CursorError: the cursor is not from this list.
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
            raise CursorError(
                "cursor must be the `next` of the previous page; leave it out for the first page"
            ) from error
        keys = [key(one) for one in rest[:limit]]
        found = dict(rest[: limit + 1]) if isinstance(found, dict) else rest
    items = dict(list(found.items())[:limit]) if isinstance(found, dict) else list(found[:limit])
    return {"items": items, "next": cursor(project, verb, named, keys[-1]) if len(found) > limit else None}


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """Inside the block, pass the values that `tell` gets to this callback."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def tell(kind: str, value: Any) -> None:
    """Pass a value to the callback of `telling`, if there is one."""
    if told := _TOLD.get():
        told(kind, value)


def _streamed(verb: Verb[..., Any], found: Any) -> dict[str, Any]:
    """Send each item of a streamed result as it arrives; return the result with all items."""
    said = {one.name: getattr(found, one.name) for one in fields(found) if one.name != verb.streams}
    tell(ASKED, said)
    things = []
    for one in getattr(found, verb.streams):
        tell(ANSWER, one)
        things.append(one)
    return {**said, verb.streams: things}


def _written(verb: Verb[..., Any], found: Any, bundles: Bundles) -> dict[str, Any]:
    """Put the files that a verb wrote into the store; return its result with the digests by which clients fetch them.

    Paths in the result are relative.
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
    """Return a verb's result as JSON. Numbers that JSON lacks become strings: "NaN", "Infinity"."""
    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=_numbers)


def _numbers(value: Any) -> Any:
    """Return an array as a list. The function does not import numpy, which the server itself does not load."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return value.tolist()


def arguments(operation: Verb[..., Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verb's arguments by name, each converted to its type.

    Raises:
        InputError: an argument is missing or unknown, or has another type.
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
                raise InputError(
                    f"{operation.name}: {name} must be a signed 64-bit number, got a number outside that range"
                )
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in (name, *first["loc"]))
            shown = "" if isinstance(first["input"], dict | list) else f", got {str(first['input'])[:_SHOWN]!r}"
            raise InputError(f"{operation.name}: {place}: {first['msg']}{shown}") from error
    return found


def call(
    control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None = None, project: str = ""
) -> Any:
    """Call a verb with the arguments that `arguments` returned; a list is returned as a page.

    Args:
        bundles: writes the sent files into a folder; None if the verb takes no files.
        project: the project for which cursors are valid.
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
                raise PosttrainError("a verb that writes files was called without a folder for them")
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
        raise InputError("this verb accepts no files")
    return bundles.lay_down(value)


def _takes_none(kinds: Any) -> bool:
    try:
        kinds.validate_python(None)
    except ValidationError:
        return False
    return True
