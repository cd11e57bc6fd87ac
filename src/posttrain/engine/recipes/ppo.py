"""PPO with four roles: a policy and a critic that learn, a frozen reference, and a judge (a reward model or function).

The score is at a response's last token, or at the tokens where the reward was earned; a KL penalty against the
reference is in the reward of every token, or in the loss, never in both. Advantages are computed by GAE from the
critic's values before the updates. Sources: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; PPO with a reward model:
InstructGPT, arXiv 2203.02155.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from posttrain.engine.algorithms.advantages import generalized_advantages, whiten
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective, Totals, ValueObjective, old_logprobs
from posttrain.engine.batch import TokenBatch, precision
from posttrain.engine.config import PPOConfig
from posttrain.engine.recipes.algorithm import VALUES, Column, Update
from posttrain.engine.recipes.policy_gradient import PolicyGradient, token_rewards


@final
class PPO(PolicyGradient[PPOConfig]):
    """PPO over every response that has a score."""

    reads_token_scores = True

    def requires(self, step: int) -> Sequence[Column]:
        """Return the critic's values and, with a KL penalty, the reference's log-probabilities."""
        return (VALUES, *super().requires(step))

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add rewards per token, returns and advantages."""
        c, mask, lengths = self.config, batch.response_mask, batch.lengths
        scores = batch.column("reward").to(precision(old_logprobs(batch)))
        rewards = token_rewards(batch, scores, c.kl if c.kl and c.kl.place == "reward" else None)
        values = batch.column("values")
        advantages, returns = generalized_advantages(rewards, values, mask, lengths, c.gae.gamma, c.gae.lam)
        if c.gae.whiten:
            advantages = whiten(advantages, mask)
        return batch.with_columns(rewards=rewards, returns=returns, advantages=advantages)

    def updates(self, step: int) -> Sequence[Update]:
        """Return the updates of the critic and, after its warm-up, of the policy."""
        c = self.config
        over = partial(Update, epochs=c.ppo_epochs, mini_batches=c.mini_batches)
        critic = over("critic", partial(ValueObjective, clip=c.critic.clip))
        if step < c.critic.warmup:
            return (critic,)
        return (critic, over("policy", self.objective, clip=(c.clip_low, c.clip_high)))

    def unused(self, step: int) -> str:
        """Return the reason: the policy does not learn yet."""
        return "critic warm-up"

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the policy's objective, with the KL penalty if it is in the loss."""
        c = self.config
        kl = KLTerm(c.kl.coefficient, c.kl.estimator) if c.kl and c.kl.place == "loss" else None
        return replace(super().objective(totals), kl=kl)
