"""Where the command line and the Python API get what they ask: a `Control` over a workspace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from posttrain.access.ports import OS
from posttrain.app.embedded.access import Access
from posttrain.app.embedded.assets import Assets, Models
from posttrain.app.embedded.channels import Channels, Records
from posttrain.app.embedded.runs import Runs, Submissions
from posttrain.app.embedded.sinks import Sinks
from posttrain.domain.places import PROJECT_VARIABLE, SERVER_VARIABLE
from posttrain.domain.records import DEFAULT_PROJECT

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.app.workspace import Workspace


class Embedded(Submissions, Runs, Channels, Records, Assets, Models, Access, Sinks):
    """`api.control.Control` in this process."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def close(self) -> None:
        """See `Control.close`."""
        self.workspace.close()


def control_of(given: Workspace | Control) -> Control:
    """Over an open workspace, for the user that the operating system knows; what is a `Control` stays what it is."""
    from posttrain.access.ports import Identity
    from posttrain.access.roles import role_of
    from posttrain.api.guarding import guarded
    from posttrain.app.workspace import Workspace

    if not isinstance(given, Workspace):
        return given
    known, ledger = Identity(given.actor, OS), given.ledger
    return guarded(Embedded(given), given.actor, ledger.project, lambda: role_of(ledger, known))


def open_control() -> Control:
    """Over the server that the environment names; else over the nearest workspace, by its server where it has one.

    Raises:
        WorkspaceError: there is none, or it cannot be opened.
        InputError: the environment names a server that nobody logged in to.
    """
    project = os.environ.get(PROJECT_VARIABLE, "")
    if os.environ.get(SERVER_VARIABLE):  # first: whoever asks a server loads nothing of a workspace
        from posttrain.client.logins import logged_in

        return logged_in(os.environ[SERVER_VARIABLE], project)
    from posttrain.app.workspace import Workspace, find_workspace
    from posttrain.workspace.served import served_at

    root = find_workspace()
    served = served_at(root)
    if served is not None:
        from posttrain.client.remote import remote_control

        return remote_control(served.url, served.key, project or DEFAULT_PROJECT)
    workspace = Workspace(root)
    if project not in ("", DEFAULT_PROJECT):
        workspace = workspace.seen_by(workspace.actor, project, OS)
    return control_of(workspace)
