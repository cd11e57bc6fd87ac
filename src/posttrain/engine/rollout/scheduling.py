"""Which rows are decoded: a queue in stream order, admission by memory, preemption of the youngest. No tensors.

Nothing here changes what a row says, only when. Rows are admitted from the head of the queue alone and preempted from
its end, so those that are decoded always come before those that wait, and the oldest always gets on.

What every engine in this process keeps of its work: the ids, whether it is paused, which version samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Completion, Generation, InFlight
from posttrain.engine.rollout.stopping import StopStrings, Tail
from posttrain.engine.samples import Floats, Ints, Segment, Status, Trajectory

_REFILL_SHARE = 16  # slots are refilled once a 16th of them is free: a pass over one short prompt costs a whole step
_NO_TOKENS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass
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
    """A generation on its way. What it says while it is decoded is in the `RowTable`, and here when it leaves that."""

    number: int  # in the order of the stream
    asked: Generation
    prompt: Segment  # one for all rows that begin with it
    key: int  # of its random numbers
    tail: Tail | None = None  # of its text; None: no string ends it
    ended: bool = False  # by a token or a string, before or at its limit
    stopped: bool = False  # at a string
    tokens: Ints = field(default_factory=lambda: _NO_TOKENS)
    logprobs: Floats = field(default_factory=lambda: _NO_LOGPROBS)
    marks: list[tuple[str, int]] = field(default_factory=list)  # version, first of its tokens

    def mark(self, version: str, begin: int) -> None:
        """Tokens from `begin` on are said by this version."""
        if self.marks and self.marks[-1][1] == begin:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, begin))

    def completion(self, version: str, *, aborted: bool = False) -> Completion:
        """What it has said."""
        marks = [mark for mark in self.marks if mark[1] < len(self.tokens)] or [(version, 0)]
        ends = [*(begin for _, begin in marks[1:]), len(self.tokens)]
        said = [
            Segment(self.tokens[begin:end], "sampled", self.logprobs[begin:end], by)
            for (by, begin), end in zip(marks, ends, strict=True)
        ]
        status: Status = "aborted" if aborted else "ok" if self.ended else "truncated"
        return Completion(self.asked.id, Trajectory((self.prompt, *said), status, self.stopped))


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

    def submit(
        self, work: Sequence[Generation], keys: Sequence[int], prompts: Mapping[tuple[int, ...], Segment]
    ) -> None:
        """Put generations at the end of the queue, each with the key of its random numbers; see `prompt_segments`."""
        for asked, key in zip(work, keys, strict=True):
            tail = self._texts.tail(asked.sampling.stop) if self._texts and asked.sampling.stop else None
            self.waiting.append(Row(self._next, asked, prompts[asked.tokens], key, tail))
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


@final
class Intake:
    """Holds what is submitted against what the port promises. Weights are read in place: one policy, updated paused.

    Args:
        reads_text: whether the engine knows what its tokens say, without which no response ends at a string.
    """

    def __init__(self, name: str, context_length: int, *, reads_text: bool = False) -> None:
        self._name, self._context_length, self._reads_text = name, context_length, reads_text
        self._ids: set[str] = set()
        self.paused = False
        self.version = ""

    def take(self, work: Sequence[Generation]) -> None:
        """Note new work.

        Raises:
            InputError: see `RolloutEngine.submit`.
        """
        ids: set[str] = set()
        for generation in work:
            self._served(generation.policy)
            if generation.id in self._ids or generation.id in ids:
                raise InputError(f"generation {generation.id} must have an id of its own, got one in work already")
            if generation.sampling.stop and not self._reads_text:
                raise InputError(
                    f"generation {generation.id} must have no stop strings, got {generation.sampling.stop[0]!r}: "
                    f"rollout engine {self._name} was opened without a tokenizer; open it with one"
                )
            total = len(generation.tokens) + generation.limit
            if total > self._context_length:
                raise InputError(
                    f"generation {generation.id} must fit the context of {self._context_length} tokens, "
                    f"got {len(generation.tokens)} + {generation.limit}; shorten the prompt or the limit"
                )
            ids.add(generation.id)
        self._ids |= ids

    def give(self, ids: Iterable[str]) -> None:
        """These have been answered."""
        self._ids.difference_update(ids)

    def update(self, policy: str, version: str, in_flight: InFlight, begun: int) -> None:
        """See `RolloutEngine.update`; `begun` responses would go on."""
        self._served(policy)
        if not self.paused:
            raise InputError(
                f"rollout engine {self._name} reads weights in place and must be paused to update to {version}, "
                "got one at work; call pause first"
            )
        if begun and in_flight == "finish":
            raise InputError(
                f"rollout engine {self._name} reads weights in place, so none may have begun to finish under the old "
                f"ones, got {begun}; update with recompute or keep_kv, or take them first"
            )
        self.version = version

    def _served(self, policy: str) -> None:
        if policy:
            raise InputError(f"rollout engine {self._name} serves one policy, got {policy}; leave the policy away")
