"""What a trainable role reports of one optimiser step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from posttrain.engine.batch import TokenBatch


@final
@dataclass(frozen=True, slots=True)
class Division:
    """What the sums of an update that came in parts are divided by, when its last part is there."""

    loss: float  # and the gradient
    metrics: float


@final
@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser step: `Update({"loss": 0.31, "grad_norm": 1.2, "learning_rate": 1e-5, "clip_fraction": 0.01})`.

    Metrics are those of the whole mini-batch, equal on every rank.
    """

    metrics: Mapping[str, float]
    batch: TokenBatch | None = None  # where it was asked for: with the log-probabilities that the step found

    @classmethod
    def gather(cls, parts: Sequence[Update], shards: Sequence[Sequence[int]], /) -> Update:
        """The metrics of any rank, the batches of all."""
        batches = [part.batch for part in parts if part.batch is not None]
        if len(batches) != len(parts):
            return parts[0]
        return replace(parts[0], batch=TokenBatch.gather(batches, shards))
