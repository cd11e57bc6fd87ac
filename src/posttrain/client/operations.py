"""Waiting for what a server carries out longer than a connection waits.

Waiting for a run that a server drives.
"""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.control import Control
from posttrain.api.problems import raised
from posttrain.client.transport import Transport, in_path
from posttrain.domain.errors import DeadlineError, InfrastructureError, NotFoundError
from posttrain.domain.lifecycle import is_final

if TYPE_CHECKING:
    from posttrain.api.values import RunStatus
    from posttrain.domain.records import RunRecord

_PREFER = "respond-async, wait=10"
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds between two looks, the last one again and again
_TELL = 5.0  # seconds between two lines for a person
_MOST_SECONDS = 22200.0  # that an operation is waited for: longer than a server carries one out
_REPEATS = 20  # times that a request is asked again whose server is gone
_EVERY = 0.5  # seconds between two requests


def carried_out(transport: Transport, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
    """The answer of a request that may take long.

    A server that ended meanwhile is asked again with the same key, so nothing is done twice. Who interrupts the wait
    cancels the request.

    Raises:
        PosttrainError: the problem that the server answered with. InfrastructureError: it ended again and again.
        DeadlineError: it takes longer than a server lets one take.
    """
    headers = {"prefer": _PREFER, "idempotency-key": secrets.token_hex(16)}
    for _ in range(_REPEATS):
        reply = transport.ask(method, path, body=body, headers=headers)
        if reply.status != http.client.ACCEPTED:
            return reply.body
        try:
            return _awaited(transport, reply.headers["location"], json.loads(reply.body))
        except NotFoundError:  # of its operation: that server is gone; whoever answers now knows the key
            continue
        except KeyboardInterrupt:
            transport.ask("DELETE", reply.headers["location"])
            raise
    raise InfrastructureError(f"server {transport.url}: ended {_REPEATS} times while it carried this out; ask again")


def _awaited(transport: Transport, place: str, said: dict[str, Any]) -> bytes:
    looks, told = 0, time.monotonic()
    until = told + _MOST_SECONDS
    while said["state"] == "running":
        if time.monotonic() > until:
            words = said["verb"].replace("_", " ")
            raise DeadlineError(
                f"{words}: still under way after {_MOST_SECONDS:g} s; look at what is there before you ask again"
            )
        time.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
        looks += 1
        said = json.loads(transport.ask("GET", place).body)
        if time.monotonic() - told >= _TELL and said["state"] == "running":
            told = time.monotonic()
            words = f": {said['progress']}" if said.get("progress") else ""
            print(f"{said['verb'].replace('_', ' ')}: {said['seconds']:.0f} s{words}", file=sys.stderr)
    if "problem" in said:
        raise raised(said["problem"])
    return json.dumps(said["answer"]).encode()


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
        self._path = in_path(Control.status.whole_path, {"project": project, "run_id": run_id})
        self._kinds: Any = Control.status.answer
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
    """Waits for a run; a server is asked twice a second at most."""

    def __init__(self, look: Callable[[], RunRecord], timeout: float | None) -> None:
        self._look, self._timeout, self._began = look, timeout, time.monotonic()
        self._known: tuple[float, RunRecord] | None = None

    def look(self) -> RunRecord:
        """The run as it is now, or was half a second ago. Raises DeadlineError when the time is up."""
        now = time.monotonic()
        if self._known is None or now - self._known[0] >= _EVERY:
            self._known = now, self._look()
        run = self._known[1]
        if self._timeout is not None and now - self._began >= self._timeout and not is_final("run", run.state):
            raise DeadlineError(
                f"run {run.id}: still {run.state} after {self._timeout:g} s; wait again or look: posttrain why {run.id}"
            )
        return run

    def rest(self, seconds: float) -> None:
        """Until the next look."""
        time.sleep(seconds)
