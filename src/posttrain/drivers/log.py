"""The log of a background driver: lines with their time in a file of bounded size, without possible secrets.

The stdout and stderr of the process also go to the log, so tracebacks are retained. Output that Python writes passes
through the same filter.
"""

import io
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from posttrain.domain.jobspec import SECRET_NAME

MOST_BYTES = 256 * 1024  # at this size the log is renamed to `KEY.1.log`, replacing the previous file of that name
_USER_INFO = re.compile(r"(://)[^\s@]+@")
_SHORTEST = 6  # minimum characters of a hidden value, because shorter values occur by chance
_HIDDEN = "…"


class Veil:
    """Removes the values of variables that are named like secrets, and credentials in URLs, from text."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        named = {value for name, value in environment.items() if SECRET_NAME.search(name)}
        self._values = sorted((value for value in named if len(value) >= _SHORTEST), key=len, reverse=True)

    def over(self, text: str) -> str:
        """Return the text without these values."""
        for value in self._values:
            text = text.replace(value, _HIDDEN)
        return _USER_INFO.sub(rf"\1{_HIDDEN}@", text)


class DriverLog(io.TextIOBase):
    """The log of a background driver; errors in writing the file are ignored."""

    def __init__(self, path: Path, veil: Veil) -> None:
        self._path, self._veil = path, veil
        self._partial = ""
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Write one line, with the time."""
        said = " ".join(self._veil.over(line).split())  # before lines are joined, because a key may have several
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}\n")

    def write(self, text: str) -> int:
        """Write whole lines only, so a secret is not split."""
        with self._lock:
            whole, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                self._put(whole + end)
        return len(text)

    def bound(self) -> None:
        """Start another file if the current file is full; child processes continue to write to the old file."""
        with suppress(OSError):  # the workspace may be deleted, and must not be created again
            if self._path.stat().st_size < MOST_BYTES:
                return
            self._path.replace(previous(self._path))
            file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)

    def take_over(self) -> None:
        """Redirect Python's output to this log from now on."""
        sys.stdout = sys.stderr = self

    def _put(self, text: str) -> None:
        with suppress(OSError):  # a full disk
            os.write(2, self._veil.over(text).encode("utf-8", errors="replace"))
            self.bound()


def previous(path: Path) -> Path:
    """Return the path of the previous log: `KEY.1.log`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def last_line(path: Path, start: int) -> str:
    """Return the last line that was written from byte `start` on; empty: no line."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(MOST_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
