"""The paged key-value store for decoding on CUDA, and decode steps recorded as CUDA graphs.

A page has a fixed number of positions. A row's block table lists its pages, which may be anywhere. A growing row takes
one more page without copying, so its memory exceeds its need by less than a page. A kept prompt also consists of pages.
Rows that begin with the prompt share its full pages, and each row has a copy of the last page if that page is not full.
A page without holders is free. Block tables and sharing: Kwon et al., "Efficient memory management for large language
model serving with PagedAttention", SOSP 2023, sections 4.1 and 4.4.

A decode step on CUDA is recorded once per size and replayed: one launch instead of about a thousand. Rows and the pages
that they read are padded to a few sizes. A size is recorded after it has been requested for some steps, because a
recording costs about as much as these steps. A recording has its own input tensors, into which each step is copied. It
reads weights, rotations and pages in place, so the recording is dropped when any of these is reallocated.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.llama_decoder import LlamaDecoder, Share
from posttrain.engine.rollout.page_attention import Looks, attend_pages, fits_varlen
from posttrain.engine.rollout.port import Context, KVShape, Positions

PAGE = 128  # positions
_NOBODYS = 0  # the padding page, never assigned to a row
_STEP = 32  # looks (`Looks`) are padded to multiples of this, which gives element-wise kernels whole vectors
_SIZES = 4  # number of sizes per power of two
Run = Callable[[], Tensor]
_AFTER = 32  # steps of a size before the size is recorded
_ROWS = 8  # rows are padded to multiples of this


def padded_size(count: int, step: int = _STEP) -> int:
    """Return the smallest of a few sizes, all multiples of `step`, a power of two, that is at least `count`."""
    step = max(step, 2 ** ((count - 1).bit_length() - 1) // _SIZES)
    return -(-count // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The pages that the rows of one step read, and the positions that they write."""

    looks: Looks
    writes: Tensor  # [rows] int64: positions in the flat pages

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that depend on the step."""
        return self.looks.row, self.looks.page, self.looks.used, self.writes


@final
class PageStore:
    """`KVStore` in pages.

    `reach` and the budget determine the allocation: first pages for the expected rows, then, if these are too few,
    twice as many. During the growth one layer of the pages exists twice. Pages beyond the budget are rejected.

    Args:
        page: positions per page.
    """

    def __init__(self, shape: KVShape, budget: int, page: int = PAGE) -> None:
        self._shape, self._budget, self._page = shape, budget, page
        self._page_bytes = shape.position_bytes * page
        self._varlen = fits_varlen(shape.device, shape.dtype, shape.head_dim)
        self._expected = 0
        self._pools: list[Tensor] = []  # of each layer, [2, pages, page, kv_heads, head_dim]
        self._free: list[int] = []
        self._holders: list[int] = []  # by page: number of rows and prompts that use it
        self._rows: dict[int, list[int]] = {}  # the block table of each row
        self._kept: dict[Context, tuple[list[int], int]] = {}  # pages and tokens
        self._table: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
        self.step: Step | None = None  # the input of `attend`; code that repeats a step sets its own tensors

    @property
    def order(self) -> list[int]:
        """See `KVStore.order`."""
        return list(self._rows)

    @property
    def used(self) -> int:
        """See `KVStore.used`; includes the padding page."""
        held = len(self._holders) - len(self._free)
        return self._page_bytes * held if held > 1 else 0

    @property
    def allocated(self) -> int:
        """Bytes of all pages."""
        return self._page_bytes * len(self._holders)

    def reach(self, longest: int, rows: int) -> None:
        """See `KVStore.reach`."""
        self._expected = max(self._expected, rows * self._pages(longest) + 1)

    def allow(self, budget: int) -> None:
        """See `KVStore.allow`."""
        self._budget = budget

    def keep(self, prompts: Mapping[Context, tuple[int, int]], pairs: Sequence[Tensor]) -> None:
        """See `KVStore.keep`."""
        sources: list[Tensor] = []
        places: list[Tensor] = []
        for prompt, (begin, end) in prompts.items():
            pages = self._take(self._pages(end - begin))
            self._kept[prompt] = pages, end - begin
            sources.append(torch.arange(begin, end))
            whole = torch.tensor(pages)[:, None] * self._page + torch.arange(self._page)
            places.append(whole.flatten()[: end - begin])
        source, place = (torch.cat(parts).to(self._shape.device) for parts in (sources, places))
        for pool, packed in zip(self._pools, pairs, strict=True):
            self._flat(pool).index_copy_(1, place, packed[source].transpose(0, 1))

    def forget(self, prompts: Collection[Context]) -> None:
        """See `KVStore.forget`."""
        for prompt in prompts:
            self._give(self._kept.pop(prompt)[0])

    def prompt_bytes(self, length: int) -> int:
        """See `KVStore.prompt_bytes`."""
        nobodys = 0 if self.used else 1  # the padding page, if `used` does not include it yet
        return self._page_bytes * (self._pages(length) + nobodys)

    def row_bytes(self, length: int, prompt: int) -> int:
        """See `KVStore.row_bytes`; full pages of the prompt are shared."""
        return self._page_bytes * (self._pages(length) - prompt // self._page)

    def growth_bytes(self, lengths: Mapping[int, int]) -> int:
        """See `KVStore.growth_bytes`."""
        return self._page_bytes * sum(self._lacks(row, length) for row, length in lengths.items())

    def bytes_alone(self, length: int, prompt: int) -> int:
        """See `KVStore.bytes_alone`."""
        return self._page_bytes * (self._pages(prompt) + 1) + self.row_bytes(length, prompt)

    def add(self, rows: Mapping[int, tuple[Context, int]]) -> None:
        """See `KVStore.add`."""
        copied: list[tuple[int, int]] = []
        for row, (prompt, length) in rows.items():
            known, tokens = self._kept[prompt]
            full = tokens // self._page
            for page in known[:full]:
                self._holders[page] += 1
            own = self._take(self._pages(length) - full)
            copied += zip(own, known[full:], strict=False)
            self._rows[row] = known[:full] + own
        if copied:
            to, source = torch.tensor(copied, device=self._shape.device).unbind(1)
            for pool in self._pools:
                pool[:, to] = pool[:, source]
        self._table = None

    def read(self, row: int, length: int) -> list[Tensor]:
        """See `KVStore.read`."""
        pages = torch.tensor(self._rows[row][: self._pages(length)], device=self._shape.device)
        return [pool[:, pages].flatten(1, 2)[:, :length].transpose(0, 1).contiguous() for pool in self._pools]

    def capacity(self, row: int) -> int:
        """See `KVStore.capacity`."""
        return self._page * len(self._rows[row])

    def extend(self, lengths: Mapping[int, int]) -> None:
        """See `KVStore.extend`."""
        for row, length in lengths.items():
            self._rows[row] += self._take(self._lacks(row, length))
        self._table = None

    def remove(self, rows: Collection[int]) -> None:
        """See `KVStore.remove`."""
        for row in rows:
            self._give(self._rows.pop(row))
        self._table = None

    def clear(self) -> None:
        """See `KVStore.clear`."""
        self._pools, self._free, self._holders = [], [], []
        self._rows, self._kept, self._table = {}, {}, None
        self.step = None

    def begin_step(self, positions: Positions) -> None:
        """See `KVStore.begin_step`; positions beyond the rows are padding, which writes to the padding page."""
        if self._table is None or len(self._table) != len(positions):
            most = max(map(len, self._rows.values()))
            padding = [[_NOBODYS] * most] * (len(positions) - len(self._rows))
            tables = [pages + [_NOBODYS] * (most - len(pages)) for pages in self._rows.values()]
            self._table = np.array([*tables, *padding])
        table, places, device = self._table, positions, self._shape.device
        last, offset = np.divmod(places, self._page)
        row, column = np.nonzero(np.arange(table.shape[1]) <= last[:, None])
        used = np.minimum(self._page, places[row] + 1 - column * self._page)
        spare = padded_size(len(row)) - len(row)
        row, page = np.pad(row, (0, spare), constant_values=len(table)), np.pad(table[row, column], (0, spare))
        used = np.pad(used, (0, spare), constant_values=1).astype(np.int32)
        writes = table[np.arange(len(table)), last] * self._page + offset
        looks = (torch.from_numpy(of).to(device) for of in (row, page, used))
        self.step = Step(Looks(len(table), *looks), torch.from_numpy(writes).to(device))

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """See `KVStore.attend`."""
        assert self.step is not None, "begin_step comes first"
        pool = self._pools[layer]
        flat, kv_heads = self._flat(pool), self._shape.kv_heads
        flat[0].index_copy_(0, self.step.writes, heads[:, -2 * kv_heads : -kv_heads])
        flat[1].index_copy_(0, self.step.writes, heads[:, -kv_heads:])
        return attend_pages(heads[:, : -2 * kv_heads], pool[0], pool[1], self.step.looks, varlen=self._varlen)

    def _pages(self, length: int) -> int:
        return -(-length // self._page)

    def _lacks(self, row: int, length: int) -> int:
        return max(0, self._pages(length) - len(self._rows[row]))

    def _flat(self, pool: Tensor) -> Tensor:
        """Return the pool as [2, positions, kv_heads, head_dim]."""
        return pool.view(2, -1, *pool.shape[3:])

    def _take(self, count: int) -> list[int]:
        """Return free pages, and mark them as used.

        Raises:
            JobFailedError: the budget has no room for more pages.
        """
        if count > len(self._free):
            self._grow(len(self._holders) - len(self._free) + count + (not self._holders))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _give(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _grow(self, needed: int) -> None:
        shape, have, most = self._shape, len(self._holders), self._budget // self._page_bytes
        if needed > most:
            raise JobFailedError(
                f"keys and values must fit in {self._budget} bytes ({most} pages of {self._page} positions), but need "
                f"{needed} pages; raise runtime.kv_cache"
            )
        count = max(needed, min(most, max(2 * have, self._expected)))
        size = (2, count, self._page, shape.kv_heads, shape.head_dim)
        # Masked positions are multiplied by 0, which would not remove a NaN left in memory.
        for layer in range(shape.layers):
            pool = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            if have:
                pool[:, :have] = self._pools[layer]
                self._pools[layer] = pool
            else:
                self._pools.append(pool)
        if not have:
            self._holders.append(1)  # the padding page
        self._free += range(count - 1, len(self._holders) - 1, -1)
        self._holders += [0] * (count - len(self._holders))


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    inputs: tuple[Tensor, ...]
    replay: Run


@final
class GraphedSteps:
    """`LlamaDecoder.step` over pages, recorded and replayed.

    Args:
        record: returns a function that repeats a computation on the same tensors.
    """

    def __init__(self, decoder: LlamaDecoder, store: PageStore, record: Callable[[Run], Run]) -> None:
        self._decoder, self._store, self._record = decoder, store, record
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._memory: tuple[int, int] = (0, 0)

    def step(self, tokens: Tensor, positions: Positions, copies: Sequence[int] | None = None) -> Tensor:
        """See `LlamaDecoder.step`. The logits are valid until the next step; a step of several copies is computed."""
        count, shares = len(positions), self._decoder.shares(copies)
        rows = self._decoder.rows(padded_size(count, _ROWS))
        padded = np.pad(positions, (0, rows - count))
        self._store.begin_step(padded)
        step = self._store.step
        assert step is not None
        inputs = (*self._decoder.inputs(tokens, padded), *step.tensors)
        memory = (self._decoder.rotations, self._store.allocated)
        if memory != self._memory:
            self._recorded, self._memory = {}, memory
        size = (*map(len, inputs), shares[0][0])
        self._asked[size] += 1
        if len(shares) > 1 or (size not in self._recorded and self._asked[size] <= _AFTER):
            return self._decoder.decode(self._store, inputs[0], inputs[1], rows, shares)[:count]
        if size not in self._recorded:
            self._recorded[size] = self._recording(tuple(given.clone() for given in inputs), rows, shares)
        recorded = self._recorded[size]
        for held, given in zip(recorded.inputs, inputs, strict=True):
            held.copy_(given)
        return recorded.replay()[:count]

    def _recording(self, held: tuple[Tensor, ...], rows: int, shares: Sequence[Share]) -> _Recorded:
        tokens, places, row, page, used, writes = held
        step = Step(Looks(rows, row, page, used), writes)

        def run() -> Tensor:
            self._store.step = step
            return self._decoder.decode(self._store, tokens, places, rows, shares)

        return _Recorded(held, self._record(run))


def cuda_recorder() -> Callable[[Run], Run]:
    """Return a recorder of CUDA graphs that share memory, because no two graphs run at the same time."""
    pool = torch.cuda.graph_pool_handle()
    living: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def record(run: Run) -> Run:
        nonlocal pool
        held = list(living)  # keeps the old graphs alive until the new one is recorded
        if not held:  # a memory pool ends with its last graph, and its handle is not reused
            pool = torch.cuda.graph_pool_handle()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()  # libraries allocate on their first call, which is forbidden in a recording
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = run()
        living.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
