"""What supervisors go by is written before an attempt is claimed, never after: `with unclaimed(folder) as free:`.

A container sees nothing of such files because others lie over them; a file that is replaced is covered no more. So
who writes holds `supervisor.lock`, which supervisors hold from before their claim until the end of their job.

Only the standard library: the supervisor's package imports this.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK, CLAIM = "supervisor.lock", "supervisor.json"
_SECONDS = 60.0  # a supervisor that has the lock claims at once, or goes
_POLL_SECONDS = 0.02


@contextmanager
def unclaimed(folder: Path) -> Iterator[bool]:
    """Keep supervisors of an attempt's folder from claiming it; False: one has, or holds the lock for ever.

    Raises:
        OSError: the folder is not there, or the lock can be neither made nor opened.
    """
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield _locked(lock, folder) and not (folder / CLAIM).exists()
    finally:
        os.close(lock)


def _locked(lock: int, folder: Path) -> bool:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (folder / CLAIM).exists() or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
