"""Weights between the policy that sampled and the one that a step began with, against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk, FixedScorer, even_tokens
from torch import Tensor

from posttrain.domain.jobs import Metric
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.config import GRPOConfig, TraceConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, initial_model
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.settings import PolicyGradientOptimizerConfig

Floats = npt.NDArray[np.float64]

LOW, HIGH = 0.2, 0.28
# Eight sampled tokens: by sign of the advantage, ratios below, inside and above the clip; weights on both sides of 0.5.
RATIOS = np.array([0.7, 1.0, 1.1, 1.5, 0.6, 0.9, 1.3, 1.4])  # π / π at the step's beginning
ADVANTAGES = np.array([1.0, -2.0, 0.5, 2.0, -1.0, -0.5, -1.5, 0.75])
WEIGHTS = np.array([0.3, 2.0, 0.45, 1.7, 0.9, 3.0, 0.4, 0.2])  # π at the step's beginning / π that sampled
CLIPPED = np.array([False, False, False, True, True, False, False, True])
# Four responses of 4, 2, 1 and 1 sampled tokens, so that what the loss is divided by is exact in float32 as well.
SHAPES = [[True, False, True, True, True], [True, False, False, True], [True], [False, True]]
DIVISORS = {
    "token-mean": np.full(8, 8.0),
    "seq-mean-token-mean": 4 * np.array([4.0, 4.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0]),
    "seq-mean-token-sum-norm": np.full(8, 4 * 16.0),
}
GIVEN = {"behaviour_logprobs", "advantages"}  # whatever a stage requires
SECOND = len(PROMPTS[0].tokens) + 1  # the place of a response's second token: every prompt is as long


def spread(batch: TokenBatch, values: Floats) -> Tensor:
    """[T] float64: the values at the sampled tokens; at prompts and at what was observed, no number at all."""
    found = torch.full((len(batch.tokens),), math.nan, dtype=torch.float64)
    found[batch.response_mask] = torch.from_numpy(values)
    return found


def surrogate(ratios: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Each token's w · max(−A·ρ, −A·clip(ρ)), and its derivative by log π: −w·A·ρ where nothing clips, else 0."""
    plain, held = -ADVANTAGES * ratios, -ADVANTAGES * np.clip(ratios, 1 - LOW, 1 + HIGH)
    return weights * np.maximum(plain, held), np.where(plain >= held, weights * plain, 0.0)


def columns() -> tuple[TokenBatch, Tensor]:
    """The batch with its columns, and what the policy says of it now."""
    batch = TokenBatch.pack([Document((1, 2), (3,) * len(shape), sampled=shape) for shape in SHAPES])
    began = -np.linspace(0.3, 2.4, 8)
    told = {"proximal_logprobs": began, "behaviour_logprobs": began - np.log(WEIGHTS), "advantages": ADVANTAGES}
    batch = batch.with_columns(**{name: spread(batch, values) for name, values in told.items()})
    return batch, spread(batch, began + np.log(RATIOS)).requires_grad_()


def holds(objective: PolicyObjective, batch: TokenBatch, now: Tensor, expected: tuple[Floats, Floats]) -> None:
    """Loss and gradient are these, divided as the objective says; no other token has a gradient."""
    tokens, slopes = (values / DIVISORS[objective.aggregation] for values in expected)
    parts = objective(batch, Predictions(logprobs=now))
    assert float(parts.loss.detach()) == pytest.approx(tokens.sum(), rel=1e-12)
    [gradient] = torch.autograd.grad(parts.loss, [now])
    assert gradient[batch.response_mask].numpy() == pytest.approx(slopes, rel=1e-12)
    assert not gradient[~batch.response_mask].any()


@pytest.mark.parametrize("aggregation", DIVISORS)
@pytest.mark.parametrize("cap", [None, math.inf, 0.5])
def test_a_surrogate_is_weighed_by_how_far_the_policies_were_apart(cap: float | None, aggregation: str) -> None:
    batch, now = columns()
    weights = np.ones(8) if cap is None else np.minimum(WEIGHTS, cap)
    expected = surrogate(RATIOS, weights)
    assert ((expected[1] == 0) == CLIPPED).all(), "some tokens are clipped, and others beyond the clip are not"
    objective = PolicyObjective(Totals.of(batch), LOW, HIGH, aggregation, norm=16, importance=cap)
    holds(objective, batch, now, expected)
    told = objective(batch, Predictions(logprobs=now)).sums
    assert float(told["clip_fraction"]) == CLIPPED.mean(), "a weight clips nothing"


@pytest.mark.parametrize(
    ("lag", "ratios", "weights"),
    [
        ({"correction": "tis", "cap": 0.5}, RATIOS, np.minimum(WEIGHTS, 0.5)),
        ({"correction": "tis"}, RATIOS, np.minimum(WEIGHTS, 2.0)),
        ({"correction": "decoupled"}, RATIOS, WEIGHTS),
        ({"correction": "bypass"}, RATIOS * WEIGHTS, np.ones(8)),
    ],
    ids=["tis, cap 0.5", "tis", "decoupled", "bypass"],
)
def test_the_corrections_of_a_stage_are_their_formulas(lag: dict[str, Any], ratios: Floats, weights: Floats) -> None:
    placement = {"policy": {"cpus": 1}, "rollout": {"cpus": 1}}
    config = GRPOConfig(
        data="d", reward="r", steps=2, lag=lag, clip_low=LOW, clip_high=HIGH, placement=placement, max_new_tokens=16
    )
    batch, now = columns()
    algorithm = GRPO(config)
    asked = {column.name for column in algorithm.requires(1)}
    batch = replace(batch, token_columns={k: v for k, v in batch.token_columns.items() if k in {*GIVEN, *asked}})
    holds(algorithm.objective(Totals.of(batch)), batch, now, surrogate(ratios, weights))


class Apart(GRPO):  # type: ignore[misc]
    """Keeps every step's columns; who sampled is further away than so few steps would bring them."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.steps: list[TokenBatch] = []

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """The second token of every response was observed."""
        batch = super().form(groups, seed)
        if batch is None:
            return None
        return replace(batch, response_mask=batch.response_mask & (batch.positions != SECOND))

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Noise at every token, those outside the mask as well."""
        batch = super().credit(batch)
        noise = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(len(self.steps)))
        self.steps.append(batch.with_columns(behaviour_logprobs=batch.column("behaviour_logprobs") + noise))
        return self.steps[-1]


def distances(batch: TokenBatch) -> dict[str, float]:
    """With w = π/μ over n tokens that μ sampled: (Σ w)² / (n · Σ w²), and the mean of w − 1 − log w."""
    mask = batch.response_mask.numpy()
    old, sampled = (batch.column(f"{who}_logprobs").double().numpy()[mask] for who in ("proximal", "behaviour"))
    weights = np.exp(old - sampled)
    ess = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    return {"lag/ess": float(ess), "lag/kl": float((weights - 1 - (old - sampled)).mean())}


@pytest.mark.parametrize("correction", ["tis", "decoupled"])
def test_what_a_step_tells_of_its_lag_is_the_formula(tmp_path: Path, correction: str) -> None:
    folder = tmp_path / "model"
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    pools = {name: ResourcePool(InlineBackend(pool=name)) for name in ("policy", "rollout")}
    config = GRPOConfig(
        data="d", reward="r", steps=4, prompts_per_step=3, group_size=4, max_new_tokens=4, mini_batches=2,
        placement={name: {"cpus": 1} for name in pools}, lag={"steps": 2, "correction": correction},
        optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2), trace=TraceConfig(groups=0),
    )  # fmt: skip
    roles = open_roles(config, ModelSource(folder, "float32"), 11, lambda role: pools[role])
    algorithm = Apart(config)
    desk = Desk(tmp_path, OnPolicy(config, algorithm, roles, PROMPTS, FixedScorer(even_tokens), 11))
    desk.run()
    told = [fact.values for fact in desk.facts if isinstance(fact, Metric)]
    expected = [distances(batch) for batch in algorithm.steps]
    assert len(told) == len(expected) == 4
    for values, formula in zip(told, expected, strict=True):
        assert {name: values[name] for name in formula} == pytest.approx(formula, rel=1e-5)
        assert 0.1 < formula["lag/ess"] < 0.9
        assert formula["lag/kl"] > 0.1
    assert any(length > SECOND for batch in algorithm.steps for length in batch.lengths), "none has a hole"
