"""A role that learns: the policy, a critic, a reward model; what its engine is, it cannot tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from posttrain.engine.algorithms.objectives import Objective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.rank_context import RankContext
from posttrain.engine.models.exported import Layout
from posttrain.engine.models.predicting import Model, predictable
from posttrain.engine.models.source import ModelSource, ScalarSource
from posttrain.engine.predictions import Need
from posttrain.engine.roles.columns import with_prediction
from posttrain.engine.roles.port import TrainEngine
from posttrain.engine.roles.torch_engine import TorchEngine
from posttrain.engine.roles.update import Division, Update
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights.attestation import Attestation
from posttrain.engine.weights.stream import Bucket, WeightSource, carried
from posttrain.engine.wide import fetched


@final
class TrainWorker:
    """One rank of a role that learns.

    Args:
        context: where it stands; on one rank it lends its model to a rollout engine beside it.
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
        context: RankContext,
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
        opened = model.open(context.device) if isinstance(model, ModelSource | ScalarSource) else model
        self._epsilon: float = torch.finfo(next(opened.module.parameters()).dtype).eps
        self.engine: TrainEngine = TorchEngine(
            context,
            opened,
            optimizer,
            runtime,
            steps=steps,
            seed=seed,
            dropout=dropout,
            temperature=temperature,
            first=first,
        )
        self._role, self._rank = name, context.rank
        self._source = WeightSource(self.engine.export, carried(self.engine.model.module), context.device)
        context.lend(self._source)
        if context.size == 1:  # an alias view needs whole weights
            context.lend(self.engine.model)

    def update(
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
        """One optimiser step of the whole group on a mini-batch, of which this rank has a shard; see
        `TrainEngine.step`. The shard's rows of wide columns are fetched first.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
            InputError: the model predicts nothing of what the objective needs.
        """
        whole = replace(batch, wide_columns=fetched(batch.wide_columns))
        return self.engine.step(whole, objective, step=step, part=part, record=record, more=more, divide=divide)

    def fill(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """The batch with a column of what the model predicts as it is, without gradients and dropout."""
        found = self.engine.forward(batch, {need}).of(need)
        return with_prediction(batch, column, need, found).seen_by(self._role, self._rank)

    def attest(self, layout: Layout) -> tuple[Attestation, int]:
        """What readers of this layout must find of this rank's weights, and how many buckets carry them.

        Raises:
            IntegrityError: names or shapes are not the reader's.
        """
        return self._source.attest(layout)

    def bucket(self) -> Bucket:
        """The next bucket of what was attested last; empty ones when there is none left."""
        return self._source.bucket()

    def save(self, path: Path) -> dict[str, str]:
        """Write this rank's part of a checkpoint; returns file name → digest."""
        return self.engine.save(path, self._role)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint (verified by the caller), whatever number of ranks wrote it.

        Raises:
            IntegrityError: it does not fit the model.
        """
        self.engine.restore(path, self._role)

    def save_model(self, folder: Path) -> None:
        """Write weights and configuration in the Hugging Face format; rank 0 does. Collective."""
        self.engine.write_model(folder)

    def predicts(self) -> frozenset[Need]:
        """What its model may be asked for."""
        return predictable(self.engine.model)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self.engine.model.fallbacks()

    def epsilon(self) -> float:
        """The rounding of the type that it computes in; a float32 master of half-precision weights does not count."""
        return self._epsilon

    def vocabulary(self) -> int:
        """Tokens that the model has."""
        return int(self.engine.model.config.vocab_size)

    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        return self.engine.model.context_length
