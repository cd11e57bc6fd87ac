"""RLOO against its equations, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampled_batches import EXACT, clipped, loss_and_gradient, sampled

from posttrain.engine.config import GroupConfig
from posttrain.engine.recipes.rloo import RLOO

OPTIONS = {"data": "d", "reward": "r", "steps": 1, "group_size": 3, "max_new_tokens": 9}


def rloo(**changes: Any) -> RLOO:
    return RLOO(GroupConfig(**{**OPTIONS, **changes}))


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_loss_is_that_of_whole_responses_against_the_mean_of_the_others(coefficient: float) -> None:
    found = sampled([3, 5, 2, 4, 1], [1.0, 0.0, 0.25, 2.0, -1.0], [0, 0, 0, 1, 1])
    algorithm = rloo(kl={"coefficient": coefficient} if coefficient else None)
    batch = algorithm.credit(found.batch)
    loss, new, gradient = loss_and_gradient(algorithm, batch)
    worth = [
        reward - coefficient * float((old - anchor).sum())
        for reward, old, anchor in zip(found.rewards.tolist(), found.old, found.reference, strict=True)
    ]
    expected = torch.zeros((), dtype=torch.float64)
    for i, group in enumerate(found.groups):
        others = [worth[j] for j, other in enumerate(found.groups) if other == group and j != i]
        advantage = worth[i] - sum(others) / len(others)
        tokens = clipped(new[i], found.old[i], advantage, 0.2, 0.2)
        expected = expected + tokens.sum() / 5
        assert gradient[i] == pytest.approx(-advantage * (new[i] - found.old[i]).exp().numpy() / 5, **EXACT)
    assert float(loss) == pytest.approx(float(expected), **EXACT)


def test_a_response_alone_in_its_group_has_no_baseline_and_no_gradient() -> None:
    algorithm = rloo()
    batch = algorithm.credit(sampled([3, 2, 2], [1.0, 0.5, 0.0], [0, 1, 1]).batch)
    [update] = algorithm.updates(0)
    assert list(update.computes(batch)) == [1, 2]
    assert not batch.column("advantages")[:5].any()


def test_the_reference_is_needed_for_the_penalty_alone() -> None:
    assert [column.role for column in rloo(kl={}).requires(0)] == ["reference"]
    assert rloo().requires(0) == ()
