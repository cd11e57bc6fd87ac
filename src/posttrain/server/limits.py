"""Limits on requests: what one principal may have under way, threads by kind of wait, and sizes and forms.

Beyond its limit a principal waits, and beyond a second one it is told to ask later. So a principal that asks much keeps
only itself waiting: some threads and workers are always out of its reach.

Threads for what blocks are kept apart by what it waits for: uploads, followers and workers delay nobody else's answer.

The size and form of a request are checked before anything else reads it.
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
MOST_JSON = 8 << 20  # of a JSON body
PIECE_SECONDS = 30.0  # within which something of a body must come


READ, HEAVY, UPLOAD, ADOPT, FOLLOW, PASS_ON = "read", "heavy", "upload", "adopt", "follow", "pass on"
LOOK = "look"  # what only looks: who is turned away asks again, and nothing of a run waits for it
# Looks are computed under the interpreter's lock: more threads only wait for each other, and each look takes longer.
_THREADS = {LOOK: 4, READ: 32, HEAVY: 16, UPLOAD: 16, ADOPT: 8, FOLLOW: 128, PASS_ON: 64}


_WAITING = {
    LOOK: 64,
    READ: 1000,
    HEAVY: 100,
    UPLOAD: 200,
    ADOPT: 200,
    FOLLOW: 0,
    PASS_ON: 0,
}  # that may wait for a thread


_PATIENCE = {LOOK: 2.0}  # seconds for which one may wait for it; others as long as it takes


_limits: dict[str, anyio.CapacityLimiter] = {}


RETRY_SECONDS = 1  # that whoever was refused is told to wait


BODY, LOGIN = "body", "login"  # what takes no thread of its own: bodies from their first byte on, forms that log in


CHANNEL = "channel"  # what one attempt's job puts into its channel, and reads there


MOST_BYTES = 256 << 20  # of uploads by one principal that are under way


MOST_BODIES = 32 << 20  # bytes of other bodies, which are held as a whole


async def in_thread(lane: str, does: Callable[..., T], *words: Any) -> T:
    """What a function answers, in a thread of this lane; it waits for one without a thread.

    Raises:
        BusyError: too many wait already, or it waited too long.
    """
    if lane not in _limits:
        _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    async with _turn(_limits[lane], lane):
        return await anyio.to_thread.run_sync(does, *words, limiter=_any_thread())


@functools.cache
def _any_thread() -> anyio.CapacityLimiter:
    """Who has their turn waits for no thread."""
    return anyio.CapacityLimiter(math.inf)


@asynccontextmanager
async def _turn(limit: anyio.CapacityLimiter, lane: str) -> AsyncIterator[None]:
    """Have one of so many places, in the order in which they are asked for. Raises as `in_thread`."""
    mine, patience = object(), _PATIENCE.get(lane)
    if not limit.available_tokens and limit.statistics().tasks_waiting >= _WAITING.get(lane, math.inf):
        raise BusyError(f"the server has too much to do ({lane}); ask again in a while")
    try:
        with anyio.fail_after(patience):
            await limit.acquire_on_behalf_of(mine)
    except TimeoutError as error:
        raise BusyError(
            f"the server has too much to do ({lane}), and came to it within {patience} s no more"
        ) from error
    try:
        yield
    finally:
        limit.release_on_behalf_of(mine)


@dataclass(frozen=True, slots=True)
class Most:
    """Of one kind of requests by one principal."""

    running: int  # fewer than there are threads or workers for it
    known: int  # with those that wait


MOST = {
    **{LOOK: Most(3, 500), READ: Most(24, 500), HEAVY: Most(2, 16), UPLOAD: Most(12, 12), FOLLOW: Most(32, 32)},
    **{ADOPT: Most(4, 12), BODY: Most(600, 600), LOGIN: Most(4, 32), CHANNEL: Most(4, 16)},
}


_WORDS = {
    **{LOOK: "requests", READ: "requests", HEAVY: "requests that compute", UPLOAD: "uploads", FOLLOW: "followers"},
    **{ADOPT: "direct uploads that are looked at", BODY: "requests with bodies", LOGIN: "log-ins"},
    CHANNEL: "requests about a channel",
}


@dataclass(slots=True)
class _Held:
    """What one principal has under way in one lane."""

    turn: anyio.CapacityLimiter
    known: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Limits:
    """Of every principal of a server. It is asked by the event loop alone."""

    most: dict[str, Most] = field(default_factory=lambda: dict(MOST))
    most_bytes: int = MOST_BYTES
    most_bodies: int = MOST_BODIES
    _held: dict[tuple[str, str], _Held] = field(default_factory=dict)

    @asynccontextmanager
    async def taken(self, principal: str, lane: str, size: int = 0) -> AsyncIterator[None]:
        """Have a request of this kind under way, once it is its turn.

        Args:
            size: bytes of an upload or a body; a single one may be as large as it likes.

        Raises:
            LimitError: they have too many already. BusyError: as `in_thread`.
        """
        key, most = (principal, lane), self.most[lane]
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(anyio.CapacityLimiter(most.running))
        if held.known >= most.known:
            raise LimitError(
                f"{principal}: at most {most.known} {_WORDS[lane]} at once, got one more; wait for {RETRY_SECONDS} s"
            )
        most_bytes = self.most_bytes if lane == UPLOAD else self.most_bodies
        if held.bytes and held.bytes + size > most_bytes:
            raise LimitError(
                f"{principal}: at most {most_bytes} bytes of {_WORDS[lane]} at once, got {size} more; "
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


BODY_SECONDS = 120.0  # within which a body must come that is held as a whole


_SMALL = 1 << 16  # bytes that a connection holds by itself


IN_PATHS: Mapping[str, Id] = {  # parameter of a path → what it must be
    **{"project": TYPES["ProjectId"], "digest": TYPES["Digest"], "operation_id": TYPES["OperationId"]},
    **{"run_id": TYPES["RunId"], "sample": TYPES["SampleId"], "token_id": TYPES["TokenId"]},
    **{"principal": TYPES["Principal"], **dict.fromkeys(("words", "name", "channel", "kind"), TYPES["Name"])},
}


_DIGITS = 16  # of a size that is a number


def sent(operation: Verb[..., Any], request: Request, body: bytes) -> dict[str, Any]:
    """A request's parameters by name.

    Args:
        body: as `read` gave it.

    Raises:
        InputError: a body that is too large, or no JSON object; a parameter that is there twice.
    """
    found: dict[str, Any] = {name: request.path_params[name] for name in operation.in_path}
    if operation.method in ("GET", "DELETE"):
        for name in request.query_params:
            values = request.query_params.getlist(name)
            if len(values) > 1:
                raise InputError(f"{operation.name}: {name} must be there once, got it {len(values)} times")
            found.setdefault(name, values[0])
        return found
    named = _object(body) if body else {}
    if twice := next((name for name in named if name in found), None):
        raise InputError(f"{operation.name}: {twice} is named by the path, and must not be in the body")
    return found | named


def check_path(request: Request) -> None:
    """Check what the path names, before anything is asked of the ledger.

    Raises:
        InputError: a part is no such id or name.
    """
    for name, value in request.path_params.items():
        if "\ufffd" in value:
            raise InputError(f"{name} must be text in UTF-8")
        IN_PATHS[name].check(value, name)


async def read(operation: Verb[..., Any], request: Request) -> bytes:
    """The body of a request; of one whose parameters are its query, nothing.

    Raises:
        InputError: it is too large, or its sender left. SlowError: it did not come in time.
    """
    if operation.method in ("GET", "DELETE"):
        return b""
    return await whole(request, MOST_JSON, "a request's body", "; upload files by their digests")


def weight(operation: Verb[..., Any], request: Request) -> int:
    """Bytes that a body will take here, as its sender says; nothing where a connection has room for it anyway."""
    if operation.method in ("GET", "DELETE"):
        return 0
    said = request.headers.get("content-length", "")
    if said.isdecimal() and len(said) < _DIGITS:
        return min(int(said), MOST_JSON) if int(said) > _SMALL else 0
    return MOST_JSON if "transfer-encoding" in request.headers else 0


async def whole(request: Request, most: int, what: str, instead: str = "") -> bytes:
    """A body that is held here as a whole.

    Args:
        what: it is, for whoever sent too much.
        instead: what to do then.

    Raises:
        InputError: it is too large, or its sender left. SlowError: it did not come in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                if len(body) + len(piece) > most:
                    raise InputError(f"{what} must have at most {most} bytes{instead}")
                body += piece
    except TimeoutError as error:
        raise SlowError(f"{what} must come within {BODY_SECONDS:g} s; ask again") from error
    except ClientDisconnect as error:
        raise InputError(f"{what} must come whole, got {len(body)} bytes before it broke off; send it again") from error
    return bytes(body)


def timely(receive: Receive) -> Receive:
    """What comes of a request, where each piece of its body comes in time.

    Raises:
        SlowError: one did not.
    """
    ended = False

    async def received() -> Message:
        nonlocal ended
        if ended:  # now it is waited for that somebody leaves, however long they stay
            return await receive()
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await receive()
        except TimeoutError as error:
            raise SlowError(f"nothing of the request's body has come for {PIECE_SECONDS:g} s; send it again") from error
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
        raise InputError("a request's body must hold no NUL (\\u0000) in its texts; remove it")
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)
