"""Best-of-n distillation: sample n responses to each prompt, keep the best, and train the model to give it directly.

The algorithm has no critic, no advantages and no ratio. It consists of rejection sampling with a judge and supervised
fine-tuning on the accepted responses. A stage runs it with `kind: dataflow` and `recipe: best_of_n:BestOfN`. Sources:
WebGPT, arXiv 2112.09332, for best-of-n; RAFT, arXiv 2304.06767, for the distillation.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.algorithm import ScoredGroup, Update, pack
from posttrain.engine.recipes.dataflow import Dataflow


class BestOfN(Dataflow):
    """Trains on the best response of each group, if its reward is high enough."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """Return the accepted responses as a batch; None if there are none, so the weights do not change."""
        return pack(groups, self._best)

    def updates(self, step: int) -> Sequence[Update]:
        """Return one supervised update on the accepted responses."""
        return (Update("policy", SupervisedObjective),)

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Return the mean reward of the best responses, and the share of prompts with an accepted response."""
        best = [float(np.nanmax(group.rewards)) for group in groups if not np.isnan(group.rewards).all()]
        accepted = sum(bool(self._best(group)) for group in groups) / len(groups)
        return {"accepted": accepted, **({"reward/best": sum(best) / len(best)} if best else {})}

    def _best(self, group: ScoredGroup) -> list[int]:
        rewards = np.nan_to_num(group.rewards, nan=-np.inf)
        first = int(rewards.argmax())  # the first of several best responses
        return [first] if rewards[first] >= float(self.config.settings.get("accept", 1.0)) else []
