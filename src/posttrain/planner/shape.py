"""The sizes of a model that decide its memory and its cost, read from its `config.json`. Pure arithmetic.

Every parameter counts for memory. In a mixture of experts, only the chosen experts compute a token, so the others count
neither for the cost of a token nor for activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a stored value


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that decide its memory."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int  # of the MLP, for one token: of the experts that compute the token, or of a wider dense layer
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # embedding and output head are one matrix
    stored: int = 0  # bytes of a value in its file; 0: unknown
    attention: int = 0  # parameters of a layer's attention; 0: computed from heads
    mlp: int = 0  # parameters of the largest layer's MLP, with all its experts; 0: those of a gated MLP
    idle: int = 0  # parameters of the experts that do not compute a token, in all layers
    latent: int = 0  # values that a layer caches for one token; 0: keys and values of `kv_heads` heads
    chosen: int = 0  # number of routed experts that compute a token; 0: no layer has experts

    @classmethod
    def of_config(cls, config: Mapping[str, Any], parameters: int | None = None) -> Shape | None:
        """Read a `config.json` in the Llama style; return None if it lacks these sizes.

        Args:
            parameters: the number counted in the weights; None: the number is computed for gated MLPs without biases.
        """
        text = {**config, **(config.get("text_config") or {})}
        try:
            hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
            shape = cls(
                parameters or 0,
                layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(text.get("intermediate_size") or 4 * hidden),
                heads=heads,
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                vocabulary=int(text["vocab_size"]),
                tied=bool(text.get("tie_word_embeddings", False)),
            )
            shape = _with_latent_attention(shape, text)
            shape, mlps = _with_experts(shape, text)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
        outside = shape.hidden * shape.vocabulary * (1 if shape.tied else 2) + shape.hidden
        layers = mlps + shape.layers * (shape.layer_parameters - shape.mlp_parameters)
        return shape if parameters else replace(shape, parameters=outside + layers)

    @classmethod
    def of_files(cls, config: Mapping[str, Any], stored: int) -> Shape | None:
        """Return the shape of a model on disk, whose weights take `stored` bytes."""
        width = _WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")))
        found = cls.of_config(config, stored // width if width else None)
        return replace(found, stored=width or 0) if found else None

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest decoder layer: query, key, value and output projections, MLP, two norms."""
        attention = self.attention or 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + self.mlp_parameters + 2 * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the largest layer's MLP: gate, up and down, of all experts."""
        return self.mlp or 3 * self.hidden * self.intermediate

    @property
    def active(self) -> int:
        """Number of parameters that compute a token."""
        return self.parameters - self.idle

    @property
    def kv_values(self) -> int:
        """Number of cached elements of one token, in all layers: keys and values."""
        return self.layers * (self.latent or 2 * self.kv_heads * self.head_dim)

    @property
    def unit_parameters(self) -> int:
        """Parameters gathered at the same time when sharded: embedding and head, the current and the next layer."""
        return self.hidden * self.vocabulary * (1 if self.tied else 2) + 2 * self.layer_parameters


def _with_latent_attention(shape: Shape, text: Mapping[str, Any]) -> Shape:
    """Return the shape with the sizes of multi-head latent attention (DeepSeek-V2), if the configuration has them.

    Keys and values have different widths; `head_dim` becomes their mean. The cache has their common low-rank input.
    """
    rank = text.get("kv_lora_rank")
    if not rank:
        return shape
    hidden, heads = shape.hidden, shape.heads
    nope, rope, value = (int(text[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    narrow = int(text.get("q_lora_rank") or 0)
    queries = narrow * (hidden + 1 + heads * (nope + rope)) if narrow else hidden * heads * (nope + rope)
    keys = hidden * (rank + rope) + rank * (1 + heads * (nope + value))
    attention = queries + keys + heads * value * hidden
    width = (nope + rope + value) // 2
    return replace(shape, attention=attention, kv_heads=heads, head_dim=width, latent=rank + rope)


def _with_experts(shape: Shape, text: Mapping[str, Any]) -> tuple[Shape, int]:
    """Return the shape with the sizes of a mixture of experts, and the parameters of all layers' MLPs.

    The names are those of Mixtral, Qwen and DeepSeek.
    """
    experts = next((int(text[n]) for n in ("n_routed_experts", "num_local_experts", "num_experts") if text.get(n)), 0)
    if not experts:
        return shape, shape.layers * shape.mlp_parameters
    chosen, dense = min(int(text.get("num_experts_per_tok") or 1), experts), set(text.get("mlp_only_layers") or ())
    kinds, first = text.get("mlp_layer_types"), int(text.get("first_k_dense_replace") or 0)
    if kinds:
        dense = {at for at, kind in enumerate(kinds) if kind == "dense"}
    step = int(text.get("decoder_sparse_step") or 1)
    sparse = sum(at >= first and at not in dense and (at + 1) % step == 0 for at in range(shape.layers))
    width = int(text.get("moe_intermediate_size") or shape.intermediate)
    shared = int(text.get("shared_expert_intermediate_size") or int(text.get("n_shared_experts") or 0) * width)
    expert, whole = 3 * shape.hidden * width, 3 * shape.hidden * shape.intermediate
    gate = shape.hidden if text.get("shared_expert_intermediate_size") else 0
    mixture = experts * (expert + shape.hidden) + 3 * shape.hidden * shared + gate
    widths = [chosen * width + shared] * bool(sparse) + [shape.intermediate] * (sparse < shape.layers)
    found = replace(
        shape,
        intermediate=max(widths),
        mlp=max(mixture if sparse else 0, whole if sparse < shape.layers else 0),
        idle=sparse * (experts - chosen) * expert,
        chosen=chosen if sparse else 0,
    )
    return found, sparse * mixture + (shape.layers - sparse) * whole
