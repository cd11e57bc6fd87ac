"""RLOO: REINFORCE over whole responses, with the mean of the other samples as the baseline.

The KL penalty is part of a response's reward before baselines are subtracted. The ratio's clip matters only if a step
has several mini-batches. Source: Ahmadian et al., arXiv 2402.14740, section 3.
"""

from dataclasses import replace
from typing import ClassVar, final

from posttrain.engine.algorithms.advantages import Estimator, rloo
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.config import GroupConfig
from posttrain.engine.recipes.policy_gradient import GroupBaseline


@final
class RLOO(GroupBaseline[GroupConfig]):
    """RLOO over groups of samples."""

    estimator: ClassVar[Estimator] = staticmethod(rloo)

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the objective: the mean over responses of A · Σ log π, as a response is one action."""
        return replace(super().objective(totals), aggregation="seq-mean-token-sum-norm")
