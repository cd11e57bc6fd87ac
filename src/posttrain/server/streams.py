"""Server-sent events: the status of a run, the output of a run's jobs, and the sampled responses of a model."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from posttrain.api.verbs import PREFIX
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.server.authentication import ANSWER, ASKED, to_json
from posttrain.server.limits import FOLLOW, READ, in_thread
from posttrain.server.logs import logged_problem
from posttrain.server.operations import Server
from posttrain.server.workers import Asking, Refused

_EVERY = 0.5  # seconds between two reads of a run
_AGAIN = 5.0  # seconds between two checks of the follower's permission
_SILENT = 15.0  # seconds after which a comment keeps the connection open through proxies
_EVENTS = "text/event-stream"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_routes(app: FastAPI, server: Server) -> None:
    """Add the routes. A stream ends with the event `end`, or with `problem` for an error after the first event."""

    async def watch(request: Request) -> Response:
        run_id = request.path_params["run_id"]
        who, asked = await in_thread(READ, server.admitted, request, "status")
        if elsewhere := await server.peers.answer(
            request, lambda: server.authentication.ledger(who), run_id, who.identity
        ):
            return elsewhere
        watcher = await in_thread(READ, asked.watcher, run_id)
        await in_thread(READ, watcher.read)  # for an unknown run, the response is a problem document, not a stream

        def look() -> tuple[bytes, bool]:
            status = watcher.read()
            return to_json(status), is_final("run", status.run.state)

        stream = _looks(request, look, _Leave(server.admitted, request, "status"))
        return Followed(stream, server.limits.taken(who.identity.principal, FOLLOW))

    async def logs(request: Request) -> Response:
        run_id, stage = request.path_params["run_id"], request.query_params.get("stage")
        follow = request.query_params.get("follow", "false")
        if follow not in ("true", "false"):
            raise InputError(f"logs: follow must be true or false, got {follow[:40]!r}")
        who, asked = await in_thread(READ, server.admitted, request, "logs")
        if elsewhere := await server.peers.answer(
            request, lambda: server.authentication.ledger(who), run_id, who.identity
        ):
            return elsewhere
        await in_thread(READ, asked.run, run_id)  # for an unknown run, the response is a problem document, not a stream
        watch = _WhileRead(lambda: asked.run(run_id)) if follow == "true" else None
        pieces = await in_thread(READ, asked.logs, run_id, stage, watch)
        stream = _printed(request, pieces, watch, _Leave(server.admitted, request, "logs"))
        return Followed(stream, server.limits.taken(who.identity.principal, FOLLOW))

    app.add_api_route(PREFIX + "/runs/{run_id}/watch", watch, methods=["GET"], name="watch")
    app.add_api_route(PREFIX + "/runs/{run_id}/logs", logs, methods=["GET"], name="logs")


class Followed(StreamingResponse):
    """A stream of server-sent events; its follower is counted while events are sent."""

    def __init__(self, events: AsyncIterator[bytes], counted: AbstractAsyncContextManager[None]) -> None:
        super().__init__(events, headers=_HEADERS, media_type=_EVENTS)
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises LimitError, before anything is sent, if the principal follows too many streams."""
        async with self._counted:
            await super().__call__(scope, receive, send)


class _Leave:
    """Checks that a follower still has permission; the token may have been revoked or the role removed."""

    def __init__(self, admitted: Callable[[Request, str], object], request: Request, verb: str) -> None:
        self._admitted, self._request, self._verb = admitted, request, verb
        self._asked = time.monotonic()

    async def check(self) -> None:
        """Raise AccessError if the permission was removed; checks at most every `_AGAIN` seconds."""
        if time.monotonic() - self._asked >= _AGAIN:
            self._asked = time.monotonic()
            await in_thread(READ, self._admitted, self._request, self._verb)


async def _looks(request: Request, look: Any, leave: _Leave) -> AsyncIterator[bytes]:
    """Yield the status whenever it changes, until the run has ended."""
    told, quiet = b"", 0.0
    while not (await request.is_disconnected() or is_ending(request)):
        try:
            await leave.check()
            body, over = await in_thread(READ, look)
        except PosttrainError as error:
            yield _event("problem", json.dumps(logged_problem(error, request.state.id)).encode())
            return
        if body != told:
            told, quiet = body, 0.0
            yield _event("status", body)
        if over:
            yield _event("end", b"{}")
            return
        await asyncio.sleep(_EVERY)
        quiet += _EVERY
        if quiet >= _SILENT:
            quiet = 0.0
            yield b": still here\n\n"


class _LeftError(PosttrainError):
    """The client has disconnected."""


class _WhileRead:
    """A watch that ends when the run ends or the client disconnects."""

    def __init__(self, look: Callable[[], RunRecord]) -> None:
        self._look, self.over = look, threading.Event()

    def look(self) -> RunRecord:
        """See `RunWatch.look`. Raises _LeftError."""
        if self.over.is_set():
            raise _LeftError("the reader has left")
        return self._look()

    def rest(self, seconds: float) -> None:
        """See `RunWatch.rest`."""
        self.over.wait(seconds)


async def _printed(
    request: Request, pieces: Iterator[Any], watch: _WhileRead | None, leave: _Leave
) -> AsyncIterator[bytes]:
    """Yield the output of jobs as it arrives. A thread waits for the next piece until the client disconnects."""
    lane = FOLLOW if watch else READ
    try:
        while True:
            waiting, quiet = asyncio.ensure_future(in_thread(lane, next, pieces, None)), 0.0
            while not (await asyncio.wait({waiting}, timeout=_EVERY))[0]:
                await leave.check()
                quiet += _EVERY
                if quiet >= _SILENT:  # a job may print nothing for hours, but a client waits at most a minute
                    quiet = 0.0
                    yield b": still here\n\n"
                if watch is not None and (await request.is_disconnected() or is_ending(request)):
                    watch.over.set()
            piece = await waiting
            if piece is None:
                break
            log, text = piece
            said = {"run_id": log.run_id, "stage": log.stage, "attempt": log.attempt, "text": text}
            yield _event("log", json.dumps(said).encode())
            await leave.check()
    except _LeftError:
        return
    except PosttrainError as error:
        yield _event("problem", json.dumps(logged_problem(error, request.state.id)).encode())
        return
    finally:
        if watch is not None:
            watch.over.set()
    yield _event("end", b"{}")


def is_ending(request: Request) -> bool:
    """Return whether the server is about to end, so streams must end too."""
    return bool(getattr(request.app.state, "ending", False))


def _event(kind: str, body: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)


# --- sampled responses of a model ------------------------------------------------------------------------------------


async def answers(request: Request, carry: Callable[[Asking], Coroutine[Any, Any, bytes]]) -> Response:
    """Stream the event `asked`, an `answer` for each of the model's responses, and `end`.

    If an error occurs before the first event, the response is a problem document.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

    def hear(piece: bytes) -> None:
        loop.call_soon_threadsafe(told.put_nowait, piece)

    asking = Asking(hear)
    task = asyncio.ensure_future(carry(asking))
    task.add_done_callback(lambda _: told.put_nowait(None))
    first = await told.get()
    if first is None:
        task.result()
    return StreamingResponse(_told(request, first, told, task, asking), headers=_HEADERS, media_type=_EVENTS)


async def _told(
    request: Request, piece: bytes | None, told: asyncio.Queue[bytes | None], task: asyncio.Task[bytes], asking: Asking
) -> AsyncIterator[bytes]:
    try:
        while piece is not None:
            said = json.loads(piece)
            if said["kind"] in (ASKED, ANSWER):
                yield _event(said["kind"], json.dumps(said["value"]).encode())
            piece = await told.get()
        try:
            task.result()
        except Refused as error:
            yield _event("problem", json.dumps(error.document).encode())
        except PosttrainError as error:
            yield _event("problem", json.dumps(logged_problem(error, request.state.id)).encode())
        else:
            yield _event("end", b"{}")
    finally:
        asking.end()  # the client has disconnected, or the stream is over
