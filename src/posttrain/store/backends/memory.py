"""A store in this process's memory: the fake for tests. Stores of the same name are the same store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import obstore
from obstore.store import MemoryStore

SCHEME = "memory://"
_CHUNK = 4 << 20
_stores: dict[str, MemoryStore] = {}


class Memory:
    """A named memory store: `memory://NAME`."""

    def __init__(self, name: str) -> None:
        self.url = SCHEME + name
        self._name = name

    def open(self) -> MemoryStore:
        """The store of this name."""
        return _stores.setdefault(self._name, MemoryStore())

    def touch(self, _key: str, _modified: float) -> bool:
        """Memory is written again at no cost."""
        return False

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """See `Backend.pieces`."""
        for chunk in obstore.get(store, key).stream(min_chunk_size=_CHUNK):
            yield bytes(chunk)

    def write(self, store: Any, key: str, pieces: Iterator[bytes], size: int) -> None:
        """See `Backend.write`."""
        obstore.put(store, key, pieces)

    def settle(self, key: str) -> None:
        """Nothing: memory does not survive a power cut."""
