"""An engine that decodes one batch at a time; work that arrives during a batch waits."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import (
    Completion,
    Delta,
    Generation,
    InFlight,
    PromptLogprobs,
    Proof,
    prompt_segments,
)
from posttrain.engine.rollout.schedule import Intake, Row
from posttrain.engine.samples import Floats, Ints


class Batch(Protocol):
    """Generations with equal sampling and policy, decoded together; rows are numbered in their order."""

    def step(self) -> list[int]:
        """Sample at least one token for every row that is not over; return the rows that are over now."""

    def said(self, row: int) -> tuple[Ints, Floats]:
        """Return tokens and log-probabilities of a row so far."""

    def ended(self, row: int) -> tuple[bool, bool]:
        """Return whether a token or a string ended the row, and whether a string did."""

    def stop(self, rows: Collection[int]) -> None:
        """End these rows with the tokens that they have."""

    def reread(self) -> None:
        """Compute the tokens so far again, because the weights have changed."""


class BatchedEngine:
    """`RolloutEngine` with a function that opens a batch.

    `completed` decodes one batch of waiting work after the other: generations with equal sampling, shortest prompts
    first, at most `batch_size` rows and no more than fit in the cache. It reads all tokens of a session again.

    Args:
        kv_cache: maximum bytes of a batch's keys and values; None: no limit.
        token_bytes: bytes of one token's keys and values in all layers; None: unknown, so `kv_cache` has no effect.
        reads_text: whether batches end responses at `sampling.stop`; if not, generations with stop strings are
            rejected.
        policies: names of the policies in addition to the one in training.
    """

    holds_sessions = False

    def __init__(
        self,
        name: str,
        context_length: int,
        open_batch: Callable[[Sequence[Generation]], Batch],
        *,
        kv_cache: int | None = None,
        token_bytes: int | None = None,
        reads_text: bool = False,
        policies: Collection[str] = (),
    ) -> None:
        self._cached = None if kv_cache is None or token_bytes is None else (kv_cache, token_bytes)
        self.name, self.context_length, self._open = name, context_length, open_batch
        self._intake = Intake(name, context_length, reads_text=reads_text, policies=policies)
        self._waiting: list[Generation] = []
        self._rows: dict[int, Row] = {}  # of the batch, not over
        self._batch: Batch | None = None
        self._done: list[Completion] = []

    def counts(self) -> Mapping[str, int]:
        """See `RolloutEngine.counts`; a batch has no counters."""
        return {}

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        """See `RolloutEngine.attest`; a batch exposes no tensors."""
        return Proof(logprobs=[one.logprobs for one in self.score(challenge)])

    def submit(self, work: Sequence[Generation]) -> None:
        """See `RolloutEngine.submit`."""
        for generation in work:
            self._refuse_longer(generation)
        prompt_segments(work)  # refuses token ids that no vocabulary has, before any work is accepted
        self._intake.take(work)
        self._waiting += work

    def completed(self, timeout: float) -> list[Completion]:
        """See `RolloutEngine.completed`."""
        end = time.monotonic() + timeout
        try:
            while not self._done and (self._rows or self._waiting) and not self._intake.paused:
                self._step()
                if time.monotonic() >= end:
                    break
        except BaseException:
            self._intake.give([row.asked.id for row in self._rows.values()] + [one.id for one in self._waiting])
            self._rows, self._batch, self._waiting = {}, None, []
            raise
        done, self._done = self._done, []
        self._intake.give(completion.id for completion in done)
        return done

    def progress(self) -> list[Delta]:
        """See `RolloutEngine.progress`."""
        found = [row.delta(*self._batch.said(at)) for at, row in self._rows.items()] if self._batch else []
        return [delta for delta in found if delta]

    def score(self, prompts: Sequence[Sequence[int]], top: int = 0, policy: str = "") -> list[PromptLogprobs]:
        """Raise, because a batch has no weights; see `RolloutEngine.score`.

        Raises:
            InputError: always; a subclass with weights implements it.
        """
        raise InputError(f"rollout engine {self.name} can neither score texts nor attest weights; use native or module")

    def release(self, sessions: Collection[str]) -> None:
        """See `RolloutEngine.release`; nothing is held."""

    def abort(self, ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        names = set(ids)
        never = [generation for generation in self._waiting if generation.id in names]
        self._waiting = [generation for generation in self._waiting if generation.id not in names]
        self._done += [row.completion(self._version(row), aborted=True) for row in self._made(never)]
        begun = [at for at, row in self._rows.items() if row.asked.id in names]
        if self._batch and begun:
            self._batch.stop(begun)
            self._answer(begun, aborted=True)

    def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        self._intake.paused = True

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._intake.paused = False

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        """See `RolloutEngine.update`."""
        mine = {at: row for at, row in self._rows.items() if row.asked.policy == policy}
        self._intake.update(policy, version, in_flight, begun=len(mine))
        if self._batch and mine:
            if in_flight == "recompute":
                self._batch.reread()
            for at, row in mine.items():
                row.mark(version, len(self._batch.said(at)[0]))

    def _step(self) -> None:
        if not self._rows:
            self._begin()
        if self._batch and self._rows:
            self._answer(self._batch.step())

    def _begin(self) -> None:
        """Open the next batch."""
        first = self._waiting[0]
        alike = [g for g in self._waiting if (g.sampling, g.policy) == (first.sampling, first.policy)]
        batch = self._holding(sorted(alike, key=lambda g: len(g.tokens))[: first.sampling.batch_size])
        self._batch, self._rows = self._open(batch), dict(enumerate(self._made(batch)))
        taken = {generation.id for generation in batch}
        self._waiting = [generation for generation in self._waiting if generation.id not in taken]
        for row in self._rows.values():
            row.mark(self._version(row), 0)

    def _made(self, work: Sequence[Generation]) -> list[Row]:
        prompts = prompt_segments(work)
        return [Row(at, asked, prompts[asked.tokens], asked.key) for at, asked in enumerate(work)]

    def _version(self, row: Row) -> str:
        return self._intake.versions[row.asked.policy]

    def _answer(self, over: Sequence[int], *, aborted: bool = False) -> None:
        """Answer the rows of the batch that are over."""
        assert self._batch is not None
        for at in sorted(over):
            row = self._rows.pop(at)
            row.tokens, row.logprobs = self._batch.said(at)
            row.ended, row.stopped = self._batch.ended(at)
            self._done.append(row.completion(self._version(row), aborted=aborted))
        if not self._rows:
            self._batch = None

    def _refuse_longer(self, generation: Generation) -> None:
        tokens = len(generation.tokens) + generation.limit
        if self._cached is not None and tokens * self._cached[1] > self._cached[0]:
            raise InputError(
                f"runtime.kv_cache must hold the {tokens} tokens of generation {generation.id} "
                f"({tokens * self._cached[1]} bytes), got {self._cached[0]} bytes; raise runtime.kv_cache, or lower "
                "max_new_tokens"
            )

    def _holding(self, batch: list[Generation]) -> list[Generation]:
        """Return the first generations, shortest prompts first, whose padded keys and values fit in the cache."""
        if self._cached is None:
            return batch
        budget, token_bytes = self._cached
        longest = limit = 0
        for count, generation in enumerate(batch):
            longest, limit = max(longest, len(generation.tokens)), max(limit, generation.limit)
            if count and (count + 1) * (longest + limit) * token_bytes > budget:
                return batch[:count]
        return batch
