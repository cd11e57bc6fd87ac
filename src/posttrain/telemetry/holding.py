"""Whose a tracker's target is: one process writes a run there at a time, and one workspace's run only.

Run ids come from manifests, so two workspaces may have a run of one id. Beside a target of files lies
`.NAME.writer`: locked by whoever writes, its line the workspace's identity. The kernel lets go of it at a kill.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from posttrain.domain.errors import WorkspaceError
from posttrain.store.atomic import unwritable
from posttrain.telemetry.tracking import TrackedRun

_IDENTITY = re.compile(r"[0-9a-f]{32}")


def hold(path: Path, run: TrackedRun, target: str, there: Callable[[], bool]) -> IO[bytes]:
    """Take a target's `.NAME.writer`, made if it is not there; it is held until it is closed.

    Args:
        target: what is written, for a person.
        there: whether the target has anything; an identity beside nothing is of one that was taken away.

    Raises:
        WorkspaceError: another process holds it, another workspace wrote the run there, or it cannot be written.
    """
    try:
        with ExitStack() as opened:
            file = opened.enter_context(open(path, "a+b", buffering=0, opener=_private))
            _lock(file, run, target)
            file.seek(0)
            known = file.read(100).decode(errors="replace").strip()
            if there():
                refuse_another(known, run, target)
            if run.workspace and known != run.workspace:
                file.truncate(0)
                file.write(f"{run.workspace}\n".encode())
                os.fsync(file.fileno())
            opened.pop_all()  # held from here on
            return file
    except OSError as error:
        raise unwritable(path, error) from error


def _lock(file: IO[bytes], run: TrackedRun, target: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise WorkspaceError(
            f"{target}: another process writes run {run.id} there; wait for it, or name another place"
        ) from error


def refuse_another(known: str, run: TrackedRun, target: str) -> None:
    """Refuse a target that another workspace wrote this run to. One without an identity, or half of one, is taken.

    Raises:
        WorkspaceError: that is so.
    """
    if run.workspace and _IDENTITY.fullmatch(known) and known != run.workspace:
        raise WorkspaceError(
            f"{target}: another workspace wrote its run {run.id} there; name another place or experiment for this one"
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
