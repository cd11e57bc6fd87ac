"""What a verb tells while it is carried out: to whoever waits for it, where somebody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ASKED, ANSWER, PROGRESS = "asked", "answer", "progress"
Told = Callable[[str, Any], None]  # kind and value
_TOLD: ContextVar[Told | None] = ContextVar("posttrain_told", default=None)


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """For the length of the block `tell` reaches this."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def tell(kind: str, value: Any) -> None:
    """Tell it to whoever waits; nobody may."""
    told = _TOLD.get()
    if told is not None:
        told(kind, value)
