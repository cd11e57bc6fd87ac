"""REINFORCE++: no critic and no groups; the returns of penalised rewards, normalised over all tokens of a step.

A_t = Σ_{i ≥ t} γ^(i−t) · r_i with r_i = −β·kl_i and the score at the last token, or where it was earned. With
`baseline: group` the score is first taken relative to its group's mean. Source: Hu et al., arXiv 2501.03262.
"""

from typing import final

import torch

from posttrain.engine.algorithms.advantages import by_group, generalized_advantages, whiten
from posttrain.engine.algorithms.losses import kl_rewards, score_rewards
from posttrain.engine.algorithms.objectives import old_logprobs
from posttrain.engine.batch import TokenBatch, precision
from posttrain.engine.config import ReinforcePlusPlusConfig
from posttrain.engine.recipes.policy_gradient import PolicyGradient


@final
class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusConfig]):
    """Over every response that has a score."""

    reads_token_scores = True

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Returns, to mean 0 and deviation 1 over the step."""
        c, mask, lengths = self.config, batch.response_mask, batch.lengths
        scores, old = batch.column("reward").double(), old_logprobs(batch)
        earned = batch.token_columns.get("token_scores")
        if c.baseline == "group":
            rewards, place = by_group(scores, batch.column("group"))
            scores = (rewards - rewards.nanmean(dim=1, keepdim=True))[place]
        scores = scores.to(precision(old))
        if c.kl:
            weight, kind, anchor = c.kl.coefficient, c.kl.estimator, batch.column("reference_logprobs")
            rewards = kl_rewards(old, anchor, mask, scores, lengths, earned, coefficient=weight, estimator=kind)
        else:
            rewards = score_rewards(scores, mask, lengths, earned)
        returns, _ = generalized_advantages(rewards, torch.zeros_like(rewards), mask, lengths, c.gamma, 1.0)
        return batch.with_columns(rewards=rewards, returns=returns, advantages=whiten(returns, mask))
