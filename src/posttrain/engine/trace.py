"""Spans of a step, its report, and the traces of a few samples (`posttrain trace --sample`)."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from posttrain.domain.jobs import FactSink, Note, Sample, Span, fact_to_json
from posttrain.engine.algorithms.objectives import is_clipped
from posttrain.engine.batch import TokenBatch
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Trajectory
from posttrain.sandbox.port import Score

_FEW, _LEAST = 500, 20  # minimum bytes of a sample without tokens, and of a token with two numbers and its text


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step: `StepReport(tokens=5120, metrics={"reward/mean": 0.41})`."""

    tokens: int  # spent, by the rule of `jobs.Progress`
    metrics: Mapping[str, float]
    took: Mapping[str, float] = field(default_factory=dict)  # machine-dependent metrics; reported, but in no result


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of one step."""

    sink: FactSink
    step: int

    @contextmanager
    def span(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a hand-off; entries added to the yielded dictionary become the span's attributes."""
        attributes: dict[str, Any] = {}
        started, begin = time.time(), time.perf_counter()
        try:
            yield attributes
        finally:
            self.sink(Span(name, self.step, started, time.perf_counter() - begin, attributes))


@final
@dataclass(slots=True)
class TraceBudget:
    """The maximum number of bytes that a stage's samples may take in the trace.

    A tenth is available at the first step, and the rest is added evenly with the steps. A resume at a step counts the
    bytes available before that step as spent, so all attempts together stay within the limit.
    """

    most: int
    steps: int
    _spent: int | None = None
    dropped: int = 0  # samples left out since the stage began or was resumed

    def takes(self, step: int, size: int, *, spend: bool) -> bool:
        """Return whether a sample of `size` bytes is within the limit at a step (0-based)."""
        if self._spent is None:
            self._spent = self._there(step - 1) if step else 0
        fits = self._spent + size <= self._there(step)
        self._spent += size if fits and spend else 0
        return fits

    def _there(self, step: int) -> int:
        return self.most * (self.steps + 9 * (step + 1)) // (10 * self.steps)


@final
@dataclass(slots=True)
class SampleTracer:
    """Traces the first groups of a step, within the stage's bytes.

    Args:
        groups: the traced groups.
        step: 0-based.
        budget: the stage's limit of bytes.
        unused: returns why a sample with a score is in no update.
        clip: clip of the ratio below and above 1; None: the loss has no clip.
        dropped: position in the data stream → why the group was dropped.
    """

    groups: Sequence[ScoredGroup]
    step: int
    budget: TraceBudget
    unused: str
    clip: tuple[float, float] | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _left: int = 0
    _consumed: dict[str, tuple[str, TokenBatch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = ((name, answer) for group in self.groups for name, answer in zip(group.ids, group.answers, strict=True))
        size = 0
        for name, answer in each:
            more = _FEW + _LEAST * len(answer)
            if self.budget.takes(self.step, size + more, spend=False):
                size += more
                self._names.add(name)
            else:
                self._left += 1

    def wants(self, batch: TokenBatch) -> bool:
        """Return whether a mini-batch contains a traced sample."""
        return not self._names.isdisjoint(batch.sample_ids)

    def consumed(self, batch: TokenBatch | None, part: int) -> None:
        """Record the mini-batch that an update received; only the first update of each sample is recorded."""
        if batch is None:
            return
        for place, name in enumerate(batch.sample_ids):
            if name in self._names and name not in self._consumed:
                alone = replace(batch, units=None).select([place])
                self._consumed[name] = (f"update {self.step}, mini-batch {part}", alone)

    def report(self, trace: Trace, text: Callable[[Trajectory], str]) -> int:
        """Write the traces of all traced samples.

        Args:
            text: returns the text of a response.

        Returns:
            The number of samples left out because the stage's bytes are spent.
        """
        for fact in self._samples(text):
            size = len(json.dumps(fact_to_json(fact), ensure_ascii=False).encode())  # as the sink writes the fact
            if self.budget.takes(self.step, size, spend=True):
                trace.sink(fact)
            else:
                self._left += 1
        if self._left and not self.budget.dropped:
            line = (
                f"{self._left} samples of step {self.step} were not traced, because trace.bytes ({self.budget.most}) "
                "is too small for all samples that the stage traces; raise trace.bytes or lower trace.groups; "
                "trace/dropped counts these samples"
            )
            trace.sink(Note(line, time.time(), "warning"))
        self.budget.dropped += self._left
        if self.budget.dropped and self.step == self.budget.steps - 1:
            told = f"{self.budget.dropped} samples were not traced, because trace.bytes is {self.budget.most}"
            trace.sink(Note(told, time.time(), "warning"))
        return self._left

    def _samples(self, text: Callable[[Trajectory], str]) -> Iterator[Sample]:
        for group in self.groups:
            for name, answer, score in zip(group.ids, group.answers, group.scores, strict=True):
                if name not in self._names:
                    continue
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
                    behaviour_logprobs=answer.logprobs.tolist(),
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
        if document.tokens[response].tolist() != list(known.tokens):  # the algorithm changed the tokens
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
    """Return the reward earned at each token, [r]; empty if all of it was earned at the end."""
    if score.score is None or not score.at:
        return ()
    found = [score.at.get(token, 0.0) for token in range(len(answer.response))]
    found[answer.turn_spans[-1][1] - 1] += score.score - math.fsum(score.at.values())
    return found


def _column(values: Tensor | None, mask: Tensor, response: slice) -> Sequence[float]:
    """Return the values of the response, [r], 0 at observed tokens."""
    if values is None:
        return ()
    found: list[float] = values.masked_fill(~mask, 0)[response].tolist()
    return found
