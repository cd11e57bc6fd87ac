"""What a document costs a model to compute, for whoever splits a batch by cost."""

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
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    width = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // heads if heads else 0)
    if not (layers and heads and width):
        return TOKENS
    count = sum(p.numel() for p in module.parameters()) if parameters is None else parameters
    return CostModel.of_model(parameters=count, layers=int(layers), attention_width=int(heads * width))
