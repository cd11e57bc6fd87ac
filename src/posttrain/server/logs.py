"""The log of a server, its driver and its workers: one JSON object per line on stderr, or text on a terminal.

A line has `time`, `level`, `logger` and `message`. If they apply, it also has the fields `request`, `principal`
(pseudonymous), `project`, `verb`, `method`, `status`, `milliseconds`, `run` and `client`. A line never contains data
that a client sent: no path, query, header or body. A traceback contains source locations and exception classes.
Messages of unexpected errors may quote a request, so they are omitted, except for messages of the operating system.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from posttrain.api.codec import SERVER_ERRORS, problem
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.workspace.background import Veil

JSON, TEXT = "json", "text"
FORMATS = (JSON, TEXT)
LEVELS = ("debug", "info", "warning", "error")
OURS = "posttrain"
_FACTS = "facts"  # attribute of a log record that contains the line's fields
_WAITING = 10_000  # lines that may wait for the reader of stderr
_FRAMES, _CAUSES = 40, 8  # maximum numbers of frames per error and of causes in one traceback
_RUN = re.compile(r"run ([a-z0-9][a-z0-9.-]{0,63}): ")
_SECRETS = (
    (re.compile(r"posttrain_[A-Za-z0-9_-]{16,}"), "posttrain_…"),
    (re.compile(r"(?i)\b(bearer|basic)\s+\S+"), r"\1 …"),
    (re.compile(r"(://[^\s?#\"']*)[?#][^\s\"']*"), r"\1?…"),  # a presigned URL
)


@dataclass(frozen=True, slots=True)
class Logging:
    """The format of log lines and the level from which they are written.

    Raises:
        InputError: the format or level is unknown.
    """

    format: str = ""  # "" means text on a terminal and JSON elsewhere
    level: str = "info"

    def __post_init__(self) -> None:
        if self.format not in ("", *FORMATS):
            raise InputError(f"--log-format must be {' or '.join(FORMATS)}, got {self.format!r}; name one of them")
        if self.level not in LEVELS:
            raise InputError(f"--log-level must be one of {', '.join(LEVELS)}, got {self.level!r}; name one of them")

    def words(self) -> list[str]:
        """Return command-line arguments for a process that logs in the same way."""
        return [self.format or (TEXT if os.isatty(2) else JSON), self.level]

    @classmethod
    def of(cls, words: list[str]) -> Logging:
        """Read the arguments that `words` returns; without arguments, return the default."""
        return cls(*words[:2])


def begin(how: Logging, *, held: bool = False) -> None:
    """Write all output of this process to stderr in one format.

    Args:
        held: whether a thread writes the lines, so that no caller waits for the reader of stderr.
    """
    handler: logging.Handler = _Held() if held else _Direct()
    handler.setFormatter(_Lines(Veil(os.environ), text=how.words()[0] == TEXT))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(how.level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: logging.getLogger(OURS).critical("the process ended with an error", exc_info=error)
    threading.excepthook = _thread_fell


def facts(**known: Any) -> dict[str, Any]:
    """Return the argument `extra` for a log line: the line's fields without None and empty values."""
    return {_FACTS: {name: value for name, value in known.items() if value is not None and value != ""}}


def logged_problem(
    error: BaseException, request: str, verb: str | None = None, status: int | None = None
) -> dict[str, Any]:
    """Return the problem document for an error; if the status is a server error, log the details that it omits."""
    document = problem(error, request, status)
    told = facts(request=request, verb=verb, status=document["status"])
    if not isinstance(error, PosttrainError):
        logging.getLogger(f"{OURS}.server").error("an unexpected error", exc_info=error, extra=told)
    elif document["status"] >= SERVER_ERRORS:
        logging.getLogger(f"{OURS}.server").warning("%s", error, extra=told)
    return document


class Printed(io.TextIOBase):
    """Replaces stdout and stderr, and logs each whole line that a library prints."""

    def __init__(self) -> None:
        self._partial = ""
        self._alone = threading.RLock()  # an error in a finalizer is printed by the thread that prints

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        with self._alone:
            *whole, self._partial = (self._partial + text).split("\n")
        for line in filter(None, map(str.strip, whole)):
            logging.getLogger(f"{OURS}.printed").info("%s", line)
        return len(text)


def say_of_driver(line: str) -> None:
    """Log a driver's message as a line of the server's log."""
    run = _RUN.match(line)
    logging.getLogger(f"{OURS}.driver").info("%s", line, extra=facts(run=run[1] if run else None))


def traced(error: BaseException) -> list[str]:
    """Return the classes and source locations of an error and its causes, oldest first.

    Only messages of the operating system are included.
    """
    found: list[str] = []
    for one in reversed(list(_causes(error))):
        said = f": {os.strerror(one.errno)}" if isinstance(one, OSError) and one.errno else ""
        found.append(f"{type(one).__module__}.{type(one).__qualname__}{said}")
        for frame in traceback.extract_tb(one.__traceback__)[-_FRAMES:]:
            found.append(f"  {frame.filename}:{frame.lineno} {frame.name}")
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    waiting: list[BaseException] = [error]
    while waiting and len(seen) < _CAUSES:
        one = waiting.pop(0)
        if any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [cause] if cause else []


class _Lines(logging.Formatter):
    """Formats a log record as one line of JSON, or as a line of text with the traceback below it."""

    def __init__(self, veil: Veil, *, text: bool) -> None:
        super().__init__()
        self._veil, self._text = veil, text

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        error = record.exc_info[1] if record.exc_info else None
        known: Mapping[str, Any] = getattr(record, _FACTS, {})
        if self._text:
            more = " ".join(f"{name}={value}" for name, value in known.items())
            below = "".join(f"\n    {one}" for one in traced(error)) if error else ""
            line = f"{at} {record.levelname.lower():7} {record.name}: {self._message(record)}{' ' if more else ''}"
            return line + more + below
        said: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
        }
        return json.dumps(said | dict(known) | ({"traceback": traced(error)} if error else {}))

    def _message(self, record: logging.LogRecord) -> str:
        """Return the message in one line; for a library, only the first line, because the rest may quote input."""
        try:
            said = record.getMessage()
        except Exception:  # the arguments do not fit the template
            said = str(record.msg)
        if record.name.partition(".")[0] != OURS:
            said = said.partition("\n")[0]
        said = " ".join(self._veil.over(said).split())
        for pattern, instead in _SECRETS:
            said = pattern.sub(instead, said)
        return said


class _Direct(logging.Handler):
    """Writes each line immediately."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`. Errors of stderr are ignored."""
        with suppress(OSError):
            _write(self.format(record))


class _Held(logging.Handler):
    """Passes lines to a thread; lines that do not fit in the queue are only counted.

    `SimpleQueue.put` may be interrupted by another `put` of the same thread, which `Queue.put` would wait for without
    end: the collector of garbage may run at any line, and asyncio logs tasks that it finds there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._queued = self._written = self._lost = 0
        threading.Thread(target=self._write_them, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if self._lines.qsize() >= _WAITING:
            self._lost += 1
            return
        line = self.format(record)
        self._queued += 1
        self._lines.put(line)

    def close(self) -> None:
        """Wait for pending lines; `logging.shutdown` calls it when the process ends."""
        until = threading.Event()
        for _ in range(100):
            if self._written == self._queued or until.wait(0.02):
                break
        super().close()

    def _write_them(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError):
                _write(line)
                if self._lost:
                    lost, self._lost = self._lost, 0
                    logging.getLogger(OURS).warning("%d lines were lost: no process read stderr in time", lost)
            self._written += 1


def _write(line: str) -> None:
    data = (line + "\n").encode("utf-8", errors="replace")
    while data:
        data = data[os.write(2, data) :]


def _thread_fell(said: threading.ExceptHookArgs) -> None:
    if said.exc_value is not None and not isinstance(said.exc_value, SystemExit):
        logging.getLogger(OURS).error("a thread ended with an error", exc_info=said.exc_value)
