"""A causal language model of transformers together with what was found out about it when it was adopted.

Nothing is believed about an architecture. Packing, and the form of the output head, are capabilities: tried on small
inputs, compared with the plain forward, and used only where they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.domain.errors import InputError
from posttrain.engine.models.attention import ATTENTION_NAME, plan_packing, planned_arguments

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the largest logit; coarser types get the default
_COARSE_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """Logits as a function of the last hidden state: softcap * tanh((W h + b) / softcap), or just W h + b."""

    layer: nn.Linear
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocabulary]."""
        logits = F.linear(hidden, self.layer.weight, self.layer.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A loaded model, e.g. `LanguageModel(module=Qwen3ForCausalLM, packing="packed", head=OutputHead(…))`.

    The module stays the caller's to train; nothing here copies a weight.
    """

    module: PreTrainedModel
    packing: Literal["packed", "padded"]  # padded: its documents are padded right in front of the module, nowhere else
    head: OutputHead | None  # None: the head could not be reproduced, logits come from the module only

    @property
    def config(self) -> Any:
        """The text part of the module's configuration."""
        return self.module.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        dtype: torch.dtype = next(self.module.parameters()).dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else 2**31

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

    def check_length(self, tokens: int) -> None:
        """Refuse what does not fit the context.

        Raises:
            InputError: more tokens than `context_length`.
        """
        if tokens > self.context_length:
            raise InputError(
                f"a document must fit the model's context of {self.context_length} tokens, got {tokens}; shorten it"
            )

    def hidden_states(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T] packed → [T, hidden]: the last hidden state of every token."""
        base = self.module.base_model
        return self._run(lambda **inputs: base(**inputs).last_hidden_state, tokens, positions, lengths)

    def logits(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], keep: Tensor) -> Tensor:
        """[T] packed → [N, vocabulary]: the logits after the N tokens at the packed indices `keep`."""
        if self.head is not None:
            return self.head.logits(self.hidden_states(tokens, positions, lengths)[keep])
        return self._run(lambda **inputs: self.module(**inputs).logits, tokens, positions, lengths)[keep]

    def _run(self, forward: Callable[..., Tensor], tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.packing == "packed":
            plan = plan_packing(lengths, tokens.device)
            arguments = planned_arguments(plan, tokens.device)
            return forward(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **arguments)[0]
        row = torch.arange(len(lengths), device=tokens.device).repeat_interleave(
            torch.tensor(lengths, device=tokens.device)
        )
        shape = (len(lengths), max(lengths))
        ids, mask = tokens.new_zeros(shape), tokens.new_zeros(shape)
        ids[row, positions], mask[row, positions] = tokens, 1
        return forward(input_ids=ids, attention_mask=mask, use_cache=False)[row, positions]


def adopt_module(module: PreTrainedModel) -> LanguageModel:
    """Find out what a module can do and wrap it. The module is put into evaluation mode.

    Packing is used when a packed row gives the logits of the separate documents, the first document does not change the
    second, and every sliding-window layer asked for its window. A module that fails keeps the attention it came with.
    """
    module.eval()
    head = _find_head(module)
    own = module.config._attn_implementation
    if _switch_attention(module, ATTENTION_NAME):
        model = LanguageModel(module, "packed", head)
        if _packs(model, LanguageModel(module, "padded", None)):
            return model
        _switch_attention(module, own)
    return LanguageModel(module, "padded", head)


def _switch_attention(module: PreTrainedModel, name: str) -> bool:
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError, AttributeError):
        return False
    return bool(module.config._attn_implementation == name)


def _find_head(module: PreTrainedModel) -> OutputHead | None:
    """The output head, when W h + b (soft-capped or not) reproduces the module's logits."""
    layer = module.get_output_embeddings()
    if type(layer) is not nn.Linear:
        return None
    head = OutputHead(layer, getattr(module.config.get_text_config(), "final_logit_softcapping", None))
    tokens = _probe_documents(module)[0][None]
    with torch.no_grad():
        try:
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
            wanted = module(**inputs).logits
            found = head.logits(module.base_model(**inputs).last_hidden_state)
        except (TypeError, AttributeError, RuntimeError, ValueError):
            return None
    return head if _agree(found, wanted) else None


@torch.no_grad()
def _packs(packed: LanguageModel, single: LanguageModel) -> bool:
    module = packed.module
    kinds = set(getattr(packed.config, "layer_types", None) or ())
    if not kinds <= _PLAIN_LAYERS:
        return False
    first, second, other = _probe_documents(module)
    try:
        row, windows = _packed_logits(module, [first, second])
        changed, _ = _packed_logits(module, [other, second])
    except (TypeError, RuntimeError, ValueError, InputError, AttributeError):
        return False
    every = torch.arange(len(first) + len(second), device=first.device)
    split = len(first)
    alone = [single.logits(d, every[: len(d)], [len(d)], every[: len(d)]) for d in (first, second)]
    exact = _agree(row, torch.cat(alone))
    sealed = _agree(row[split:], changed[split:]) and not _agree(row[:split], changed[:split])
    return exact and sealed and _windows_honoured(packed.config, windows)


def _packed_logits(module: PreTrainedModel, documents: Sequence[Tensor]) -> tuple[Tensor, list[int | None]]:
    plan = plan_packing([len(d) for d in documents], documents[0].device, record=True)
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in documents])
    arguments = planned_arguments(plan, positions.device)
    logits = module(
        input_ids=torch.cat(list(documents))[None], position_ids=positions[None], use_cache=False, **arguments
    ).logits
    return logits[0], plan.windows or []


def _windows_honoured(config: Any, asked: list[int | None]) -> bool:
    """Whether as many layers asked for the window as the configuration has sliding layers."""
    window = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or (["sliding_attention" if window else "full_attention"] * layers)
    wanted = [window if kind == "sliding_attention" else None for kind in kinds]
    return asked == wanted


def _probe_documents(module: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Two documents of 9 and 6 tokens, and one of 9 that differs from the first everywhere."""
    size = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    step = max(1, math.isqrt(size))
    first = torch.arange(9, device=device) * step % size
    return first, (torch.arange(6, device=device) * step + 1) % size, (first + 1) % size


def _agree(left: Tensor, right: Tensor) -> bool:
    tolerance = _TOLERANCE.get(left.dtype, _COARSE_TOLERANCE)
    scale = float(right.abs().max())
    return bool(((left - right).abs().max() <= tolerance * max(scale, 1e-12)).item())
