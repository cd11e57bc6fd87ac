"""The sizes of a model that decide its memory and its cost, read from its `config.json`. Pure arithmetic.

Every parameter counts for memory. In a mixture of experts, only the chosen experts compute a token, so the others count
neither for the cost of a token nor for activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.domain.rendering import experts_of

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
    mlp: int = 0  # parameters of the largest layer's MLP, with all its experts; 0: those of a gated MLP
    idle: int = 0  # parameters of the experts that do not compute a token, in all layers
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
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + self.mlp_parameters + 2 * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the largest layer's MLP: gate, up and down, of all experts."""
        return self.mlp or 3 * self.hidden * self.intermediate

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a decoder layer, by their names in the Llama style: outputs and inputs.

        Experts are not among them, because transformers stores the weights of all experts as one tensor.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (queries, self.hidden), "o_proj": (self.hidden, queries)}
        attention |= dict.fromkeys(("k_proj", "v_proj"), (keys, self.hidden))
        mlp = dict.fromkeys(("gate_proj", "up_proj"), (self.intermediate, self.hidden))
        return attention if self.chosen else {**attention, **mlp, "down_proj": (self.hidden, self.intermediate)}

    @property
    def active(self) -> int:
        """Number of parameters that compute a token."""
        return self.parameters - self.idle

    @property
    def kv_values(self) -> int:
        """Number of key and value elements of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def unit_parameters(self) -> int:
        """Parameters gathered at the same time when sharded: embedding and head, the current and the next layer."""
        return self.hidden * self.vocabulary * (1 if self.tied else 2) + 2 * self.layer_parameters


def _with_experts(shape: Shape, text: Mapping[str, Any]) -> tuple[Shape, int]:
    """Return the shape with the sizes of a mixture of experts, and the parameters of all layers' MLPs.

    The names are those of Mixtral, OLMoE, Qwen and GLM.
    """
    experts, chosen = experts_of(text)
    step, first = int(text.get("decoder_sparse_step") or 1), int(text.get("first_k_dense_replace") or 0)
    layers = set(range(first, shape.layers)).difference(text.get("mlp_only_layers") or ()) if experts else ()
    sparse = sum((at + 1) % step == 0 for at in layers)
    if not sparse:
        return shape, shape.layers * shape.mlp_parameters
    width = int(text.get("moe_intermediate_size") or shape.intermediate)
    gated = int(text.get("shared_expert_intermediate_size") or 0)  # a shared expert, whose gate has one row
    shared = gated or int(text.get("n_shared_experts") or 0) * width
    expert, dense = 3 * shape.hidden * width, shape.mlp_parameters if sparse < shape.layers else 0
    mixture = experts * (expert + shape.hidden) + (3 * shared + bool(gated)) * shape.hidden
    found = replace(
        shape,
        intermediate=max(chosen * width + shared, shape.intermediate if dense else 0),
        mlp=max(mixture, dense),
        idle=sparse * (experts - chosen) * expert,
        chosen=chosen,
    )
    return found, sparse * mixture + (shape.layers - sparse) * dense
