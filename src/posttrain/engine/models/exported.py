"""Weights on their way out of a training engine: canonical tensors by name, in pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from posttrain.domain.errors import IntegrityError


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One canonical tensor as a reader decodes with it: `Entry("lm_head.weight", (151936, 1024), torch.bfloat16)`."""

    name: str  # of the Hugging Face module's parameter; tied ones once, by their first name
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Entry, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A piece of a canonical tensor, seen as a matrix of its first axis by all others; a vector is one column."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    tensor: Tensor  # the piece, [rows, …]; not a copy where nothing was converted
    row: int = 0  # of the whole, where the piece begins
    column: int = 0  # likewise; of engines that split matrices by columns
    frozen: bool = False  # training never changes it

    def matrix(self) -> Tensor:
        """[rows, columns] of the piece."""
        return as_matrix(self.tensor)


def as_matrix(tensor: Tensor) -> Tensor:
    """[first axis, all others], without a copy where the memory allows."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)


def layout_of(module: nn.Module) -> Layout:
    """What a module is made of, tied tensors once."""
    return tuple(Entry(name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def module_views(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a module's forward reads, tied tensors once for each of their places, all by the first of its names."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield names.setdefault(id(parameter), name), parameter.detach()


def dtypes_of(layout: Layout, shards: Iterable[Shard]) -> dict[str, torch.dtype]:
    """The type that each tensor of a sender has at the reader.

    Raises:
        IntegrityError: names or shapes are not the reader's.
    """
    wanted = {entry.name: entry.shape for entry in layout}
    for shard in shards:
        if wanted.get(shard.name) != shard.shape:
            raise IntegrityError(
                f"published weights must fit the reader's model, got {shard.name} of {shard.shape} for "
                f"{wanted.get(shard.name)}; give both roles the same model"
            )
    return {entry.name: entry.dtype for entry in layout}


@torch.no_grad()
def put(into: Mapping[str, Tensor], shard: Shard) -> None:
    """Copy a piece to where it belongs, in the reader's own type."""
    target = as_matrix(into[shard.name])
    piece = shard.matrix()
    target[shard.row : shard.row + piece.shape[0], shard.column : shard.column + piece.shape[1]].copy_(piece)
