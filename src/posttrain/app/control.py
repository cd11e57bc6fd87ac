"""The `Control` of the command line and the Python API: over a workspace or a server.

`Guard` is the one place that checks, before a verb is carried out, the caller's role and the form of ids.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.access.ports import OS, Identity, role_of
from posttrain.api.assets import Whoami
from posttrain.api.control import VERBS, Control
from posttrain.api.verbs import Asks, Verb
from posttrain.domain.errors import AccessError, NotFoundError, PosttrainError
from posttrain.domain.ids import PROJECT_VARIABLE, SERVER_VARIABLE, TYPES, Id, Role
from posttrain.domain.records import DEFAULT_PROJECT

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace


class Guard:
    """Checks the role and the ids of every verb before it passes the verb on.

    Args:
        asks: carries out the verbs.
        who: the caller's name in errors.
        role: returns the caller's current role; None: no role.
    """

    def __init__(self, asks: Asks, who: str, project: str, role: Callable[[], Role | None]) -> None:
        self._asks, self._who, self._project, self._role = asks, who, project, role

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """Carry a verb out, and return its result.

        Raises:
            AccessError: the caller's role does not cover the verb.
            InputError: an id or name is invalid, or a parameter is unknown or missing.
        """
        self.refuse(verb)
        check_ids(verb, verb.given(words, options))
        found = self._asks.ask(verb, *words, **options)
        if isinstance(found, Whoami):  # the role that applies here, limited by the token
            role = self._role()
            return replace(found, role=role and str(role))
        return found

    def close(self) -> None:
        """Close the component that carries out the verbs; no verb may be called afterwards."""
        self._asks.close()

    def refuse(self, verb: Verb[..., Any]) -> None:
        """Raise AccessError if the caller's role does not cover this verb."""
        role = self._role()
        if role is None or not role.covers(verb.needs):
            has = f"is {role}" if role else "has no role"
            raise AccessError(
                f"project {self._project}: {verb.typed} needs the role {verb.needs}, and {self._who} {has} "
                "there; ask an admin of the project"
            )


@functools.cache
def _ids_of(verb: Verb[..., Any]) -> Mapping[str, Id]:
    """Return the parameters of a verb that are ids or names, and the required form of each."""
    written = {one.name: re.findall(r"\w+", str(one.annotation)) for one in verb.declared.parameters.values()}
    return {name: TYPES[word] for name, words in written.items() for word in words if word in TYPES}


def check_ids(verb: Verb[..., Any], given: Mapping[str, Any]) -> None:
    """Check the ids and names among a verb's arguments.

    Raises:
        InputError: an id or name is invalid.
    """
    for name, kind in _ids_of(verb).items():
        kind.check(given.get(name), f"{verb.typed}: {name}")


def refuse(control: Control, verb: str) -> None:
    """Raise AccessError if the role behind a guarded control does not cover a verb; the verb is not carried out."""
    guard = control.asks
    assert isinstance(guard, Guard), "a server asks guarded controls only"
    guard.refuse(VERBS[verb])


class Local:
    """Carries out verbs in this process, over an open workspace, and seals their events."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """See `Asks.ask`."""
        try:
            return verb.answers(self.workspace)(*words, **options)
        finally:  # also after a verb that records an event and then raises: a requested approval
            if verb.seals:
                with suppress(PosttrainError):  # the verb has already run; the next seal includes its events
                    self.workspace.seal()

    def close(self) -> None:
        """See `Asks.close`."""
        self.workspace.close()


def control_of(given: Workspace | Control) -> Control:
    """Return `Control` over an open workspace, for the user of the operating system; return a `Control` unchanged."""
    from posttrain.app.workspace import Workspace

    if not isinstance(given, Workspace):
        return given
    known, ledger = Identity(given.actor, OS), given.ledger
    return Control(Guard(Local(given), given.actor, ledger.project, lambda: role_of(ledger, known)))


def open_control() -> Control:
    """Return `Control` over the server that the environment names, or else over the nearest workspace.

    A served workspace is reached through its server.

    Raises:
        WorkspaceError: there is no workspace, or the workspace cannot be opened.
        NotFoundError: the workspace has no project with the name in the environment.
        InputError: the project's name is not valid, or the environment names a server for which there is no login.
    """
    project = os.environ.get(PROJECT_VARIABLE, "")
    TYPES["ProjectId"].check(project or None, f"--project or {PROJECT_VARIABLE}")
    if os.environ.get(SERVER_VARIABLE):  # first: a client of a server loads no workspace
        from posttrain.client.logins import logged_in

        return logged_in(os.environ[SERVER_VARIABLE], project)
    from posttrain.app.workspace import find_workspace
    from posttrain.workspace.served import served_at

    root = find_workspace()
    served = served_at(root)
    if served is not None:
        from posttrain.client.remote import remote_control

        return remote_control(served.url, served.key, project or DEFAULT_PROJECT)
    return control_of(open_here(root))


def open_here(root: Path | None = None) -> Workspace:
    """Open a workspace of this machine, in the project that the environment names.

    Args:
        root: the workspace's folder; None: the nearest workspace.

    Raises:
        WorkspaceError: there is no workspace, or the workspace cannot be opened.
        NotFoundError: the workspace has no project with the name in the environment.
    """
    from posttrain.app.workspace import Workspace, find_workspace

    project = os.environ.get(PROJECT_VARIABLE, "")
    workspace = Workspace(root or find_workspace())
    if project not in ("", DEFAULT_PROJECT):
        known = workspace.ledger.projects()
        if project not in known:
            workspace.close()
            listed = ", ".join(known)
            raise NotFoundError(f"there is no project {project!r}, only {listed}; posttrain project add {project}")
        workspace = workspace.seen_by(workspace.actor, project, OS)
    return workspace
