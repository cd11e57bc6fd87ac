"""Best-of-n distillation: sample n answers to each prompt, keep the best one, learn to give it at once.

No critic, no advantages, no ratio: rejection sampling with a judge, then supervised fine-tuning on the accepted
answers. A stage runs it with `kind: dataflow` and `recipe: best_of_n:BestOfN`. Source: WebGPT, arXiv 2112.09332; the
distillation: RAFT, arXiv 2304.06767.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.algorithm import ScoredGroup, Update, pack
from posttrain.engine.recipes.dataflow import Dataflow


class BestOfN(Dataflow):
    """The judge's favourite of each group, if it is good enough."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        """None where no answer is accepted: the weights stay."""
        return pack(groups, self._best)

    def updates(self, step: int) -> Sequence[Update]:
        """Supervised, on the accepted answers."""
        return (Update("policy", SupervisedObjective),)

    def report(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """How good the best answers are, and how many prompts have one that is accepted."""
        best = [float(np.nanmax(group.rewards)) for group in groups if not np.isnan(group.rewards).all()]
        accepted = sum(bool(self._best(group)) for group in groups) / len(groups)
        return {"accepted": accepted, **({"reward/best": sum(best) / len(best)} if best else {})}

    def _best(self, group: ScoredGroup) -> list[int]:
        rewards = np.nan_to_num(group.rewards, nan=-np.inf)
        first = int(rewards.argmax())  # of equals
        return [first] if rewards[first] >= float(self.config.settings.get("accept", 1.0)) else []
