"""VAPO and PF-PPO against their papers' equations in float64: advantages, loss, gradient, and which samples train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import pieces
from hypothesis import given, strategies as st
from sampled_batches import clipped, responses

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.advantages import generalized_advantages, length_adaptive
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.config import PFPPOConfig, VAPOConfig
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.recipes.pf_ppo import PFPPO
from posttrain.engine.recipes.vapo import VAPO
from posttrain.engine.samples import Group, Prompt, Sample, Trajectory
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.sandbox.port import Score

GIVEN: dict[str, Any] = {"data": "d", "reward": "r", "steps": 60}
LENGTHS, REWARDS = (4, 1, 9, 25, 2), [1.0, 0.0, -0.5, 1.0, 0.25]
GAMMA, ALPHA, ABOVE, WEIGHT = 0.9, 0.2, 0.3, 0.7


def batch_of(dtype: torch.dtype) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    batch = TokenBatch.pack([Document([1, 2], [3] * length) for length in LENGTHS])
    old, values = (-torch.rand(len(batch.tokens), dtype=torch.float64, generator=generator) for _ in range(2))
    new = old + 0.6 * (torch.rand(len(old), dtype=torch.float64, generator=generator) - 0.4)
    columns = {"behaviour_logprobs": old.to(dtype), "values": values.to(dtype)}
    return batch.with_columns(**columns).with_document_columns(reward=torch.tensor(REWARDS, dtype=torch.float64)), new


def estimate(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """GAE of one response, as a double sum: A_t = Σ_l (γλ)^l (r_{t+l} + γ V_{t+l+1} − V_{t+l})."""
    after = [*values[1:], 0.0]
    delta = [r + GAMMA * v - own for r, v, own in zip(rewards, after, values, strict=True)]
    return [sum((GAMMA * lam) ** step * delta[t + step] for step in range(len(delta) - t)) for t in range(len(delta))]


def paper(batch: TokenBatch, new: torch.Tensor) -> tuple[torch.Tensor, list[float], list[float]]:
    """arXiv 2504.05118: the loss, and every token's advantage and return."""
    advantages: list[float] = []
    returns: list[float] = []
    for reward, v in zip(REWARDS, responses(batch, batch.column("values")), strict=True):
        values = v.double().tolist()
        rewards = [0.0] * (len(values) - 1) + [reward]
        advantages += estimate(rewards, values, max(0.0, 1 - 1 / (ALPHA * len(values))))
        returns += [a + b for a, b in zip(estimate(rewards, values, 1.0), values, strict=True)]
    mean, deviation = np.mean(advantages), np.std(advantages, ddof=1)
    advantages = [(one - mean) / np.sqrt(deviation**2 + 1e-8) for one in advantages]
    news, olds = responses(batch, new), responses(batch, batch.column("behaviour_logprobs").double())
    ours = torch.tensor(advantages, dtype=torch.float64).split(LENGTHS)
    tokens = torch.cat([clipped(a, b, c, 0.2, 0.28) for a, b, c in zip(news, olds, ours, strict=True)])
    imitated = torch.cat([-one for one, reward in zip(news, REWARDS, strict=True) if reward > ABOVE])
    return tokens.mean() + WEIGHT * imitated.mean(), advantages, returns


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vapo_is_its_paper_however_the_batch_is_split(dtype: torch.dtype) -> None:
    exact = 1e-10 if dtype == torch.float64 else 2e-6
    gae = {"gamma": GAMMA, "alpha": ALPHA}
    algorithm = VAPO(VAPOConfig(**GIVEN, gae=gae, positive={"above": ABOVE, "weight": WEIGHT}))
    batch, values = batch_of(dtype)
    wanted = values.clone().requires_grad_()
    expected, advantages, returns = paper(batch, wanted)
    expected.backward()
    ready = algorithm.credit(batch)
    for name, known in {"advantages": advantages, "returns": returns}.items():
        found = ready.column(name)[ready.response_mask].double()
        torch.testing.assert_close(found, torch.tensor(known, dtype=torch.float64), rtol=50 * exact, atol=50 * exact)
    update = algorithm.updates(59)[1]
    totals = Totals.of(ready, None, update.objective(Totals.ones()).denominators)
    assert totals.sums == {"positive": 29.0}
    objective = update.objective(totals)
    logprobs = values.to(dtype).clone().requires_grad_()
    loss = objective(ready, Predictions(logprobs=logprobs)).loss
    [gradient] = torch.autograd.grad(loss, [logprobs])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=10 * exact, abs=10 * exact)
    assert wanted.grad is not None
    torch.testing.assert_close(gradient.double(), wanted.grad, rtol=100 * exact, atol=10 * exact)
    split = [
        float(objective(micro, Predictions(logprobs=micro.column("own"))).loss)
        for micro in pieces(ready.with_columns(own=logprobs.detach()), 12)
    ]
    assert len(split) > 2
    assert sum(split) == pytest.approx(float(expected.detach()), rel=10 * exact, abs=10 * exact)


def test_vapo_trains_the_critic_first_and_imitates_nothing_where_nothing_is_good() -> None:
    algorithm = VAPO(VAPOConfig(**GIVEN))
    assert [update.role for update in algorithm.updates(49)] == ["critic"]
    assert [update.role for update in algorithm.updates(50)] == ["critic", "policy"]
    batch, values = batch_of(torch.float64)
    ready = algorithm.credit(batch.with_document_columns(reward=torch.zeros(5, dtype=torch.float64)))
    update = algorithm.updates(50)[1]
    parts = update.objective(Totals.of(ready, None, ["tokens", "positive"]))(ready, Predictions(logprobs=values))
    assert parts.sums["positive_nll"] == 0
    assert torch.isfinite(parts.loss)
    with pytest.raises(InputError, match=r"critic.warmup must be < steps \(20\), got 50"):
        NativeTrainer().check("vapo", {**GIVEN, "steps": 20})


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_lambda_for_each_document_is_that_of_the_document_alone(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(sum(lengths), dtype=torch.float64, generator=generator) for _ in range(2))
    mask, lams = torch.ones(sum(lengths), dtype=torch.bool), torch.rand(len(lengths), generator=generator)
    together = generalized_advantages(rewards, values, mask, lengths, 0.9, lams)
    start = 0
    for length, lam in zip(lengths, lams, strict=True):
        part = slice(start, start + length)
        alone = generalized_advantages(rewards[part], values[part], mask[part], [length], 0.9, float(lam))
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[part], other, rtol=1e-12, atol=1e-12)
        start += length


@pytest.mark.parametrize("lam", [1.01, -0.1, float("nan"), torch.tensor([0.5, 2.0]), torch.tensor([0.5])])
def test_a_lambda_outside_its_range_is_refused(lam: Any) -> None:
    with pytest.raises(ValueError, match=r"lam must be one number, or one for each document, between 0 and 1"):
        generalized_advantages(torch.zeros(4), torch.zeros(4), torch.ones(4, dtype=torch.bool), [2, 2], 1.0, lam)


def test_lambda_grows_with_the_length() -> None:
    found = length_adaptive(torch.tensor([1, 20, 40, 10_000]), 0.05)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.5, 0.998], dtype=torch.float64))


def group(key: int, rewards: list[float | None]) -> ScoredGroup:
    answer = Trajectory.answer((1, 5), [7, 2], [-0.5, -0.25], truncated=False, version="0.3")
    rows = tuple(Sample(number, (answer,)) for number in range(len(rewards)))
    scores = tuple(Score(one, status="error" if one is None else "ok") for one in rewards)
    return ScoredGroup(Prompt((1, 5)), Group(key, rows), scores, 4)


def kept(filter: str, rewards: list[float | None], key: int = 0, seed: int = 1) -> list[int]:
    batch = PFPPO(PFPPOConfig(**GIVEN, filter=filter)).form([group(key, rewards)], seed)
    return [] if batch is None else [int(one.rpartition(".")[2]) for one in batch.sample_ids]


def test_pf_ppo_trains_the_best_response_and_the_worst_or_a_random_one() -> None:
    rewards = [0.2, None, 0.9, 0.4, 0.9, -1.0]
    assert kept("best", rewards) == [2]
    assert kept("best_worst", rewards) == [2, 5]
    for one in ("best", "best_worst", "best_random"):
        assert kept(one, [None, 0.5]) == [1]
        assert kept(one, [None, None]) == []
    drawn = [kept("best_random", rewards, key) for key in range(40)]
    assert drawn == [kept("best_random", rewards, key) for key in range(40)], "a function of seed and prompt"
    assert drawn != [kept("best_random", rewards, key, seed=2) for key in range(40)]
    assert {number for pair in drawn for number in pair} == {0, 2, 3, 4, 5}
    assert all(2 in pair and len(pair) == 2 for pair in drawn)


def test_a_plan_prices_what_the_filter_keeps() -> None:
    params = {**GIVEN, "group_size": 8, "prompts_per_step": 3}
    trained = {
        one: NativeTrainer().check("pf_ppo", {**params, "filter": one}).work["trained"]
        for one in ("best", "best_worst")
    }
    assert trained == {"best": 60 * 3 * 2, "best_worst": 60 * 6 * 2}
