"""Algorithms compute as precisely as what they are given: in float64 as their equations, in float32 close to that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import pieces
from sampled_batches import EXACT, clipped, loss_and_gradient, responses, sampled
from torch import Tensor

from posttrain.engine.algorithms.objectives import (
    MODES,
    KLTerm,
    PolicyObjective,
    SupervisedObjective,
    Totals,
    ValueObjective,
)
from posttrain.engine.batch import Predictions, TokenBatch, precision
from posttrain.engine.config import DAPOConfig, GroupConfig, GRPOConfig, PPOConfig, ReinforcePlusPlusConfig
from posttrain.engine.recipes.dapo import DAPO
from posttrain.engine.recipes.dr_grpo import DrGRPO
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.recipes.reinforce_plus_plus import ReinforcePlusPlus
from posttrain.engine.recipes.rloo import RLOO

OPTIONS: dict[str, Any] = {"data": "d", "reward": "r", "steps": 1, "max_new_tokens": 9}
KL = {"coefficient": 0.3}


def batch() -> TokenBatch:
    """Of four responses, one with an observation in it, with values."""
    made = sampled([3, 6, 2, 4], [1.0, 0.0, 0.25, 2.0], [0, 0, 1, 1]).batch
    mask = made.response_mask.clone()
    mask[8] = False
    torch.manual_seed(5)
    return replace(made, response_mask=mask).with_columns(values=torch.randn(len(mask), dtype=torch.float64))


def single(made: TokenBatch) -> TokenBatch:
    """The same with float32 columns, as they come from ranks."""
    return made.with_columns(**{name: column.float() for name, column in made.token_columns.items()})


def ppo(**changes: Any) -> PPO:
    return PPO(PPOConfig(**{**OPTIONS, "kl": {**KL, "place": "reward"}, **changes}))


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Of one response, by its definition: a sum over what comes later."""
    following = torch.cat([values[1:], torch.zeros(1, dtype=torch.float64)])
    delta = rewards + gamma * following - values
    return torch.stack(
        [sum(((gamma * lam) ** k * d for k, d in enumerate(delta[t:])), torch.zeros(())) for t in range(len(delta))]
    )


@pytest.mark.parametrize("whitened", [False, True])
def test_ppo_is_its_equations(whitened: bool) -> None:
    made = batch()
    algorithm = ppo(gae={"gamma": 0.95, "lam": 0.9, "whiten": whitened})
    columns = ("behaviour_logprobs", "reference_logprobs", "values")
    old, anchor, values = (responses(made, made.column(name)) for name in columns)
    advantages, returns = [], []
    for i, score in enumerate(made.column("reward").tolist()):
        rewards = -0.3 * (old[i] - anchor[i])
        rewards[-1] += score
        advantages.append(gae(rewards, values[i], 0.95, 0.9))
        returns.append(advantages[-1] + values[i])
    flat = torch.cat(advantages)
    expected = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt() if whitened else flat
    credited = algorithm.credit(made)
    assert torch.cat(responses(credited, credited.column("returns"))).numpy() == pytest.approx(
        torch.cat(returns).numpy(), **EXACT
    )
    loss, new, gradient = loss_and_gradient(algorithm, credited)
    ratio = (torch.cat(new) - torch.cat(old)).exp()
    tokens = clipped(torch.cat(new), torch.cat(old), expected, 0.2, 0.2)
    assert float(loss) == pytest.approx(float(tokens.mean()), **EXACT)
    live = ~(((expected > 0) & (ratio > 1.2)) | ((expected < 0) & (ratio < 0.8)))
    assert torch.cat(gradient).numpy() == pytest.approx((-expected * ratio * live / len(flat)).numpy(), **EXACT)


ALGORITHMS = {
    "ppo": ppo(),
    "grpo": GRPO(GRPOConfig(**OPTIONS, group_size=2, kl=KL)),
    "dr_grpo": DrGRPO(GroupConfig(**OPTIONS, group_size=2)),
    "rloo": RLOO(GroupConfig(**OPTIONS, group_size=2, kl=KL)),
    "dapo": DAPO(DAPOConfig(**OPTIONS, group_size=2)),
    "reinforce_plus_plus": ReinforcePlusPlus(ReinforcePlusPlusConfig(**OPTIONS, kl=KL)),
}


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_float32_is_float64_to_a_hundred_thousandth_of_the_gradient(kind: str) -> None:
    algorithm, made = ALGORITHMS[kind], batch()
    exact, near = algorithm.credit(made), algorithm.credit(single(made))
    assert {column.dtype for column in exact.token_columns.values()} == {torch.float64}
    assert {column.dtype for column in near.token_columns.values()} == {torch.float32}, "no column costs 8 bytes"
    loss, _, gradient = loss_and_gradient(algorithm, exact)
    other, _, found = loss_and_gradient(algorithm, near)
    norm = torch.cat(gradient).norm()
    assert float(other) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    assert (torch.cat(found) - torch.cat(gradient)).norm() <= 1e-5 * norm


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-corrected"])
def test_the_parts_of_a_step_are_the_whole(mode: str, estimator: str) -> None:
    """Policy, critic and demonstrations, in float64, in pieces of at most nine tokens."""
    made = batch()
    made = made.with_columns(advantages=made.column("values") + 0.1, returns=made.column("reference_logprobs"))
    totals = Totals.of(made)
    policy = PolicyObjective(totals, 0.2, 0.28, aggregation=mode, norm=7, kl=KLTerm(0.3, estimator), importance=1.1)
    made = made.with_columns(proximal_logprobs=made.column("behaviour_logprobs") + 0.05)
    for objective in (policy, ValueObjective(totals, 0.2), SupervisedObjective(totals)):
        whole = objective(made, predicted(made)).loss
        parts = [objective(micro, predicted(micro)).loss for micro in pieces(made, 9)]
        assert len(parts) > 1
        assert whole.dtype == torch.float64
        assert float(sum(parts)) == pytest.approx(float(whole), **EXACT)


def predicted(micro: TokenBatch) -> Predictions:
    """A little away from where the policy was."""
    return Predictions(
        logprobs=micro.column("behaviour_logprobs") - 0.1 * micro.column("values").abs(),
        values=micro.column("values") + 0.1,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_what_is_less_precise_is_computed_in_float32(dtype: torch.dtype) -> None:
    assert precision(torch.zeros(2, dtype=dtype), torch.zeros(1)) == torch.float32
    assert precision(torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.float64)) == torch.float64
