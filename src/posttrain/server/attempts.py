"""Access of running jobs to a server, for as long as their attempts run.

A job may read the bytes of its inputs and, if its mailbox is in an object store, access the mailbox's objects.

A job sends its attempt's token. No verb accepts such a token, and the paths for jobs accept no other token.
"""

from __future__ import annotations

import functools
import re
import secrets
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from posttrain.domain.canonical import DIGEST_PREFIX, digest_bytes, is_digest
from posttrain.domain.errors import AuthenticationError, InputError, NotFoundError
from posttrain.server.limits import CHANNEL, READ, UPLOAD, Limits, in_thread, whole
from posttrain.store.atomic import most_of
from posttrain.store.direct import LARGE, open_direct
from posttrain.store.grants import BOOTSTRAP_PREFIX, PREFIX, Granted, Grants
from posttrain.store.mailboxes.objects import object_store
from posttrain.store.mailboxes.served import TOO_MUCH
from posttrain.store.retries import PARTS, REDEEM
from posttrain.store.staging import FOLDER, PART, StoredParts
from posttrain.store.trees import tree_listing

if TYPE_CHECKING:
    from posttrain.server.operations import Server
    from posttrain.store.mailbox import MailboxObjects
    from posttrain.workspace.settings import OpenWorkspace

_PART = re.compile(r"[0-9]{1,6}/[0-9a-f]{64}")
BLOB = "/v1/attempt/blobs/{digest}"
_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,80}"
_KEY = re.compile(f"{_NAME}(/{_NAME}){{0,3}}")  # no part of a key begins with a dot
MOST_PUT = 64 << 30  # maximum bytes that an attempt may write to its mailbox, including replaced and deleted objects
LEAST_COUNTED = 4 << 10  # an object counts as at least this number of bytes
_SCHEME = "bearer "
_DIGITS = 16  # a size in a header has fewer digits
_MOST = 256  # maximum number of attempts whose inputs are cached in memory
_UNKEPT = {"cache-control": "no-store"}


def add_routes(app: FastAPI, server: Server) -> None:
    """Add the routes: GET and HEAD for inputs; GET, PUT and DELETE for mailbox objects; GET for their numbers."""
    all_of = _Jobs(server.workspace, server.limits)
    channel = "/v1/attempt/channel/{key:path}"
    app.add_api_route(channel, all_of.talk, methods=["GET", "PUT", "DELETE"], name="attempt_channel")
    app.add_api_route(REDEEM, all_of.redeem, methods=["POST"], name="attempt_redeem")
    app.add_api_route(f"{PARTS}/{{key:path}}", all_of.part, methods=["GET", "POST", "PUT"], name="attempt_part")
    app.add_api_route(BLOB, all_of.fetch, methods=["GET", "HEAD"], name="attempt_blob")


class _Jobs:
    """Handlers of the routes for running jobs."""

    def __init__(self, workspace: OpenWorkspace, limits: Limits) -> None:
        self._workspace, self._limits = workspace, limits
        self._inputs = functools.lru_cache(_MOST)(functools.partial(_reached, workspace))
        self._grants = Grants(workspace.ledger.database, workspace.ledger.clock)
        self._direct = open_direct(workspace.blobs.url)

    async def fetch(self, request: Request) -> Response:
        who, _ = await in_thread(READ, self._granted, request)
        digest, blobs, direct = request.path_params["digest"], self._workspace.blobs, self._direct
        size = await in_thread(UPLOAD, self._size, digest, who)
        headers = {"content-length": str(size), **_UNKEPT}
        if request.method == "HEAD":
            return Response(headers=headers)
        if direct is not None and size >= LARGE and request.query_params.get("direct") == "yes":
            return RedirectResponse(await in_thread(UPLOAD, direct.download, digest), headers=_UNKEPT)
        return StreamingResponse(blobs.stream(digest), media_type="application/octet-stream", headers=headers)

    async def talk(self, request: Request) -> Response:
        """Handle a request to the mailbox; the mailbox and the limits are checked before the body is read."""
        who, secret = await in_thread(READ, self._granted, request)
        await in_thread(UPLOAD, self._objects, who)
        key = request.path_params["key"]
        if not _KEY.fullmatch(key.removesuffix("/")) or (key.endswith("/") and request.method != "GET"):
            raise InputError(f"mailbox: {key[:80]!a} is not the name of an object; see store/mailbox.py")
        most = most_of(key) if request.method == "PUT" else 0
        async with self._limits.taken(f"attempt {who.run_id}/{who.stage}/{who.number}", CHANNEL, _size(request, most)):
            body = await whole(request, most, f"mailbox: {key}")
            return await in_thread(UPLOAD, self._talked, request, who, secret, body)

    async def redeem(self, request: Request) -> Response:
        """Answer a bootstrap token with a token of its attempt; with such a token, revoke all others of the attempt."""
        if not _secret(request).startswith(BOOTSTRAP_PREFIX):
            who, digest = await in_thread(READ, self._granted, request)
            await in_thread(READ, self._grants.settle, digest, who)
            return Response(status_code=204)
        secret = PREFIX + secrets.token_urlsafe(32)
        digests = [digest_bytes(one.encode()) for one in (_secret(request), secret)]
        if not await in_thread(READ, self._grants.redeem, *digests):
            raise AuthenticationError(
                "the bootstrap token is not that of a running attempt: the attempt has ended, or was replaced"
            )
        return JSONResponse({"token": secret}, headers=_UNKEPT)

    async def part(self, request: Request) -> Response:
        """Store a part of a staged file (PUT), return it (GET), or answer where to send a large one directly (POST)."""
        who, _ = await in_thread(READ, self._granted, request)
        key = request.path_params["key"]
        if not _PART.fullmatch(key):
            raise InputError(f"part: must be named EPOCH/SHA-256, got {key[:80]!a}; see store/staging.py")
        parts = StoredParts(self._workspace.blobs.url, who.name)
        if request.method == "POST":
            said, ticket = request.query_params.get("size", ""), None
            if self._direct is not None and said.isascii() and said.isdecimal() and len(said) < _DIGITS:
                ticket = await in_thread(UPLOAD, self._direct.part, f"{FOLDER}/{who.name}/{key}", int(said))
            if ticket is None:
                return Response(status_code=204)
            return JSONResponse({"url": ticket.url, "headers": dict(ticket.headers)}, headers=_UNKEPT)
        size = _size(request, PART) if request.method == "PUT" else PART
        async with self._limits.taken(f"attempt {who.run_id}/{who.stage}/{who.number}", CHANNEL, size):
            if request.method == "GET":
                found = await in_thread(UPLOAD, parts.get, key)
                return Response(found, headers=_UNKEPT, media_type="application/octet-stream")
            body = await whole(request, PART, f"part {key}")
            if digest_bytes(body).removeprefix(DIGEST_PREFIX) != key.rpartition("/")[2]:
                raise InputError(f"part {key}: the received bytes have another digest; send it again")
            await in_thread(UPLOAD, parts.put, key, body)
        return Response(status_code=204)

    def _granted(self, request: Request) -> tuple[Granted, str]:
        """Return the grant of the token, and the token's digest."""
        secret = _secret(request)
        digest = digest_bytes(secret.encode())
        found = self._grants.known(digest) if secret.startswith(PREFIX) else None
        if found is None:
            raise AuthenticationError(
                "the token is not that of a running attempt: the attempt has ended, or the token is not an attempt's "
                "token"
            )
        request.state.granted = found
        return found, digest

    def _size(self, digest: str, who: Granted) -> int:
        if not is_digest(digest) or digest not in self._inputs(who):
            raise NotFoundError(f"{digest[:80]!r} is not an input of this attempt")
        return self._workspace.blobs.size(digest)

    def _objects(self, who: Granted) -> MailboxObjects:
        url = self._workspace.jobs.folders.mailbox_of(who.run_id, who.stage, who.number)
        if not url:
            raise NotFoundError("the mailbox of this attempt is its folder")
        return object_store(url)

    def _talked(self, request: Request, who: Granted, secret: str, body: bytes) -> Response:
        key, channel = request.path_params["key"], self._objects(who)
        if key.endswith("/"):
            return JSONResponse(channel.numbers(key.removesuffix("/")), headers=_UNKEPT)
        if request.method == "GET":
            found = channel.get(key)
            return Response(found, 404 if found is None else 200, _UNKEPT, "application/octet-stream")
        if request.method == "DELETE":
            channel.remove(key)
            return Response(status_code=204)
        if not self._grants.count(secret, max(len(body), LEAST_COUNTED), MOST_PUT):
            return Response(status_code=TOO_MUCH)
        if request.headers.get("if-none-match") != "*":
            channel.overwrite(key, body)
        elif not channel.create(key, body):
            return Response(status_code=409)
        return Response(status_code=204)


def _secret(request: Request) -> str:
    header = request.headers.get("authorization", "")
    return header[len(_SCHEME) :].strip() if header.lower().startswith(_SCHEME) else ""


def _size(request: Request, most: int) -> int:
    """Return the memory that a body will take, by the header `content-length`; without the header, the maximum."""
    said = request.headers.get("content-length", "0" if "transfer-encoding" not in request.headers else "")
    return min(int(said), most) if said.isascii() and said.isdecimal() and len(said) < _DIGITS else most


def _reached(workspace: OpenWorkspace, who: Granted) -> frozenset[str]:
    """Return the digests of an attempt's inputs, including those of the files in trees."""
    seen = workspace.seen_by(workspace.actor, who.project, "job")
    [stage] = [one for one in seen.ledger.stages(who.run_id) if one.name == who.stage]
    named: list[Any] = [*stage.inputs.values(), *([{"digest": who.resume, "form": "tree"}] if who.resume else [])]
    found = {str(blob["digest"]) for blob in named}
    for blob in named:
        if blob["form"] == "tree":
            found |= {file.digest for file in tree_listing(seen.blobs, str(blob["digest"])).values()}
    return frozenset(found)
