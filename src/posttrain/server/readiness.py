"""Whether a server can do its work: its database answers, its store has answered, its driver lives. `/readyz` says it.

A store is looked at when the server begins, for whoever mistyped an address or a key to be told there and then. One
that is away is asked again until it answers; what is asked of a server meanwhile waits or is refused by what it needs.
Once it has answered, a store that goes away is told by whatever needs it (503), and the rest goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from posttrain.domain.errors import PosttrainError
from posttrain.store.ledger import Ledger

log = logging.getLogger("posttrain.server")
_PING = 1.0  # seconds between two questions to the database
_LOOK = 5.0  # seconds between two looks at a store that does not answer


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
