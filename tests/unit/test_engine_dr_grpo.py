"""Dr. GRPO against its equations, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampled_batches import EXACT, clipped, loss_and_gradient, sampled

from posttrain.engine.config import GroupConfig
from posttrain.engine.recipes.dr_grpo import DrGRPO


def dr_grpo(**changes: Any) -> DrGRPO:
    return DrGRPO(GroupConfig(**{"data": "d", "reward": "r", "steps": 1, "max_new_tokens": 9, **changes}))


def test_neither_deviation_nor_own_length_divides() -> None:
    found = sampled([3, 5, 2, 4], [1.0, 0.0, 0.25, 0.75], [0, 0, 1, 1])
    algorithm = dr_grpo()
    loss, new, _ = loss_and_gradient(algorithm, algorithm.credit(found.batch))
    means = {0: 0.5, 1: 0.5}
    expected = sum(
        clipped(new[i], found.old[i], float(found.rewards[i]) - means[group], 0.2, 0.2).sum() / (4 * 9)
        for i, group in enumerate(found.groups)
    )
    assert float(loss) == pytest.approx(float(expected), **EXACT)


def test_a_longer_response_has_the_same_gradient_per_token() -> None:
    algorithm = dr_grpo()
    found = sampled([2, 8], [1.0, 0.0], [0, 0])
    batch = algorithm.credit(found.batch)
    _, new, gradient = loss_and_gradient(algorithm, batch)
    per_token = [g / (n - old).exp() for g, n, old in zip(gradient, new, found.old, strict=True)]
    assert torch.cat([per_token[0], -per_token[1]]).numpy() == pytest.approx(-0.5 / (2 * 9), **EXACT)


def test_the_step_is_divided_by_what_has_no_gradient_too() -> None:
    algorithm = dr_grpo()
    batch = algorithm.credit(sampled([3, 3, 2, 2], [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]).batch)
    [update] = algorithm.updates(0)
    assert list(update.computes(batch)) == [0, 1]
