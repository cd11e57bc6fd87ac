"""DPO: the policy learns to prefer the chosen response by more than the reference does, without a reward model.

Source: Rafailov et al., arXiv 2305.18290, eq. 7. For noisy labels, the loss has its conservative form, which assumes
that a share ε of the labels is inverted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F

from posttrain.engine.algorithms.objectives import LossParts, Totals
from posttrain.engine.batch import Need, Predictions, TokenBatch
from posttrain.engine.config import DPOConfig
from posttrain.engine.recipes.algorithm import REFERENCE, Column, Update
from posttrain.engine.recipes.reward_model import OverPairs


@final
@dataclass(frozen=True, slots=True)
class DPO(OverPairs):
    """DPO over preference pairs."""

    config: DPOConfig

    def requires(self, step: int) -> Sequence[Column]:
        """Return the column of the starting policy's log-probabilities of the responses."""
        return (REFERENCE,)

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update."""
        objective = partial(DPOObjective, beta=self.config.beta, smoothing=self.config.label_smoothing)
        return (Update("policy", objective),)


@final
@dataclass(frozen=True, slots=True)
class DPOObjective:
    """−(1−ε)·log σ(m) − ε·log σ(−m), mean over the step's pairs, with m = β·(Δ log π/π_ref of chosen and rejected)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    totals: Totals  # an item is a pair: the chosen response, then the rejected one
    beta: float
    smoothing: float

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        logprobs, mask = predicted.of("logprobs"), micro.response_mask
        zero = logprobs.new_zeros(())
        gained = torch.where(mask, logprobs, zero) - torch.where(mask, micro.column("reference_logprobs"), zero)
        rewards = self.beta * micro.sum_by_document(gained)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margin, count = chosen - rejected, max(self.totals.items, 1)
        loss = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        told = {"accuracy": (margin > 0).float(), "margin": margin, "chosen": chosen, "rejected": rejected}
        return LossParts(loss.sum() / count, {name: value.detach().sum() / count for name, value in told.items()})
