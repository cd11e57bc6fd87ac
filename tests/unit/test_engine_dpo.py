"""DPO against its equation, in float64, split and whole, in each dtype that ships."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import pieces
from sampled_batches import EXACT, responses
from test_engine_recipes import TINY, TOKENIZER, inline, quiet

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Predictions
from posttrain.engine.config import DPOConfig
from posttrain.engine.loop.controller import FromRows, open_learner
from posttrain.engine.loop.publication import Roles
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.dpo import DPO
from posttrain.engine.recipes.reward_model import RewardModel
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig


class Pair:
    """The chosen one ends in 5, the rejected one in 6."""

    def __init__(self, number: int) -> None:
        self.prompt, self.chosen, self.rejected = [1, 2 + number % 3], [5] * (1 + number % 3), [6] * (1 + number % 2)


PAIRS = [Pair(number) for number in range(12)]


def config(**changes: Any) -> DPOConfig:
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=1)
    return DPOConfig(**{"data": "d", "steps": 6, "batch_size": 4, "optimizer": optimizer, **changes})


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper_however_it_is_split(smoothing: float) -> None:
    torch.manual_seed(0)
    algorithm = DPO(config(beta=0.7, label_smoothing=smoothing))
    batch = algorithm.form(PAIRS[:5], 0)
    anchor = -torch.rand(len(batch.response_mask), dtype=torch.float64)
    batch = batch.with_columns(reference_logprobs=anchor)
    logprobs = (-torch.rand(len(anchor), dtype=torch.float64)).requires_grad_()
    [update] = algorithm.updates(0)
    objective = update.objective(Totals.of(batch))
    parts = objective(batch, Predictions(logprobs=logprobs))
    found = zip(responses(batch, logprobs), responses(batch, anchor), strict=True)
    gained = [float((new - old).sum().detach()) for new, old in found]
    margins = torch.tensor([0.7 * (gained[i] - gained[i + 1]) for i in range(0, 10, 2)], dtype=torch.float64)
    right, wrong = -(1 / (1 + (-margins).exp())).log(), -(1 / (1 + margins.exp())).log()
    expected = ((1 - smoothing) * right + smoothing * wrong).mean()
    assert float(parts.loss.detach()) == pytest.approx(float(expected), **EXACT)
    assert float(parts.sums["accuracy"]) == pytest.approx(float((margins > 0).double().mean()))
    assert float(parts.sums["margin"]) == pytest.approx(float(margins.mean()), **EXACT)
    split = [
        float(objective(micro, Predictions(logprobs=-micro.column("own"))).loss)
        for micro in pieces(batch.with_columns(own=-logprobs.detach()), 9)
    ]
    assert len(split) > 1
    assert sum(split) == pytest.approx(float(expected), **EXACT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_what_is_preferred_and_begins_at_chance(dtype: str) -> None:
    made = config(steps=12, runtime=RuntimeConfig(dtype=dtype))
    model = adopt_module(initial_model(TINY, TOKENIZER, 0).to(getattr(torch, dtype)))
    roles = open_learner(made, model, 0, inline())
    recipe = FromRows(made, DPO(made), roles, PAIRS, 0, PAIRS[:8], phase="dpo")
    reports = [recipe.step(step, quiet(step)) for step in range(12)]
    assert reports[0].metrics["loss"] == pytest.approx(0.6931, abs=0.02), "the policy is its reference yet"
    assert reports[-1].metrics["accuracy"] == 1.0
    assert reports[-1].metrics["loss"] < 0.6


def test_the_probe_is_the_objective_on_held_out_pairs() -> None:
    made = config(probe={"data": "p", "every": 1, "items": 8})
    roles = open_learner(made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 0, inline())
    recipe = FromRows(made, DPO(made), roles, PAIRS, 0, PAIRS[:8], phase="dpo")
    before = recipe.probe(0, quiet(0))
    assert before is not None
    assert before.metrics["probe/loss"] == pytest.approx(0.6931, abs=1e-4)
    for step in range(6):
        recipe.step(step, quiet(step))
    after = recipe.probe(6, quiet(6))
    assert after is not None
    assert after.metrics["probe/loss"] < before.metrics["probe/loss"]
    assert after.metrics["probe/accuracy"] == 1.0


def test_without_a_reference_it_is_refused_before_anything_is_read() -> None:
    made = config()
    roles = open_learner(made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 0, inline())
    needed = "DPO needs the role reference for reference_logprobs, but the open roles are policy;"
    with pytest.raises(InputError, match=needed):
        FromRows(made, DPO(made), Roles(roles.learners), PAIRS, 0)


def test_a_step_costs_what_a_reward_model_pays_for_the_same_pairs() -> None:
    made = config()
    assert DPO(made).max_tokens(PAIRS[4]) == RewardModel(made).max_tokens(PAIRS[4])  # type: ignore[arg-type]
