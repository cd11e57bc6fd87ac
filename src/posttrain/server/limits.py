"""Limits on requests: their number per principal, their threads, their sizes and their forms.

A principal has two limits for each kind of request. A request beyond the first limit waits; a request beyond the second
limit is rejected with a hint to retry later. So a principal with many requests delays only itself: some threads and
workers are always available to others.

Each kind of blocking work (a *lane*) has separate threads, so uploads, followers and waits for workers do not delay the
requests of other principals.

The size and form of a request are checked before any other code reads the request.
"""

import asyncio
import functools
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from posttrain.api.verbs import Verb
from posttrain.domain.errors import BusyError, InputError, LimitError, SlowError
from posttrain.domain.ids import TYPES, Id

T = TypeVar("T")
MOST_JSON = 8 << 20  # bytes of a JSON body
PIECE_SECONDS = 30.0  # seconds within which the next piece of a body must arrive


READ, HEAVY, UPLOAD, ADOPT, FOLLOW, PASS_ON = "read", "heavy", "upload", "adopt", "follow", "pass on"
LOOK = "look"  # read-only requests; no run waits for them, and a rejected client retries
# LOOK requests hold the interpreter's lock while they compute, so more threads would only slow each other down.
_THREADS = {LOOK: 4, READ: 32, HEAVY: 16, UPLOAD: 16, ADOPT: 8, FOLLOW: 128, PASS_ON: 64}


_WAITING = {
    LOOK: 64,
    READ: 1000,
    HEAVY: 100,
    UPLOAD: 200,
    ADOPT: 200,
    FOLLOW: 0,
    PASS_ON: 0,
}  # lane → number of requests that may wait for a thread


_PATIENCE = {LOOK: 2.0}  # lane → seconds that a request may wait for a thread; other lanes have no limit


_limits: dict[str, anyio.CapacityLimiter] = {}


RETRY_SECONDS = 1  # seconds after which a rejected client should retry


BODY, LOGIN = "body", "login"  # lanes without threads, for bodies that arrive and for login forms


CHANNEL = "channel"  # the lane for reads and writes of a job in its mailbox


MOST_BYTES = 256 << 20  # maximum size of one principal's concurrent uploads


MOST_BODIES = 32 << 20  # maximum size of one principal's other concurrent bodies, which are in memory


async def in_thread(lane: str, does: Callable[..., T], *words: Any) -> T:
    """Run a function in a thread of a lane and return the function's result; waiting for a turn takes no thread.

    Raises:
        BusyError: too many requests wait already, or this request waited too long.
    """
    if lane not in _limits:
        _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    async with _turn(_limits[lane], lane):
        return await anyio.to_thread.run_sync(does, *words, limiter=_any_thread())


@functools.cache
def _any_thread() -> anyio.CapacityLimiter:
    """Return a limiter without a limit, for functions whose turn has already been granted."""
    return anyio.CapacityLimiter(math.inf)


@asynccontextmanager
async def _turn(limit: anyio.CapacityLimiter, lane: str) -> AsyncIterator[None]:
    """Hold one place of a limiter; places are granted in the order of requests. Raises BusyError like `in_thread`."""
    mine, patience = object(), _PATIENCE.get(lane)
    if not limit.available_tokens and limit.statistics().tasks_waiting >= _WAITING.get(lane, math.inf):
        raise BusyError(f"the server is overloaded ({lane}); try again later")
    try:
        with anyio.fail_after(patience):
            await limit.acquire_on_behalf_of(mine)
    except TimeoutError as error:
        raise BusyError(
            f"the server is overloaded ({lane}) and did not start the request within {patience} s"
        ) from error
    try:
        yield
    finally:
        limit.release_on_behalf_of(mine)


@dataclass(frozen=True, slots=True)
class Most:
    """Limits on one principal's requests in one lane."""

    running: int  # maximum number of running requests, fewer than the lane's threads or workers
    known: int  # maximum number of requests, including those that wait


MOST = {
    **{LOOK: Most(3, 500), READ: Most(24, 500), HEAVY: Most(2, 16), UPLOAD: Most(12, 12), FOLLOW: Most(32, 32)},
    **{ADOPT: Most(4, 12), BODY: Most(600, 600), LOGIN: Most(4, 32), CHANNEL: Most(4, 16)},
}


_WORDS = {
    **{
        LOOK: "requests",
        READ: "requests",
        HEAVY: "requests that need a worker",
        UPLOAD: "uploads",
        FOLLOW: "followers",
    },
    **{ADOPT: "direct uploads being verified", BODY: "requests with a body", LOGIN: "log-ins"},
    CHANNEL: "mailbox requests",
}


@dataclass(slots=True)
class _Held:
    """The requests of one principal in one lane."""

    turn: anyio.CapacityLimiter
    known: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Limits:
    """The limits of every principal of a server. Only the event loop calls this class."""

    most: dict[str, Most] = field(default_factory=lambda: dict(MOST))
    most_bytes: int = MOST_BYTES
    most_bodies: int = MOST_BODIES
    _held: dict[tuple[str, str], _Held] = field(default_factory=dict)

    @asynccontextmanager
    async def taken(self, principal: str, lane: str, size: int = 0) -> AsyncIterator[None]:
        """Count a request in a lane and wait for its turn; the block is the request's turn.

        Args:
            size: bytes of an upload or a body; the limit of bytes does not apply to a principal's only request.

        Raises:
            LimitError: the principal has too many requests already.
            BusyError: too many requests wait already, or this request waited too long.
        """
        key, most = (principal, lane), self.most[lane]
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(anyio.CapacityLimiter(most.running))
        if held.known >= most.known:
            raise LimitError(
                f"{principal}: may have at most {most.known} {_WORDS[lane]} at the same time; wait for "
                f"{RETRY_SECONDS} s"
            )
        most_bytes = self.most_bytes if lane == UPLOAD else self.most_bodies
        if held.bytes and held.bytes + size > most_bytes:
            raise LimitError(
                f"{principal}: at most {most_bytes} bytes of {_WORDS[lane]} at the same time, got {size} more; "
                f"wait for {RETRY_SECONDS} s"
            )
        held.known += 1
        held.bytes += size
        try:
            async with _turn(held.turn, lane):
                yield
        finally:
            held.known -= 1
            held.bytes -= size
            if not held.known:
                self._held.pop(key, None)


BODY_SECONDS = 120.0  # seconds within which a body that is read into memory must arrive


_SMALL = 1 << 16  # bytes that fit in a connection's buffer


IN_PATHS: Mapping[str, Id] = {  # path parameter → type
    **{"project": TYPES["ProjectId"], "digest": TYPES["Digest"], "operation_id": TYPES["OperationId"]},
    **{"run_id": TYPES["RunId"], "sample": TYPES["SampleId"], "token_id": TYPES["TokenId"]},
    **{"principal": TYPES["Principal"], **dict.fromkeys(("words", "name", "channel", "kind"), TYPES["Name"])},
}


_DIGITS = 16  # a size in a header has fewer digits


def sent(operation: Verb[..., Any], request: Request, body: bytes) -> dict[str, Any]:
    """Return a request's parameters by name.

    Args:
        body: the bytes that `read` returned.

    Raises:
        InputError: the body is not a JSON object, or a parameter occurs twice.
    """
    found: dict[str, Any] = {name: request.path_params[name] for name in operation.in_path}
    if operation.method in ("GET", "DELETE"):
        for name in request.query_params:
            values = request.query_params.getlist(name)
            if len(values) > 1:
                raise InputError(f"{operation.name}: {name} must be given once, got it {len(values)} times")
            found.setdefault(name, values[0])
        return found
    named = _object(body) if body else {}
    if twice := next((name for name in named if name in found), None):
        raise InputError(
            f"{operation.name}: {twice}: must not be in the body, because the path contains it; remove it from the body"
        )
    return found | named


def check_path(request: Request) -> None:
    """Check the parameters of a path, before any query to the ledger.

    Raises:
        InputError: a part is not a valid id or name.
    """
    for name, value in request.path_params.items():
        if "\ufffd" in value:
            raise InputError(f"{name} must be text in UTF-8")
        IN_PATHS[name].check(value, name)


async def read(operation: Verb[..., Any], request: Request) -> bytes:
    """Return the body of a request; empty for a method with query parameters.

    Raises:
        InputError: the body is too large, or the client disconnected.
        SlowError: the body did not arrive in time.
    """
    if operation.method in ("GET", "DELETE"):
        return b""
    return await whole(request, MOST_JSON, "a request's body", "; upload files by their digests")


def weight(operation: Verb[..., Any], request: Request) -> int:
    """Return the memory that a body will take, by its headers; 0 if the body fits in the connection's buffer."""
    if operation.method in ("GET", "DELETE"):
        return 0
    said = request.headers.get("content-length", "")
    if said.isdecimal() and len(said) < _DIGITS:
        return min(int(said), MOST_JSON) if int(said) > _SMALL else 0
    return MOST_JSON if "transfer-encoding" in request.headers else 0


async def whole(request: Request, most: int, what: str, instead: str = "") -> bytes:
    """Return a whole body.

    Args:
        what: the name of the body in errors.
        instead: the remedy in an error about the size.

    Raises:
        InputError: the body is too large, or the client disconnected.
        SlowError: the body did not arrive in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                if len(body) + len(piece) > most:
                    raise InputError(f"{what} must have at most {most} bytes{instead}")
                body += piece
    except TimeoutError as error:
        raise SlowError(f"{what} must arrive within {BODY_SECONDS:g} s; send it again") from error
    except ClientDisconnect as error:
        raise InputError(f"{what} must arrive in full, got only {len(body)} bytes; send it again") from error
    return bytes(body)


def timely(receive: Receive) -> Receive:
    """Return a `receive` that fails if a piece of a request's body does not arrive in time.

    Raises:
        SlowError: a piece did not arrive in time.
    """
    ended = False

    async def received() -> Message:
        nonlocal ended
        if ended:  # after the body, `receive` waits without limit for the client to disconnect
            return await receive()
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await receive()
        except TimeoutError as error:
            raise SlowError(
                f"no bytes of the request's body have arrived for {PIECE_SECONDS:g} s; send it again"
            ) from error
        ended = not message.get("more_body", False)
        return message

    return received


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a request's body must be JSON: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InputError("a request's body must be a JSON object")
    if b"\\u0000" in body and "\0" in "".join(_texts(found)):
        raise InputError("a request's body must contain no NUL (\\u0000) in its texts; remove it")
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)
