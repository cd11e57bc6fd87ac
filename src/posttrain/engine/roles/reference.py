"""The reference: the policy as it was when the stage began, for the KL penalty. It never learns."""

from __future__ import annotations

import copy
from typing import final

import torch

from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.place import Place
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.models.source import ModelSource
from posttrain.engine.roles.frozen import FrozenModule, in_micro_batches


@final
class ReferenceWorker:
    """One rank of the reference: a whole frozen model with storage of its own.

    Args:
        place: where it stands.
        model: a folder; or, in the controller's process, the starting policy, which is copied before it changes.
        temperature: as the policy's.
        micro_batch_tokens: per forward.
    """

    def __init__(
        self, place: Place, model: ModelSource | LanguageModel, *, temperature: float, micro_batch_tokens: int
    ) -> None:
        self._source, self._device, self._rank = model, place.device, place.rank
        self._temperature, self._micro_batch_tokens = temperature, micro_batch_tokens
        self._model = FrozenModule(self._open, self._device, reopens=isinstance(model, ModelSource))

    def logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with `reference_logprobs`: of the response tokens, at the policy's temperature."""
        model = self._model.awake()

        @torch.no_grad()
        def score(micro: TokenBatch) -> TokenBatch:
            found = token_logprobs(model, micro.to(model.device), temperature=self._temperature, response_only=True)
            return micro.with_columns(reference_logprobs=found)

        return in_micro_batches(batch, self._micro_batch_tokens, score).seen_by("reference", self._rank)

    def sleep(self) -> int:
        """Give the device's memory back until the next call; returns the bytes that stay resident."""
        return self._model.sleep()

    def resident_bytes(self) -> int:
        """Bytes of weights on this rank's device (on the CPU: in its memory)."""
        return self._model.resident_bytes()

    def _open(self) -> LanguageModel:
        if isinstance(self._source, ModelSource):
            model = self._source.open(self._device)
            model.module.requires_grad_(False)
            return model
        return adopt_module(copy.deepcopy(self._source.module).requires_grad_(False))
