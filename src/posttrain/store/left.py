"""Opening what a job left. It may be anything: a link, a FIFO, a folder, a terabyte of nothing.

Whoever reads an attempt folder opens plain files only, waits for none, and looks at the size before it reads. What the
job itself brought about is its own failure (`IntegrityError`); a disk or a network file system in trouble is not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from posttrain.domain.errors import IntegrityError

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


def read_left(path: Path, most: int) -> bytes:
    """The bytes of a file.

    Raises:
        FileNotFoundError, IntegrityError: as `open_plain`, or it has more than `most` bytes.
    """
    with open_plain(path) as file:
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
            if error.errno != errno.ENXIO:  # a file system that cannot say
                return 0
            return found + size - at
        found += data - at
        at = os.lseek(opened, data, os.SEEK_HOLE)
    return found
