"""Columns, sharding and gathering of a packed batch: what worker groups do with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, Provenance, TokenBatch

DOCUMENTS = [Document((1, 2), (3,), (-0.5,)), Document((4,), (5, 6, 7), (-0.1, -0.2, -0.3)), Document((8,), (), ())]


def _batch() -> TokenBatch:
    ids = [f"3.{i}.0" for i in range(len(DOCUMENTS))]
    return TokenBatch.pack(DOCUMENTS, provenance=Provenance(3, "rollout"), sample_ids=ids)


def test_new_columns_make_a_new_batch_and_leave_the_old_one() -> None:
    before = _batch()
    after = before.with_columns(values=torch.arange(8.0), returns=torch.ones(8))
    assert "values" not in before.token_columns
    assert after.column("values").tolist() == list(range(8))
    assert after.provenance == before.provenance
    labelled = after.with_document_columns(labels=torch.tensor([1.0, 0.0, 1.0]))
    assert labelled.column("labels").tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(InputError, match=r"must have shape \[T\] = \[8\], got \[3\]"):
        before.with_columns(values=torch.zeros(3))
    with pytest.raises(InputError, match=r"must have shape \[D\] = \[3\], got \[8\]"):
        before.with_document_columns(labels=torch.zeros(8))
    with pytest.raises(InputError, match="column labels exists both per token and per document"):
        labelled.with_columns(labels=torch.zeros(8))
    with pytest.raises(InputError, match="must have a column advantages, got behaviour_logprobs, values, returns"):
        after.column("advantages")


def test_a_selection_takes_columns_and_ids_along() -> None:
    whole = _batch().with_columns(values=torch.arange(8.0)).with_document_columns(labels=torch.arange(3))
    batch = whole.select([1, 0])
    assert batch.column("values").tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert batch.column("labels").tolist() == [1, 0]
    assert batch.sample_ids == ("3.1.0", "3.0.0")
    assert batch.seen_by("critic", 1).provenance == Provenance(3, "critic", 1)


def test_the_empty_selection_is_an_empty_batch() -> None:
    empty = _batch().select([])
    assert (len(empty), empty.tokens.shape, empty.sample_ids) == (0, (0,), ())
    assert empty.column("behaviour_logprobs").shape == (0,)


def test_a_dummy_has_the_columns_and_carries_no_loss() -> None:
    batch = _batch().with_columns(advantages=torch.ones(8)).with_document_columns(labels=torch.ones(3))
    for dummy in (batch.dummy(), batch.select([]).dummy()):  # of a rank without documents too
        assert (len(dummy), bool(dummy.response_mask.any()), dummy.units) == (2, False, None)
        assert dummy.column("advantages").tolist() == [0.0] * 4
        assert dummy.column("labels").tolist() == [0.0] * 2
    assert TokenBatch.pack(DOCUMENTS[:2], unit=2).dummy().units == (2,)


def test_the_dummy_of_a_rank_without_units_is_one_unit_of_their_size() -> None:
    """A loss over units of three would fail on that rank alone, and the others would wait for it."""
    ranked = TokenBatch.pack(DOCUMENTS, unit=3).with_document_columns(labels=torch.arange(3.0))
    for dummy in (ranked.dummy(), ranked.select_items([]).dummy(), TokenBatch.gather([ranked], [[0]]).dummy()):
        assert (dummy.units, len(dummy), dummy.lengths) == ((3,), 3, (2, 2, 2))
        assert dummy.column("labels").shape == (3,)
        assert dummy.column("behaviour_logprobs").shape == (6,)
    assert TokenBatch.pack(DOCUMENTS, unit=1).select_items([]).dummy().units == (1,)


@pytest.mark.parametrize("what", ["units", "sample_ids", "versions"])
def test_parts_of_which_only_some_have_units_or_ids_are_not_gathered(what: str) -> None:
    one = TokenBatch.pack([Document((1,), (2,), versions=("0.1",))], sample_ids=["0.0.0"], unit=1)
    other = replace(one, **{what: None if what == "units" else ()})  # type: ignore[arg-type]
    for parts in ([one, other], [other, one]):
        with pytest.raises(InputError, match=f"must all have {what} or none"):
            TokenBatch.gather(parts, [[0], [1]])
    empty = other.select_items([])
    assert TokenBatch.gather([one, empty], [[0], []]).units == (1,), "a part without documents says nothing"


@given(st.data())
def test_gathering_what_was_sharded_gives_the_batch_back(data: st.DataObject) -> None:
    unit, count = data.draw(st.sampled_from([None, 2, 3])), data.draw(st.integers(1, 9))
    sizes = range(1, count * (unit or 1) + 1)
    documents = [Document((1,) * n, (2,) * n, (-float(n),) * n) for n in sizes]
    batch = TokenBatch.pack(documents, sample_ids=[str(i) for i in range(len(documents))], unit=unit)
    batch = batch.with_document_columns(place=torch.arange(len(documents)))
    ranks = data.draw(st.integers(1, 5))
    places = [data.draw(st.integers(0, ranks - 1)) for _ in range(count)]
    shards = [[i for i, place in enumerate(places) if place == rank] for rank in range(ranks)]
    parts = [batch.select_items(shard) for shard in shards]
    assert all(len(part) == len(shard) * (unit or 1) for part, shard in zip(parts, shards, strict=True))
    gathered = TokenBatch.gather(parts, shards)
    assert gathered.lengths == batch.lengths
    assert gathered.units == batch.units
    assert torch.equal(gathered.column("place"), batch.column("place"))
    assert gathered.sample_ids == batch.sample_ids
    assert torch.equal(gathered.tokens, batch.tokens)
    assert torch.equal(gathered.column("behaviour_logprobs"), batch.column("behaviour_logprobs"))


def test_documents_of_a_unit_are_never_separated() -> None:
    batch = TokenBatch.pack([Document((1,), (2,) * n) for n in (1, 5, 3, 2)], unit=2)
    assert (batch.units, batch.item_lengths) == ((2, 2), (8, 7))
    assert batch.select_items([1]).lengths == (4, 3)
    with pytest.raises(InputError, match="must stay together"):
        batch.select([0])
    with pytest.raises(InputError, match=r"index of a unit must be in 0\.\.1, got 2"):
        batch.select_items([2])
    with pytest.raises(InputError, match="must be a multiple of 2, got 3"):
        TokenBatch.pack(DOCUMENTS, unit=2)


def test_parts_that_do_not_fit_are_refused() -> None:
    batch = _batch()
    with pytest.raises(InputError, match="must have"):
        TokenBatch.gather([batch], [[0]])
    with pytest.raises(InputError, match="same columns, but only some parts have values"):
        TokenBatch.gather([batch.select([0]), batch.select([1, 2]).with_columns(values=torch.ones(5))], [[0], [1, 2]])
    with pytest.raises(InputError, match="one per document"):
        TokenBatch.pack(DOCUMENTS, sample_ids=["a"])
