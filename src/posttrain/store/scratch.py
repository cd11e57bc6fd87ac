"""Folders for the length of a block, which also go when the process in it is killed: the next one sweeps."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.store.atomic import make_folder, unwritable

_FRESH_SECONDS = 60.0  # a folder younger than this may be made and not held yet


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder below `parent` for the length of the block. Those of processes that were killed are removed first.

    Raises:
        WorkspaceError: it cannot be created.
    """
    make_folder(parent)
    _sweep(parent, prefix)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(parent, error) from error
    try:
        fcntl.flock(held, fcntl.LOCK_SH)  # the kernel lets go of it when this process dies, however it dies
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            if time.time() - folder.stat().st_mtime < _FRESH_SECONDS:
                continue  # perhaps made this moment and not held yet
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone, or somebody else's
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(held)
