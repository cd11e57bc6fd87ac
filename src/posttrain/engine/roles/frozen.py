"""Roles that never learn, such as reference and teacher: whole on every rank, and asleep between their phases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import final

import torch

from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.rank_context import RankContext
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.predicting import Model, predict, predict_topk, predictable
from posttrain.engine.models.scalar_model import adopt_classifier
from posttrain.engine.models.source import ModelSource, ScalarSource
from posttrain.engine.predictions import Need
from posttrain.engine.roles.columns import with_prediction
from posttrain.engine.wide import TopK, WideRows
from posttrain.pacing.balancing import micro_batches


@final
class FrozenModel:
    """A model that sleeps between its phases.

    Asleep, a model on a GPU waits in the host's memory. One on the CPU whose source is a folder is dropped, and read
    again when it is needed (its pages are in the file cache); one that cannot be read again stays.

    Args:
        open: loads it; called at once, and after a sleep that dropped it.
        device: where it computes.
        reopens: whether `open` gives the same weights again.
    """

    def __init__(self, open: Callable[[], Model], device: str, *, reopens: bool) -> None:
        self._open, self._device, self._reopens = open, torch.device(device), reopens
        self._model: Model | None = open()

    def awake(self) -> Model:
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


@final
class FrozenWorker:
    """One rank of a role that never learns: a whole frozen model with storage of its own.

    Args:
        context: where it stands.
        model: a folder; or, in the controller's process, a model, which is copied before it changes.
        name: its role, in the provenance of what it fills: reference, reward_model, teacher.
        temperature: log-probabilities are taken at this sampling temperature.
        micro_batch_tokens: per forward.
        vocabulary: of whoever learns from it; likeliest tokens are among these. None: of its own.
    """

    def __init__(
        self,
        context: RankContext,
        model: ModelSource | ScalarSource | Model,
        *,
        name: str = "reference",
        temperature: float = 1.0,
        micro_batch_tokens: int,
        vocabulary: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._source, self._device, self._rank = model, context.device, context.rank
        self._role, self._temperature, self._micro_batch_tokens = name, temperature, micro_batch_tokens
        self._model = FrozenModel(self._open, self._device, reopens=isinstance(model, ModelSource | ScalarSource))
        self._predicts = predictable(self._model.awake())  # known while it sleeps

    @torch.no_grad()
    def fill(self, batch: TokenBatch, column: str, need: Need) -> TokenBatch:
        """The batch with a column of what the model predicts. An empty one computes nothing."""
        model = self._model.awake()

        def score(micro: TokenBatch) -> TokenBatch:
            found = predict(model, micro.to(model.device), {need}, temperature=self._temperature).of(need)
            return with_prediction(micro, column, need, found)

        shards = micro_batches(batch.item_lengths, batch.item_lengths, self._micro_batch_tokens)
        parts = [score(batch if len(shards) == 1 else batch.select_items(shard)) for shard in shards]
        gathered = TokenBatch.gather(parts, shards) if parts else with_prediction(batch, column, need, torch.zeros(0))
        return gathered.seen_by(self._role, self._rank)

    @torch.no_grad()
    def hold(self, batch: TokenBatch, width: int) -> WideRows:
        """The `width` likeliest tokens at every response token, with their log-probabilities: to be kept here and
        fetched by whoever needs them (`WorkerGroup.map_stored`).

        Raises:
            InputError: the model makes no text, or its vocabulary has fewer tokens.
        """
        model = self._model.awake()
        counts = batch.response_lengths.tolist()
        starts, held = [0, *accumulate(counts)], TopK.empty(sum(counts), width)
        for items in micro_batches(batch.item_lengths, batch.item_lengths, self._micro_batch_tokens):
            micro = batch.select_items(items).to(model.device)
            found = predict_topk(model, micro, width, temperature=self._temperature, vocabulary=self._vocabulary)
            begin = 0
            for document in batch.documents_of(items):
                rows = held.rows(starts[document], starts[document + 1])
                rows.put(found.rows(begin, begin + counts[document]))
                begin += counts[document]
        return WideRows(held, tuple(counts))

    def predicts(self) -> frozenset[Need]:
        """What its model may be asked for; a language model for its likeliest tokens too (`hold`)."""
        likeliest = frozenset[Need]({"topk"})
        return self._predicts | likeliest if "logprobs" in self._predicts else self._predicts

    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        return self._model.awake().context_length

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return self._model.awake().fallbacks()

    def sleep(self) -> int:
        """Give the device's memory back until the next call; returns the bytes that stay resident."""
        return self._model.sleep()

    def resident_bytes(self) -> int:
        """Bytes of weights on this rank's device (on the CPU: in its memory)."""
        return self._model.resident_bytes()

    def _open(self) -> Model:
        source = self._source
        if isinstance(source, ModelSource | ScalarSource):
            model = source.open(self._device)
            model.module.requires_grad_(False)
            return model
        module = copy.deepcopy(source.module).requires_grad_(False)
        return adopt_module(module) if isinstance(source, LanguageModel) else adopt_classifier(module)
