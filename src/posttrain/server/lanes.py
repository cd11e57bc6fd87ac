"""Threads for what blocks, by what it waits for: uploads, followers and workers keep nobody else from an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync

from posttrain.domain.errors import CapacityError

T = TypeVar("T")
READ, HEAVY, UPLOAD, FOLLOW = "read", "heavy", "upload", "follow"
_THREADS = {READ: 32, HEAVY: 16, UPLOAD: 16, FOLLOW: 128}
_WAITING = {READ: 1000, HEAVY: 100, UPLOAD: 200, FOLLOW: 0}  # that may wait for a thread
_limits: dict[str, anyio.CapacityLimiter] = {}


async def in_thread(lane: str, does: Callable[..., T], *words: Any) -> T:
    """What a function answers, in a thread of this lane; it waits for one without a thread.

    Raises:
        CapacityError: too many wait already.
    """
    limit = _limits.get(lane)
    if limit is None:
        limit = _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    if not limit.available_tokens and limit.statistics().tasks_waiting >= _WAITING[lane]:
        raise CapacityError(f"the server has too much to do ({lane}); ask again in a while")
    return await run_sync(does, *words, limiter=limit)
