"""Attestation: what adds up, what it notices, and what a publication refuses."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posttrain.engine.models.sharding import Shard
from posttrain.engine.weights.stream import Attestation, attest, attest_views, differing_aliases

TYPES = [torch.float32, torch.bfloat16]
MASK = (1 << 64) - 1


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(name: str, tensor: Tensor) -> Shard:
    return Shard(name, tuple(tensor.shape), tensor)


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """A copy with one bit of one element altered."""
    word = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    copy = tensor.clone()
    bits = copy.view(-1).view(word)
    mask = 1 << bit
    bits[element] ^= mask - (1 << 8 * tensor.element_size()) if mask >> (8 * tensor.element_size() - 1) else mask
    return copy


def mixed(z: int) -> int:
    """SplitMix64's output function."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_hand(name: str, tensor: Tensor) -> tuple[int, int]:
    """The formula of the module, in Python's integers."""
    seed = lambda *words: int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")  # noqa: E731
    key = lambda start, i: mixed((start + (i + 1) * 0x9E3779B97F4A7C15) & MASK) | 1  # noqa: E731
    word = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    bits = tensor.view(word).tolist()
    found = []
    for lane in (0, 1):
        tag = seed("tensor", name, tuple(tensor.shape), tensor.dtype, lane) | 1
        rows, columns = seed("rows", name, lane), seed("columns", lane)
        total = 0
        for r, row in enumerate(bits):
            total += key(rows, r) * (tag + sum(key(columns, c) * x for c, x in enumerate(row)))
        found.append(total & MASK)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_formula_that_it_says(dtype: torch.dtype) -> None:
    tensor = drawn((7, 5), dtype)
    assert attest([whole("a.weight", tensor)]).parts == {"a.weight": by_hand("a.weight", tensor)}


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 39), max_size=4),
    across=st.integers(0, 39),
    dtype=st.sampled_from([*TYPES, torch.float64, torch.float16]),
)
def test_pieces_add_up_to_the_whole(rows: int, columns: int, cuts: list[int], across: int, dtype: torch.dtype) -> None:
    tensor = drawn((rows, columns), dtype)
    edges = sorted({0, rows, *(c % rows for c in cuts)})
    added = Attestation()
    for start, stop in pairwise(edges):
        for first, last in ((0, across % columns), (across % columns, columns)):
            if first < last:
                piece = Shard("a", (rows, columns), tensor[start:stop, first:last], start, first)
                added = added + attest([piece])
    assert added == attest([whole("a", tensor)])


@settings(deadline=None, max_examples=200)
@given(element=st.integers(0, 12 * 9 - 1), bit=st.integers(0, 31), dtype=st.sampled_from(TYPES))
def test_one_flipped_bit_changes_it(element: int, bit: int, dtype: torch.dtype) -> None:
    tensor = drawn((12, 9), dtype)
    other = flipped(tensor, element, bit % (8 * tensor.element_size()))
    left, right = attest([whole("a", tensor)]), attest([whole("a", other)])
    assert left.differing(right) == ["a"]
    assert str(left) != str(right)
    assert all(one != two for one, two in zip(left.parts["a"], right.parts["a"], strict=True)), "in each lane"


@pytest.mark.parametrize("dtype", TYPES)
def test_two_signs_rows_columns_names_types_and_zeros_are_not_mistaken(dtype: torch.dtype) -> None:
    tensor = drawn((12, 9), dtype)
    top = 8 * tensor.element_size() - 1
    ours = attest([whole("a", tensor)])
    others = {
        "two signs": flipped(flipped(tensor, 3, top), 70, top),
        "rows": tensor.flip(0),
        "columns": tensor.flip(1),
        "shape": tensor.reshape(9, 12),
        "rotated": tensor.view(-1).roll(1).view(12, 9),
    }
    for what, other in others.items():
        assert attest([whole("a", other)]) != ours, what
    assert str(attest([whole("b", tensor)])) != str(ours)
    zeros = torch.zeros(4, 4, dtype=dtype)
    assert str(attest([whole("a", tensor), whole("z", zeros)])) != str(ours), "a tensor of zeros is counted"
    assert attest([whole("z", zeros)]) != attest([whole("z", torch.zeros(4, 5, dtype=dtype))])


def test_no_piece_and_a_scalar() -> None:
    assert attest([]) == Attestation()
    assert attest([Shard("a", (3, 0), torch.zeros(3, 0))]).parts == {"a": (0, 0)}
    assert attest([whole("s", torch.tensor(2.5))]) != attest([whole("s", torch.tensor(2.0))])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_copy_that_a_reader_keeps_is_looked_at(dtype: torch.dtype) -> None:
    tensor = drawn((6, 4), dtype)
    once = attest_views([("a", tensor)])
    assert attest_views([("a", tensor), ("a", tensor)]) == once
    assert attest_views([("a", tensor), ("a", tensor.clone())]) == once
    assert attest_views([("a", tensor), ("a", flipped(tensor, 5, 3))]) != once
    assert once == attest([whole("a", tensor)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_engines_views_are_the_modules_tensors(family: str, dtype: torch.dtype) -> None:
    """Fused or not, tied or not: what the decoder reads has the names, shapes and bits of the module."""
    from posttrain.engine.models.language_model import adopt_module
    from posttrain.engine.rollout.worker import open_rollout

    module = families.build(family).to(dtype)
    wanted = attest(whole(name, p.detach().clone()) for name, p in module.named_parameters())
    engine: Any = open_rollout(adopt_module(module))
    assert attest_views(engine.attest(()).views) == wanted
    held = [whole(name, p.detach()) for name, p in module.named_parameters()]
    assert differing_aliases(held, engine.attest(()).views) == []


def test_an_alias_that_reads_elsewhere_is_named(tmp_path: Path) -> None:
    module = families.build("qwen3")
    held = [whole(name, p.detach()) for name, p in module.named_parameters()]
    views = [(shard.name, shard.tensor) for shard in held]
    stale = views[3][1].clone()
    assert differing_aliases(held, [*views[:3], (views[3][0], stale), *views[4:]]) == [], "equal bits are equal"
    stale.view(-1)[0] += 1
    assert differing_aliases(held, [*views[:3], (views[3][0], stale), *views[4:]]) == [views[3][0]]
    assert differing_aliases(held, views[1:]) == [views[0][0]]
    assert differing_aliases(held, [*views, ("more.weight", stale)]) == ["more.weight"]
