"""What frozen roles share: a model that can leave its device between phases, and passes in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

import torch
from torch import nn

from posttrain.engine.batch import TokenBatch
from posttrain.pacing.balancing import micro_batches


class HasModule(Protocol):
    """A loaded model of some kind."""

    @property
    def module(self) -> nn.Module:
        """Its weights."""


M = TypeVar("M", bound=HasModule)


@final
class FrozenModule(Generic[M]):
    """A model that sleeps between its phases.

    Asleep, a model on a GPU waits in the host's memory. One on the CPU whose source is a folder is dropped, and read
    again when it is needed (its pages are in the file cache); one that cannot be read again stays.

    Args:
        open: loads it; called at once, and after a sleep that dropped it.
        device: where it computes.
        reopens: whether `open` gives the same weights again.
    """

    def __init__(self, open: Callable[[], M], device: str, *, reopens: bool) -> None:
        self._open, self._device, self._reopens = open, torch.device(device), reopens
        self._model: M | None = open()

    def awake(self) -> M:
        """The model on its device."""
        if self._model is None:
            self._model = self._open()
        elif next(self._model.module.parameters()).device.type != self._device.type:
            self._model.module.to(self._device)
        return self._model

    def sleep(self) -> int:
        """Free what can be freed; returns `resident_bytes`."""
        if self._model is not None and self._device.type == "cuda":
            self._model.module.to("cpu")
            torch.cuda.empty_cache()
        elif self._reopens:
            self._model = None
        return self.resident_bytes()

    def resident_bytes(self) -> int:
        """Bytes of parameters on the device it computes on."""
        if self._model is None:
            return 0
        parameters = self._model.module.parameters()
        return sum(p.numel() * p.element_size() for p in parameters if p.device.type == self._device.type)


def in_micro_batches(batch: TokenBatch, token_budget: int, score: Callable[[TokenBatch], TokenBatch]) -> TokenBatch:
    """Score a batch piece by piece; the result is in the batch's own order. An empty batch is returned as it is."""
    if not len(batch):
        return batch
    shards = micro_batches(batch.item_lengths, batch.item_lengths, token_budget)
    if len(shards) == 1:
        return score(batch)
    return TokenBatch.gather([score(batch.select_items(shard)) for shard in shards], shards)
