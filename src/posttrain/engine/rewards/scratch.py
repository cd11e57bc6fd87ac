"""The folder of one open reward. When its job is killed its keeper sweeps it, or else the next reward does."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "posttrain-cell-"


class Scratch:
    """A new folder among the temporary ones, held until it is closed. Those that nobody holds any more are removed.

    The kernel lets go of a folder when the process that holds it dies, however it dies.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for left in parent.glob(f"{PREFIX}*"):
            _sweep(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # somebody swept it before it was held: then it is made again
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._held, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._held)

    def close(self) -> None:
        """Remove it; again is nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


def _sweep(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone, or somebody else's
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # held
    finally:
        os.close(held)
