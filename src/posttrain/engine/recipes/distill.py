"""Distillation on the student's own responses: at every token the student learns a teacher's prediction.

No reward is needed: the signal is a wide column, the teacher's likeliest tokens at every response token. Source:
generalised knowledge distillation, arXiv 2306.13649, with all data sampled by the student.
"""

from collections.abc import Sequence
from typing import final

from posttrain.engine.algorithms.objectives import DistillationObjective, Totals
from posttrain.engine.batch import CANDIDATES
from posttrain.engine.config import DistillConfig
from posttrain.engine.recipes.algorithm import Column, Update
from posttrain.engine.recipes.policy_gradient import Sampling


@final
class Distill(Sampling[DistillConfig]):
    """Distillation from a frozen teacher, which reads samples while other samples are generated."""

    groupwise = True

    def requires(self, step: int) -> Sequence[Column]:
        """Return the column of the teacher's likeliest tokens."""
        return (Column(CANDIDATES, "teacher", "topk", wide=self.config.top_k),)

    def updates(self, step: int) -> Sequence[Update]:
        """Return the policy's update, on all samples."""
        return (Update("policy", self.objective, mini_batches=self.config.mini_batches),)

    def objective(self, totals: Totals) -> DistillationObjective:
        """Return the distillation objective, a token mean."""
        c = self.config
        return DistillationObjective(totals, c.divergence, 0.5 if c.beta is None else c.beta)
