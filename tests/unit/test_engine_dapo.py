"""DAPO against its equations, in float64, and its dynamic sampling through the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampled_batches import EXACT, clipped, loss_and_gradient, sampled
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline, quiet

from posttrain.engine.algorithms.advantages import overlong_penalty
from posttrain.engine.config import DAPOConfig, TurnsConfig
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.dapo import DAPO


def config(**changes: Any) -> DAPOConfig:
    options = {"data": "d", "reward": "r", "steps": 2, "group_size": 2, "max_new_tokens": 8}
    return DAPOConfig(**{**options, **changes})


def test_the_loss_is_a_token_mean_with_the_wider_upper_clip() -> None:
    found = sampled([3, 5, 2, 4], [1.0, 0.0, 0.25, 0.75], [0, 0, 1, 1])
    algorithm = DAPO(config())
    loss, new, _ = loss_and_gradient(algorithm, algorithm.credit(found.batch))
    advantages = []
    for i, group in enumerate(found.groups):
        members = torch.stack([r for r, g in zip(found.rewards, found.groups, strict=True) if g == group])
        advantages.append(float((found.rewards[i] - members.mean()) / (members.std() + 1e-4)))
    tokens = [clipped(n, old, a, 0.2, 0.28) for n, old, a in zip(new, found.old, advantages, strict=True)]
    assert float(loss) == pytest.approx(float(torch.cat(tokens).mean()), **EXACT)


def test_the_overlong_punishment_grows_over_the_buffer() -> None:
    lengths = torch.arange(9)
    assert overlong_penalty(lengths, 8, 4).tolist() == [0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1]
    algorithm = DAPO(config(overlong={"buffer": 4, "penalty": 0.5}))
    batch = sampled([4, 6, 8], [1.0, 1.0, 0.0], [0, 0, 0]).batch
    assert algorithm.rewards(batch).tolist() == [1.0, 0.75, -0.5]


class TalkConfig(TurnsConfig, DAPOConfig):
    """As a package has it."""


def test_of_several_turns_all_that_may_be_said_is_the_limit() -> None:
    options = {"data": "d", "reward": "r", "steps": 2, "group_size": 2, "max_new_tokens": 8}
    turns: dict[str, Any] = {"turns": 3, "observation_tokens": 2}
    algorithm = DAPO(TalkConfig(**options, **turns, overlong={"buffer": 4, "penalty": 0.5}))
    batch = sampled([8, 22, 24], [1.0, 1.0, 0.0], [0, 0, 0]).batch
    assert algorithm.rewards(batch).tolist() == [1.0, 0.75, -0.5]
    assert algorithm.source.turns == 3
    with pytest.raises(ValueError, match=r"overlong\.buffer must be <= the tokens of a sample \(24\), got 25"):
        TalkConfig(**options, **turns, overlong={"buffer": 25})


def test_a_buffer_longer_than_a_response_may_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlong\.buffer must be <= the tokens of a sample \(8\), got 9"):
        config(overlong={"buffer": 9})


@pytest.mark.parametrize("refills", [0, 3])
def test_groups_without_signal_are_replaced_by_those_that_come_next(refills: int) -> None:
    made = config(prompts_per_step=3, max_new_tokens=4, refills=refills)
    roles = open_roles(made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    recipe = OnPolicy(made, DAPO(made), roles, PROMPTS, EvenTokens(), 11)
    report = recipe.step(0, quiet(0))
    taken = recipe.journal.consumed
    if refills:
        assert taken > 3, "EvenTokens leaves some groups without a signal"
        shares = [report.metrics[f"groups/{name}"] for name in ("zero_std", "dropped")]
        assert shares == pytest.approx([(taken - 3) / taken] * 2)
    else:
        assert taken == 3


def test_the_punishment_is_told() -> None:
    made = config(prompts_per_step=3, max_new_tokens=4, overlong={"buffer": 4, "penalty": 0.5})
    roles = open_roles(made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    metrics = OnPolicy(made, DAPO(made), roles, PROMPTS, EvenTokens(), 11).step(0, quiet(0)).metrics
    assert metrics["reward/overlong"] == pytest.approx(-0.5 * metrics["response_tokens/mean"] / 4)
