"""Dr. GRPO: the advantage is not divided by the group's deviation, and the loss is not divided by a response's length.

These divisions favour some questions and some lengths over others. Source: Liu et al., arXiv 2503.20783, eq. 3.
"""

from dataclasses import replace
from typing import ClassVar, final

from posttrain.engine.algorithms.advantages import Estimator, dr_grpo
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.config import GroupConfig
from posttrain.engine.recipes.policy_gradient import GroupBaseline


@final
class DrGRPO(GroupBaseline[GroupConfig]):
    """Dr. GRPO over groups of samples."""

    estimator: ClassVar[Estimator] = staticmethod(dr_grpo)

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the objective: the mean over responses of the sum over tokens, divided by the token limit."""
        return replace(
            super().objective(totals), aggregation="seq-mean-token-sum-norm", norm=self.config.sampled_tokens
        )
