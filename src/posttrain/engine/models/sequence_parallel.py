"""Sequence parallelism in the manner of Ulysses (arXiv 2309.14509), for packed batches.

The ranks of a sequence group share the tokens of one batch. In the dense layers each computes a slice of the packed
row; for attention tokens and heads change places (all-to-all), so that each has all tokens of its share of the heads,
and documents may cross the slices' borders; then they change back. Losses do not notice: log-probabilities and values
of all tokens end up on every rank, while the gradient of each goes to the rank that computed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.domain.errors import InputError


@final
@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """Consecutive ranks that work on one batch together: `SequenceGroup(group, rank=1, size=2)`."""

    group: Any  # a torch.distributed process group
    rank: int
    size: int

    def stretch(self, total: int) -> tuple[int, int]:
        """The packed tokens [start, stop) of this rank; the row is thought to be padded to a multiple of `size`."""
        chunk = -(-total // self.size)
        return self.rank * chunk, (self.rank + 1) * chunk

    def owns(self, index: Tensor, total: int) -> Tensor:
        """[N] packed indices → [N] bool: which of them this rank computes."""
        start, stop = self.stretch(total)
        return (index >= start) & (index < stop)

    def slice(self, row: Tensor) -> Tensor:
        """[T] → this rank's stretch of it, padded with zeros."""
        start, stop = self.stretch(len(row))
        part = row[start:stop]
        return torch.cat([part, part.new_zeros(stop - start - len(part))])

    def spread(self, part: Tensor, total: int) -> Tensor:
        """This rank's stretch [chunk, …] → [total, …] with zeros where other ranks have theirs."""
        start, stop = self.stretch(total)
        whole = part.new_zeros(self.size * len(part), *part.shape[1:])
        index = torch.arange(start, stop, device=part.device)
        return whole.index_copy(0, index, part)[:total]

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, of which each computes the same loss: backward hands each its own part's gradient."""
        summed: Tensor = _SumOnce.apply(part, self.group)  # type: ignore[no-untyped-call]
        return summed

    def to_heads(self, states: Tensor) -> Tensor:
        """[chunk, heads, head_dim] of all heads → [size · chunk, heads / size, head_dim] of all tokens."""
        swapped: Tensor = _ToHeads.apply(states, self.group, self.size)  # type: ignore[no-untyped-call]
        return swapped

    def to_tokens(self, states: Tensor) -> Tensor:
        """The way back: [size · chunk, heads / size, head_dim] → [chunk, heads, head_dim]."""
        swapped: Tensor = _ToTokens.apply(states, self.group, self.size)  # type: ignore[no-untyped-call]
        return swapped

    def shared_heads(self, states: Tensor) -> Tensor:
        """Key-value heads, repeated where there are fewer of them than ranks.

        Raises:
            InputError: heads that cannot be dealt out evenly.
        """
        heads = states.shape[1]
        if heads % self.size == 0:
            return states
        if self.size % heads:
            raise InputError(f"sequence_parallel must divide the heads or be a multiple of {heads}, got {self.size}")
        return states.repeat_interleave(self.size // heads, 1)


def open_sequence_group(rank: int, ranks: int, size: int) -> SequenceGroup | None:
    """The group of `size` consecutive ranks that this one belongs to; None without sequence parallelism. Collective.

    Raises:
        InputError: ranks that cannot be divided.
    """
    if size == 1:
        return None
    if ranks % size:
        raise InputError(f"sequence_parallel must divide the pool's {ranks} ranks, got {size}")
    found: SequenceGroup | None = None
    for start in range(0, ranks, size):  # every rank takes part in making every group
        group = dist.new_group(list(range(start, start + size)))
        if start <= rank < start + size:
            found = SequenceGroup(group, rank - start, size)
    return found


class _SumOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        summed = part.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _to_heads(states, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(gradients[0], ctx.group, ctx.size), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _to_tokens(states, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(gradients[0], ctx.group, ctx.size), None, None


def _to_heads(states: Tensor, group: Any, size: int) -> Tensor:
    chunk, heads, width = states.shape
    outgoing = states.reshape(chunk, size, heads // size, width).transpose(0, 1).contiguous()
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=group)
    return arrived.reshape(size * chunk, heads // size, width)


def _to_tokens(states: Tensor, group: Any, size: int) -> Tensor:
    total, share, width = states.shape
    outgoing = states.reshape(size, total // size, share, width).contiguous()
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=group)
    return arrived.transpose(0, 1).reshape(total // size, size * share, width)
