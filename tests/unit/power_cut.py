"""A disk that knows what a power cut would leave: only what was synced, under names whose folder was synced since."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class Disk:
    """Watches every fsync of this process.

    A file's bytes are safe as they were when it was synced; a name is safe as it was when its folder was synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes: dict[int, bytes] = {}  # inode → what is safe of it
        self._names: dict[int, dict[str, int]] = {}  # a folder's inode → its names
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, handle: int) -> None:
        found = os.fstat(handle)
        path = Path(f"/proc/self/fd/{handle}")
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[found.st_ino] = path.read_bytes()
        self._sync(handle)

    def named(self, path: Path, below: Path) -> bool:
        """Whether a power cut would leave this name, and those of its folders, in `below`."""
        if path == below:
            return True
        names = self._names.get(path.parent.stat().st_ino, {})
        return names.get(path.name) == path.stat().st_ino and self.named(path.parent, below)

    def left(self, path: Path, below: Path) -> bytes | None:
        """What a power cut would leave of a file whose folders were synced up to `below`; None: nothing."""
        return self._bytes.get(path.stat().st_ino) if self.named(path, below) else None
