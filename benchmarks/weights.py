"""The cost of attesting weights, and of transferring them in buckets.

    python -m benchmarks.weights [--json FILE] [--tiny]

`attest`: bytes of weights that one thread hashes per second, compared with SHA-256 of the same bytes, which cannot be
composed from pieces, and with a plain copy, which is the bound: the bytes must be read. `buckets`: bytes that are
converted and copied into and out of buckets per second. Best of five rounds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.engine.models.sharding import Shard, put
from posttrain.engine.weights.stream import BUCKET_BYTES, attest, buckets

SHAPES = {"24M": (384, 1152, 12, 4096), "1M": (128, 384, 4, 512)}  # hidden, intermediate, layers, vocabulary


def model(size: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors with the shapes of a decoder."""
    hidden, inner, layers, vocabulary = SHAPES[size]
    shapes = {"embedding": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (hidden, inner), f"{layer}.norm": (hidden,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def shards(tensors: dict[str, Tensor]) -> Iterator[Shard]:
    """Return each tensor as one shard."""
    return (Shard(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items())


def gigabytes_per_second(work: Callable[[], object], size: int, rounds: int) -> float:
    """Return the rate of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return size / best / 1e9


def sha256(tensors: dict[str, Tensor]) -> str:
    """Hash all bytes."""
    digest = hashlib.sha256()
    for tensor in tensors.values():
        flat: Any = tensor.view(-1).view(torch.uint8).numpy()
        digest.update(flat)
    return digest.hexdigest()


def carried(tensors: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    """Transfer the tensors through buckets, in the reader's type."""
    for bucket in buckets(shards(tensors), {name: value.dtype for name, value in into.items()}, BUCKET_BYTES):
        for shard in bucket.shards():
            put(into, shard)


def measured(size: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return the figures of one model."""
    tensors = model(size, dtype)
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    count = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    works: dict[str, Callable[[], object]] = {
        "attest": lambda: attest(shards(tensors)),
        "sha256": lambda: sha256(tensors),
        "copy": lambda: [into[name].copy_(tensor) for name, tensor in tensors.items()],
        "buckets": lambda: carried(tensors, into),
    }
    return {name: gigabytes_per_second(work, count, rounds) for name, work in works.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="one small round: that it runs, no figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for size in ("1M",) if options.tiny else tuple(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{size} {str(dtype).removeprefix('torch.')}"
            found[name] = measured(size, dtype, 1 if options.tiny else 5)
            print(f"{name:14}", *(f"{what} {speed:.2f} GB/s" for what, speed in found[name].items()), sep="  ")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
