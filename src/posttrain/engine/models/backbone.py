"""A transformer that runs over packed documents: what every model of the engine is, whatever head stands on it.

Packing is a capability. It is tried on small inputs, compared with the documents one by one, and used only where both
agree; a module that fails keeps the attention it came with and is padded right in front of it, nowhere else.

What a document costs a model to compute and to keep, for whoever splits batches by cost or by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.domain.errors import InputError
from posttrain.engine.models.attention import ATTENTION_NAME, plan_packing, planned_arguments
from posttrain.engine.models.sharding import SequenceGroup
from posttrain.pacing.balancing import TOKENS, CostModel

Packing = Literal["packed", "padded"]
Forward = Callable[..., Tensor]  # keyword arguments of a transformers model → [rows, tokens, features]
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the largest value; coarser types get the default
_COARSE_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, eq=False)
class Backbone:
    """A module with what was found out about it; its base model gives the hidden states.

    The module stays the caller's to train; nothing here copies a weight.
    """

    module: PreTrainedModel
    packing: Packing
    sequence: SequenceGroup | None = field(default=None, kw_only=True)  # ranks that share the tokens of one batch

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
    def context_length(self) -> int:
        """Tokens of prompt and response together that the model was made for."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else 2**31

    def fallbacks(self) -> dict[str, str]:
        """Slower ways that this model must go, by name (`planner.fallbacks`), each with the reason."""
        if self.packing == "packed":
            return {}
        return {"padding": f"{type(self.module).__name__} does not pack: every batch is padded to its longest document"}

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
        return self.run(last_hidden_states(self.module), tokens, positions, lengths)

    def run(self, forward: Forward, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T] packed → [T, features]: what `forward`, a pass through the module or a part of it, gives per token.

        Under sequence parallelism only this rank's stretch is computed; the rest is zeros.
        """
        if self.sequence is not None:
            return self._run_stretch(self.sequence, forward, tokens, positions, lengths)
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

    def _run_stretch(
        self, sequence: SequenceGroup, forward: Forward, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        if self.packing != "packed":
            raise InputError(
                f"sequence_parallel needs a model that packs, got {type(self.module).__name__}; set it to 1"
            )
        arguments = planned_arguments(plan_packing(lengths, tokens.device, sequence=sequence), tokens.device)
        ids, places = sequence.slice(tokens), sequence.slice(positions)
        out = forward(input_ids=ids[None], position_ids=places[None], use_cache=False, **arguments)[0]
        return sequence.spread(out, len(tokens))


def last_hidden_states(module: PreTrainedModel) -> Forward:
    """The pass through the base model only."""
    base = module.base_model

    def forward(**inputs: Any) -> Tensor:
        hidden: Tensor = base(**inputs).last_hidden_state
        return hidden

    return forward


def choose_packing(module: PreTrainedModel, forward: Forward) -> Packing:
    """Switch a module to packed attention if it can be trusted with it.

    It can when a packed row gives what the separate documents give, the first document does not change the second, and
    every sliding-window layer asks for its window.

    Args:
        module: in evaluation mode; its attention is switched where it packs, and left alone where not.
        forward: the pass that is compared.
    """
    own = module.config._attn_implementation
    if _switch_attention(module, ATTENTION_NAME):
        if _packs(module, forward):
            return "packed"
        _switch_attention(module, own)
    return "padded"


def probe_documents(module: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Two documents of 9 and 6 tokens, and one of 9 that differs from the first everywhere."""
    size = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    step = max(1, math.isqrt(size))
    first = torch.arange(9, device=device) * step % size
    return first, (torch.arange(6, device=device) * step + 1) % size, (first + 1) % size


def agree(left: Tensor, right: Tensor) -> bool:
    """Equal within what rounding of their type explains."""
    tolerance = _TOLERANCE.get(left.dtype, _COARSE_TOLERANCE)
    scale = float(right.abs().max())
    return bool(((left - right).abs().max() <= tolerance * max(scale, 1e-12)).item())


def _switch_attention(module: PreTrainedModel, name: str) -> bool:
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError, AttributeError):
        return False
    return bool(module.config._attn_implementation == name)


@torch.no_grad()
def _packs(module: PreTrainedModel, forward: Forward) -> bool:
    config = module.config.get_text_config()
    if not set(getattr(config, "layer_types", None) or ()) <= _PLAIN_LAYERS:
        return False
    first, second, other = probe_documents(module)
    try:
        row, windows = _packed_row(forward, [first, second])
        changed, _ = _packed_row(forward, [other, second])
    except (TypeError, RuntimeError, ValueError, InputError, AttributeError):
        return False
    single = Backbone(module, "padded")
    alone = [single.run(forward, d, torch.arange(len(d), device=d.device), [len(d)]) for d in (first, second)]
    split = len(first)
    exact = agree(row, torch.cat(alone))
    sealed = agree(row[split:], changed[split:]) and not agree(row[:split], changed[:split])
    return exact and sealed and _windows_honoured(config, windows)


def _packed_row(forward: Forward, documents: Sequence[Tensor]) -> tuple[Tensor, list[int | None]]:
    plan = plan_packing([len(d) for d in documents], documents[0].device, record=True)
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in documents])
    arguments = planned_arguments(plan, positions.device)
    values = forward(
        input_ids=torch.cat(list(documents))[None], position_ids=positions[None], use_cache=False, **arguments
    )
    return values[0], plan.windows or []


def _windows_honoured(config: Any, asked: list[int | None]) -> bool:
    """Whether as many layers asked for the window as the configuration has sliding layers."""
    window = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or (["sliding_attention" if window else "full_attention"] * layers)
    wanted = [window if kind == "sliding_attention" else None for kind in kinds]
    return asked == wanted


def cost_model(module: nn.Module, parameters: int | None = None) -> CostModel:
    """Dense layers by tokens, attention by Σ length²; tokens alone where the configuration does not tell its sizes.

    Args:
        module: a transformer of transformers.
        parameters: in all; counted when None. Ask before it is sharded.
    """
    text = _text_config(module)
    layers, heads, width = _attention(text)
    if not (layers and heads and width):
        return TOKENS
    count = sum(p.numel() for p in module.parameters()) if parameters is None else parameters
    return CostModel.of_model(parameters=count, layers=layers, attention_width=heads * width)


def key_value_bytes(module: nn.Module) -> int | None:
    """Bytes of one token's keys and values in all layers, in the module's type; None where its sizes are not told."""
    text = _text_config(module)
    layers, heads, width = _attention(text)
    if not (layers and heads and width):
        return None
    kept = int(getattr(text, "num_key_value_heads", None) or heads)
    return 2 * layers * kept * width * next(module.parameters()).element_size()


def _text_config(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _attention(text: Any) -> tuple[int, int, int]:
    """Layers, heads and the width of a head; zeros where they are not told."""
    layers, heads = (int(getattr(text, name, None) or 0) for name in ("num_hidden_layers", "num_attention_heads"))
    width = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // heads if heads else 0)
    return layers, heads, int(width)
