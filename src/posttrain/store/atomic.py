"""Atomic files, safe reading of what a job left, and locks: of files, and of an artifact store.

Atomic files are there whole or not at all, and survive a power cut once they are there. They are written under a
temporary name in the same folder, synced, renamed, and the folder synced. Only the standard library: the supervisor
imports this and must start fast.

What a job left may be anything: a link, a FIFO, a folder, a terabyte of nothing. Whoever reads an attempt folder opens
plain files only, waits for none, and looks at the size before it reads. What the job itself brought about is its own
failure (`IntegrityError`); a disk or a network file system in trouble is not.

The lock of an artifact store admits many who record what lies in it, or one who deletes from it. Between the moment in
which bytes are put (or found to be there already) and the commit of the rows that name them, nothing in the ledger says
that they are needed. Whoever does both holds the store's lock meanwhile, shared; whoever deletes holds it alone. The
lock is a file of the workspace, in which everybody works who writes its ledger, and of the database, where a ledger has
several hosts; either is released when a process dies, however it dies.
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

SMALL = 64 << 10  # bytes of what says one thing: a start, an order, how far a job is
ANSWER = 4 << 20  # bytes of a result
SEGMENT = 64 << 20  # bytes of a segment or a pack; a sample of 128,000 tokens with all its numbers has 25 MB
LINE = 32 << 20  # bytes of a fact: read as JSON, 24 times as much memory at worst
TREE = 4 << 40  # bytes of an output or a checkpoint; a 70B model with its optimizer, in fp32, has 1.1 TB
FILES = 1_000_000  # of an output or a checkpoint
DEPTH = 64  # folders in each other
HOLES = 1 << 30  # bytes of a file that nobody wrote
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_ITS_DOING = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG}
    | {errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST}
)
MOST_AT_ONCE = 256 << 20  # bytes
LOCK = "store.lock"  # in a workspace's folder
PATIENCE = 120.0  # seconds that a writer waits: a sweep deletes for a moment at a time
DELETES, STORES = "posttrain gc deletes from the artifact store", "somebody stores artifacts"


_LOOK = 0.02  # seconds between two tries at a lock


def its_doing(error: BaseException | None) -> bool:
    """Whether an operating system's refusal is what a job brought about by what it put there."""
    return isinstance(error, OSError) and error.errno in _ITS_DOING


def most_of(key: str) -> int:
    """Bytes that an object of an attempt's channel may have."""
    if key == "result.json":
        return ANSWER
    return SEGMENT if key.startswith(("events/", "samples/")) else SMALL


def open_plain(path: Path, *, follow: bool = False) -> BinaryIO:
    """A plain file for reading; it is never waited for.

    Args:
        follow: a link to a file is that file.

    Raises:
        FileNotFoundError: there is nothing.
        IntegrityError: there is something else, or it may not be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        opened = os.open(path, flags)
    except OSError as error:
        if error.errno in _ABSENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if its_doing(error):
            raise IntegrityError(f"{path} must be a plain file, got: {error.strerror}; it is damaged") from error
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise IntegrityError(f"{path} must be a plain file, got something else; it is damaged")
    return os.fdopen(opened, "rb")


def read_left(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The bytes of a file.

    Args:
        follow: as `open_plain`.

    Raises:
        FileNotFoundError, IntegrityError: as `open_plain`, or it has more than `most` bytes.
    """
    with open_plain(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise IntegrityError(f"{path} must have at most {most} bytes, got {size}; it is damaged")
        return file.read(most)


def files_below(folder: Path, most: int = DEPTH) -> Iterator[Path]:
    """Everything below a folder that is no folder, in no order; links are not followed.

    Raises:
        IntegrityError: folders lie too deep in each other, there are too many files, or a folder cannot be read.
    """
    waiting, found = [(folder, 1)], 0
    while waiting:
        here, depth = waiting.pop()
        if depth > most:
            raise IntegrityError(f"{folder} must have at most {most} folders in each other, got more; it is damaged")
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    found += 1
                    if found > FILES:
                        raise IntegrityError(f"{folder} must hold at most {FILES} files, got more; it is damaged")
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((here / entry.name, depth + 1))
                    else:
                        yield here / entry.name
        except OSError as error:
            if not its_doing(error):
                raise
            raise IntegrityError(f"{here} cannot be read: {error.strerror}; it is damaged") from error


def look_over(path: Path) -> None:
    """Look at a file or folder that a job left before its bytes are: whoever hashes them has their hands full for long.

    Raises:
        IntegrityError: it holds something else than plain files, more bytes than one may leave, or files with holes.
    """
    total = 0
    for one in files_below(path) if path.is_dir() and not path.is_symlink() else (path,):
        with open_plain(one) as file:
            size = os.fstat(file.fileno()).st_size
            total += size
            if total > TREE:
                raise IntegrityError(f"{path} must have at most {TREE} bytes, got more; leave less")
            if size > HOLES and _holes(file.fileno(), size) > HOLES:
                raise IntegrityError(f"{one} has {size} bytes, of which over {HOLES} were never written; write them")


def _holes(opened: int, size: int) -> int:
    """Bytes of a file that are holes; counted until there are too many. What a file system compressed is none."""
    found = at = 0
    while at < size and found <= HOLES:
        try:
            data = os.lseek(opened, at, os.SEEK_DATA)
        except OSError as error:
            return found + size - at if error.errno == errno.ENXIO else 0  # 0: a file system that cannot say
        found += data - at
        at = os.lseek(opened, data, os.SEEK_HOLE)
    return found


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system refuses in this block concerns `path`.

    Raises:
        WorkspaceError: it refused something.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def is_held(lock: Path) -> bool:
    """Whether another process holds a lock's file."""
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
    """Take the lock of an open file; False: others held it for so many seconds, or until it was `over`."""
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
        WorkspaceError: the disk is full or the place cannot be written; what was at `path` is still there.
    """
    write_stream(path, lambda file: file.write(data))


def write_stream(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace `path` by what `fill` writes into the open file; whatever `fill` raises leaves `path` as it was.

    Raises:
        WorkspaceError: as `write_atomic`.
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
    with writing(folder):
        for path in sorted(folder.rglob("*"), reverse=True):  # contents before the folders that name them
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            elif path.is_dir():
                sync_folder(path)
        sync_folder(folder)


def private(path: str, flags: int) -> int:
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
    with writing(folder):
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
        with open(whole, "xb", opener=private) as file:
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


def read_json(path: Path) -> Any:
    """The JSON at `path`, which a job may have written; None when there is no such file.

    Raises:
        IntegrityError: it is not JSON, or too large to be.
    """
    try:
        return json.loads(read_left(path, MOST_AT_ONCE, follow=True))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not JSON: {error}; remove it and run the command again") from error


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
