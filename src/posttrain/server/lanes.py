"""Threads for what blocks, by what it waits for: uploads, followers and workers keep nobody else from an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync

from posttrain.domain.errors import BusyError

T = TypeVar("T")
READ, HEAVY, UPLOAD, ADOPT, FOLLOW, PASS_ON = "read", "heavy", "upload", "adopt", "follow", "pass on"
_THREADS = {READ: 32, HEAVY: 16, UPLOAD: 16, ADOPT: 8, FOLLOW: 128, PASS_ON: 64}
_WAITING = {READ: 1000, HEAVY: 100, UPLOAD: 200, ADOPT: 200, FOLLOW: 0, PASS_ON: 0}  # that may wait for a thread
_limits: dict[str, anyio.CapacityLimiter] = {}


async def in_thread(lane: str, does: Callable[..., T], *words: Any) -> T:
    """What a function answers, in a thread of this lane; it waits for one without a thread.

    Raises:
        BusyError: too many wait already.
    """
    limit = _limits.get(lane)
    if limit is None:
        limit = _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    if not limit.available_tokens and limit.statistics().tasks_waiting >= _WAITING[lane]:
        raise BusyError(f"the server has too much to do ({lane}); ask again in a while")
    return await run_sync(does, *words, limiter=limit)
