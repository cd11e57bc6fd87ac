"""The `Control` of the command line and the Python API: over a workspace or a server."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from posttrain.access.ports import OS, Identity
from posttrain.api.control import Control
from posttrain.domain.errors import NotFoundError, PosttrainError
from posttrain.domain.ids import PROJECT_VARIABLE, SERVER_VARIABLE, TYPES
from posttrain.domain.records import DEFAULT_PROJECT

if TYPE_CHECKING:
    from pathlib import Path

    from posttrain.api.verbs import Verb
    from posttrain.app.workspace import Workspace


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
    from posttrain.access.roles import role_of
    from posttrain.api.guard import Guard
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
