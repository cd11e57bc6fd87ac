"""Workers of the group contract: importable by name, so that they can live in other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from posttrain.domain.errors import InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import RankContext, Stored


@final
@dataclass(frozen=True)
class Items:
    """Items of given lengths with a value each."""

    lengths: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Items:
        return cls(tuple(lengths), tuple(range(len(lengths))))

    @property
    def item_lengths(self) -> tuple[int, ...]:
        return self.lengths

    @property
    def keys(self) -> tuple[int, ...]:
        return self.values

    def select_items(self, items: Sequence[int]) -> Items:
        return Items(tuple(self.lengths[i] for i in items), tuple(self.values[i] for i in items))

    @classmethod
    def gather(cls, parts: Sequence[Items], shards: Sequence[Sequence[int]]) -> Items:
        found = dict(
            chain.from_iterable(
                zip(shard, zip(part.lengths, part.values, strict=True), strict=True)
                for part, shard in zip(parts, shards, strict=True)
            )
        )
        return cls(tuple(found[i][0] for i in range(len(found))), tuple(found[i][1] for i in range(len(found))))


@dataclass
class Shared:
    """What one worker lends to its neighbours."""

    number: int


class UnpicklableError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, message: str, handle: object) -> None:
        super().__init__(message)
        self.handle = handle


@final
class Policy:
    def __init__(self, context: RankContext, offset: int = 0, *, fail_on: int = -1) -> None:
        self.context, self.offset, self.calls = context, offset, list[str]()
        if context.rank == fail_on:
            raise InputError(f"offset must suit rank {fail_on}, got {offset}")
        context.lend(Shared(41 + context.rank))

    def shifted(self, items: Items, by: int = 0) -> Items:
        """Also joins a collective where there is one: every rank has to come, with or without items."""
        if self.context.collective:
            total = torch.tensor([len(items.values)])
            dist.all_reduce(total)
        return Items(items.lengths, tuple(value + self.offset + by for value in items.values))

    def shard_sizes(self, items: Items) -> Items:
        size = len(items.values)
        return Items(items.lengths, (size,) * size)

    def identity(self) -> tuple[int, int, int, str]:
        return os.getpid(), self.context.rank, self.context.size, self.context.pool

    def rank_sum(self, bias: float) -> tuple[float, int, int]:
        total = torch.tensor([self.context.rank + bias])
        dist.all_reduce(total)
        return float(total), dist.get_rank(), dist.get_world_size()

    def each_value(self, items: Items, fail_after: int = -1) -> Iterator[tuple[int, int]]:
        """The rank and the value of each item of its shard; fails where it has yielded so many."""
        for count, value in enumerate(items.values):
            if count == fail_after:
                raise InputError(f"value must be small, got {value}")
            yield self.context.rank, value + self.offset

    def vanish_after(self, items: Items, count: int) -> Iterator[tuple[int, int]]:
        """Its process ends behind so many values."""
        for value in items.values[:count]:
            yield self.context.rank, value
        os.kill(os.getpid(), signal.SIGKILL)
        yield self.context.rank, -1

    def waits(self, items: Items, fence: Path) -> Iterator[tuple[int, int]]:
        """The second value comes when the file is there."""
        for value in items.values:
            yield self.context.rank, value
            while not fence.exists():
                time.sleep(0.01)

    def noted(self, word: str) -> list[str]:
        self.calls.append(word)
        return list(self.calls)

    def fail(self, ranks: Sequence[int]) -> int:
        if self.context.rank in ranks:
            raise InputError(f"shape must be [4], got [{self.context.rank}]")
        return self.context.rank

    def fail_beside_a_collective(self) -> None:
        self.fail([1])
        dist.barrier()

    def fail_strangely(self) -> None:
        raise UnpicklableError("strange thing", iter([1]))

    def answer_strangely(self) -> Iterator[int]:
        return (i for i in range(3))

    def sleep(self, seconds: float) -> float:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            time.sleep(0.01)
        return seconds

    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.context.rank == rank:
            self.sleep(seconds)

    def meet(self, folder: Path, wanted: int) -> int:
        """Says that it is there and waits until so many are; how many there are."""
        (folder / f"{self.context.pool}-{self.context.rank}").touch()
        deadline = time.monotonic() + 300
        while len(found := list(folder.iterdir())) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(found)

    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os._exit(1)
        if self.context.collective:
            dist.barrier()

    def doubled(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mul_(2)  # in place: what arrives is the worker's own
        return tensor

    def accept(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def weights(self, size: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((size,), float(self.context.rank + 1), dtype=torch.bfloat16)}

    def environment(self, names: Sequence[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]


@final
class Engine:
    """Another role."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    def identity(self) -> tuple[int, str]:
        return os.getpid(), type(self).__name__

    def borrowed(self) -> int | None:
        shared = self.context.borrow(Shared)
        return shared.number if shared else None

    def load(self, version: int, weights: dict[str, Stored[dict[str, torch.Tensor]]]) -> tuple[int, float, int]:
        held = weights["policy"].value()["w"]
        return version, float(held[0]), held.numel()


def of_this_module(worker: Any) -> str:
    """A plain function is a method, too."""
    return type(worker).__name__


def of_this_batch(worker: Any, batch: TokenBatch) -> TokenBatch:
    """Adds 1 to the behaviour log-probabilities."""
    return batch.with_columns(behaviour_logprobs=batch.column("behaviour_logprobs") + 1)


def read_items(worker: Any, parts: Sequence[Stored[Items]]) -> list[int]:
    """Every value of parts that other ranks keep, in order."""
    return sorted(value for part in parts for value in part.value().values)


def complain(worker: Any, text: str) -> None:
    """On the rank's standard error."""
    print(text, file=sys.stderr, flush=True)
