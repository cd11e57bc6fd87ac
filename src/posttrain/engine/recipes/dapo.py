"""DAPO: GRPO with a wider upper clip and a token mean; replaces groups without signal, and penalises long responses.

Source: Yu et al., arXiv 2503.14476: clip-higher (3.1), dynamic sampling (3.2), token-level loss (3.3), soft overlong
punishment (3.4, eq. 13).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from posttrain.engine.algorithms.advantages import Estimator, grpo, overlong_penalty
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import DAPOConfig
from posttrain.engine.recipes.algorithm import Drop, PromptSource, ScoredGroup
from posttrain.engine.recipes.policy_gradient import GroupBaseline, with_signal


@final
class DAPO(GroupBaseline[DAPOConfig]):
    """DAPO over groups of samples whose rewards differ."""

    estimator: ClassVar[Estimator] = staticmethod(grpo)

    @property
    def source(self) -> PromptSource:
        """Prompts and samples of a step, and the number of replacements of a dropped group."""
        return replace(super().source, refills=self.config.refills)

    def keep(self, group: ScoredGroup) -> Drop | None:
        """Apply dynamic sampling: drop a group whose rewards, without the length penalty, are equal.

        Such a group has no gradient.
        """
        return None if with_signal(group) else Drop("group without signal")

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Return the metrics of the base class and the mean penalty."""
        found, c = super().report(groups), self.config
        if c.overlong is None:
            return found
        lengths = torch.tensor([answer.generated for group in groups for answer in group.answers])
        grown = overlong_penalty(lengths, c.sampled_tokens, c.overlong.buffer)
        return {**found, "reward/overlong": -c.overlong.penalty * float(grown.mean())}

    def rewards(self, batch: TokenBatch) -> Tensor:
        """Return rewards minus the penalty of responses near the token limit."""
        rewards, c = super().rewards(batch), self.config
        if c.overlong is None:
            return rewards
        grown = overlong_penalty(batch.response_lengths, c.sampled_tokens, c.overlong.buffer)
        return rewards - c.overlong.penalty * grown
