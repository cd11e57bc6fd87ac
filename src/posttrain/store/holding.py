"""Who records what lies in an artifact store, and who deletes from it: many of the first, or one of the second.

Between the moment in which bytes are put (or found to be there already) and the commit of the rows that name them,
nothing in the ledger says that they are needed. Whoever does both holds the store's lock meanwhile, shared; whoever
deletes holds it alone. The lock is a file of the workspace, in which everybody works who writes its ledger; the kernel
lets go of it when a process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.domain.errors import DeadlineError
from posttrain.store.atomic import unwritable

LOCK = "store.lock"  # in a workspace's folder
_PATIENCE = 120.0  # seconds that a writer waits: a sweep deletes for a moment at a time
_LOOK = 0.01


@contextmanager
def shared(lock: Path) -> Iterator[None]:
    """Nothing is deleted from the store for the length of the block.

    Raises:
        DeadlineError: somebody deletes, and was stopped while they did.
        WorkspaceError: the lock cannot be opened.
    """
    with _held(lock, fcntl.LOCK_SH, _PATIENCE, "posttrain gc deletes from the artifact store"):
        yield


@contextmanager
def alone(lock: Path, patience: float) -> Iterator[None]:
    """Nobody records what lies in the store for the length of the block. Keep it short: they wait.

    Args:
        patience: seconds to wait for those who do.

    Raises:
        DeadlineError: somebody still does. WorkspaceError: as `shared`.
    """
    with _held(lock, fcntl.LOCK_EX, patience, "somebody stores artifacts"):
        yield


@contextmanager
def _held(lock: Path, kind: int, patience: float, by: str) -> Iterator[None]:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(lock, error) from error
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"{lock}: was held for more than {patience:g} s: {by}; nothing is lost, run the command again"
                    ) from error
                time.sleep(_LOOK)
        yield
    finally:
        os.close(handle)
