"""Bytes by digest: asked for, sent in pieces, fetched. Of one project, whose asker sees no other's."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from posttrain.api.guarding import refuse
from posttrain.api.operations import PREFIX
from posttrain.domain.errors import DeadlineError, InputError, NotFoundError
from posttrain.server.lanes import READ, UPLOAD, in_thread
from posttrain.server.uploads import Uploads

if TYPE_CHECKING:
    from posttrain.server.app import Server
    from posttrain.server.entrance import Asker

_PATH = PREFIX + "/blobs/{digest}"
_PIECES = 16  # of an upload that wait to be written
_CHUNK = 1 << 20
_FULL = 0.01  # seconds between two looks whether there is room
_STALLED = 60.0  # seconds without a byte, after which an upload holds no thread any more


def add_routes(app: FastAPI, server: Server) -> None:
    """HEAD asks how much of an upload is there, PATCH adds to it, GET gives the bytes."""
    from posttrain.server.app import asker

    def uploads(request: Request, verb: str) -> tuple[Asker, Uploads]:
        who = asker(request)
        refuse(server.entrance.control(who), verb)
        mine = server.workspace.seen_by(who.identity.principal, who.project, who.identity.auth)
        return who, Uploads(mine)

    def ask(request: Request) -> dict[str, Any]:
        _, mine = uploads(request, "add_dataset")
        digest = request.path_params["digest"]
        return {"held": mine.held(digest), "offset": mine.offset(digest)}

    async def state(request: Request) -> Response:
        return JSONResponse(await in_thread(READ, ask, request))

    async def add(request: Request) -> Response:
        _, mine = await in_thread(READ, uploads, request, "add_dataset")  # before anything of the body is read
        start, total = _number(request, "upload-offset"), _number(request, "upload-length")
        pieces = _Pieces()

        def write() -> int:
            return mine.add(request.path_params["digest"], start, total, pieces)

        def written() -> int:
            try:
                return write()
            finally:
                pieces.drain()

        writer = asyncio.ensure_future(in_thread(UPLOAD, written))
        try:
            async for piece in request.stream():
                for at in range(0, len(piece), _CHUNK):
                    await pieces.put(piece[at : at + _CHUNK])
        except ClientDisconnect:  # what has come is kept
            pass
        finally:
            await pieces.put(None)
        have = await writer
        return JSONResponse({"held": have == total, "offset": have})

    async def fetch(request: Request) -> Response:
        digest = request.path_params["digest"]

        def found() -> int:
            who, mine = uploads(request, "write_report")
            if not mine.given(digest):  # a report's page; weights are for those who may take a model out
                refuse(server.entrance.control(who), "export")
            if not mine.held(digest):
                raise NotFoundError(f"there are no bytes {digest[:80]!r} in this project")
            return server.workspace.blobs.size(digest)

        size = await in_thread(READ, found)
        pieces = server.workspace.blobs.stream(digest)
        headers = {"content-length": str(size)}  # an answer that breaks off is seen to
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    app.add_api_route(_PATH + "/state", state, methods=["GET"], name="blob_state")
    app.add_api_route(_PATH, add, methods=["PATCH"], name="blob_add")
    app.add_api_route(_PATH, fetch, methods=["GET"], name="blob_fetch")


class _Pieces:
    """What comes of an upload, on its way from the connection to whoever writes it."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_PIECES)
        self._ended = False

    async def put(self, piece: bytes | None) -> None:
        """The next one; None ends them. It takes no thread, since those may all wait for what is put here."""
        while not self._ended:
            try:
                self._waiting.put_nowait(piece)
                return
            except queue.Full:
                await asyncio.sleep(_FULL)

    def __iter__(self) -> Iterator[bytes]:
        while not self._ended:
            try:
                piece = self._waiting.get(timeout=_STALLED)
            except queue.Empty as error:
                self._ended = True
                raise DeadlineError(
                    f"upload: nothing has come for {_STALLED:g} s; what had come is kept, go on from there"
                ) from error
            if piece is None:
                self._ended = True
            else:
                yield piece

    def drain(self) -> None:
        """What is not written any more must not keep whoever reads it waiting."""
        for _ in self:
            continue


def _number(request: Request, name: str) -> int:
    value = request.headers.get(name, "")
    if not value.isascii() or not value.isdigit() or len(value) > 15:
        raise InputError(f"upload: header {name} must be a whole number of bytes, got {value[:40]!r}")
    return int(value)
