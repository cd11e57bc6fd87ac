"""A request that a worker carries out, as whoever waits for it holds it: what it tells meanwhile, and how to end it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from posttrain.domain.errors import StoppedError

REQUEST_SECONDS = 900.0  # that a request may take whose connection waits for it
OPERATION_SECONDS = 21600.0  # that an operation may take


class Asking:
    """One request.

    Args:
        told: is called by the thread that waits for the worker with each piece, as JSON.
        deadline: seconds that it may take, its wait for a worker included.
    """

    def __init__(self, told: Callable[[bytes], None] = lambda _: None, deadline: float = REQUEST_SECONDS) -> None:
        self.told, self.deadline = told, deadline
        self._kill: Callable[[], None] | None = None
        self._over = False
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether somebody ended it."""
        return self._over

    def held_by(self, kill: Callable[[], None] | None) -> None:
        """A worker carries it out, or none any more.

        Raises:
            StoppedError: somebody ended it before.
        """
        with self._lock:
            if self._over and kill is not None:
                raise StoppedError("the request was cancelled before it was carried out")
            self._kill = kill

    def end(self) -> None:
        """Carry it out no further: its worker is killed, and what it had not committed is not there."""
        with self._lock:
            self._over = True
            if self._kill is not None:
                self._kill()
