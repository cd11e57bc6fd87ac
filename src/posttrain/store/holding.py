"""Who records what lies in an artifact store, and who deletes from it: many of the first, or one of the second.

Between the moment in which bytes are put (or found to be there already) and the commit of the rows that name them,
nothing in the ledger says that they are needed. Whoever does both holds the store's lock meanwhile, shared; whoever
deletes holds it alone. The lock is a file of the workspace, in which everybody works who writes its ledger, and of the
database, where a ledger has several hosts; either lets go when a process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.domain.errors import DeadlineError, PosttrainError
from posttrain.store.atomic import taken, writing

LOCK = "store.lock"  # in a workspace's folder
PATIENCE = 120.0  # seconds that a writer waits: a sweep deletes for a moment at a time
DELETES, STORES = "posttrain gc deletes from the artifact store", "somebody stores artifacts"


class StoreLock(Protocol):
    """Tells who records from who deletes."""

    def shared(self) -> AbstractContextManager[None]:
        """Nothing is deleted from the store for the length of the block.

        Raises:
            DeadlineError: somebody deletes, and was stopped while they did.
            WorkspaceError: the lock cannot be had.
        """

    def alone(self, patience: float) -> AbstractContextManager[None]:
        """Nobody records what lies in the store for the length of the block. Keep it short: they wait.

        Args:
            patience: seconds to wait for those who do.

        Raises:
            DeadlineError: somebody still does. WorkspaceError: as `shared`.
        """


class FileLock:
    """Of everybody on one machine who works in a workspace's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shared(self) -> AbstractContextManager[None]:
        """See `StoreLock.shared`."""
        return self._held(fcntl.LOCK_SH, PATIENCE, DELETES)

    def alone(self, patience: float) -> AbstractContextManager[None]:
        """See `StoreLock.alone`."""
        return self._held(fcntl.LOCK_EX, patience, STORES)

    def _held(self, kind: int, patience: float, by: str) -> AbstractContextManager[None]:
        said = f"{self._path}: was held for more than {patience:g} s: {by}; nothing is lost, run the command again"
        return held(self._path, kind, Refusal(patience, DeadlineError(said)))


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is raised where somebody else holds a lock for so many seconds."""

    patience: float
    error: PosttrainError


@contextmanager
def held(
    place: Path, kind: int = fcntl.LOCK_EX, refusal: Refusal | None = None, *, make: bool = True
) -> Iterator[None]:
    """A lock for the length of the block; the kernel lets go of it when this process dies.

    Args:
        place: a file, or with `make=False` a folder, which must be there.
        refusal: None: it is waited for, however long that takes.

    Raises:
        WorkspaceError: the place cannot be opened.
    """
    with writing(place):
        handle = os.open(place, os.O_RDWR | os.O_CREAT if make else os.O_RDONLY, 0o600)
    try:
        if refusal is None:
            fcntl.flock(handle, kind)
        elif not taken(handle, kind, refusal.patience):
            raise refusal.error
        yield
    finally:
        os.close(handle)
