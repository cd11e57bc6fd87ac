"""Which rows are decoded: a queue in stream order, admission by memory, preemption of the youngest. No tensors.

Nothing here changes what a row says, only when. Rows are admitted from the head of the queue alone and preempted from
its end, so those that are decoded always come before those that wait, and the oldest always gets on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.port import Completion, Generation
from posttrain.engine.rollout.stopping import StopStrings, Tail
from posttrain.engine.samples import Segment, Status, Trajectory

_REFILL_SHARE = 16  # slots are refilled once a 16th of them is free: a pass over one short prompt costs a whole step


@dataclass(slots=True)
class RolloutCounters:
    """What an engine has computed since it was opened."""

    prefilled_tokens: int = 0  # of prompts
    decoded_tokens: int = 0  # rows times steps
    discarded_tokens: int = 0  # decoded behind the end of a row
    recomputed_tokens: int = 0  # read again after a preemption or an update
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """A generation on its way."""

    number: int  # in the order of the stream
    asked: Generation
    stops: frozenset[int]  # tokens that end it
    key: int  # of its random numbers
    tail: Tail | None = None  # of its text; None: no string ends it
    stopped: bool = False  # at a string
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)  # version, first of its tokens
    fed: int = 0  # of `tokens`, how many the model has read

    @property
    def position(self) -> int:
        """Where the next token that it reads lies."""
        return len(self.asked.tokens) + self.fed

    @property
    def replays(self) -> int:
        """Tokens that it has said and the model has yet to read before the last of them."""
        return max(0, len(self.tokens) - self.fed - 1)

    def say(self, token: int, logprob: float, version: str) -> bool:
        """Append a token; whether the row has ended."""
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stops:
            return True
        if self.tail is not None and self.tail.ends(token):
            self.stopped = True
        return self.stopped or len(self.tokens) >= self.asked.limit

    def completion(self, version: str, *, aborted: bool = False) -> Completion:
        """What it has said.

        Raises:
            JobFailedError: a log-probability that is not finite.
        """
        tokens = np.asarray(self.tokens, dtype=np.int32)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        if not np.isfinite(logprobs).all():
            raise JobFailedError(
                "policy logits must be finite, got NaN or infinity while sampling; the policy has diverged"
            )
        marks = self.marks or [(version, 0)]
        ends = [begin for _, begin in marks[1:]] + [len(tokens)]
        said = [
            Segment(tokens[begin:end], "sampled", logprobs[begin:end], by)
            for (by, begin), end in zip(marks, ends, strict=True)
        ]
        ended = self.stopped or (bool(self.tokens) and self.tokens[-1] in self.stops)
        status: Status = "aborted" if aborted else "ok" if ended else "truncated"
        prompt = Segment(np.asarray(self.asked.tokens, dtype=np.int32), "prompt")
        return Completion(self.asked.id, Trajectory((prompt, *said), status, self.stopped))


@final
class Schedule:
    """The rows that wait and those that are decoded.

    Args:
        texts: what tokens say; None: no row ends at a string.
    """

    def __init__(self, texts: StopStrings | None = None) -> None:
        self._texts = texts
        self.waiting: deque[Row] = deque()
        self.running: dict[int, Row] = {}  # by number, in the order of admission
        self._wanted: Counter[tuple[int, ...]] = Counter()  # prompts of waiting rows
        self._next = 0

    def submit(self, work: Sequence[Generation], keys: Sequence[int], eos_token_ids: Collection[int]) -> None:
        """Put generations at the end of the queue, each with the key of its random numbers."""
        ends, none = frozenset(eos_token_ids), frozenset[int]()
        for asked, key in zip(work, keys, strict=True):
            tail = self._texts.tail(asked.sampling.stop) if self._texts and asked.sampling.stop else None
            self.waiting.append(Row(self._next, asked, none if asked.sampling.ignore_eos else ends, key, tail))
            self._wanted[asked.tokens] += 1
            self._next += 1

    def wanted(self, prompt: tuple[int, ...]) -> bool:
        """Whether a waiting row has this prompt."""
        return self._wanted[prompt] > 0

    def refill(self) -> int:
        """How many rows to admit now, at most."""
        if not self.waiting:
            return 0
        most = self.waiting[0].asked.sampling.batch_size
        free = most - len(self.running)
        enough = not self.running or free >= min(max(1, most // _REFILL_SHARE), len(self.waiting))
        return max(0, min(free, len(self.waiting))) if enough else 0

    def admit(self, count: int) -> list[Row]:
        """The first of the queue are decoded from now on."""
        rows = [self.waiting.popleft() for _ in range(count)]
        for row in rows:
            self._wanted[row.asked.tokens] -= 1
            self.running[row.number] = row
        self._wanted += Counter()
        return rows

    def preempt(self, rows: Iterable[Row]) -> None:
        """These wait again, in their places; the model will read them anew."""
        for row in sorted(rows, key=lambda row: -row.number):
            del self.running[row.number]
            row.fed = 0
            self.waiting.appendleft(row)
            self._wanted[row.asked.tokens] += 1

    def youngest(self) -> Row:
        """The row that is preempted first."""
        return self.running[max(self.running)]

    def take(self, which: Callable[[Row], bool]) -> list[Row]:
        """Remove rows, waiting or decoded, in the order of the stream."""
        found = [row for row in (*self.running.values(), *self.waiting) if which(row)]
        numbers = {row.number for row in found}
        for row in found:
            if row.number not in self.running:
                self._wanted[row.asked.tokens] -= 1
            self.running.pop(row.number, None)
        self.waiting = deque(row for row in self.waiting if row.number not in numbers)
        self._wanted += Counter()
        return sorted(found, key=lambda row: row.number)
