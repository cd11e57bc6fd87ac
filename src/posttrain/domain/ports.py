"""Ports that several floors need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class BlobStore(Protocol):
    """Content-addressed artifacts. Digests are `sha256:<hex>` of the bytes.

    Every implementation: writes are atomic and write-if-absent (putting the same bytes twice is one blob); reads
    verify the digest and raise `IntegrityError` on corrupt bytes, `NotFoundError` on a missing blob; a full disk or
    a read-only place is a `WorkspaceError` and leaves nothing half-written.
    """

    @property
    def url(self) -> str:
        """Where the store is, so that another process can open the same one."""

    def holding(self) -> AbstractContextManager[None]:
        """Nothing is deleted for the length of the block: from what is put, or found, to the rows that name it."""

    def put(self, data: bytes) -> str:
        """Store bytes; the digest."""

    def put_file(self, path: Path) -> str:
        """Store a file in constant memory; the digest."""

    def get(self, digest: str) -> bytes:
        """The verified bytes."""

    def stream(self, digest: str) -> Iterator[bytes]:
        """The bytes piece by piece. What is wrong with them is raised after the last one: whoever takes them checks."""

    def fetch(self, digest: str, path: Path) -> None:
        """Write the verified bytes to `path` (atomically: temporary name, then rename)."""

    def check(self, digest: str) -> int:
        """Hash a blob again in constant memory; its bytes. Raises like `get`."""

    def has(self, digest: str) -> bool:
        """Whether the blob is present (not verified)."""

    def size(self, digest: str) -> int:
        """How many bytes a blob has (not verified). Raises `NotFoundError`."""


class Clock(Protocol):
    """Time, so that tests can hold it."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
