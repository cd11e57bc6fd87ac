"""One file per blob back-end, over the port that is here. They do not know each other."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

_CHUNK = 4 << 20  # bytes


class Backend(ABC):
    """A place for objects, by the obstore store that it opens; what most of them do alike is done here."""

    url: str  # what another process opens it by

    @abstractmethod
    def open(self) -> Any:
        """The obstore store."""

    def settle(self, key: str) -> None:  # noqa: B027
        """Return when the object just written would survive a power cut."""

    def touch(self, key: str, modified: float) -> bool:
        """Make an object as young as one that is written now; whether that was done, or was not needed.

        Args:
            modified: when it was written (seconds since the epoch).
        """
        return False

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """The bytes of an object, a few megabytes at a time."""
        import obstore  # a job that asks its server need not load it

        yield from (bytes(chunk) for chunk in obstore.get(store, key).stream(min_chunk_size=_CHUNK))

    def write(self, store: Any, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Write an object of `size` bytes in constant memory; where `pieces` raises, nothing is there afterwards."""
        import obstore

        obstore.put(store, key, pieces)
