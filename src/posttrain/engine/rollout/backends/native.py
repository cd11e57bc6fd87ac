"""A hand-written decoder for Llama, Qwen2 and Qwen3 weights: zero-copy, packed prompts, ended rows dropped.

It computes what the module computes, in fewer and larger operations: one product for query, key and value and one for
gate and up; the residual added inside the product; scores and mask in one batched product in which the query heads of
a key-value head form a matrix, so that keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.models import LanguageModel
from posttrain.engine.models.attention import PackingPlan, attend_packed, plan_packing
from posttrain.engine.models.costs import key_value_bytes
from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.decoding import Rows, decode_batch
from posttrain.engine.rollout.fused_weights import (
    FusedLinear,
    FusedWeights,
    LayerWeights,
    fuse_weights,
    why_not_fusable,
)
from posttrain.engine.rollout.port import Generation
from posttrain.engine.samples import Trajectory


class NativeRollout(BatchedEngine):
    """`RolloutEngine` over the weights of a `LanguageModel`, read where they are.

    Opening it re-points the module's parameters at fused buffers; their values, names and shapes stay.

    Args:
        kv_cache: bytes that keys and values may take; None: as many as a batch needs.

    Raises:
        InputError: a model for which `why_not_fusable` has a reason.
    """

    def __init__(self, model: LanguageModel, kv_cache: int | None = None) -> None:
        reason = why_not_fusable(model.module)
        if reason is not None:
            raise InputError(
                f"native rollout must have a plain Llama, Qwen2 or Qwen3 model, got {reason}; use the module rollout"
            )
        token_bytes = key_value_bytes(model.module)
        super().__init__("native", model.context_length, self._decode_all, kv_cache=kv_cache, token_bytes=token_bytes)
        self._model = model
        self._weights = fuse_weights(model.module)

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """See `RolloutEngine.views`."""
        return self._weights.views()

    @torch.inference_mode()
    def _decode_all(self, work: Sequence[Generation]) -> list[Trajectory]:
        self._weights.check()
        model = self._model
        return decode_batch(work, lambda rows: _NativeSession(self._weights, rows), model.eos_token_ids, model.device)


class _NativeSession:
    """Rows with a key-value cache [2 * layers, rows, kv_heads, time, head_dim].

    Prompts are aligned right in the cache, so that every row writes its next key at the same time index.
    """

    drop_share: float | None = 0.0

    def __init__(self, weights: FusedWeights, rows: Rows) -> None:
        config = weights.module.config
        self._weights = weights
        self._rows = rows
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps = config.rms_norm_eps
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._eps_tensor = torch.tensor(self._eps, device=device)
        lengths = torch.tensor([len(p) for p in rows.prompts], device=device)
        self._prompt_of_row = torch.tensor(rows.prompt_of_row, device=device)
        self._positions = lengths[self._prompt_of_row]  # [slots] of the next token
        self._time = max(len(p) for p in rows.prompts)
        capacity = self._time + max(rows.limits) - 1
        shape = (2 * len(weights.layers), len(self._prompt_of_row), self._kv_heads, capacity, self._head_dim)
        self._cache = torch.empty(shape, device=device, dtype=dtype)
        # Masked out by the bias, but a NaN left in memory would pass through any weight, 0 included.
        self._cache[:, :, :, : self._time - int(self._positions.min())] = 0
        self._views = self._cache_views(len(self._prompt_of_row))
        self._cosine, self._sine = self._rotations(self._time + max(rows.limits))
        self._bias = self._padding_bias(capacity)
        self._factors = [self._head_factors(layer) for layer in weights.layers]

    def _cache_views(self, count: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each layer: keys and values of the first `count` slots, and both with slots and heads as one axis."""
        used = self._cache[:, :count]
        merged = used.view(len(used), count * self._kv_heads, *used.shape[3:])
        return [(used[i], used[i + 1], merged[i], merged[i + 1]) for i in range(0, len(used), 2)]

    def _rotations(self, count: int) -> tuple[Tensor, Tensor]:
        """Two [count, 1, head_dim] tables; the sign of the rotated half is in the sine."""
        rotary = self._weights.module.model.rotary_emb
        angles = torch.outer(torch.arange(count, device=rotary.inv_freq.device).float(), rotary.inv_freq.float())
        cosine, sine = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        tables = (torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1))
        return tables[0].to(self._cache.dtype)[:, None], tables[1].to(self._cache.dtype)[:, None]

    def _padding_bias(self, capacity: int) -> Tensor | None:
        """[slots * kv_heads, 1, capacity] to add to the scores; None when no prompt is padded."""
        if bool((self._positions == self._time).all()):
            return None
        padded = torch.arange(capacity, device=self._cache.device) < (self._time - self._positions)[:, None]
        bias = self._cache.new_zeros(padded.shape).masked_fill_(padded, float("-inf"))
        return bias.repeat_interleave(self._kv_heads, 0)[:, None]

    def _head_factors(self, layer: LayerWeights) -> Tensor:
        """[heads + kv_heads, head_dim or 1]: norm weights of query and key heads, the query's over sqrt(head_dim)."""
        query, key = layer.query_norm, layer.key_norm
        if query is None or key is None:
            query = key = layer.input_norm.new_ones(1)
        return torch.cat([(query * self._head_dim**-0.5).expand(self._heads, -1), key.expand(self._kv_heads, -1)])

    def prefill(self) -> Tensor:
        """[rows, vocabulary]: every distinct prompt computed once, packed."""
        device = self._cache.device
        lengths = [len(p) for p in self._rows.prompts]
        tokens = torch.tensor([t for p in self._rows.prompts for t in p], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        plan = plan_packing(lengths, device)
        slot, source, time = self._scatter_indices(lengths)
        x = F.embedding(tokens, self._weights.embedding)
        cosine, sine = self._cosine[positions], self._sine[positions]
        for index, layer in enumerate(self._weights.layers):
            query_key, value = self._project(x, index, cosine, sine)
            query, key = query_key[:, : self._heads], query_key[:, self._heads :]
            self._cache[2 * index, slot, :, time] = key[source]
            self._cache[2 * index + 1, slot, :, time] = value[source]
            x = self._finish(x, self._attend_prompts(query, key, value, plan), layer)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return self._logits(x[last])[self._prompt_of_row]

    def _scatter_indices(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """For every prompt token of every row: its slot, its place in the packed prompts, its time index."""
        device = self._cache.device
        sizes = torch.tensor(lengths, device=device)
        starts = sizes.cumsum(0) - sizes
        counts = self._positions
        slot = torch.arange(len(counts), device=device).repeat_interleave(counts)
        offset = torch.arange(len(slot), device=device) - (counts.cumsum(0) - counts)[slot]
        source = starts[self._prompt_of_row][slot] + offset
        return slot, source, self._time - counts[slot] + offset

    def _attend_prompts(self, query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan) -> Tensor:
        return attend_packed(query, key, value, plan, scaling=1.0).flatten(1)

    def step(self, tokens: Tensor) -> Tensor:
        """[slots, vocabulary]: the logits after one more token in every slot."""
        count, time = len(tokens), self._time
        cosine, sine = self._cosine[self._positions], self._sine[self._positions]
        bias = None if self._bias is None else self._bias[..., : time + 1]
        x = F.embedding(tokens, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            query_key, value = self._project(x, index, cosine, sine)
            keys, values, merged_keys, merged_values = self._views[index]
            keys[:, :, time] = query_key[:, self._heads :]
            values[:, :, time] = value
            query = query_key[:, : self._heads].reshape(len(merged_keys), -1, self._head_dim)
            scores = torch.bmm(query, merged_keys[:, : time + 1].transpose(1, 2))
            if bias is not None:
                scores += bias
            attended = torch.bmm(scores.softmax(-1), merged_values[:, : time + 1])
            x = self._finish(x, attended.view(count, -1), layer)
        self._time += 1
        self._positions = self._positions + 1
        return self._logits(x)

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        """Move rows from the last slots into free ones and forget the rest."""
        used = self._cache[:, :, :, : self._time]
        used[:, free] = used[:, moved]
        self._positions[free] = self._positions[moved]
        self._positions = self._positions[:count]
        self._views = self._cache_views(count)
        if self._bias is not None:
            rows = self._bias.view(-1, self._kv_heads, self._bias.shape[2])
            rows[free] = rows[moved]
            self._bias = self._bias[: count * self._kv_heads]

    def _project(self, x: Tensor, index: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """Of layer `index`: [N, hidden] → rotated query and key heads, value heads [N, kv_heads, head_dim].

        Query and key come together, [N, heads + kv_heads, head_dim]; the query is scaled by 1/sqrt(head_dim) already.
        """
        layer, factors = self._weights.layers[index], self._factors[index]
        normed = self._rms_norm(x, layer.input_norm)
        heads = _linear(normed, layer.qkv).view(len(x), -1, self._head_dim)
        query_key, value = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        query_key = query_key * factors if layer.query_norm is None else self._rms_norm(query_key, factors)
        half = self._head_dim // 2
        turned = torch.cat([query_key[..., half:], query_key[..., :half]], -1)
        return (query_key * cosine).addcmul_(turned, sine), value

    def _finish(self, x: Tensor, attended: Tensor, layer: LayerWeights) -> Tensor:
        """The rest of a layer after attention: output projection, residual, MLP, residual."""
        x = _add_linear(x, attended, layer.output)
        normed = self._rms_norm(x, layer.mlp_norm)
        gate, up = _linear(normed, layer.gate_up).chunk(2, -1)
        return _add_linear(x, F.silu(gate).mul_(up), layer.down)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last axis.

        On the CPU torch composes its own from eight operations; on few rows their overhead is a quarter of a step.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, self._eps) * weight
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(weight)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._rms_norm(x, self._weights.final_norm), self._weights.head)


def _linear(x: Tensor, layer: FusedLinear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _add_linear(x: Tensor, y: Tensor, layer: FusedLinear) -> Tensor:
    """x + W y + b."""
    out = torch.addmm(x, y, layer.weight.t())
    return out if layer.bias is None else out.add_(layer.bias)
