"""Activation checkpointing: keep what enters a decoder layer, compute the rest again in backward."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from posttrain.domain.errors import InputError


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute every decoder layer of a transformer in backward. Names and parameters stay; call it before sharding.

    Source: Chen et al., arXiv 1604.06174.

    Raises:
        InputError: a model whose decoder layers cannot be found.
    """
    layers = getattr(getattr(module, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(
            f"activation_checkpointing needs a model with a list of decoder layers, got {type(module).__name__}; "
            "turn it off"
        )
    for layer in layers:
        checkpoint(layer)
