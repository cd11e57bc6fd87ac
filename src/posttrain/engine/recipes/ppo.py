"""PPO with four roles: a policy and a critic that learn, a frozen reference, and a judge (a reward model or function).

Advantages are computed by GAE from the critic's values before the updates. Sources: PPO, arXiv 1707.06347; GAE, arXiv
1506.02438; PPO with a reward model: InstructGPT, arXiv 2203.02155.
"""

from typing import TypeVar

from posttrain.engine.algorithms.advantages import generalized_advantages, whiten
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import PPOConfig
from posttrain.engine.recipes.actor_critic import ActorCritic

P = TypeVar("P", bound=PPOConfig)


class PPO(ActorCritic[P]):
    """PPO over every response that has a score."""

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add rewards per token, returns and advantages."""
        gae, mask, rewards = self.config.gae, batch.response_mask, self.rewards(batch)
        found = generalized_advantages(rewards, batch.column("values"), mask, batch.lengths, gae.gamma, gae.lam)
        advantages = whiten(found[0], mask) if gae.whiten else found[0]
        return batch.with_columns(rewards=rewards, returns=found[1], advantages=advantages)
