"""Operations: requests that take longer than their connection waits, polled, and cancelled where nobody asks any more.

`Prefer: respond-async` lets a request that a worker carries out be answered with 202 and the place of its operation.
They live with the server: one that ended with it is asked again with its idempotency key, which carries it out once.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from posttrain.api.guarding import refuse
from posttrain.api.operations import PREFIX
from posttrain.api.problems import problem
from posttrain.domain.errors import BusyError, NotFoundError, StoppedError
from posttrain.server.asking import OPERATION_SECONDS, Asking
from posttrain.server.lanes import READ, in_thread
from posttrain.server.workers import Refused

if TYPE_CHECKING:
    from posttrain.server.app import Server
    from posttrain.server.entrance import Asker

RUNNING, SUCCEEDED, FAILED, CANCELLED = "running", "succeeded", "failed", "cancelled"
LEFT_SECONDS = 60.0  # without a look, after which whoever asked is taken to be gone
KEPT_SECONDS = 600.0  # that what came of one is kept
MOST = 256  # that are kept in all
_WAIT, _MOST_WAIT = 10.0, 30.0  # seconds that a request is waited for before it is an operation
_LOOK = 1.0  # seconds between two looks whether anybody is there
_PREFERS = re.compile(r"(?:^|[,;\s])respond-async(?:$|[,;\s])")
_WAITS = re.compile(r"(?:^|[,;\s])wait=([0-9]{1,4})(?:$|[,;\s])")


@dataclass
class Running:
    """One operation."""

    id: str
    verb: str
    project: str
    principal: str
    sent: Any
    asking: Asking
    task: asyncio.Task[bytes] = field(init=False)
    began: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)
    ended: float | None = None
    progress: str = ""

    def told(self, piece: bytes) -> None:
        """What its worker says meanwhile."""
        said = json.loads(piece)
        if said.get("kind") == "progress":
            self.progress = str(said["value"])[:200]

    def to_json(self) -> bytes:
        """As it stands, with what came of it."""
        until = self.ended or time.monotonic()
        said: dict[str, Any] = {"id": self.id, "verb": self.verb, "state": RUNNING, "progress": self.progress}
        said["seconds"] = round(until - self.began, 1)
        if not self.task.done():
            return json.dumps(said).encode()
        error = self.task.exception() if not self.task.cancelled() else StoppedError("the operation was cancelled")
        if error is None:
            body = json.dumps({**said, "state": SUCCEEDED}).encode()
            return body[:-1] + b', "answer": ' + self.task.result() + b"}"
        said["state"] = CANCELLED if self.asking.over or self.task.cancelled() else FAILED
        told = error.document if isinstance(error, Refused) else problem(error, self.id)
        return json.dumps({**said, "problem": told}).encode()


class Underway:
    """The operations of one server. It is asked by the event loop alone."""

    def __init__(self) -> None:
        self._all: dict[str, Running] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def find(self, number: str, principal: str, project: str) -> Running:
        """Somebody's operation.

        Raises:
            NotFoundError: they have none of this id.
        """
        found = self._all.get(number)
        if found is None or (found.principal, found.project) != (principal, project):
            raise NotFoundError(
                f"there is no operation {number[:80]!r} of yours; ask again with the same Idempotency-Key, which "
                "carries it out once"
            )
        found.looked = time.monotonic()
        return found

    def begin(
        self, who: Asker, number: str, verb: str, sent: Any, carry: Callable[[Asking], Coroutine[Any, Any, bytes]]
    ) -> Running:
        """Carry a request out; one that is under way with this id and asks the same is that one.

        Raises:
            BusyError: the server keeps too many.
        """
        mine = who.identity.principal, who.project
        known = self._all.get(number)
        if known is not None and (known.principal, known.project) == mine and (known.verb, known.sent) == (verb, sent):
            known.looked = time.monotonic()
            return known
        self._make_room()
        asking = Asking(deadline=OPERATION_SECONDS)
        made = Running(number, verb, who.project, who.identity.principal, sent, asking)
        asking.told = made.told
        made.task = asyncio.ensure_future(carry(asking))
        self._all[number] = made
        watch = asyncio.ensure_future(self._watch(made))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return made

    def drop(self, one: Running) -> None:
        """It was answered on its own connection."""
        if self._all.get(one.id) is one:
            del self._all[one.id]

    def _make_room(self) -> None:
        over = sorted((one for one in self._all.values() if one.ended is not None), key=lambda one: one.ended or 0.0)
        for one in over[: max(0, len(self._all) - MOST + 1)]:
            self.drop(one)
        if len(self._all) >= MOST:
            raise BusyError(f"the server carries out {MOST} operations; ask again later")

    async def _watch(self, one: Running) -> None:
        """End it when nobody looks any more; forget it some time after."""
        while self._all.get(one.id) is one:
            await asyncio.wait({one.task}, timeout=_LOOK) if one.ended is None else await asyncio.sleep(_LOOK)
            now = time.monotonic()
            if one.task.done():
                if one.ended is None:
                    one.ended = now
                    if not one.task.cancelled():
                        one.task.exception()  # it is told to whoever looks
                elif now - max(one.ended, one.looked) >= KEPT_SECONDS:
                    self.drop(one)
            elif now - one.looked >= LEFT_SECONDS:
                one.asking.end()


def wait_of(request: Request) -> float | None:
    """Seconds after which a request may be answered by its operation; None: it is answered as a whole."""
    said = request.headers.get("prefer", "")
    if not _PREFERS.search(said):
        return None
    found = _WAITS.search(said)
    return min(_MOST_WAIT, float(found[1])) if found else _WAIT


def accepted(one: Running) -> Response:
    """202, and where it is."""
    place = f"{PREFIX.format(project=one.project)}/operations/{one.id}"
    headers = {"location": place, "cache-control": "no-store", "preference-applied": "respond-async"}
    return Response(one.to_json(), 202, headers, "application/json")


def add_routes(app: FastAPI, server: Server) -> None:
    """GET looks at an operation, DELETE cancels it."""
    from posttrain.server.app import asker

    def admitted(request: Request, one: Running | None) -> Asker:
        who = asker(request)
        control = server.entrance.control(who)
        refuse(control, one.verb if one else "whoami")
        return who

    async def found(request: Request) -> Running:
        who = await in_thread(READ, admitted, request, None)
        one = server.underway.find(request.path_params["operation_id"], who.identity.principal, who.project)
        await in_thread(READ, admitted, request, one)  # a role that was taken away meanwhile
        return one

    async def look(request: Request) -> Response:
        return _shown(await found(request))

    async def cancel(request: Request) -> Response:
        one = await found(request)
        if not one.task.done():
            one.asking.end()
            await asyncio.wait({one.task})
        return _shown(one)

    path = PREFIX + "/operations/{operation_id}"
    app.add_api_route(path, look, methods=["GET"], name="operation")
    app.add_api_route(path, cancel, methods=["DELETE"], name="cancel_operation")


def _shown(one: Running) -> Response:
    return Response(one.to_json(), headers={"cache-control": "no-store"}, media_type="application/json")
