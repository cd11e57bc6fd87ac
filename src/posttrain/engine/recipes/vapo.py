"""VAPO: PPO for long answers, whose critic sees the score from every token.

The critic is trained before the policy and learns from Monte Carlo returns (λ = 1), so it has no bias over long
distances. The policy's advantages decay with a λ that grows with the length of the response. Clip-higher and the token
mean are those of DAPO. Responses that earned a reward are also imitated: the mean of −log π over their tokens, which
has its own denominator, is added to the loss. Source: Yue et al., arXiv 2504.05118, sections 4.1 to 4.3.
"""

from dataclasses import replace
from typing import final

from posttrain.engine.algorithms.advantages import generalized_advantages, length_adaptive, whiten
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import VAPOConfig
from posttrain.engine.recipes.actor_critic import ActorCritic


@final
class VAPO(ActorCritic[VAPOConfig]):
    """VAPO over every response that has a score."""

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add rewards per token, returns, advantages, and the tokens of positive responses."""
        gae, mask, rewards = self.config.gae, batch.response_mask, self.rewards(batch)
        arguments = rewards, batch.column("values"), mask, batch.lengths, gae.gamma
        _, returns = generalized_advantages(*arguments, gae.critic_lam)
        advantages, _ = generalized_advantages(*arguments, length_adaptive(batch.response_lengths, gae.alpha))
        advantages = whiten(advantages, mask) if gae.whiten else advantages
        positive = batch.spread((batch.column("reward") > self.config.positive.above).to(advantages.dtype))
        return batch.with_columns(rewards=rewards, returns=returns, advantages=advantages, positive=positive)

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the policy's objective with the imitation of positive responses."""
        return replace(super().objective(totals), imitation=self.config.positive.weight)
