"""What the controller asks of a recipe.

What was consumed, and in which order: the data cursor.

The order is an infinite stream: epoch 0's permutation, then epoch 1's, and so on, each derived from (seed, epoch).
The whole state is one number, how many documents were taken; so resuming anywhere, at an epoch boundary too, equals
never having stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.engine.tracing import StepReport, Trace
from posttrain.engine.weights.stream import PolicyVersion


class Journal:
    """A cursor over `documents` rows.

    Args:
        documents: rows of the data set.
        seed: the stage's seed.
        consumed: documents already taken, as a checkpoint recorded it.

    Raises:
        InputError: no documents.
    """

    def __init__(self, documents: int, seed: int, consumed: int = 0) -> None:
        if documents < 1:
            raise InputError(f"a data set must have at least 1 row to train on, got {documents}")
        self.documents = documents
        self.consumed = consumed
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def peek(self, count: int) -> list[int]:
        """Row numbers of the next `count` documents.

        A stretch may cross into the next epoch, and then may repeat a row.
        """
        return [self.row(position) for position in range(self.consumed, self.consumed + count)]

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` documents as (position in the stream, row number), and move past them.

        A position never repeats within a run, so it keys random numbers where a row number could not.
        """
        rows = self.peek(count)
        start, self.consumed = self.consumed, self.consumed + count
        return list(enumerate(rows, start))

    def row(self, position: int) -> int:
        """The row that stands at a position of the stream."""
        epoch, offset = divmod(position, self.documents)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "journal", epoch)))
            self._epoch, self._order = epoch, generator.permutation(self.documents).tolist()
        return self._order[offset]


class Reserve(Protocol):
    """Asked before a step costs more than was said of it."""

    def __call__(self, spent: int, more: int, *, refuse: bool = True) -> bool:
        """Whether the tokens that a step has spent and those that it may spend besides are within the budget.

        Args:
            refuse: raise where they are not; nothing of the step may be trained yet.

        Raises:
            BudgetExceededError: they are not. What the step began was forgotten, and a checkpoint written.
        """


def free(spent: int, more: int, *, refuse: bool = True) -> bool:
    """Reserves whatever it may cost."""
    return True


class Learners(Protocol):
    """The roles that a checkpoint must cover, written and read by the ranks themselves."""

    def fallbacks(self) -> Mapping[str, str]:
        """Slower ways that their models must go, by name, each with the reason."""

    def save(self, path: Path, /) -> Mapping[str, str]:
        """Write every rank's part of a checkpoint; file name → digest."""

    def restore(self, path: Path, /) -> None:
        """Go on from a verified checkpoint."""


class Recipe(Protocol):
    """A training method.

    Every implementation: what step N does is a function of (seed, N, weights, moments, journal position) and nothing
    else; `max_tokens` is never below what `step` then reports as spent.
    """

    phase: str  # "sft", "grpo"
    steps: int
    journal: Journal

    @property
    def roles(self) -> Learners:
        """Whose weights the recipe changes."""

    def max_tokens(self, step: int) -> int:
        """Tokens the coming step may spend at the most."""

    def step(self, step: int, trace: Trace, reserve: Reserve = ...) -> StepReport:
        """Do step `step` (0-based).

        Args:
            reserve: asked before the step may cost more than `max_tokens` said.
        """

    def publish_weights(self, version: PolicyVersion) -> None:
        """Let whoever samples do it with the policy as it is, under this version."""

    def rewind(self) -> None:
        """Forget what a step began of which nothing is trained yet; it is done again by whoever goes on."""

    def save(self, path: Path) -> Mapping[str, str]:
        """Write what waits to be trained between two steps into a checkpoint; file name → digest."""

    def restore(self, path: Path) -> None:
        """Go on with it; the journal stands where the checkpoint says."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Measure the policy after `step` steps, if it is due; changes nothing."""

    def probe_max_tokens(self, step: int) -> int:
        """Tokens `probe(step)` may spend at the most; 0 when none is due."""
