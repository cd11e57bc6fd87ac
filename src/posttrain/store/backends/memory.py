"""A store in this process's memory, for tests. Stores with equal names are the same store."""

from obstore.store import MemoryStore

from posttrain.store.backends import Backend

SCHEME = "memory://"
_stores: dict[str, MemoryStore] = {}


class Memory(Backend):
    """A named memory store: `memory://NAME`."""

    def __init__(self, name: str) -> None:
        self.url = SCHEME + name
        self._name = name

    def open(self) -> MemoryStore:
        """Return the store of this name."""
        return _stores.setdefault(self._name, MemoryStore())
