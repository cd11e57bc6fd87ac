"""The blob back-ends, one file each, and their port. They do not import each other."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

_CHUNK = 4 << 20  # bytes


class Backend(ABC):
    """A place for objects, by the obstore store that it opens, with the methods that most back-ends share."""

    url: str  # by which another process opens it

    @abstractmethod
    def open(self) -> Any:
        """The obstore store."""

    def settle(self, key: str) -> None:  # noqa: B027
        """Return when the object just written survives a power cut."""

    def touch(self, key: str, modified: float) -> bool:
        """Renew the age of an object; return whether that was done, or was not needed.

        Args:
            modified: time of its last write (seconds since the epoch).
        """
        return False

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """The bytes of an object, a few megabytes at a time."""
        import obstore  # a job that uses its server need not load it

        yield from (bytes(chunk) for chunk in obstore.get(store, key).stream(min_chunk_size=_CHUNK))

    def write(self, store: Any, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Write an object of `size` bytes in constant memory; if `pieces` raises, no object is made."""
        import obstore

        obstore.put(store, key, pieces)
