"""The transformer below every head, run over packed documents, with its attention and its costs.

The backbone is the same for every head. Packing is a capability: it is tried on small inputs, compared with the
documents one by one, and used only if the results agree. A module that fails keeps its original attention, and its
batches are padded directly before the module's forward.

The cost model estimates the computation and the memory that a document requires; batches are split by cost or by
memory.

Attention over packed documents is registered with transformers under the name `posttrain_packed`. The dense layers of a
packed model see one row of T tokens. Only attention depends on document boundaries: it gathers documents of similar
length into right-padded blocks [n, L], attends causally (so padding on the right is never seen), and scatters the
result back. One block per document would also be exact, but many short documents would need too many calls.

The plan of a batch is passed as the keyword argument `packing_plan` of the model's forward: no state outlives the call,
and a recomputation in the backward pass uses the same plan. Without a plan, the function computes transformers' padded
attention.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.domain.errors import InputError
from posttrain.domain.rendering import experts_of
from posttrain.engine.models.sharding import SequenceGroup
from posttrain.pacing.balance import TOKENS, CostModel

ATTENTION_NAME = "posttrain_packed"
PLAN_ARGUMENT = "packing_plan"
# Trade-off between padding and additional calls. Measured on models of 0.1 M and 1 M parameters, forward and backward,
# on one core: 200 documents of 15-30 tokens take 1.6-2.4 times as long with a call per document; 128 documents of
# 16-384 tokens take 1.3 times as long with a call per document, twice as long in one block. The optimum is flat.
_CALL_COST_TOKENS = 32
_PADDING_SHARE = 1 / 16
_UNSUPPORTED = ("s_aux", "position_bias", "cache")  # attention sinks, learned position bias, paged cache
Packing = Literal["packed", "padded"]
Forward = Callable[..., Tensor]  # keyword arguments of a transformers model → [rows, tokens, features]
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest value; coarser dtypes get the default
_COARSE_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Documents that attend in one call: `index` [n * length] has the indices of their packed tokens, row by row."""

    index: Tensor
    rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """The regrouping of a batch's T tokens for attention."""

    blocks: tuple[Block, ...]
    inverse: Tensor | None  # [T] int64: index of each token in the concatenated blocks; None: already in place
    total: int = 0  # T
    windows: list[int | None] | None = None  # a capability check collects the window of each layer here
    sequence: SequenceGroup | None = None  # ranks that each compute a range of the tokens


def plan_packing(
    lengths: Sequence[int],
    device: str | torch.device = "cpu",
    *,
    record: bool = False,
    sequence: SequenceGroup | None = None,
) -> PackingPlan:
    """Group documents into blocks.

    Documents are sorted from long to short. A block ends where the padding of the next document would cost more than a
    separate call.

    Args:
        lengths: [documents] tokens per document, in packing order.
        record: whether to record the attention window that every layer requests (see `windows`).
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
        # Padding repeats the document's last token. Any finite value works, because no token attends to padding.
        index = starts[chosen, None] + torch.minimum(column, sizes[chosen, None] - 1)
        valid = column < sizes[chosen, None]
        inverse[index[valid]] = torch.arange(offset, offset + index.numel()).view_as(index)[valid]
        blocks.append(Block(index.flatten().to(device), len(members), length))
        offset += index.numel()
    return PackingPlan(tuple(blocks), inverse.to(device), total, windows, sequence)


def _close_blocks(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Split documents sorted from long to short into blocks."""
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
    """Compute attention with the signature that transformers calls.

    Args:
        query: [1, heads, T, head_dim]; without a plan [batch, heads, queries, head_dim].
        key, value: like `query`, with key-value heads (grouped-query attention).
        attention_mask: ignored with a plan; otherwise the result of `sdpa_mask`.
        scaling: factor on the scores; None: 1/sqrt(head_dim).
        sliding_window: number of tokens to which a query attends, including its own token.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).

    Returns:
        [1, T, heads, head_dim] and None (no attention weights).

    Raises:
        InputError: the model uses attention sinks, a position bias or a paged cache, which this function does not
            compute.
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
    """Attend causally inside each document: [T, heads, head_dim] and key-value heads → [T, heads, head_dim]."""
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
    """Compute causal attention within each row: [n, heads, L, head_dim]."""
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
    """Compute attention with an explicit mask (bool, or additive), optionally soft-capped."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    if mask is not None:
        # Finite, because -inf would give NaN in a padding row that may attend to no token.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), p=dropout) @ value


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
    """Compute transformers' attention of a padded batch, with soft-capping, which transformers' SDPA path rejects."""
    if softcap is None:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **arguments
        )
        return output
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries > 1:
        # sdpa_mask leaves a plain causal mask to the kernel.
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return _masked_attention(query, key, value, mask, scaling, dropout, softcap).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register `packed_attention` with transformers; a second call changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)


def planned_arguments(plan: PackingPlan, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments for a model's forward over a packed row.

    The 4-D mask is a placeholder: transformers uses a 4-D mask as given, and so does not build an unused [T, T] mask.
    """
    return {PLAN_ARGUMENT: plan, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)}


register()


@dataclass(frozen=True, slots=True, eq=False)
class Backbone:
    """A module with its detected capabilities; the base model returns the hidden states.

    The caller may train the module: its weights are not copied.
    """

    module: PreTrainedModel
    packing: Packing
    sequence: SequenceGroup | None = field(default=None, kw_only=True)  # ranks that share the tokens of one batch

    @property
    def config(self) -> Any:
        """The text part of the module's configuration."""
        return self.module.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = next(self.module.parameters()).dtype
        return dtype

    @property
    def context_length(self) -> int:
        """The maximum number of tokens in a prompt with its response."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else 2**31

    def fallbacks(self) -> dict[str, str]:
        """Return the slower paths that this model uses, by name (`planner.sizes`), each with the reason."""
        if self.packing == "packed":
            return {}
        return {"padding": f"{type(self.module).__name__} does not pack: every batch is padded to its longest document"}

    def check_length(self, tokens: int) -> None:
        """Raise for a document that does not fit in the context.

        Raises:
            InputError: the document has more tokens than `context_length`.
        """
        if tokens > self.context_length:
            raise InputError(
                f"a document must fit in the model's context of {self.context_length} tokens, got {tokens}; shorten "
                "the document"
            )

    def hidden_states(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the last hidden state of every token: [T] packed → [T, hidden]."""
        return self.run(last_hidden_states(self.module), tokens, positions, lengths)

    def run(self, forward: Forward, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run `forward`, a pass through the module or a part of it, over packed tokens: [T] → [T, features].

        Under sequence parallelism only this rank's range is computed; the rest is zeros.
        """
        if self.sequence is not None:
            return self._run_stretch(self.sequence, forward, tokens, positions, lengths)
        if self.packing == "packed":
            arguments = planned_arguments(plan_packing(lengths, tokens.device), tokens.device)
            return forward(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **arguments)[0]
        row = torch.arange(len(lengths), device=tokens.device).repeat_interleave(
            torch.tensor(lengths, device=tokens.device)
        )
        shape = (len(lengths), max(lengths))
        ids, mask = tokens.new_zeros(shape), tokens.new_zeros(shape)
        ids[row, positions], mask[row, positions] = tokens, 1
        return forward(input_ids=ids, attention_mask=mask, use_cache=False)[row, positions]

    def _run_stretch(
        self, sequence: SequenceGroup, forward: Forward, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        if self.packing != "packed":
            raise InputError(
                f"sequence_parallel needs a model that packs, got {type(self.module).__name__}; set it to 1"
            )
        arguments = planned_arguments(plan_packing(lengths, tokens.device, sequence=sequence), tokens.device)
        ids, places = sequence.slice(tokens), sequence.slice(positions)
        out = forward(input_ids=ids[None], position_ids=places[None], use_cache=False, **arguments)[0]
        return sequence.spread(out, len(tokens))


def last_hidden_states(module: PreTrainedModel) -> Forward:
    """Return the forward pass through the base model only."""
    base = module.base_model

    def forward(**inputs: Any) -> Tensor:
        hidden: Tensor = base(**inputs).last_hidden_state
        return hidden

    return forward


def choose_packing(module: PreTrainedModel, forward: Forward) -> Packing:
    """Switch a module to packed attention if the module computes correctly with it.

    The computation is correct if a packed row has the same results as the separate documents, the first document does
    not change the second, and every sliding-window layer requests its window.

    Args:
        module: a module in evaluation mode; if packing is incorrect, the module's attention stays unchanged.
        forward: the pass whose results are compared.
    """
    own = module.config._attn_implementation
    if _switch_attention(module, ATTENTION_NAME):
        if _packs(module, forward):
            return "packed"
        _switch_attention(module, own)
    return "padded"


def probe_documents(module: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return documents of 9 and 6 tokens, and a third of 9 tokens that differs from the first at every position."""
    size = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    step = max(1, math.isqrt(size))
    first = torch.arange(9, device=device) * step % size
    return first, (torch.arange(6, device=device) * step + 1) % size, (first + 1) % size


def agree(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of their dtype."""
    tolerance = _TOLERANCE.get(left.dtype, _COARSE_TOLERANCE)
    scale = float(right.abs().max())
    return bool(((left - right).abs().max() <= tolerance * max(scale, 1e-12)).item())


def _switch_attention(module: PreTrainedModel, name: str) -> bool:
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError, AttributeError):
        return False
    return bool(module.config._attn_implementation == name)


@torch.no_grad()
def _packs(module: PreTrainedModel, forward: Forward) -> bool:
    config = module.config.get_text_config()
    if not set(getattr(config, "layer_types", None) or ()) <= _PLAIN_LAYERS:
        return False
    first, second, other = probe_documents(module)
    try:
        row, windows = _packed_row(forward, [first, second])
        changed, _ = _packed_row(forward, [other, second])
    except (TypeError, RuntimeError, ValueError, InputError, AttributeError):
        return False
    single = Backbone(module, "padded")
    alone = [single.run(forward, d, torch.arange(len(d), device=d.device), [len(d)]) for d in (first, second)]
    split = len(first)
    exact = agree(row, torch.cat(alone))
    sealed = agree(row[split:], changed[split:]) and not agree(row[:split], changed[:split])
    return exact and sealed and _windows_honoured(config, windows)


def _packed_row(forward: Forward, documents: Sequence[Tensor]) -> tuple[Tensor, list[int | None]]:
    plan = plan_packing([len(d) for d in documents], documents[0].device, record=True)
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in documents])
    arguments = planned_arguments(plan, positions.device)
    values = forward(
        input_ids=torch.cat(list(documents))[None], position_ids=positions[None], use_cache=False, **arguments
    )
    return values[0], plan.windows or []


def _windows_honoured(config: Any, asked: list[int | None]) -> bool:
    """Return whether the number of layers that requested the window is the configuration's number of sliding layers."""
    window = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or (["sliding_attention" if window else "full_attention"] * layers)
    return asked == [window if kind == "sliding_attention" else None for kind in kinds]


def cost_model(module: nn.Module, parameters: int | None = None) -> CostModel:
    """Return a cost model: the cost of dense layers grows with tokens, the cost of attention with Σ length².

    If the sizes of the model are unknown, only tokens count.

    Args:
        module: a model of the library transformers.
        parameters: number of parameters that compute a token; None: they are counted, which must happen before
            sharding. Of a mixture's experts, those count that one token uses.
    """
    text = _text_config(module)
    layers, heads, width = _attention(text)
    if not (layers and heads and width):
        return TOKENS
    if parameters is None:
        experts, chosen = experts_of(vars(text))
        routed = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        parameters = sum(p.numel() for p in module.parameters()) - routed * (experts - chosen) // max(1, experts)
    return CostModel.of_model(parameters=parameters, layers=layers, attention_width=heads * width)


def key_value_bytes(module: nn.Module) -> int | None:
    """Return the bytes of one token's keys and values in all layers, in the module's dtype; None: sizes are unknown."""
    text = _text_config(module)
    layers, heads, width = _attention(text)
    if not (layers and heads and width):
        return None
    kept = int(getattr(text, "num_key_value_heads", None) or heads)
    return 2 * layers * kept * width * next(module.parameters()).element_size()


def _text_config(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _attention(text: Any) -> tuple[int, int, int]:
    """Return the number of layers, of heads, and the width of a head; 0 for unknown values."""
    layers, heads = (int(getattr(text, name, None) or 0) for name in ("num_hidden_layers", "num_attention_heads"))
    width = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // heads if heads else 0)
    return layers, heads, int(width)
