"""Reward-model training: a scalar that ranks the chosen response above the rejected one (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.engine.algorithms.objectives import PreferenceObjective
from posttrain.engine.batch import Document, Provenance, TokenBatch
from posttrain.engine.config import RewardModelConfig
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.recipes.roles import LearnerOnly
from posttrain.engine.recipes.sampling import Measurement, ProbeSchedule
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.weights.view import PolicyVersion


class Preference(Protocol):
    """A rendered preference row, as tokens."""

    @property
    def prompt(self) -> Sequence[int]:
        """What both responses answer."""

    @property
    def chosen(self) -> Sequence[int]:
        """The better response, end of sequence included."""

    @property
    def rejected(self) -> Sequence[int]:
        """The worse one."""


class RewardModel:
    """The recipe over rendered preference pairs. Source: InstructGPT, arXiv 2203.02155, eq. 1.

    Args:
        config: the stage's parameters.
        roles: the reward model.
        pairs: every row.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.
    """

    phase = "reward_model"

    def __init__(
        self,
        config: RewardModelConfig,
        roles: LearnerOnly,
        pairs: Sequence[Preference],
        seed: int,
        probe: Measurement[WorkerGroup[TrainWorker]] | None = None,
    ) -> None:
        self.steps = config.steps
        self.roles = roles
        self.journal = Journal(len(pairs), seed)
        self._config, self._pairs = config, pairs
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)

    def price(self, step: int) -> int:
        """Exactly the tokens of the coming batch; the prompt is read with each response."""
        return sum(_size(self._pairs[row]) for row in self.journal.peek(self._config.batch_size))

    def step(self, step: int, trace: Trace) -> StepReport:
        """One batch of pairs, one optimiser step."""
        with trace.span("pack"):
            chosen = [self._pairs[row] for _, row in self.journal.take(self._config.batch_size)]
            batch = paired(chosen, Provenance(step=step, role="reward_model"))
        with trace.span("update") as span:
            objective = PreferenceObjective(len(chosen))
            update = self.roles.learner.map(TrainWorker.update, batch, objective, step=step)
            span |= {"pairs": len(chosen), "tokens": sum(batch.lengths)}
        return StepReport(sum(batch.lengths), update.metrics)

    def serve(self, version: PolicyVersion) -> None:
        """Nobody samples."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """The held-out measurement, where one is due."""
        return self._probe.measure(step, trace, self.roles.learner)

    def probe_price(self, step: int) -> int:
        """Free: reading without answering or training counts nowhere (`facts.Progress`)."""
        return self._probe.price(step)


def paired(pairs: Sequence[Preference], provenance: Provenance) -> TokenBatch:
    """Pairs, packed: the chosen and the rejected response of each are one unit, in turn."""
    documents = [Document(p.prompt, response) for p in pairs for response in (p.chosen, p.rejected)]
    return TokenBatch.pack(documents, provenance=provenance, unit=2)


def _size(pair: Preference) -> int:
    return 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
