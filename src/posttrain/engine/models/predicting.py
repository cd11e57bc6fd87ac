"""What any model says of a packed batch: one question for language models, critics and reward models."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.batch import CANDIDATES, Need, Predictions, TokenBatch
from posttrain.engine.models.language_model import LanguageModel, ScalarModel, sequence_scores, token_values
from posttrain.engine.models.logprobs import (
    candidate_logprobs,
    likeliest_tokens,
    token_logprobs,
    token_logprobs_and_entropy,
)
from posttrain.engine.wide import TopK

Model = LanguageModel | ScalarModel

_LANGUAGE: frozenset[Need] = frozenset({"logprobs", "entropy", "candidates"})
_SCALAR: frozenset[Need] = frozenset({"values", "scores"})


def predictable(model: Model) -> frozenset[Need]:
    """What `predict` says of a batch."""
    return _LANGUAGE if isinstance(model, LanguageModel) else _SCALAR


def predict(model: Model, batch: TokenBatch, needs: Set[Need], *, temperature: float = 1.0) -> Predictions:
    """What is needed, differentiable, of the batch's response tokens or documents.

    Args:
        temperature: of the distribution that log-probabilities and entropies are of.

    Raises:
        InputError: the model predicts no such thing, a document is longer than its context, the temperature is not
            positive, or `candidates` are needed and the batch has none.
    """
    can = predictable(model)
    if odd := sorted(needs - can):
        name = type(model.module).__name__
        raise InputError(f"{name} predicts {' and '.join(sorted(can))}, asked for {odd[0]}; ask another role")
    if isinstance(model, ScalarModel):
        values: Tensor | None = token_values(model, batch) if "values" in needs else None
        return Predictions(values=values, scores=sequence_scores(model, batch) if "scores" in needs else None)
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
    """The `top` likeliest tokens at every response token: the need `topk`, which a wide column is filled with.

    Args:
        temperature, vocabulary: see `likeliest_tokens`.

    Raises:
        InputError: as `predict`, or `top` is not of this vocabulary.
    """
    if isinstance(model, ScalarModel):
        raise InputError(f"{type(model.module).__name__} predicts values and scores, asked for topk; ask another role")
    return likeliest_tokens(model, batch, top, temperature, vocabulary)
