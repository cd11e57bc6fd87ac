"""What recipes are given: prompts, whoever scores responses, and measurements on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, final

from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.rewards.port import Score
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Trajectory
from posttrain.engine.settings import LossProbeConfig

_NAMED = re.compile(r"[\w.+-][\w.+ /-]{0,63}", re.ASCII)  # a component whose name may be part of a metric's


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row, ready to sample from: `Prompt(tokens=(1, 5, 9), text="user: Q: sort 31", row={"answer": "13", …})`."""

    tokens: Sequence[int]
    text: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores responses. Wraps a reward function and the tokenizer, or a reward model."""

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One score per trajectory; `prompts` is parallel to it."""

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""


W_contra = TypeVar("W_contra", contravariant=True)
W = TypeVar("W")


class Measurement(Protocol[W_contra]):
    """A held-out measurement during training, through the workers that can make it."""

    price: int  # tokens it may spend at the most

    def __call__(self, workers: W_contra, /) -> StepReport:
        """Measure; spends at most `price` tokens."""


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

    def price(self, step: int) -> int:
        """Tokens it may spend after `step` steps; 0 where none is due."""
        return self.probe.price if self.probe and self._due(step) else 0

    def measure(self, step: int, trace: Trace, workers: W) -> StepReport | None:
        """What the model can after `step` steps, if that is due."""
        if self.probe is None or not self._due(step):
            return None
        with trace.span("probe"):
            return self.probe(workers)

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last
