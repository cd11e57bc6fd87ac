"""The port of the blob back-ends. Each back-end has a separate file and does not import the others."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

_CHUNK = 4 << 20  # bytes


class Backend(ABC):
    """A place for objects, opened as an obstore store, with the methods that most back-ends share."""

    url: str  # another process opens the same store from this URL

    @abstractmethod
    def open(self) -> Any:
        """Return the obstore store."""

    def settle(self, key: str) -> None:  # noqa: B027
        """Return as soon as the object just written survives a power cut."""

    def touch(self, key: str, modified: float) -> bool:
        """Renew the age of an object; return whether the age was renewed or the object is young enough.

        Args:
            modified: time of the object's last write (seconds since the epoch).
        """
        return False

    def checked(self) -> Any:
        """Return the store, opened so that each write states the SHA-256 of its bytes, where the store verifies it."""
        return self.open()

    def compose(self, store: Any, sources: Sequence[str], target: str, size: int) -> None:
        """Make one object of `size` bytes of others, in this order."""
        with tempfile.TemporaryFile() as file:  # obstore reads nothing while it takes the pieces of a write
            for source in sources:
                file.writelines(self.pieces(store, source))
            file.seek(0)
            self.write(store, target, iter(lambda: file.read(_CHUNK), b""), size)

    def pieces(self, store: Any, key: str) -> Iterator[bytes]:
        """Yield the bytes of an object, a few megabytes at a time."""
        import obstore  # not needed by a job that reads through its server

        yield from (bytes(chunk) for chunk in obstore.get(store, key).stream(min_chunk_size=_CHUNK))

    def write(self, store: Any, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Write an object of `size` bytes in constant memory; if `pieces` raises, no object is created."""
        import obstore

        obstore.put(store, key, pieces)
