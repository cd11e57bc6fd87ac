"""One contract for every key-value store: whatever comes, stays, grows and goes, attention is that over plain lists."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.kv_pages import PageStore
from posttrain.engine.rollout.kv_slots import SlotStore
from posttrain.engine.rollout.page_attention import (
    Looks,
    attend_packed_prompts,
    attend_pages,
    fits_varlen,
    why_not_varlen,
)
from posttrain.engine.rollout.port import Context, KVShape, KVStore

LAYERS, KV_HEADS, GROUP, WIDTH = 2, 2, 3, 16
PAGE = 4
STORES: dict[str, Callable[..., KVStore]] = {
    "slots": SlotStore,
    "pages": partial(PageStore, page=PAGE),
    "large pages": PageStore,
}
CASES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NEEDS_VARLEN = pytest.mark.skipif(
    not torch.cuda.is_available() or "seqused_k" not in inspect.signature(varlen_attn).parameters,
    reason="needs a CUDA device, and a torch whose variable-length attention takes pages (2.13 does, 2.11 does not)",
)


@dataclass
class Row:
    keys: list[Tensor]  # of every position, [layers, kv_heads, width] in float64
    values: list[Tensor]


@dataclass
class Beside:
    """A store and plain lists of what it must hold."""

    store: KVStore
    shape: KVShape
    budget: int
    random: torch.Generator
    rows: dict[int, Row] = field(default_factory=dict)
    prompts: dict[Context, Row] = field(default_factory=dict)
    next: int = 0

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random).to(self.shape.dtype)

    def keep(self, lengths: list[int]) -> None:
        """Prompts come packed; in front of them lies something that is none of them."""
        new: dict[Context, tuple[int, int]] = {}
        end = 1
        for length in lengths:
            new[(self.next, *[7] * (length - 1))] = end, end + length
            self.next += 1
            end += length
        front = self.shape.position_bytes  # a store that keeps them packed holds what lies in front too
        if self.store.used + front + sum(self.store.prompt_bytes(len(prompt)) for prompt in new) > self.budget:
            return
        pairs = [self.draw(end, 2, KV_HEADS, WIDTH) for _ in range(LAYERS)]
        self.store.keep(new, [pair.to(self.shape.device) for pair in pairs])
        whole = torch.stack(pairs).double()
        for prompt, (begin, stop) in new.items():
            both = whole[:, begin:stop].unbind(2)
            self.prompts[prompt] = Row(*(list(one.unbind(1)) for one in both))

    def add(self, prompt: Context, more: list[int]) -> None:
        """Rows of one prompt, as the samples of a group are."""
        wanted: dict[int, tuple[Context, int]] = {}
        planned = self.store.used
        for extra in more:
            planned += self.store.row_bytes(len(prompt) + extra, len(prompt))
            if planned > self.budget:
                break
            wanted[self.next] = prompt, len(prompt) + extra
            self.next += 1
        if wanted:
            self.store.add(wanted)
        known = self.prompts[prompt]
        for row, (_, length) in wanted.items():
            self.rows[row] = Row(list(known.keys), list(known.values))
            assert self.store.capacity(row) >= length

    def step(self) -> None:
        """A token for every row; rows that are full get room, or go where there is none."""
        for row in list(self.rows):
            needs = {row: len(self.rows[row].keys) + 1}
            if self.store.capacity(row) >= needs[row]:
                continue
            if self.store.used + self.store.growth_bytes(needs) > self.budget:
                self.remove([row])
            else:
                self.store.extend(needs)
                assert self.store.capacity(row) >= needs[row]
        order = self.store.order
        if not order:
            return
        self.store.begin_step(np.array([len(self.rows[row].keys) for row in order]))
        query = self.draw(LAYERS, len(order), KV_HEADS * GROUP, WIDTH) * WIDTH**-0.5  # as the decoder scales it
        pairs = self.draw(LAYERS, 2, len(order), KV_HEADS, WIDTH)
        for at, row in enumerate(order):
            self.rows[row].keys.append(pairs[:, 0, at].double())
            self.rows[row].values.append(pairs[:, 1, at].double())
        for layer in range(LAYERS):
            heads = torch.cat([query[layer], *pairs[layer]], 1).to(self.shape.device)
            found = self.store.attend(layer, heads).cpu().double()
            wanted = torch.stack([self.reference(layer, one, query[layer, at]) for at, one in enumerate(order)])
            torch.testing.assert_close(found, wanted, atol=NEAR[self.shape.dtype], rtol=0)

    def reference(self, layer: int, row: int, query: Tensor) -> Tensor:
        keys = torch.stack([key[layer] for key in self.rows[row].keys])  # [positions, kv_heads, width]
        values = torch.stack([value[layer] for value in self.rows[row].values])
        grouped = query.double().view(KV_HEADS, GROUP, WIDTH)
        weights = torch.einsum("hgw,phw->hgp", grouped, keys).softmax(-1)
        return torch.einsum("hgp,phw->hgw", weights, values).reshape(-1)

    def remove(self, rows: list[int]) -> None:
        self.store.remove(rows)
        for row in rows:
            del self.rows[row]

    def forget(self, prompts: list[Context]) -> None:
        self.store.forget(prompts)
        for prompt in prompts:
            del self.prompts[prompt]

    def check(self) -> None:
        assert sorted(self.store.order) == sorted(self.rows)
        assert 0 <= self.store.used <= self.budget
        if isinstance(self.store, PageStore):
            self.check_pages(self.store)

    def check_pages(self, store: PageStore) -> None:
        """Who holds a page is counted; what is written is one row's alone; what nobody holds is free."""
        lists = [*store._rows.values(), *(pages for pages, _ in store._kept.values())]
        held = Counter(page for pages in lists for page in pages)
        assert all(store._holders[page] == count for page, count in held.items())
        assert sorted([*[0][: len(store._holders)], *held, *store._free]) == list(range(len(store._holders)))
        assert store.allocated <= self.budget
        own = [store._rows[row][len(self.rows[row].keys) // store._page] for row in self.rows if self.full(store, row)]
        assert all(held[page] == 1 for page in own)
        assert len(own) == len(set(own))

    def full(self, store: PageStore, row: int) -> bool:
        return len(self.rows[row].keys) < store.capacity(row)


def beside(store: str, device: str, dtype: torch.dtype, positions: int, seed: int, rows: int = 4) -> Beside:
    """Beside a store with a budget of so many positions, but of one longest row at least."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = KVShape(LAYERS, KV_HEADS, WIDTH, dtype, torch.device(device))
    made = STORES[store](shape, 0)
    made.reach(400, rows)
    budget = max(positions * shape.position_bytes, made.bytes_alone(400, 100))
    made.allow(budget)
    return Beside(made, shape, budget, torch.Generator().manual_seed(seed))


PROMPTS = st.one_of(st.integers(1, 12), st.sampled_from([33, 100]))  # longer than what others' steps look at


def play(world: Beside, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 25), "actions")):
        actions = ["keep", "step", "steps"]
        actions += ["add", "add", "forget"] if world.prompts else []
        actions += ["remove"] if world.rows else []
        action = data.draw(st.sampled_from(actions), "action")
        if action == "keep":
            world.keep(data.draw(st.lists(PROMPTS, min_size=1, max_size=3), "prompts"))
        elif action == "add":
            prompt = data.draw(st.sampled_from(sorted(world.prompts)), "prompt")
            world.add(prompt, data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), "room"))
        elif action == "forget":
            world.forget([data.draw(st.sampled_from(sorted(world.prompts)), "prompt")])
        elif action == "remove":
            gone = data.draw(st.lists(st.sampled_from(sorted(world.rows)), min_size=1, unique=True), "rows")
            world.remove(gone)
        else:
            for _ in range(1 if action == "step" else 5):
                world.step()
                world.check()
        world.check()
    world.remove(list(world.rows))
    world.forget(list(world.prompts))
    assert world.store.used == 0
    assert world.store.order == []


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("device", "dtype"), CASES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_attention_is_that_over_plain_lists(store: str, device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    positions = data.draw(st.sampled_from([0, 700, 5000]), "budget")
    play(beside(store, device, dtype, positions, data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))), data)


@pytest.mark.parametrize("store", ["slots", "pages", pytest.param("large pages", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_rows_that_grow_through_many_pages(store: str, device: str, dtype: torch.dtype) -> None:
    world = beside(store, device, dtype, 4000, seed=1)
    world.keep([9, 3])
    for prompt in sorted(world.prompts):
        world.add(prompt, [1, 2])
    for _ in range(290 if store == "large pages" else 90):
        world.step()
        world.check()
    assert len(world.rows) == 4


@pytest.mark.parametrize("store", STORES)
def test_what_is_cleared_is_gone(store: str) -> None:
    world = beside(store, "cpu", torch.float32, 4000, seed=2)
    world.keep([9])
    world.add(*world.prompts, [1, 2])
    world.step()
    world.store.clear()
    assert (world.store.order, world.store.used) == ([], 0)


def test_a_group_holds_the_full_pages_of_its_prompt_once() -> None:
    world = beside("pages", "cpu", torch.float32, 4000, seed=3)
    page_bytes = PAGE * world.shape.position_bytes
    world.keep([4 * PAGE + 1])
    before = world.store.used
    assert before == (1 + 5) * page_bytes  # and the page that is nobody's
    world.add(*world.prompts, [1] * 8)
    assert world.store.used == before + 8 * page_bytes
    world.forget(list(world.prompts))
    assert world.store.used == before + 7 * page_bytes, "the copied last page of the prompt is free, the others are not"
    world.step()
    world.remove(list(world.rows)[:7])
    assert world.store.used == (1 + 5) * page_bytes


def test_no_page_is_made_beyond_the_budget() -> None:
    world = beside("pages", "cpu", torch.float32, 0, seed=4)
    assert isinstance(world.store, PageStore)
    most = world.budget // (PAGE * world.shape.position_bytes)
    prompt = tuple(range(PAGE * most))
    pairs = [torch.zeros(len(prompt), 2, KV_HEADS, WIDTH)] * LAYERS
    with pytest.raises(JobFailedError, match=f"keys and values must fit in .*{most} pages .* need {most + 1} pages"):
        world.store.keep({prompt: (0, len(prompt))}, pairs)
    assert world.store.allocated == 0
    world.store.allow(world.budget + PAGE * world.shape.position_bytes)
    world.store.keep({prompt: (0, len(prompt))}, pairs)
    assert world.store.used == world.store.allocated == world.budget + PAGE * world.shape.position_bytes


def test_pages_are_allocated_for_the_rows_that_may_come_and_then_as_needed() -> None:
    world = beside("pages", "cpu", torch.float32, 40_000, seed=5, rows=2)
    assert isinstance(world.store, PageStore)
    page_bytes = PAGE * world.shape.position_bytes
    world.keep([3])
    first = world.store.allocated
    assert first == (2 * 100 + 1) * page_bytes
    for prompt in list(world.prompts):
        world.add(prompt, [390, 390, 390])
    for _ in range(3):
        world.step()
    assert first < world.store.allocated == 2 * first


def looks_of(counts: list[int], generator: torch.Generator, pages: int) -> Looks:
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    page = torch.randint(0, pages, row.shape, generator=generator)
    used = torch.randint(1, PAGE + 1, row.shape, generator=generator).int()
    return Looks(len(counts), row, page, used)


@pytest.mark.parametrize("heads", [1, 4])
def test_parts_are_merged_in_any_size(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 1000 and of -1000 side by side: the largest is taken off first."""
    monkeypatch.setattr("posttrain.engine.rollout.page_attention._GATHERED", 5 * PAGE * heads * WIDTH)
    generator = torch.Generator().manual_seed(heads)
    keys, values = torch.randn(2, 9, PAGE, heads, WIDTH, generator=generator, dtype=torch.float64)
    keys *= torch.tensor([1.0, 300.0])[torch.randint(0, 2, (9, 1, 1, 1), generator=generator)]
    query = torch.randn(4, 2 * heads, WIDTH, generator=generator, dtype=torch.float64)
    looks = looks_of([1, 5, 2, 9], generator, 9)
    found = attend_pages(query, keys, values, looks, varlen=False)
    for row in range(4):
        mine = [at for at in range(len(looks.row)) if looks.row[at] == row]
        k, v = (torch.cat([x[looks.page[at], : looks.used[at]] for at in mine]) for x in (keys, values))
        weights = torch.einsum("hgw,phw->hgp", query[row].view(heads, 2, WIDTH), k).softmax(-1)
        wanted = torch.einsum("hgp,phw->hgw", weights, v).reshape(-1)
        torch.testing.assert_close(found[row], wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("device", "dtype", "width"),
    [("cpu", torch.bfloat16, 64), ("cuda", torch.float32, 64), ("cuda", torch.bfloat16, 512)],
)
def test_varlen_is_for_half_precision_on_cuda(device: str, dtype: torch.dtype, width: int) -> None:
    assert not fits_varlen(torch.device(device), dtype, width)


@pytest.mark.parametrize(
    ("raises", "words"),
    [(True, "failed: RuntimeError: not this torch"), (False, "differs from plain attention by 0.5")],
)
def test_varlen_that_this_torch_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch, raises: bool, words: str) -> None:
    """As a fall-back of the model, by its reason."""

    def tried(*what: object) -> float:
        if raises:
            raise RuntimeError("not this torch")
        return 0.5

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("posttrain.engine.rollout.page_attention._tried", tried)
    why_not_varlen.cache_clear()
    device = torch.device("cuda")
    assert words in (why_not_varlen(device, torch.bfloat16, 64) or "")
    assert not fits_varlen(device, torch.bfloat16, 64)
    why_not_varlen.cache_clear()
    monkeypatch.setattr("posttrain.engine.rollout.page_attention._tried", lambda *what: 0.01)
    assert why_not_varlen(device, torch.bfloat16, 64) is None
    why_not_varlen.cache_clear()
    assert why_not_varlen(torch.device("cpu"), torch.float32, 64) is None


@pytest.mark.gpu
@NEEDS_VARLEN
@pytest.mark.parametrize("page", [16, 128, 256])
@pytest.mark.parametrize("width", [64, 128])
def test_varlen_over_pages_is_what_plain_torch_computes(page: int, width: int) -> None:
    generator = torch.Generator().manual_seed(page)
    keys, values = torch.randn(2, 40, page, KV_HEADS, width, generator=generator).bfloat16().cuda()
    query = torch.randn(5, KV_HEADS * GROUP, width, generator=generator).mul(width**-0.5).bfloat16().cuda()
    counts = [1, 7, 3, 12, 1]
    row = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    at = torch.randint(0, 40, row.shape, generator=generator)
    used = torch.randint(1, page + 1, row.shape, generator=generator).int()
    looks = Looks(5, row.cuda(), at.cuda(), used.cuda())
    found, wanted = (attend_pages(query, keys, values, looks, varlen=way).float() for way in (True, False))
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=0)


@pytest.mark.gpu
@NEEDS_VARLEN
@pytest.mark.parametrize(("lengths", "begins"), [([5, 130, 1], [0, 0, 0]), ([40], [300]), ([3, 40], [300, 7])])
def test_varlen_over_prompts_is_causal_attention(lengths: list[int], begins: list[int]) -> None:
    total = sum(lengths)
    query = torch.randn(total, KV_HEADS * GROUP, WIDTH).mul(WIDTH**-0.5).bfloat16().cuda()
    pairs = torch.randn(sum(begins) + total, 2, KV_HEADS, WIDTH).bfloat16().cuda()
    found = attend_packed_prompts(query, pairs, lengths, begins).double().view(total, KV_HEADS, GROUP, WIDTH)
    start = first = 0
    for length, begin in zip(lengths, begins, strict=True):
        q = query[start : start + length].double().view(length, KV_HEADS, GROUP, WIDTH)
        k, v = pairs[first : first + begin + length].double().unbind(1)
        scores = torch.einsum("qhgw,phw->hgqp", q, k)
        ahead = torch.ones(length, begin + length, dtype=torch.bool, device="cuda").triu(begin + 1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        wanted: Any = torch.einsum("hgqp,phw->qhgw", weights, v)
        torch.testing.assert_close(found[start : start + length], wanted, atol=2e-2, rtol=0)
        start, first = start + length, first + begin + length


def test_a_class_that_grows_keeps_nothing_of_what_it_had() -> None:
    """The last step's views are let go, so of what is replaced one layer at a time is there twice."""
    shape = KVShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    store = SlotStore(shape, 2**20, 64)
    store.keep({(5, 4): (0, 2), (9, 8): (2, 4)}, [torch.zeros(4, 2, 1, 4) for _ in range(2)])
    store.add({0: ((5, 4), 3)})
    store.begin_step(np.array([2]))
    before = [weakref.ref(pairs) for pairs in store._classes[0].pairs]
    store.add({1: ((9, 8), 3)})
    assert [pairs() for pairs in before] == [None, None]


@pytest.mark.parametrize("store", ["slots", "pages"])
def test_a_row_that_is_longer_than_what_the_last_step_saw_is_moved_whole(store: str) -> None:
    world = beside(store, "cpu", torch.float32, 4000, 0)
    world.keep([40, 100])
    short, long = sorted(world.prompts, key=len)
    for _ in range(3):
        world.add(short, [10])
    world.step()
    world.add(long, [1])
    world.remove([min(world.rows)])
    world.step()
