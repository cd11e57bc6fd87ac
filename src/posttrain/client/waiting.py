"""Waiting for a run that a server drives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.codec import answer
from posttrain.api.operations import OPERATIONS
from posttrain.client.transport import Transport, in_path
from posttrain.domain.errors import DeadlineError
from posttrain.domain.lifecycle import is_final

if TYPE_CHECKING:
    from posttrain.api.values import RunStatus
    from posttrain.domain.records import RunRecord

_EVERY = 0.5  # seconds between two requests


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """The log of one attempt."""

    run_id: str
    stage: str
    attempt: int
    path: Path | None = None  # on a machine that is not ours


class RemoteWatcher:
    """Looks at one run again and again; a server is asked twice a second at most."""

    def __init__(self, transport: Transport, project: str, run_id: str) -> None:
        self._transport = transport
        operation = OPERATIONS["status"]
        self._path = in_path(operation.whole_path, {"project": project, "run_id": run_id})
        self._kinds: Any = answer("status")
        self._last: tuple[float, str, RunStatus] | None = None

    def read(self) -> RunStatus:
        """The run as it is now, or was half a second ago."""
        now = time.monotonic()
        if self._last is not None and (now - self._last[0] < _EVERY or is_final("run", self._last[2].run.state)):
            return self._last[2]
        headers = {"if-none-match": self._last[1]} if self._last else {}
        reply = self._transport.ask("GET", self._path, headers=headers)
        found: RunStatus = self._last[2] if self._last and not reply.body else self._kinds.validate_json(reply.body)
        self._last = now, reply.headers.get("etag", ""), found
        return found


class RemoteVigil:
    """Waits for a run."""

    def __init__(self, look: Callable[[], RunRecord], timeout: float | None) -> None:
        self._look = look
        self._timeout, self._until = timeout, None if timeout is None else time.monotonic() + timeout

    def look(self) -> RunRecord:
        """The run as it is now. Raises DeadlineError when the time is up."""
        run = self._look()
        if self._until is not None and time.monotonic() >= self._until and not is_final("run", run.state):
            raise DeadlineError(
                f"run {run.id}: still {run.state} after {self._timeout:g} s; look again, or wait longer"
            )
        return run

    def rest(self, seconds: float) -> None:
        """Until the next look."""
        time.sleep(max(seconds, _EVERY))
