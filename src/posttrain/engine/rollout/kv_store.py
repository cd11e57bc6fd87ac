"""The port of key-value stores: where keys and values of the rows that are decoded live, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Prompt = tuple[int, ...]
Positions = npt.NDArray[np.int64]  # [rows]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one position of one row takes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def position_bytes(self) -> int:
        """Of all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVStore(Protocol):
    """Keys and values of kept prompts and of rows that begin with them.

    Whoever adds and extends asks first what it takes (`row_bytes`, `growth_bytes`), and stays within the budget. Rows
    are known by numbers, prompts by their tokens. `order` is how the rows of one step lie.
    """

    @property
    def order(self) -> list[int]:
        """The rows, in the order in which a step takes them."""

    @property
    def used(self) -> int:
        """Bytes that rows and kept prompts occupy."""

    def reach(self, longest: int, rows: int) -> None:
        """Rows of so many positions may come, about so many at a time."""

    def allow(self, budget: int) -> None:
        """The budget is this from now on."""

    def keep(self, prompts: Mapping[Prompt, tuple[int, int]], pairs: Sequence[Tensor]) -> None:
        """Hold computed prompts: [begin, end) of packed keys and values, by layer [tokens, 2, kv_heads, head_dim]."""

    def forget(self, prompts: Collection[Prompt]) -> None:
        """These are kept no longer; rows that began with them stay."""

    def prompt_bytes(self, length: int) -> int:
        """Bytes that a kept prompt of so many tokens occupies."""

    def row_bytes(self, length: int, prompt: int) -> int:
        """Bytes that a row with room for so many positions takes beside its kept prompt of `prompt` tokens."""

    def growth_bytes(self, lengths: Mapping[int, int]) -> int:
        """Bytes that `extend` takes beside those that are used."""

    def bytes_alone(self, length: int, prompt: int) -> int:
        """What one row of so many positions takes at the most until it ends, with its kept prompt."""

    def add(self, rows: Mapping[int, tuple[Prompt, int]]) -> None:
        """New rows: each begins with its kept prompt and has room for so many positions."""

    def capacity(self, row: int) -> int:
        """Positions that the row has room for."""

    def extend(self, lengths: Mapping[int, int]) -> None:
        """Make room for more positions of these rows; the order may change."""

    def remove(self, rows: Collection[int]) -> None:
        """Forget rows; the order of others may change."""

    def clear(self) -> None:
        """Forget all and give the memory back."""

    def begin_step(self, positions: Positions) -> None:
        """Every row, in order, will write its next key at this position and attend up to it."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Write keys and values and attend: [rows, heads + 2 kv_heads, head_dim] → [rows, heads * head_dim].

        The heads are those of the query, scaled already, of the key and of the value, in this order.
        """
