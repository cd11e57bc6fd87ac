"""Attention over packed documents, registered with transformers under the name `posttrain_packed`.

The dense layers of a packed model see one row of T tokens. Only attention needs to know where documents end: it gathers
documents of similar length into right-padded blocks [n, L], attends causally (so padding on the right is never seen),
and puts the result back. One block per document would be exact too, but many short documents then drown in calls.

The plan of a batch travels as the keyword argument `packing_plan` of the model's forward: no state outlives the call,
and a recomputation in backward sees the same plan. Without one the function is the padded attention of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.domain.errors import InputError
from posttrain.engine.models.sharding import SequenceGroup

ATTENTION_NAME = "posttrain_packed"
PLAN_ARGUMENT = "packing_plan"
# When to pad rather than to make another call. Measured on models of 0.1 M and 1 M parameters, forward and backward, on
# one core: 200 documents of 15-30 tokens take 1.6-2.4 times as long with a call per document; 128 documents of 16-384
# tokens take 1.3 times as long with a call per document, twice as long in one block. The optimum is flat.
_CALL_COST_TOKENS = 32
_PADDING_SHARE = 1 / 16
_UNSUPPORTED = ("s_aux", "position_bias", "cache")  # attention sinks, learned position bias, paged cache


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Documents attended to together: `index` [n * length] points at packed tokens, row by row."""

    index: Tensor
    rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """How the T tokens of one batch are regrouped for attention."""

    blocks: tuple[Block, ...]
    inverse: Tensor | None  # [T] int64: where each token lies in the concatenated blocks; None: already in place
    total: int = 0  # T
    windows: list[int | None] | None = None  # a capability check collects here what each layer asked for
    sequence: SequenceGroup | None = None  # ranks that each compute a stretch of the tokens


def plan_packing(
    lengths: Sequence[int],
    device: str | torch.device = "cpu",
    *,
    record: bool = False,
    sequence: SequenceGroup | None = None,
) -> PackingPlan:
    """Group documents into blocks.

    Documents are taken from long to short. A block is closed when the padding that the next document would bring
    costs more than a call of its own.

    Args:
        lengths: [documents] tokens per document, in packing order.
        record: keep the attention window that every layer asks for (see `windows`).
        sequence: the ranks that share the tokens.
    """
    windows: list[int | None] | None = [] if record else None
    total = sum(lengths)
    if len(set(lengths)) == 1:
        block = Block(torch.arange(total, device=device), len(lengths), lengths[0])
        return PackingPlan((block,), None, total, windows, sequence)
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    inverse = torch.empty(total, dtype=torch.int64)
    blocks: list[Block] = []
    offset = 0
    for members in _close_blocks(order, lengths):
        length = lengths[members[0]]
        chosen = torch.tensor(members)
        column = torch.arange(length)
        # Padding repeats the last token of its document: any finite value will do, nobody attends to it.
        index = starts[chosen, None] + torch.minimum(column, sizes[chosen, None] - 1)
        valid = column < sizes[chosen, None]
        slots = torch.arange(offset, offset + index.numel()).view_as(index)
        inverse[index[valid]] = slots[valid]
        blocks.append(Block(index.flatten().to(device), len(members), length))
        offset += index.numel()
    return PackingPlan(tuple(blocks), inverse.to(device), total, windows, sequence)


def _close_blocks(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut documents sorted from long to short into blocks."""
    blocks: list[list[int]] = []
    real = padding = 0
    for index in order:
        if blocks:
            padding += lengths[blocks[-1][0]] - lengths[index]
        if not blocks or padding > _CALL_COST_TOKENS + real * _PADDING_SHARE:
            blocks.append([])
            real = padding = 0
        blocks[-1].append(index)
        real += lengths[index]
    return blocks


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing_plan: PackingPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in the form transformers calls it.

    Args:
        query: [1, heads, T, head_dim]; with no plan [batch, heads, queries, head_dim].
        key, value: the same with key-value heads (grouped-query attention).
        attention_mask: ignored with a plan; otherwise what `sdpa_mask` made.
        scaling: factor on the scores; 1/sqrt(head_dim) when None.
        sliding_window: a query sees this many tokens, itself included.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).

    Returns:
        [1, T, heads, head_dim] and None (no attention weights).

    Raises:
        InputError: attention sinks, a position bias or a paged cache, which this function does not compute.
    """
    if packing_plan is None:
        return _padded_attention(module, query, key, value, attention_mask, scaling, dropout, softcap, arguments)
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if unsupported or not (arguments.get("is_causal", True) and getattr(module, "is_causal", True)):
        raise InputError(
            f"packed attention must be plain and causal, got {unsupported or 'bidirectional attention'}; pad this model"
        )
    if packing_plan.windows is not None:
        packing_plan.windows.append(sliding_window)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    sequence, total = packing_plan.sequence, packing_plan.total
    if sequence is not None:
        query = sequence.to_heads(query)[:total]
        key, value = (sequence.to_heads(sequence.shared_heads(states))[:total] for states in (key, value))
    out = attend_packed(
        query, key, value, packing_plan, scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap
    )
    if sequence is not None:
        out = sequence.to_tokens(F.pad(out, (0, 0, 0, 0, 0, -total % sequence.size)))
    return out[None], None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: PackingPlan,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention inside each document: [T, heads, head_dim] and key-value heads → [T, heads, head_dim]."""
    parts: list[Tensor] = []
    for block in plan.blocks:
        states = [s if plan.inverse is None else s.index_select(0, block.index) for s in (query, key, value)]
        q, k, v = (s.reshape(block.rows, block.length, *s.shape[1:]).transpose(1, 2) for s in states)
        out = _causal_attention(q, k, v, scaling, dropout, window, softcap)
        parts.append(out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3]))
    return parts[0] if plan.inverse is None else torch.cat(parts).index_select(0, plan.inverse)


def _causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[n, heads, L, head_dim]: every row attends to its own past."""
    length = query.shape[2]
    windowed = window is not None and window < length
    if not windowed and softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if windowed and window is not None:
        mask = mask.triu(1 - window)
    return _masked_attention(query, key, value, mask, scaling, dropout, softcap)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Attention under an explicit mask (bool, or additive), soft-capped when asked."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    if mask is not None:
        # Finite, so that a padding row that may attend to nothing gets a meaningless value and not NaN.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), p=dropout)
    return weights @ value


def _padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What transformers computes for a padded batch, and soft-capping, which its SDPA path refuses."""
    if softcap is None:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **arguments
        )
        return output
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries > 1:
        # sdpa_mask leaves a plain causal mask to the kernel.
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = _masked_attention(query, key, value, mask, scaling, dropout, softcap)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)


def planned_arguments(plan: PackingPlan, device: torch.device) -> dict[str, Any]:
    """Keyword arguments for a model's forward over a packed row.

    The 4-D mask is a placeholder: transformers takes one as final and builds no [T, T] mask that nobody would read.
    """
    return {PLAN_ARGUMENT: plan, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)}


register()
