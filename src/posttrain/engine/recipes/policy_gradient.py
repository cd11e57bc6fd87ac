"""The bases of clipped policy gradients, and of those whose baseline comes from the other responses of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from posttrain.engine.algorithms.advantages import Estimator, by_group
from posttrain.engine.algorithms.objectives import (
    KLTerm,
    PolicyObjective,
    Totals,
    kl_estimate,
    kl_rewards,
    old_logprobs,
    score_rewards,
)
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import OnPolicyConfig, PPOKLConfig, RewardKLConfig, SamplingConfig
from posttrain.engine.recipes.algorithm import (
    PROXIMAL,
    REFERENCE,
    Column,
    PromptSource,
    RolloutAlgorithm,
    ScoredGroup,
    Update,
    every_item,
    pack,
)

S = TypeVar("S", bound=SamplingConfig)
C = TypeVar("C", bound=OnPolicyConfig)


class Sampling(RolloutAlgorithm, Generic[S]):
    """The base of algorithms that sample as their stage configures.

    Args:
        config: the stage's parameters.
    """

    def __init__(self, config: S) -> None:
        self.config = config

    @property
    def source(self) -> PromptSource:
        """Prompts, samples and turns of a step."""
        c = self.config
        shape = c.prompts_per_step, c.group_size, c.max_new_tokens, c.temperature
        trained = c.trained_samples // c.prompts_per_step
        return PromptSource(*shape, stop=c.stop, turns=c.turns_most, observed=c.observed_most, trained=trained)


class PolicyGradient(Sampling[C]):
    """Trains the policy on every scored response that has an advantage; subclasses implement `credit`.

    Other responses have no gradient and are not computed; the loss is still divided by the totals of all responses.
    """

    groupwise = True
    clips_tokens: ClassVar[bool] = True  # whether traces may mark tokens as clipped by PPO's rule

    def requires(self, step: int) -> Sequence[Column]:
        """Return the reference's column if there is a KL penalty, and the proximal column if another policy sampled."""
        lag = self.config.lag
        proximal = (PROXIMAL,) if lag and lag.correction != "bypass" else ()
        return (*proximal, *((REFERENCE,) if self.config.has("reference") else ()))

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the samples that have a score."""
        return pack(groups, scored)

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update."""
        c = self.config
        clip = (c.clip_low, c.clip_high) if self.clips_tokens else None
        return (Update("policy", self.objective, mini_batches=c.mini_batches, computes=with_advantage, clip=clip),)

    def unused(self, step: int) -> str:
        """Return the reason: the sample has no gradient."""
        return "no advantage"

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the clipped objective, a token mean."""
        c = self.config
        cap = c.lag.truncation if c.lag else None
        return PolicyObjective(totals, clip_low=c.clip_low, clip_high=c.clip_high, importance=cap)


class GroupBaseline(PolicyGradient[C]):
    """Advantages relative to the other samples of a prompt; a penalty in the reward is applied first."""

    estimator: ClassVar[Estimator]

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Add one advantage for each response."""
        rewards, place = by_group(self.rewards(batch), batch.column("group"))
        return batch.with_columns(advantages=batch.spread(type(self).estimator(rewards)[place]))

    def rewards(self, batch: TokenBatch) -> Tensor:
        """Return the reward of each response, [D] float64."""
        return penalised(batch, getattr(self.config, "kl", None))

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update; its credit depends on each group alone."""
        return [replace(update, by_group=True) for update in super().updates(step)]

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Return the share of groups without a signal."""
        return {"groups/zero_std": sum(not with_signal(group) for group in groups) / len(groups)}

    def unused(self, step: int) -> str:
        """Return the reason: the group's rewards are equal."""
        return "group without signal"


class LossPenalty(GroupBaseline[C]):
    """Advantages relative to the other samples of a prompt, and an optional KL penalty in the loss."""

    def rewards(self, batch: TokenBatch) -> Tensor:
        """Return the reward of each response, [D] float64, without the penalty."""
        rewards: Tensor = batch.column("reward").double()
        return rewards

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update; with a KL penalty in the loss, every document has a gradient."""
        found = super().updates(step)
        return [replace(update, computes=every_item) for update in found] if self.config.has("reference") else found

    def objective(self, totals: Totals) -> PolicyObjective:
        """Return the clipped objective with the penalty."""
        kl = getattr(self.config, "kl", None)
        return replace(super().objective(totals), kl=KLTerm(kl.coefficient, kl.estimator) if kl else None)


def scored(group: ScoredGroup) -> list[int]:
    """Return the samples of a group that have a score."""
    found: list[int] = np.flatnonzero(~np.isnan(group.rewards)).tolist()
    return found


def with_signal(group: ScoredGroup) -> list[int]:
    """Return the scored samples if their rewards differ, else none."""
    chosen = scored(group)
    rewards = group.rewards[chosen]
    return chosen if len(chosen) > 1 and rewards.max() > rewards.min() else []


def with_advantage(batch: TokenBatch) -> list[int]:
    """Return the items that have a policy gradient: the advantage of some response token is not 0."""
    item = np.repeat(np.arange(len(batch.item_lengths)), batch.item_lengths)
    live = (batch.response_mask & (batch.column("advantages") != 0)).numpy()
    found: list[int] = np.flatnonzero(np.bincount(item[live])).tolist()
    return found


def penalised(batch: TokenBatch, kl: RewardKLConfig | None) -> Tensor:
    """Return rewards minus β times the sum of the KL estimates of a response, [D] float64."""
    rewards: Tensor = batch.column("reward").double()
    if kl is None:
        return rewards
    old, anchor = old_logprobs(batch), batch.column("reference_logprobs")
    penalty = kl_estimate(old, anchor, batch.response_mask, kl.estimator).double()
    return rewards - kl.coefficient * batch.sum_by_document(penalty)


def token_rewards(batch: TokenBatch, scores: Tensor, kl: RewardKLConfig | PPOKLConfig | None) -> Tensor:
    """Return scores [D] at the tokens where they were earned, minus any KL penalty, [T]."""
    mask, lengths, earned = batch.response_mask, batch.lengths, batch.token_columns.get("token_scores")
    if kl is None:
        return score_rewards(scores, mask, lengths, earned)
    old, anchor, weight, kind = old_logprobs(batch), batch.column("reference_logprobs"), kl.coefficient, kl.estimator
    return kl_rewards(old, anchor, mask, scores, lengths, earned, coefficient=weight, estimator=kind)
