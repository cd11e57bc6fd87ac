"""The decoding loop that engines over local weights share: draw, end rows, drop the ended ones, step the model.

A back-end brings a `DecodingSession`, which holds the key-value cache of the rows. Rows lie in slots 0 … n - 1; when
rows end, rows from the last slots move into the free ones, so that the model only ever computes rows that still grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import Generation, SamplingParams
from posttrain.engine.rollout.sampling import choose, row_keys, uniforms
from posttrain.engine.rollout.stopping import StopStrings, Tail
from posttrain.engine.samples import Floats, Ints, Trajectory

_RANDOM_BLOCK = 64  # tokens whose random numbers are made at a time


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
