"""Attestation: a hash of weights that ranks compute of the pieces they hold, and that adds up to the whole's.

Of every tensor, seen as a matrix (`exported.Shard`), with x[r, c] the bits of an element as an integer::

    h = Σ_r R_r (T + Σ_c C_c x[r, c])   mod 2^64, in two lanes with keys of their own

R_r is an odd pseudo-random number of (name, row), C_c of the column, T of name, shape and type, counted once a row. So
a piece's hash needs nothing of the other pieces, and an element that is altered, moved to another place or left out
changes the sum: one altered bit always (odd factors never make a difference vanish), any other alteration but with a
probability of about 2^-32 in each lane (multilinear hashing, Carter and Wegman 1979). It guards against defects; it is
no signature against somebody who chooses weights to deceive.

Elements are hashed *after* conversion to the type that the reader decodes with, so sender and reader hash the same
bits. What that costs: `python -m benchmarks.weights`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from posttrain.engine.models.sharding import Shard

_MASK = (1 << 64) - 1
_CHUNK = {"cpu": 1 << 16}  # elements that are widened to 64 bits at a time; stays in the L2 cache
_CHUNK_ELSEWHERE = 1 << 24
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # bytes of an element → how it is read
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64, Steele et al. 2014

Lanes = tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class Attestation:
    """What weights hash to, tensor by tensor: equal weights have equal attestations, wherever and however they lie."""

    parts: Mapping[str, Lanes] = field(default_factory=dict)

    def __add__(self, other: Attestation) -> Attestation:
        """Of the pieces of both."""
        parts = dict(self.parts)
        for name, lanes in other.parts.items():
            held = parts.get(name, (0, 0))
            parts[name] = ((held[0] + lanes[0]) & _MASK, (held[1] + lanes[1]) & _MASK)
        return Attestation(parts)

    def __str__(self) -> str:
        """32 hexadecimal digits: the sum over all tensors, whose names are in their keys."""
        return "".join(f"{sum(lanes[i] for lanes in self.parts.values()) & _MASK:016x}" for i in (0, 1))

    def differing(self, other: Attestation) -> list[str]:
        """Tensors that are not the same in both, or in one of them only."""
        names = self.parts.keys() | other.parts.keys()
        return sorted(name for name in names if self.parts.get(name) != other.parts.get(name))


@torch.no_grad()
def attest(shards: Iterable[Shard]) -> Attestation:
    """Of these pieces, each of which is counted once.

    A tensor that several views of an engine hold, such as a tied head, is given once for every view that has memory of
    its own; `attest_views` does.
    """
    sums: dict[str, Tensor] = {}
    for shard in shards:
        found = _hashed(shard)
        sums[shard.name] = sums[shard.name] + found if shard.name in sums else found
    return _read(sums)


@torch.no_grad()
def attest_views(views: Iterable[tuple[str, Tensor]]) -> Attestation:
    """Of the whole tensors that an engine decodes with, by canonical name.

    A name may come several times (a tied head, a packed copy): views of the same memory are hashed once, and a copy
    that differs from the first changes the tensor's hash.
    """
    first: dict[str, tuple[Tensor, Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for name, tensor in views:
        if name in first and _same_memory(first[name][0], tensor):
            continue
        found = _hashed(Shard(name, tuple(tensor.shape), tensor))
        if name in first:
            sums[name] = sums[name] + (found - first[name][1]) * 3  # odd: what differs stays different
        else:
            first[name], sums[name] = (tensor, found), found
    return _read(sums)


@torch.no_grad()
def differing_aliases(held: Iterable[Shard], views: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Tensors that a reader of the same memory does not read there, and whose bits are not the same either.

    Args:
        held: whole tensors of the sender.
        views: those that the reader decodes with.
    """
    own = {shard.name: shard.tensor for shard in held}
    odd, seen = set[str](), set[str]()
    for name, view in views:
        seen.add(name)
        tensor = own.get(name)
        fits = tensor is not None and tensor.shape == view.shape
        if tensor is None or not fits or not (_same_memory(tensor, view) or _same_bits(tensor.to(view.dtype), view)):
            odd.add(name)
    return sorted(odd | (own.keys() - seen))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    word = _WORDS[left.element_size()]
    return torch.equal(left.contiguous().view(word), right.contiguous().view(word))


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return _place(left) == _place(right)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def _read(sums: Mapping[str, Tensor]) -> Attestation:
    if not sums:
        return Attestation()
    found = torch.stack([value.cpu() for value in sums.values()]).tolist()
    return Attestation({name: (a & _MASK, b & _MASK) for name, (a, b) in zip(sums, found, strict=True)})


def _hashed(shard: Shard) -> Tensor:
    """[2] int64."""
    matrix = shard.matrix()
    rows, device = matrix.shape[0], matrix.device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    if not matrix.numel():
        return total
    wide = matrix.element_size() // _WORDS[matrix.element_size()].itemsize  # words in an element
    columns = _column_keys(shard.column * wide, matrix.shape[1] * wide, device)
    tags = [_seed("tensor", shard.name, shard.shape, matrix.dtype, lane) | 1 for lane in (0, 1)]
    seeds = [_seed("rows", shard.name, lane) for lane in (0, 1)]
    width = matrix.shape[1] * wide
    step = min(max(1, _CHUNK.get(device.type, _CHUNK_ELSEWHERE) // width), rows)
    words = torch.empty(step, width, dtype=torch.int64, device=device)
    product = torch.empty_like(words)
    sums = torch.empty(2, rows, dtype=torch.int64, device=device)
    for begin in range(0, rows, step):
        part = matrix[begin : begin + step].contiguous()
        count = len(part)
        words[:count].copy_(part.view(_WORDS[part.element_size()]))
        for lane in (0, 1):
            torch.mul(words[:count], columns[lane], out=product[:count])
            torch.sum(product[:count], 1, out=sums[lane, begin : begin + count])
    for lane in (0, 1):
        tagged = sums[lane] if shard.column else sums[lane] + _signed(tags[lane])
        total[lane] = (tagged * _keys(seeds[lane], shard.row, rows, device)).sum()
    return total


@lru_cache(maxsize=64)
def _column_keys(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return _keys(_seed("columns", 0), first, count, device), _keys(_seed("columns", 1), first, count, device)


def _keys(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """[count] odd pseudo-random numbers of (seed, first + i), by SplitMix64."""
    index = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    z = index * _signed(_GOLDEN) + _signed(seed)
    z = (z ^ _right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _right(z, 27)) * _signed(_MIX_2)
    return (z ^ _right(z, 31)) | 1


def _right(value: Tensor, by: int) -> Tensor:
    """The logical shift, which torch has none of for signed numbers."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _seed(*words: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
