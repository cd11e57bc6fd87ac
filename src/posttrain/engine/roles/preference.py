"""A reward model while it learns from preference pairs (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from posttrain.engine.algorithms.losses import bradley_terry
from posttrain.engine.algorithms.objectives import LossParts
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
@dataclass(frozen=True, slots=True)
class PairBatch:
    """Preference pairs, packed: documents 2i and 2i + 1 are the chosen and the rejected one of pair i."""

    documents: TokenBatch

    def __len__(self) -> int:
        return len(self.documents) // 2

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every pair."""
        sizes = self.documents.lengths
        return tuple(sizes[i] + sizes[i + 1] for i in range(0, len(sizes), 2))

    def select(self, documents: Sequence[int], /) -> PairBatch:
        """The named pairs, in the named order; may be none."""
        return PairBatch(self.documents.select([d for pair in documents for d in (2 * pair, 2 * pair + 1)]))


@final
@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """−log σ(r_chosen − r_rejected), mean over the step's pairs. Source: Bradley and Terry 1952; arXiv 2203.02155."""

    pairs: int  # of the whole step

    def __call__(self, scores: Tensor) -> LossParts:
        """[2 · pairs] scores, chosen and rejected in turn → this micro-batch's share."""
        chosen, rejected = scores[0::2], scores[1::2]
        count = max(self.pairs, 1)
        sums = {
            "accuracy": (chosen > rejected).float().sum().detach() / count,
            "margin": (chosen - rejected).sum().detach() / count,
        }
        return LossParts(bradley_terry(chosen, rejected).sum() / count, sums)


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

    def update(self, batch: PairBatch, objective: PreferenceObjective, *, step: int) -> Update:
        """One optimiser step of the whole group on a mini-batch, of which this rank has a shard; it may be empty.

        Raises:
            DivergedError: loss or gradient is NaN or infinite; nothing was updated.
        """
        device = self.model.device
        shards = self.learner.shards(batch.lengths)
        micros = [batch.select(shard).documents.to(device) for shard in shards]
        filler = TokenBatch.gather([TokenBatch.filler(device)] * 2, [[0], [1]])
        return Update(
            self.learner.step(micros, filler, lambda micro: objective(sequence_scores(self.model, micro)), step=step)
        )

    def margins(self, batch: PairBatch) -> DocumentScores:
        """By how much the chosen response of every pair scores above the rejected one, without dropout."""
        shards = self.learner.shards(batch.lengths)
        micros = [batch.select(shard).documents.to(self.model.device) for shard in shards]
        filler = TokenBatch.gather([TokenBatch.filler(self.model.device)] * 2, [[0], [1]])
        found = self.learner.evaluate(micros, filler, lambda micro: sequence_scores(self.model, micro))
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
