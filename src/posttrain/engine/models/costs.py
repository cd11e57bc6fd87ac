"""What a document costs a model to compute and to keep, for whoever splits batches by cost or by memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.pacing.balancing import TOKENS, CostModel


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
