"""Batches of sampled documents with random columns, and what an algorithm's loss is on them, as tests write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch

EXACT: Final = {"rel": 1e-12, "abs": 1e-12}  # what float64 in both, ours and a reference, may differ by


@dataclass(frozen=True)
class Sampled:
    """Documents of two prompt tokens each, and per response what a test computes with, in float64."""

    batch: TokenBatch
    old: list[Tensor]
    reference: list[Tensor]
    rewards: Tensor
    groups: list[int]


def sampled(lengths: Sequence[int], rewards: Sequence[float], groups: Sequence[int], seed: int = 0) -> Sampled:
    """Responses of `lengths` tokens; log-probabilities of policy and reference are random, columns float64."""
    torch.manual_seed(seed)
    batch = TokenBatch.pack([Document([1, 2], [3] * length) for length in lengths])
    old, reference = (-torch.rand(len(batch.response_mask), dtype=torch.float64) - 0.1 for _ in range(2))
    put = {"behaviour_logprobs": old, "reference_logprobs": reference}
    worth = torch.tensor(rewards, dtype=torch.float64)
    batch = batch.with_columns(**put).with_document_columns(reward=worth, group=torch.tensor(groups))
    return Sampled(batch, responses(batch, old), responses(batch, reference), worth, list(groups))


def responses(batch: TokenBatch, values: Tensor) -> list[Tensor]:
    """A token column's values at every document's response."""
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, batch.lengths, strict=True)]
    return [values[a:b][batch.response_mask[a:b]] for a, b in zip(starts, ends, strict=True)]


def loss_and_gradient(algorithm: Any, batch: TokenBatch, seed: int = 7) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The policy's loss on log-probabilities near the old ones, float64: loss, those at responses, their gradients."""
    torch.manual_seed(seed)
    old = batch.column("behaviour_logprobs" if "behaviour_logprobs" in batch.token_columns else "reference_logprobs")
    logprobs = (old.double() + 0.05 * torch.randn(len(old), dtype=torch.float64)).requires_grad_()
    update = next(update for update in algorithm.updates(10**6) if update.role == "policy")
    parts = update.objective(Totals.of(batch))(batch, Predictions(logprobs=logprobs))
    [gradient] = torch.autograd.grad(parts.loss, [logprobs])
    return parts.loss.detach(), responses(batch, logprobs.detach()), responses(batch, gradient)


def clipped(new: Tensor, old: Tensor, advantage: Tensor | float, low: float, high: float) -> Tensor:
    """PPO's surrogate per token, straight from the paper."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
