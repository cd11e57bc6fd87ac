"""Where the command line gets what it asks: a `Control` over the nearest workspace."""

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


def open_control() -> Control:
    """Over the nearest workspace.

    Raises:
        WorkspaceError: there is none, or it cannot be opened.
    """
    from posttrain.app.workspace import open_workspace

    return Embedded(open_workspace())
