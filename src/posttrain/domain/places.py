"""Names by which files and servers are known before anything of a workspace is loaded."""

from __future__ import annotations

from pathlib import Path

SERVER_VARIABLE, PROJECT_VARIABLE = "POSTTRAIN_SERVER", "POSTTRAIN_PROJECT"  # what commands ask
LOCK_SUFFIX = ".lock.json"


def lock_path(path: Path) -> Path:
    """Where the lock of a run file goes by default: `run.yaml` → `run.lock.json`."""
    return path.with_name(path.stem + LOCK_SUFFIX)


def is_lock(path: Path) -> bool:
    """Whether a file holds a locked manifest: its name says so."""
    return path.name.endswith(LOCK_SUFFIX)
