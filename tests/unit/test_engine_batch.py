"""Packed batches: layout, micro-batches, selection, advantages, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from batches import pieces
from hypothesis import given, strategies as st

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, Provenance, TokenBatch

tokens = st.lists(st.integers(0, 99), max_size=9)
documents = st.lists(
    st.builds(Document, st.lists(st.integers(0, 99), min_size=1, max_size=9), tokens), min_size=1, max_size=12
)


def scored(document: Document) -> Document:
    return Document(document.prompt, document.response, [-0.5 - token for token in document.response])


def test_pack_lays_documents_end_to_end() -> None:
    batch = TokenBatch.pack([Document((1, 7), (9, 2), (-0.5, -1.5)), Document((1,), (2,), (-2.0,))])
    assert batch.tokens.tolist() == [1, 7, 9, 2, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.lengths == (4, 2)
    assert batch.response_mask.tolist() == [False, False, True, True, False, True]
    assert batch.column("behaviour_logprobs").tolist() == [0.0, 0.0, -0.5, -1.5, 0.0, -2.0]
    assert batch.document_index.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.response_lengths.tolist() == [2, 1]


def test_advantages_reach_response_tokens_only() -> None:
    batch = TokenBatch.pack([Document((1, 7), (9, 2)), Document((1,), (2,))])
    assert batch.spread(torch.tensor([0.5, -1.0])).tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, -1.0]


def test_a_batch_cannot_be_changed() -> None:
    batch = TokenBatch.pack([Document((1,), (2,))])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.lengths = (1,)  # type: ignore[misc]


@given(documents, st.integers(1, 40))
def test_micro_batches_keep_documents_whole(docs: list[Document], budget: int) -> None:
    batch = TokenBatch.pack([scored(d) for d in docs], provenance=Provenance(step=3, role="policy"))
    parts = pieces(batch.with_columns(advantages=batch.spread(torch.arange(len(docs)).float())), budget)
    assert sorted(sum((part.lengths for part in parts), ())) == sorted(batch.lengths)
    assert all(sum(part.lengths) <= budget or part.documents == 1 for part in parts)
    assert all(part.provenance == batch.provenance for part in parts)


@given(documents, st.randoms())
def test_select_equals_packing_the_selected(docs: list[Document], random: object) -> None:
    docs = [scored(d) for d in docs]
    chosen = random.choices(range(len(docs)), k=3)  # type: ignore[attr-defined]
    selected, packed = TokenBatch.pack(docs).select(chosen), TokenBatch.pack([docs[i] for i in chosen])
    assert selected.lengths == packed.lengths
    for name in ("tokens", "positions", "response_mask"):
        assert torch.equal(getattr(selected, name), getattr(packed, name))
    assert torch.equal(selected.column("behaviour_logprobs"), packed.column("behaviour_logprobs"))


@given(documents)
def test_sum_by_document(docs: list[Document]) -> None:
    batch = TokenBatch.pack(docs)
    wanted = [sum(d.prompt) + sum(d.response) for d in docs]
    assert batch.sum_by_document(batch.tokens).tolist() == wanted


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "at least one document"),
        ([Document((), (1,))], "document 0 has an empty prompt"),
        ([Document((1,), (2, 3), (-1.0,))], r"one log-probability per response token \(2\), got 1"),
        ([Document((1,), (2,), (-1.0,)), Document((1,), (2,))], "all 2 documents or for none, but are given for 1"),
    ],
)
def test_pack_refuses(documents: list[Document], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TokenBatch.pack(documents)


def test_bad_arguments_are_named() -> None:
    batch = TokenBatch.pack([Document((1,), (2,))])
    with pytest.raises(InputError, match=r"\[1\], got \[2\]"):
        batch.spread(torch.zeros(2))
    with pytest.raises(InputError, match="got 1"):
        batch.select([1])
