"""PF-PPO (arXiv 2409.06957): PPO on the responses whose rewards a reward model ranks most reliably."""

from collections.abc import Sequence

from field_algorithms.pf_ppo import PFPPOConfig
from posttrain.domain.canonical import derive_seed
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.algorithm import ScoredGroup, pack
from posttrain.engine.recipes.policy_gradient import scored
from posttrain.engine.recipes.ppo import PPO


class PFPPO(PPO[PFPPOConfig]):
    """PPO on the best response of each group (BoN), and a random one (BR) or the worst one (BW)."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the responses that the filter keeps of each group."""
        return pack(
            groups,
            lambda group: self.kept(
                sorted(scored(group), key=lambda sample: -group.rewards[sample]),
                derive_seed(seed, "filter", group.group.key),
            ),
        )

    def kept(self, ranked: list[int], chance: int) -> list[int]:
        """Return the best sample, and the filter's other sample, in the order of the group."""
        drawn = ranked[1:][chance % max(len(ranked) - 1, 1) :][:1]
        return sorted({*ranked[:1], *{"best": [], "best_random": drawn, "best_worst": ranked[-1:]}[self.config.filter]})
