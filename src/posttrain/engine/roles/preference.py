"""A reward model while it learns from preference pairs (Bradley-Terry)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from posttrain.engine.algorithms.objectives import LossParts, Objective, Predictions
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models.loading import save_model
from posttrain.engine.models.scalar_model import ScalarModel, sequence_scores
from posttrain.engine.models.sequence_parallel import open_sequence_group
from posttrain.engine.models.source import ScalarSource
from posttrain.engine.roles.learner import Learner
from posttrain.engine.roles.reward_model import DocumentScores
from posttrain.engine.roles.update import Update
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig


@final
class PreferenceWorker:
    """One rank of a reward model in training.

    Args:
        place: where it stands.
        model: a folder; or, in the controller's process, a model that is there already.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget and the like.
        steps: of the whole stage, for the schedule.
        seed: the stage's seed, for dropout.
    """

    def __init__(
        self,
        place: Place,
        model: ScalarSource | ScalarModel,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        steps: int,
        seed: int,
    ) -> None:
        opened = model.open(place.device) if isinstance(model, ScalarSource) else model
        self.model = replace(opened, sequence=open_sequence_group(place.rank, place.size, place.sequence_parallel))
        self.learner = Learner(place, self.model.module, optimizer, runtime, steps=steps, seed=seed, dropout=True)
        self._rank = place.rank

    def update(self, batch: TokenBatch, objective: Objective, *, step: int) -> Update:
        """One optimiser step of the whole group on a mini-batch, of which this rank has a shard; it may be empty.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
        """
        _, micros = self.learner.split(batch)

        def forward(micro: TokenBatch) -> LossParts:
            return objective(micro, Predictions(scores=sequence_scores(self.model, micro)))

        return Update(self.learner.step(micros, self.learner.dummy(batch), forward, step=step))

    def margins(self, batch: TokenBatch) -> DocumentScores:
        """By how much the chosen response of every pair scores above the rejected one, without dropout."""
        shards, micros = self.learner.split(batch)
        dummy = self.learner.dummy(batch)
        found = self.learner.evaluate(micros, dummy, lambda micro: sequence_scores(self.model, micro))
        parts = [DocumentScores(tuple((scores[0::2] - scores[1::2]).double().tolist())) for scores in found]
        return DocumentScores.gather(parts, shards)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self.model.fallbacks()

    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        return self.model.context_length

    def save(self, path: Path) -> dict[str, str]:
        """Write this rank's part of a checkpoint; returns file name → digest."""
        return self.learner.save(path, "reward_model")

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it.

        Raises:
            IntegrityError: it does not fit the model.
        """
        self.learner.load(path, "reward_model")

    @torch.no_grad()
    def save_model(self, folder: Path) -> None:
        """Write it as a sequence classifier of one label; rank 0 does. Collective."""
        save_model(self.model, None, folder, self.learner.exported(), write=self._rank == 0)
