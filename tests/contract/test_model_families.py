"""One contract for every model family: packing changes nothing that can be computed document by document.

The reference is the family's own eager attention on one unpadded document at a time.
"""

from __future__ import annotations

import copy
from functools import cache

import families
import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from posttrain.domain.errors import InputError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models import logprobs as logprobs_module
from posttrain.engine.models.backbone import plan_packing
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs, token_logprobs_and_entropy
from posttrain.pacing.balance import micro_batches

SHAPES = [(5, 9), (3, 2), (11, 9), (1, 1), (4, 20), (2, 12), (7, 7)]  # prompt and response tokens
TEMPERATURE = 0.7


def make_documents(shapes: list[tuple[int, int]], seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, families.VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    return [Document(draw(prompt), draw(response)) for prompt, response in shapes]


DOCUMENTS = make_documents(SHAPES)


@cache
def adopted(family: str) -> LanguageModel:
    return adopt_module(families.build(family))


@cache
def reference(family: str) -> torch.nn.Module:
    return families.build(family, attention="eager")


def reference_logprobs(module: torch.nn.Module, document: Document) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all tokens but the first."""
    ids = torch.tensor([*document.prompt, *document.response])
    logits = module(ids[None], attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[0, :-1]
    distribution = (logits / TEMPERATURE).log_softmax(-1)
    return distribution.gather(1, ids[1:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(module: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(params=["plain", "chunked"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing log-probabilities; chunks of seven rows in the second."""
    if request.param == "chunked":
        monkeypatch.setattr(logprobs_module, "CHUNKED_ABOVE", 0)
        monkeypatch.setattr(logprobs_module, "chunk_rows", lambda vocabulary, hidden: 7)
    return str(request.param)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_packs(family: str) -> None:
    model = adopted(family)
    assert model.packing == "packed"
    assert model.head is not None
    assert model.eos_token_ids == (families.EOS,)
    assert (model.vocab_size, model.context_length) == (families.VOCABULARY, families.CONTEXT)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_packed_equals_single_documents(family: str) -> None:
    batch = TokenBatch.pack(DOCUMENTS)
    logprobs, entropies = token_logprobs_and_entropy(adopted(family), batch, temperature=TEMPERATURE)
    expected = [reference_logprobs(reference(family), d) for d in DOCUMENTS]
    zero = torch.zeros(1)
    torch.testing.assert_close(logprobs, torch.cat([torch.cat([zero, e[0]]) for e in expected]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, torch.cat([torch.cat([zero, e[1]]) for e in expected]), atol=1e-5, rtol=1e-5)
    assert torch.equal(logprobs, token_logprobs(adopted(family), batch, temperature=TEMPERATURE)) or torch.allclose(
        logprobs, token_logprobs(adopted(family), batch, temperature=TEMPERATURE), atol=1e-6
    )


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradients_are_the_sum_over_documents(family: str) -> None:
    model, single = adopted(family), reference(family)
    logprobs, entropies = token_logprobs_and_entropy(model, TokenBatch.pack(DOCUMENTS), temperature=TEMPERATURE)
    found = gradients(model.module, logprobs.sum() + 0.3 * entropies.square().sum())
    parts = [reference_logprobs(single, d) for d in DOCUMENTS]
    expected = gradients(single, sum(lp.sum() + 0.3 * en.square().sum() for lp, en in parts))
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_document_does_not_see_the_others(family: str) -> None:
    model = adopted(family)
    others = make_documents(SHAPES, seed=1)
    mixed = [*others[:3], DOCUMENTS[3], *others[4:]]
    start, end = sum(TokenBatch.pack(DOCUMENTS).lengths[:3]), sum(TokenBatch.pack(DOCUMENTS).lengths[:4])
    with torch.no_grad():
        kept, changed = (token_logprobs(model, TokenBatch.pack(d)) for d in (DOCUMENTS, mixed))
    assert torch.equal(kept[start:end], changed[start:end])
    assert not torch.allclose(kept[:start], changed[:start], atol=1e-3)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_micro_batches_change_nothing(family: str, budget: int) -> None:
    model, batch = adopted(family), TokenBatch.pack(DOCUMENTS)
    whole = token_logprobs(model, batch)
    shards = micro_batches(batch.lengths, batch.lengths, budget)
    pieces = [batch.with_columns(whole=whole).select(shard) for shard in shards]
    parts = torch.cat([token_logprobs(model, piece) for piece in pieces])
    torch.testing.assert_close(parts, torch.cat([piece.column("whole") for piece in pieces]), atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(model.module, parts.sum()), gradients(model.module, whole.sum()))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradient_checkpointing_sees_the_same_plan(family: str) -> None:
    module = copy.deepcopy(adopted(family).module)
    model = LanguageModel(module, "packed", None)
    batch = TokenBatch.pack(DOCUMENTS)
    expected = gradients(module, token_logprobs(model, batch).sum())
    module.activation_checkpointing_enable({"use_reentrant": False})
    module.train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    assert_same_gradients(gradients(module, token_logprobs(model, batch).sum()), expected)


def test_response_only_is_a_part_of_all() -> None:
    batch = TokenBatch.pack(DOCUMENTS)
    every = token_logprobs(adopted("qwen3"), batch)
    response = token_logprobs(adopted("qwen3"), batch, response_only=True)
    torch.testing.assert_close(response, every * batch.response_mask, atol=1e-6, rtol=0)


def test_bad_requests_are_named() -> None:
    long = TokenBatch.pack([Document([1] * 90, [2] * 10)])
    with pytest.raises(InputError, match="context of 96 tokens, got 100"):
        token_logprobs(adopted("qwen3"), long)
    with pytest.raises(InputError, match="temperature must be > 0, got 0"):
        token_logprobs(adopted("qwen3"), TokenBatch.pack(DOCUMENTS), temperature=0)


def test_a_prompt_of_one_token_alone_has_no_logprobs() -> None:
    assert token_logprobs(adopted("qwen3"), TokenBatch.pack([Document((5,), ())])).tolist() == [0.0]


@pytest.mark.parametrize("lengths", [(3, 3, 3), (1,), (40, 1, 1, 1), tuple(range(1, 60)), (5, 90, 7, 88, 6, 300)])
def test_a_plan_finds_every_token_once(lengths: tuple[int, ...]) -> None:
    plan = plan_packing(lengths)
    laid = torch.cat([block.index for block in plan.blocks])
    total = sum(lengths)
    back = laid if plan.inverse is None else laid[plan.inverse]
    assert torch.equal(back, torch.arange(total))
    assert len(laid) <= 2 * total + 200


class IgnoresThePlan(LlamaForCausalLM):
    """A model that does not hand unknown arguments to its attention."""

    def forward(self, *args: object, packing_plan: object = None, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)


class HidesTheWindow(LlamaForCausalLM):
    """A model whose configuration promises a sliding window that its attention never asks for."""


def llama_as(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    source = families.build("llama")
    module = kind(copy.deepcopy(source.config)).eval()
    module.load_state_dict(source.state_dict())
    return module


def test_a_model_that_cannot_pack_is_padded_and_right() -> None:
    model = adopt_module(llama_as(IgnoresThePlan))
    assert model.packing == "padded"
    batch = TokenBatch.pack(DOCUMENTS)
    found = token_logprobs(model, batch)
    expected = token_logprobs(adopted("llama"), batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(model.module, found.sum()), gradients(adopted("llama").module, expected.sum()))


def test_a_window_that_the_attention_does_not_honour_is_noticed() -> None:
    module = llama_as(HidesTheWindow)
    module.config.sliding_window = 5
    assert adopt_module(module).packing == "padded"


def test_a_family_without_pluggable_attention_is_padded() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=families.VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
        module = BloomForCausalLM(config).eval()
    model = adopt_module(copy.deepcopy(module))
    assert model.packing == "padded"
    found = token_logprobs(model, TokenBatch.pack(DOCUMENTS), temperature=TEMPERATURE)
    expected = torch.cat([torch.cat([torch.zeros(1), reference_logprobs(module, d)[0]]) for d in DOCUMENTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_unusual_output_head_is_left_to_the_module() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        config = GraniteConfig(**shape, num_attention_heads=4, num_key_value_heads=2, logits_scaling=3.0)
        module = GraniteForCausalLM(config).eval()
    model = adopt_module(copy.deepcopy(module))
    assert (model.packing, model.head) == ("packed", None)
    found = token_logprobs(model, TokenBatch.pack(DOCUMENTS), temperature=TEMPERATURE)
    expected = torch.cat([torch.cat([torch.zeros(1), reference_logprobs(module, d)[0]]) for d in DOCUMENTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
