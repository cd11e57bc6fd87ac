"""A model from nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from posttrain.domain.validation import Frozen
from posttrain.engine.settings import Few, Tokens, Width


class InitModelConfig(Frozen):
    """A randomly initialised model in Hugging Face format with a character tokenizer and chat template: no download."""

    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    characters: str = (
        "0123456789+-*/=();:,.<>? \nabcdefghijklmnopqrstuvwxyzQAS"  # the vocabulary besides special tokens
    )
    hidden_size: Width = 64
    intermediate_size: Width = 192
    layers: Few = 2
    heads: Few = 2
    kv_heads: Few = 1
    context_length: Tokens = 512

    @model_validator(mode="after")
    def _shapes_fit(self) -> InitModelConfig:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size must be a multiple of heads ({self.heads}), got {self.hidden_size}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}")
        if len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat")
        return self

    def inputs(self) -> dict[str, tuple[str, str]]:
        """A model from nothing has no inputs."""
        return {}
