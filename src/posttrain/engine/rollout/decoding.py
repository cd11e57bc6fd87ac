"""What engines over local weights share: the decoding loop, stop strings, and log-probabilities of given texts.

The loop draws tokens, ends rows, drops ended rows, and steps the model; its caller may pause it between two tokens. A
back-end provides a `DecodingSession`, which contains the key-value cache of the rows. Rows occupy slots 0 … n - 1; when
rows end, rows from the last slots move into the free slots, so the model computes unfinished rows only.

A response can end at a string. The search for the string runs token by token, at a bounded cost. The text of a response
is the text that the tokenizer decodes from the response, special tokens included. A row stores only the tail of its
text in which a string could still end:

- Tokens of a byte-level or plain vocabulary are bytes, independent of their neighbours, so the tail is bytes. A string
  ends in the tail where it ends in the text: UTF-8 is self-synchronising, and a character that is split between
  tokens is complete after its last byte.
- In other decoders the text of a token depends on its neighbours (a word's first space, bytes that make a character),
  so the last tokens are decoded again for each new token. Tokens leave this window only if the end of the text is
  decoded unchanged without them.

The matches in a tail depend only on the row's own tokens.

`prompt_logprobs` computes log-probabilities of given texts with the forward pass over packed documents that training
uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import InputError
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.port import Generation, NotFiniteError, PromptLogprobs, SamplingParams
from posttrain.engine.rollout.sampling import choose, row_keys, uniforms
from posttrain.engine.samples import Floats, Ints

_SLACK = 16  # characters in addition to the longest string: more than a new token can change at the end of a text
_WINDOWS = 4  # a window is shortened at this multiple of the needed text length
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not a character
_TOKENS = 16  # a window is always shortened at this multiple of the needed length, in tokens
_RANDOM_BLOCK = 64  # tokens whose random numbers are computed together
_TOGETHER = 8192  # tokens of texts computed together
_LOGITS = 2**26  # logits in memory at a time


class Tail(Protocol):
    """The end of the text of one row."""

    def ends(self, token: int) -> bool:
        """Append a token; return whether this token completes a stop string in the text."""


@final
class StopStrings:
    """The text of tokens, for rows that end at strings.

    Args:
        tokenizer: the policy's tokenizer. It is opened with the engine, so its absence is found before any response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._pieces = tokenizer, _pieces_of(tokenizer)

    def tail(self, stop: Sequence[str]) -> Tail:
        """Return the tail of a row without tokens."""
        return _Window(self._tokenizer, stop) if self._pieces is None else _Bytes(self._pieces, stop)


@final
class _Bytes:
    """The tail of a vocabulary whose tokens are bytes."""

    __slots__ = ("_kept", "_pieces", "_stop", "_tail")

    def __init__(self, pieces: _Pieces, stop: Sequence[str]) -> None:
        self._pieces, self._stop = pieces, [one.encode() for one in stop]
        self._kept, self._tail = max(map(len, self._stop)) - 1, b""

    def ends(self, token: int) -> bool:
        """See `Tail.ends`."""
        text = self._tail + self._pieces[token]
        self._tail = text[-self._kept :] if self._kept else b""
        return any(one in text for one in self._stop)


@final
class _Window:
    """The tail of a vocabulary whose tokens depend on their neighbours."""

    __slots__ = ("_needed", "_skipped", "_stop", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, list(stop)
        self._needed = max(map(len, stop)) + _SLACK
        self._tokens: list[int] = []
        self._skipped = 0  # characters at the window's beginning that may differ from the text

    def ends(self, token: int) -> bool:
        """See `Tail.ends`."""
        self._tokens.append(token)
        text = self._said(self._tokens)
        found = any(text.find(one, self._skipped) >= 0 for one in self._stop)
        if len(text) - self._skipped > _WINDOWS * self._needed or len(self._tokens) > _TOKENS * self._needed:
            self._shorten(text)
        return found

    def _shorten(self, text: str) -> None:
        """Drop the older half, at a token from which the end of the text is decoded unchanged.

        This requires that all characters of the end are complete, because incomplete bytes decode alike in any window.
        """
        half, needed = len(self._tokens) // 2, self._needed
        for begin in range(half, half + 4) if _REPLACEMENT not in text[-needed:] else ():
            rest = self._said(self._tokens[begin:])
            if len(rest) >= needed and rest[-needed:] == text[-needed:]:
                self._tokens, self._skipped = self._tokens[begin:], len(rest) - needed
                return
        if len(self._tokens) > _TOKENS * needed:
            self._tokens, self._skipped = self._tokens[half:], 0

    def _said(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@final
class _Pieces(dict[int, bytes]):
    """A map from token to bytes, filled on demand; no bytes for an id outside the tokenizer's vocabulary."""

    def __init__(self, token_of: Callable[[int], str | None], bytes_of: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token_of, self._bytes_of = token_of, bytes_of

    def __missing__(self, token: int) -> bytes:
        word = self._token_of(token)
        found = self[token] = b"" if word is None else self._bytes_of(word)
        return found


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> _Pieces | None:
    """Return the bytes of a tokenizer's tokens; None if its decoder does more than join the tokens."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(inner, "decoder", None)
    if isinstance(decoder, decoders.ByteLevel):
        return _Pieces(inner.id_to_token, _byte_level)
    return _Pieces(inner.id_to_token, str.encode) if isinstance(decoder, decoders.Fuse) else None


def _signs() -> dict[str, int]:
    """Return a map from character to byte, as in GPT-2: printable bytes are themselves, others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_SIGNS = _signs()


def _byte_level(word: str) -> bytes:
    """Return the bytes of a token; an added token with characters outside the byte alphabet is plain text."""
    found = [_SIGNS.get(sign) for sign in word]
    return word.encode() if None in found else bytes(byte for byte in found if byte is not None)


class DecodingSession(Protocol):
    """The model state of a set of rows.

    `drop_share`: ended rows are dropped when they exceed this share of all rows; None: the cache cannot drop rows.
    """

    drop_share: float | None

    def prefill(self) -> Tensor:
        """Return the logits after each row's prompt, [rows, vocabulary]."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [slots] to every slot; return the logits [slots, vocabulary] after it."""

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        """Move the row in slot `moved[i]` to slot `free[i]`, then drop all but the first `count` slots."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one session: the prompts, and for each row the number of its prompt."""

    prompts: tuple[tuple[int, ...], ...]
    prompt_of_row: tuple[int, ...]
    limits: tuple[int, ...]


@final
class BatchDecoding:
    """Generations with equal sampling that are decoded together, token by token.

    Args:
        texts: decodes tokens to text; required if the sampling has stop strings.
    """

    def __init__(
        self,
        work: Sequence[Generation],
        open_session: Callable[[Rows], DecodingSession],
        eos_token_ids: Sequence[int],
        device: torch.device,
        texts: StopStrings | None = None,
    ) -> None:
        self._work, self._open, self._sampling = work, open_session, work[0].sampling
        count, most = len(work), max(generation.limit for generation in work)
        self._limits = torch.tensor([generation.limit for generation in work], device=device)
        self._keys = row_keys(self._sampling.seed, [g.key for g in work], [g.sample for g in work], device)
        self._ends = _Ends.of(self._sampling, eos_token_ids, count, device, texts)
        self._tokens = torch.zeros(count, most, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count, most, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(count, dtype=torch.int64, device=device)  # of rows that are over
        self._ended = torch.zeros(count, dtype=torch.bool, device=device)  # by a token or string, even at the limit
        self._slots = torch.arange(count, device=device)  # the row in each slot
        self._over = torch.zeros(count, dtype=torch.bool, device=device)  # by slot
        self._step = 0
        self._session: DecodingSession | None = None
        self._chosen = self._random = self._slots

    def step(self) -> list[int]:
        """Sample one token for every row that is not over; return the rows that this token ends.

        Raises:
            NotFiniteError: a logit is not finite.
        """
        if self._session is None:
            self._session = self._begun()
            logits = self._session.prefill()
        else:
            logits = self._session.step(self._chosen)
        step, slots, sampling = self._step, self._slots, self._sampling
        if not sampling.greedy and (step % _RANDOM_BLOCK == 0 or not self._random.is_floating_point()):
            self._random = uniforms(self._keys, step - step % _RANDOM_BLOCK, _RANDOM_BLOCK)
        chosen, logprobs = choose(
            logits, self._random if sampling.greedy else self._random[slots, step % _RANDOM_BLOCK], sampling
        )
        if not math.isfinite(float(logprobs.sum())):  # the sum is finite only if every term is
            raise NotFiniteError.of("sampling", (self._work[row].id for row in slots[~logprobs.isfinite()].tolist()))
        self._tokens[slots, step], self._logprobs[slots, step] = chosen, logprobs
        stopped = self._ends.reached(chosen, slots, self._over)
        done = (stopped | (self._limits[slots] == step + 1)) & ~self._over
        self._chosen, self._step = chosen, step + 1
        self._ended[slots[done]] = stopped[done]
        return self._finish(done)

    def stop(self, rows: Collection[int]) -> None:
        """End these rows with the tokens that they have."""
        self._finish(torch.isin(self._slots, torch.tensor(list(rows), device=self._slots.device)) & ~self._over)

    def reread(self) -> None:
        """Compute the tokens so far again with the next step, because the weights have changed."""
        if self._session is not None:
            self._slots = self._slots[~self._over]
            self._over = torch.zeros_like(self._slots, dtype=torch.bool)
            self._session = None

    def said(self, row: int) -> tuple[Ints, Floats]:
        """Return tokens and log-probabilities of a row so far."""
        length = int(self._lengths[row]) or self._step
        tokens = self._tokens[row, :length].to("cpu", torch.int32).numpy()
        return tokens.copy(), self._logprobs[row, :length].cpu().numpy().copy()

    def ended(self, row: int) -> tuple[bool, bool]:
        """Return whether a token or a string ended the row, and whether a string did."""
        return bool(self._ended[row]), self._ends.stopped[row]

    def _begun(self) -> DecodingSession:
        """Open a session for the rows in the slots, which continue after the tokens that they have."""
        rows = self._slots.tolist()
        said = [tuple(self._tokens[row, : self._step].tolist()) for row in rows]
        contexts = [(*self._work[row].tokens, *tokens) for row, tokens in zip(rows, said, strict=True)]
        numbers = {context: place for place, context in enumerate(dict.fromkeys(contexts))}
        limits = tuple(self._work[row].limit - self._step for row in rows)
        return self._open(Rows(tuple(numbers), tuple(numbers[context] for context in contexts), limits))

    def _finish(self, done: Tensor) -> list[int]:
        """Finish the rows in these slots, [slots] bool; drop slots if many are over."""
        rows: list[int] = self._slots[done].tolist()
        if not rows:
            return rows
        self._lengths[self._slots[done]] = self._step
        self._over |= done
        count, slots = int(self._over.sum()), len(self._slots)
        share = self._session.drop_share if self._session else None
        if self._session and share is not None and share * slots < count < slots:
            kept = slots - count
            free = self._over[:kept].nonzero()[:, 0]
            moved = (~self._over[kept:]).nonzero()[:, 0] + kept
            self._session.drop(kept, free, moved)
            for tensor in (self._slots, self._chosen):
                tensor[free] = tensor[moved]
            self._slots, self._chosen = self._slots[:kept], self._chosen[:kept]
            self._over = self._over.new_zeros(kept)
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """The conditions that end rows before their limits."""

    tokens: Tensor  # [n] int64
    tails: Sequence[Tail]  # one per row; empty: no stop strings
    stopped: list[bool]  # by row: whether a string ended it

    @classmethod
    def of(
        cls, sampling: SamplingParams, ids: Sequence[int], rows: int, device: torch.device, texts: StopStrings | None
    ) -> _Ends:
        tokens = torch.tensor([] if sampling.ignore_eos else list(ids), dtype=torch.int64, device=device)
        tails = [texts.tail(sampling.stop) for _ in range(rows)] if texts and sampling.stop else []
        return cls(tokens, tails, [False] * rows)

    def reached(self, chosen: Tensor, slots: Tensor, finished: Tensor) -> Tensor:
        """Return which rows these tokens end, [slots] bool; ended rows are not searched for strings."""
        found = (chosen[:, None] == self.tokens).any(1)
        if self.tails:
            looked = zip(slots.tolist(), chosen.tolist(), (found | finished).tolist(), strict=True)
            by_string = [not over and self.tails[row].ends(token) for row, token, over in looked]
            for row, stopped in zip(slots.tolist(), by_string, strict=True):
                self.stopped[row] |= stopped
            found = found | torch.tensor(by_string, device=found.device)
        return found


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
