"""What one principal may have under way at once: beyond it they wait, and beyond that they are told to ask later.

So whoever asks much keeps only themselves waiting: of the threads and workers there are always some that they cannot
have.

Threads for what blocks, by what it waits for: uploads, followers and workers keep nobody else from an answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync

from posttrain.domain.errors import BusyError, LimitError

T = TypeVar("T")
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
    limit = _limits.get(lane)
    if limit is None:
        limit = _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    async with _turn(limit, lane):
        return await run_sync(does, *words, limiter=_any_thread())


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
