"""Atomic files, safe reading of the files that a job left, and locks on files and on an artifact store.

An atomic file exists completely or not at all, and survives a power cut as soon as it exists. It is written under a
temporary name in the same folder, synced and renamed; then the folder is synced. This module uses only the standard
library, because the supervisor imports it and must start fast.

A job may leave any kind of file: a link, a FIFO, a folder, a sparse file of a terabyte. Readers of an attempt folder
open only plain files, never block on them, and check the size before they read. An error that the job's files cause is
the job's failure (`IntegrityError`); an error in a disk or a network file system is not.

The lock of an artifact store can be held by many processes that record blobs, or by one process that deletes blobs.
Between the put of bytes (or the check that they exist) and the commit of the rows that name them, the ledger does not
show that the bytes are needed. A process that puts bytes and commits rows therefore holds the store's lock shared; a
process that deletes blobs holds the lock alone. The lock is a file in the workspace, which all writers to the ledger
share. If the ledger has several hosts, there is also a lock in the database. A process that dies releases its locks.
"""

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from posttrain.domain.errors import DeadlineError, IntegrityError, PosttrainError, unwritable as unwritable

SMALL = 64 << 10  # maximum bytes of a small object: a start, an order or a summary
ANSWER = 4 << 20  # maximum bytes of a result
SEGMENT = 64 << 20  # maximum bytes of a segment or a pack; a sample of 128,000 tokens with all its numbers has 25 MB
LINE = 32 << 20  # maximum bytes of a fact; parsed JSON takes at most 24 times as much memory
TREE = 4 << 40  # maximum bytes of an output or a checkpoint; a 70B model with its optimizer, in fp32, has 1.1 TB
FILES = 1_000_000  # maximum files in an output or a checkpoint
DEPTH = 64  # maximum depth of nested folders
HOLES = 1 << 30  # maximum bytes of holes in a file
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_ITS_DOING = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG}
    | {errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST}
)
MOST_AT_ONCE = 256 << 20  # bytes
LOCK = "store.lock"  # file name in a workspace's folder
PATIENCE = 120.0  # seconds that a writer waits for a sweep, which deletes in short batches
DELETES, STORES = "posttrain gc deletes from the artifact store", "another process stores artifacts"


_LOOK = 0.02  # seconds between two tries at a lock


def its_doing(error: BaseException | None) -> bool:
    """Return whether an error of the operating system is caused by the files that a job left."""
    return isinstance(error, OSError) and error.errno in _ITS_DOING


def most_of(key: str) -> int:
    """Return the maximum size in bytes of an object of an attempt's mailbox."""
    if key in ("result.json", "job.json", "request.json"):
        return ANSWER
    large = ("events/", "samples/", "parts/", "checkpoints/", "log/", "outputs/")
    return SEGMENT if key.startswith(large) else SMALL


def open_plain(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a plain file for reading, without blocking.

    Args:
        follow: whether to open the target if the path is a link to a file.

    Raises:
        FileNotFoundError: the path does not exist.
        IntegrityError: the path is not a plain file, or this process has no permission to read it.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        opened = os.open(path, flags)
    except OSError as error:
        if error.errno in _ABSENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if its_doing(error):
            raise IntegrityError(f"{path} cannot be opened as a plain file: {error.strerror}; it is damaged") from error
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise IntegrityError(f"{path} must be a plain file, got something else; it is damaged")
    return os.fdopen(opened, "rb")


def read_untrusted(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a file.

    Args:
        follow: see `open_plain`.

    Raises:
        FileNotFoundError: the path does not exist.
        IntegrityError: see `open_plain`; or the file has more than `most` bytes.
    """
    with open_plain(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise IntegrityError(f"{path} must have at most {most} bytes, got {size}; it is damaged")
        return file.read(most)


def files_below(folder: Path, most: int = DEPTH) -> Iterator[Path]:
    """Yield all files below a folder, in no particular order; links are not followed.

    Raises:
        IntegrityError: folders are nested too deeply, there are too many files, or a folder cannot be read.
    """
    waiting, found = [(folder, 1)], 0
    while waiting:
        here, depth = waiting.pop()
        if depth > most:
            raise IntegrityError(f"{folder} must have at most {most} nested folders, got more; it is damaged")
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    found += 1
                    if found > FILES:
                        raise IntegrityError(f"{folder} must contain at most {FILES} files, got more; it is damaged")
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((here / entry.name, depth + 1))
                    else:
                        yield here / entry.name
        except OSError as error:
            if not its_doing(error):
                raise
            raise IntegrityError(f"{here} cannot be read: {error.strerror}; it is damaged") from error


def look_over(path: Path) -> None:
    """Check the kind and size of a file or folder that a job left, before the much slower hashing of its bytes.

    Raises:
        IntegrityError: the path contains a file that is not plain, more than `TREE` bytes in total, or a file with
            more than `HOLES` bytes of holes.
    """
    total = 0
    for one in files_below(path) if path.is_dir() and not path.is_symlink() else (path,):
        with open_plain(one) as file:
            size = os.fstat(file.fileno()).st_size
            total += size
            if total > TREE:
                raise IntegrityError(
                    f"an output must have at most {TREE} bytes in all, and {path} has more; write fewer or smaller "
                    "files"
                )
            if size > HOLES and _holes(file.fileno(), size) > HOLES:
                raise IntegrityError(
                    f"{one} has {size} bytes, of which over {HOLES} were never written (a sparse file); write all bytes"
                )


def _holes(opened: int, size: int) -> int:
    """Return the number of bytes in a file's holes, counted up to the limit. Compressed blocks are not holes."""
    found = at = 0
    while at < size and found <= HOLES:
        try:
            data = os.lseek(opened, at, os.SEEK_DATA)
        except OSError as error:
            return found + size - at if error.errno == errno.ENXIO else 0  # 0 if the file system has no `SEEK_DATA`
        found += data - at
        at = os.lseek(opened, data, os.SEEK_HOLE)
    return found


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Attribute the operating system's errors in this block to `path`.

    Raises:
        WorkspaceError: an operation failed.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def is_held(lock: Path) -> bool:
    """Return whether another process holds the lock of this file."""
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not taken(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def taken(
    handle: int, kind: int = fcntl.LOCK_EX, seconds: float = 0.0, over: Callable[[], bool] = lambda: False
) -> bool:
    """Take the lock of an open file; return False if it was held elsewhere for `seconds` or until `over()` was true."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if over() or time.monotonic() >= until:
                return False
            time.sleep(_LOOK)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`.

    Raises:
        WorkspaceError: the disk is full or the path cannot be written; the old file at `path` is unchanged.
    """
    write_stream(path, lambda file: file.write(data))


def write_stream(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace `path` by the bytes that `fill` writes into the open file; if `fill` raises, `path` is unchanged.

    Raises:
        WorkspaceError: see `write_atomic`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    with writing(path):
        try:
            with open(temporary, "xb", opener=private) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`. The writers of the files sync the contents."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync a folder and everything below it, for files that a library wrote without syncing.

    Raises:
        WorkspaceError: the disk failed; the folder may not be durable.
    """
    with writing(folder):
        for path in sorted(folder.rglob("*"), reverse=True):  # contents before folders
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            elif path.is_dir():
                sync_folder(path)
        sync_folder(folder)


def private(path: str, flags: int) -> int:
    """Open a file with mode 0600, regardless of the umask: a workspace is private to its owner."""
    return os.open(path, flags, 0o600)


def make_folder(folder: Path, within: Path | None = None) -> None:
    """Create `folder` and its parents, durably and private to their owner, regardless of the umask.

    Args:
        within: a parent that must exist, so that a removed or moved workspace is not recreated.

    Raises:
        WorkspaceError: the folder cannot be created.
    """
    missing = []
    with writing(folder):
        for place in (folder, *folder.parents):
            if place == within or place.is_dir():
                break
            missing.append(place)
        for place in reversed(missing):
            place.mkdir(mode=0o700, exist_ok=True)
            with suppress(PermissionError):  # a write-only folder cannot be synced
                sync_folder(place.parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by JSON. NaN and infinities, which are possible metrics, are written as Python writes them.

    Raises:
        WorkspaceError: see `write_atomic`.
    """
    write_atomic(path, json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def create_json(path: Path, value: Any) -> bool:
    """Write JSON if the path does not exist; see `create_file`."""
    return create_file(path, json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def create_file(path: Path, data: bytes) -> bool:
    """Write a file if the path does not exist; return False if it exists. Of several writers, exactly one succeeds.

    Raises:
        WorkspaceError: see `write_atomic`; or the file system has no hard links.
    """
    whole = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}.new")
    try:
        with open(whole, "xb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(whole, path)  # unlike a rename, a link never replaces a file
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


def read_json(path: Path) -> Any:
    """Return the JSON at `path`, which a job may have written; None if the file does not exist.

    Raises:
        IntegrityError: the file is not JSON, or is too large.
    """
    try:
        return json.loads(read_untrusted(path, MOST_AT_ONCE, follow=True))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not JSON: {error}; remove it and run the command again") from error


class StoreLock(Protocol):
    """The lock that separates processes that record blobs from those that delete blobs."""

    def shared(self) -> AbstractContextManager[None]:
        """Prevent other processes from deleting blobs during the block.

        Raises:
            DeadlineError: a process that deletes blobs held the lock for too long, e.g. because it was suspended.
            WorkspaceError: the lock cannot be opened.
        """

    def alone(self, patience: float) -> AbstractContextManager[None]:
        """Prevent other processes from recording blobs during the block. They wait, so the block must be short.

        Args:
            patience: seconds to wait for processes that record blobs.

        Raises:
            DeadlineError: a process was still recording blobs after `patience` seconds.
            WorkspaceError: the lock cannot be opened.
        """


class FileLock:
    """The lock shared by all processes on one machine that use a workspace's folder."""

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
    """The error to raise if another process holds a lock for longer than `patience` seconds."""

    patience: float
    error: PosttrainError


@contextmanager
def held(
    place: Path, kind: int = fcntl.LOCK_EX, refusal: Refusal | None = None, *, make: bool = True
) -> Iterator[None]:
    """Hold a lock during the block; the kernel releases the lock when this process dies.

    Args:
        place: a file; with `make=False` also an existing folder.
        refusal: the error to raise after a timeout; None: wait without a limit.

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
