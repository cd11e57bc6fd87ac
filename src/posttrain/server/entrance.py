"""The entrance of a server: a `Control` over one project that refuses what the asker's role does not cover.

Looks at runs are kept between requests: of a job's reports only what is new is read again.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.access.ports import OS, Identity
from posttrain.access.roles import role_of
from posttrain.api.codec import adapter
from posttrain.api.control import Control
from posttrain.api.guarding import Guard
from posttrain.api.verbs import Verb
from posttrain.app.control import Local
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import AccessError, AuthenticationError, InputError, NotFoundError, PosttrainError
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.drivers.requests import RunDriver
from posttrain.store.hosts import Ledger
from posttrain.views.status import RunStatus, RunWatcher
from posttrain.workspace.opened import OpenWorkspace

MOST = 256  # runs
_SHARED = 0.4  # seconds that a look serves everybody who watches
_SCHEME = "bearer "
_NAMES, _NAMED_SECONDS = 10_000, 60.0  # kept, so that a line of the log costs no statement


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
