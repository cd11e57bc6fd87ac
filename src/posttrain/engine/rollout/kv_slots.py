"""The key-value store for decoding on the CPU: contiguous slots, one block of memory per length.

Rows of similar length share a class of 32, 128, 256, 512 … positions. Attention of a class is one batched product over
memory in place (a gather per step would cost more than it saves on a CPU). No row attends over more positions than the
longest row of its class, and memory for all rows at the longest possible response is never allocated. A row that
outgrows its class is copied into the next class, once per doubling.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from posttrain.engine.rollout.page_attention import padded_width, weigh
from posttrain.engine.rollout.port import Context, KVShape, Positions

_SHORT = 32  # positions; with 64, a step of a small model is up to a tenth slower
_FIRST_CLASS = 128  # positions of the second class
_FEW = 4  # rows that are moved or filled one by one


class _View:
    """One layer of a class's rows, shaped for products, with rows and heads in one axis."""

    __slots__ = ("flat", "keys", "rows", "values")

    def __init__(self, pairs: Tensor, count: int, width: int) -> None:
        used = pairs.narrow(1, 0, count)
        keys, values = used.flatten(1, 2).narrow(2, 0, width).unbind(0)
        self.flat = pairs.view(-1, pairs.shape[-1])  # [places, head_dim]
        self.rows = used.transpose(0, 1)  # [rows, 2, kv_heads, positions, head_dim]
        self.keys = keys.transpose(1, 2)  # [rows * kv_heads, head_dim, width]
        self.values = values  # [rows * kv_heads, width, head_dim]


@dataclass(slots=True, eq=False)
class _Class:
    """Rows with the same number of positions."""

    positions: int  # capacity of each row
    pairs: list[Tensor] = field(default_factory=list)  # of each layer, [2, slots, kv_heads, positions, head_dim]
    rows: list[int] = field(default_factory=list)  # slot → row
    views: list[_View] = field(default_factory=list)  # see `see`
    viewed: tuple[int, int] = (0, 0)  # rows and width of `views`
    begins: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # see `_line_begins`

    @property
    def slots(self) -> int:
        return self.pairs[0].shape[1] if self.pairs else 0

    def see(self, width: int) -> list[_View]:
        """Return the views for a step over the first `width` positions, one per layer."""
        count = len(self.rows)
        if not self.views or self.viewed != (count, width):
            self.views = [_View(pairs, count, width) for pairs in self.pairs]
            self.viewed = (count, width)
        return self.views


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one class in one step, with the positions that they write and read."""

    begin: int  # index of the first row in the step's order
    end: int
    width: int  # positions attended over
    views: list[_View]
    together: int  # the position at which all rows write, unless `places` is set
    places: Tensor | None  # [rows * 2 * kv_heads] places of keys and values in the flat view
    bias: Tensor | None  # [rows, 1, 1, width]; None: all write at one position


@final
class SlotStore:
    """`KVStore` in contiguous slots.

    The allocation stays within the budget: spare slots are freed before rows are rejected. While a class grows, one
    layer of the class exists twice.
    """

    def __init__(self, shape: KVShape, budget: int, longest: int = _SHORT) -> None:
        self._shape, self._budget = shape, budget
        self._classes: list[_Class] = []
        self._columns = torch.arange(0, device=shape.device)  # of the longest class
        self._unseen, self._seen = torch.tensor([-math.inf, 0.0], dtype=shape.dtype, device=shape.device)
        self.reach(longest)
        self._kept: dict[Context, tuple[Sequence[Tensor], int, int]] = {}  # packed pairs, begin, end
        self._place: dict[int, int] = {}  # row → class
        self._parts: list[_Part] = []

    def reach(self, longest: int, rows: int = 1) -> None:
        """See `KVStore.reach`."""
        last = self._classes[-1].positions if self._classes else 0
        positions = _FIRST_CLASS
        while last < longest:
            if positions > last:
                last = min(positions, padded_width(longest))
                self._classes.append(_Class(last))
            positions *= 2
        if len(self._columns) < last:
            self._columns = torch.arange(last, device=self._shape.device)

    @property
    def order(self) -> list[int]:
        """See `KVStore.order`."""
        return [row for kind in self._classes for row in kind.rows]

    @property
    def used(self) -> int:
        """See `KVStore.used`."""
        rows = sum(len(kind.rows) * kind.positions for kind in self._classes)
        packed = {id(pairs): len(pairs[0]) for pairs, _, _ in self._kept.values()}
        return self._shape.position_bytes * (rows + sum(packed.values()))

    def allow(self, budget: int) -> None:
        """See `KVStore.allow`."""
        self._budget = budget

    def keep(self, prompts: Mapping[Context, tuple[int, int]], pairs: Sequence[Tensor]) -> None:
        """See `KVStore.keep`; the prompts stay packed."""
        self._kept |= {prompt: (pairs, begin, end) for prompt, (begin, end) in prompts.items()}

    def forget(self, prompts: Collection[Context]) -> None:
        """See `KVStore.forget`; the remaining prompts of a pack are copied out of the pack."""
        for prompt in prompts:
            del self._kept[prompt]
        for prompt, (pairs, begin, end) in self._kept.items():
            if end - begin < len(pairs[0]):
                self._kept[prompt] = ([pair[begin:end].clone() for pair in pairs], 0, end - begin)

    def prompt_bytes(self, length: int) -> int:
        """See `KVStore.prompt_bytes`."""
        return self._shape.position_bytes * length

    def row_bytes(self, length: int, prompt: int) -> int:
        """See `KVStore.row_bytes`."""
        return self._shape.position_bytes * self._classes[self._class_of(length)].positions

    def growth_bytes(self, lengths: Mapping[int, int]) -> int:
        """See `KVStore.growth_bytes`; a row has two slots while it moves."""
        return sum(self.row_bytes(length, 0) for length in lengths.values())

    def bytes_alone(self, length: int, prompt: int) -> int:
        """See `KVStore.bytes_alone`."""
        whole = self.row_bytes(length, prompt)
        return whole + whole // 2 + self.prompt_bytes(prompt)

    def capacity(self, row: int) -> int:
        """See `KVStore.capacity`."""
        return self._classes[self._place[row]].positions

    def add(self, rows: Mapping[int, tuple[Context, int]]) -> None:
        """See `KVStore.add`."""
        wanted: dict[int, list[int]] = {}
        packs: dict[int, tuple[Sequence[Tensor], dict[int, tuple[int, int]]]] = {}
        for row, (prompt, length) in rows.items():
            wanted.setdefault(self._class_of(length), []).append(row)
            pairs, begin, end = self._kept[prompt]
            packs.setdefault(id(pairs), (pairs, {}))[1][row] = begin, end
        for at, new in wanted.items():
            self._allocate(self._classes[at], len(self._classes[at].rows) + len(new))
            self._classes[at].rows += new
            self._classes[at].views = []  # the new rows may be longer than the last step's width
            self._place |= dict.fromkeys(new, at)
        for pairs, spans in packs.values():
            self._fill(spans, pairs)

    def read(self, row: int, length: int) -> list[Tensor]:
        """See `KVStore.read`."""
        kind = self._classes[self._place[row]]
        slot = kind.rows.index(row)
        return [pairs[:, slot, :, :length].permute(2, 0, 1, 3).contiguous() for pairs in kind.pairs]

    def _fill(self, spans: Mapping[int, tuple[int, int]], pairs: Sequence[Tensor]) -> None:
        """Fill rows with tokens [begin, end) of packed keys and values."""
        for kind in self._classes:
            rows = [(slot, *spans[row]) for slot, row in enumerate(kind.rows) if row in spans]
            if len(rows) <= _FEW:
                for slot, begin, end in rows:
                    for layer, packed in enumerate(pairs):
                        kind.pairs[layer][:, slot, :, : end - begin] = packed[begin:end].permute(1, 2, 0, 3)
                continue
            slots, begins, ends = torch.tensor(rows, device=self._shape.device).unbind(1)
            counts = ends - begins
            time = torch.arange(int(counts.sum()), device=self._shape.device)
            time -= (counts.cumsum(0) - counts).repeat_interleave(counts)
            sides = torch.arange(kind.begins.shape[1], device=self._shape.device)  # keys and values of each head
            places = (kind.begins[slots.repeat_interleave(counts)] + time[:, None]).view(-1)
            source = ((begins.repeat_interleave(counts) + time)[:, None] * len(sides) + sides).view(-1)
            for layer, packed in enumerate(pairs):
                flat = packed.reshape(-1, self._shape.head_dim)
                kind.pairs[layer].view(-1, self._shape.head_dim).index_copy_(0, places, flat.index_select(0, source))

    def extend(self, lengths: Mapping[int, int]) -> None:
        """See `KVStore.extend`."""
        moves: dict[tuple[int, int], list[int]] = {}
        for row, length in lengths.items():
            source, target = self._place[row], self._class_of(length)
            if target > source:
                moves.setdefault((source, target), []).append(row)
        for (source, target), rows in sorted(moves.items()):
            old, new = self._classes[source], self._classes[target]
            taken = torch.tensor([old.rows.index(row) for row in rows], device=self._shape.device)
            self._allocate(new, len(new.rows) + len(rows))
            begin = len(new.rows)
            for before, after in zip(old.pairs, new.pairs, strict=True):
                after[:, begin : begin + len(rows), :, : old.positions] = before[:, taken]
            self._drop(old, set(rows))
            new.rows += rows
            new.views = []  # as in `add`
            self._place |= dict.fromkeys(rows, target)

    def remove(self, rows: Collection[int]) -> None:
        """See `KVStore.remove`."""
        leaving: dict[int, set[int]] = {}
        for row in rows:
            leaving.setdefault(self._place.pop(row), set()).add(row)
        for at, gone in leaving.items():
            self._drop(self._classes[at], gone)

    def clear(self) -> None:
        """See `KVStore.clear`."""
        self._classes, self._kept, self._place, self._parts = [], {}, {}, []

    def begin_step(self, positions: Positions) -> None:
        """See `KVStore.begin_step`."""
        self._parts, begin = [], 0
        for kind in self._classes:
            if kind.rows:
                end = begin + len(kind.rows)
                self._parts.append(self._part(kind, begin, end, positions[begin:end]))
                begin = end

    def _part(self, kind: _Class, begin: int, end: int, positions: Positions) -> _Part:
        longest, shortest = int(positions.max()), int(positions.min())
        width = padded_width(longest + 1)
        views = kind.see(width)
        if longest == shortest:
            return _Part(begin, end, width, views, longest, None, None)
        at = torch.from_numpy(positions).to(self._shape.device)[:, None]
        bias = torch.where(self._columns[:width] > at, self._unseen, self._seen)
        return _Part(begin, end, width, views, 0, (kind.begins[: len(positions)] + at).view(-1), bias[:, None, None])

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """See `KVStore.attend`."""
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        asking = heads.shape[1] - 2 * kv_heads
        query = heads.narrow(1, 0, asking).reshape(len(heads) * kv_heads, -1, head_dim)
        pairs = heads.narrow(1, asking, 2 * kv_heads)
        if len(self._parts) == 1:
            return self._attend_part(self._parts[0], layer, query, pairs)
        pairs, spans = pairs.contiguous(), [(part, part.begin * kv_heads, part.end * kv_heads) for part in self._parts]
        return torch.cat(
            [self._attend_part(part, layer, query[b:e], pairs[part.begin : part.end]) for part, b, e in spans]
        )

    def _attend_part(self, part: _Part, layer: int, query: Tensor, pairs: Tensor) -> Tensor:
        """Attend in one class: `query` [rows * kv_heads, queries, head_dim], `pairs` [rows, 2 * kv_heads, head_dim]."""
        count, kv_heads = part.end - part.begin, self._shape.kv_heads
        view, width, together = part.views[layer], part.width, part.together
        if part.places is None:
            view.rows.select(3, together).copy_(pairs.view(count, 2, kv_heads, -1))
        else:
            view.flat.index_copy_(0, part.places, pairs.reshape(-1, self._shape.head_dim))
        scores = torch.bmm(query, view.keys)
        if part.bias is not None:
            scores.view(count, kv_heads, -1, width).add_(part.bias)
        elif width > together + 1:
            scores.narrow(2, together + 1, width - together - 1).fill_(-math.inf)
        return weigh(scores.softmax(-1), view.values).view(count, -1)

    def _class_of(self, length: int) -> int:
        return next(i for i, kind in enumerate(self._classes) if kind.positions >= length)

    def _drop(self, kind: _Class, gone: set[int]) -> None:
        """Move rows from the last slots into the freed slots."""
        kept = len(kind.rows) - len(gone)
        free = [slot for slot, row in enumerate(kind.rows[:kept]) if row in gone]
        moved = [slot for slot, row in enumerate(kind.rows[kept:], kept) if row not in gone]
        for slot, origin in zip(free, moved, strict=True):
            kind.rows[slot] = kind.rows[origin]
        seen = kind.viewed[1] if kind.views else kind.positions
        for pairs in kind.pairs if free else []:
            used = pairs.narrow(3, 0, seen)
            if len(free) > _FEW:
                used[:, free] = used[:, moved]
                continue
            for slot, origin in zip(free, moved, strict=True):
                used.select(1, slot).copy_(used.select(1, origin))
        del kind.rows[kept:]
        if not kind.rows:
            kind.pairs, kind.views = [], []

    def _allocate(self, kind: _Class, slots: int) -> None:
        """Allocate at least `slots` slots; twice the current number if the budget has room."""
        if kind.slots >= slots:
            return
        slot = self._shape.position_bytes * kind.positions
        allocated = self._shape.position_bytes * sum(one.slots * one.positions for one in self._classes)
        spare = (self._budget - allocated + kind.slots * slot) // slot
        if spare < slots:
            for other in self._classes:
                self._resize(other, len(other.rows))
        self._resize(kind, max(slots, min(2 * kind.slots, spare)))

    def _resize(self, kind: _Class, slots: int) -> None:
        if kind.slots == slots:
            return
        kind.views, self._parts = [], []  # the last step's views would keep the replaced memory alive
        shape, count = self._shape, min(len(kind.rows), slots)
        size = (2, slots, shape.kv_heads, kind.positions, shape.head_dim)
        kind.begins = _line_begins(*size[1:4], shape.device)
        # Masked positions are multiplied by 0, and a NaN left in memory would survive that.
        if not kind.pairs:
            kind.pairs = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.layers)]
            return
        for layer, old in enumerate(kind.pairs):
            kind.pairs[layer] = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            kind.pairs[layer][:, :count] = old[:, :count]


def _line_begins(slots: int, heads: int, positions: int, device: torch.device) -> Tensor:
    """Return the offsets of each head's keys and values in the flat view, by slot, [slots, 2 * heads]."""
    keys = torch.arange(slots * heads, device=device).view(slots, heads) * positions
    return torch.cat([keys, keys + slots * heads * positions], 1)
