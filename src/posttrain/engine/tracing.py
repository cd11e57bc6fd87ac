"""What a step says of itself: spans, its report, and the whole way of a few samples (`posttrain trace --sample`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from posttrain.domain.facts import FactSink, Sample, Span
from posttrain.engine.algorithms.losses import is_clipped
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.rewards.port import Score
from posttrain.engine.samples import Trajectory


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did: `StepReport(tokens=5120, metrics={"reward/mean": 0.41})`."""

    tokens: int  # spent, by the rule of `facts.Progress`
    metrics: Mapping[str, float]
    took: Mapping[str, float] = field(default_factory=dict)  # of the machine's doing: told, and part of no result


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of one step."""

    sink: FactSink
    step: int

    @contextmanager
    def span(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a hand-off; what is put into the yielded dictionary becomes the span's attributes."""
        attributes: dict[str, Any] = {}
        started, begin = time.time(), time.perf_counter()
        try:
            yield attributes
        finally:
            self.sink(Span(name, self.step, started, time.perf_counter() - begin, attributes))


@final
@dataclass(slots=True)
class SampleTracer:
    """Follows the first groups of a step.

    Args:
        groups: those that it follows.
        step: 0-based.
        unused: why a sample with a score may be in no update.
        clip: how far a ratio may leave 1, downwards and upwards; None: the loss has no such clip.
        dropped: why groups were dropped, by their place in the data stream.
    """

    groups: Sequence[ScoredGroup]
    step: int
    unused: str
    clip: tuple[float, float] | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    _names: frozenset[str] = frozenset()
    _consumed: dict[str, tuple[str, TokenBatch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = frozenset(name for group in self.groups for name in group.ids)

    def wants(self, batch: TokenBatch) -> bool:
        """Whether a mini-batch holds a sample that is followed."""
        return not self._names.isdisjoint(batch.sample_ids)

    def consumed(self, batch: TokenBatch | None, part: int) -> None:
        """Note the mini-batch as the update found it; the first update of a sample counts."""
        if batch is None:
            return
        for place, name in enumerate(batch.sample_ids):
            if name in self._names and name not in self._consumed:
                alone = replace(batch, units=None).select([place])
                self._consumed[name] = (f"update {self.step}, mini-batch {part}", alone)

    def report(self, trace: Trace, text: Callable[[Trajectory], str]) -> None:
        """Say what became of every sample that is followed.

        Args:
            text: what a response says.
        """
        for fact in self._samples(text):
            trace.sink(fact)

    def _samples(self, text: Callable[[Trajectory], str]) -> Iterator[Sample]:
        for group in self.groups:
            for name, answer, score in zip(group.ids, group.answers, group.scores, strict=True):
                fate = self.dropped.get(group.group.key, self.unused)
                if score.score is None:
                    fate = f"no score{score.message and ': ' + score.message}"
                known = Sample(
                    id=name,
                    step=self.step,
                    prompt=group.prompt.text,
                    response=text(answer),
                    prompt_tokens=answer.prompt.tolist(),
                    tokens=answer.response.tolist(),
                    behaviour_logprobs=_rounded(answer.logprobs.tolist()),
                    truncated=answer.truncated,
                    versions=answer.versions,
                    reward=score.score,
                    fate=f"dropped: {fate}",
                    components=score.components,
                    status=score.status,
                    earned=_earned(answer, score),
                    observed=() if answer.sampled.all() else (~answer.sampled).tolist(),
                    temperature=answer.temperature,
                )
                yield self._with_update(known, *self._consumed[name]) if name in self._consumed else known

    def _with_update(self, known: Sample, fate: str, document: TokenBatch) -> Sample:
        columns, mask = document.token_columns, document.response_mask
        response = slice(max(len(document.tokens) - len(known.tokens), 0), None)
        if document.tokens[response].tolist() != list(known.tokens):  # its algorithm formed other tokens of it
            return replace(known, fate=fate)
        column = partial(_column, mask=mask, response=response)
        current, old = columns.get("current_logprobs"), columns.get("proximal_logprobs")
        old = columns.get("behaviour_logprobs") if old is None else old
        advantages, clipped = columns.get("advantages"), torch.zeros(0, dtype=torch.bool)
        if self.clip and advantages is not None and old is not None and current is not None:
            low, high = self.clip
            clipped = is_clipped(current, old, advantages, mask, clip_low=low, clip_high=high)[response]
        return replace(
            known,
            fate=fate,
            advantages=column(advantages),
            logprobs=column(current),
            ratios=() if old is None or current is None else column((current - old).exp()),
            clipped=[bool(one) for one in clipped.tolist()],
            reference_logprobs=column(columns.get("reference_logprobs")),
            values=column(columns.get("values")),
            returns=column(columns.get("returns")),
        )


def _earned(answer: Trajectory, score: Score) -> Sequence[float]:
    """[r] what of the reward stands where; nothing where all of it stands at the end."""
    if score.score is None or not score.at:
        return ()
    found = [score.at.get(token, 0.0) for token in range(len(answer.response))]
    found[answer.turn_spans[-1][1] - 1] += score.score - math.fsum(score.at.values())
    return _rounded(found)


def _column(values: Tensor | None, mask: Tensor, response: slice) -> Sequence[float]:
    """[r], 0 at observed tokens."""
    return () if values is None else _rounded(values.masked_fill(~mask, 0)[response].to(torch.float64).tolist())


def _rounded(values: Sequence[float]) -> list[float]:
    """Seven digits: what float32 holds."""
    return [float(f"{value:.7g}") for value in values]
