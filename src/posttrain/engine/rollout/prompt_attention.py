"""Causal attention of prompts that are computed together, in plain torch: what a CPU prefills with.

Prompts of similar length lie side by side in blocks. What a block reads, and what it may see, is the same in every
layer and found once. The bits of a prompt do not depend on its company (see `row_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.engine.models.attention import plan_packing
from posttrain.engine.rollout.row_products import padded_width, weigh

_FEWEST_QUERIES = 16
_SCORES = 2**26  # attention scores held at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Prompts that are attended to together."""

    length: int  # tokens of each, at most
    asked: Tensor  # [prompts, queries] tokens that ask
    seen: Tensor  # [prompts * width] tokens that they see
    ahead: Tensor  # [queries, width] what lies behind a query's own position


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """How prompts are regrouped for attention."""

    blocks: tuple[_Block, ...]
    inverse: Tensor | None  # [tokens] where each lies in the concatenated blocks; None: already in place


def longest_chunk(begin: int, most: int, heads: int) -> int:
    """Tokens of a prompt to compute after `begin` of them, `most` at the most, so that their scores fit."""
    return max(_FEWEST_QUERIES, min(most, _SCORES // (heads * (begin + most))))


def plan_prompts(lengths: Sequence[int], begin: int, heads: int, device: torch.device) -> PromptPlan:
    """Prompts of these lengths, few enough at a time that their scores fit.

    Args:
        begin: tokens of the one prompt that were computed before; 0 where there are several.
    """
    plan = plan_packing(lengths, device)
    blocks: list[_Block] = []
    for block in plan.blocks:
        most = max(1, _SCORES // (heads * block.length**2))
        index = block.index.view(block.rows, block.length)
        blocks += [_block(index[start : start + most], begin) for start in range(0, block.rows, most)]
    return PromptPlan(tuple(blocks), plan.inverse)


def attend_prompts(query: Tensor, pairs: Tensor, plan: PromptPlan) -> Tensor:
    """[tokens, heads, head_dim] and [seen, 2, kv_heads, head_dim] → [tokens, heads * head_dim], as they were packed."""
    said = [_attend_block(query, pairs, block) for block in plan.blocks]
    attended = said[0] if len(said) == 1 else torch.cat(said)
    return attended if plan.inverse is None else attended.index_select(0, plan.inverse)


def _block(index: Tensor, begin: int) -> _Block:
    """Of the tokens [prompts, length] of prompts."""
    length = index.shape[1]
    queries = max(_FEWEST_QUERIES, length)
    width = padded_width(begin + queries)
    seen = torch.arange(begin + length, device=index.device)[None] if begin else index
    places = torch.arange(width, device=index.device)
    ahead = places > places[begin : begin + queries, None]
    return _Block(length, _repeat_last(index, queries), _repeat_last(seen, width).reshape(-1), ahead)


def _attend_block(query: Tensor, pairs: Tensor, block: _Block) -> Tensor:
    (rows, queries), width = block.asked.shape, block.ahead.shape[1]
    kv_heads, head_dim = pairs.shape[2:]
    states = pairs.index_select(0, block.seen).view(rows, width, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    keys, values = states.reshape(2, -1, width, head_dim)
    q = query[block.asked].view(rows, queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.bmm(q.reshape(len(keys), -1, head_dim), keys.transpose(1, 2))
    scores.view(len(keys), -1, queries, width).masked_fill_(block.ahead, float("-inf"))
    out = weigh(scores.softmax(-1), values).view(rows, kv_heads, -1, queries, head_dim)
    out = out.permute(0, 3, 1, 2, 4)[:, : block.length]
    return out.reshape(rows * block.length, -1)


def _repeat_last(index: Tensor, width: int) -> Tensor:
    """[rows, n] → [rows, width]: what nobody looks at is some real token, so that it is finite."""
    spare = width - index.shape[1]
    return index if spare <= 0 else torch.cat([index, index[:, -1:].expand(-1, spare)], 1)
