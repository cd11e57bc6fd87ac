"""REINFORCE++: returns of penalised rewards, normalised over all tokens of a step; no critic and no groups.

A_t = Σ_{i ≥ t} γ^(i−t) · r_i with r_i = −β·kl_i and the score at the last token, or where it was earned. With
`baseline: group`, the group's mean is first subtracted from the score. Source: Hu et al., arXiv 2501.03262.
"""

from typing import final

import torch

from posttrain.engine.algorithms.advantages import by_group, generalized_advantages, whiten
from posttrain.engine.algorithms.objectives import old_logprobs
from posttrain.engine.batch import TokenBatch, precision
from posttrain.engine.config import ReinforcePlusPlusConfig
from posttrain.engine.recipes.policy_gradient import PolicyGradient, token_rewards


@final
class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusConfig]):
    """REINFORCE++ over every response that has a score."""

    reads_token_scores = True

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add returns, normalised to mean 0 and deviation 1 over the step."""
        c, mask, lengths = self.config, batch.response_mask, batch.lengths
        scores = batch.column("reward").double()
        if c.baseline == "group":
            rewards, place = by_group(scores, batch.column("group"))
            scores = (rewards - rewards.nanmean(dim=1, keepdim=True))[place]
        rewards = token_rewards(batch, scores.to(precision(old_logprobs(batch))), c.kl)
        returns, _ = generalized_advantages(rewards, torch.zeros_like(rewards), mask, lengths, c.gamma, 1.0)
        return batch.with_columns(rewards=rewards, returns=returns, advantages=whiten(returns, mask))
