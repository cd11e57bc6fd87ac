"""Wide columns: a document's rows are its own through every selection and journey, and stay where they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from guarded_pools import Guard, GuardedBackend
from hypothesis import given, settings, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.backends.inline import InlineStored
from posttrain.engine.groups.port import Parcel, RankContext, StoredAway, pack, unpack
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.wide import RowsHandle, TopK, WideColumn, WideRows, fetched

K = 3


@dataclass(eq=False)
class Part:
    """A part somewhere else: fetched anew each time, and how many of them are alive at once is counted."""

    rows: WideRows
    alive: list[int] = field(default_factory=lambda: [0, 0, 0])  # now, at the most, fetched

    @property
    def here(self) -> bool:
        return False

    def value(self) -> WideRows:
        ids = self.rows.held.ids.numpy().copy()  # kept by whatever tensor reads it
        copy = WideRows(TopK(torch.from_numpy(ids), self.rows.held.logprobs.clone()), self.rows.counts)
        self.alive[0] += 1
        self.alive[1] = max(self.alive[:2])
        self.alive[2] += 1
        weakref.finalize(ids, self._gone)
        return copy

    def _gone(self) -> None:
        self.alive[0] -= 1


def rows(numbers: Sequence[int], counts: Sequence[int]) -> WideRows:
    """Of documents that have a number each: every id of a document's rows is its number, times 100, and its row."""
    held = TopK.empty(sum(counts), K)
    at = 0
    for number, count in zip(numbers, counts, strict=True):
        for row in range(count):
            held.ids[at] = torch.arange(K) + 100 * number + 10 * row
            held.logprobs[at] = -torch.arange(K) - number
            at += 1
    return WideRows(held, tuple(counts))


def bare(lengths: Sequence[int], unit: int | None = None) -> TokenBatch:
    documents = [Document([1, 2], [3] * length) for length in lengths]
    numbers = torch.arange(len(lengths))
    return TokenBatch.pack(documents, unit=unit).with_document_columns(number=numbers)


def handed(batch: TokenBatch, parts: Sequence[Sequence[int]], alive: list[int] | None = None) -> TokenBatch:
    """With the column's rows in so many parts, each of the named documents."""
    counts, places = batch.response_lengths.tolist(), dict[int, RowsHandle]()
    for documents in parts:
        held = rows(documents, [counts[i] for i in documents])
        part = Part(held) if alive is None else Part(held, alive)
        places |= {document: RowsHandle(part, at, counts[document]) for at, document in enumerate(documents)}
    return batch.with_wide("candidates", WideColumn(K, tuple(places[i] for i in range(len(batch)))))


def fetch(batch: TokenBatch) -> TokenBatch:
    return replace(batch, wide_columns=fetched(batch.wide_columns))


def holds_its_own(batch: TokenBatch) -> None:
    """Every response token has the rows that its document's number says."""
    numbers, counts = batch.column("number").tolist(), batch.response_lengths.tolist()
    found, wanted = batch.wide("candidates"), rows(numbers, counts).held
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.logprobs, wanted.logprobs)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[list[int], int | None, list[list[int]], list[list[int]], list[int]]:
    """Response lengths, documents of a unit, the parts that hold rows, shards of items, and a choice of items."""
    unit = draw(st.sampled_from([None, 1, 2, 3]))
    items = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 4), min_size=items * (unit or 1), max_size=items * (unit or 1)))
    into = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    parts = [[i for i, part in enumerate(into) if part == each] for each in range(3)]
    order = draw(st.permutations(range(items)))
    cut = draw(st.integers(0, items))
    chosen = draw(st.lists(st.integers(0, items - 1), max_size=5, unique=True))
    return lengths, unit, [part for part in parts if part], [list(order[:cut]), list(order[cut:])], chosen


@pytest.mark.slow
@given(dealt())
@settings(max_examples=150, deadline=None)
def test_rows_follow_their_documents_through_shards_gathering_and_selection(case: Any) -> None:
    lengths, unit, parts, shards, chosen = case
    batch = handed(bare(lengths, unit), parts)
    holds_its_own(fetch(batch))
    split = [batch.select_items(shard) for shard in shards]
    for part in split:
        holds_its_own(fetch(part))
    holds_its_own(fetch(TokenBatch.gather(split, shards)))
    early = TokenBatch.gather([fetch(part) for part in split], shards)
    holds_its_own(early)
    holds_its_own(early.select_items(chosen))
    holds_its_own(fetch(batch.select_items(chosen)))


@given(dealt())
@settings(max_examples=30, deadline=None)
def test_places_travel_between_processes_and_rows_do_not(case: Any) -> None:
    lengths, unit, parts, _, chosen = case
    batch, store = bare(lengths, unit), dict[str, Parcel]()
    counts, places = batch.response_lengths.tolist(), dict[int, RowsHandle]()
    for name, documents in zip("abc", parts, strict=False):
        store[name] = pack(rows(documents, [counts[i] for i in documents]))
        part: StoredAway[WideRows] = StoredAway(name, store.__getitem__)
        places |= {document: RowsHandle(part, at, counts[document]) for at, document in enumerate(documents)}
    batch = batch.with_wide("candidates", WideColumn(K, tuple(places[i] for i in range(len(batch)))))
    sent = pack(batch.select_items(chosen))
    needed = {chosen_part for i in batch.documents_of(chosen) for chosen_part in [places[i].part]}
    assert len(sent.handles) == len(needed), "a part is named once, however many documents have rows in it"
    holds_its_own(fetch(unpack(sent, store.__getitem__)))


def test_one_part_at_a_time_is_held_and_each_is_fetched_once() -> None:
    alive = [0, 0, 0]
    batch = handed(bare([2, 3, 1, 4, 2, 2]), [[0, 3], [1, 4], [2, 5]], alive)
    found = fetch(batch.select([3, 1, 2]))
    gc.collect()
    assert alive == [0, 1, 3], "of a part that is not needed whole nothing but its rows is kept"
    holds_its_own(found)
    holds_its_own(fetch(batch.select([4, 1])))


def test_rows_of_this_process_are_not_copied() -> None:
    batch = bare([2, 3])
    held = rows([0, 1], [2, 3])
    stored = InlineStored(held)
    column = WideColumn(K, tuple(RowsHandle(stored, at, count) for at, count in enumerate(held.counts)))
    found = fetch(batch.with_wide("candidates", column).select([1])).wide_columns["candidates"].documents
    (only,) = found
    assert isinstance(only, TopK)
    assert only.ids.data_ptr() == held.held.ids[2:].data_ptr()


@pytest.mark.parametrize("unit", [None, 2])
def test_a_dummy_has_the_width_and_no_rows(unit: int | None) -> None:
    batch = handed(bare([2, 3], unit), [[0, 1]])
    for whole in (batch, batch.select_items([])):
        dummy = whole.dummy()
        assert [list(part.shape) for part in (dummy.wide("candidates").ids, dummy.wide("candidates").logprobs)] == [
            [0, K],
            [0, K],
        ]
    empty = fetch(batch.select_items([])).wide("candidates")
    assert list(empty.ids.shape) == [0, K]


def test_what_nobody_filled_or_fetched_is_one_line() -> None:
    batch = bare([2, 3])
    with pytest.raises(InputError, match=r"^the batch must have a wide column candidates, got none; request the"):
        batch.wide("candidates")
    with pytest.raises(InputError, match=r"must be in this process to be read, but the rows of 2 documents are elsew"):
        handed(batch, [[0, 1]]).wide("candidates")
    with pytest.raises(InputError, match=r"response token: expected \[2, 3\] rows per document, got \[3, 2\]; fill"):
        batch.with_wide("candidates", handed(bare([3, 2]), [[0, 1]]).wide_columns["candidates"])
    with pytest.raises(InputError, match=r"same wide columns, but in some parts candidates is missing"):
        TokenBatch.gather([handed(batch, [[0, 1]]), batch], [[0, 1], [2, 3]])
    narrow = batch.with_wide("candidates", WideColumn(1, (TopK.empty(2, 1), TopK.empty(3, 1))))
    with pytest.raises(InputError, match="must have the same wide columns"):
        TokenBatch.gather([handed(batch, [[0, 1]]), narrow], [[0, 1], [2, 3]])


class Holder:
    """Holds a batch's documents as rows."""

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank

    def hold(self, batch: TokenBatch, offset: int) -> WideRows:
        return rows([n + offset for n in batch.column("number").tolist()], batch.response_lengths.tolist())

    def read(self, batch: TokenBatch) -> TokenBatch:
        whole = fetch(batch)
        holds_its_own(whole)
        first = torch.cat([part.ids[:1, 0] if len(part.ids) else torch.zeros(1) for part in _parts(whole)])
        return replace(whole, wide_columns={}).with_document_columns(read=first)


def _parts(batch: TokenBatch) -> list[TopK]:
    return [entry for entry in batch.wide_columns["candidates"].documents if isinstance(entry, TopK)]


@pytest.mark.parametrize("unit", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_ranks_keep_is_read_by_ranks_and_never_by_the_controller(ranks: int, unit: int | None) -> None:
    guard, batch = Guard(), bare([2, 3, 1, 4, 2, 2], unit)
    keeping = ResourcePool(GuardedBackend(guard, ranks)).start("holder", Holder)
    reading = ResourcePool(GuardedBackend(guard, 3)).start("reader", Holder)
    shards = keeping.nonblocking.map_stored(Holder.hold, batch, 0).result()
    assert sorted(item for shard in shards for item in shard.items) == list(range(len(batch.item_lengths)))
    assert all(shard.items for shard in shards)
    counts, places = batch.response_lengths.tolist(), dict[int, RowsHandle]()
    for shard in shards:
        for at, document in enumerate(batch.documents_of(shard.items)):
            places[document] = RowsHandle(shard.part, at, counts[document])
    column = WideColumn(K, tuple(places[i] for i in range(len(batch))))
    found = reading.map(Holder.read, batch.with_wide("candidates", column))
    assert found.column("read").tolist() == [100.0 * i for i in range(6)]
    assert guard.fetched
    with pytest.raises(AssertionError, match="the controller fetched"):
        fetch(batch.with_wide("candidates", column))
