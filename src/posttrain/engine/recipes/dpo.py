"""DPO: the policy learns to prefer the chosen response by more than the reference does, without a reward model.

Source: Rafailov et al., arXiv 2305.18290, eq. 7. For noisy labels, the loss has its conservative form, or its robust
form (Chowdhury et al., arXiv 2403.00409, eq. 12); IPO (Azar et al., arXiv 2310.12036, eq. 17) has a square loss, which
bounds the margin. As in TRL, IPO averages log-probabilities over tokens, on the advice of its authors.
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
from posttrain.engine.recipes.reward_model import OverPairs, pair_parts, summed


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
        c = self.config
        return (Update("policy", partial(DPOObjective, beta=c.beta, smoothing=c.label_smoothing, loss=c.loss)),)


@final
@dataclass(frozen=True, slots=True)
class DPOObjective:
    """A loss of the margin m = β·(Δ log π/π_ref of chosen and rejected), mean over the step's pairs.

    sigmoid: −(1−ε)·log σ(m) − ε·log σ(−m). robust: (−(1−ε)·log σ(m) + ε·log σ(−m)) / (1−2ε), which is unbiased if a
    share ε of the labels is inverted. ipo: (m/β − 1/(2β))², with log-probabilities averaged over a response's tokens.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"items"})
    totals: Totals  # an item is a pair: the chosen response, then the rejected one
    beta: float
    smoothing: float
    loss: str = "sigmoid"

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        mask, mean = micro.response_mask, self.loss == "ipo"
        anchors = torch.where(mask, micro.column("reference_logprobs"), 0.0)
        gained = torch.where(mask, predicted.of("logprobs"), 0.0) - anchors
        chosen, rejected = (self.beta * one for one in summed(micro, gained, mean=mean))
        margin, share = chosen - rejected, self.smoothing
        right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
        losses = {
            "sigmoid": (1 - share) * right + share * wrong,
            "robust": ((1 - share) * right - share * wrong) / (1 - 2 * share),
            "ipo": (margin / self.beta - 1 / (2 * self.beta)).square(),
        }
        return pair_parts(losses[self.loss], chosen, rejected, self.totals)
