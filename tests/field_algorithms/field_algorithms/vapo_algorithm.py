"""VAPO (arXiv 2504.05118): decoupled, length-adaptive advantages, and a loss on positive responses."""

from dataclasses import replace

from field_algorithms.vapo import VAPOConfig
from posttrain.engine.algorithms.advantages import generalized_advantages, length_adaptive, whiten
from posttrain.engine.algorithms.objectives import PolicyObjective, Totals
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.actor_critic import ActorCritic


class VAPO(ActorCritic[VAPOConfig]):
    """The base trains the critic, warms it up, and clips the policy's ratio."""

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add returns with the critic's λ, advantages with the λ of each response, and the positive tokens."""
        gae, rewards, mask = self.config.gae, self.rewards(batch), batch.response_mask
        given = rewards, batch.column("values"), mask, batch.lengths, gae.gamma
        _, returns = generalized_advantages(*given, gae.critic_lam)
        advantages, _ = generalized_advantages(*given, length_adaptive(batch.response_lengths, gae.alpha))
        advantages = whiten(advantages, mask) if gae.whiten else advantages
        positive = batch.spread((batch.column("reward") > self.config.positive.above).to(advantages.dtype))
        return batch.with_columns(rewards=rewards, returns=returns, advantages=advantages, positive=positive)

    def objective(self, totals: Totals) -> PolicyObjective:
        """Add μ times the mean of −log π over the positive tokens, divided by their number."""
        return replace(super().objective(totals), imitation=self.config.positive.weight)
