"""PF-PPO: PPO on the responses of a group whose rewards are most reliable: the highest, and the lowest or a random one.

A reward model ranks very good and very bad responses more reliably than those between. Source: Shen and Zhang, arXiv
2409.06957, section 3.2.
"""

from collections.abc import Sequence
from typing import final

from posttrain.domain.canonical import derive_seed
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import PFPPOConfig
from posttrain.engine.recipes.algorithm import ScoredGroup, pack
from posttrain.engine.recipes.policy_gradient import scored
from posttrain.engine.recipes.ppo import PPO


@final
class PFPPO(PPO[PFPPOConfig]):
    """PF-PPO over groups of samples."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the responses that the filter keeps of each group: the best one, or the best one and another."""

        def kept(group: ScoredGroup) -> list[int]:
            ranked = sorted(scored(group), key=lambda sample: -group.rewards[sample])
            if len(ranked) < 2 or self.config.filter == "best":
                return ranked[:1]
            chance = 1 + derive_seed(seed, "filter", group.group.key) % (len(ranked) - 1)
            return sorted([ranked[0], ranked[-1 if self.config.filter == "best_worst" else chance]])

        return pack(groups, kept)
