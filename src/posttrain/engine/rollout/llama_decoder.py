"""The computation of a Llama-style model during generation, and the weights that it shares with the optimiser.

Prompts are packed; then each row gets one token per step. The operations are few and large: one product for query, key
and value, and one for gate and up; the residual is added inside the product; scores are one batched product in which
the query heads of a key-value head form a matrix, so keys and values are never repeated.

On the CPU in float32, a row's numbers do not depend on the other rows, bit for bit. For this, products are padded to
enough rows (`_fewest_rows` finds the number with the model's matrices; one or two rows use a different kernel);
attention uses the products of `page_attention`; masked positions behind a row's end add zeros to the end of a sum; and
element-wise kernels, which compute the end of a tensor with different instructions, end in rows of padding.

Weights are zero-copy: the decoder reads the memory that the optimiser writes. The query, key and value matrices of a
layer, and its gate and up matrices, share one buffer each, and the module's parameters point at slices of it. The
decoder multiplies by the whole buffer; the module, its optimiser and its gradients keep working on the slices. There is
no second copy, and nothing is transferred after an update.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from posttrain.domain.adapters import SavedAdapter
from posttrain.domain.errors import IntegrityError
from posttrain.engine.models.adapters import adapter_weights, attached, base_layer
from posttrain.engine.models.language_model import LanguageModel, float32_logits
from posttrain.engine.models.sharding import canonical
from posttrain.engine.rollout.page_attention import (
    attend_packed_prompts,
    attend_prompts,
    fits_varlen,
    longest_chunk,
    plan_prompts,
    why_not_varlen,
)
from posttrain.engine.rollout.port import KVShape, KVStore, Positions

_ARCHITECTURES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # types with constant frequencies
_ROWS_TRIED = (4, 8, 16, 32)
_VECTOR = 32  # floats per iteration of an element-wise kernel
_ANGLES = 1024  # growth of rotary tables, positions
_CHUNK = 1024  # tokens of one prompt computed at a time
_RANKS = 16  # ranks of adapters are padded to a multiple
_PIECE = 512  # tokens per MLP pass on a CPU: a quarter faster than 5,120 (benchmark model)
Share = tuple[int, Tensor | None]  # a copy of the adapter, and 1 for its rows and 0 for others, [rows, 1]; None: all
ALL: tuple[Share, ...] = ((0, None),)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapters of the layers of one fused product, as two products: s · up (down x).

    `up` is block-diagonal. The sum of the ranks is padded with zeros to a multiple of 16, because a product with fewer
    rows of `down` has other bits in other company. There may be several copies, each with the values of one version:
    a copy is multiplied with every row, and zeroed for the rows of other copies, so a product has the same shape, and a
    row the same bits, however many versions are decoded.
    """

    layers: tuple[tuple[Tensor, Tensor, int, int] | None, ...]  # of each: A, B, its first rank, its first output
    scale: float
    copies: list[tuple[Tensor, Tensor, Tensor]]  # down [ranks, inputs], up [outputs, ranks], a view of it: [ranks, …]

    @classmethod
    def of(cls, linears: Sequence[Any], adapter: SavedAdapter) -> "LowRank | None":
        """Return the adapters of the layers, with one copy; None: no layer has one."""
        layers, rank, output = list[tuple[Tensor, Tensor, int, int] | None](), 0, 0
        for linear in linears:
            found = adapter_weights(linear)
            layers.append((*found, rank, output) if found else None)
            rank += len(found[0]) if found else 0
            output += base_layer(linear).out_features
        if not rank:
            return None
        like = base_layer(linears[0]).weight
        down = like.new_zeros(-(-rank // _RANKS) * _RANKS, like.shape[1])
        up = like.new_zeros(output, len(down))
        return cls(tuple(layers), adapter.scale, [(down, up, up.t())])

    def refresh(self, copy: int) -> None:
        """Write the adapters' current values into a copy, which is made if it is the next one."""
        if copy == len(self.copies):
            with torch.inference_mode(False):  # so that it can be written from outside of inference mode too
                down, up = (torch.zeros_like(one) for one in self.copies[0][:2])
                self.copies.append((down, up, up.t()))
        for layer, places in zip(self.layers, self.places(copy), strict=True):
            if layer is not None and places is not None:
                places[0].copy_(layer[0])
                places[1].copy_(layer[1])

    def places(self, copy: int) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield the places of A and B of each layer in a copy; None: the layer has no adapter."""
        down, up, _ = self.copies[copy]
        for layer in self.layers:
            if layer is None:
                yield None
                continue
            low, high, rank, output = layer
            ranks = slice(rank, rank + len(low))
            yield down[ranks], up[output : output + len(high), ranks]

    def added(self, y: Tensor, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """Return y + s · up (down x), with the copy of each row."""
        for copy, own in shares:
            y = torch.addmm(y, self.lowered(x, copy, own), self.copies[copy][2])
        return y

    def lowered(self, x: Tensor, copy: int, own: Tensor | None) -> Tensor:
        """Return s · down x of the copy's own rows, and 0 of others."""
        low = F.linear(x, self.copies[copy][0]).mul_(self.scale)
        return low if own is None else low.mul_(own)


@dataclass(frozen=True, slots=True, eq=False)
class FusedLinear:
    """One matrix product for several linear layers of a module: [inputs] → [sum of outputs]."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    transposed: Tensor  # a view of the weight, [inputs, outputs]
    low: LowRank | None = None  # the adapters of the layers

    def views(self, names: Sequence[str], sizes: Sequence[int], copy: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the slices of the fused weight and of a copy of the adapter, by the names of their layers.

        Args:
            sizes: the rows of each slice.
        """
        for part, held in (("weight", self.weight), ("bias", self.bias)):
            for name, rows, end in zip(names, sizes, accumulate(sizes), strict=True):
                if held is not None:
                    yield f"{name}.{part}", held[end - rows : end]
        for name, adapter in zip(names, self.low.places(copy) if self.low else (), strict=False):
            if adapter is not None:
                yield from ((f"{name}.lora_A.weight", adapter[0]), (f"{name}.lora_B.weight", adapter[1]))


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
    head: FusedLinear  # [vocabulary, hidden]; the embedding itself when tied
    module: PreTrainedModel
    addresses: dict[str, int]  # parameter name → address right after fusing

    def check(self) -> None:
        """Check that the module's parameters are still the slices.

        Raises:
            IntegrityError: a parameter was re-pointed (moved to a device, reloaded by assignment), so the decoder would
                read stale weights.
        """
        for name, parameter in self.module.named_parameters():
            if parameter.data_ptr() != self.addresses[name]:
                raise IntegrityError(
                    f"parameter {name} must stay where the zero-copy decoder reads it, but it was moved; reopen the "
                    "rollout engine"
                )

    @property
    def adapted(self) -> bool:
        """Whether the decoder reads a copy of an adapter over a base that never changes."""
        return attached(self.module) is not None

    def refresh(self, copy: int = 0) -> None:
        """Write the adapters' current values into a copy, because the decoder does not read them in place."""
        for low in self._lows:
            low.refresh(copy)

    def forget_copies(self, kept: int = 1) -> None:
        """Free all copies of the adapters but the first ones."""
        for low in self._lows:
            del low.copies[kept:]

    @contextmanager
    def showing(self, copy: int) -> Iterator[None]:
        """Give the module the adapters of a copy for a while, so that its own forward pass computes with them."""
        own = [(part, part.clone()) for low in self._lows for layer in low.layers if layer for part in layer[:2]]
        try:
            for low in self._lows:
                for layer, places in zip(low.layers, low.places(copy), strict=True):
                    if layer is not None and places is not None:
                        layer[0].copy_(places[0])
                        layer[1].copy_(places[1])
            yield
        finally:
            for part, before in own:
                part.copy_(before)

    @property
    def _lows(self) -> list[LowRank]:
        of_layers = [fused for one in self.layers for fused in (one.qkv, one.output, one.gate_up, one.down)]
        return [fused.low for fused in (*of_layers, self.head) if fused.low is not None]

    def views(self, copy: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the decoder reads, split into the module's tensors, by name."""
        self.refresh(copy)
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
                sizes = [base_layer(getattr(part, name)).out_features for name in names]
                yield from fused.views([f"{place}.{name}" for name in names], sizes, copy)
        yield "model.norm.weight", self.final_norm
        own = {canonical(name) for name in self.addresses}
        for name, tensor in self.head.views(["lm_head"], [len(self.head.weight)], copy):
            yield name if name in own else "model.embed_tokens.weight", tensor


def why_not_fusable(module: PreTrainedModel) -> str | None:
    """Return the first reason why the native decoder would differ from this module; None if it would not."""
    config: Any = module.config
    if type(module) not in _ARCHITECTURES:
        return f"architecture {type(module).__name__}"
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    unsupported = {
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "layer_types": not set(getattr(config, "layer_types", None) or ()) <= {"full_attention"},
        "rope_parameters": rope.get("rope_type", "default") not in _STATIC_ROPE
        or 2 * len(module.model.rotary_emb.inv_freq) != head_dim,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (1, None),
        "quantization_config": getattr(config, "quantization_config", None) is not None,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) is not None,
        "lm_head": base_layer(module.lm_head).bias is not None,
    }
    return next((name for name, wrong in unsupported.items() if wrong), None) or _altered_part(module)


def _altered_part(module: PreTrainedModel) -> str | None:
    """Return a linear layer that was replaced by other than an adapter, a hook that the decoder would skip, or None."""
    for name, part in module.named_modules():
        own = base_layer(part) if attached(module) else part
        if name.endswith(("_proj", "lm_head")) and type(own) is not nn.Linear:
            return f"{name} is {type(part).__name__}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name} has a forward hook"
    return None


def fuse_weights(module: PreTrainedModel) -> FusedWeights:
    """Move the module's parameters into fused buffers, in place. A second call has no effect.

    `why_not_fusable` must return None for the module.
    """
    layers: list[LayerWeights] = []
    _fuse = partial(_fused, adapter=attached(module))
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
        head=_fuse([module.lm_head]),
        module=module,
        addresses={name: parameter.data_ptr() for name, parameter in module.named_parameters()},
    )


def _fused(layers: Sequence[nn.Module], adapter: SavedAdapter | None) -> FusedLinear:
    linears = [base_layer(layer) for layer in layers]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = _stack([linear.weight for linear in linears])
    low = None if adapter is None else LowRank.of(layers, adapter)
    return FusedLinear(weight, _stack(biases) if biases else None, weight.t(), low)


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of all parameters along their first axis; each parameter becomes a slice of it."""
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
        here = parameter.untyped_storage().data_ptr() == storage and parameter.data_ptr() == address
        if not (here and parameter.is_contiguous()):
            return False
        address += parameter.numel() * parameter.element_size()
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The results of computed prompts: packed keys and values, and the last hidden state of each prompt."""

    pairs: list[Tensor]  # of each layer, [tokens, 2, kv_heads, head_dim]
    hidden: Tensor  # [prompts, hidden]
    spans: tuple[tuple[int, int], ...]  # of each prompt, [begin, end) among the tokens


class LlamaDecoder:
    """The forward pass over fused weights."""

    def __init__(self, weights: FusedWeights) -> None:
        config = weights.module.config
        self._weights = weights
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim = _head_dim(config)
        self._turning = self._heads + self._kv_heads  # number of rotated heads
        self._eps = config.rms_norm_eps
        self._eps_tensor = torch.tensor(self._eps, device=weights.embedding.device)
        self._composes_norms = weights.embedding.device.type == "cpu" and weights.embedding.dtype == torch.float32
        widths = (config.hidden_size, config.intermediate_size, self._head_dim * self._kv_heads)
        self._multiple = _VECTOR // math.gcd(_VECTOR, *widths)
        self._fewest = _fewest_rows(weights)
        self._varlen = fits_varlen(weights.embedding.device, weights.embedding.dtype, self._head_dim)
        self._cosine = self._sine = weights.embedding.new_empty(0, 1, self._head_dim)
        self._factors: list[Tensor] = []

    @property
    def shape(self) -> KVShape:
        """The size of one position of one row."""
        embedding = self._weights.embedding
        return KVShape(len(self._weights.layers), self._kv_heads, self._head_dim, embedding.dtype, embedding.device)

    def refresh(self, copy: int = 0) -> None:
        """Recompute all tensors that depend on weights, after the weights have changed.

        Args:
            copy: the copy of the adapter that gets its current values.
        """
        self._weights.refresh(copy)
        found = [self._head_factors(layer) for layer in self._weights.layers]
        for held, fresh in zip(self._factors, found, strict=False):
            held.copy_(fresh)  # in place, because a recorded step reads these tensors
        self._factors = self._factors or found

    def prefill(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[Sequence[Tensor]] = (), copy: int = 0
    ) -> Prefix:
        """Compute tokens of prompts, together, with one copy of the adapter.

        Args:
            prompts: the tokens to compute.
            pasts: of each prompt, the keys and values of its earlier tokens, by layer [tokens, 2, kv_heads, head_dim];
                the result includes them. By default, there are none.
        """
        lengths = [len(prompt) for prompt in prompts]
        begins = [len(past[0]) for past in pasts] or [0] * len(prompts)
        positions = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        x, cosine, sine = self._enter(*self.inputs(tokens, positions))
        plan = None if self._varlen else plan_prompts(lengths, begins, self._heads, x.device)
        pairs: list[Tensor] = []
        total, shares = sum(lengths), ((copy, None),)
        for index, layer in enumerate(self._weights.layers):
            heads = self._project(x, index, cosine, sine, shares)
            pair = heads[:total, self._heads :].clone().view(total, 2, self._kv_heads, self._head_dim)
            seen = _interleaved([past[index] for past in pasts], torch.split(pair, lengths)) if pasts else pair
            if plan is None:
                attended = attend_packed_prompts(heads[:total, : self._heads], seen, lengths, begins)
            else:
                attended = attend_prompts(heads[:, : self._heads], seen, plan)
            x = self._finish(x, self._padded(attended, len(x)), layer, shares)
            pairs.append(seen)
        ends = list(accumulate(b + n for b, n in zip(begins, lengths, strict=True)))
        spans = tuple((end - b - n, end) for end, b, n in zip(ends, begins, lengths, strict=True))
        return Prefix(pairs, x[[end - 1 for end in accumulate(lengths)]], spans)

    def chunk(self, begin: int) -> int:
        """Return how many tokens of a prompt to compute after `begin`, so that attention scores fit in memory."""
        return _CHUNK if self._varlen else longest_chunk(begin, _CHUNK, self._heads)

    def step(self, store: KVStore, tokens: Tensor, positions: Positions, copies: Sequence[int] | None = None) -> Tensor:
        """Append one token [rows] to every row of the store; return the logits after it, [rows, vocabulary].

        Args:
            copies: [rows] copies of the adapter; None: the first.
        """
        store.begin_step(positions)
        return self.decode(store, *self.inputs(tokens, positions), len(positions), self.shares(copies))

    def decode(
        self, store: KVStore, tokens: Tensor, places: Tensor, count: int, shares: Sequence[Share] = ALL
    ) -> Tensor:
        """Run a step on `inputs`, of which the first `count` are the rows of the store; return [count, vocabulary]."""
        x, cosine, sine = self._enter(tokens, places)
        spare = len(x) - count
        shares = self._over(shares, len(x))
        for index, layer in enumerate(self._weights.layers):
            heads = self._project(x, index, cosine, sine, shares)
            attended = store.attend(index, heads[:count] if spare else heads)
            x = self._finish(x, F.pad(attended, (0, 0, 0, spare)) if spare else attended, layer, shares)
        return self._logits(x, shares)[:count]

    def shares(self, copies: Sequence[int] | None) -> Sequence[Share]:
        """Return which rows each copy of the adapter has, given the copy of each row."""
        if copies is None or not self._weights.adapted:
            return ALL
        if copies.count(copies[0]) == len(copies):
            return ((copies[0], None),)
        of_rows, like = torch.tensor(copies)[:, None], self._weights.embedding
        return [(copy, (of_rows == copy).to(like)) for copy in sorted(set(copies))]

    def _over(self, shares: Sequence[Share], rows: int) -> Sequence[Share]:
        """Return the shares over padded rows."""
        return [(copy, own if own is None else self._padded(own, rows)) for copy, own in shares]

    @property
    def rotations(self) -> int:
        """The number of positions in the rotary tables, which are reallocated when this number changes."""
        return len(self._cosine)

    def logits(self, hidden: Tensor, copies: Sequence[int] | None = None) -> Tensor:
        """Return logits: [prompts, hidden] → [prompts, vocabulary], with a copy of the adapter for each prompt."""
        rows = self.rows(len(hidden))
        return self._logits(self._padded(hidden, rows), self._over(self.shares(copies), rows))[: len(hidden)]

    def rows(self, count: int) -> int:
        """Return the number of rows including padding, for `count` rows."""
        return -(-max(count, self._fewest) // self._multiple) * self._multiple

    def _padded(self, x: Tensor, rows: int) -> Tensor:
        return x if len(x) == rows else F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))

    def inputs(self, tokens: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return tokens and positions on the device, padded; extend the rotary tables to cover them."""
        device, longest = self._weights.embedding.device, int(positions.max())
        while longest >= len(self._cosine):
            self._extend_rotations()
        rows = self.rows(len(positions))
        lacking = rows - len(positions)
        padded = np.concatenate([positions, np.zeros(lacking, np.int64)]) if lacking else positions
        return self._padded(tokens.to(device), rows), torch.from_numpy(padded).to(device)

    def _enter(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings and rotations."""
        embedded = F.embedding(tokens, self._weights.embedding)
        return embedded, self._cosine.index_select(0, places), self._sine.index_select(0, places)

    def _extend_rotations(self) -> None:
        """Extend the [positions, 1, head_dim] tables by a block; the sine has the sign of the rotated half."""
        rotary, dtype = self._weights.module.model.rotary_emb, self._weights.embedding.dtype
        begin = len(self._cosine)
        places = torch.arange(begin, begin + _ANGLES, device=rotary.inv_freq.device).float()
        angles = torch.outer(places, rotary.inv_freq.float())
        cosine, sine = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        tables = (torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1))
        self._cosine = torch.cat([self._cosine, tables[0].to(dtype)[:, None]])
        self._sine = torch.cat([self._sine, tables[1].to(dtype)[:, None]])

    def _head_factors(self, layer: LayerWeights) -> Tensor:
        """Return norm weights of query (over sqrt(head_dim)) and key heads, [heads + kv_heads, head_dim or 1]."""
        query, key = layer.query_norm, layer.key_norm
        if query is None or key is None:
            query = key = layer.input_norm.new_ones(1)
        return torch.cat([(query * self._head_dim**-0.5).expand(self._heads, -1), key.expand(self._kv_heads, -1)])

    def _project(self, x: Tensor, index: int, cosine: Tensor, sine: Tensor, shares: Sequence[Share]) -> Tensor:
        """Project in layer `index`: [N, hidden] → query, key and value heads, [N, heads + 2 kv_heads, head_dim].

        Query and key are rotated; the query is already scaled by 1/sqrt(head_dim).
        """
        layer, factors = self._weights.layers[index], self._factors[index]
        heads = linear(self._rms_norm(x, layer.input_norm), layer.qkv, shares).view(len(x), -1, self._head_dim)
        turning = heads.narrow(1, 0, self._turning)
        normed = turning * factors if layer.query_norm is None else self._rms_norm(turning, factors)
        turned = normed.roll(self._head_dim // 2, -1)
        torch.addcmul(normed.mul_(cosine), turned, sine, out=turning)
        return heads

    def _finish(self, x: Tensor, attended: Tensor, layer: LayerWeights, shares: Sequence[Share]) -> Tensor:
        """Compute a layer after its attention; on a CPU in pieces whose intermediate results stay in cache."""
        pieces = len(x) // _PIECE if x.device.type == "cpu" and len(shares) == 1 else 1
        if pieces < 2:
            return self._finish_piece(x, attended, layer, shares)
        sizes = [_PIECE] * (pieces - 1)
        sizes.append(len(x) - sum(sizes))
        parts = zip(torch.split(x, sizes), torch.split(attended, sizes), strict=True)
        return torch.cat([self._finish_piece(*part, layer, shares) for part in parts])

    def _finish_piece(self, x: Tensor, attended: Tensor, layer: LayerWeights, shares: Sequence[Share]) -> Tensor:
        """Apply output projection, residual, MLP, residual."""
        x = _add_linear(x, attended, layer.output, shares)
        gate, up = linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up, shares).chunk(2, -1)
        return _add_linear(x, F.silu(gate).mul_(up), layer.down, shares)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x / sqrt(mean(x²) + eps) * weight over the last axis.

        On the CPU, torch's version has eight operations, whose overhead on few rows is a quarter of a step.
        """
        if not self._composes_norms:
            return F.rms_norm(x, x.shape[-1:], None, self._eps) * weight
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return x.mul(inverse).mul_(weight)

    def _logits(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """Return logits in float32, even for weights in bfloat16."""
        x, head = self._rms_norm(x, self._weights.final_norm), self._weights.head
        logits, low = float32_logits(x, head.weight), head.low
        if low is not None:
            for copy, own in shares:
                logits.add_(float32_logits(low.lowered(x, copy, own), low.copies[copy][1]))
        return logits


def _interleaved(pasts: Sequence[Tensor], fresh: Sequence[Tensor]) -> Tensor:
    """Return the earlier tokens of each prompt, followed by its new tokens."""
    return torch.cat([part for both in zip(pasts, fresh, strict=True) for part in both])


def why_attention_is_plain(model: LanguageModel) -> str | None:
    """Return why a model on CUDA generates with plain torch attention; None if it does not."""
    return why_not_varlen(model.device, next(model.module.parameters()).dtype, _head_dim(model.module.config))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _fewest_rows(weights: FusedWeights) -> int:
    """Return the smallest number of rows at which a row of a product always has the same bits, found by trial."""
    layer = weights.layers[0]
    products = (layer.qkv, layer.output, layer.gate_up, layer.down, weights.head)
    low = [_filled(part) for product in products if product.low for part in product.low.copies[0][:2]]
    matrices = (*(product.weight for product in products), *low)
    return next(
        (rows for rows in _ROWS_TRIED if all(_rows_agree(matrix, rows) for matrix in matrices)), _ROWS_TRIED[-1]
    )


def _filled(like: Tensor) -> Tensor:
    """Return a matrix of this shape without zeros, whose products show how they are rounded."""
    return torch.linspace(-1.0, 1.0, like.numel(), device=like.device).sin().to(like.dtype).view(like.shape)


def _rows_agree(matrix: Tensor, rows: int) -> bool:
    count = 3 * rows
    x = _filled(matrix.new_empty(count, matrix.shape[1]))
    plain, added = F.linear(x, matrix), torch.addmm(F.linear(x, matrix), x, matrix.t())
    for some in range(rows, 2 * rows):
        part = x[some : 2 * some] if 2 * some <= count else x[-some:]
        at = slice(some, 2 * some) if 2 * some <= count else slice(-some, None)
        alike = torch.equal(F.linear(part, matrix), plain[at])
        if not alike or not torch.equal(torch.addmm(plain[at], part, matrix.t()), added[at]):
            return False
    return True


def linear(x: Tensor, layer: FusedLinear, shares: Sequence[Share]) -> Tensor:
    """Return W x + b, with the copy of the adapter of each row."""
    out = F.linear(x, layer.weight, layer.bias)
    return out if layer.low is None else layer.low.added(out, x, shares)


def _add_linear(x: Tensor, y: Tensor, layer: FusedLinear, shares: Sequence[Share]) -> Tensor:
    """Return x + W y + b."""
    out = torch.addmm(x, y, layer.transposed)
    if layer.low is not None:
        out = layer.low.added(out, y, shares)
    return out if layer.bias is None else out.add_(layer.bias)
