"""`TrainEngine` of torch: whole on one rank, FSDP2 on several; which of them is a `Sharding` that its learner has."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from posttrain.engine.algorithms.objectives import LossParts, Objective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.rank_context import RankContext
from posttrain.engine.models.exported import Shard
from posttrain.engine.models.loading import save_model
from posttrain.engine.models.predicting import Model, predict
from posttrain.engine.models.sequence_parallel import open_sequence_group
from posttrain.engine.predictions import Need, Predictions
from posttrain.engine.roles.columns import with_prediction
from posttrain.engine.roles.learner import Learner
from posttrain.engine.roles.update import Division, Update
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig


@final
class TorchEngine:
    """See `TrainEngine`.

    Args:
        context: where it stands; on several ranks the parameters are sharded over them.
        model: trained in place.
        optimizer, runtime, steps, seed, dropout, first: see `Learner`.
        temperature: log-probabilities are taken at this sampling temperature.
    """

    def __init__(
        self,
        context: RankContext,
        model: Model,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        steps: int,
        seed: int,
        dropout: bool = False,
        temperature: float = 1.0,
        first: int = 0,
    ) -> None:
        sequence = open_sequence_group(context.rank, context.size, context.sequence_parallel)
        self._model: Model = replace(model, sequence=sequence)
        self.learner = Learner(
            context, self._model.module, optimizer, runtime, steps=steps, seed=seed, dropout=dropout, first=first
        )
        self._temperature, self._rank = temperature, context.rank

    @property
    def model(self) -> Model:
        """See `TrainEngine`."""
        return self._model

    def forward(self, batch: TokenBatch, needs: Set[Need]) -> Predictions:
        """See `TrainEngine`."""
        shards, micros = self.learner.split(batch)

        def forward(micro: TokenBatch) -> dict[str, Tensor]:
            predicted = self.predict(micro, needs)
            return {need: predicted.of(need) for need in needs}

        found = self.learner.evaluate(micros, self.learner.dummy(batch), forward)
        if not found:
            return Predictions(**{need: torch.zeros(0) for need in needs})
        parts = []
        for micro, predicted in zip(micros, found, strict=True):
            filled = replace(micro, token_columns={}, document_columns={}, wide_columns={})
            for need in needs:
                filled = with_prediction(filled, need, need, predicted[need])
            parts.append(filled)
        gathered = TokenBatch.gather(parts, shards)
        return Predictions(**{need: gathered.column(need).to(batch.device) for need in needs})

    def step(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        step: int,
        part: int = 0,
        record: bool = False,
        more: bool = False,
        divide: Division | None = None,
    ) -> Update:
        """See `TrainEngine`."""
        shards, micros = self.learner.split(batch)
        seen: list[TokenBatch] = []

        def forward(micro: TokenBatch) -> LossParts:
            predicted = self.predict(micro, objective.needs)
            if record and len(seen) < len(micros):
                bare = replace(micro, wide_columns={})  # what goes back to the controller holds none
                known = "logprobs" in objective.needs
                seen.append(bare.with_columns(current_logprobs=predicted.of("logprobs")) if known else bare)
            return objective(micro, predicted)

        dummy = self.learner.dummy(batch)
        metrics = self.learner.step(micros, dummy, forward, step=step, part=part, more=more, divide=divide)
        if not record:
            return Update(metrics)
        found = TokenBatch.gather(seen, shards) if seen else replace(batch, wide_columns={})
        return Update(metrics, found.to("cpu"))

    def predict(self, micro: TokenBatch, needs: Set[Need]) -> Predictions:
        """Of one micro-batch, with gradients where they are on."""
        return predict(self._model, micro, needs, temperature=self._temperature)

    def export(self) -> Iterator[Shard]:
        """See `TrainEngine`."""
        return self.learner.sharding.export()

    def save(self, path: Path, role: str) -> dict[str, str]:
        """See `TrainEngine`."""
        return self.learner.save(path, role)

    def restore(self, path: Path, role: str) -> None:
        """See `TrainEngine`."""
        self.learner.load(path, role)

    @torch.no_grad()
    def write_model(self, folder: Path) -> None:
        """See `TrainEngine`; rank 0 does."""
        save_model(self._model, None, folder, self.learner.exported(), write=self._rank == 0)
