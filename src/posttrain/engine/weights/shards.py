"""Tensors to a safetensors file, streamed: constant extra memory, digest on the way, on the disk when it returns.

The library's own writer refuses tensors that share storage, which the zero-copy rollout makes of every q/k/v
projection, and gives no place between the first byte and the last for a recovery test to die at. The format is a
length, a JSON header, and raw little-endian bytes; reading is left to the library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPE_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK = 1 << 22  # bytes per write


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    halfway: Callable[[], None] | None = None,
) -> str:
    """Write `tensors`, in the order of their names, and fsync.

    Args:
        path: the file to create.
        tensors: by name, on any device; equal values give equal bytes.
        metadata: strings that go into the header.
        halfway: called once when about half of the bytes have been handed to the kernel.

    Returns:
        `sha256:…` of the file.

    Raises:
        OSError: the disk is full or read-only.
    """
    names = sorted(tensors)
    digest, written, total = hashlib.sha256(), 0, sum(_size(tensors[name]) for name in names)
    with path.open("wb") as file:
        head = _header(names, tensors, metadata or {})
        digest.update(head)
        file.write(head)
        for name in names:
            data = _bytes(tensors[name])
            for start in range(0, len(data), _CHUNK):
                piece = data[start : start + _CHUNK]
                if halfway and written + len(piece) > total // 2:
                    piece, rest = piece[: max(total // 2 - written, 0)], piece[max(total // 2 - written, 0) :]
                    digest.update(piece)
                    file.write(piece)
                    file.flush()
                    halfway()
                    halfway, written, piece = None, written + len(piece), rest
                digest.update(piece)
                file.write(piece)
                written += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return "sha256:" + digest.hexdigest()


def read_rows(files: Sequence[Path], rows: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Tensors that lie in pieces over several files, as `write_tensors` left them with `NAME: "start:stop"` metadata.

    Args:
        rows: name → the rows [start, stop) wanted; `NAME/exp_avg` goes by NAME. What is not named is read whole.

    Returns:
        Name → rows; scalars as the first file has them.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            held = shard.metadata() or {}
            for name in shard.keys():  # noqa: SIM118  # it is no mapping
                base = name.partition("/")[0]
                view = shard.get_slice(name)
                if not view.get_shape():
                    pieces.setdefault(name, [(0, shard.get_tensor(name))])
                    continue
                first = int(held[base].partition(":")[0]) if base in held else 0
                start, stop = rows.get(base, (0, first + view.get_shape()[0]))
                low, high = max(start - first, 0), min(stop - first, view.get_shape()[0])
                if low < high or (start == stop and name not in pieces):
                    pieces.setdefault(name, []).append((first, view[low : max(low, high)]))
    return {
        name: found[0][1] if len(found) == 1 else torch.cat([piece for _, piece in sorted(found, key=lambda f: f[0])])
        for name, found in pieces.items()
    }


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():  # of which torch makes no view
        return memoryview(b"")
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _header(names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in names:
        end = offset + _size(tensors[name])
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensor bytes start aligned
    return len(text).to_bytes(8, "little") + text
