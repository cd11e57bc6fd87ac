"""Random numbers by counter, and drawing a token by inverting the distribution function.

A random number is a hash of (seed, prompt key, sample, token), so it does not depend on which rows are decoded
together, their order, the device, or interruptions of the run. The hash is the output function of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) in wrapping 64-bit integer
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posttrain.engine.rollout.port import Generation, SamplingParams

_WORD = 2**64
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# 32 bits, so that u * total stays below total in float64 and no token beyond the distribution can be drawn.
_LARGEST = 1.0 - 2.0**-32
_BLOCK = 32
_SMALL = 1024  # largest vocabulary that is summed in one step


def _signed(word: int) -> int:
    """Return the int64 with the bits of `word` modulo 2^64."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _mix(state: Tensor) -> Tensor:
    """Apply SplitMix64's bijection to int64 bit patterns; right shifts are logical."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        state = state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            state = state * _signed(factor)
    return state


def _absorb(state: Tensor, words: Tensor) -> Tensor:
    """Return the state after absorbing `words`, each a 64-bit word."""
    return _mix(state + (words + 1) * _signed(_GAMMA))


def row_keys(
    seeds: int | Sequence[int], prompt_keys: Sequence[int], samples: Sequence[int], device: torch.device
) -> Tensor:
    """Return a key for each (seed, prompt key, sample), [rows] int64; `seeds` is one for all rows, or [rows]."""
    prompts = torch.tensor([_signed(key) for key in prompt_keys], dtype=torch.int64, device=device)
    sample = torch.tensor(samples, dtype=torch.int64, device=device)
    words = [_signed(seed) for seed in ([seeds] if isinstance(seeds, int) else seeds)]
    start = _mix(torch.tensor(words, dtype=torch.int64, device=device))
    return _absorb(_absorb(start, prompts), sample)


def uniforms(keys: Tensor, first: int | Tensor, count: int) -> Tensor:
    """Return random numbers for tokens `first` … `first + count - 1` of each row, [rows, count] float64 in [0, 1).

    Args:
        first: the index of the first token, the same for all rows, or [rows].
    """
    tokens = torch.arange(count, device=keys.device) + (first[:, None] if isinstance(first, Tensor) else first)
    return ((_absorb(keys[:, None], tokens) >> 32) & 0xFFFFFFFF).double() * 2.0**-32


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), by inverting the distribution function.

    The function is inverted in two steps, first over blocks of tokens, then inside the block, with a single pass over
    the vocabulary and sums in float64. A small vocabulary needs one step, with fewer operations.

    Args:
        logits: [rows, vocabulary].
        uniform: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 tokens and [rows] float32 log-probabilities.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    probabilities = scaled.softmax(-1)
    size = logits.shape[1]
    if size <= _SMALL:
        token = _invert(probabilities, uniform)[0]
    else:
        padded = probabilities if size % _BLOCK == 0 else torch.nn.functional.pad(probabilities, (0, -size % _BLOCK))
        blocks = padded.view(len(padded), -1, _BLOCK)
        sums = blocks.sum(-1)
        block, steps, target = _invert(sums, uniform)
        above = steps.gather(1, block) - target
        rest = (1.0 - above / sums.gather(1, block)).clamp_(0.0, _LARGEST)  # position within the block
        inside = blocks[torch.arange(len(block), device=block.device), block[:, 0]]
        token = (block * _BLOCK + _invert(inside, rest[:, 0])[0]).clamp_(max=size - 1)
    return token[:, 0], probabilities.gather(1, token)[:, 0].log_()


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index where the distribution function of `weights` passes the target, the function, and the target.

    The target is `uniform` times the sum of the weights, [rows, 1].
    """
    steps = weights.cumsum(-1, dtype=torch.float64)
    target = (uniform * steps[:, -1])[:, None]
    # The index right of equal values, so a token of probability zero is never drawn. The bound matters for NaN only.
    return torch.searchsorted(steps, target, right=True).clamp_(max=weights.shape[1] - 1), steps, target


def draw_likely(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row from the likely tokens; its log-probability is of the whole softmax.

    `top_k`, then `top_p`, then `min_p` exclude tokens, each from the renormalised distribution that the previous filter
    left, as in Hugging Face and vLLM; ties with the k-th token stay. `min_p` compares with the likeliest token, so
    renormalising does not change its effect.
    """
    scaled = logits.float() / sampling.temperature
    probabilities = scaled.softmax(-1)
    ordered, tokens = probabilities.sort(stable=True, dim=-1, descending=True)
    kept = ordered >= sampling.min_p * ordered[:, :1]
    mass: Tensor | float = 1.0
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, logits.shape[1])).values[:, -1:]
        among = scaled.gather(1, tokens) >= least
        kept &= among
        mass = ordered.where(among, 0).sum(-1, keepdim=True, dtype=torch.float64)
    if sampling.top_p < 1:
        kept &= ordered.cumsum(-1, dtype=torch.float64) - ordered < sampling.top_p * mass
    kept[:, 0] = True
    token = tokens.gather(1, _invert(ordered.where(kept, 0), uniform)[0])
    return token[:, 0], probabilities.gather(1, token)[:, 0].log()


def most_likely(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the token of the largest logit in each row, and its log-probability at the temperature."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    token = scaled.argmax(-1)
    return token, scaled.log_softmax(-1).gather(1, token[:, None])[:, 0]


def choose(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Choose one token per row as `sampling` specifies; return the tokens and their log-probabilities."""
    if sampling.greedy:
        return most_likely(logits, sampling.temperature)
    if sampling.truncates:
        return draw_likely(logits, uniform, sampling)
    return draw(logits, uniform, sampling.temperature)


def generation_keys(work: Sequence[Generation]) -> list[int]:
    """Return the key of each generation's random numbers."""
    seeds, keys, samples = zip(*((asked.sampling.seed, asked.key, asked.sample) for asked in work), strict=True)
    found: list[int] = row_keys(seeds, keys, samples, torch.device("cpu")).tolist()
    return found


@final
class RowDraws:
    """Draws token after token for rows that may differ in their sampling and in their number of tokens.

    Args:
        sampling: [rows].
        keys: [rows] keys of the random numbers, see `generation_keys`.
        first: [rows] number of the next token in the response.
        ahead: number of tokens per row that can be drawn.
    """

    def __init__(
        self,
        sampling: Sequence[SamplingParams],
        keys: Sequence[int],
        first: Sequence[int],
        device: torch.device,
        ahead: int,
    ) -> None:
        self._sampling, self._device = sampling, device
        self._alike = self._found_alike()
        both = torch.tensor([keys, first], device=device)
        self._numbers = uniforms(both[0], both[1], ahead)
        self._used = 0

    def _found_alike(self) -> list[tuple[SamplingParams, Tensor | None]]:
        """Return the rows of each distribution, with one of their samplings; None: all rows have the same one."""
        first = self._sampling[0]
        if all(other is first or other.distribution == first.distribution for other in self._sampling):
            return [(first, None)]
        alike: dict[tuple[float, ...], list[int]] = {}
        for row, params in enumerate(self._sampling):
            alike.setdefault(params.distribution, []).append(row)
        return [(self._sampling[rows[0]], torch.tensor(rows, device=self._device)) for rows in alike.values()]

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows [n], in this order; at least one."""
        if self._alike[0][1] is None:
            self._sampling = self._sampling[: len(rows)]
        else:
            self._sampling = [self._sampling[row] for row in rows]
            self._alike = self._found_alike()
        self._numbers = self._numbers.index_select(0, torch.tensor(rows, device=self._device))

    def join(self, others: RowDraws) -> None:
        """Append the rows of `others`; the number of draws left is the smaller of the two numbers."""
        left = min(self.left, others.left)
        parts = [draws._numbers.narrow(1, draws._used, left) for draws in (self, others)]
        self._numbers, self._used = torch.cat(parts), 0
        self._sampling = [*self._sampling, *others._sampling]
        self._alike = self._found_alike()

    @property
    def left(self) -> int:
        """The number of tokens per row that can still be drawn."""
        return self._numbers.shape[1] - self._used

    def next(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of every row; return the tokens and their log-probabilities."""
        uniform = self._numbers[:, self._used]
        self._used += 1
        if len(self._alike) == 1:
            return choose(logits, uniform, self._alike[0][0])
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for sampling, rows in self._alike:
            where = slice(None) if rows is None else rows
            tokens[where], logprobs[where] = choose(logits[where], uniform[where], sampling)
        return tokens, logprobs
