"""A few numbers that one process shows another, in memory that both have: what a driver has done so far."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

_BYTES, _HEAD = 4096, 8
_TRIES = 5


class Board:
    """Written by one process, read by another.

    Args:
        descriptor: of the process that made it; None: make one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _made() if descriptor is None else descriptor
        os.set_inheritable(self.descriptor, False)
        self._memory = mmap.mmap(self.descriptor, _BYTES)

    def write(self, numbers: Mapping[str, float]) -> None:
        """Show these instead of those before."""
        body = json.dumps(dict(numbers)).encode()
        self._memory[: _HEAD + len(body)] = _head(body) + body

    def read(self) -> dict[str, float]:
        """What is shown; nothing: nothing yet, or it is being written again and again at this moment."""
        for _ in range(_TRIES):
            head = bytes(self._memory[:_HEAD])
            body = bytes(self._memory[_HEAD : _HEAD + int.from_bytes(head[:4])])
            if head == _head(body) and body:
                return {str(name): float(value) for name, value in json.loads(body).items()}
        return {}

    def clear(self) -> None:
        """Show nothing: whoever wrote it is gone."""
        self._memory[:_HEAD] = bytes(_HEAD)

    def close(self) -> None:
        """Show nothing any more."""
        self._memory.close()
        os.close(self.descriptor)


def _head(body: bytes) -> bytes:
    return len(body).to_bytes(4) + zlib.crc32(body).to_bytes(4)


def _made() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("posttrain-board")
    else:
        file, path = tempfile.mkstemp()
        Path(path).unlink()
    os.truncate(file, _BYTES)
    return file
