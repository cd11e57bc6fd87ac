"""Bytes by digest: their state, uploads in pieces, and downloads. A caller sees only the bytes of one project.

If the store is S3, a client can transfer large files directly to and from the store, with presigned URLs
(`store.direct`). A client that cannot reach the store transfers files through the server.
"""

import asyncio
import json
import queue
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from posttrain.api.verbs import PREFIX
from posttrain.app.control import refuse
from posttrain.domain.errors import DeadlineError, InputError, NotFoundError, PartSizeError, SlowError
from posttrain.server.authentication import Asker
from posttrain.server.limits import ADOPT, READ, UPLOAD, in_thread, whole
from posttrain.server.operations import Server
from posttrain.server.uploads import MOST_BYTES, Arriving, Uploads, checked
from posttrain.store.direct import LARGE, open_direct
from posttrain.store.operations import PartStore
from posttrain.workspace.settings import OpenWorkspace

_PATH = PREFIX + "/blobs/{digest}"
_UNKEPT = {"cache-control": "no-store"}
_MOST_BODY = 1 << 10  # bytes of a body that contains only a size
_PIECES = 16  # pieces of an upload that may wait to be written
_CHUNK = 1 << 20
_FULL = 0.01  # seconds between two checks for room in the queue
_DIGITS = 16  # a size in a header has fewer digits
_STALLED = 60.0  # seconds without a byte, after which an upload releases its thread


def add_routes(app: FastAPI, server: Server) -> None:
    """Add the routes for the state of an upload, adding bytes to it, and fetching bytes, and for direct transfers."""
    all_of = _Blobs(server)
    for method, below, answer, name in (
        ("POST", "/direct", all_of.offer, "direct"),
        ("POST", "/arrived", all_of.arrived, "arrived"),
        ("GET", "/state", all_of.state, "state"),
        ("PATCH", "", all_of.add, "add"),
        ("GET", "", all_of.fetch, "fetch"),
    ):
        app.add_api_route(_PATH + below, answer, methods=[method], name=f"blob_{name}")


class _Blobs:
    """Handlers of the blob routes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # (project, digest) → lock for the check of directly uploaded bytes; waiting for the lock takes no thread
        self._adopting: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._direct, self._parts = open_direct(server.workspace.blobs.url), PartStore(server.workspace.blobs.url)

    async def state(self, request: Request) -> Response:
        def ask() -> dict[str, Any]:
            _, mine = self._seen(request, "add_dataset")
            digest, size = request.path_params["digest"], request.query_params.get("size")
            total = None if size is None else _digits(size, "parameter size")
            return {"held": Uploads(mine).held(digest), "offset": Arriving(mine, self._parts).offset(digest, total)}

        return JSONResponse(await in_thread(UPLOAD, ask))

    async def add(self, request: Request) -> Response:
        who, mine = await in_thread(READ, self._seen, request, "add_dataset")  # before the body is read
        names = ("upload-offset", "upload-length")
        start, total = (_digits(request.headers.get(name, ""), f"header {name}") for name in names)
        async with self._server.limits.taken(who.identity.principal, UPLOAD, _weight(request)):
            return await _added(request, Arriving(mine, self._parts), start, total)

    async def fetch(self, request: Request) -> Response:
        digest, blobs = request.path_params["digest"], self._server.workspace.blobs

        def found() -> int:
            who, seen = self._seen(request, "write_report")
            mine = Uploads(seen)
            if not mine.given(digest):  # viewers may read pages of reports, but weights require the role for `export`
                refuse(self._server.authentication.control(who), "export")
            if not mine.held(digest):
                raise NotFoundError(f"there are no bytes {digest[:80]!r} in this project")
            return blobs.size(digest)

        size = await in_thread(UPLOAD, found)
        if self._direct is not None and size >= LARGE and request.query_params.get("direct") == "yes":
            return RedirectResponse(await in_thread(UPLOAD, self._direct.download, digest), headers=_UNKEPT)
        headers = {"content-length": str(size)}  # lets a client detect a truncated response
        return StreamingResponse(blobs.stream(digest), media_type="application/octet-stream", headers=headers)

    async def offer(self, request: Request) -> Response:
        who, _ = await in_thread(READ, self._seen, request, "add_dataset")
        digest = checked(request.path_params["digest"])
        async with self._server.limits.taken(who.identity.principal, UPLOAD):
            size = await _size(request)
            ticket = None if self._direct is None else self._direct.upload(who.project, digest, size)
        found = {"url": ticket.url, "headers": dict(ticket.headers)} if ticket else {"url": "", "headers": {}}
        return JSONResponse(found, headers=_UNKEPT)

    async def arrived(self, request: Request) -> Response:
        who, seen = await in_thread(READ, self._seen, request, "add_dataset")
        digest, direct, mine = checked(request.path_params["digest"]), self._direct, Uploads(seen)
        if direct is None:
            raise InputError("upload: this server's store accepts no direct uploads; send the file to the server")

        def adopted(size: int) -> None:
            if mine.held(digest):  # a repeat after a lost response, or the project already has the bytes
                return
            with self._server.workspace.blobs.holding():
                direct.adopt(who.project, digest, size)
                mine.note(digest)
            Arriving(seen, self._parts).forget(digest)

        async with self._server.limits.taken(who.identity.principal, ADOPT):
            size = await _size(request)
            async with self._adopting.setdefault((who.project, digest), asyncio.Lock()):
                await in_thread(ADOPT, adopted, size)
        return JSONResponse({"held": True, "offset": size})

    def _seen(self, request: Request, verb: str) -> tuple[Asker, OpenWorkspace]:
        """Return the caller, after checking the permission, and the workspace scoped to the caller's project."""
        who, _ = self._server.admitted(request, verb)
        return who, self._server.workspace.seen_by(who.identity.principal, who.project, who.identity.auth)


async def _added(request: Request, mine: Arriving, start: int, total: int) -> Response:
    """Write the body of an upload while it arrives; return the upload's state."""
    pieces = _Pieces()

    def written() -> int:
        try:
            return mine.add(request.path_params["digest"], start, total, pieces)
        finally:
            pieces.drain()

    writer = asyncio.ensure_future(in_thread(UPLOAD, written))
    writer.add_done_callback(lambda _: pieces.end())  # it may not have begun: too many uploads wait
    try:
        async for piece in request.stream():
            for at in range(0, len(piece), _CHUNK):
                await pieces.put(piece[at : at + _CHUNK])
    except ClientDisconnect:  # the received bytes are retained
        pass
    except SlowError:  # the received bytes are retained here, too
        await pieces.put(None)
        with suppress(PartSizeError):
            await writer
        raise
    finally:
        await pieces.put(None)
    have = await writer
    return JSONResponse({"held": have == total, "offset": have})


class _Pieces:
    """A queue of pieces of an upload, from the connection to the writer."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_PIECES)
        self._ended = False

    async def put(self, piece: bytes | None) -> None:
        """Add the next piece; None marks the end. Waiting takes no thread, since all threads may wait for pieces."""
        while not self._ended:
            try:
                self._waiting.put_nowait(piece)
                return
            except queue.Full:
                await asyncio.sleep(_FULL)

    def end(self) -> None:
        """Discard all further pieces."""
        self._ended = True

    def __iter__(self) -> Iterator[bytes]:
        while not self._ended:
            try:
                piece = self._waiting.get(timeout=_STALLED)
            except queue.Empty as error:
                self._ended = True
                raise DeadlineError(
                    f"upload: no bytes have arrived for {_STALLED:g} s; request the upload's offset and continue there"
                ) from error
            if piece is None:
                self._ended = True
            else:
                yield piece

    def drain(self) -> None:
        """Discard unwritten pieces, so `put` does not block."""
        for _ in self:
            continue


async def _size(request: Request) -> int:
    """Return the size that a small JSON body contains."""
    body = await whole(request, _MOST_BODY, "upload: the body")
    try:
        size = json.loads(body)["size"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError('upload: the body must be {"size": BYTES}') from error
    if type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise InputError(f"upload: size must be 0 to {MOST_BYTES} bytes, got {str(size)[:40]!r}")
    return size


def _digits(value: str, what: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 15:
        raise InputError(f"upload: {what} must be a whole number of bytes, got {value[:40]!r}")
    return int(value)


def _weight(request: Request) -> int:
    """Return the body's size from its header; without the header, the size of the pieces that the queue can hold."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() and len(said) < _DIGITS else _PIECES * _CHUNK
