"""The server's routes: one for each verb of the table, and those for uploads, streams and the server's own state."""

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain._version import __version__
from posttrain.api.codec import MEDIA_TYPE, problem
from posttrain.api.control import OPERATIONS
from posttrain.api.verbs import API_VERSIONS, Verb
from posttrain.app.control import refuse
from posttrain.domain.errors import (
    ApiVersionError,
    AuthenticationError,
    BusyError,
    InputError,
    LedgerUnavailableError,
    LimitError,
    NotFoundError,
    SlowError,
    UnavailableError,
)
from posttrain.domain.ids import refuse_control_characters
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.server import attempts, blobs, operations, streams
from posttrain.server.authentication import Asker, arguments, call, to_json
from posttrain.server.console import routes as console
from posttrain.server.limits import (
    BODY,
    HEAVY,
    LOOK,
    READ,
    RETRY_SECONDS,
    in_thread,
    read,
    sent,
    timely,
    weight,
)
from posttrain.server.logs import facts, logged_problem
from posttrain.server.metrics import METRICS_TYPE, Observing, verb_of
from posttrain.server.operations import (
    LaterError,
    Once,
    Server,
    accepted,
    as_now,
    asked_of,
    request_id,
    used_key,
    wait_of,
)
from posttrain.server.worker import INTERFACE
from posttrain.server.workers import Asking, Refused
from posttrain.store.operations import Begun

log = logging.getLogger("posttrain.server")
_VERSION = re.compile(r"/v([0-9]{1,9})(/|$)")
_UNCHANGED, _OTHER_METHOD = 304, 405
_AWAY = "5"  # seconds after which clients should retry if the store or the database does not answer
_UNAVAILABLE = [problem(one)["type"] for one in (UnavailableError(), LedgerUnavailableError())]
_SPOKEN = ", ".join(map(str, API_VERSIONS))


def build(server: Server) -> FastAPI:
    """Return the server's web application."""
    app = FastAPI(title="Posttrain", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    for operation in OPERATIONS.values():
        app.add_api_route(
            operation.whole_path, _answering(server, operation), methods=[operation.method], name=operation.name
        )
    for room in (blobs, attempts, streams, operations, console):
        room.add_routes(app, server)
    for path, answer in _PLACES.items():
        app.add_api_route(path, answer, methods=["GET"], name=path.rpartition("/")[2].removesuffix(".json"))
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_middleware(_Around)
    app.add_middleware(
        Observing, meter=server.meters, may_name=server.authentication.may_name, behind_proxy=server.behind_proxy
    )
    return app


def _answering(server: Server, operation: Verb[..., Any]) -> Callable[[Request], Awaitable[Response]]:
    light = READ if operation.unsafe else LOOK  # separate lanes, so reads never delay an order such as stop

    async def answer(request: Request) -> Response:
        # checked before the body is read, so a request without permission uses no worker and no key
        who, _ = await in_thread(READ if operation.heavy else light, server.admitted, request, operation.name)
        async with server.limits.taken(who.identity.principal, BODY, weight(operation, request)):
            return await answered(request, who)

    async def answered(request: Request, who: Asker) -> Response:
        body = await read(operation, request)
        if operation.looks_at_jobs:
            run_id = request.path_params["run_id"]
            elsewhere = await server.peers.answer(
                request, lambda: server.authentication.ledger(who), run_id, who.identity, body, computes=operation.heavy
            )
            if elsewhere is not None:
                return elsewhere
        given = sent(operation, request, body)
        key = request.headers.get("idempotency-key", "") if operation.unsafe else ""
        number = request_id(key, who.project, who.identity.principal, server.workspace.ledger.entropy)
        request.state.id, lane, size = number, HEAVY if operation.heavy else light, len(body)

        async def carry(asking: Asking) -> bytes:
            async with server.limits.taken(who.identity.principal, lane, size):
                return await in_thread(lane, _asked, server, operation, who, given, key, number, asking)

        wait = wait_of(request) if operation.unsafe and operation.heavy else None
        if operation.streams and "text/event-stream" in request.headers.get("accept", ""):
            return await streams.answers(request, carry)
        if wait is not None:
            if known := await in_thread(READ, _elsewhere, server, who, number, asked_of(operation.name, given)):
                return accepted(who.project, number, as_now(known))
            one = server.running.begin(who, number, operation.name, given, carry)
            if not (await asyncio.wait({one.task}, timeout=wait))[0]:
                await server.running.share(one, await in_thread(READ, server.authentication.principal, who))
                return accepted(who.project, number, one.to_json())
            server.running.drop(one)
            found = one.task.result()
        else:
            found = await carry(Asking())
        return _response(operation, request, found)

    return answer


def _response(operation: Verb[..., Any], request: Request, found: bytes) -> Response:
    if operation.unsafe:
        return Response(found, media_type="application/json", headers={"cache-control": "no-store"})
    tag = f'"{hashlib.sha256(found).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=_UNCHANGED, headers=headers)
    return Response(found, media_type="application/json", headers=headers)


def _elsewhere(server: Server, who: Asker, number: str, body: str) -> Begun | None:
    """Return the operation that another server carries out for the same request; None: no other server does.

    Raises:
        InputError: the other server carries out a different request with the same key.
    """
    if server.running.carries_out(number):
        return None
    found = server.operations.find(number, who.project, server.authentication.principal(who))
    if found is None or found.over or found.lost:
        return None
    if found.body != body:
        raise used_key()
    return found


def _asked(
    server: Server, operation: Verb[..., Any], who: Asker, given: dict[str, Any], key: str, number: str, asking: Asking
) -> bytes:
    def carried_out(number: str) -> bytes:
        if operation.heavy:
            return server.workers.ask(who.to_json(), operation.name, given, number, asking)
        named = arguments(operation, given)
        return to_json(call(server.authentication.control(who, number), operation.name, named, project=who.project))

    if not key:
        return carried_out(number)
    once = Once(server.authentication.ledger(who), server.authentication.principal(who), number)
    return once.answer(key, operation.name, given, carried_out)[1]


class _Around:
    """Adds the request's id and the versions to every response, and converts every error to a problem document."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, begun = Request(scope, receive), False
        request.state.id = request_id("", "", "", os.urandom)

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["posttrain-request"] = request.state.id
                headers["posttrain-version"] = __version__
                headers["posttrain-api"] = _SPOKEN
            await send(message)

        try:
            _refuse_other_version(request)
            refuse_control_characters(f"{request.url.path}?{unquote(request.url.query)}", "a request's path and query")
            await self._app(scope, timely(receive), named)
        except Exception as error:
            if begun:  # a response that has begun cannot be changed, so the connection ends
                log.exception("a response ended early", extra=facts(request=request.state.id, verb=verb_of(scope)))
                raise
            await _problem(request, error)(scope, receive, named)


def _problem(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        document = error.document
    elif isinstance(error, AuthenticationError):
        document = problem(error, request.state.id, 401)
    else:
        document = logged_problem(error, request.state.id, verb_of(request.scope))
    headers = {"www-authenticate": "Bearer"} if document["status"] == 401 else {}
    headers |= {"retry-after": _AWAY} if document["type"] in _UNAVAILABLE else {}
    headers |= {"connection": "close"} if isinstance(error, SlowError) else {}  # the rest of the body is not a request
    headers |= {"retry-after": str(RETRY_SECONDS)} if isinstance(error, LaterError | LimitError | BusyError) else {}
    return JSONResponse(document, document["status"], headers, MEDIA_TYPE)


async def _http_problem(request: Request, error: Exception) -> Response:
    """Return the response to a request that no route handles."""
    if getattr(error, "status_code", 500) == _OTHER_METHOD:
        document = problem(
            InputError(f"{request.method} is not a method of this path; see docs/api.md"),
            request.state.id,
            _OTHER_METHOD,
        )
        return JSONResponse(document, _OTHER_METHOD, getattr(error, "headers", None), MEDIA_TYPE)
    return _problem(request, NotFoundError("there is nothing at this path; see docs/api.md"))


def _refuse_other_version(request: Request) -> None:
    found = _VERSION.match(request.url.path)
    if found and int(found[1]) not in API_VERSIONS:
        which = "old" if int(found[1]) < min(API_VERSIONS) else "new"
        raise ApiVersionError(
            f"this server has version {_SPOKEN} of the API, and the client is too {which}: it requested version "
            f"{found[1]}; install Posttrain {__version__}, the server's version"
        )


async def _healthy() -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    why = await in_thread(READ, request.app.state.server.ready)
    return JSONResponse({"status": why or "ok"}, 503 if why else 200)


async def _metrics(request: Request) -> Response:
    """Return the metrics of the whole server, without names, if the caller may read the default project."""
    server: Server = request.app.state.server

    def page() -> bytes:
        who = Asker(server.authentication.identify(request.headers.get("authorization", "")), DEFAULT_PROJECT)
        refuse(server.authentication.control(who), "status")
        request.state.asker, request.state.principal = who, server.authentication.known_as(who)
        return server.meters.page()

    headers = {"content-type": METRICS_TYPE, "cache-control": "no-store"}
    return Response(await in_thread(READ, page), headers=headers)


async def _interface(request: Request) -> Response:
    """Return the OpenAPI document, which a worker makes once, because this process does not import all types."""
    state = request.app.state
    if getattr(state, "interface", None) is None:
        state.interface = await in_thread(HEAVY, state.server.workers.ask, {}, INTERFACE, {}, request.state.id)
    return Response(state.interface, media_type="application/json")


async def _token(request: Request) -> Response:
    """Return a token's principal and projects; a login that names no project chooses one of these projects."""
    server: Server = request.app.state.server

    def told() -> dict[str, Any]:
        identity = server.authentication.identify(request.headers.get("authorization", ""))
        projects = server.authentication.projects(identity)
        who = Asker(identity, next(iter(projects), DEFAULT_PROJECT))
        request.state.asker, request.state.principal = who, server.authentication.known_as(who)
        return {"principal": identity.principal, "projects": projects}

    return JSONResponse(await in_thread(READ, told), headers={"cache-control": "no-store"})


async def _version() -> Response:
    return JSONResponse({"version": __version__, "api": list(API_VERSIONS)})


_PLACES: Mapping[str, Callable[..., Awaitable[Response]]] = {  # handlers in addition to those of verbs
    "/healthz": _healthy,
    "/readyz": _ready,
    "/metrics": _metrics,
    "/v1/version": _version,
    "/v1/token": _token,
    "/openapi.json": _interface,
}
