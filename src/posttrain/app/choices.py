"""Trackers as somebody chooses them on the command line, before a workspace or a run is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.trackers.tracking import check_trackers, describe, of_workspace, parse_choice, parse_trackers, resolved

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace


def read_choice(words: Sequence[str]) -> dict[str, Any]:
    """What `--tracker` says, valid and with paths that do not depend on where a later command is typed.

    Raises:
        InputError: an unknown tracker, one named twice, or a target that it cannot have.
    """
    return parse_choice(words, Path.cwd())


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
