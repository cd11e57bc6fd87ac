"""Folders for the length of a block, which also go when the process in it is killed: the next one sweeps."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.store.atomic import make_folder, unwritable

_MOVED = ".moved-"
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
        remove_tree(folder)
        os.close(held)


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it, as far as that goes, however deep folders lie in each other.

    A job may have made them: a walk that calls itself ends at a thousand of them, and a path has at most 4096
    characters. So folders that lie in others are moved up first, until none does.
    """
    with suppress(OSError):
        folder.chmod(0o700)
        waiting = _folders(folder)
        while waiting:
            here = waiting.pop()
            here.chmod(0o700)
            for inner in _folders(here):
                inner.chmod(0o700)  # whoever moves a folder writes into it
                moved = folder / f"{_MOVED}{os.urandom(12).hex()}"
                inner.rename(moved)
                waiting.append(moved)
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


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
            remove_tree(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(held)
