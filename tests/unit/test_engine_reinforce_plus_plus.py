"""REINFORCE++ against its equations, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampled_batches import EXACT, clipped, loss_and_gradient, responses, sampled

from posttrain.engine.config import ReinforcePlusPlusConfig
from posttrain.engine.recipes.reinforce_plus_plus import ReinforcePlusPlus


def algorithm(**changes: Any) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(
        ReinforcePlusPlusConfig(**{"data": "d", "reward": "r", "steps": 1, "max_new_tokens": 9, **changes})
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("coefficient", [None, 0.3])
def test_returns_are_normalised_over_the_whole_step(gamma: float, baseline: str, coefficient: float | None) -> None:
    found = sampled([3, 5, 2, 4], [1.0, 0.0, 0.25, 0.5], [0, 0, 1, 1])
    made = algorithm(
        gamma=gamma, baseline=baseline, group_size=2, kl={"coefficient": coefficient} if coefficient else None
    )
    batch = made.credit(found.batch)
    returns = []
    for i, group in enumerate(found.groups):
        score = float(found.rewards[i])
        if baseline == "group":
            members = [float(r) for r, g in zip(found.rewards, found.groups, strict=True) if g == group]
            score -= sum(members) / len(members)
        steps = [-(coefficient or 0.0) * float(d) for d in found.old[i] - found.reference[i]]
        steps[-1] += score
        returns.append([sum(gamma**k * r for k, r in enumerate(steps[t:])) for t in range(len(steps))])
    flat = torch.tensor([value for one in returns for value in one], dtype=torch.float64)
    expected = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    assert torch.cat(responses(batch, batch.column("advantages"))).numpy() == pytest.approx(expected.numpy(), **EXACT)
    loss, new, _ = loss_and_gradient(made, batch)
    tokens = clipped(torch.cat(new), torch.cat(found.old), expected, 0.2, 0.2)
    assert float(loss) == pytest.approx(float(tokens.mean()), **EXACT)


def test_a_group_baseline_needs_a_group() -> None:
    with pytest.raises(ValueError, match="baseline: group needs group_size >= 2, got 1"):
        algorithm(baseline="group")
