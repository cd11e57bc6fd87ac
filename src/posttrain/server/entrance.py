"""The entrance of a server: a `Control` over one project by the asker's role, and calls of its verbs.

Looks at runs are kept between requests: of a job's reports only what is new is read again.

A call makes arguments from what was sent, and JSON and pages from what a verb answers. A verb's declaration decides the
rest: files that it writes are fetched, items that it streams are sent one by one, and lists are answered in pages.
Progress of a verb goes to whoever waits for it, where somebody does.
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
from posttrain.access.ports import OS, Identity
from posttrain.access.roles import role_of
from posttrain.api.codec import adapter
from posttrain.api.control import OPERATIONS, Control
from posttrain.api.guarding import Guard
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
from posttrain.app.control import Local
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
from posttrain.drivers.requests import RunDriver
from posttrain.server.uploads import Bundles
from posttrain.store.hosts import Ledger
from posttrain.views.status import RunStatus, RunWatcher
from posttrain.workspace.settings import OpenWorkspace

MOST = 256  # runs
_SHARED = 0.4  # seconds that a look serves everybody who watches
_SCHEME = "bearer "
_NAMES, _NAMED_SECONDS = 10_000, 60.0  # kept, so that a line of the log costs no statement
ASKED, ANSWER, PROGRESS = "asked", "answer", "progress"
Told = Callable[[str, Any], None]  # kind and value
_TOLD: ContextVar[Told | None] = ContextVar("posttrain_told", default=None)
_OUT = "out"  # where a verb writes, in the folder of its request
_SHOWN = 80  # characters of what was sent
_MOST_NUMBER = 1 << 63  # what a database counts to


@dataclass
class _Known:
    """One run."""

    watcher: RunWatcher
    alone: threading.Lock = field(default_factory=threading.Lock)
    status: RunStatus | None = None
    at: float = 0.0


class Watchers:
    """One for each run that was looked at lately; one request at a time reads each."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, workspace: OpenWorkspace, run_id: str, age: float = 0.0) -> RunStatus:
        """A run as it is now.

        Args:
            workspace: as whoever asks sees it.
            age: seconds that a look of somebody else may be old.

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
        with self._lock:  # only what is there is kept
            self._known.setdefault(key, known)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return status


class Looking:
    """What `Runs.watcher` gives, over what is kept: many who watch a run cost what one of them does."""

    def __init__(self, watchers: Watchers, workspace: OpenWorkspace, run_id: str) -> None:
        self._watchers, self._workspace, self._run_id = watchers, workspace, run_id

    def read(self) -> RunStatus:
        """The run as it is now, or was a moment ago."""
        return self._watchers.read(self._workspace, self._run_id, _SHARED)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, in one project."""

    identity: Identity
    project: str

    def to_json(self) -> dict[str, Any]:
        """For a worker."""
        return {**asdict(self.identity), "in": self.project}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Asker:
        """What `to_json` made."""
        return cls(adapter(Identity).validate_python(said), said["in"])


class _Kept(Local):
    """Looks at runs by what it kept of the looks before."""

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
    """Who drives a run: the server drives every one, so nobody needs to be asked.

    Raises:
        InputError: it has ended.
    """
    run, found = control.run(run_id), control.driver(run_id)
    if found is None:
        raise InputError(f"run {run.id}: has ended ({run.state}), so there is nothing to drive; posttrain get {run.id}")
    return found


class Entrance:
    """Lets principals in by their tokens, and whoever may read the workspace's folder by its key.

    Args:
        key: what whoever shows it is taken for the workspace's own user; empty: nobody is.
    """

    def __init__(self, workspace: Workspace, key: str = "") -> None:
        self._workspace, self._key = workspace, key
        self._tokens = TokenAuthenticator(workspace.ledger)
        self._projects: set[str] = set()  # that are known to exist; none is ever removed
        self._lock = threading.Lock()
        self._watchers = Watchers()
        self._names: dict[str, tuple[str, float]] = {}  # principal → pseudonymous id, until when it is believed

    def identify(self, header: str) -> Identity:
        """Whoever sends this `Authorization` header.

        Raises:
            AuthenticationError: nobody.
        """
        if not header.lower().startswith(_SCHEME):
            raise AuthenticationError("a request must show a token (Authorization: Bearer …); posttrain login URL")
        proof = header[len(_SCHEME) :].strip()
        if self._key and hmac.compare_digest(proof.encode(), self._key.encode()):
            return Identity(self._workspace.actor, OS)
        try:
            return self._tokens.authenticate(proof)
        except AccessError as error:
            raise AuthenticationError(str(error)) from error

    def control(self, asker: Asker, request: str = "") -> Control:
        """What they may ask in their project.

        Args:
            request: id of the present request, for the event log.

        Raises:
            NotFoundError: there is no such project, or it is none of theirs.
            AccessError: they have a role there, and the token that they show is of another one.
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
        """Project → the most that may be done there with what they show."""
        if identity.scopes is not None:
            return {name: str(role) for name, role in sorted(identity.scopes.items())}
        return self._roles(identity.principal)

    def ledger(self, asker: Asker) -> Ledger:
        """Of their project."""
        return self._workspace.seen_by(asker.identity.principal, asker.project, asker.identity.auth).ledger

    def known_as(self, asker: Asker) -> str:
        """Their pseudonymous id for the log, as it was a moment ago."""
        name, now = asker.identity.principal, time.monotonic()
        known = self._names.get(name)
        if known is None or known[1] < now:
            with self._lock:
                if len(self._names) >= _NAMES:
                    self._names.clear()
            known = self._names[name] = self.principal(asker), now + _NAMED_SECONDS
        return known[0]

    def may_name(self, asker: Asker) -> bool:
        """Whether there is such a project, and it is one of theirs: otherwise it is words that they sent."""
        scopes = asker.identity.scopes
        return (scopes is None or asker.project in scopes) and asker.project in self._projects

    def principal(self, asker: Asker) -> str:
        """Their pseudonymous id; of whoever has none yet, how they are known."""
        with self._workspace.ledger.snapshot() as now:
            return now.principal_of(asker.identity.principal) or asker.identity.auth

    def _elsewhere(self, identity: Identity, project: str) -> PosttrainError:
        """Why a token opens no project that it is not of: of one without a role for them nothing is told."""
        of = ", ".join(self.projects(identity)) or "no project"
        if project in self._roles(identity.principal):
            return AccessError(
                f"this token is of {of}; log in with a token of {project}: posttrain login URL --project {project}"
            )
        return NotFoundError(
            f"there is no project {project!r} that you may see: this token is of {of}; "
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
