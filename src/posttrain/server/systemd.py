"""Tells systemd that a server answers, that it still does, and that it ends (sd_notify(3)); elsewhere nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

_SOCKET, _EVERY, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Systemd:
    """The service manager, if there is one.

    Args:
        environment: that it put its words into; they are taken out, since no child speaks for the server.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        place, every, process = (environment.pop(name, "") for name in (_SOCKET, _EVERY, _PROCESS))
        self._address = "\0" + place[1:] if place.startswith("@") else place
        mine = every.isdigit() and process in ("", str(os.getpid()))
        self._every = int(every) / 2e6 if mine else 0.0  # seconds: half of what it waits for
        self._said = 0.0

    def ready(self) -> None:
        """It answers."""
        self._say("READY=1")

    def alive(self) -> None:
        """Its loop goes round; said as often as systemd wants to hear it."""
        now = time.monotonic()
        if self._every and now - self._said >= self._every:
            self._said = now
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        """It ends, for which it may take a while."""
        self._say("STOPPING=1")

    def _say(self, word: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)  # who does not listen holds up nobody
            told.connect(self._address)
            told.sendall(word.encode())
