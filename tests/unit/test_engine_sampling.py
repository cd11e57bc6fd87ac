"""Random numbers by counter, and drawing tokens from logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.sampling import choose, draw, most_likely, row_keys, uniforms

CPU = torch.device("cpu")
MASK = 2**64 - 1


def splitmix64(state: int, steps: int) -> list[int]:
    """The published generator in plain integers."""
    out = []
    for _ in range(steps):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 200))
def test_uniforms_are_splitmix64(key: int, first: int) -> None:
    found = uniforms(torch.tensor([key]), first, 4)[0].tolist()
    assert found == [(word >> 32) * 2.0**-32 for word in splitmix64(key & MASK, first + 4)[first:]]


def test_the_first_word_of_seed_zero_is_the_published_one() -> None:
    assert uniforms(torch.tensor([0]), 0, 1).item() == 0xE220A839 * 2.0**-32


def test_rows_have_keys_of_their_own() -> None:
    keys = [row_keys(seed, [p], [s], CPU).item() for seed in range(4) for p in range(20) for s in range(20)]
    assert len(set(keys)) == len(keys)
    assert row_keys(7, [2**64 + 5, -1], [0, 1], CPU).tolist() == row_keys(7, [5, 2**64 - 1], [0, 1], CPU).tolist()


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    keys = row_keys(11, list(range(64)), [0] * 64, CPU)
    numbers = uniforms(keys, 0, 256).numpy()
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03


@given(
    size=st.sampled_from([1, 2, 31, 513, 1024, 1025, 1056, 5000]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 10_000),
)
def test_draw_inverts_the_distribution_function(size: int, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(8, size, generator=generator)
    uniform = torch.rand(8, generator=generator, dtype=torch.float64)
    chosen, logprobs = draw(logits, uniform, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    edges = expected.exp().cumsum(-1)
    below = torch.cat([torch.zeros(8, 1, dtype=torch.float64), edges], 1).gather(1, chosen[:, None])[:, 0]
    assert (below - 1e-5 <= uniform).all()
    assert (uniform <= edges.gather(1, chosen[:, None])[:, 0] + 1e-5).all()
    torch.testing.assert_close(logprobs.double(), expected.gather(1, chosen[:, None])[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [40, 300])
def test_draw_has_the_frequencies_of_the_softmax(size: int) -> None:
    logits = 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    uniform = uniforms(row_keys(5, [0], [0], CPU), 0, 40_000)[0]
    chosen, _ = draw(logits.expand(len(uniform), -1), uniform, 0.8)
    expected = (logits / 0.8).softmax(-1).double().numpy() * len(uniform)
    order = np.argsort(expected)
    counts = np.bincount(chosen.numpy(), minlength=size)[order]
    tail = int(np.searchsorted(np.cumsum(expected[order]), 50.0)) + 1  # rare tokens together
    observed = np.append(counts[tail:], counts[:tail].sum())
    wanted = np.append(expected[order][tail:], expected[order][:tail].sum())
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@given(
    size=st.sampled_from([7, 129, 400]),
    seed=st.integers(0, 10_000),
    extreme=st.sampled_from([0.0, 0.5, 1.0 - 2.0**-32]),
)
def test_an_impossible_token_is_never_drawn(size: int, seed: int, extreme: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, size, generator=generator)
    impossible = torch.rand(4, size, generator=generator) < 0.7
    impossible[:, seed % size] = False
    chosen, logprobs = draw(
        logits.masked_fill(impossible, float("-inf")), torch.full((4,), extreme, dtype=torch.float64), 1.0
    )
    assert not impossible.gather(1, chosen[:, None]).any()
    assert logprobs.isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    uniform = uniforms(row_keys(0, list(range(6)), [0] * 6, CPU), 0, 1)[:, 0]
    together = draw(logits, uniform, 1.0)
    alone = [draw(logits[i : i + 1], uniform[i : i + 1], 1.0) for i in range(6)]
    assert torch.equal(together[0], torch.cat([a[0] for a in alone]))
    assert torch.equal(together[1], torch.cat([a[1] for a in alone]))


def test_most_likely_prefers_the_lower_index_on_a_tie() -> None:
    chosen, logprobs = most_likely(torch.tensor([[0.0, 2.0, 2.0]]), 0.5)
    assert chosen.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, 4.0, 4.0]]).log_softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": 1, "batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"max_new_tokens": 1, "top_k": -1}, "top_k must be >= 0"),
        ({"max_new_tokens": 1, "top_p": 0.0}, "got 0, 0.0 and 0.0"),
        ({"max_new_tokens": 1, "min_p": 1.0}, "got 0, 1.0 and 1.0"),
        ({"max_new_tokens": 1, "temperature": 0.0}, "temperature must be at least 1e-06, got 0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature must be at least 1e-06, got nan"),
    ],
)
def test_sampling_refuses(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [({"top_k": 2}, {0, 3}), ({"top_p": 0.75}, {0, 3, 1}), ({"min_p": 0.55}, {0, 3}), ({"top_k": 1}, {3})],
)
def test_truncated_sampling_draws_the_likely_and_reports_the_whole(
    truncation: dict[str, float], kept: set[int]
) -> None:
    probabilities = torch.tensor([0.25, 0.2, 0.15, 0.4])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampling = SamplingParams(max_new_tokens=1, **truncation)  # type: ignore[arg-type]
    tokens, logprobs = choose(probabilities.log().expand(1000, -1), uniform, sampling)
    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])
    shares = torch.bincount(tokens, minlength=4) / 1000
    mass = sum(probabilities[i].item() for i in kept)
    for token in kept:
        assert shares[token].item() == pytest.approx(probabilities[token].item() / mass, abs=2e-3)


@pytest.mark.parametrize("size", [3, 1024, 1025, 5000])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_of_numbers_that_are_none_some_token_of_the_vocabulary_is_drawn(size: int, number: float) -> None:
    """Whoever asked looks at the log-probability, so there must be an answer."""
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-32], dtype=torch.float64)
    token, logprob = draw(torch.full((3, size), number), uniform, 1.0)
    assert bool(((token >= 0) & (token < size)).all())
    assert bool(logprob.isnan().all())


_TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 10, "top_p": 0.5},
    {"top_k": 3, "top_p": 0.8, "min_p": 0.3},
    {"top_p": 0.7, "min_p": 0.05},
    {"top_k": 5, "min_p": 0.2},
    {"top_k": 10_000, "top_p": 0.3},
    {"top_k": 4},
    {"top_p": 0.9},
    {"min_p": 0.02},
]


@pytest.mark.parametrize("truncation", _TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_audit_21_truncation_keeps_the_tokens_that_hugging_face_keeps(
    truncation: dict[str, Any], temperature: float
) -> None:
    """`top_k`, then `top_p` of what it left, then `min_p`: in the order and with the processors of `generate`."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    for name, made in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in truncation:
            processors.append(made(truncation[name]))
    generator = torch.Generator().manual_seed(7)
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for spread in (1.0, 3.0, 6.0):
        logits = torch.randn(50, generator=generator) * spread
        wanted = processors(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].softmax(-1)
        tokens, logprobs = choose(
            logits.expand(4000, -1), uniform, SamplingParams(1, temperature=temperature, **truncation)
        )
        shares = torch.bincount(tokens, minlength=50) / 4000
        # every token that is kept has at least one draw where its share is more than one of the evenly spaced numbers
        assert set(tokens.tolist()) <= set(wanted.nonzero()[:, 0].tolist())
        torch.testing.assert_close(shares, wanted, atol=5e-4, rtol=0)
        torch.testing.assert_close(logprobs, (logits / temperature).log_softmax(-1)[tokens])


def test_audit_21_top_k_keeps_tokens_as_likely_as_the_last_one() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    kept = TopKLogitsWarper(2)(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0].isfinite().nonzero()[:, 0]
    tokens, _ = choose(logits.expand(1000, -1), uniform, SamplingParams(1, top_k=2))
    assert set(tokens.tolist()) == set(kept.tolist()) == {0, 1, 2, 3}
