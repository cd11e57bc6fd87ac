"""GSPO: one importance ratio for each response, the geometric mean of the ratios of its tokens.

A ratio per token has a variance that grows with the length of the response and, in a mixture of experts, jumps when
other experts are chosen. The reward belongs to the whole response, so the ratio and its clip do too. The clip is much
narrower than GRPO's. Source: Zheng et al., arXiv 2507.18071, eq. 5 and 7.
"""

from dataclasses import replace
from typing import ClassVar, final

from posttrain.engine.algorithms.advantages import Estimator, grpo
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.config import GSPOConfig
from posttrain.engine.recipes.policy_gradient import LossPenalty


@final
class GSPO(LossPenalty[GSPOConfig]):
    """GSPO over groups of samples."""

    estimator: ClassVar[Estimator] = staticmethod(grpo)
    clips_tokens: ClassVar[bool] = False

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the objective: the mean over responses of the loss of their ratio."""
        return replace(super().objective(totals), surrogate="sequence", aggregation="seq-mean-token-mean")
