"""The decoding loop that engines over local weights share, and the detection of stop strings.

The loop draws, ends rows, drops the ended ones, and steps the model. A back-end brings a `DecodingSession`, which holds
the key-value cache of the rows. Rows lie in slots 0 … n - 1; when rows end, rows from the last slots move into the free
ones, so that the model only ever computes rows that still grow.

A response can end at a string, which is looked for token by token, at a bounded cost. Text is what the tokenizer
decodes of the response alone, special tokens included. A row keeps the tail in which a string could still end, never
its whole text:

- Tokens of a byte-level or plain vocabulary are bytes, whatever stands beside them, so the tail is bytes. A string ends
  in it where it ends in the text: UTF-8 is self-synchronising, and a character that is split between tokens is whole
  once its last byte is there.
- The text of a token in other decoders depends on its neighbours (a word's first space, bytes that make a character),
  so the last tokens are decoded again for each new one. Tokens leave that window only where the end of what is decoded
  without them is what it was.

What a tail finds depends on the row's own tokens alone.
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

_SLACK = 16  # characters beside the longest string: more than the end of a text changes by a further token
_WINDOWS = 4  # needed lengths of text at which a window is shortened
_NONE = "\ufffd"  # what is decoded of bytes that are no character
_TOKENS = 16  # needed lengths, in tokens, at which it is shortened whatever they say: nobody's text is so thin
_RANDOM_BLOCK = 64  # tokens whose random numbers are made at a time


class Tail(Protocol):
    """The end of what one row has said."""

    def ends(self, token: int) -> bool:
        """Append a token; whether the text now contains one of the strings, which it did not before."""


@final
class StopStrings:
    """What tokens say, for rows that end at strings.

    Args:
        tokenizer: that of the policy. Whoever opens an engine has it already, so none fails while a response waits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._pieces = tokenizer, _pieces_of(tokenizer)

    def tail(self, stop: Sequence[str]) -> Tail:
        """That of a row which has said nothing yet."""
        return _Window(self._tokenizer, stop) if self._pieces is None else _Bytes(self._pieces, stop)


@final
class _Bytes:
    """Of tokens that are bytes by themselves."""

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
    """Of tokens that mean something among others only."""

    __slots__ = ("_needed", "_skipped", "_stop", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, list(stop)
        self._needed = max(map(len, stop)) + _SLACK
        self._tokens: list[int] = []
        self._skipped = 0  # characters at the beginning of the window that may not be the text's

    def ends(self, token: int) -> bool:
        """See `Tail.ends`."""
        self._tokens.append(token)
        text = self._said(self._tokens)
        found = any(text.find(one, self._skipped) >= 0 for one in self._stop)
        if len(text) - self._skipped > _WINDOWS * self._needed or len(self._tokens) > _TOKENS * self._needed:
            self._shorten(text)
        return found

    def _shorten(self, text: str) -> None:
        """Forget the older half, where a character begins and what follows it is decoded as it was.

        Only where every character of the end is whole: bytes that are none yet are decoded alike wherever one begins.
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
    """Token → its bytes, as they are asked for; of an id that the tokenizer does not know, none."""

    def __init__(self, token_of: Callable[[int], str | None], bytes_of: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token_of, self._bytes_of = token_of, bytes_of

    def __missing__(self, token: int) -> bytes:
        word = self._token_of(token)
        found = self[token] = b"" if word is None else self._bytes_of(word)
        return found


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> _Pieces | None:
    """None: a decoder that does not only join what its tokens stand for."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(inner, "decoder", None)
    if isinstance(decoder, decoders.ByteLevel):
        return _Pieces(inner.id_to_token, _byte_level)
    return _Pieces(inner.id_to_token, str.encode) if isinstance(decoder, decoders.Fuse) else None


def _signs() -> dict[str, int]:
    """Sign → byte, as GPT-2 writes bytes: printable ones as themselves, the others from U+0100 on, in their order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_SIGNS = _signs()


def _byte_level(word: str) -> bytes:
    """An added token with signs of its own is written as text."""
    found = [_SIGNS.get(sign) for sign in word]
    return word.encode() if None in found else bytes(byte for byte in found if byte is not None)


class DecodingSession(Protocol):
    """The model state of a set of rows.

    `drop_share`: rows are dropped once more than this share of them has ended; None where the cache cannot drop rows.
    """

    drop_share: float | None

    def prefill(self) -> Tensor:
        """[rows, vocabulary]: the logits after each row's prompt."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [slots] to every slot; the logits [slots, vocabulary] after it."""

    def drop(self, count: int, free: Tensor, moved: Tensor) -> None:
        """Keep `count` slots; slot `free[i]` is taken over by the row in slot `moved[i]`."""


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
    """Decode generations of one sampling to their ends; trajectories in their order.

    Args:
        texts: what tokens say; needed where the sampling has stop strings.

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
    """What ends rows before their limits."""

    tokens: Tensor  # [n] int64
    tails: Sequence[Tail]  # of every row; empty: no string ends them
    stopped: list[bool]  # by row: at a string

    @classmethod
    def of(
        cls, sampling: SamplingParams, ids: Sequence[int], rows: int, device: torch.device, texts: StopStrings | None
    ) -> _Ends:
        tokens = torch.tensor([] if sampling.ignore_eos else list(ids), dtype=torch.int64, device=device)
        tails = [texts.tail(sampling.stop) for _ in range(rows)] if texts and sampling.stop else []
        return cls(tokens, tails, [False] * rows)

    def reached(self, chosen: Tensor, slots: Tensor, finished: Tensor) -> Tensor:
        """[slots] bool: which rows these tokens end; those that have finished are not looked at."""
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
    """What the rows of a session have said so far."""

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
        """Tokens, log-probabilities and `ended` of each row.

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
