"""GRPO: move the policy towards responses that are better than their group.

The sampling policy is the trained policy, so the recorded log-probabilities are the "old" log-probabilities of the PPO
ratio for every mini-batch of the step; there is no further importance weight. Responses without advantage (their group
has no signal, or they have no score) have no policy gradient and are not computed. The loss is still divided by the
totals of all samples, so leaving these responses out does not change the loss. Source: DeepSeekMath, arXiv 2402.03300;
clip-higher: DAPO, arXiv 2503.14476.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from posttrain.engine.algorithms.advantages import ESTIMATORS, by_group
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import GRPOConfig
from posttrain.engine.recipes.algorithm import ScoredGroup, pack
from posttrain.engine.recipes.policy_gradient import LossPenalty, with_signal


@final
class GRPO(LossPenalty[GRPOConfig]):
    """GRPO over groups of samples."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the samples that the loss's denominator counts: all samples, or those of groups with a signal."""
        return pack(groups, with_signal) if self.config.denominator == "signal" else pack(groups)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add advantages, computed by the stage's estimator."""
        rewards, place = by_group(batch.column("reward"), batch.column("group"))
        return batch.with_columns(advantages=batch.spread(ESTIMATORS[self.config.advantage](rewards)[place]))

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the objective with the stage's aggregation."""
        c = self.config
        return replace(super().objective(totals), aggregation=c.aggregation, norm=c.sampled_tokens)
