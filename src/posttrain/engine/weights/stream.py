"""Weights in buckets from sender to reader, and their attestation.

A bucket contains a limited number of bytes of a sender's weights, in the reader's dtypes:

::

    engine's pieces ──▶ bucket 0 ──▶ carried ──▶ copied into place
                        bucket 1 …       at most one exists at a sender, and one at a reader

A bucket is one contiguous block of memory, so it travels as one message. A larger tensor spans several buckets, split
by rows.

`PolicyVersion` identifies a state of the policy; `AttestedWeights` records the attested state of a reader.

An attestation is a hash of weights: ranks hash their pieces, and the sum is the hash of the whole. For every tensor,
viewed as a matrix (`models.sharding.Shard`), with x[r, c] the bits of an element as an integer::

    h = Σ_r R_r (T + Σ_c C_c x[r, c])   mod 2^64, in two lanes with separate keys

R_r, C_c and T are odd pseudo-random numbers: R_r is derived from the name and the row, C_c from the column, and T from
name, shape and dtype; T is counted once per row. A piece can be hashed without the other pieces. An element that is
altered, moved or left out changes the sum: a single altered bit always changes it, because odd factors never cancel a
difference; for other alterations the sum is unchanged with a probability of about 2^-32 in each lane (multilinear
hashing, Carter and Wegman 1979). The hash detects defects; it is not a signature against an attacker who chooses
weights to deceive.

Elements are hashed *after* conversion to the dtype with which the reader decodes, so sender and reader hash the same
bits. `python -m benchmarks.weights` measures the cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.domain.errors import InputError
from posttrain.engine.models.sharding import Layout, Shard, dtypes_of

_MASK = (1 << 64) - 1
_CHUNK = {"cpu": 1 << 16}  # elements widened to 64 bits at a time; they fit the L2 cache
_CHUNK_ELSEWHERE = 1 << 24
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # bytes of an element → integer type
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64, Steele et al. 2014
Lanes = tuple[int, int]
BUCKET_BYTES = 64 << 20  # a host with 8 ranks has at most 1 GB of buckets: each rank sends one and receives one
_ALIGNED = 16  # bytes; alignment for any dtype
View = Literal["alias", "neighbour", "copy"]


@final
@dataclass(frozen=True, slots=True)
class Attestation:
    """Hashes of weights by tensor: equal weights have equal attestations on any rank and in any layout."""

    parts: Mapping[str, Lanes] = field(default_factory=dict)

    def __add__(self, other: Attestation) -> Attestation:
        """Return the attestation of the pieces of both operands."""
        parts = dict(self.parts)
        for name, lanes in other.parts.items():
            held = parts.get(name, (0, 0))
            parts[name] = ((held[0] + lanes[0]) & _MASK, (held[1] + lanes[1]) & _MASK)
        return Attestation(parts)

    def __str__(self) -> str:
        """Return 32 hexadecimal digits: the sum over all tensors; each hash depends on the tensor's name."""
        return "".join(f"{sum(lanes[i] for lanes in self.parts.values()) & _MASK:016x}" for i in (0, 1))

    def differing(self, other: Attestation) -> list[str]:
        """Return the names of tensors that differ, or are in only one of the two attestations."""
        names = self.parts.keys() | other.parts.keys()
        return sorted(name for name in names if self.parts.get(name) != other.parts.get(name))


@torch.no_grad()
def attest(shards: Iterable[Shard]) -> Attestation:
    """Return the attestation of these pieces, each counted once.

    If an engine has several views of a tensor, such as a tied head, see `attest_views`.
    """
    sums: dict[str, Tensor] = {}
    for shard in shards:
        found = _hashed(shard)
        sums[shard.name] = sums[shard.name] + found if shard.name in sums else found
    return _read(sums)


@torch.no_grad()
def attest_views(views: Iterable[tuple[str, Tensor]]) -> Attestation:
    """Return the attestation of the whole tensors that an engine decodes with, by canonical name.

    A name may occur several times (a tied head, a packed copy): views of the same memory are hashed once, and a copy
    that differs from the first changes the tensor's hash.
    """
    first: dict[str, tuple[Tensor, Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for name, tensor in views:
        if name in first and _same_memory(first[name][0], tensor):
            continue
        found = _hashed(Shard(name, tuple(tensor.shape), tensor))
        if name in first:
            sums[name] = sums[name] + (found - first[name][1]) * 3  # an odd factor, so a difference never vanishes
        else:
            first[name], sums[name] = (tensor, found), found
    return _read(sums)


@torch.no_grad()
def differing_aliases(held: Iterable[Shard], views: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors that a reader does not read from the sender's memory and whose bits differ.

    Args:
        held: whole tensors of the sender.
        views: the tensors that the reader decodes with.
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
    """Return the hash of a piece in both lanes, [2] int64."""
    matrix = shard.matrix()
    rows, device = matrix.shape[0], matrix.device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    if not matrix.numel():
        return total
    wide = matrix.element_size() // _WORDS[matrix.element_size()].itemsize  # integers per element
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
    """Return odd pseudo-random numbers, [count], derived by SplitMix64 from (seed, first + i)."""
    index = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    z = index * _signed(_GOLDEN) + _signed(seed)
    z = (z ^ _right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _right(z, 27)) * _signed(_MIX_2)
    return (z ^ _right(z, 31)) | 1


def _right(value: Tensor, by: int) -> Tensor:
    """Return the logical right shift, which torch lacks for signed numbers."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _seed(*words: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bucket, and the place of this part in a tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    row: int
    column: int
    rows: int
    columns: int
    start: int  # first byte in the bucket

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.rows * self.columns * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Pieces of tensors, adjacent in one block of memory; a rank without further pieces returns empty buckets."""

    pieces: tuple[Piece, ...] = ()
    data: Tensor | None = None  # [bytes] uint8

    def shards(self) -> Iterator[Shard]:
        """Yield the pieces, as views of the bucket's memory."""
        for piece in self.pieces:
            assert self.data is not None
            held = self.data[piece.start : piece.start + piece.size].view(piece.dtype).view(piece.rows, piece.columns)
            yield Shard(piece.name, piece.shape, held, piece.row, piece.column)


def buckets(shards: Iterable[Shard], dtypes: Mapping[str, torch.dtype], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield converted pieces in buckets of at most `limit` bytes (more if a single row is longer).

    The reader must release a bucket before requesting the next one; otherwise two buckets exist at the same time.
    """
    for plan in _plans(shards, dtypes, limit):
        yield _filled(plan)


_Plan = list[tuple[Piece, Tensor]]  # each with its source


def _plans(shards: Iterable[Shard], dtypes: Mapping[str, torch.dtype], limit: int) -> Iterator[_Plan]:
    plan: _Plan = []
    filled = 0
    for shard in shards:
        matrix, dtype = shard.matrix(), dtypes[shard.name]
        columns, begin = matrix.shape[1], 0
        while begin < len(matrix) and columns:
            room = (limit - filled) // (columns * dtype.itemsize)
            if room < 1 and plan:
                yield plan
                plan, filled = [], 0
                continue
            rows = min(max(room, 1), len(matrix) - begin)
            piece = Piece(shard.name, shard.shape, dtype, shard.row + begin, shard.column, rows, columns, filled)
            plan.append((piece, matrix[begin : begin + rows]))
            filled += -(-piece.size // _ALIGNED) * _ALIGNED
            begin += rows
    if plan:
        yield plan


@torch.no_grad()
def _filled(plan: _Plan) -> Bucket:
    last = plan[-1][0]
    data = torch.empty(last.start + last.size, dtype=torch.uint8, device=plan[0][1].device)
    bucket = Bucket(tuple(piece for piece, _ in plan), data)
    for shard, (_, source) in zip(bucket.shards(), plan, strict=True):
        shard.tensor.copy_(source)  # converts the dtype
    return bucket


@final
@dataclass(frozen=True, slots=True)
class AdapterOnly:
    """Transfers only trained tensors, because the reader already has the frozen base; all tensors are attested.

    Args:
        trained: number of trained tensors.
        frozen: number of frozen tensors.

    Raises:
        InputError: there is no adapter: no tensor is frozen, or all are.
    """

    trained: int
    frozen: int

    def __post_init__(self) -> None:
        if not (self.frozen and self.trained):
            raise InputError(
                f"adapter-only weights must be an adapter over a frozen base, got {self.trained} trained and "
                f"{self.frozen} frozen tensors; publish every tensor"
            )


def carried(module: nn.Module) -> AdapterOnly | None:
    """Return the part of a model to transfer: the adapter if the base is frozen; None: every tensor."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return None if all(trained) else AdapterOnly(sum(trained), len(trained) - sum(trained))


@final
class WeightSource:
    """One rank's weights for readers, attested and in buckets.

    A rollout in the same pool borrows this object from the rank context.

    Args:
        export: yields this rank's pieces; see `TrainEngine.export`.
        carries: the part to transfer; None: every tensor.
        device: the device of the engine's weights.
        limit: bytes of a bucket; None: `BUCKET_BYTES`.
    """

    def __init__(
        self,
        export: Callable[[], Iterator[Shard]],
        carries: AdapterOnly | None = None,
        device: str = "cpu",
        limit: int | None = None,
    ) -> None:
        self.export, self.carries, self.device = export, carries, device
        self._limit = limit or BUCKET_BYTES
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._open: Iterator[Bucket] = iter(())
        self._base: tuple[Layout, Attestation] | None = None  # of the frozen pieces, for readers of this layout

    def attest(self, layout: Layout) -> tuple[Attestation, int]:
        """Attest this rank's pieces in the reader's dtypes; return the attestation, and the number of buckets.

        Frozen pieces are hashed once.

        Raises:
            IntegrityError: names or shapes differ from the reader's.
        """
        self._dtypes = dtypes_of(layout, self.export())
        if self._base is None or self._base[0] != layout:
            frozen = (shard for shard in self.export() if shard.frozen and self.carries is not None)
            self._base = layout, attest(self._converted(frozen))
        found = self._base[1] + attest(self._converted(self._travelling()))
        self._open = buckets(self._travelling(), self._dtypes, self._limit)
        return found, sum(1 for _ in _plans(self._travelling(), self._dtypes, self._limit))

    def bucket(self) -> Bucket:
        """Return the next bucket of the weights attested last; after the last bucket, an empty bucket."""
        return next(self._open, Bucket())

    def _travelling(self) -> Iterator[Shard]:
        return (shard for shard in self.export() if self.carries is None or not shard.frozen)

    def _converted(self, pieces: Iterable[Shard]) -> Iterator[Shard]:
        """Yield pieces in the reader's dtype; at most one bucket of pieces exists at a time."""
        for shard in pieces:
            if shard.tensor.dtype == self._dtypes[shard.name]:
                yield shard
                continue
            for bucket in buckets([shard], self._dtypes, self._limit):
                yield from bucket.shards()
                del bucket


def exchange(source: WeightSource, count: int, take: Callable[[Bucket], None]) -> None:
    """Send every rank's buckets to every rank of the process group, one rank after another. Collective.

    Args:
        source: this rank's attested weights.
        count: largest number of buckets of a rank.
        take: called with every bucket; must keep no reference to the bucket's memory.
    """
    for _ in range(count):
        mine = source.bucket()
        plans: list[tuple[Piece, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(plans, mine.pieces)
        for rank, pieces in enumerate(plans):
            if pieces:
                take(_arrived(mine.data if rank == dist.get_rank() else None, pieces, rank, source.device))
        del mine


def _arrived(mine: Tensor | None, pieces: tuple[Piece, ...], rank: int, device: str) -> Bucket:
    size = pieces[-1].start + pieces[-1].size
    data = torch.empty(size, dtype=torch.uint8, device=device) if mine is None else mine
    dist.broadcast(data, rank)
    return Bucket(pieces, data)


"""The ways in which a rollout reads the policy's weights:

`alias`      in place, without a copy: only unsharded weights, only in the policy's own process.
`neighbour`  a copy, in the same processes as the policy's shards: the process group carries the buckets between ranks.
`copy`       a copy, in separate processes: the object store carries the buckets, without the controller.
"""


@final
@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A state of the policy: `PolicyVersion(incarnation=0, step=12)`.

    A restart from a checkpoint raises the incarnation: versions before and after a restart never compare equal.
    """

    incarnation: int = 0
    step: int = 0  # optimiser steps of the stage completed

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


@final
@dataclass(frozen=True, slots=True)
class AttestedWeights:
    """The tensors that one rank of the rollout decodes with, as its engine exposes them."""

    found: Attestation
    before: str | None  # the version before this one; None: unpublished weights
    changed: bool  # whether the weights differ from those of `before`
    exact: bool  # False: the engine exposes no tensors, so these are the tensors from which it takes its weights
