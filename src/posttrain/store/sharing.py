"""The lock of an artifact store that several hosts of a ledger share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.store.database import Database
from posttrain.store.holding import DELETES, PATIENCE, STORES, FileLock

_KEY = 0x706F7375  # of PostgreSQL's advisory lock


class LedgerLock:
    """Of all hosts of a ledger in PostgreSQL: each one's file, and a lock of the server, which a lost session gives up.

    A thread that holds it already shares it with itself.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self._file, self._database = FileLock(path), database
        self._local = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See `StoreLock.shared`."""
        if getattr(self._local, "held", False):
            yield
            return
        with self._file.shared(), self._database.locked(_KEY, alone=False, patience=PATIENCE, by=DELETES):
            self._local.held = True
            try:
                yield
            finally:
                self._local.held = False

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """See `StoreLock.alone`."""
        with self._file.alone(patience), self._database.locked(_KEY, alone=True, patience=patience, by=STORES):
            yield
