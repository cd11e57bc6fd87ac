"""Log-probabilities of the tokens of a packed batch, and the predictions of any model on the batch.

Log-probabilities are those under the policy at a sampling temperature. Language models, critics and reward models share
one interface for predictions.
"""

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.batch import CANDIDATES, Need, Predictions, TokenBatch
from posttrain.engine.models.language_model import (
    HALF,
    LanguageModel,
    OutputHead,
    ScalarModel,
    float32_logits,
    sequence_scores,
    token_values,
)
from posttrain.engine.wide import TopK

# More logits than this (128 MiB in float32) are computed in chunks, and again in the backward pass: this takes 0.3 of
# the memory with a vocabulary of 32 k, and 0.2 with 150 k. For fewer logits the plain path is faster. A head in half
# precision always uses chunks, because the plain path to float32 logits would keep a float32 copy of the head.
CHUNKED_ABOVE = 2**25
# A chunk's temporaries may take as many bytes as the weight's gradient in float32, which exists anyway, within these
# bounds. Every chunk reads and writes the whole gradient, so few chunks are fast.
CHUNK_BYTES = (2**27, 2**31)
_BYTES_PER_LOGIT = 16  # logits, scaled logits, probabilities and their gradient in float32
Model = LanguageModel | ScalarModel
_LANGUAGE: frozenset[Need] = frozenset({"logprobs", "entropy", "candidates"})
_SCALAR: frozenset[Need] = frozenset({"values", "scores"})


def token_logprobs(
    model: LanguageModel, batch: TokenBatch, *, temperature: float = 1.0, response_only: bool = False
) -> Tensor:
    """Return log p(token t | the earlier tokens of its document), differentiable.

    An empty batch also runs through the model, because every rank must take part in gathering weights and reducing
    gradients.

    Args:
        temperature: divides the logits, as in sampling; used if the batch has no column `temperature`.
        response_only: compute the response tokens only; other tokens get 0.

    Returns:
        [T] float32; 0 at each document's first token, which has no prediction.

    Raises:
        InputError: a document is longer than the model's context; a temperature is not positive.
    """
    return _compute(model, batch, temperature, response_only, entropy=False)[0]


def token_logprobs_and_entropy(
    model: LanguageModel, batch: TokenBatch, *, temperature: float = 1.0, response_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and the entropy in nats of each token's distribution; both differentiable.

    Returns:
        ([T], [T]) float32, 0 at each document's first token.

    Raises:
        InputError: see `token_logprobs`.
    """
    return _compute(model, batch, temperature, response_only, entropy=True)[:2]


def candidate_logprobs(
    model: LanguageModel, batch: TokenBatch, candidates: Tensor, temperature: float = 1.0, *, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of given tokens at every response token, and of the response tokens; differentiable.

    Args:
        candidates: [R, k], tokens at each of the R response tokens.

    Returns:
        ([T], [T], [R, k]) float32: `token_logprobs` of the response; the entropies, 0 if not requested; the
        candidates' log-probabilities.

    Raises:
        InputError: see `token_logprobs`.
    """
    return _compute(model, batch, temperature, response_only=True, entropy=entropy, candidates=candidates)


@torch.no_grad()
def likeliest_tokens(
    model: LanguageModel, batch: TokenBatch, top: int, temperature: float = 1.0, vocabulary: int | None = None
) -> TopK:
    """Return the `top` likeliest tokens at every response token, likeliest first, with their log-probabilities.

    Logits are computed in chunks, unless the model's output head is not a plain matrix.

    Args:
        vocabulary: number of tokens to consider, for a smaller model whose vocabulary does not have the later tokens.
            The probability of the later tokens is not assigned to any other token.

    Returns:
        [R, top], one row for each of the R response tokens.

    Raises:
        InputError: see `token_logprobs`; `top` is larger than the vocabulary.
    """
    most = min(model.vocab_size, vocabulary or model.vocab_size)
    if not 1 <= top <= most:
        raise InputError(f"top_k must be from 1 to {most}, the size of the vocabulary, got {top}; change top_k")
    _check(model, batch, temperature)
    index, head = batch.response_mask.nonzero()[:, 0], model.head
    if head is None:
        whole = model.logits(batch.tokens, batch.positions, batch.lengths, index - 1)
        rows = chunk_rows(model.vocab_size, 1)
    else:
        whole = model.hidden_states(batch.tokens, batch.positions, batch.lengths)[index - 1]
        rows = chunk_rows(*head.layer.weight.shape)
    ids, logprobs = [], []
    warmths = _warmths(batch, index, temperature)
    for start in range(0, len(whole), rows) or (0,):
        part = whole[start : start + rows]
        logits = _precise(part if head is None else head.logits(part))
        logits = _divided(logits, _at(warmths, slice(start, start + rows)))
        values, places = logits[:, :most].topk(top)
        ids.append(places.to(torch.int32))
        logprobs.append(values - logits.logsumexp(-1, keepdim=True))
    return TopK(torch.cat(ids), torch.cat(logprobs))


def _check(model: LanguageModel, batch: TokenBatch, temperature: float) -> None:
    if not temperature > 0:
        raise InputError(f"temperature must be > 0, got {temperature}; for greedy policies score at temperature 1")
    model.check_length(max(batch.lengths))


def _compute(
    model: LanguageModel,
    batch: TokenBatch,
    temperature: float,
    response_only: bool,
    *,
    entropy: bool,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [T] log-probabilities, [T] entropies and [R, k] log-probabilities of the candidates (k may be 0)."""
    _check(model, batch, temperature)
    index = (batch.response_mask if response_only else batch.positions > 0).nonzero()[:, 0]
    given = index[:, None][:, :0] if candidates is None else candidates.to(torch.int64)
    rows, places = len(index), torch.arange(len(index), device=batch.device)
    if model.sequence is not None:
        places = places[model.sequence.owns(index - 1, len(batch.tokens))]
        index, given = index[places], given[places]
    targets = torch.cat([batch.tokens[index][:, None], given], 1)
    warmths = _warmths(batch, index, temperature)
    packed = batch.tokens, batch.positions, batch.lengths
    if (head := model.head) is None:
        logprobs, entropies = logprobs_of(model.logits(*packed, index - 1), targets, warmths, entropy=entropy)
    else:
        hidden = model.hidden_states(*packed)[index - 1]
        if hidden.dtype in HALF or len(index) * model.vocab_size > CHUNKED_ABOVE:
            logprobs, entropies = chunked_logprobs(head, hidden, targets, warmths, entropy=entropy)
        else:
            logprobs, entropies = logprobs_of(head.logits(hidden), targets, warmths, entropy=entropy)
    zeros = logprobs.new_zeros(len(batch.tokens))
    spread = zeros.index_copy(0, index, logprobs[:, 0])
    spread_entropies = zeros.index_copy(0, index, entropies) if entropy else zeros
    at = logprobs.new_zeros(rows, given.shape[1]).index_copy(0, places, logprobs[:, 1:])
    if model.sequence is None:
        return spread, spread_entropies, at
    total = model.sequence.sum
    return total(spread), total(spread_entropies) if entropy else zeros, at if candidates is None else total(at)


def _warmths(batch: TokenBatch, index: Tensor, temperature: float) -> float | Tensor:
    """Return the temperatures of the tokens at `index`: one number, or [N, 1] if documents differ.

    Raises:
        InputError: a document's temperature is not positive.
    """
    if "temperature" not in batch.document_columns or not len(index):
        return temperature
    rows = batch.column("temperature")[batch.document_index[index]]
    least, most = torch.stack(rows.aminmax()).tolist()
    if not 0 < least < float("inf"):
        raise InputError(
            f"the temperature of a document must be > 0, got {least}; pass the temperature at which it was sampled"
        )
    return least if least == most else rows[:, None]


def logprobs_of(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [N, K] of the tokens [N, K], and the entropies [N], from the logits [N, V].

    The results are in float32, and their gradients are those of plain autograd.

    Args:
        temperature: one number for all rows, or [N, 1].
    """
    scaled = _divided(_precise(logits), temperature)
    if not entropy and targets.shape[1] == 1:
        logprobs = -F.cross_entropy(scaled, targets[:, 0], reduction="none")
        return logprobs[:, None], torch.zeros_like(logprobs)
    distribution = scaled.log_softmax(-1)
    logprobs = distribution.gather(1, targets)
    if not entropy:
        return logprobs, logprobs.new_zeros(len(logprobs))
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def _precise(logits: Tensor) -> Tensor:
    """Return the logits in float32; float64 is unchanged."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _at(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def _divided(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits / temperature.to(logits.dtype)
    return logits if temperature == 1.0 else logits / temperature


def chunked_logprobs(
    head: OutputHead,
    hidden: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    *,
    entropy: bool,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `logprobs_of` for the head's logits, in chunks of rows: [N, hidden], [N, K] tokens → [N, K], [N].

    Args:
        chunk: rows per chunk; by default `chunk_rows`.

    The weight's gradient is summed over chunks in float32 and rounded once, at the end.
    """
    weight, bias = head.layer.weight, head.layer.bias
    low, up = head.low(hidden) or (None, None)
    rows = chunk or chunk_rows(*weight.shape)
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(
        hidden, weight, bias, low, up, targets, temperature, head.softcap, rows, entropy
    )  # type: ignore[no-untyped-call]
    return result


def chunk_rows(vocabulary: int, hidden: int) -> int:
    """Return the number of rows of a chunk, from the bytes that a chunk may take."""
    least, most = CHUNK_BYTES
    return max(1, min(max(4 * vocabulary * hidden, least), most) // (_BYTES_PER_LOGIT * vocabulary))


class _ChunkedLogprobs(torch.autograd.Function):
    """The gradient of chunked log-probabilities. With z the scaled logits, p their softmax and H its entropy:

    d log p_y / dz = onehot(y) - p,   dH / dz = -p (log p + H).

    A row may have several y, [N, K]; their gradients add up. With an adapter of the head, z has the further summand
    `low` upᵀ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(targets.shape, dtype=precise, device=hidden.device)
        normalisers, entropies = (logprobs.new_zeros(len(hidden)) for _ in range(2))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            added = None if low is None or up is None else (low[part], up)
            scaled, _ = _scaled_logits(hidden[part], weight, bias, added, _at(temperature, part), softcap)
            normalisers[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(1, targets[part]) - normalisers[part, None]
            if entropy:
                entropies[part] = normalisers[part] - ((scaled - normalisers[part, None]).exp_() * scaled).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, normalisers, entropies)
        ctx.settings = (temperature, softcap, rows, entropy)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, low, up, targets, normalisers, entropies = ctx.saved_tensors
        temperature, softcap, rows, entropy = ctx.settings
        of_logprobs, of_entropies = gradients
        precise = normalisers.dtype
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=precise) if ctx.needs_input_grad[1] else None  # not of a frozen head
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        d_low = None if low is None else torch.empty_like(low)
        d_up = None if up is None else torch.zeros_like(up, dtype=precise)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            added = None if low is None else (low[part], up)
            scaled, slope = _scaled_logits(hidden[part], weight, bias, added, _at(temperature, part), softcap)
            logp = scaled.sub_(normalisers[part, None])
            probabilities = logp.exp()
            d_scaled = probabilities * -of_logprobs[part].sum(1, keepdim=True)
            d_scaled.scatter_add_(1, targets[part], of_logprobs[part])
            if entropy:
                d_scaled -= probabilities.mul_(logp.add_(entropies[part, None])).mul_(of_entropies[part, None])
            d_logits = d_scaled.mul_(slope).to(hidden.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                _add_product(d_weight, d_logits, hidden[part])
            if d_low is not None and d_up is not None:
                d_low[part] = d_logits @ up
                _add_product(d_up, d_logits, low[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=precise)
        of_weight, of_bias, of_up = (None if one is None else one.to(weight.dtype) for one in (d_weight, d_bias, d_up))
        return d_hidden, of_weight, of_bias, d_low, of_up, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right to total in float32 (float64 for float64), whatever the dtype of the factors."""
    if total.is_cuda and left.dtype.itemsize < 4 and hasattr(torch.ops.aten.mm, "dtype"):
        total += torch.mm(left.t(), right, out_dtype=torch.float32)  # on tensor cores
    else:
        total.addmm_(_precise(left).t(), _precise(right))


def _scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: tuple[Tensor, Tensor] | None,
    temperature: float | Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor | float]:
    """Return soft-capped logits divided by the temperature, in float32, and their derivative in the raw logits.

    Args:
        added: two factors whose product is added to the logits: [N, rank] and [vocabulary, rank].
    """
    logits = float32_logits(hidden, weight, bias)
    if added is not None:
        logits += float32_logits(*added)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)
    if softcap is None:
        return logits / temperature, 1.0 / temperature
    squashed = torch.tanh(logits / softcap)
    return squashed * (softcap / temperature), (1 - squashed.square()) / temperature


def predictable(model: Model) -> frozenset[Need]:
    """Return the predictions that `predict` supports for a model."""
    return _LANGUAGE if isinstance(model, LanguageModel) else _SCALAR


def predict(model: Model, batch: TokenBatch, needs: Set[Need], *, temperature: float = 1.0) -> Predictions:
    """Return the needed predictions for the batch's response tokens or documents, differentiable.

    Args:
        temperature: for log-probabilities and entropies.

    Raises:
        InputError: the model does not predict a need; a document is longer than the model's context; the temperature is
            not positive; `candidates` are needed but the batch has no column `candidates`.
    """
    can = predictable(model)
    if odd := sorted(needs - can):
        name = type(model.module).__name__
        raise InputError(f"{name} predicts {' and '.join(sorted(can))}, got {odd[0]}; request it from another role")
    if isinstance(model, ScalarModel):
        return Predictions(
            values=token_values(model, batch) if "values" in needs else None,
            scores=sequence_scores(model, batch) if "scores" in needs else None,
        )
    if "candidates" in needs:
        ids, entropy = batch.wide(CANDIDATES).ids, "entropy" in needs
        logprobs, entropies, at = candidate_logprobs(model, batch, ids, temperature, entropy=entropy)
        return Predictions(logprobs, entropies if entropy else None, candidates=at)
    if "entropy" not in needs:
        return Predictions(logprobs=token_logprobs(model, batch, temperature=temperature, response_only=True))
    return Predictions(*token_logprobs_and_entropy(model, batch, temperature=temperature, response_only=True))


def predict_topk(
    model: Model, batch: TokenBatch, top: int, *, temperature: float = 1.0, vocabulary: int | None = None
) -> TopK:
    """Return the `top` likeliest tokens at every response token: the need `topk`, which fills a wide column.

    Args:
        temperature, vocabulary: see `likeliest_tokens`.

    Raises:
        InputError: see `predict`; `top` is larger than the vocabulary.
    """
    if isinstance(model, ScalarModel):
        raise InputError(
            f"{type(model.module).__name__} predicts values and scores, got topk; request it from another role"
        )
    return likeliest_tokens(model, batch, top, temperature, vocabulary)
