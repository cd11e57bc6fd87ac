"""A limit on what foreign text, run as a program, may take: chat templates.

An exception is put into the thread that runs it, so it ends what Python executes step by step; a single operation in C
is not interrupted, and who runs such text must forbid the long ones.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK = 0.05  # seconds between looks at who is late


class TimeLimitError(BaseException):
    """It took longer than it may. No `Exception`, so that code which catches all of those does not swallow it."""


class _Watcher:
    """One thread that looks at all deadlines; started when the first one is set, and again in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[int, float] = {}  # thread → moment
        self._process = 0

    def arm(self, seconds: float) -> None:
        """Begin to count.

        Raises:
            RuntimeError: this thread counts already.
        """
        if self._process != os.getpid():
            self._lock, self._due, self._process = threading.Lock(), {}, os.getpid()
            threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
        with self._lock:
            if threading.get_ident() in self._due:
                raise RuntimeError("time limits must not nest")
            self._due[threading.get_ident()] = time.monotonic() + seconds

    def disarm(self) -> None:
        """After this no exception comes any more."""
        thread = threading.get_ident()
        while True:
            try:
                with self._lock:
                    self._due.pop(thread, None)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)  # one may be on its way
                return
            except TimeLimitError:
                continue

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, moment in self._due.items() if moment <= now]:
                    # at every look until it ends: code that catches everything may swallow one
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))


_WATCHER = _Watcher()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block with `TimeLimitError` once it has taken so long. Blocks do not nest.

    Raises:
        TimeLimitError: it did.
    """
    _WATCHER.arm(seconds)
    try:
        yield
    finally:
        _WATCHER.disarm()
