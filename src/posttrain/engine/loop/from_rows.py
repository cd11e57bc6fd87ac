"""The stage of an algorithm that learns from rows as they are: demonstrations, preferences, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar, final

from posttrain.domain.seeds import derive_seed
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import RowsConfig
from posttrain.engine.evaluation.probe import ProbeSchedule
from posttrain.engine.journal import Journal
from posttrain.engine.loop.learning import Learning
from posttrain.engine.loop.recipe import Reserve, free
from posttrain.engine.loop.roles import Roles
from posttrain.engine.recipes.algorithm import RowAlgorithm
from posttrain.engine.tracing import StepReport, Trace
from posttrain.engine.weights.view import PolicyVersion

R = TypeVar("R")


@final
class LossProbe:
    """That of what learns from rows: its own objective on held-out ones, without dropout.

    Args:
        batch: they.
    """

    max_tokens = 0  # nothing is answered or trained on

    def __init__(self, batch: TokenBatch) -> None:
        self._batch = batch

    def __call__(self, learning: Learning, /) -> StepReport:
        """`probe/loss` of the weights as they are, and what the objective reports besides."""
        return StepReport(self.max_tokens, learning.measure(self._batch))


class FromRows(Generic[R]):
    """The recipe around an algorithm that reads rows.

    Args:
        config: the stage's parameters.
        algorithm: what it does.
        roles: who learns, and fills columns.
        rows: all of them.
        seed: the stage's seed.
        held_out: rows that its objective is measured on meanwhile.
        phase: what its progress is called.

    Raises:
        InputError: the algorithm needs a role that is not there.
    """

    def __init__(
        self,
        config: RowsConfig,
        algorithm: RowAlgorithm[R],
        roles: Roles,
        rows: Sequence[R],
        seed: int,
        held_out: Sequence[R] = (),
        *,
        phase: str = "train",
    ) -> None:
        self.phase, self.steps, self.roles = phase, config.steps, roles
        self.journal = Journal(len(rows), seed)
        self._algorithm, self._rows, self._seed = algorithm, rows, seed
        self._learning = Learning(algorithm, roles, config.steps, seed)
        probe = LossProbe(algorithm.form(held_out, derive_seed(seed, "probe"))) if held_out else None
        self._probe = ProbeSchedule.of(probe, config.probe, config.steps)
        roles.rest()

    def max_tokens(self, step: int) -> int:
        """Exactly the tokens of the coming batch, as often as it is trained on."""
        rows = self.journal.peek(self._algorithm.source.rows)
        return self._learning.max_tokens(step, sum(self._algorithm.max_tokens(self._rows[row]) for row in rows))

    def step(self, step: int, trace: Trace, reserve: Reserve = free) -> StepReport:
        """One batch."""
        with trace.span("pack") as span:
            rows = [self._rows[row] for _, row in self.journal.take(self._algorithm.source.rows)]
            batch = self._algorithm.form(rows, derive_seed(self._seed, "form", step))
            span |= {"tokens": sum(batch.lengths), "response_tokens": int(batch.response_mask.sum())}
        learned = self._learning.learn(batch, step, trace)
        return StepReport(learned.tokens, learned.metrics)

    def publish_weights(self, version: PolicyVersion) -> None:
        """Nobody samples."""

    def rewind(self) -> None:
        """It begins nothing that it does not train."""

    def save(self, path: Path) -> Mapping[str, str]:
        """Nothing waits between two steps."""
        return {}

    def restore(self, path: Path) -> None:
        """Nothing did."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """The held-out measurement, where one is due."""
        return self._probe.measure(step, trace, self._learning)

    def probe_max_tokens(self, step: int) -> int:
        """Free: reading without answering or training counts nowhere (`facts.Progress`)."""
        return self._probe.max_tokens(step)
