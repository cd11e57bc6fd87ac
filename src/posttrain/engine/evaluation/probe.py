"""Held-out measurements during training, of a few items: for the learning curve, and for what a stage selects by them.
No gate reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

from transformers import PreTrainedTokenizerBase

from posttrain.engine.evaluation.answers import Extractor, is_correct, reference_answer
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.rollout.batches import PromptBatch
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.settings import LossProbeConfig
from posttrain.engine.tracing import StepReport, Trace

W_contra = TypeVar("W_contra", contravariant=True)
W = TypeVar("W")


class Measurement(Protocol[W_contra]):
    """A held-out measurement during training, through the workers that can make it."""

    max_tokens: int  # tokens it may spend at the most

    def __call__(self, workers: W_contra, /) -> StepReport:
        """Measure; spends at most `max_tokens` tokens."""


Probe = Measurement[WorkerGroup[RolloutWorker]]


@final
@dataclass(frozen=True, slots=True)
class ProbeSchedule(Generic[W]):
    """When a recipe measures its model: before the first step, every `every` steps, and at the end.

    Args:
        probe: None: never.
        every: steps between measurements.
        last: the number of steps of the stage.
    """

    probe: Measurement[W] | None
    every: int
    last: int

    @classmethod
    def of(cls, probe: Measurement[W] | None, config: LossProbeConfig | None, last: int) -> ProbeSchedule[W]:
        """As the stage's configuration says."""
        return cls(probe, config.every, last) if config else cls(None, 1, last)

    def max_tokens(self, step: int) -> int:
        """Tokens it may spend after `step` steps; 0 where none is due."""
        return self.probe.max_tokens if self.probe and self._due(step) else 0

    def measure(self, step: int, trace: Trace, workers: W) -> StepReport | None:
        """What the model can after `step` steps, if that is due."""
        if self.probe is None or not self._due(step):
            return None
        with trace.span("probe"):
            return self.probe(workers)

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last


@final
class AccuracyProbe:
    """That of what samples: greedy answers to fixed items.

    Args:
        items: prompts whose rows have an `answer`.
        extract: a regular expression with a group; what to compare with it.
        max_new_tokens: per answer.
        stop: strings that an answer ends at.
        name: how errors call the data set.

    Raises:
        InputError: a row has no usable answer.
    """

    def __init__(
        self,
        items: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        extract: str,
        max_new_tokens: int,
        stop: tuple[str, ...] = (),
        name: str = "probe",
    ) -> None:
        self._items, self._tokenizer = items, tokenizer
        self._extract, self._limit, self._stop = Extractor(extract), max_new_tokens, stop
        self._answers = [reference_answer(item.row, name, number) for number, item in enumerate(items, start=1)]
        self.max_tokens = sum(len(item.tokens) + max_new_tokens for item in items)

    def __call__(self, rollout: WorkerGroup[RolloutWorker], /) -> StepReport:
        """Greedy accuracy of the weights as they are."""
        prompts = PromptBatch(tuple(tuple(item.tokens) for item in self._items), tuple(range(len(self._items))))
        sampling = SamplingParams(max_new_tokens=self._limit, greedy=True, stop=self._stop)
        found = rollout.map(RolloutWorker.generate, prompts, sampling, 1).trajectories
        answered = zip(found, self._answers, strict=True)
        correct = sum(is_correct(self._extract(self._text(t)), answer) for t, answer in answered)
        tokens = sum(len(t.prompt) + t.generated for t in found)
        return StepReport(tokens, {"probe/accuracy": correct / len(self._items)})

    def _text(self, trajectory: Trajectory) -> str:
        return decode_response(self._tokenizer, trajectory.response.tolist(), ended=trajectory.closed)
