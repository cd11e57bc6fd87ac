"""Trackers as somebody chooses them on the command line, before a workspace or a run is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.trackers.tracking import check_trackers, describe, of_workspace, parse_trackers, resolved
from posttrain.trackers.tracking import read_choice as read_choice

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace


def refuse_unwritable_choice(chosen: dict[str, Any], folder: Path | None) -> None:
    """Refuse what could not be written before it is recorded.

    Raises:
        InputError: a package is missing, or a place cannot be written.
    """
    root = (folder or Path.cwd()).resolve()
    check_trackers(resolved(parse_trackers(chosen, "--tracker"), root, root), "--tracker")


def chosen_places(workspace: Workspace) -> list[tuple[str, str]]:
    """Kind and place of each tracker that runs are written to which name none themselves."""
    return list(describe(of_workspace(workspace)))
