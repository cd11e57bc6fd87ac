"""Where the command line and the Python API get what they ask: a `Control` over a workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.app.embedded.assets import Assets, Models
from posttrain.app.embedded.channels import Channels, Records
from posttrain.app.embedded.runs import Runs, Submissions

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.app.workspace import Workspace


class Embedded(Submissions, Runs, Channels, Records, Assets, Models):
    """`api.control.Control` in this process."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def close(self) -> None:
        """See `Control.close`."""
        self.workspace.close()


def control_of(given: Workspace | Control) -> Control:
    """Over an open workspace, for the user that the operating system knows; what is a `Control` stays what it is."""
    from posttrain.access.ports import OS, Identity
    from posttrain.access.roles import role_of
    from posttrain.api.guarding import guarded
    from posttrain.app.workspace import Workspace

    if not isinstance(given, Workspace):
        return given
    known, ledger = Identity(given.actor, OS), given.ledger
    return guarded(Embedded(given), given.actor, ledger.project, lambda: role_of(ledger, known))


def open_control() -> Control:
    """Over the nearest workspace.

    Raises:
        WorkspaceError: there is none, or it cannot be opened.
    """
    from posttrain.app.workspace import open_workspace

    return control_of(open_workspace())
