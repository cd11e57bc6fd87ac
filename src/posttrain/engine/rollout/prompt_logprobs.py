"""Log-probabilities of given texts, computed with the forward pass over packed documents that training uses."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.port import NotFiniteError, PromptLogprobs
from posttrain.engine.samples import Floats, Ints

_TOGETHER = 8192  # tokens of texts computed together
_LOGITS = 2**26  # logits in memory at a time


@torch.inference_mode()
def prompt_logprobs(model: LanguageModel, texts: Sequence[Sequence[int]], top: int) -> list[PromptLogprobs]:
    """Return the log-probabilities of texts; see `RolloutEngine.score`, also for its errors."""
    for place, text in enumerate(texts):
        if not 1 <= len(text) <= model.context_length:
            raise InputError(
                f"text {place} must have 1..{model.context_length} tokens to be scored, got {len(text)}; shorten or "
                "drop it"
            )
        if not 0 <= min(text) <= max(text) < model.vocab_size:
            raise InputError(
                f"text {place} must have tokens in 0..{model.vocab_size - 1}, got {min(text)}..{max(text)}"
            )
    if not 0 <= top <= model.vocab_size:
        raise InputError(f"top must be in 0..{model.vocab_size}, the vocabulary, got {top}")
    training, most = model.module.training, _TOGETHER if model.head else max(1, _LOGITS // model.vocab_size)
    model.module.eval()
    try:
        return [found for some in _packs(texts, most) for found in _scored(model, some, top)]
    finally:
        model.module.train(training)


def _packs(texts: Sequence[Sequence[int]], most: int) -> Iterator[list[Sequence[int]]]:
    """Yield runs of texts with at most `most` tokens, but at least one text."""
    pack: list[Sequence[int]] = []
    for text in texts:
        if pack and sum(map(len, pack)) + len(text) > most:
            yield pack
            pack = []
        pack.append(text)
    if pack:
        yield pack


def _scored(model: LanguageModel, texts: Sequence[Sequence[int]], top: int) -> Iterator[PromptLogprobs]:
    lengths = [len(text) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text], device=model.device)
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    found: list[tuple[Floats, Ints, Floats]] = []
    lasts, after = np.cumsum(lengths) - 1, list[tuple[Ints, Floats]]()
    for begin, logits in _logits(model, tokens, positions, lengths):
        following = tokens[begin + 1 : begin + 1 + len(logits)]
        scores = logits.log_softmax(-1)
        said = scores[: len(following)].gather(1, following[:, None])[:, 0]
        likeliest = scores.topk(top, -1)
        here = lasts[(lasts >= begin) & (lasts < begin + len(logits))] - begin
        ended = scores[torch.from_numpy(here).to(model.device)].topk(max(1, top), -1)
        if not bool(said.isfinite().all() and ended.values[:, 0].isfinite().all()):
            raise NotFiniteError.of("scoring")
        found.append((_numpy(said), likeliest.indices.int().cpu().numpy(), _numpy(likeliest.values)))
        after += zip(ended.indices.int().cpu().numpy(), _numpy(ended.values), strict=True)
    each, tops, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    end = 0
    for length, (next_tokens, next_logprobs) in zip(lengths, after, strict=True):
        # logits at a place predict the next token, so the results of a text begin one place earlier
        begin, end = end, end + length
        none = np.full((1, top), np.nan, np.float32)
        yield PromptLogprobs(
            np.concatenate([np.full(1, np.nan, np.float32), each[begin : end - 1]]),
            np.concatenate([np.full((1, top), -1, np.int32), tops[begin : end - 1]]),
            np.concatenate([none, values[begin : end - 1]]),
            next_tokens,
            next_logprobs,
        )


def _logits(
    model: LanguageModel, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield a first place and the logits of the places from it, in runs that fit in memory."""
    count = max(1, _LOGITS // model.vocab_size)
    if model.head is None:
        logits = model.logits(tokens, positions, lengths, torch.arange(len(tokens), device=model.device))
        yield from ((begin, logits[begin : begin + count].float()) for begin in range(0, len(tokens), count))
        return
    hidden = model.hidden_states(tokens, positions, lengths)
    for begin in range(0, len(tokens), count):
        yield begin, model.head.logits(hidden[begin : begin + count])


def _numpy(values: Tensor) -> Floats:
    found: Floats = values.float().cpu().numpy()
    return found
