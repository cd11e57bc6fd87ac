"""Decoding with any causal language model of transformers, using the model's forward and key-value cache."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.engine.models.backbone import key_value_bytes
from posttrain.engine.models.language_model import HALF, LanguageModel
from posttrain.engine.models.sharding import module_views
from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.decoding import BatchDecoding, Rows, StopStrings, prompt_logprobs
from posttrain.engine.rollout.port import Generation, PromptLogprobs, Proof

_DROP_SHARE = 0.15  # dropping rows copies the cache, so several rows are dropped at a time


class ModuleRollout(BatchedEngine):
    """`RolloutEngine` with the module of a `LanguageModel`.

    Args:
        kv_cache: maximum bytes of keys and values; None: as many as a batch needs.
        texts: decodes tokens to text, for stop strings; None: generations with stop strings are rejected.
    """

    def __init__(self, model: LanguageModel, kv_cache: int | None = None, *, texts: StopStrings | None = None) -> None:
        super().__init__(
            "module",
            model.context_length,
            lambda work: _ModuleBatch(model, work, texts),
            kv_cache=kv_cache,
            token_bytes=key_value_bytes(model.module),
            reads_text=texts is not None,
        )
        self._model = model

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        """See `RolloutEngine.attest`."""
        return Proof(module_views(self._model.module))

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        """See `RolloutEngine.score`."""
        self._intake.refuse_unserved(policy)
        return prompt_logprobs(self._model, prompts, top)


class _ModuleBatch:
    """`Batch` with the module; the module is in evaluation mode during a step only."""

    def __init__(self, model: LanguageModel, work: Sequence[Generation], texts: StopStrings | None) -> None:
        ends, device = model.eos_token_ids, model.device
        self._module = model.module
        self._decoding = BatchDecoding(work, lambda rows: _ModuleSession(model, rows), ends, device, texts)
        self.said, self.ended, self.reread = self._decoding.said, self._decoding.ended, self._decoding.reread

    @torch.inference_mode()
    def step(self) -> list[int]:
        """See `Batch.step`."""
        if not self._module.training:  # switching visits every part of the module
            return self._decoding.step()
        self._module.eval()
        try:
            return self._decoding.step()
        finally:
            self._module.train()

    @torch.inference_mode()
    def stop(self, rows: Collection[int]) -> None:
        """See `Batch.stop`."""
        self._decoding.stop(rows)


class _ModuleSession:
    """Rows padded on the left, with the cache that the module returns.

    A cache whose layers can select rows contains each prompt once until the prompt is expanded to its rows, and drops
    ended rows. Other caches start with all rows and keep them. A module without a cache reads whole rows at every step.
    """

    def __init__(self, model: LanguageModel, rows: Rows) -> None:
        half = next(model.module.parameters()).dtype in HALF
        self._head = model.head if half else None  # logits in float32, as in training; wider modules have their own
        self._module = model.module.base_model if self._head else model.module
        self._rows = rows
        self._device = model.device
        self._cache: Any = None
        self._parameters = frozenset(inspect.signature(self._module.forward).parameters)
        self.drop_share: float | None = _DROP_SHARE
        width = max(len(prompt) for prompt in rows.prompts)
        padding = [width - len(prompt) for prompt in rows.prompts]
        self._tokens = torch.tensor([[0] * pad + list(p) for pad, p in zip(padding, rows.prompts, strict=True)])
        self._tokens = self._tokens.to(self._device)
        columns = torch.arange(width, device=self._device)
        self._mask = (columns >= torch.tensor(padding, device=self._device)[:, None]).long()

    def prefill(self) -> Tensor:
        """Return the logits after each row's prompt, [rows, vocabulary]."""
        rows = torch.tensor(self._rows.prompt_of_row, device=self._device)
        logits = self._forward(self._tokens)
        if self._cache is not None and not _can_select(self._cache):
            self._cache, self.drop_share = None, None
            self._select(rows)
            return self._forward(self._tokens)
        self._select(rows)
        return logits[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every slot; return the logits after it, [slots, vocabulary]."""
        self._tokens = torch.cat([self._tokens, tokens[:, None]], 1)
        self._mask = torch.cat([self._mask, torch.ones_like(tokens)[:, None]], 1)
        return self._forward(self._tokens if self._cache is None else tokens[:, None])

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        """Move rows from the last slots into free slots and drop the remaining slots."""
        index = torch.arange(count, device=self._device)
        index[free] = moved
        self._select(index)

    def _select(self, index: Tensor) -> None:
        self._tokens, self._mask = self._tokens[index], self._mask[index]
        if self._cache is not None:
            self._cache.batch_select_indices(index)

    def _forward(self, tokens: Tensor) -> Tensor:
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        optional = {"position_ids": positions, "past_key_values": self._cache, "logits_to_keep": 1}
        known = {name: value for name, value in optional.items() if name in self._parameters}
        output = self._module(input_ids=tokens, attention_mask=self._mask, use_cache=True, **known)
        self._cache = output.get("past_key_values")
        if self._head:
            return self._head.logits(output.last_hidden_state[:, -1])
        logits: Tensor = output.logits[:, -1]
        return logits


def _can_select(cache: Any) -> bool:
    """Return whether every layer of the cache can select rows."""
    layers = getattr(cache, "layers", None)
    return bool(layers) and all(hasattr(one, "batch_select_indices") for one in (cache, *(layers or ())))
