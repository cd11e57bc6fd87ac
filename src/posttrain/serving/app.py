"""The web application of a served model: routes, keys, turns, streams, metrics and errors in OpenAI's form.

A request is identified, read, checked, and then waits for a turn; a request beyond the queue is refused at once with
`Retry-After`. An answer names the digest of the model that computed it, in `system_fingerprint` and in a header. When a
client leaves, or does not read for a minute, its generations are aborted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from posttrain.domain.errors import (
    AccessError,
    AuthenticationError,
    BusyError,
    InfrastructureError,
    InputError,
    JobFailedError,
    LimitError,
    NotFoundError,
    PosttrainError,
)
from posttrain.serving.answers import choices, refuse_unfit, stream
from posttrain.serving.engines import EngineLostError, Models, Served
from posttrain.serving.texts import Texts
from posttrain.serving.wire import Asked, Choice, answer, asked_chat, asked_completion, asked_tokens, usage

log = logging.getLogger("posttrain.serving")
DIGEST_HEADER = "posttrain-model-digest"
MOST_BODY = 8 << 20  # bytes
_PATIENCE = 60.0  # seconds within which a client must send its body, and read each piece of an answer
_OTHER_METHOD = 405
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RETRY = {"retry-after": "1"}


class _SizeError(InputError):
    """A body is too large."""


class _MethodError(InputError):
    """A path needs another method."""


_STATUS: tuple[tuple[type[PosttrainError], int, str], ...] = (
    (AuthenticationError, 401, "authentication_error"),
    (AccessError, 403, "permission_error"),
    (NotFoundError, 404, "not_found_error"),
    (LimitError, 429, "rate_limit_error"),
    (BusyError, 429, "rate_limit_error"),
    (_SizeError, 413, "invalid_request_error"),
    (_MethodError, 405, "invalid_request_error"),
    (InputError, 400, "invalid_request_error"),
    (JobFailedError, 500, "server_error"),
    (PosttrainError, 503, "server_error"),
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Parse = Callable[[Mapping[str, Any], str, int, Any], Asked]


class Keys(Protocol):
    """Identifies callers."""

    async def check(self, key: str | None) -> str:
        """Return the caller's name.

        Raises:
            AuthenticationError: there is no key, or it is unknown, revoked or expired.
            AccessError: the key is for something else.
        """


class NoKeys:
    """Serves everyone who reaches the address."""

    async def check(self, key: str | None) -> str:
        """See `Keys.check`."""
        return "anyone"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server."""

    concurrency: int = 256  # responses
    queue: int = 1024  # requests that wait for a turn
    context: int | None = None  # tokens of a prompt with its response; None: those of the model


class Turns:
    """Turns of requests, in the order of their arrival; a request with more responses than there are has them alone."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.running = 0  # responses
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """The requests that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, responses: int) -> AsyncIterator[None]:
        """Hold a turn for this number of responses.

        Raises:
            BusyError: too many requests wait already.
        """
        if self._waiting or not self._fits(responses):
            if len(self._waiting) >= self._limits.queue:
                raise BusyError(f"the queue of {self._limits.queue} requests is full; try again")
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((responses, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self.running -= responses  # the turn came while the client left
                with suppress(ValueError):
                    self._waiting.remove((responses, turn))
                self._next()
                raise
        else:
            self.running += responses
        try:
            yield
        finally:
            self.running -= responses
            self._next()

    def _fits(self, responses: int) -> bool:
        return not self.running or self.running + responses <= self._limits.concurrency

    def _next(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            responses, turn = self._waiting.popleft()
            if not turn.done():
                self.running += responses
                turn.set_result(None)


class Spending:
    """The tokens that callers spend, by the rule of `domain.jobs.Progress`, of those that are granted to them."""

    def __init__(self) -> None:
        self.granted: float | None = None  # tokens; None: no limit
        self.spent = self.held = self.wanted = self.answered = 0
        self.refused = ""  # why the last request that was refused is wrong
        self.short: Callable[[], None] = lambda: None  # called when a request waits for a grant
        self._more = asyncio.Event()

    @asynccontextmanager
    async def reserved(self, most: int) -> AsyncIterator[list[int]]:
        """Reserve the most tokens that a request may spend, once they are granted.

        Yields:
            A list, to which a complete answer adds its tokens; without them, the answer spends all that was reserved.
        """
        while self.granted is not None and self.spent + self.held + most > self.granted:
            self.wanted = most
            self._more.clear()
            try:
                self.short()
                await self._more.wait()
            finally:
                self.wanted = 0
        self.held += most
        complete: list[int] = []
        try:
            yield complete
        finally:
            self.held -= most
            self.spent += sum(complete) if complete else most
            self.answered += bool(complete)
            self._more.set()  # another request may fit into what was not spent

    def grant(self, tokens: int) -> None:
        """Raise the granted tokens."""
        self.granted = max(tokens, self.granted or 0)
        self._more.set()

    def to_json(self) -> dict[str, int | str]:
        """Return the counts, and the last refusal."""
        return {name: getattr(self, name) for name in ("spent", "held", "wanted", "answered", "refused")}


class Meters:
    """The metrics of a server. No label has a value that a caller chooses."""

    def __init__(self, models: Models, turns: Turns) -> None:
        self._registry, self._models = CollectorRegistry(), models
        registry = self._registry
        self.requests = Counter("posttrain_served_requests", "Requests by route and status", ["route", "status"],
                                registry=registry)  # fmt: skip
        self.tokens = Counter("posttrain_served_tokens", "Tokens by kind", ["kind"], registry=registry)
        self.seconds = Histogram("posttrain_served_request_seconds", "Time of a request", ["route"],
                                 registry=registry, buckets=_SECONDS)  # fmt: skip
        self.first = Histogram("posttrain_served_first_token_seconds", "Time to the first piece of a stream",
                               registry=registry, buckets=_SECONDS)  # fmt: skip
        for name, words, value in (
            ("running", "Responses that are computed", lambda: turns.running),
            ("waiting", "Requests that wait for a turn", lambda: turns.waiting),
            ("models", "Models in memory", lambda: len(models.loaded)),
            ("outdated", "Whether the newest release of the channel is not served", lambda: bool(models.trouble)),
        ):
            Gauge(f"posttrain_served_{name}", words, registry=registry).set_function(value)
        self._release = Gauge("posttrain_served_release", "The release that new requests get", ["release", "digest"],
                              registry=registry)  # fmt: skip

        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of the models."""
        models = self._models
        yield CounterMetricFamily(
            "posttrain_served_switches", "Releases that the server began to serve", models.switches
        )
        yield CounterMetricFamily(
            "posttrain_served_engine_restarts", "Engines that were started again", models.restarts
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._release.clear()
        if served := self._models.served:
            self._release.labels(served.release.name, served.release.digest).set(1)
        return generate_latest(self._registry)

    @contextmanager
    def measured(self, route: str) -> Iterator[None]:
        """Measure the time of a request."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds.labels(route).observe(time.monotonic() - begun)


@dataclass(slots=True)
class Door:
    """The state that the routes share."""

    name: str  # of the model in requests and in `/v1/models`
    models: Models
    limits: Limits
    keys: Keys
    aliases: Collection[str] = ()  # further names of the model in requests
    turns: Turns = field(init=False)
    meters: Meters = field(init=False)
    spending: Spending = field(default_factory=Spending)
    closing: bool = False  # whether the server drains
    rendering: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.limits)
        self.meters = Meters(self.models, self.turns)
        self.rendering = asyncio.Semaphore(1)  # a template's time is measured, so one is rendered at a time

    def most(self, served: Served) -> int:
        """Return the maximum number of tokens in a prompt with its response."""
        return min(served.context, self.limits.context or served.context)

    def named(self, model: str, served: Served) -> tuple[str, str]:
        """Return the name and the digest of the model, or of the adapter, for the answer.

        Raises:
            NotFoundError: no such model is served.
        """
        release = served.release
        if model in release.adapters:
            return model, release.adapters[model].digest
        if model and model not in (self.name, release.name, release.digest, *self.aliases):
            known = ", ".join([self.name, *release.adapters])
            raise NotFoundError(f"model {model[:80]!r}: is not served here; name {known}, or leave it out")
        return self.name, release.digest


def build(door: Door) -> Starlette:
    """Return the web application."""
    posts: Mapping[str, Parse] = {
        "/v1/completions": asked_completion,
        "/v1/chat/completions": asked_chat,
        "/inference/v1/generate": asked_tokens,
    }
    routes = [Route(path, _answering(door, path, parse), methods=["POST"]) for path, parse in posts.items()]
    views = {"/v1/models": _models, "/health": _health, "/readyz": _health, "/metrics": _metrics}
    routes += [Route(path, _viewing(door, path, view), methods=["GET"]) for path, view in views.items()]
    routes.append(Route("/v1/models/{model:path}", _viewing(door, "/v1/models/{model}", _model), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
    app.router.redirect_slashes = False
    return app


def _viewing(
    door: Door, path: str, view: Callable[[Door, Request], Response]
) -> Callable[[Request], Awaitable[Response]]:
    async def look(request: Request) -> Response:
        try:
            if view is not _health:
                await door.keys.check(_key(request))
            found = view(door, request)
        except PosttrainError as error:
            found = problem(error)
        door.meters.requests.labels(path, found.status_code).inc()
        return found

    return look


def _listed(door: Door) -> list[dict[str, Any]]:
    """Return the entries of the model and of its adapters.

    Raises:
        EngineLostError: the first model is still being loaded.
    """
    served = door.models.served
    if served is None:
        raise EngineLostError(f"{door.models.trouble}; try again")
    entry = {"object": "model", "created": 0, "owned_by": "posttrain", "max_model_len": door.most(served)}
    releases = {door.name: served.release, **served.release.adapters}
    found = [{"id": name, **entry, "release": one.name, "digest": one.digest} for name, one in releases.items()]
    return [found[0], *({**one, "parent": door.name} for one in found[1:])]


def _models(door: Door, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": _listed(door)})


def _model(door: Door, request: Request) -> Response:
    name = request.path_params["model"]
    found = next((one for one in _listed(door) if one["id"] == name), None)
    if found is None:
        raise NotFoundError(f"model {name[:80]!r}: is not served here; GET /v1/models lists the names")
    return JSONResponse(found)


def _health(door: Door, request: Request) -> Response:
    served = door.models.served
    ready = served is not None and served.engine.running and not door.closing
    state = "draining" if door.closing else "serving" if ready else "loading"
    found = {
        "status": state,
        "model": door.name,
        "release": served and served.release.name,
        "digest": served and served.release.digest,
        "compared": served and served.compared,
        "trouble": door.models.trouble,
    }
    return JSONResponse(found, 200 if ready else 503)


def _metrics(door: Door, request: Request) -> Response:
    return Response(door.meters.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _no_route(request: Request, error: Exception) -> Response:
    """Return the error of a path without a route, or of a route with another method."""
    what = f"{request.method[:20]} {request.url.path[:80]!a}"
    if isinstance(error, HTTPException) and error.status_code == _OTHER_METHOD:
        return problem(_MethodError(f"{what}: the path needs another method; see docs/howto/serve-model.md"))
    return problem(NotFoundError(f"{what}: is not a route of this server, as /v1/models, /health and /metrics are"))


def problem(error: PosttrainError) -> JSONResponse:
    """Return an error in OpenAI's form."""
    status, kind = next((status, kind) for base, status, kind in _STATUS if isinstance(error, base))
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status, _RETRY if status in (429, 503) else None)


def _key(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _answering(door: Door, path: str, parse: Parse) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        request.state.asker = await door.keys.check(_key(request))  # such a connection is not closed for others
        if door.closing:
            raise InfrastructureError("the server is shutting down; try again")
        body = await _body(request)
        return Answering(door, path, parse, body)

    async def answered(request: Request) -> Response:
        try:
            return await respond(request)
        except PosttrainError as error:
            found = problem(error)
            door.meters.requests.labels(path, found.status_code).inc()
            return found

    return answered


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        InputError: it is not one, too large, or arrives too slowly.
    """
    if int(request.headers.get("content-length") or 0) > MOST_BODY:
        raise _SizeError(f"body: must have at most {MOST_BODY} bytes, got {request.headers['content-length'][:20]}")
    received = bytearray()
    try:
        async with asyncio.timeout(_PATIENCE):
            async for piece in request.stream():
                received += piece
                if len(received) > MOST_BODY:
                    raise _SizeError(f"body: must have at most {MOST_BODY} bytes, got more; send fewer prompts")
        found = await asyncio.to_thread(_loaded, bytes(received))
    except TimeoutError as error:
        raise InputError(
            f"body: must arrive within {_PATIENCE:g} s, got {len(received)} bytes; send it again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"body: must be JSON, got {str(error)[:100]}; check its syntax") from error
    except ClientDisconnect as error:
        raise InputError("body: must be complete, but the client left") from error
    if not isinstance(found, dict):
        raise InputError(f"body: must be a JSON object, got {type(found).__name__}")
    return found


def _loaded(data: bytes) -> Any:
    """Return JSON; raise ValueError also for texts that UTF-8 cannot write."""
    found = json.loads(data)
    if _SURROGATE.search(data):
        json.dumps(found, ensure_ascii=False).encode()
    return found


class Answering(Response):
    """Computes and sends one answer; ends when the client leaves."""

    def __init__(self, door: Door, path: str, parse: Parse, body: Mapping[str, Any]) -> None:
        super().__init__()
        self._door, self._path, self._parse, self._given = door, path, parse, body
        self._begun = False  # whether the headers were sent
        self._state: MutableMapping[str, Any] = {}  # of the request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response.__call__`."""
        self._state = scope.get("state", {})
        work = asyncio.create_task(self._respond(send))
        leaves = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, leaves}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaves.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait({work})
        self._door.meters.requests.labels(self._path, 499 if work.cancelled() else work.result()).inc()

    async def _respond(self, send: Send) -> int:
        """Answer; return the status."""

        async def patiently(message: Message) -> None:
            async with asyncio.timeout(_PATIENCE):
                await send(message)

        with self._door.meters.measured(self._path):
            try:
                await self._answer(patiently)
            except PosttrainError as error:
                found = problem(error)
                if isinstance(error, InputError):
                    self._door.spending.refused = str(error)
                if found.status_code >= 500:
                    level = logging.ERROR if self._door.models.served else logging.INFO  # while the first model loads
                    log.log(level, "%s: %s", self._path, error)
                if self._begun:  # a stream: its status was sent
                    await patiently(_piece(json.loads(bytes(found.body))))
                    await patiently({"type": "http.response.body", "body": b"", "more_body": False})
                else:
                    await found({"type": "http"}, _nothing, patiently)
                return found.status_code
            except TimeoutError:
                if transport := self._state.get("transport"):
                    transport.abort()  # a plain close would wait for the client to read
                return 499
            except Exception:
                log.exception("%s: an unexpected error", self._path)
                found = problem(JobFailedError("the server failed at this request; its log has the reason"))
                if not self._begun:
                    await found({"type": "http"}, _nothing, patiently)
                return found.status_code
        return 200

    async def _answer(self, send: Send) -> None:
        """Answer, and once more if the engine ends before any of the answer was sent."""
        name, seed = f"{_PREFIX[self._path]}-{secrets.token_hex(12)}", secrets.randbits(63)
        try:
            await self._answer_once(name, seed, send)
        except EngineLostError:
            if self._begun:
                raise
            await self._answer_once(name, seed, send)

    async def _answer_once(self, name: str, seed: int, send: Send) -> None:
        door = self._door
        async with door.models.lease() as served:
            asked = await self._asked(name, seed, served)
        async with door.turns.taken(asked.choices), door.models.lease() as now:
            if now is not served:  # a switch while the request waited
                asked = await self._asked(name, seed, now)
            named = door.named(asked.model, now)
            async with door.spending.reserved(asked.most_tokens(door.most(now))) as complete:
                if asked.stream:
                    await self._stream(asked, now, named, send, complete)
                    return
                found = await choices(asked, now, door.most(now))
                tokens = self._count(asked, sum(len(one.tokens) for one in found), complete)
            response = await asyncio.to_thread(_whole, asked, found, named, tokens, now.texts)
        await response({"type": "http"}, _nothing, send)

    async def _asked(self, name: str, seed: int, served: Served) -> Asked:
        async with self._door.rendering:
            asked = await asyncio.to_thread(self._parse, self._given, name, seed, served.texts)
        self._door.named(asked.model, served)
        refuse_unfit(asked, served, self._door.most(served))
        return asked

    async def _stream(
        self, asked: Asked, served: Served, named: tuple[str, str], send: Send, complete: list[int]
    ) -> None:
        """Send the answer as server-sent events."""
        model, digest = named
        begun, tokens, seen = time.monotonic(), 0, set[int]()
        base = answer(asked, [], model, digest, served.texts, chunk=True)

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            nonlocal tokens
            async for one in stream(asked, served, self._door.most(served)):
                tokens += len(one.tokens)
                first = one.index not in seen
                seen.add(one.index)
                yield answer(asked, [one], model, digest, served.texts, chunk=True, first=first)
            if asked.usage:
                yield {**base, "usage": usage(asked, tokens)}

        async for piece in pieces():
            if not self._begun:  # until then, an error has a status
                self._door.meters.first.observe(time.monotonic() - begun)
                await send(_event_stream(digest))
                self._begun = True
            await send(_piece(piece))
        self._count(asked, tokens, complete)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _count(self, asked: Asked, tokens: int, complete: list[int]) -> int:
        prompts = sum(map(len, asked.prompts))
        self._door.meters.tokens.labels("prompt").inc(prompts)
        self._door.meters.tokens.labels("generated").inc(tokens)
        complete.append(prompts + tokens)
        return tokens


def _whole(asked: Asked, found: list[Choice], named: tuple[str, str], tokens: int, texts: Texts) -> JSONResponse:
    model, digest = named
    body = answer(asked, found, model, digest, texts, chunk=False)
    return JSONResponse({**body, "usage": usage(asked, tokens)}, headers={DIGEST_HEADER: digest})


_PREFIX = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl", "/inference/v1/generate": "gen"}


def _event_stream(digest: str) -> Message:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", DIGEST_HEADER: digest}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


def _piece(body: Mapping[str, Any]) -> Message:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
