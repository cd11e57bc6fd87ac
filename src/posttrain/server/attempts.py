"""What running jobs may ask of a server: the bytes of their inputs, and the objects of their channel if a store has it;
as long as their attempt lives, and nothing else.

A job shows its attempt's token. No verb takes it, and no token of a person is taken here.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from posttrain.domain.canonical import digest_bytes, is_digest
from posttrain.domain.errors import AuthenticationError, InputError, NotFoundError
from posttrain.server.granting import PREFIX
from posttrain.server.lanes import READ, UPLOAD, in_thread
from posttrain.server.requests import whole
from posttrain.store.channels.objects import object_store
from posttrain.store.direct import LARGE, open_direct
from posttrain.store.grants import Granted, Grants
from posttrain.store.trees import tree_listing

if TYPE_CHECKING:
    from posttrain.server.app import Server
    from posttrain.store.channel import ChannelObjects
    from posttrain.workspace.opened import OpenWorkspace

BLOB = "/v1/attempt/blobs/{digest}"
CHANNEL = "/v1/attempt/channel/{key:path}"
_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,80}"
_KEY = re.compile(f"{_NAME}(/{_NAME}){{0,3}}")  # no part begins with a dot
_MOST_BYTES = 256 << 20  # of an object
_THERE = 409
_SCHEME = "bearer "
_MOST = 256  # attempts whose inputs are kept in memory
_UNKEPT = {"cache-control": "no-store"}


def add_routes(app: FastAPI, server: Server) -> None:
    """GET and HEAD of an input's bytes."""
    workspace = server.workspace
    grants, direct, inputs = (
        Grants(workspace.ledger.database, workspace.ledger.clock),
        open_direct(workspace.blobs.url),
        _Inputs(workspace),
    )

    def granted(request: Request) -> Granted:
        header = request.headers.get("authorization", "")
        secret = header[len(_SCHEME) :].strip() if header.lower().startswith(_SCHEME) else ""
        found = grants.known(digest_bytes(secret.encode())) if secret.startswith(PREFIX) else None
        if found is None:
            raise AuthenticationError("this is no token of an attempt that lives; the attempt has ended, or is another")
        request.state.granted = found
        return found

    def found(request: Request, who: Granted) -> int:
        digest = request.path_params["digest"]
        if not is_digest(digest) or digest not in inputs.of(who):
            raise NotFoundError(f"{digest[:80]!r} is no input of this attempt")
        return workspace.blobs.size(digest)

    async def fetch(request: Request) -> Response:
        who = await in_thread(READ, granted, request)
        digest = request.path_params["digest"]
        size = await in_thread(UPLOAD, found, request, who)
        headers = {"content-length": str(size), **_UNKEPT}
        if request.method == "HEAD":
            return Response(headers=headers)
        if direct is not None and size >= LARGE and request.query_params.get("direct") == "yes":
            return RedirectResponse(await in_thread(UPLOAD, direct.download, digest), headers=_UNKEPT)
        return StreamingResponse(workspace.blobs.stream(digest), media_type="application/octet-stream", headers=headers)

    def objects(who: Granted) -> ChannelObjects:
        url = workspace.jobs.folders.channel_of(who.run_id, who.stage, who.number)
        if not url:
            raise NotFoundError("the channel of this attempt is its folder")
        return object_store(url)

    def talked(request: Request, who: Granted, body: bytes) -> Response:
        key, channel = request.path_params["key"], objects(who)
        folder = key.endswith("/")
        if not _KEY.fullmatch(key.removesuffix("/")) or (folder and request.method != "GET"):
            raise InputError(f"attempt channel: {key[:80]!a} is no name of an object; see store/channel.py")
        if folder:
            return JSONResponse(channel.numbers(key.removesuffix("/")), headers=_UNKEPT)
        if request.method == "GET":
            found = channel.get(key)
            return Response(found, 404 if found is None else 200, _UNKEPT, "application/octet-stream")
        if request.method == "DELETE":
            channel.remove(key)
        elif request.headers.get("if-none-match") != "*":
            channel.overwrite(key, body)
        elif not channel.create(key, body):
            return Response(status_code=_THERE)
        return Response(status_code=204)

    async def talk(request: Request) -> Response:
        who = await in_thread(READ, granted, request)
        body = await whole(request, _MOST_BYTES, "attempt channel: an object")
        return await in_thread(UPLOAD, talked, request, who, body)

    app.add_api_route(CHANNEL, talk, methods=["GET", "PUT", "DELETE"], name="attempt_channel")
    app.add_api_route(BLOB, fetch, methods=["GET", "HEAD"], name="attempt_blob")


class _Inputs:
    """What the inputs of attempts reach: their digests, and those of the files of trees."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self._workspace, self._lock = workspace, threading.Lock()
        self._known: OrderedDict[Granted, frozenset[str]] = OrderedDict()

    def of(self, who: Granted) -> frozenset[str]:
        with self._lock:
            if who in self._known:
                return self._known[who]
        found = self._reached(who)
        with self._lock:
            self._known[who] = found
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return found

    def _reached(self, who: Granted) -> frozenset[str]:
        seen = self._workspace.seen_by(self._workspace.actor, who.project, "job")
        with seen.ledger.snapshot() as now:
            [stage] = [one for one in now.stages(who.run_id) if one.name == who.stage]
        named: list[Any] = [*stage.inputs.values()]
        named += [{"digest": who.resume, "form": "tree"}] if who.resume else []
        found = {str(blob["digest"]) for blob in named}
        for blob in named:
            if blob["form"] == "tree":
                found |= {file.digest for file in tree_listing(seen.blobs, str(blob["digest"])).values()}
        return frozenset(found)
