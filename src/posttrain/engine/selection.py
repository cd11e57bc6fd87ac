"""What a stage's probe decides: when to stop, and which step was the best.

Both are functions of the probe's values in order, which are functions of the weights, so a resumed job decides as the
undisturbed one. A checkpoint at step N holds what the probes before step N said; the one at step N is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from posttrain.domain.errors import FailureClass, JobFailedError
from posttrain.engine.config import TrainingConfig
from posttrain.engine.settings import EarlyStoppingConfig


class UnmeasuredError(JobFailedError):
    """A probe gave no number to compare."""

    failure_class = FailureClass.DIVERGED


@dataclass(frozen=True, slots=True)
class Standing:
    """How the probes stand so far; plain JSON in a checkpoint."""

    best: float | None = None  # the best value; None: not probed yet
    step: int = 0  # that had it first: of equal values the earliest is kept
    counted: float | None = None  # what an improvement must exceed by `min_delta`
    missed: int = 0  # probes since the last improvement


@dataclass(slots=True)
class Selection:
    """Compares the values of one metric.

    Args:
        metric: of the probe.
        lower: whether small values are good.
        stopping: when to stop; None: never.
    """

    metric: str
    lower: bool
    stopping: EarlyStoppingConfig | None = None
    standing: Standing = field(default_factory=Standing)

    @classmethod
    def of(cls, config: TrainingConfig) -> Selection | None:
        """As the stage's configuration says; None where its probe decides nothing."""
        if config.probe is None or not (config.early_stopping or config.keep_best):
            return None
        return cls(config.selects_by, config.lower_is_better, config.early_stopping)

    def see(self, step: int, values: Mapping[str, float]) -> bool:
        """Take in the probe after `step` steps; whether it is better than every one before.

        Raises:
            UnmeasuredError: its value is not finite.
        """
        value, before = values[self.metric], self.standing
        if not math.isfinite(value):
            raise UnmeasuredError(f"{self.metric} at step {step} must be finite, got {value}; lower the learning rate")
        better = before.best is None or self._gain(value, before.best) > 0
        least = self.stopping.min_delta if self.stopping else 0.0
        improved = before.counted is None or self._gain(value, before.counted) > least
        now = replace(before, best=value, step=step) if better else before
        self.standing = replace(now, counted=value, missed=0) if improved else replace(now, missed=before.missed + 1)
        return better

    @property
    def over(self) -> bool:
        """Whether the stage is to stop."""
        return self.stopping is not None and self.standing.missed >= self.stopping.patience

    def told(self, step: int, total: int) -> str:
        """Why a stage ends at `step`, in one sentence."""
        assert self.stopping is not None
        now, least = self.standing, self.stopping.min_delta
        better = f"better than {now.counted:.4g}" + (f" by more than {least:g}" if least else "")
        probes = f"{now.missed} probe{'s' if now.missed > 1 else ''}"
        return (
            f"stopped early at step {step} of {total}: {self.metric} was not {better} in {probes}; "
            f"the best was {now.best:.4g} at step {now.step}"
        )

    def metrics(self, stopped_at: int | None = None) -> dict[str, float]:
        """What a stage's result says of it."""
        if self.standing.best is None:
            return {}
        found = {"best/step": float(self.standing.step), f"best/{self.metric}": self.standing.best}
        return found if stopped_at is None else {**found, "stopped_early/step": float(stopped_at)}

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self.standing)

    def resume(self, value: Mapping[str, Any] | None) -> Self:
        """Go on from what a checkpoint holds."""
        self.standing = Standing(**value) if value else Standing()
        return self

    def _gain(self, value: float, other: float) -> float:
        return other - value if self.lower else value - other
