"""SimPO: the reward of a response is its mean log-probability, as in decoding; no reference is needed.

Source: Meng et al., arXiv 2405.14734, eq. 6: −log σ(β/|y_c|·log π(y_c) − β/|y_r|·log π(y_r) − γ).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch.nn.functional as F

from posttrain.engine.algorithms.objectives import LossParts, Totals
from posttrain.engine.batch import Need, Predictions, TokenBatch
from posttrain.engine.config import SimPOConfig
from posttrain.engine.recipes.algorithm import Update
from posttrain.engine.recipes.reward_model import OverPairs, pair_parts, summed


@final
@dataclass(frozen=True, slots=True)
class SimPO(OverPairs):
    """SimPO over preference pairs."""

    config: SimPOConfig

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update."""
        return (Update("policy", partial(SimPOObjective, beta=self.config.beta, gamma=self.config.gamma)),)


@final
@dataclass(frozen=True, slots=True)
class SimPOObjective:
    """−log σ(r_chosen − r_rejected − γ), mean over the step's pairs; a reward is β times the mean log-probability."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"items"})
    totals: Totals
    beta: float
    gamma: float

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        chosen, rejected = (self.beta * one for one in summed(micro, predicted.of("logprobs"), mean=True))
        return pair_parts(-F.logsigmoid(chosen - rejected - self.gamma), chosen, rejected, self.totals)
