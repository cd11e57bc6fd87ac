"""Before anything runs: may the run name its image, and is there who runs jobs in it?"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from posttrain.data.confining import is_confined
from posttrain.domain.errors import InputError
from posttrain.domain.images import allows
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.workspace.opened import OpenWorkspace
from posttrain.workspace.served import is_served


def refuse_image(image: str | None, workspace: OpenWorkspace, source: Path) -> None:
    """Refuse an image that the project does not allow, or that nobody here runs jobs in.

    Words from afar name what an admin allowed. Whoever has the workspace before them may name any, until somebody says
    which ones.

    Raises:
        InputError: naming what, the constraint, the value, the next action.
    """
    if image is None:
        return
    with workspace.ledger.snapshot() as now:
        allowed = now.images()
    if is_confined() if allowed is None else not allows(allowed, image):
        known = f"it allows {', '.join(allowed)}" if allowed else "it allows none"
        raise InputError(
            f"{source}: image: must be one that project {workspace.ledger.project} allows, got {image} ({known}); an "
            f"admin of it may allow it: posttrain project allow-image {image}"
        )
    executor = workspace.jobs.executor
    if not executor.images:
        raise InputError(
            f"{source}: image: needs an executor that runs jobs in images, and this workspace has {executor.name}, got "
            f"{image}; leave image out, or choose one that does: posttrain init --executor podman"
        )
    why = executor.trouble() if isinstance(executor, LocalExecutor) else ""
    if why:
        raise InputError(f"{source}: image: {image} cannot be run here: {why}")
    if urlsplit(workspace.blobs.url).scheme != "file" or workspace.channel_address:
        _refuse_without_server(workspace, source, image)


def _refuse_without_server(workspace: OpenWorkspace, source: Path, image: str) -> None:
    if not is_served(workspace.root):
        raise InputError(
            f"{source}: image: a job in an image has no network, so it reaches artifacts in {workspace.blobs.url} only "
            f"through a server, got {image} without one; run posttrain serve"
        )
