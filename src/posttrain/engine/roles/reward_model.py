"""The reward model: a frozen scorer of whole responses, learned from preferences in an earlier stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models.scalar_model import ScalarModel, sequence_scores
from posttrain.engine.models.source import ScalarSource
from posttrain.engine.roles.frozen import FrozenModule
from posttrain.pacing.balancing import micro_batches


@final
@dataclass(frozen=True, slots=True)
class DocumentScores:
    """One number per document: `DocumentScores((0.3, -1.2))`."""

    values: tuple[float, ...]

    @classmethod
    def gather(cls, parts: Sequence[DocumentScores], shards: Sequence[Sequence[int]], /) -> DocumentScores:
        """In the order of the documents."""
        placed = {
            document: value
            for part, shard in zip(parts, shards, strict=True)
            for document, value in zip(shard, part.values, strict=True)
        }
        return cls(tuple(placed[document] for document in sorted(placed)))


@final
class RewardModelWorker:
    """One rank of the reward model: whole on every rank.

    Args:
        place: where it stands.
        model: a folder; or, in the controller's process, a model that is there already.
        micro_batch_tokens: per forward.
    """

    def __init__(self, place: Place, model: ScalarSource | ScalarModel, *, micro_batch_tokens: int) -> None:
        self._model_source, self._device, self._budget = model, place.device, micro_batch_tokens
        self._model = FrozenModule(self._open, place.device, reopens=isinstance(model, ScalarSource))

    @torch.no_grad()
    def score(self, batch: TokenBatch) -> DocumentScores:
        """The reward of every document, read after its last token."""
        model = self._model.awake()
        if not len(batch):
            return DocumentScores(())
        shards = micro_batches(batch.lengths, batch.lengths, self._budget)
        parts = [
            DocumentScores(tuple(sequence_scores(model, batch.select(shard).to(model.device)).tolist()))
            for shard in shards
        ]
        return DocumentScores.gather(parts, shards)

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self._model.awake().fallbacks()

    def sleep(self) -> int:
        """Give the device's memory back until the next call; returns the bytes that stay resident."""
        return self._model.sleep()

    def resident_bytes(self) -> int:
        """Bytes of weights on this rank's device."""
        return self._model.resident_bytes()

    def _open(self) -> ScalarModel:
        source = self._model_source
        model = source.open(self._device) if isinstance(source, ScalarSource) else source
        model.module.requires_grad_(False)
        return model
