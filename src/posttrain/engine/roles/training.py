"""A role that learns: the policy, a critic, a reward model; whole on one rank or sharded over several."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from posttrain.engine.algorithms.objectives import LossParts, Objective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models.loading import save_model
from posttrain.engine.models.predicting import Model, predict
from posttrain.engine.models.sequence_parallel import open_sequence_group
from posttrain.engine.models.source import ModelSource, ScalarSource
from posttrain.engine.predictions import Need, Predictions
from posttrain.engine.roles.columns import with_prediction
from posttrain.engine.roles.learner import Learner
from posttrain.engine.roles.update import Update
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.view import PolicyVersion, Weights, digest_tensors


@final
class TrainWorker:
    """One rank of a role that learns.

    Args:
        place: where it stands; on one rank it lends its model to a rollout engine beside it.
        model: a folder; or, in the controller's process, a model that is there already.
        optimizer: AdamW and schedule.
        runtime: micro-batch budget and the like.
        name: its role, which its files in a checkpoint are called by: policy, critic, reward_model.
        steps: of the whole stage, for the schedule.
        seed: the stage's seed, for dropout.
        dropout: whether the model's dropout is on while training (`Learner`).
        temperature: log-probabilities are taken at this sampling temperature.
        first: the stage step of its first update; the schedule begins there.
    """

    def __init__(
        self,
        place: Place,
        model: ModelSource | ScalarSource | Model,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        *,
        name: str = "policy",
        steps: int,
        seed: int,
        dropout: bool = False,
        temperature: float = 1.0,
        first: int = 0,
    ) -> None:
        opened = model.open(place.device) if isinstance(model, ModelSource | ScalarSource) else model
        self.model: Model = replace(
            opened, sequence=open_sequence_group(place.rank, place.size, place.sequence_parallel)
        )
        self.learner = Learner(
            place, self.model.module, optimizer, runtime, steps=steps, seed=seed, dropout=dropout, first=first
        )
        self._role, self._temperature, self._rank = name, temperature, place.rank
        if place.size == 1:  # an alias view needs whole weights
            place.lend(self.model)

    def update(
        self, batch: TokenBatch, objective: Objective, *, step: int, part: int = 0, record: bool = False
    ) -> Update:
        """One optimiser step of the whole group on a mini-batch, of which this rank has a shard.

        Args:
            batch: the shard; may be empty.
            objective: knows the totals of the whole mini-batch.
            step: 0-based stage step, for the schedule and the dropout key.
            part: which mini-batch of the step.
            record: also return the batch with the log-probabilities that the step found, as `proximal_logprobs`.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
            InputError: the model predicts nothing of what the objective needs.
        """
        shards, micros = self.learner.split(batch)
        seen: list[TokenBatch] = []

        def forward(micro: TokenBatch) -> LossParts:
            predicted = self._predict(micro, objective.needs)
            if record and len(seen) < len(micros):
                seen.append(micro.with_columns(proximal_logprobs=predicted.of("logprobs")))
            return objective(micro, predicted)

        metrics = self.learner.step(micros, self.learner.dummy(batch), forward, step=step, part=part)
        if not record:
            return Update(metrics)
        return Update(metrics, (TokenBatch.gather(seen, shards) if seen else batch).to("cpu"))

    def fill(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """The batch with a column of what the model predicts as it is, without gradients and dropout."""
        shards, micros = self.learner.split(batch)
        found = self.learner.evaluate(
            micros, self.learner.dummy(batch), lambda micro: self._predict(micro, {need}).of(need)
        )
        filled = [with_prediction(micro, column, need, f) for micro, f in zip(micros, found, strict=True)]
        gathered = TokenBatch.gather(filled, shards) if filled else with_prediction(batch, column, need, torch.zeros(0))
        return gathered.seen_by(self._role, self._rank)

    def publish(self, version: PolicyVersion) -> Weights:
        """The whole weights as `version`, for readers with a copy of their own; rank 0 has them. Collective."""
        tensors = self.learner.sharding.gathered()
        digest = digest_tensors(tensors) if tensors else ""
        return Weights(PolicyVersion(version.incarnation, version.step, digest), tensors)

    def save(self, path: Path) -> dict[str, str]:
        """Write this rank's part of a checkpoint; returns file name → digest."""
        return self.learner.save(path, self._role)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint (verified by the caller), whatever number of ranks wrote it.

        Raises:
            IntegrityError: it does not fit the model.
        """
        self.learner.load(path, self._role)

    @torch.no_grad()
    def save_model(self, folder: Path) -> None:
        """Write weights and configuration in the Hugging Face format; rank 0 does. Collective."""
        save_model(self.model, None, folder, self.learner.exported(), write=self._rank == 0)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self.model.fallbacks()

    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        return self.model.context_length

    def _predict(self, micro: TokenBatch, needs: Set[Need]) -> Predictions:
        return predict(self.model, micro, needs, temperature=self._temperature)
