"""GSPO and CISPO against their equations in float64: value and gradient, split and whole, and what the clip removes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import pieces
from sampled_batches import responses
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.config import CISPOConfig, GSPOConfig
from posttrain.engine.recipes.cispo import CISPO
from posttrain.engine.recipes.gspo import GSPO
from posttrain.engine.recipes.policy_gradient import GroupBaseline
from posttrain.execution.trainers.native import NativeTrainer

GIVEN: dict[str, Any] = {"data": "d", "reward": "r", "steps": 2, "group_size": 2}
Loss = Callable[[list[Tensor], list[Tensor], list[float]], Tensor]  # log π, log π_old and advantage of each response


def gspo(new: list[Tensor], old: list[Tensor], advantages: list[float]) -> Tensor:
    """arXiv 2507.18071, eq. 5 and 7: −mean of min(s·A, clip(s)·A), s the geometric mean of a response's ratios."""
    each = []
    for a, b, advantage in zip(new, old, advantages, strict=True):
        ratio = (a.sum() / len(a) - b.sum() / len(b)).exp()
        each.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.2) * advantage))
    return torch.stack(each).mean()


def cispo(new: list[Tensor], old: list[Tensor], advantages: list[float]) -> Tensor:
    """arXiv 2506.13585, eq. 4 and 5: −mean over tokens of sg(min(ρ, 1 + ε))·A·log π."""
    each = [
        -(a - b).detach().exp().clamp(0.0, 1.1) * advantage * a
        for a, b, advantage in zip(new, old, advantages, strict=True)
    ]
    return torch.cat(each).mean()


ALGORITHMS: dict[str, tuple[GroupBaseline[Any], Loss]] = {
    "gspo": (GSPO(GSPOConfig(**GIVEN, clip_low=0.1, clip_high=0.2)), gspo),
    "cispo": (CISPO(CISPOConfig(**GIVEN, clip_high=0.1)), cispo),
}
ADVANTAGES = [1.2, -0.7, 0.4, -1.1, 2.0]


def batch_of(dtype: torch.dtype) -> tuple[TokenBatch, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    batch = TokenBatch.pack([Document([1, 2], [3] * length) for length in (4, 1, 3, 5, 2)])
    size = len(batch.response_mask)
    old = -torch.rand(size, dtype=torch.float64, generator=generator)
    new = old + 0.6 * (torch.rand(size, dtype=torch.float64, generator=generator) - 0.4)
    columns = {"behaviour_logprobs": old.to(dtype)}
    batch = batch.with_columns(**columns)
    return batch.with_columns(advantages=batch.spread(torch.tensor(ADVANTAGES, dtype=dtype))), old, new


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_those_of_the_paper_however_the_batch_is_split(name: str, dtype: torch.dtype) -> None:
    algorithm, paper = ALGORITHMS[name]
    exact = 1e-10 if dtype == torch.float64 else 2e-6
    batch, old, values = batch_of(dtype)
    wanted = values.clone().requires_grad_()
    expected = paper(responses(batch, wanted), responses(batch, old), ADVANTAGES)
    expected.backward()
    [update] = algorithm.updates(0)
    objective = update.objective(Totals.of(batch))
    logprobs = values.to(dtype).clone().requires_grad_()
    parts = objective(batch, Predictions(logprobs=logprobs))
    parts.loss.backward()
    assert float(parts.loss.detach()) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)
    assert logprobs.grad is not None
    assert wanted.grad is not None
    assert torch.allclose(logprobs.grad.double(), wanted.grad, rtol=10 * exact, atol=exact)
    assert 0 < float(parts.sums["clip_fraction"]) < 1
    split = [
        objective(micro, Predictions(logprobs=micro.column("own"))).loss
        for micro in pieces(batch.with_columns(own=logprobs.detach()), 9)
    ]
    assert len(split) > 1
    assert float(sum(split)) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)


def test_gspo_removes_the_gradient_of_whole_responses_and_cispo_of_no_token() -> None:
    batch, _, values = batch_of(torch.float64)
    found = {}
    for name, (algorithm, _) in ALGORITHMS.items():
        [update] = algorithm.updates(0)
        logprobs = values.clone().requires_grad_()
        update.objective(Totals.of(batch))(batch, Predictions(logprobs=logprobs)).loss.backward()
        found[name] = [bool((grad != 0).all()) for grad in responses(batch, logprobs.grad)]
        assert [bool((grad != 0).any()) for grad in responses(batch, logprobs.grad)] == found[name], "all or none"
    assert all(found["cispo"])
    assert 0 < sum(found["gspo"]) < 5


def test_gspo_takes_no_token_weights() -> None:
    apart = {"placement": {"policy": {"ranks": 1}, "rollout": {"ranks": 1}}, "data": "d", "steps": 4, "reward": "r"}
    with pytest.raises(InputError, match=r"one ratio for each response, so lag.correction must be bypass, got tis"):
        NativeTrainer().check("gspo", {**apart, "lag": {"steps": 1}})
    assert NativeTrainer().check("gspo", {**apart, "lag": {"steps": 1, "correction": "bypass"}}).load is not None
    assert NativeTrainer().check("cispo", {**apart, "lag": {"steps": 1}}).load is not None
