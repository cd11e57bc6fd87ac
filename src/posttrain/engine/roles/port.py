"""The port between a role that learns and its engine.

`TrainEngine` is the interface that the role requires of the engine. `Update` is the result of an optimiser step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

from posttrain.engine.algorithms.objectives import Objective
from posttrain.engine.batch import Need, Predictions, TokenBatch
from posttrain.engine.models.logprobs import Model
from posttrain.engine.models.sharding import Shard


@final
@dataclass(frozen=True, slots=True)
class Division:
    """The divisors for the sums of an update that is computed in parts; they are applied after the last part."""

    loss: float  # divides the loss and the gradient
    metrics: float


@final
@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser step: `Update({"loss": 0.31, "grad_norm": 1.2, "learning_rate": 1e-5, "clip_fraction": 0.01})`.

    The metrics are those of the whole mini-batch, and are equal on every rank.
    """

    metrics: Mapping[str, float]
    batch: TokenBatch | None = None  # on request, with the log-probabilities before the step

    @classmethod
    def gather(cls, parts: Sequence[Update], shards: Sequence[Sequence[int]], /) -> Update:
        """Return the metrics, which are equal on all ranks, and the gathered batch."""
        batches = [part.batch for part in parts if part.batch is not None]
        if len(batches) != len(parts):
            return parts[0]
        return replace(parts[0], batch=TokenBatch.gather(batches, shards))


class TrainEngine(Protocol):
    """One rank of a model in training, with its optimiser.

    Every implementation:

    * is called by all ranks in the same order (`forward`, `step` and `write_model` are collective, even for a rank with
      an empty shard), and predicts and updates as one rank with all shards would, up to rounding;
    * sums gradients over ranks and micro-batches: the objective has divided them by the totals of the mini-batch;
    * sums the gradients of a mini-batch that arrives in parts (`more`), and divides them once;
    * changes no weight, moment or gradient when a step diverges;
    * exports each element of each tensor from exactly one rank, under the names and in the layout of the Hugging Face
      module, tied tensors once; tensors that the engine fuses, transposes or splits are exported in original form;
    * continues from a checkpoint bit for bit with the same number of ranks, and up to rounding with a different number.

    `contract` tests this list for any engine.
    """

    def forward(self, batch: TokenBatch, needs: Set[Need]) -> Predictions:
        """Return the model's current predictions, without gradients or dropout, in the order of the batch.

        Raises:
            InputError: the model does not predict a need.
        """

    def step(
        self,
        batch: TokenBatch,
        objective: Objective,
        *,
        step: int,
        part: int = 0,
        record: bool = False,
        more: bool = False,
        divide: Division | None = None,
    ) -> Update:
        """Do one optimiser step of all ranks on a mini-batch; this rank has a shard of the mini-batch.

        Args:
            batch: the shard.
            objective: the loss, with the totals of the whole mini-batch.
            step: 0-based stage step, for the schedule and the dropout key.
            part: number of the mini-batch in the step.
            record: also return the batch; if the objective needs log-probabilities, those before the step are in the
                column `current_logprobs`.
            more: whether parts of the mini-batch follow: gradients and sums are kept and added to those of the next
                call. Part 0 begins a mini-batch, and drops an incomplete earlier one.
            divide: the divisors of gradients, loss and metrics of all parts, applied before gradients are clipped.

        Raises:
            DivergedError: loss or gradient is NaN or infinite on any rank.
            InputError: the model does not predict a need of the objective.
        """

    def export(self) -> Iterator[Shard]:
        """Yield this rank's pieces, at the optimiser's precision, without copies. Not collective."""

    def save(self, path: Path, role: str) -> dict[str, str]:
        """Write this rank's part of a checkpoint, durably; return a map from file name to digest."""

    def restore(self, path: Path, role: str) -> None:
        """Continue from a verified checkpoint, written by any number of ranks.

        Raises:
            IntegrityError: the checkpoint does not fit the model.
        """

    def write_model(self, folder: Path) -> None:
        """Write weights and configuration in Hugging Face format, in the stage's dtype."""

    @property
    def model(self) -> Model:
        """The model with its detected capabilities; on a single rank its weights are whole and readable in place."""
