"""Parcels: what travels between processes arrives equal, and as the receiver's own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.port import Parcel, RankContext, StoredAway, check_importable, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]


def no_store(handle: Any) -> Parcel:
    raise AssertionError(f"nothing was stored, asked for {handle}")


def there(value: object) -> Any:
    """As another process would get it: no memory is shared with the sender's."""
    parcel = pack(value)
    sent = Parcel(tuple(bytes(buffer) for buffer in parcel.buffers), parcel.handles, parcel.size)
    assert parcel.size == sum(len(buffer) for buffer in sent.buffers)
    return unpack(sent, no_store)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
def test_tensors_arrive_equal_and_writable(dtype: torch.dtype, shape: list[int], transposed: bool) -> None:
    count = int(np.prod(shape)) if shape else 1
    tensor = torch.arange(count).reshape(shape).to(dtype)
    tensor = tensor.transpose(0, -1) if transposed and len(shape) > 1 else tensor
    got = there({"x": [tensor]})["x"][0]
    assert got.dtype == dtype
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)
    got.zero_()  # no shared, read-only memory
    assert torch.equal(tensor, torch.arange(count).reshape(shape).to(dtype).transpose(0, -1)) or not transposed


def test_parameters_and_gradients() -> None:
    module = torch.nn.Linear(3, 2)
    got = there(module)
    assert isinstance(got.weight, torch.nn.Parameter)
    assert got.weight.requires_grad
    assert torch.equal(got.weight, module.weight)
    assert there(torch.ones(2, requires_grad=True)).requires_grad
    assert not there(module(torch.ones(3))).requires_grad, "no graph crosses"


def test_the_same_tensor_twice_travels_once() -> None:
    tensor = torch.ones(10_000)
    assert pack([tensor, tensor]).size < 1.1 * pack(tensor).size
    first, second = there([tensor, tensor])
    assert first is second


def test_a_tensor_adds_little_to_its_bytes() -> None:
    tensor = torch.zeros(100_000)
    assert tensor.nbytes < pack(tensor).size < tensor.nbytes + 500


def test_arrays_batches_and_plain_values() -> None:
    array = np.arange(6.0).reshape(2, 3)
    got = there(array)
    got += 1
    assert np.array_equal(got, array + 1)
    batch = TokenBatch.pack([Document((1, 2), (3,), (-0.1,))], sample_ids=["0.0.0"])
    back = there(batch)
    assert torch.equal(back.tokens, batch.tokens)
    assert back.lengths == batch.lengths
    assert back.sample_ids == batch.sample_ids


@dataclass
class Held:
    names: list[str]
    reference: object


def test_stored_values_travel_as_handles_wherever_they_are() -> None:
    store = {"h1": pack(torch.ones(1000)), "h2": pack("two")}
    first: StoredAway[Any] = StoredAway("h1", store.__getitem__)
    second: StoredAway[Any] = StoredAway("h2", store.__getitem__)
    parcel = pack([Held(["a"], first), {"k": (second, first)}])
    assert parcel.size < 1000
    assert parcel.handles == ("h1", "h2")
    held, nested = unpack(parcel, store.__getitem__)
    assert torch.equal(held.reference.value(), torch.ones(1000))
    assert nested["k"][0].value() == "two"
    assert nested["k"][1] is held.reference


def test_what_another_process_cannot_import_is_refused() -> None:
    def local() -> None:
        """Nothing."""

    check_importable(RankContext.borrow, "a method")
    check_importable(RankContext, "a class")
    for strange in (local, lambda: None):
        with pytest.raises(InputError, match="must be importable by name"):
            check_importable(strange, "a method")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack(lambda: None)


@pytest.mark.slow
def test_groups_load_without_ray() -> None:
    names = ["port", "worker_group", "cluster", "backends.inline"]
    modules = ", ".join(f"posttrain.engine.groups.{name}" for name in names)
    script = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
