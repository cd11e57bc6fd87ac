"""Events as lines of a file; each is one JSON object, is appended whole, and is on the disk before the cursor moves."""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.sinks import Notice
from posttrain.events.ports import absolute, encoded
from posttrain.store.atomic import sync_folder

_BEGINS = b'{"id":"'  # the beginning of every line
SUFFIX = ".jsonl"
_LONGEST = 1 << 24  # maximum bytes of a line: a longer tail is not an incomplete line


class JsonLinesSink:
    """The `Sink` of one file. The file may be moved away (logrotate); the next lines then create a new file.

    Args:
        settings: `path`, absolute.

    Raises:
        InputError: the path is invalid.
    """

    kind: ClassVar[str] = "jsonl"
    most: ClassVar[int] = 256

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if set(settings) != {"path"}:
            raise InputError(f"jsonl: must have exactly one setting, path, got {', '.join(sorted(settings)) or 'none'}")
        self._path = absolute(str(settings["path"]), "jsonl: path")
        if self._path.suffix != SUFFIX:  # no program executes a file with this suffix
            raise InputError(f"jsonl: path must end with {SUFFIX}, got {self._path.name!a}")

    @property
    def where(self) -> str:
        """See `Sink.where`."""
        return str(self._path)

    def send(self, notices: Sequence[Notice]) -> None:
        """See `Sink.send`. An incomplete line of a killed process is removed first; its event is sent again."""
        lines = b"".join(encoded(notice) + b"\n" for notice in notices)
        with self._writing(), ExitStack() as opened:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, handle)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise SinkError(f"{self._path}: must be a file, got something else; name another path")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = self._mend(handle)
            self._append(handle, lines, size)
            if size == 0:
                sync_folder(self._path.parent)

    def _append(self, handle: int, lines: bytes, size: int) -> None:
        try:
            written = 0
            while written < len(lines):
                written += os.write(handle, lines[written:])
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)  # if the disk is full, no part of a line remains
            raise

    def _mend(self, handle: int) -> int:
        """Repair the end of the file; return the size of the file, which then ends with a whole line.

        Raises:
            SinkError: the file has content that is not events.
        """
        size = os.fstat(handle).st_size
        if not _BEGINS.startswith(os.pread(handle, len(_BEGINS), 0)):
            raise SinkError(f"{self._path}: must be empty or contain events, got other content; name another")
        if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
            return size
        half = os.pread(handle, min(size, _LONGEST), max(0, size - _LONGEST)).rpartition(b"\n")[2]
        if not (half.startswith(_BEGINS) or _BEGINS.startswith(half)):
            raise SinkError(f"{self._path}: must end with a whole line, got a partial line; complete the line")
        if _whole(half):
            return size + os.write(handle, b"\n")
        os.ftruncate(handle, size - len(half))
        return size - len(half)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise SinkError(
                f"{self._path}: another process writes this file; wait until it ends, or name another path"
            ) from error
        except OSError as error:
            raise SinkError(f"{self._path}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
