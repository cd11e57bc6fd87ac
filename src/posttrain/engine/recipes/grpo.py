"""GRPO: push the policy towards responses that are better than their group.

The policy that samples is the policy that is trained, so the recorded log-probabilities are the "old" ones of the PPO
ratio, for every mini-batch of the step; no further importance weight exists. Responses without advantage (their group
has no signal, or they have no score) have no policy gradient and are not computed; the loss is divided by all that was
sampled all the same, so that leaving them out changes nothing. Source: DeepSeekMath, arXiv 2402.03300; clip-higher:
DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from posttrain.engine.algorithms.advantages import ESTIMATORS, by_group, has_signal
from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import GRPOConfig
from posttrain.engine.recipes.algorithm import (
    REFERENCE,
    Column,
    PromptSource,
    RolloutDefaults,
    ScoredGroup,
    Update,
    pack,
)


@final
@dataclass(frozen=True, slots=True)
class GRPO(RolloutDefaults):
    """Over groups of samples."""

    config: GRPOConfig

    @property
    def source(self) -> PromptSource:
        """Prompts and samples of a step."""
        c = self.config
        return PromptSource(c.prompts_per_step, c.group_size, c.max_new_tokens, c.temperature)

    def requires(self, step: int) -> Sequence[Column]:
        """The reference, with a KL penalty."""
        return (REFERENCE,) if self.config.kl else ()

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Everything sampled, or what has a signal, as the loss is divided."""
        return pack(groups, _with_signal) if self.config.denominator == "signal" else pack(groups)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        """Advantages, and whether a document has any gradient."""
        rewards, place = by_group(batch.column("reward"), batch.column("group"))
        advantages = ESTIMATORS[self.config.advantage](rewards)[place]
        live = (has_signal(rewards)[:, None] & ~rewards.isnan())[place]
        batch = batch.with_columns(advantages=batch.spread(advantages))
        return batch.with_document_columns(live=live)

    def updates(self, step: int) -> Sequence[Update]:
        """The policy; with a KL penalty every document has a gradient, since the penalty reads no reward."""
        c, clip = self.config, (self.config.clip_low, self.config.clip_high)
        if c.kl:
            return (Update("policy", self._objective, mini_batches=c.mini_batches, clip=clip),)
        return (Update("policy", self._objective, mini_batches=c.mini_batches, computes=_live, clip=clip),)

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """The share of groups without a signal."""
        return {"groups/zero_std": sum(not _with_signal(group) for group in groups) / len(groups)}

    def unused(self, step: int) -> str:
        """It has no gradient."""
        return "group without signal"

    def _objective(self, totals: Totals) -> PolicyObjective:
        c = self.config
        return PolicyObjective(
            totals,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            aggregation=c.aggregation,
            norm=c.max_new_tokens,
            kl=KLTerm(c.kl.coefficient, c.kl.estimator) if c.kl else None,
        )


def _with_signal(group: ScoredGroup) -> list[int]:
    """The scored samples of a group whose rewards differ; none of another."""
    rewards = torch.from_numpy(group.rewards)
    scored: list[int] = (~rewards.isnan()).nonzero()[:, 0].tolist()
    return scored if bool(has_signal(rewards[None])[0]) else []


def _live(batch: TokenBatch) -> list[int]:
    found: list[int] = batch.column("live").nonzero()[:, 0].tolist()
    return found
