"""Weights in buckets: what a sender holds, in the reader's types, a bounded number of bytes at a time.

::

    engine's pieces ──▶ bucket 0 ──▶ carried ──▶ copied to their places
                        bucket 1 …       no more than one of them exists at a sender, and one at a reader

A bucket is one stretch of memory, so it travels as one message. A tensor that is larger lies in several, cut by rows.

Which state of the policy a reader has, and what was found of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.domain.errors import InputError
from posttrain.engine.models.sharding import Layout, Shard, dtypes_of
from posttrain.engine.weights.attestation import Attestation, attest

BUCKET_BYTES = 64 << 20  # a host with 8 ranks holds 1 GB of them at the most: one sent and one taken by each
_ALIGNED = 16  # bytes; any type can be read in place
View = Literal["alias", "neighbour", "copy"]


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Where a stretch of a bucket belongs."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    row: int
    column: int
    rows: int
    columns: int
    start: int  # byte of the bucket

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.columns * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Pieces of tensors, side by side in one memory; a rank that has no more gives empty ones."""

    pieces: tuple[Piece, ...] = ()
    data: Tensor | None = None  # [bytes] uint8

    def shards(self) -> Iterator[Shard]:
        """The pieces, as views of the bucket's memory."""
        for piece in self.pieces:
            assert self.data is not None
            held = self.data[piece.start : piece.start + piece.size].view(piece.dtype).view(piece.rows, piece.columns)
            yield Shard(piece.name, piece.shape, held, piece.row, piece.column)


def buckets(shards: Iterable[Shard], dtypes: Mapping[str, torch.dtype], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Pieces, converted, in buckets of at most `limit` bytes (more where a single row is longer).

    Whoever reads them lets go of one before asking for the next; otherwise there are two.
    """
    for plan in _plans(shards, dtypes, limit):
        yield _filled(plan)


_Plan = list[tuple[Piece, Tensor]]  # and where each is converted from


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
        shard.tensor.copy_(source)  # which converts
    return bucket


@final
@dataclass(frozen=True, slots=True)
class Everything:
    """Every tensor travels."""

    def carries(self, shard: Shard) -> bool:
        """Whether this piece does."""
        return True


@final
@dataclass(frozen=True, slots=True)
class AdapterOnly:
    """What training changes travels; the base, which is frozen, is at the reader already. Both are attested.

    Args:
        trained: how many tensors training changes.
        frozen: how many it never does.

    Raises:
        InputError: there is no adapter: nothing is frozen, or everything.
    """

    trained: int
    frozen: int

    def __post_init__(self) -> None:
        if not (self.frozen and self.trained):
            raise InputError(
                f"adapter-only weights must be an adapter over a frozen base, got {self.trained} trained and "
                f"{self.frozen} frozen tensors; publish every tensor"
            )

    def carries(self, shard: Shard) -> bool:
        """Whether this piece does."""
        return not shard.frozen


def carried(module: nn.Module) -> Everything | AdapterOnly:
    """What has to travel of a model: its adapter where its base is frozen."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return Everything() if all(trained) else AdapterOnly(sum(trained), len(trained) - sum(trained))


@final
class WeightSource:
    """One rank's weights for readers: attested, and in buckets. A rollout in the same pool borrows it from its place.

    Args:
        export: gives the pieces that this rank holds; see `TrainEngine.export`.
        carries: what of them travels.
        device: where the engine holds them.
        limit: bytes of a bucket; None: `BUCKET_BYTES`.
    """

    def __init__(
        self,
        export: Callable[[], Iterator[Shard]],
        carries: Everything | AdapterOnly,
        device: str = "cpu",
        limit: int | None = None,
    ) -> None:
        self.export, self.carries, self.device = export, carries, device
        self._limit = limit or BUCKET_BYTES
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._open: Iterator[Bucket] = iter(())

    def attest(self, layout: Layout) -> tuple[Attestation, int]:
        """What the reader must find of this rank's pieces, in the reader's types; and how many buckets carry them.

        Raises:
            IntegrityError: names or shapes are not the reader's.
        """
        self._dtypes = dtypes_of(layout, self.export())
        found = attest(self._converted())
        self._open = buckets(self._travelling(), self._dtypes, self._limit)
        return found, sum(1 for _ in _plans(self._travelling(), self._dtypes, self._limit))

    def bucket(self) -> Bucket:
        """The next bucket of what was attested last; an empty one when there is none left."""
        return next(self._open, Bucket())

    def _travelling(self) -> Iterator[Shard]:
        return (shard for shard in self.export() if self.carries.carries(shard))

    def _converted(self) -> Iterator[Shard]:
        """Every piece in the reader's type, at most a bucket of them at a time."""
        for shard in self.export():
            if shard.tensor.dtype == self._dtypes[shard.name]:
                yield shard
                continue
            for bucket in buckets([shard], self._dtypes, self._limit):
                yield from bucket.shards()
                del bucket


def exchange(source: WeightSource, count: int, take: Callable[[Bucket], None]) -> None:
    """Every rank's buckets to every rank of the process group, one rank's at a time. Collective.

    Args:
        source: this rank's, attested.
        count: buckets of the rank that has most.
        take: told of every bucket, of which it keeps nothing.
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


"""How a rollout reads the policy's weights:

`alias`      where they are: nothing moves; only unsharded weights, only in the policy's own process.
`neighbour`  a copy, in the same processes as the policy's shards: buckets go from rank to rank of their process group.
`copy`       a copy, in processes of its own: buckets go there through the object store, past the controller.
"""


@final
@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A state of the policy: `PolicyVersion(incarnation=0, step=12)`.

    A restart from a checkpoint raises the incarnation: a version that was rolled back is not taken for its successor.
    """

    incarnation: int = 0
    step: int = 0  # optimiser steps of the stage completed

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank of the rollout decodes with, as its engine found it."""

    found: Attestation
    before: str | None  # the version that it served before; None: weights that nobody published
    changed: bool  # since then
