"""The critic: a value model that learns beside the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from posttrain.engine.algorithms.objectives import LossParts, Objective, Predictions
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models.scalar_model import ScalarModel, token_values
from posttrain.engine.models.sequence_parallel import open_sequence_group
from posttrain.engine.models.source import ScalarSource
from posttrain.engine.roles.learner import Learner
from posttrain.engine.roles.update import Update
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig


@final
class CriticWorker:
    """One rank of the critic.

    Args:
        place: where it stands.
        model: a folder; or, in the controller's process, a model that is there already.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget and the like.
        steps: of the whole stage, for the schedule.
        seed: the stage's seed.
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
        self.learner = Learner(place, self.model.module, optimizer, runtime, steps=steps, seed=seed)
        self._rank = place.rank

    def values(self, batch: TokenBatch) -> TokenBatch:
        """The batch with `values`: V before each response token, 0 elsewhere."""
        shards, micros = self.learner.split(batch)
        dummy = self.learner.dummy(batch)
        found = self.learner.evaluate(micros, dummy, lambda micro: token_values(self.model, micro))
        valued = [micro.with_columns(values=f) for micro, f in zip(micros, found, strict=True)]
        gathered = TokenBatch.gather(valued, shards) if valued else batch.with_columns(values=torch.zeros(0))
        return gathered.seen_by("critic", self._rank)

    def update(self, batch: TokenBatch, objective: Objective, *, step: int, part: int = 0) -> Update:
        """One optimiser step of the whole group on a mini-batch, of which this rank has a shard; it may be empty.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
        """
        _, micros = self.learner.split(batch)

        def forward(micro: TokenBatch) -> LossParts:
            return objective(micro, Predictions(values=token_values(self.model, micro)))

        return Update(self.learner.step(micros, self.learner.dummy(batch), forward, step=step, part=part))

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self.model.fallbacks()

    def save(self, path: Path) -> dict[str, str]:
        """Write this rank's part of a checkpoint; returns file name → digest."""
        return self.learner.save(path, "critic")

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it.

        Raises:
            IntegrityError: it does not fit the model.
        """
        self.learner.load(path, "critic")
