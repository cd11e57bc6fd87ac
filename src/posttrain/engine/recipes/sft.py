"""Supervised fine-tuning: maximise log π(completion | prompt), token mean over the batch."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.engine.algorithms.aggregation import Totals
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.batch import Document, Provenance, TokenBatch
from posttrain.engine.config import SFTConfig
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.recipes.roles import LearnerOnly
from posttrain.engine.recipes.sampling import Measurement, ProbeSchedule
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.weights.view import PolicyVersion


class SFT:
    """The recipe over rendered documents.

    Args:
        config: the stage's parameters.
        roles: the policy.
        documents: prompt and completion tokens (end of sequence included) of every row.
        seed: the stage's seed.
        probe: the held-out measurement, if there is one.
    """

    phase = "sft"

    def __init__(
        self,
        config: SFTConfig,
        roles: LearnerOnly,
        documents: Sequence[Document],
        seed: int,
        probe: Measurement[WorkerGroup[TrainWorker]] | None = None,
    ) -> None:
        self.steps = config.steps
        self.roles = roles
        self.journal = Journal(len(documents), seed)
        self._config, self._documents = config, documents
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)

    def price(self, step: int) -> int:
        """Exactly the tokens of the coming batch."""
        rows = self.journal.peek(self._config.batch_size)
        return sum(len(self._documents[row].prompt) + len(self._documents[row].response) for row in rows)

    def step(self, step: int, trace: Trace) -> StepReport:
        """One batch, one optimiser step."""
        with trace.span("pack"):
            rows = [row for _, row in self.journal.take(self._config.batch_size)]
            documents = [self._documents[row] for row in rows]
            batch = TokenBatch.pack(documents, provenance=Provenance(step=step, role="policy"))
            totals = Totals.of(batch)
        with trace.span("update") as span:
            update = self.roles.learner.map(TrainWorker.update, batch, SupervisedObjective(totals), step=step)
            span |= {"tokens": sum(batch.lengths), "response_tokens": totals.tokens}
        return StepReport(sum(batch.lengths), update.metrics)

    def serve(self, version: PolicyVersion) -> None:
        """Nobody samples."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """The held-out measurement, where one is due."""
        return self._probe.measure(step, trace, self.roles.learner)

    def probe_price(self, step: int) -> int:
        """Free: reading without answering or training counts nowhere (`facts.Progress`)."""
        return self._probe.price(step)
