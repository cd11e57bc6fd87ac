"""Attention over pages of keys and values, one query per row, and over packed prompts: plain torch, varlen on CUDA.

Every page that a row reads is a separate short sequence. The attention over each page is returned with its log-sum-exp,
and the parts of a row are summed with weights computed from these numbers. Any page size works, long rows spread over
the whole device, keys and values are read in place, and `torch.nn.attention.varlen` suffices. (The block tables of
`varlen` need a further library, FlashAttention 3; without this library, torch 2.13 rejects block tables.) Splitting and
merging: Dao et al., "Flash-Decoding for long-context inference", 2023.

On a CPU, prefill is causal attention over prompts that are computed together, in plain torch. Prompts of similar length
are grouped in blocks. A block's tokens and mask are the same in every layer and computed once.

The results of a prompt do not depend, bit for bit, on the other prompts: a row of the batched products has the same
bits for any other rows. Libraries choose the order of a sum by the size of the whole sum. Measurements with torch 2.13
on the CPU in float32 (the test is tests/unit/test_rollout_kernels.py) show that a product of one or two rows uses a
different kernel, and so do the last columns of scores whose width is not a multiple of 4, and that a sum over more than
192 terms is cut into pieces whose size depends on the number of terms. Therefore widths are multiples of 16, sums over
positions are cut every 128, and no piece is narrower than 32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from posttrain.engine.models.backbone import plan_packing

_GATHERED = 2**24  # key elements that the plain path copies at a time
_WIDEST_HEAD = 256
_APART = 0.05  # allowed difference in half precision, for values around 1
_NARROWEST = 32
_STEP = 16
_PIECE = 128
_FEWEST_QUERIES = 16
_SCORES = 2**26  # attention scores in memory at a time


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """The pages that each row reads in one step: a look is a pair of row and page, sorted by row."""

    rows: int
    row: Tensor  # [looks] int64; padding has the value `rows`
    page: Tensor  # [looks] int64
    used: Tensor  # [looks] int32: positions of the page that the row reads, at least 1


@cache
def why_not_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why heads on CUDA cannot use torch's variable-length attention; None if they can, or without CUDA.

    The attention is tried on a few tokens and compared with plain torch: versions of torch accept different inputs.
    """
    if device.type != "cuda":
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's variable-length attention requires half precision, got {dtype}"
    if head_dim % 8 or head_dim > _WIDEST_HEAD:
        return f"torch's variable-length attention requires heads of 8, 16 … {_WIDEST_HEAD} values, got {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's variable-length attention requires compute capability 8.0 or newer"
    try:
        apart = _tried(device, dtype, head_dim)
    except Exception as error:  # versions of torch raise different errors
        return f"torch's variable-length attention failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if apart < _APART else f"torch's variable-length attention differs from plain attention by {apart:.2g}"


def fits_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's variable-length attention accepts these heads, and agrees with plain torch."""
    return device.type == "cuda" and why_not_varlen(device, dtype, head_dim) is None


def _tried(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return the largest difference between varlen and plain torch, for shuffled pages and a partly computed prompt."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 16, 2, head_dim, generator=generator).to(device, dtype)
    query = (torch.randn(2, 4, head_dim, generator=generator) * head_dim**-0.5).to(device, dtype)
    row, page = torch.tensor([0, 0, 1], device=device), torch.tensor([2, 0, 1], device=device)
    looks = Looks(2, row, page, torch.tensor([16, 3, 9], dtype=torch.int32, device=device))
    paged = [attend_pages(query, keys, values, looks, varlen=way).float() for way in (True, False)]
    pairs = torch.stack([keys.flatten(0, 1), values.flatten(0, 1)], 1)[:7]
    prompt = attend_packed_prompts(query, pairs, [2], [5]).float()
    seen = Looks(2, torch.arange(2, device=device), torch.zeros(2, dtype=torch.int64, device=device), row[1:].int() + 6)
    causal = attend_pages(query, pairs[None, :, 0], pairs[None, :, 1], seen, varlen=False).float()
    return max(float((paged[0] - paged[1]).abs().max()), float((prompt - causal).abs().max()))


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, looks: Looks, *, varlen: bool) -> Tensor:
    """Attend over pages: [rows, heads, head_dim], [pages, positions, kv_heads, head_dim] → [rows, heads * head_dim].

    The query is already scaled; query heads of a key-value head are adjacent.
    """
    kv_heads, head_dim = keys.shape[2:]
    asked = query.reshape(len(query), kv_heads, -1, head_dim).index_select(0, looks.row.clamp(max=looks.rows - 1))
    one = _varlen_pages if varlen else plain_pages
    out, weight = one(asked, keys, values, looks)
    return _merged(out, weight, looks).to(query.dtype).view(len(query), -1)


def _merged(out: Tensor, log_weight: Tensor, looks: Looks) -> Tensor:
    """Sum each row's weighted parts, [looks, kv_heads, group, head_dim] → [rows, kv_heads, group, head_dim]."""
    size = (looks.rows + 1, *log_weight.shape[1:])
    index = looks.row[:, None, None].expand_as(log_weight)
    top = log_weight.new_full(size, float("-inf")).scatter_reduce_(0, index, log_weight, "amax")
    weight = (log_weight - top.index_select(0, looks.row)).exp_()
    total = weight.new_zeros(size).index_add_(0, looks.row, weight)
    parts = out.to(weight.dtype) * weight[..., None]
    merged = parts.new_zeros(*size, out.shape[-1]).index_add_(0, looks.row, parts)
    return merged[: looks.rows] / total[: looks.rows, ..., None]


def plain_pages(asked: Tensor, keys: Tensor, values: Tensor, looks: Looks) -> tuple[Tensor, Tensor]:
    """Return each look's attention, [looks, kv_heads, group, head_dim] at least in float32, and its log weight."""
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
    """Compute `plain_pages` in one call; each look is a sequence of `group` queries and `used` keys."""
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


def attend_packed_prompts(query: Tensor, pairs: Tensor, lengths: Sequence[int], begins: Sequence[int]) -> Tensor:
    """Compute causal attention of prompts with torch's variable-length attention, on CUDA.

    Args:
        query: [tokens, heads, head_dim], scaled.
        pairs: [seen, 2, kv_heads, head_dim]: of each prompt, its computed tokens, then those among the queries.
        lengths: tokens of each prompt among the queries.
        begins: tokens of each prompt that are already computed.

    Returns:
        [tokens, heads * head_dim].
    """
    whole = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    ends, seen = (torch.tensor([0, *n], device=query.device).cumsum(0, dtype=torch.int32) for n in (lengths, whole))
    out = varlen_attn(
        query.contiguous(),
        pairs[:, 0],
        pairs[:, 1],
        ends,
        seen,
        max(lengths),
        max(whole),
        scale=1.0,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out.reshape(len(query), -1)


def padded_width(positions: int) -> int:
    """Return the number of positions to attend over for `positions` visible positions; the rest is masked."""
    step = _STEP if positions <= _PIECE else _NARROWEST
    return max(_NARROWEST, -(-positions // step) * step)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Multiply [n, queries, width] by [n, width, head_dim] → [n, queries, head_dim], summed in pieces of fixed size."""
    width = weights.shape[2]
    if width <= _PIECE:
        return torch.bmm(weights, values)
    out = torch.bmm(weights[:, :, :_PIECE], values[:, :_PIECE])
    for begin in range(_PIECE, width, _PIECE):
        end = begin + _PIECE
        out.baddbmm_(weights[:, :, begin:end], values[:, begin:end])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Prompts that attend in one call."""

    length: int  # maximum tokens per prompt
    asked: Tensor  # [prompts, queries] indices of the query tokens
    seen: Tensor  # [prompts * width] indices of the tokens that the prompts attend to
    ahead: Tensor  # [prompts or 1, 1, queries, width] whether a position is after the query's position


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The regrouping of prompts for attention."""

    blocks: tuple[_Block, ...]
    inverse: Tensor | None  # [tokens] index of each token in the concatenated blocks; None: already in place


def longest_chunk(begin: int, most: int, heads: int) -> int:
    """Return how many tokens to compute of a prompt after `begin`, at most `most`, so that the scores fit in memory."""
    return max(_FEWEST_QUERIES, min(most, _SCORES // (heads * (begin + most))))


def plan_prompts(lengths: Sequence[int], begins: Sequence[int], heads: int, device: torch.device) -> PromptPlan:
    """Return the plan for prompts with these numbers of tokens to compute, in blocks whose scores fit in memory.

    Args:
        begins: tokens of each prompt that are already computed; the tokens to compute attend to them too.
    """
    plan, longest = plan_packing(lengths, device), max(begins)
    begun = torch.tensor(begins, device=device) if longest else None
    blocks: list[_Block] = []
    for block in plan.blocks:
        most = max(1, _SCORES // (heads * block.length * (longest + block.length)))
        index = block.index.view(block.rows, block.length)
        blocks += [_block(index[start : start + most], lengths, begun) for start in range(0, block.rows, most)]
    return PromptPlan(tuple(blocks), plan.inverse)


def attend_prompts(query: Tensor, pairs: Tensor, plan: PromptPlan) -> Tensor:
    """Attend: [tokens, heads, head_dim], [seen, 2, kv_heads, head_dim] → [tokens, heads * head_dim], packed order."""
    said = [_attend_block(query, pairs, block) for block in plan.blocks]
    attended = said[0] if len(said) == 1 else torch.cat(said)
    return attended if plan.inverse is None else attended.index_select(0, plan.inverse)


def _block(index: Tensor, lengths: Sequence[int], begun: Tensor | None) -> _Block:
    """Return the block of prompts with these tokens [prompts, length] to compute; `begun`: computed tokens, by prompt.

    None: no prompt has computed tokens.
    """
    length, device = index.shape[1], index.device
    queries = max(_FEWEST_QUERIES, length)
    asked = _repeat_last(index, queries)
    if begun is None:
        width = padded_width(queries)
        places = torch.arange(width, device=device)
        ahead = (places > places[:queries, None])[None, None]
        return _Block(length, asked, _repeat_last(index, width).reshape(-1), ahead)
    sizes = torch.tensor(lengths, device=device)
    prompts = torch.searchsorted(sizes.cumsum(0), index[:, 0].contiguous(), right=True)
    whole = sizes + begun
    starts, last, begin = ((whole.cumsum(0) - whole)[prompts], whole[prompts] - 1, begun[prompts])
    width = padded_width(int(begin.max()) + queries)
    places = torch.arange(width, device=device)
    seen = starts[:, None] + torch.minimum(places, last[:, None])
    ahead = places > begin[:, None, None] + places[:queries, None]
    return _Block(length, asked, seen.reshape(-1), ahead[:, None])


def _attend_block(query: Tensor, pairs: Tensor, block: _Block) -> Tensor:
    (rows, queries), width = block.asked.shape, block.ahead.shape[-1]
    kv_heads, head_dim = pairs.shape[2:]
    states = pairs.index_select(0, block.seen).view(rows, width, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    keys, values = states.reshape(2, -1, width, head_dim)
    q = query[block.asked].view(rows, queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.bmm(q.reshape(len(keys), -1, head_dim), keys.transpose(1, 2))
    scores.view(rows, -1, queries, width).masked_fill_(block.ahead, float("-inf"))
    out = weigh(scores.softmax(-1), values).view(rows, kv_heads, -1, queries, head_dim)
    out = out.permute(0, 3, 1, 2, 4)[:, : block.length]
    return out.reshape(rows * block.length, -1)


def _repeat_last(index: Tensor, width: int) -> Tensor:
    """Return [rows, n] extended to [rows, width]: masked positions repeat a real token, whose values are finite."""
    spare = width - index.shape[1]
    return index if spare <= 0 else torch.cat([index, index[:, -1:].expand(-1, spare)], 1)
