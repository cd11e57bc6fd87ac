"""The likeliest tokens of a model, and its log-probabilities of given ones, against plain softmax in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine_recipes import TINY, TOKENIZER, scalar
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models import logprobs as logprobs_module
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import LanguageModel, OutputHead, adopt_module
from posttrain.engine.models.logprobs import candidate_logprobs, likeliest_tokens, predict, predict_topk, token_logprobs
from posttrain.engine.wide import TopK, WideColumn

LENGTHS, K, TEMPERATURE = (7, 0, 5, 9), 4, 0.7
VOCABULARY = len(TOKENIZER.get_vocab())
TORCH: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS: dict[str, tuple[bool, float | None]] = {"plain": (False, None), "with bias and soft cap": (True, 1.5)}


def batch() -> TokenBatch:
    draws = torch.Generator().manual_seed(2)
    tokens = [torch.randint(7, VOCABULARY, (3 + length,), generator=draws).tolist() for length in LENGTHS]
    return TokenBatch.pack([Document(row[:3], row[3:]) for row in tokens])


def model(head: str, dtype: torch.dtype) -> LanguageModel:
    """Of two layers' width, with an output head of its own whose logits are far apart."""
    found = adopt_module(initial_model(TINY, TOKENIZER, 3))
    bias, softcap = HEADS[head]
    layer = nn.Linear(TINY.hidden_size, VOCABULARY, bias=bias)
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.7)
    layer.to(dtype).requires_grad_()
    found.module.to(dtype)
    return replace(found, head=OutputHead(layer, softcap))


def given() -> Tensor:
    """Tokens to ask for, some of them twice in a row, some the response's own."""
    packed, rows = batch(), sum(LENGTHS)
    ids = torch.randint(0, VOCABULARY, (rows, K), generator=torch.Generator().manual_seed(5))
    ids[:, 1] = packed.tokens[packed.response_mask]
    ids[::3, 2] = ids[::3, 3]
    return ids.to(torch.int32)


def reference(of: LanguageModel) -> Tensor:
    """[R, V] log-probabilities by the definition, one document at a time."""
    packed, found, start = batch(), [], 0
    assert of.head is not None
    for length, response in zip(packed.lengths, LENGTHS, strict=True):
        tokens = packed.tokens[start : start + length]
        hidden = of.hidden_states(tokens, torch.arange(length), (length,))[length - response - 1 : length - 1]
        found.append((of.head.logits(hidden) / TEMPERATURE).log_softmax(-1))
        start += length
    return torch.cat(found)


def parameters(of: LanguageModel) -> list[Tensor]:
    assert of.head is not None
    inner = [p for name, p in of.module.named_parameters() if "lm_head" not in name]
    return [*of.head.layer.parameters(), *inner]


def gradients(of: LanguageModel, said: tuple[Tensor, Tensor]) -> Tensor:
    """Of a weighted sum of both, as one vector."""
    draws = torch.Generator().manual_seed(6)
    weights = [torch.randn(one.shape, generator=draws, dtype=torch.float64).to(one.dtype) for one in said]
    total = sum((one * weight).sum() for one, weight in zip(said, weights, strict=True))
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(total, parameters(of), allow_unused=True)
    return torch.cat([torch.zeros(0), *(part.double().flatten() for part in found if part is not None)]).double()


def computed(of: LanguageModel) -> tuple[Tensor, Tensor]:
    logprobs, _, at = candidate_logprobs(of, batch(), given(), TEMPERATURE)
    return logprobs[batch().response_mask], at


def exact(head: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """What a float64 copy of the float32 model says, and its gradient."""
    of = model(head, torch.float64)
    whole, packed = reference(of), batch()
    own = whole.gather(1, packed.tokens[packed.response_mask][:, None])[:, 0]
    said = own, whole.gather(1, given().long())
    return (own.detach(), said[1].detach()), gradients(of, said)


@pytest.fixture(params=["plain", "in chunks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in chunks":
        monkeypatch.setattr(logprobs_module, "CHUNKED_ABOVE", 0)
        monkeypatch.setattr(logprobs_module, "chunk_rows", lambda *_: 5)
    return str(request.param)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-5)])
def test_log_probabilities_of_given_tokens_and_their_gradient(way: str, head: str, dtype: str, close: float) -> None:
    of = model(head, TORCH[dtype])
    said, (wanted, gradient) = computed(of), exact(head)
    for found, right in zip(said, wanted, strict=True):
        assert found.dtype == TORCH[dtype]
        assert float((found.detach().double() - right).abs().max()) <= close * float(right.abs().max())
    found = gradients(of, said)
    assert float((found - gradient).norm() / gradient.norm()) <= close


@pytest.mark.parametrize("head", HEADS)
def test_in_bfloat16_chunks_are_no_further_from_the_truth_than_one_product(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model(head, torch.bfloat16)
    exactly = model(head, torch.bfloat16)
    exactly.module.double()
    assert exactly.head is not None
    exactly.head.layer.double()
    truth = gradients(exactly, computed(exactly))
    whole = gradients(plain, computed(plain))
    monkeypatch.setattr(logprobs_module, "CHUNKED_ABOVE", 0)
    monkeypatch.setattr(logprobs_module, "chunk_rows", lambda *_: 5)
    pieces = gradients(plain, computed(plain))
    errors = [float((found - truth).norm() / truth.norm()) for found in (pieces, whole)]
    assert errors[0] <= 1.1 * errors[1], errors
    assert errors[1] < 0.05


def test_a_token_of_ones_own_is_what_the_single_target_says(way: str) -> None:
    of = model("plain", torch.float32)
    own = batch().tokens[batch().response_mask]
    alone = token_logprobs(of, batch(), temperature=TEMPERATURE, response_only=True)
    together, entropies, at = candidate_logprobs(of, batch(), own[:, None], TEMPERATURE, entropy=True)
    assert torch.equal(together[batch().response_mask], at[:, 0])
    assert torch.allclose(alone, together, atol=1e-6)
    wanted = -(reference(of).exp() * reference(of)).sum(-1)
    assert torch.allclose(entropies[batch().response_mask], wanted, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.1)])
def test_the_likeliest_tokens_and_their_log_probabilities(
    head: str, dtype: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "chunk_rows", lambda *_: 5)
    of = model(head, TORCH[dtype])
    wanted = reference(model(head, torch.float64)).detach()
    found = likeliest_tokens(of, batch(), K, TEMPERATURE)
    assert (found.ids.dtype, list(found.ids.shape)) == (torch.int32, [sum(LENGTHS), K])
    assert float((found.logprobs.double() - wanted.gather(1, found.ids.long())).abs().max()) <= close * 10
    if dtype != "bfloat16":  # where two may change places
        values, ids = wanted.topk(K)
        assert torch.equal(found.ids.long(), ids)
        assert float((found.logprobs.double() - values).abs().max()) <= close * 10
    assert (found.logprobs[:, :-1] >= found.logprobs[:, 1:]).all(), "likeliest first"


def test_tokens_that_a_smaller_model_lacks_are_left_out_and_keep_their_probability() -> None:
    of = model("plain", torch.float64)
    whole, part = reference(of).detach(), likeliest_tokens(of, batch(), K, TEMPERATURE, vocabulary=9)
    values, ids = whole[:, :9].topk(K)
    assert torch.equal(part.ids.long(), ids)
    assert torch.allclose(part.logprobs, values, atol=1e-12), "of the whole distribution, not of what is left"


class Largest(TorchDispatchMode):
    """The most elements that anything made meanwhile has."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for one in answer if isinstance(answer, tuple | list) else (answer,):
            if isinstance(one, Tensor):
                self.found = max(self.found, one.numel())
        return answer


@pytest.mark.parametrize("what", ["likeliest", "candidates", "candidates' gradient"])
def test_the_logits_of_a_whole_batch_never_exist(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "CHUNKED_ABOVE", 0)
    monkeypatch.setattr(logprobs_module, "chunk_rows", lambda *_: 1)
    of = model("plain", torch.float32)
    layer = nn.Linear(TINY.hidden_size, 20 * VOCABULARY)
    of = replace(of, head=OutputHead(layer, None))
    run: dict[str, Callable[[], object]] = {
        "likeliest": lambda: likeliest_tokens(of, batch(), K, TEMPERATURE),
        "candidates": lambda: candidate_logprobs(of, batch(), given(), TEMPERATURE),
        "candidates' gradient": lambda: computed(of)[1].sum().backward(),  # type: ignore[no-untyped-call]
    }
    monkeypatch.setattr(type(of), "vocab_size", property(lambda _: 20 * VOCABULARY))
    with Largest() as largest:
        run[what]()
    assert largest.found < sum(LENGTHS) * 20 * VOCABULARY, "nothing has R x V elements; the head has fewer"


def test_what_cannot_be_predicted_is_one_line() -> None:
    of, packed = model("plain", torch.float32), batch()
    for top, most in ((0, VOCABULARY), (VOCABULARY + 1, VOCABULARY), (10, 9)):
        limit = 9 if most == 9 else None
        with pytest.raises(
            InputError, match=rf"^top_k must be from 1 to {most}, the size of the vocabulary, got {top}"
        ):
            predict_topk(of, packed, top, vocabulary=limit)
    with pytest.raises(InputError, match="predicts values and scores, got topk; request it from another role"):
        predict_topk(scalar(), packed, 2)
    with pytest.raises(InputError, match="got topk; request it from another role"):
        predict(of, packed, {"topk"})
    with pytest.raises(InputError, match="got candidates; request it from another role"):
        predict(scalar(), packed, {"candidates"})
    with pytest.raises(InputError, match="must have a wide column candidates, got none"):
        predict(of, packed, {"candidates"})
    with pytest.raises(InputError, match="temperature must be > 0"):
        predict_topk(of, packed, 2, temperature=0.0)


def test_all_that_a_loss_may_need_is_told_together() -> None:
    of, packed, ids = model("plain", torch.float32), batch(), given()
    counts = packed.response_lengths.tolist()
    starts = [sum(counts[:at]) for at in range(len(counts))]
    parts = tuple(TopK(ids[s : s + n], torch.zeros(n, K)) for s, n in zip(starts, counts, strict=True))
    packed = packed.with_wide("candidates", WideColumn(K, parts))
    told = predict(of, packed, {"logprobs", "entropy", "candidates"}, temperature=TEMPERATURE)
    assert list(told.of("candidates").shape) == [sum(LENGTHS), K]
    both = predict(of, batch(), {"logprobs", "entropy"}, temperature=TEMPERATURE)
    assert torch.allclose(told.of("logprobs"), both.of("logprobs"), atol=1e-6)
    assert torch.allclose(told.of("entropy"), both.of("entropy"), atol=1e-6)
    without = predict(of, packed.select([]).dummy(), {"logprobs", "candidates"})
    assert list(without.of("candidates").shape) == [0, K]
    assert without.of("candidates").requires_grad
