"""CISPO: clips the weights of tokens, not their updates, so that rare tokens keep their gradient.

PPO's clip removes the gradient of tokens whose probability rose most, such as the words that begin a reflection. Here
every token keeps its gradient, with a weight that is at most 1 + ε_high. The loss is a token mean. Source: MiniMax-M1,
arXiv 2506.13585, eq. 4 and 5.
"""

from dataclasses import replace
from typing import ClassVar, final

from posttrain.engine.algorithms.advantages import Estimator, grpo
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.config import CISPOConfig
from posttrain.engine.recipes.policy_gradient import LossPenalty


@final
class CISPO(LossPenalty[CISPOConfig]):
    """CISPO over groups of samples."""

    estimator: ClassVar[Estimator] = staticmethod(grpo)
    clips_tokens: ClassVar[bool] = False

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the objective with clipped weights."""
        return replace(super().objective(totals), surrogate="weight")
