"""IPO, robust DPO, SimPO and ORPO against their equations in float64: value and gradient, split and whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import pieces
from sampled_batches import responses
from test_engine_dpo import PAIRS
from test_engine_recipes import TINY, TOKENIZER, inline, quiet
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Predictions
from posttrain.engine.config import DPOConfig, ORPOConfig, SimPOConfig
from posttrain.engine.loop.controller import FromRows, open_learner
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.dpo import DPO
from posttrain.engine.recipes.orpo import ORPO
from posttrain.engine.recipes.reward_model import OverPairs
from posttrain.engine.recipes.simpo import SimPO
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.execution.trainers.native import NativeTrainer

GIVEN: dict[str, Any] = {
    "data": "d", "steps": 12, "batch_size": 4, "optimizer": OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
}  # fmt: skip
Loss = Callable[[list[Tensor], list[Tensor]], Tensor]  # log-probabilities of each response, of policy and reference


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def ipo(new: list[Tensor], old: list[Tensor]) -> Tensor:
    """arXiv 2310.12036, eq. 17, of means over tokens: TRL's `loss_type: ipo`."""
    gained = [(a.mean() - b.mean()) for a, b in zip(new, old, strict=True)]
    return torch.stack([(gained[i] - gained[i + 1] - 1 / (2 * 0.7)) ** 2 for i in range(0, len(gained), 2)]).mean()


def robust(new: list[Tensor], old: list[Tensor]) -> Tensor:
    """arXiv 2403.00409, eq. 12."""
    gained = [(a.sum() - b.sum()) for a, b in zip(new, old, strict=True)]
    margins = torch.stack([0.7 * (gained[i] - gained[i + 1]) for i in range(0, len(gained), 2)])
    return ((-0.8 * sigmoid(margins).log() + 0.2 * sigmoid(-margins).log()) / 0.6).mean()


def simpo(new: list[Tensor], old: list[Tensor]) -> Tensor:
    """arXiv 2405.14734, eq. 6."""
    rewards = [1.5 * one.sum() / len(one) for one in new]
    return torch.stack([-sigmoid(rewards[i] - rewards[i + 1] - 0.4).log() for i in range(0, len(rewards), 2)]).mean()


def orpo(new: list[Tensor], old: list[Tensor]) -> Tensor:
    """arXiv 2403.07691, eq. 3, 6 and 7, with odds of the mean log-probability."""
    means = [one.mean() for one in new]
    odds = [(one.exp() / (1 - one.exp())).log() for one in means]
    each = [-means[i] - 0.3 * sigmoid(odds[i] - odds[i + 1]).log() for i in range(0, len(means), 2)]
    return torch.stack(each).mean()


ALGORITHMS: dict[str, tuple[OverPairs, Loss]] = {
    "ipo": (DPO(DPOConfig(**GIVEN, beta=0.7, loss="ipo")), ipo),
    "robust": (DPO(DPOConfig(**GIVEN, beta=0.7, loss="robust", label_smoothing=0.2)), robust),
    "simpo": (SimPO(SimPOConfig(**GIVEN, beta=1.5, gamma=0.4)), simpo),
    "orpo": (ORPO(ORPOConfig(**GIVEN, beta=0.3)), orpo),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_those_of_the_paper_however_the_batch_is_split(name: str, dtype: torch.dtype) -> None:
    algorithm, paper = ALGORITHMS[name]
    exact = 1e-10 if dtype == torch.float64 else 1e-6
    generator = torch.Generator().manual_seed(0)
    batch = algorithm.form(PAIRS[:5], 0)
    size = len(batch.response_mask)
    anchor = -torch.rand(size, dtype=torch.float64, generator=generator) - 0.05
    values = -torch.rand(size, dtype=torch.float64, generator=generator) - 0.05
    batch = batch.with_columns(reference_logprobs=anchor.to(dtype))
    wanted = values.clone().requires_grad_()
    expected = paper(responses(batch, wanted), responses(batch, anchor))
    expected.backward()
    logprobs = values.to(dtype).clone().requires_grad_()
    with torch.no_grad():
        logprobs[~batch.response_mask] = math.nan  # what is not a response is never read
    [update] = algorithm.updates(0)
    objective = update.objective(Totals.of(batch))
    loss = objective(batch, Predictions(logprobs=logprobs)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)
    assert logprobs.grad is not None
    assert wanted.grad is not None
    assert torch.allclose(logprobs.grad.double(), wanted.grad, rtol=10 * exact, atol=exact)
    parts = [
        objective(micro, Predictions(logprobs=micro.column("own")))
        for micro in pieces(batch.with_columns(own=logprobs.detach()), 9)
    ]
    assert len(parts) > 1
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns_what_is_preferred(name: str, dtype: str) -> None:
    algorithm, _ = ALGORITHMS[name]
    made = algorithm.config.model_copy(update={"runtime": RuntimeConfig(dtype=dtype)})
    model = adopt_module(initial_model(TINY, TOKENIZER, 0).to(getattr(torch, dtype)))
    recipe = FromRows(made, type(algorithm)(made), open_learner(made, model, 0, inline()), PAIRS, 0, PAIRS[:8])
    reports = [recipe.step(step, quiet(step)) for step in range(12)]
    assert reports[-1].metrics["accuracy"] == 1.0
    assert reports[-1].metrics["loss"] < reports[0].metrics["loss"]
    assert reports[-1].metrics["margin"] > reports[0].metrics["margin"]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing needs loss: sigmoid or robust, got 0.1 with ipo"),
        ({"loss": "robust"}, "loss: robust needs label_smoothing > 0"),
        ({"loss": "hinge"}, "loss"),
    ],
)
def test_fields_that_would_not_be_read_are_refused(params: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        NativeTrainer().check("dpo", {"data": "d", "steps": 1, **params})


def test_a_probability_that_rounds_to_one_has_finite_odds() -> None:
    algorithm, _ = ALGORITHMS["orpo"]
    batch = algorithm.form(PAIRS[:2], 0)
    logprobs = torch.zeros(len(batch.response_mask)).requires_grad_()
    [update] = algorithm.updates(0)
    loss = update.objective(Totals.of(batch))(batch, Predictions(logprobs=logprobs)).loss
    loss.backward()
    assert bool(loss.isfinite())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())
