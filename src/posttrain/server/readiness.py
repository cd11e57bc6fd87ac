"""Whether a server can do its work: its database answers, its store has answered, its driver lives. `/readyz` says it.

A store is looked at when the server begins, for whoever mistyped an address or a key to be told there and then. One
that is away is asked again until it answers; what is asked of a server meanwhile waits or is refused by what it needs.
Once it has answered, a store that goes away is told by whatever needs it (503), and the rest goes on.

Tells systemd that a server answers, that it still does, and that it ends (sd_notify(3)); elsewhere nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

from posttrain.domain.errors import PosttrainError
from posttrain.store.ledger import Ledger

log = logging.getLogger("posttrain.server")
_PING = 1.0  # seconds between two questions to the database
_LOOK = 5.0  # seconds between two looks at a store that does not answer
_SOCKET, _EVERY, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class StoreLook:
    """Asks a store until it answers once."""

    def __init__(self, probe: Callable[[], None], over: threading.Event) -> None:
        self._probe, self._over = probe, over
        self._trouble = "the artifact store was not asked yet"

    def trouble(self) -> str:
        """Why the store cannot be used; empty: it has answered."""
        return self._trouble

    def keep_looking(self) -> None:
        """Until it answers, or the server ends; the log is told each reason once."""
        told = ""
        while not self._over.is_set():
            try:
                self._probe()
            except PosttrainError as error:
                line = str(error).splitlines()[0]
                kind = type(error).__name__ + line.partition(": ")[0]  # the rest tells how long each try took
                if kind != told:
                    log.error("%s; this server is not ready until it answers", line)
                    told = kind
                self._trouble = "the artifact store does not answer; the server's log says why"
                self._over.wait(_LOOK)
                continue
            self._trouble = ""
            if told:
                log.info("the artifact store answers")
            return


class Ready:
    """Whether requests are answered and runs driven; the database is asked once a second at most."""

    def __init__(self, ledger: Ledger, *others: Callable[[], str]) -> None:
        self._ledger, self._others = ledger, others
        self._asked, self._away = -_PING, ""
        self._lock = threading.Lock()

    def trouble(self) -> str:
        """Why not; empty: they are."""
        with self._lock:
            if time.monotonic() - self._asked >= _PING:
                try:
                    with self._ledger.database.read() as connection:
                        connection.exec_driver_sql("SELECT 1")
                    self._away = ""
                except PosttrainError as error:
                    log.warning("%s", error)
                    self._away = "the ledger's database does not answer"
                self._asked = time.monotonic()
            return self._away or next((why for why in (ask() for ask in self._others) if why), "")


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
