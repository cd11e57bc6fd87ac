"""ORPO: supervised training on the chosen response, and a term that raises its odds over those of the rejected one.

One stage replaces SFT and DPO, without a reference. Source: Hong et al., arXiv 2403.07691, eq. 6 and 7, with the odds
of the mean log-probability per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.algorithms.objectives import LossParts, Totals
from posttrain.engine.batch import Need, Predictions, TokenBatch
from posttrain.engine.config import ORPOConfig
from posttrain.engine.recipes.algorithm import Update
from posttrain.engine.recipes.reward_model import OverPairs, pair_parts, summed


@final
@dataclass(frozen=True, slots=True)
class ORPO(OverPairs):
    """ORPO over preference pairs."""

    config: ORPOConfig

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update."""
        return (Update("policy", partial(ORPOObjective, beta=self.config.beta)),)


@final
@dataclass(frozen=True, slots=True)
class ORPOObjective:
    """−mean log p_chosen − λ·log σ(log odds_chosen − log odds_rejected), mean over the step's pairs."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"items"})
    totals: Totals
    beta: float

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        chosen, rejected = summed(micro, predicted.of("logprobs"), mean=True)
        ratio = _log_odds(chosen) - _log_odds(rejected)
        losses = -chosen - self.beta * F.logsigmoid(ratio)
        return pair_parts(losses, self.beta * chosen, self.beta * rejected, self.totals)


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of log p < 0; a p that rounds to 1 is the largest below it."""
    below = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return below - torch.log(-torch.expm1(below))
