"""Files that are there whole or not at all, and survive a power cut once they are there.

Written under a temporary name in the same folder, synced, renamed, and the folder synced. Only the standard library:
the supervisor imports this and must start fast.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.domain.errors import IntegrityError
from posttrain.domain.errors import unwritable as unwritable
from posttrain.store.left import open_plain

MOST_AT_ONCE = 256 << 20  # bytes


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`.

    Raises:
        WorkspaceError: the disk is full or the place cannot be written; what was at `path` is still there.
    """
    write_stream(path, lambda file: file.write(data))


def write_stream(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace `path` by what `fill` writes into the open file; whatever `fill` raises leaves `path` as it was.

    Raises:
        WorkspaceError: as `write_atomic`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        try:
            with open(temporary, "xb", opener=_private) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; the contents of its files are synced by whoever wrote them."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a folder durable with everything below it, for files that a library wrote without syncing them.

    Raises:
        WorkspaceError: the disk refused; nothing may rely on the folder then.
    """
    try:
        for path in sorted(folder.rglob("*"), reverse=True):  # contents before the folders that name them
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            elif path.is_dir():
                sync_folder(path)
        sync_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def _private(path: str, flags: int) -> int:
    """An opener: what a workspace holds is its owner's alone, whatever the umask."""
    return os.open(path, flags, 0o600)


def make_folder(folder: Path, within: Path | None = None) -> None:
    """Create `folder` and its parents, durably and for their owner alone, whatever the umask.

    Args:
        within: of its parents, the one that must be there: a workspace that was removed or moved is not made again.

    Raises:
        WorkspaceError: it cannot be created.
    """
    missing = []
    try:
        for place in (folder, *folder.parents):
            if place == within or place.is_dir():
                break
            missing.append(place)
        for place in reversed(missing):
            place.mkdir(mode=0o700, exist_ok=True)
            with suppress(PermissionError):  # a folder that may be written and not read cannot be synced
                sync_folder(place.parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise unwritable(folder, error) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by JSON. NaN and infinities are written as Python writes them: a metric may be one.

    Raises:
        WorkspaceError: as `write_atomic`.
    """
    write_atomic(path, json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def create_json(path: Path, value: Any) -> bool:
    """Write JSON where nothing is yet, as `create_file`."""
    return create_file(path, json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def create_file(path: Path, data: bytes) -> bool:
    """Write where nothing is yet; False where there is something, which stays. One of several writers wins.

    Raises:
        WorkspaceError: as `write_atomic`, or the file system has no hard links.
    """
    whole = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}.new")
    try:
        with open(whole, "xb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(whole, path)  # unlike a rename, it replaces nothing
        except FileExistsError:
            return False
        whole.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            whole.unlink(missing_ok=True)
    return True


def read_whole(path: Path) -> bytes:
    """The bytes of a file that is read at once. A job may have written it, and no job fills the memory of who reads.

    Raises:
        IntegrityError: it is larger than anything that is read so, or no plain file.
    """
    with open_plain(path, follow=True) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_AT_ONCE:
            raise IntegrityError(f"{path} must have at most {MOST_AT_ONCE} bytes, got {size}; it is damaged")
        return file.read(MOST_AT_ONCE)


def read_json(path: Path) -> Any:
    """The JSON at `path`; None when there is no such file.

    Raises:
        IntegrityError: it is not JSON, or too large to be.
    """
    try:
        return json.loads(read_whole(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not JSON: {error}; remove it and run the command again") from error
