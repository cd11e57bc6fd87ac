"""The output head's gradient over chunks of a large vocabulary, in the types that are trained in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models import logprobs as logprobs_module
from posttrain.engine.models.language_model import OutputHead, adopt_module
from posttrain.engine.models.logprobs import (
    chunk_rows,
    chunked_logprobs,
    likeliest_tokens,
    logprobs_of,
    token_logprobs,
)
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import generate
from posttrain.planner import residency

VOCABULARY, HIDDEN, ROWS = 152_064, 8, 192  # as many words as Qwen2.5 has


@cache
def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, hidden states, tokens, and a float64 gradient of the mean log-probability, all bfloat16 can hold."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.5).bfloat16()
    hidden = (1 + 0.3 * torch.randn(ROWS, HIDDEN, generator=generator)).bfloat16()  # sums grow, chunk by chunk
    tokens = torch.randint(0, 50, (ROWS,), generator=generator)  # few words, so that their rows add up
    exact = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    for start in range(0, ROWS, 16):
        part = slice(start, start + 16)
        inner = -(hidden[part].double() @ weight.double().t()).softmax(-1)
        inner[torch.arange(len(inner)), tokens[part]] += 1.0
        exact += inner.t() @ hidden[part].double() / ROWS
    return weight, hidden, tokens, exact


def gradient(dtype: torch.dtype, logprobs: Callable[[OutputHead, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of weight and bias."""
    weight, hidden, tokens, _ = case()
    layer = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    logprobs(OutputHead(layer, None), hidden.to(dtype), tokens).mean().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    return layer.weight.grad.double(), layer.bias.grad.double()


def whole(head: OutputHead, hidden: Tensor, tokens: Tensor) -> Tensor:
    """By one product in the type of the weights, as plain torch does."""
    logits = F.linear(hidden, head.layer.weight, head.layer.bias)
    return logprobs_of(logits, tokens[:, None], 1.0, entropy=False)[0][:, 0]


def chunked(rows: int | None) -> Callable[[OutputHead, Tensor, Tensor], Tensor]:
    return lambda head, hidden, tokens: chunked_logprobs(head, hidden, tokens[:, None], 1.0, entropy=False, chunk=rows)[
        0
    ][:, 0]


@cache
def errors_of_one_product(dtype: torch.dtype) -> tuple[float, float]:
    found = gradient(dtype, whole)
    return distance(found[0], case()[3]), distance(found[1], bias())


@cache
def bias() -> Tensor:
    """Of the mean log-probability, in float64."""
    weight, hidden, tokens, _ = case()
    found = torch.zeros(VOCABULARY, dtype=torch.float64)
    for row, token in zip(hidden, tokens, strict=True):
        found -= (weight.double() @ row.double()).softmax(-1) / ROWS
        found[token] += 1 / ROWS
    return found


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow), None]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_are_no_further_from_the_truth_than_one_product(dtype: torch.dtype, rows: int | None) -> None:
    """192 chunks, 28, and as many as the engine takes: a sum rounded at every chunk strayed by 2 to 27 %."""
    weight, biased = gradient(dtype, chunked(rows))
    expected = errors_of_one_product(dtype)
    slack = 0.0 if dtype == torch.bfloat16 else 1e-6  # float32: another order of summation
    assert distance(weight, case()[3]) <= 1.01 * expected[0] + slack
    assert distance(biased, bias()) <= 1.01 * expected[1] + slack
    assert expected[0] < (5e-3 if dtype == torch.bfloat16 else 1e-5)


def test_the_plan_counts_what_the_engine_takes() -> None:
    assert residency.CHUNKED_LOGITS == logprobs_module.CHUNKED_ABOVE
    assert residency.CHUNK_BYTES == logprobs_module.CHUNK_BYTES


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "least", "most"),
    [
        (152_064, 64, 2**26, 2**27),
        (152_064, 3584, 2**30, 2**31),
        (50_000_000, 8, 0, 2**31),
        (32_000, 4096, 2**28, 2**29),
    ],
)
def test_a_chunk_takes_what_the_gradient_takes_within_bounds(
    vocabulary: int, hidden: int, least: int, most: int
) -> None:
    rows = chunk_rows(vocabulary, hidden)
    assert rows >= 1
    assert least <= rows * vocabulary * 16 <= max(most, vocabulary * 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_audit_19_log_probabilities_are_those_of_float32_logits(dtype: torch.dtype) -> None:
    """A vocabulary of 32 k with logits beyond 16, below and above the size at which they come in chunks."""
    vocabulary, hidden, rows = 32_000, 64, 40
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(config)
    with torch.no_grad():
        module.lm_head.weight.normal_(0, 6 / hidden**0.5)
    model = adopt_module(module.to(dtype))
    assert model.head is not None
    tokens = torch.randint(0, vocabulary, (rows,)).tolist()
    batch = TokenBatch.pack([Document(tokens[:2], tokens[2:])])
    with torch.no_grad():
        states = model.hidden_states(batch.tokens, batch.positions, batch.lengths)[1:-1]
        exact = (states.double() @ module.lm_head.weight.double().t()).log_softmax(-1)
        wanted = exact.gather(1, batch.tokens[2:, None])[:, 0]
        found = token_logprobs(model, batch, response_only=True)[2:]
        likeliest = likeliest_tokens(model, batch, 4)
        rounded = F.linear(states, module.lm_head.weight).float().log_softmax(-1)
    assert float((found - wanted).square().mean().sqrt()) < 1e-5
    assert float((likeliest.logprobs - exact.topk(4).values).abs().max()) < 1e-4
    if dtype == torch.bfloat16:  # what logits in its own type strayed by
        assert float((rounded.gather(1, batch.tokens[2:, None])[:, 0] - wanted).square().mean().sqrt()) > 0.02


@pytest.mark.parametrize("engine", [NativeRollout, ModuleRollout])
def test_audit_19_who_learns_reads_the_logits_that_the_rollout_reported(engine: type[Any]) -> None:
    """In bfloat16 at a vocabulary of 32 k: with hidden states that agree, so do log-probabilities."""
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(config)
    with torch.no_grad():
        module.lm_head.weight.normal_(0, 6 / 8)
        module.model.layers[0].self_attn.o_proj.weight.zero_()  # hidden states are functions of one token:
        module.model.layers[0].mlp.down_proj.weight.zero_()  # both sides round them alike
    model = adopt_module(module.bfloat16())
    answers = generate(engine(model), [[1, 5], [9, 4, 7]], samples=2, sampling=SamplingParams(24, seed=3))
    batch = TokenBatch.pack([answer.document for answer in answers])
    with torch.no_grad():
        found = token_logprobs(model, batch, response_only=True)
    apart = (found - batch.column("behaviour_logprobs"))[batch.response_mask]
    assert float(apart.square().mean().sqrt()) < 1e-4
