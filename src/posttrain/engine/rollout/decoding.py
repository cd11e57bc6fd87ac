"""The decoding loop that engines over local weights share, and the detection of stop strings.

The loop draws, ends rows, drops ended rows, and steps the model. A back-end provides a `DecodingSession`, which holds
the key-value cache of the rows. Rows occupy slots 0 … n - 1; when rows end, rows from the last slots move into the free
ones, so the model computes growing rows only.

A response can end at a string. The search for it runs token by token, at a bounded cost. Text is what the tokenizer
decodes from the response alone, special tokens included. A row keeps the tail in which a string could still end, never
its whole text:

- Tokens of a byte-level or plain vocabulary are bytes, independent of their neighbours, so the tail is bytes. A string
  ends in it where it ends in the text: UTF-8 is self-synchronising, and a character that is split between tokens is
  whole once its last byte has arrived.
- In other decoders the text of a token depends on its neighbours (a word's first space, bytes that make a character),
  so the last tokens are decoded again for each new token. Tokens leave that window only where the end of the text
  decoded without them is unchanged.

The matches of a tail depend on the row's own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import Generation, SamplingParams
from posttrain.engine.rollout.sampling import choose, row_keys, uniforms
from posttrain.engine.samples import Floats, Ints, Trajectory

_SLACK = 16  # characters in addition to the longest string: more than a further token changes of the end of a text
_WINDOWS = 4  # needed lengths of text at which a window is shortened
_NONE = "\ufffd"  # the decoded text of bytes that are not a character
_TOKENS = 16  # needed lengths, in tokens, at which it is shortened whatever its text: real text is denser
_RANDOM_BLOCK = 64  # tokens whose random numbers are computed together


class Tail(Protocol):
    """The end of the text of one row."""

    def ends(self, token: int) -> bool:
        """Append a token; return whether the text now contains one of the strings, which it did not before."""


@final
class StopStrings:
    """The text of tokens, for rows that end at strings.

    Args:
        tokenizer: that of the policy. The engine is opened with it, so a missing one cannot fail a waiting response.
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
        self._skipped = 0  # characters at the beginning of the window that may differ from the text's

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

        Only where every character of the end is whole: incomplete bytes decode alike wherever a window begins.
        """
        half, needed = len(self._tokens) // 2, self._needed
        for begin in range(half, half + 4) if _NONE not in text[-needed:] else ():
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
    """Token → its bytes, filled on demand; empty for an id outside the tokenizer's vocabulary."""

    def __init__(self, token_of: Callable[[int], str | None], bytes_of: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token_of, self._bytes_of = token_of, bytes_of

    def __missing__(self, token: int) -> bytes:
        word = self._token_of(token)
        found = self[token] = b"" if word is None else self._bytes_of(word)
        return found


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> _Pieces | None:
    """Return the bytes of a tokenizer's tokens; None: its decoder does more than join the tokens."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(inner, "decoder", None)
    if isinstance(decoder, decoders.ByteLevel):
        return _Pieces(inner.id_to_token, _byte_level)
    return _Pieces(inner.id_to_token, str.encode) if isinstance(decoder, decoders.Fuse) else None


def _signs() -> dict[str, int]:
    """Return sign → byte, as in GPT-2: printable bytes as themselves, the others from U+0100 on, in their order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_SIGNS = _signs()


def _byte_level(word: str) -> bytes:
    """Return the bytes of a token; an added token with signs outside the byte alphabet is plain text."""
    found = [_SIGNS.get(sign) for sign in word]
    return word.encode() if None in found else bytes(byte for byte in found if byte is not None)


class DecodingSession(Protocol):
    """The model state of a set of rows.

    `drop_share`: rows are dropped once more than this share of them has ended; None where the cache cannot drop rows.
    """

    drop_share: float | None

    def prefill(self) -> Tensor:
        """Return the logits after each row's prompt, [rows, vocabulary]."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [slots] to every slot; return the logits [slots, vocabulary] after it."""

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        """Keep `count` slots; the row in slot `moved[i]` moves to slot `free[i]`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one session: prompts by number, and which prompt each row continues."""

    prompts: tuple[tuple[int, ...], ...]
    prompt_of_row: tuple[int, ...]
    limits: tuple[int, ...]


def decode_batch(
    work: Sequence[Generation],
    open_session: Callable[[Rows], DecodingSession],
    eos_token_ids: Sequence[int],
    device: torch.device,
    texts: StopStrings | None = None,
) -> list[Trajectory]:
    """Decode generations of one sampling to their ends; return trajectories in the same order.

    Args:
        texts: the text of tokens; needed where the sampling has stop strings.

    Raises:
        JobFailedError: logits that are not finite.
    """
    sampling = work[0].sampling
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(generation.tokens for generation in work))}
    rows = Rows(
        prompts=tuple(numbers),
        prompt_of_row=tuple(numbers[generation.tokens] for generation in work),
        limits=tuple(generation.limit for generation in work),
    )
    keys = row_keys(sampling.seed, [g.key for g in work], [g.sample for g in work], device)
    outcome = _Outcome.empty(len(work), max(rows.limits), device)
    ends = _Ends.of(sampling, eos_token_ids, len(work), device, texts)
    _decode(open_session(rows), rows, keys, sampling, ends, outcome)
    return [
        Trajectory.answer(generation.tokens, tokens, logprobs, truncated=not ended, stopped=stopped)
        for generation, (tokens, logprobs, ended), stopped in zip(work, outcome.read(), ends.stopped, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """The conditions that end rows before their limits."""

    tokens: Tensor  # [n] int64
    tails: Sequence[Tail]  # of each row; empty: no string ends them
    stopped: list[bool]  # by row: whether it ended at a string

    @classmethod
    def of(
        cls, sampling: SamplingParams, ids: Sequence[int], rows: int, device: torch.device, texts: StopStrings | None
    ) -> _Ends:
        tokens = torch.tensor([] if sampling.ignore_eos else list(ids), dtype=torch.int64, device=device)
        tails = [texts.tail(sampling.stop) for _ in range(rows)] if texts and sampling.stop else []
        return cls(tokens, tails, [False] * rows)

    def reached(self, chosen: Tensor, slots: Tensor, finished: Tensor) -> Tensor:
        """Return which rows these tokens end, [slots] bool; finished rows are not checked for strings."""
        found = (chosen[:, None] == self.tokens).any(1)
        if self.tails:
            looked = zip(slots.tolist(), chosen.tolist(), (found | finished).tolist(), strict=True)
            by_string = [not over and self.tails[row].ends(token) for row, token, over in looked]
            for row, stopped in zip(slots.tolist(), by_string, strict=True):
                self.stopped[row] |= stopped
            found = found | torch.tensor(by_string, device=found.device)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The responses of a session's rows so far."""

    tokens: Tensor  # [rows, limit] int64
    logprobs: Tensor  # [rows, limit] float32
    lengths: Tensor  # [rows] int64
    ended: Tensor  # [rows] bool: before its limit, or at it by a token or string that ends it

    @classmethod
    def empty(cls, rows: int, limit: int, device: torch.device) -> _Outcome:
        return cls(
            torch.zeros(rows, limit, dtype=torch.int64, device=device),
            torch.zeros(rows, limit, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def read(self) -> list[tuple[Ints, Floats, bool]]:
        """Return tokens, log-probabilities and `ended` of each row.

        Raises:
            JobFailedError: a log-probability that is not finite.
        """
        if not bool(self.logprobs.isfinite().all()):
            raise JobFailedError(
                "policy logits must be finite, got NaN or infinity while sampling; the policy has diverged"
            )
        sizes, ended = self.lengths.tolist(), self.ended.tolist()
        tokens = self.tokens.to("cpu", torch.int32).numpy()
        logprobs = self.logprobs.cpu().numpy()
        return [(tokens[i, :size].copy(), logprobs[i, :size].copy(), ended[i]) for i, size in enumerate(sizes)]


def _decode(
    session: DecodingSession,
    rows: Rows,
    keys: Tensor,
    sampling: SamplingParams,
    ends: _Ends,
    outcome: _Outcome,
) -> None:
    limits = torch.tensor(rows.limits, device=keys.device)
    slots = torch.arange(len(keys), device=keys.device)  # the row in each slot
    finished = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    finished_count = 0
    random = keys.new_empty(0)
    logits = session.prefill()
    for step in range(max(rows.limits)):
        if step % _RANDOM_BLOCK == 0 and not sampling.greedy:
            random = uniforms(keys, step, _RANDOM_BLOCK)
        uniform = random if sampling.greedy else random[slots, step % _RANDOM_BLOCK]
        chosen, logprobs = choose(logits, uniform, sampling)
        outcome.tokens[slots, step] = chosen
        outcome.logprobs[slots, step] = logprobs
        stopped = ends.reached(chosen, slots, finished)
        done = stopped | (limits[slots] == step + 1) | finished
        count = int(done.sum())
        if count > finished_count:
            new = done & ~finished
            outcome.lengths[slots[new]] = step + 1
            outcome.ended[slots[new]] = stopped[new]
            finished, finished_count = done, count
        if count == len(slots):
            return
        if session.drop_share is not None and count > session.drop_share * len(slots):
            kept = len(slots) - count
            free = done[:kept].nonzero()[:, 0]
            moved = (~done[kept:]).nonzero()[:, 0] + kept
            session.drop(kept, free, moved)
            for tensor in (slots, chosen):
                tensor[free] = tensor[moved]
            slots, chosen = slots[:kept], chosen[:kept]
            finished, finished_count = finished.new_zeros(kept), 0
        logits = session.step(chosen)
