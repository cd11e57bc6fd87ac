"""Columns, sharding and gathering of a packed batch: what worker groups do with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, Provenance, TokenBatch

DOCUMENTS = [Document((1, 2), (3,), (-0.5,)), Document((4,), (5, 6, 7), (-0.1, -0.2, -0.3)), Document((8,), (), ())]


def _batch() -> TokenBatch:
    ids = [f"3.{i}.0" for i in range(len(DOCUMENTS))]
    return TokenBatch.pack(DOCUMENTS, provenance=Provenance(3, "rollout", versions=("0.3",)), sample_ids=ids)


def test_new_columns_make_a_new_batch_and_leave_the_old_one() -> None:
    before = _batch()
    after = before.with_columns(values=torch.arange(8.0), returns=torch.ones(8))
    assert before.values is None
    assert after.values is not None
    assert after.values.tolist() == list(range(8))
    assert after.provenance == before.provenance
    with pytest.raises(InputError, match="'tokens'"):
        before.with_columns(tokens=torch.zeros(8))
    with pytest.raises(InputError, match=r"must have shape \[8\], got \[3\]"):
        before.with_columns(values=torch.zeros(3))


def test_a_selection_takes_columns_and_ids_along() -> None:
    batch = _batch().with_columns(values=torch.arange(8.0)).select([1, 0])
    assert batch.values is not None
    assert batch.values.tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert batch.sample_ids == ("3.1.0", "3.0.0")
    assert batch.seen_by("critic", 1).provenance == Provenance(3, "critic", 1, ("0.3",))


def test_the_empty_selection_is_an_empty_batch() -> None:
    empty = _batch().select([])
    assert (len(empty), empty.tokens.shape, empty.sample_ids) == (0, (0,), ())
    assert empty.split(10) == []


def test_a_filler_carries_no_loss() -> None:
    filler = TokenBatch.filler()
    assert (len(filler), bool(filler.response_mask.any())) == (1, False)
    assert filler.advantages is not None


@given(st.data())
def test_gathering_what_was_sharded_gives_the_batch_back(data: st.DataObject) -> None:
    documents = [Document((1,) * n, (2,) * n, (-float(n),) * n) for n in range(1, data.draw(st.integers(1, 9)) + 1)]
    batch = TokenBatch.pack(documents, sample_ids=[str(i) for i in range(len(documents))])
    ranks = data.draw(st.integers(1, 5))
    places = [data.draw(st.integers(0, ranks - 1)) for _ in documents]
    shards = [[i for i, place in enumerate(places) if place == rank] for rank in range(ranks)]
    parts = [batch.select(shard) for shard in shards]
    gathered = TokenBatch.gather(parts, shards)
    assert gathered.lengths == batch.lengths
    assert gathered.sample_ids == batch.sample_ids
    assert torch.equal(gathered.tokens, batch.tokens)
    assert gathered.behaviour_logprobs is not None
    assert batch.behaviour_logprobs is not None
    assert torch.equal(gathered.behaviour_logprobs, batch.behaviour_logprobs)


def test_parts_that_do_not_fit_are_refused() -> None:
    batch = _batch()
    with pytest.raises(InputError, match="must have"):
        TokenBatch.gather([batch], [[0]])
    with pytest.raises(InputError, match="same columns, got values"):
        TokenBatch.gather([batch.select([0]), batch.select([1, 2]).with_columns(values=torch.ones(5))], [[0], [1, 2]])
    with pytest.raises(InputError, match="one per document"):
        TokenBatch.pack(DOCUMENTS, sample_ids=["a"])
