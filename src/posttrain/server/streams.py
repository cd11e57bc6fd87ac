"""What comes piece by piece, as server-sent events: how a run stands, and what its jobs print."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from posttrain.api.guarding import refuse
from posttrain.api.operations import PREFIX
from posttrain.api.problems import problem
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.server.calling import to_json
from posttrain.server.lanes import FOLLOW, READ, in_thread

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.server.app import Server

_EVERY = 0.5  # seconds between two looks at a run
_AGAIN = 5.0  # seconds between two looks whether whoever follows still may
_SILENT = 15.0  # seconds after which a comment keeps the connection open through proxies
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_routes(app: FastAPI, server: Server) -> None:
    """Each ends with an event `end`, or `problem` where something went wrong after the first piece."""
    from posttrain.server.app import asker

    def control(request: Request, verb: str) -> Control:
        found = server.entrance.control(asker(request))
        refuse(found, verb)
        return found

    async def watch(request: Request) -> Response:
        run_id = request.path_params["run_id"]
        asked = await in_thread(READ, control, request, "status")
        watcher = await in_thread(READ, asked.watcher, run_id)
        await in_thread(READ, watcher.read)  # an unknown run is a problem document, and no stream

        def look() -> tuple[bytes, bool]:
            status = watcher.read()
            return to_json(status), is_final("run", status.run.state)

        stream = _looks(request, look, _Leave(control, request, "status"))
        return StreamingResponse(stream, headers=_HEADERS, media_type="text/event-stream")

    async def logs(request: Request) -> Response:
        run_id, stage = request.path_params["run_id"], request.query_params.get("stage")
        follow = request.query_params.get("follow", "false")
        if follow not in ("true", "false"):
            raise InputError(f"logs: follow must be true or false, got {follow[:40]!r}")
        asked = await in_thread(READ, control, request, "logs")
        vigil = asked.vigil(run_id, lambda _: None, None) if follow == "true" else None
        pieces = await in_thread(READ, asked.logs, run_id, stage, vigil)
        first = await in_thread(FOLLOW, next, pieces, None)
        stream = _printed(request, first, pieces, _Leave(control, request, "logs"))
        return StreamingResponse(stream, headers=_HEADERS, media_type="text/event-stream")

    app.add_api_route(PREFIX + "/runs/{run_id}/watch", watch, methods=["GET"], name="watch")
    app.add_api_route(PREFIX + "/runs/{run_id}/logs", logs, methods=["GET"], name="logs")


class _Leave:
    """Whether whoever follows a stream may still do so: a token may be revoked, a role taken away meanwhile."""

    def __init__(self, control: Callable[[Request, str], Control], request: Request, verb: str) -> None:
        self._control, self._request, self._verb = control, request, verb
        self._asked = time.monotonic()

    async def check(self) -> None:
        """Raise AccessError where they may not any more; asked now and then only."""
        if time.monotonic() - self._asked >= _AGAIN:
            self._asked = time.monotonic()
            await in_thread(READ, self._control, self._request, self._verb)


async def _looks(request: Request, look: Any, leave: _Leave) -> AsyncIterator[bytes]:
    """A status whenever it is another one, until the run has ended."""
    told, quiet = b"", 0.0
    while not await request.is_disconnected():
        try:
            await leave.check()
            body, over = await in_thread(READ, look)
        except PosttrainError as error:
            yield _event("problem", json.dumps(problem(error, request.state.id)).encode())
            return
        mark = hashlib.sha256(body).digest()
        if mark != told:
            told, quiet = mark, 0.0
            yield _event("status", body)
        if over:
            yield _event("end", b"{}")
            return
        await asyncio.sleep(_EVERY)
        quiet += _EVERY
        if quiet >= _SILENT:
            quiet = 0.0
            yield b": still here\n\n"


async def _printed(request: Request, first: Any, pieces: Iterator[Any], leave: _Leave) -> AsyncIterator[bytes]:
    """What jobs print, as it comes."""
    piece = first
    while piece is not None and not await request.is_disconnected():
        log, text = piece
        said = {"run_id": log.run_id, "stage": log.stage, "attempt": log.attempt, "text": text}
        yield _event("log", json.dumps(said).encode())
        try:
            await leave.check()
            piece = await in_thread(FOLLOW, next, pieces, None)
        except PosttrainError as error:
            yield _event("problem", json.dumps(problem(error, request.state.id)).encode())
            return
    yield _event("end", b"{}")


def _event(kind: str, body: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)
