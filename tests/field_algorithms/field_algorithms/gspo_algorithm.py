"""GSPO (arXiv 2507.18071): one importance ratio for each response."""

from dataclasses import replace
from typing import ClassVar

from field_algorithms.gspo import GSPOConfig
from posttrain.engine.algorithms.advantages import Estimator, grpo
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.recipes.policy_gradient import LossPenalty


class GSPO(LossPenalty[GSPOConfig]):
    """The base samples groups, and adds a KL penalty to the loss if `kl` is set."""

    estimator: ClassVar[Estimator] = staticmethod(grpo)
    clips_tokens: ClassVar[bool] = False

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the mean over responses of the loss of their ratio (eq. 5 and 7)."""
        return replace(super().objective(totals), surrogate="sequence", aggregation="seq-mean-token-mean")
