"""wandb's file of a run: LevelDB's log format behind a header. Its records are protobuf, which the package reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAGIC = b":W&B"  # the first bytes of the file
_HEADER, _BLOCK, _CHUNK = 7, 32768, 7  # bytes: of the file; of a block; before a chunk (CRC, length, kind)
_WHOLE, _LAST = 1, 4  # kinds of a chunk that end a record


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file; ends before one that is cut short."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        place, parts = len(file.read(_HEADER)), b""
        while True:
            left = _BLOCK - place % _BLOCK
            if left < _CHUNK:
                place += len(file.read(left))
                continue
            head = file.read(_CHUNK)
            if len(head) < _CHUNK:
                return
            _, length, kind = struct.unpack("<IHB", head)
            data = file.read(length)
            if len(data) < length or kind == 0:
                return
            place += _CHUNK + length
            parts += data
            if kind in (_WHOLE, _LAST):
                yield parts
                parts = b""
