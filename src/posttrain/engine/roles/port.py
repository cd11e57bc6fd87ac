"""Port of a role that learns: the engine that holds its weights, and the report of one optimiser step.

`TrainEngine` is what the role asks of the engine. `Update` is what a trainable role reports of a step.
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


class TrainEngine(Protocol):
    """One rank of a model in training, with its optimiser.

    Every implementation:

    * is called by all ranks in the same order (`forward`, `step` and `write_model` are collective, whatever a rank's
      shard; one may be empty), and predicts and updates what one rank with all shards would, up to rounding;
    * sums gradients over ranks and micro-batches: the objective has divided them by the totals of the whole;
    * sums the gradients of a mini-batch that comes in parts (`more`), and divides them once;
    * changes nothing, weights, moments and gradients, where a step diverges;
    * exports each element of each tensor from exactly one rank, under the names and in the layout of the Hugging Face
      module, tied tensors once: what is fused, transposed or split inside comes out as it was read;
    * goes on from a checkpoint bit for bit, and from another number of ranks' up to rounding.

    `contract` is this list as functions, for an engine of your own.
    """

    def forward(self, batch: TokenBatch, needs: Set[Need]) -> Predictions:
        """What the model predicts as it is, without gradients and dropout, in the order of the batch.

        Raises:
            InputError: it predicts no such thing.
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
        """One optimiser step of all ranks on a mini-batch, of which this rank has a shard.

        Args:
            batch: the shard.
            objective: knows the totals of the whole mini-batch.
            step: 0-based stage step, for the schedule and the dropout key.
            part: which mini-batch of the step.
            record: also return the batch, with the log-probabilities that the step found as `current_logprobs` where
                the objective needs any.
            more: the mini-batch has not come whole: gradients and sums are kept, and added to those of the next call.
                Part 0 begins one; what is left of another then goes.
            divide: what gradients, loss and metrics of all its parts are divided by, before gradients are clipped.

        Raises:
            DivergedError: loss or gradient is NaN or infinite on any rank.
            InputError: the model predicts nothing of what the objective needs.
        """

    def export(self) -> Iterator[Shard]:
        """The pieces that this rank holds, as the optimiser keeps them. Not copies, and not collective."""

    def save(self, path: Path, role: str) -> dict[str, str]:
        """Write this rank's part of a checkpoint, on the disk when it returns; file name → digest."""

    def restore(self, path: Path, role: str) -> None:
        """Go on from a verified checkpoint, whatever number of ranks wrote it.

        Raises:
            IntegrityError: it does not fit the model.
        """

    def write_model(self, folder: Path) -> None:
        """Write weights and configuration in the Hugging Face format, in the type that the stage asks for."""

    @property
    def model(self) -> Model:
        """What it found out about the model; whole weights, to be read in place, where this is the only rank."""
