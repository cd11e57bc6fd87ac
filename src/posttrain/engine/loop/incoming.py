"""A call of the rollout that goes on: its groups come as they end, and are scored while others are sampled.

::

    rollout ─▶ groups, in any order ─▶ stretches of the stream, each when its last group is there ─▶ groups, in order

What is scored together, and the order in which groups are handed on, follow the data stream and never the clock. Which
stretch is scored first follows who ended first: one long response holds up its own stretch and no other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from posttrain.domain.facts import Note, Span
from posttrain.engine.groups.worker_group import Feed, Future
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.rewards.port import Score
from posttrain.engine.rollout.batches import PromptBatch, Rollouts
from posttrain.engine.samples import Group, Prompt
from posttrain.engine.scoring import Scorer, Stretch
from posttrain.engine.tracing import Trace

_PATIENCE = 60.0  # seconds between two looks at the feed, which has a deadline of its own
_LOOK = 0.02  # where scores or gradients may come meanwhile


@final
@dataclass(slots=True)
class Incoming:
    """What one call of the rollout samples, on its way to the buffer.

    Args:
        batch: the step that it is to be trained in.
        keys: of its prompts, in the order of the data stream.
        prompts: parallel to them.
        feed: the call.
        samples: of each prompt.
        scorer: None: nobody scores.
        together: groups that are scored in one call.
        early: whether they are while the rollout works; else when it has ended.
        grows: whether prompts may be added while it goes on: what is sampled is judged meanwhile.
        went_on: what becomes of all of them before they are scored, where samples have several turns.
    """

    batch: int
    keys: list[int]
    prompts: list[Prompt]
    feed: Feed[PromptBatch, Rollouts]
    samples: int
    scorer: Scorer | None
    together: int
    early: bool
    grows: bool = False
    went_on: Callable[[list[Group], Trace], list[Group]] | None = None
    counts: Counter[str] = field(default_factory=Counter)  # of the rollout's engine, see `RolloutEngine`
    _begun: tuple[float, float] = field(default_factory=lambda: (time.time(), time.perf_counter()))
    _came: dict[int, Group] = field(default_factory=dict)
    _sampled: bool = False
    _stretches: list[range] = field(init=False)  # of places among the keys
    _stretch: dict[int, int] = field(init=False)  # of keys
    _lacking: Counter[int] = field(init=False)  # groups that have not come yet, by stretch
    _told: int = 0  # keys whose sampling a span covers
    _next: int = 0  # the stretch that is handed on next
    _whole: list[int] = field(default_factory=list)  # stretches that the scorer may have
    _scoring: dict[int, tuple[list[ScoredGroup], Future[Sequence[Score]]]] = field(default_factory=dict)
    _taken: int = 0
    _first: int = field(init=False)  # keys that it began with
    _waits: tuple[float, float] | None = None  # since when only scores are waited for

    def __post_init__(self) -> None:
        self._first = count = len(self.keys)
        size = self.together
        self._stretches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self._stretch = {key: place // size for place, key in enumerate(self.keys)}
        self._lacking = Counter(self._stretch.values())

    def add(self, key: int, prompt: Prompt) -> None:
        """Sample one prompt more, in the place of a group that was dropped; it is a stretch of its own."""
        if self._sampled:
            self._sampled, self._begun, self._waits = False, (time.time(), time.perf_counter()), None
        self._stretch[key], self._lacking[len(self._stretches)] = len(self._stretches), 1
        self._stretches.append(range(len(self.keys), len(self.keys) + 1))
        self.keys.append(key)
        self.prompts.append(prompt)
        self.feed.add(PromptBatch((tuple(prompt.tokens),), (key,)))

    @property
    def over(self) -> bool:
        """Whether every group was taken, and the rollout has ended."""
        return self._sampled and self._taken == len(self.keys)

    def take(self, trace: Trace, *, busy: bool = False) -> list[ScoredGroup]:
        """Groups with their scores, in the order of the data stream; those that are known since.

        Waits for the rollout; where it has ended, for scores.

        Args:
            busy: something else goes on that is to be looked at soon.

        Raises:
            Exception: what the rollout, an environment or the reward raised.
        """
        ended = self._sampled
        if not ended:
            self._receive(trace, _LOOK if busy or self._next in self._scoring else _PATIENCE)
        self._give()
        return self._scored(trace, wait=ended)

    def look(self, trace: Trace, seconds: float) -> tuple[list[ScoredGroup], bool]:
        """As `take`, without waiting for a score; and whether the rollout goes on."""
        if not self._sampled:
            self._receive(trace, seconds)
        if self.early:  # who shares memory with what goes on meanwhile waits for its end
            self._give()
        return self._scored(trace, wait=False), not self._sampled

    def _receive(self, trace: Trace, seconds: float) -> None:
        try:
            came = self.feed.take(seconds)
        except Exception:
            self._tell_failures(trace)
            raise
        for found in came:
            self.counts.update(found.counts)
            self._came |= {group.key: group for group in found.groups}
            for group in found.groups:
                stretch = self._stretch[group.key]
                self._lacking[stretch] -= 1
                if not self._lacking[stretch]:
                    self._whole.append(stretch)
        if not self.feed.ended:
            return
        self._sampled = True
        groups = [self._came[key] for key in self.keys[self._told :]]
        self._told = len(self.keys)
        rows = [sample for group in groups for sample in group.samples]
        told = {"trajectories": len(rows), "tokens": sum(row.generated for row in rows), "batch": self.batch}
        started, begin = self._begun
        trace.sink(Span("rollout", trace.step, started, time.perf_counter() - begin, told))
        self._waits = time.time(), time.perf_counter()
        if self.went_on:
            self._came = {group.key: group for group in self.went_on(groups, trace)}

    def _tell_failures(self, trace: Trace) -> None:
        """Of stretches whose turn does not come any more."""
        for _, (_, answer) in sorted(self._scoring.items()):
            if answer.done():
                try:
                    answer.result()
                except Exception as error:  # whatever it is, it is not what ends the call
                    line = str(error).partition("\n")[0]
                    trace.sink(Note(f"before the rollout ended, scoring had failed: {line}", time.time(), "warning"))
                    return

    def _give(self) -> None:
        """Hand whole stretches to the scorer."""
        if not (self._sampled or self.early):
            return
        for stretch in sorted(self._whole):
            chosen = self._stretches[stretch]
            none = (Score(None),) * self.samples
            groups = [ScoredGroup(self.prompts[at], self._came[self.keys[at]], none, self.batch) for at in chosen]
            self._scoring[stretch] = groups, self._begin(groups, chosen)
        self._whole.clear()

    def _begin(self, groups: Sequence[ScoredGroup], places: range) -> Future[Sequence[Score]]:
        scores = [score for group in groups for score in group.scores]
        if self.scorer is None:
            return Future(lambda: scores, lambda: True)
        prompts = [group.prompt for group in groups for _ in group.scores]
        answers = [answer for group in groups for answer in group.answers]
        total = max(self._first, places.stop)  # of those added later each counts when it is scored
        stretch = Stretch(places.start * self.samples, total * self.samples)
        return self.scorer.begin(prompts, answers, stretch)

    def _scored(self, trace: Trace, *, wait: bool) -> list[ScoredGroup]:
        found: list[ScoredGroup] = []
        while self._next in self._scoring:
            groups, answer = self._scoring[self._next]
            if not (wait or answer.done()):
                break
            del self._scoring[self._next]
            scores = iter(answer.result())
            found += [group.scored(tuple(next(scores) for _ in group.scores)) for group in groups]
            self._taken += len(groups)
            self._next += 1
        if found and self._taken == len(self.keys) and self.scorer:  # what scoring takes when the rollout has ended
            started, begin = self._waits or (time.time(), time.perf_counter())
            trace.sink(Span("reward", trace.step, started, time.perf_counter() - begin, {"batch": self.batch}))
        return found
