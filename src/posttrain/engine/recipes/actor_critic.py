"""The base of clipped policy gradients with a critic."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective, Totals, ValueObjective, old_logprobs
from posttrain.engine.batch import TokenBatch, precision
from posttrain.engine.config import ActorCriticConfig
from posttrain.engine.recipes.algorithm import VALUES, Column, Update
from posttrain.engine.recipes.policy_gradient import PolicyGradient, token_rewards

A = TypeVar("A", bound=ActorCriticConfig)


class ActorCritic(PolicyGradient[A]):
    """The base of policy gradients with a critic; subclasses implement `credit` with the column `values`.

    The score is at a response's last token, or at the tokens where the reward was earned. A KL penalty against the
    reference is in the reward of every token or in the loss, never in both.
    """

    reads_token_scores = True

    def requires(self, step: int) -> Sequence[Column]:
        """Return the critic's values and, with a KL penalty, the reference's log-probabilities."""
        return (VALUES, *super().requires(step))

    def rewards(self, batch: TokenBatch) -> Tensor:
        """Return the reward of each token, [T]."""
        kl, scores = self.config.kl, batch.column("reward").to(precision(old_logprobs(batch)))
        return token_rewards(batch, scores, kl if kl and kl.place == "reward" else None)

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
        return "critic warm-up" if step < self.config.critic.warmup else "not chosen"

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the policy's objective, with the KL penalty if it is in the loss."""
        kl = self.config.kl
        term = KLTerm(kl.coefficient, kl.estimator) if kl and kl.place == "loss" else None
        return replace(super().objective(totals), kl=term)
