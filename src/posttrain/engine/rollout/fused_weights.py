"""Zero-copy weights of a Llama-style module: what a hand-written decoder reads is what the optimiser writes.

The query, key and value matrices of a layer, and its gate and up matrices, are laid side by side in one buffer and
the module's parameters are pointed at slices of it. The decoder multiplies by the whole buffer; the module, its
optimiser and its gradients keep working on the slices. No second copy exists and nothing is transferred after an
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from posttrain.domain.errors import IntegrityError

_ARCHITECTURES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # rotary frequencies that no sequence length changes


@dataclass(frozen=True, slots=True, eq=False)
class FusedLinear:
    """One matrix product for several layers of a module: [inputs] → [sum of outputs]."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    transposed: Tensor  # the weight, seen as [inputs, outputs]

    def views(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """The layers that it is made of, by their names: `sizes` rows each."""
        for part, held in (("weight", self.weight), ("bias", self.bias)):
            ends = accumulate(sizes)
            for name, rows, end in zip(names, sizes, ends, strict=True):
                if held is not None:
                    yield f"{name}.{part}", held[end - rows : end]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    qkv: FusedLinear
    query_norm: Tensor | None  # [head_dim]; Qwen3 only, with key_norm
    key_norm: Tensor | None
    output: FusedLinear
    mlp_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True, slots=True, eq=False)
class FusedWeights:
    """All weights of a module as the decoder reads them."""

    layers: tuple[LayerWeights, ...]
    embedding: Tensor  # [vocabulary, hidden]
    final_norm: Tensor
    head: Tensor  # [vocabulary, hidden]; the embedding itself when tied
    module: PreTrainedModel
    addresses: dict[str, int]  # parameter name → address right after fusing

    def check(self) -> None:
        """Make sure that the module's parameters still are the slices.

        Raises:
            IntegrityError: a parameter was re-pointed (moved to a device, re-loaded by assignment), so the decoder
                would read stale weights.
        """
        for name, parameter in self.module.named_parameters():
            if parameter.data_ptr() != self.addresses[name]:
                raise IntegrityError(
                    f"parameter {name} must stay where the zero-copy decoder reads it, but it was re-pointed; "
                    "reopen the rollout engine"
                )

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the decoder reads, cut into those of the module and called by their names."""
        yield "model.embed_tokens.weight", self.embedding
        for index, (layer, held) in enumerate(zip(self.module.model.layers, self.layers, strict=True)):
            prefix, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp
            yield f"{prefix}.input_layernorm.weight", held.input_norm
            yield f"{prefix}.post_attention_layernorm.weight", held.mlp_norm
            for name, norm in (("q_norm", held.query_norm), ("k_norm", held.key_norm)):
                if norm is not None:
                    yield f"{prefix}.self_attn.{name}.weight", norm
            for fused, part, names in (
                (held.qkv, attention, ("q_proj", "k_proj", "v_proj")),
                (held.output, attention, ("o_proj",)),
                (held.gate_up, mlp, ("gate_proj", "up_proj")),
                (held.down, mlp, ("down_proj",)),
            ):
                place = f"{prefix}.{'self_attn' if part is attention else 'mlp'}"
                sizes = [getattr(part, name).out_features for name in names]
                yield from fused.views([f"{place}.{name}" for name in names], sizes)
        yield "model.norm.weight", self.final_norm
        yield "lm_head.weight" if "lm_head.weight" in self.addresses else "model.embed_tokens.weight", self.head


def why_not_fusable(module: PreTrainedModel) -> str | None:
    """The first reason why the hand-written decoder would not compute what this module computes; None if it would."""
    config: Any = module.config
    if type(module) not in _ARCHITECTURES:
        return f"architecture {type(module).__name__}"
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or ())
    inverse_frequencies = module.model.rotary_emb.inv_freq
    unsupported = {
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "layer_types": not kinds <= {"full_attention"},
        "rope_parameters": rope.get("rope_type", "default") not in _STATIC_ROPE
        or 2 * len(inverse_frequencies) != head_dim,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (1, None),
        "quantization_config": getattr(config, "quantization_config", None) is not None,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) is not None,
        "lm_head": module.lm_head.bias is not None,
    }
    reason = next((name for name, wrong in unsupported.items() if wrong), None)
    return reason or _altered_part(module)


def _altered_part(module: PreTrainedModel) -> str | None:
    """A linear layer that somebody replaced (an adapter), or a hook that would be skipped."""
    for name, part in module.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(part) is not nn.Linear:
            return f"{name} is {type(part).__name__}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name} has a forward hook"
    return None


def fuse_weights(module: PreTrainedModel) -> FusedWeights:
    """Lay the module's parameters into fused buffers, in place. Fusing again changes nothing.

    The module must be one for which `why_not_fusable` is None.
    """
    layers: list[LayerWeights] = []
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.data,
                qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
                query_norm=None if query_norm is None else query_norm.weight.data,
                key_norm=None if key_norm is None else key_norm.weight.data,
                output=_fuse([attention.o_proj]),
                mlp_norm=layer.post_attention_layernorm.weight.data,
                gate_up=_fuse([mlp.gate_proj, mlp.up_proj]),
                down=_fuse([mlp.down_proj]),
            )
        )
    return FusedWeights(
        layers=tuple(layers),
        embedding=module.model.embed_tokens.weight.data,
        final_norm=module.model.norm.weight.data,
        head=module.lm_head.weight.data,
        module=module,
        addresses={name: parameter.data_ptr() for name, parameter in module.named_parameters()},
    )


def _fuse(linears: Sequence[nn.Linear]) -> FusedLinear:
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = _stack([linear.weight for linear in linears])
    return FusedLinear(weight, _stack(biases) if biases else None, weight.t())


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor over all parameters along their first axis; each parameter becomes a slice of it."""
    first = parameters[0].data
    rows = sum(len(parameter) for parameter in parameters)
    if _lie_together(parameters):
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    fused = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    storage = parameters[0].untyped_storage().data_ptr()
    address = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.data_ptr() != address:
            return False
        if not parameter.is_contiguous():
            return False
        address += parameter.numel() * parameter.element_size()
    return True
