"""Prompts that were computed and wait for rows that begin with them; long ones are computed in chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from posttrain.engine.rollout.kv_store import KVStore, Prompt
from posttrain.engine.rollout.llama_decoder import LlamaDecoder, Prefix
from posttrain.engine.rollout.scheduling import RolloutCounters


@final
class KeptPrompts:
    """Their keys and values are in the store, their last hidden states here.

    Args:
        counters: told what is computed.
    """

    def __init__(self, decoder: LlamaDecoder, store: KVStore, counters: RolloutCounters) -> None:
        self._decoder, self._store, self._counters = decoder, store, counters
        self._hidden: dict[Prompt, Tensor] = {}  # [1, hidden] after each
        self._begun: tuple[Prompt, Prefix] | None = None  # the beginning of a long one

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._hidden

    def __iter__(self) -> Iterator[Prompt]:
        return iter(list(self._hidden))

    @property
    def any(self) -> bool:
        """Whether something is held, if only the beginning of a prompt."""
        return bool(self._hidden or self._begun)

    @property
    def begun_bytes(self) -> int:
        """Of the beginning of a long prompt, which the store does not hold yet."""
        return 0 if self._begun is None else self._decoder.shape.position_bytes * len(self._begun[1].pairs[0])

    def logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """[prompts, vocabulary] after each."""
        return self._decoder.logits(torch.cat([self._hidden[prompt] for prompt in prompts]))

    def is_long(self, prompt: Prompt) -> bool:
        """Whether it is computed in chunks."""
        return len(prompt) > self._decoder.chunk(0)

    def compute(self, prompts: Sequence[Prompt]) -> None:
        """All of these together."""
        if prompts:
            self._counters.prefilled_tokens += sum(len(prompt) for prompt in prompts)
            self._keep(prompts, self._decoder.prefill(prompts))

    def advance(self, prompt: Prompt) -> bool:
        """Compute the next chunk of a long prompt; whether it was the last."""
        past = self._begun[1] if self._begun is not None and self._begun[0] == prompt else None
        begin = past.spans[0][1] if past is not None else 0
        piece = prompt[begin : begin + self._decoder.chunk(begin)]
        prefix = self._decoder.prefill([piece], past)
        self._counters.prefilled_tokens += len(piece)
        if begin + len(piece) < len(prompt):
            self._begun = (prompt, prefix)
            return False
        self._begun = None
        self._keep([prompt], prefix)
        return True

    def forget(self, prompts: Collection[Prompt]) -> None:
        """Rows that begin with these stay."""
        self._store.forget(prompts)
        for prompt in prompts:
            del self._hidden[prompt]

    def forget_all(self) -> None:
        """Also the beginning of a long one."""
        self.forget(list(self._hidden))
        self._begun = None

    def _keep(self, prompts: Sequence[Prompt], computed: Prefix) -> None:
        self._store.keep(dict(zip(prompts, computed.spans, strict=True)), computed.pairs)
        self._hidden |= {prompt: computed.hidden[at : at + 1] for at, prompt in enumerate(prompts)}
