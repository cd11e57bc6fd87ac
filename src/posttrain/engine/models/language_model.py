"""A causal language model of transformers together with what was found out about it when it was adopted.

Nothing is believed about an architecture. Packing, and the form of the output head, are capabilities: tried on small
inputs, compared with the plain forward, and used only where they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.engine.models.backbone import (
    Backbone,
    Forward,
    agree,
    choose_packing,
    last_hidden_states,
    probe_documents,
)

HALF = (torch.bfloat16, torch.float16)
_BLOCK = 2**24  # values of a head in half precision that are widened at a time on the CPU


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """Logits as a function of the last hidden state: softcap * tanh((W h + b) / softcap), or just W h + b."""

    layer: nn.Linear
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocabulary], see `float32_logits`."""
        logits = float32_logits(hidden, self.layer.weight, self.layer.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel(Backbone):
    """A loaded model, e.g. `LanguageModel(module=Qwen3ForCausalLM, packing="packed", head=OutputHead(…))`."""

    head: OutputHead | None  # None: the head could not be reproduced, logits come from the module only

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        found = Backbone.fallbacks(self)
        if self.head is None:
            name = type(self.module).__name__
            found["whole_logits"] = f"the output head of {name} is not a plain matrix: all logits are held at once"
        return found

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a response; empty when the model names none."""
        generation = getattr(self.module, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence token."""
        return next(iter(self.eos_token_ids), None)

    def logits(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], keep: Tensor) -> Tensor:
        """[T] packed → [N, vocabulary]: the logits after the N tokens at the packed indices `keep`."""
        if self.head is not None:
            return self.head.logits(self.hidden_states(tokens, positions, lengths)[keep])
        return self.run(_logits(self.module), tokens, positions, lengths)[keep]


def float32_logits(hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits in float32 from weights in half precision, without a float32 copy of the head.

    Rounded to bfloat16, logits of 16 and more lie 0.125 apart, and log-probabilities with them. The products of
    bfloat16 numbers are exact in float32, so what is left is the rounding of float32 sums. Rollout and training both
    compute their logits here.

    Returns:
        [N, vocabulary] of [N, hidden] and [vocabulary, hidden]; in float64 of float64.
    """
    if hidden.dtype not in HALF:
        return F.linear(hidden, head, bias)
    if hidden.device.type == "cuda":
        out = torch.mm(hidden, head.t(), out_dtype=torch.float32)
    else:
        out = hidden.new_empty(len(hidden), len(head), dtype=torch.float32)
        wide, rows = hidden.float(), max(1, _BLOCK // head.shape[1])
        for begin in range(0, len(head), rows):
            out[:, begin : begin + rows] = F.linear(wide, head[begin : begin + rows].float())
    return out if bias is None else out + bias.float()


def adopt_module(module: PreTrainedModel) -> LanguageModel:
    """Find out what a module can do and wrap it. The module is put into evaluation mode.

    Whether it packs is tried on its logits, as `backbone.choose_packing` says.
    """
    module.eval()
    head = _find_head(module)
    return LanguageModel(module, choose_packing(module, _logits(module)), head)


def _logits(module: PreTrainedModel) -> Forward:
    """The pass through the whole module."""

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = module(**inputs).logits
        return logits

    return forward


def _find_head(module: PreTrainedModel) -> OutputHead | None:
    """The output head, when W h + b (soft-capped or not) reproduces the module's logits."""
    layer = module.get_output_embeddings()
    if type(layer) is not nn.Linear:
        return None
    head = OutputHead(layer, getattr(module.config.get_text_config(), "final_logit_softcapping", None))
    tokens = probe_documents(module)[0][None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    with torch.no_grad():
        try:
            wanted = _logits(module)(**inputs)
            found = head.logits(last_hidden_states(module)(**inputs)[0])[None]
        except (TypeError, AttributeError, RuntimeError, ValueError):
            return None
    return head if agree(found.to(wanted.dtype), wanted) else None
