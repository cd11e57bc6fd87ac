"""Attention of one query a row over pages of keys and values, and of packed prompts: plain torch, and varlen on CUDA.

Every page that a row looks at is a short sequence of its own: its attention comes with the logarithm of the sum of its
exponentials, and a row's parts are weighed by those and added. So any page size will do, long rows are spread over the
whole device, keys and values are read where they lie, and `torch.nn.attention.varlen` is all it takes: its own block
tables need another library (FlashAttention 3; torch 2.13 refuses them without).

Splitting and merging: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

_GATHERED = 2**24  # values of keys copied at a time by the plain way
_WIDEST_HEAD = 256
_APART = 0.05  # by which half precision may round otherwise, of values around 1


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """Which rows look at which pages in one step, row by row."""

    rows: int
    row: Tensor  # [looks] int64; `rows` where a look is padding
    page: Tensor  # [looks] int64
    used: Tensor  # [looks] int32: positions of the page that the row sees, at least 1


@cache
def why_not_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why heads on CUDA go without torch's variable-length attention; None: it takes them, or there is no CUDA.

    It is tried on a few tokens and held against plain torch: torch's versions differ in what theirs takes.
    """
    if device.type != "cuda":
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's variable-length attention takes half precision, got {dtype}"
    if head_dim % 8 or head_dim > _WIDEST_HEAD:
        return f"torch's variable-length attention takes heads of 8, 16 … {_WIDEST_HEAD} values, got {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's variable-length attention takes compute capability 8.0 or newer"
    try:
        apart = _tried(device, dtype, head_dim)
    except Exception as error:  # whatever this version of torch raises
        return f"torch's variable-length attention failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if apart < _APART else f"torch's variable-length attention is {apart:.2g} off plain attention"


def fits_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes such heads, and computes with them what plain torch does."""
    return device.type == "cuda" and why_not_varlen(device, dtype, head_dim) is None


def _tried(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """How far both ways are apart over pages in any order, and of a prompt of which a part is known."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 16, 2, head_dim, generator=generator).to(device, dtype)
    query = (torch.randn(2, 4, head_dim, generator=generator) * head_dim**-0.5).to(device, dtype)
    row, page = torch.tensor([0, 0, 1], device=device), torch.tensor([2, 0, 1], device=device)
    looks = Looks(2, row, page, torch.tensor([16, 3, 9], dtype=torch.int32, device=device))
    paged = [attend_pages(query, keys, values, looks, varlen=way).float() for way in (True, False)]
    pairs = torch.stack([keys.flatten(0, 1), values.flatten(0, 1)], 1)[:7]
    prompt = attend_packed_prompts(query, pairs, [2], 5).float()
    seen = Looks(2, torch.arange(2, device=device), torch.zeros(2, dtype=torch.int64, device=device), row[1:].int() + 6)
    causal = attend_pages(query, pairs[None, :, 0], pairs[None, :, 1], seen, varlen=False).float()
    return max(float((paged[0] - paged[1]).abs().max()), float((prompt - causal).abs().max()))


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, looks: Looks, *, varlen: bool) -> Tensor:
    """[rows, heads, head_dim] over pages [pages, positions, kv_heads, head_dim] → [rows, heads * head_dim].

    The query is scaled already; query heads of a key-value head lie side by side.
    """
    kv_heads, head_dim = keys.shape[2:]
    grouped = query.reshape(len(query), kv_heads, -1, head_dim)
    asked = grouped.index_select(0, looks.row.clamp(max=looks.rows - 1))
    one = _varlen_pages if varlen else plain_pages
    out, weight = one(asked, keys, values, looks)
    return _merged(out, weight, looks).to(query.dtype).view(len(query), -1)


def _merged(out: Tensor, log_weight: Tensor, looks: Looks) -> Tensor:
    """The parts of each row, [looks, kv_heads, group, head_dim], weighed → [rows, kv_heads, group, head_dim]."""
    size = (looks.rows + 1, *log_weight.shape[1:])
    index = looks.row[:, None, None].expand_as(log_weight)
    top = log_weight.new_full(size, float("-inf")).scatter_reduce_(0, index, log_weight, "amax")
    weight = (log_weight - top.index_select(0, looks.row)).exp_()
    total = weight.new_zeros(size).index_add_(0, looks.row, weight)
    parts = out.to(weight.dtype) * weight[..., None]
    merged = parts.new_zeros(*size, out.shape[-1]).index_add_(0, looks.row, parts)
    return merged[: looks.rows] / total[: looks.rows, ..., None]


def plain_pages(asked: Tensor, keys: Tensor, values: Tensor, looks: Looks) -> tuple[Tensor, Tensor]:
    """[looks, kv_heads, group, head_dim] → the attention of every look in float32 at least, and its log weight."""
    dtype = torch.promote_types(asked.dtype, torch.float32)
    most = max(1, _GATHERED // keys[0].numel())
    parts = [
        _plain_part(
            asked[begin : begin + most].to(dtype),
            keys.index_select(0, looks.page[begin : begin + most]).to(dtype),
            values.index_select(0, looks.page[begin : begin + most]).to(dtype),
            looks.used[begin : begin + most],
        )
        for begin in range(0, len(asked), most)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([weight for _, weight in parts])


def _plain_part(asked: Tensor, keys: Tensor, values: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    scores = asked @ keys.permute(0, 2, 3, 1)
    unseen = torch.arange(keys.shape[1], device=used.device) >= used[:, None]
    scores.masked_fill_(unseen[:, None, None], float("-inf"))
    weight = scores.logsumexp(-1)
    return (scores - weight[..., None]).exp_() @ values.permute(0, 2, 1, 3), weight


def _varlen_pages(asked: Tensor, keys: Tensor, values: Tensor, looks: Looks) -> tuple[Tensor, Tensor]:
    """`plain_pages` by one call; each look is a sequence of `group` queries and `used` keys."""
    count, kv_heads, group, head_dim = asked.shape
    positions = keys.shape[1]
    begins = torch.arange(count + 1, dtype=torch.int32, device=asked.device) * group
    pages = (torch.cat([looks.page, looks.page[-1:] + 1]) * positions).int()
    found = varlen_attn(
        asked.transpose(1, 2).reshape(count * group, kv_heads, head_dim),
        keys.reshape(-1, kv_heads, head_dim),
        values.reshape(-1, kv_heads, head_dim),
        begins,
        pages,
        group,
        positions,
        scale=1.0,
        seqused_k=looks.used,
        return_aux=AuxRequest(lse=True),
    )
    out, weight = found  # [count * group, kv_heads, head_dim], [kv_heads, count * group]
    return (
        out.view(count, group, kv_heads, head_dim).transpose(1, 2),
        weight.view(kv_heads, count, group).transpose(0, 1),
    )


def attend_packed_prompts(query: Tensor, pairs: Tensor, lengths: Sequence[int], begin: int) -> Tensor:
    """Causal attention of prompts by torch's variable-length attention, on CUDA.

    Args:
        query: [tokens, heads, head_dim], scaled.
        pairs: [begin + tokens, 2, kv_heads, head_dim]; with `begin` there is one prompt, of which so much is known.
        lengths: of each prompt among the queries.

    Returns:
        [tokens, heads * head_dim].
    """
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
    seen = ends.clone()
    seen[1:] += begin
    longest = max(lengths)
    out = varlen_attn(
        query.contiguous(),
        pairs[:, 0],
        pairs[:, 1],
        ends,
        seen,
        longest,
        begin + longest,
        scale=1.0,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out.reshape(len(query), -1)
