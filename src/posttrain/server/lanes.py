"""Threads for what blocks, by what it waits for: uploads, followers and workers keep nobody else from an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync

T = TypeVar("T")
READ, HEAVY, UPLOAD, FOLLOW = "read", "heavy", "upload", "follow"
_THREADS = {READ: 32, HEAVY: 16, UPLOAD: 16, FOLLOW: 128}
_limits: dict[str, anyio.CapacityLimiter] = {}


async def in_thread(lane: str, does: Callable[..., T], *words: Any) -> T:
    """What a function answers, in a thread of this lane; it waits for one without a thread."""
    limit = _limits.get(lane)
    if limit is None:
        limit = _limits[lane] = anyio.CapacityLimiter(_THREADS[lane])
    return await run_sync(does, *words, limiter=limit)
