"""What the controller asks of a recipe, and how a recipe reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from posttrain.domain.facts import FactSink, Span
from posttrain.engine.journal import Journal
from posttrain.engine.weights.view import PolicyVersion


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
    else; `price` is never below what `step` then reports as spent.
    """

    phase: str  # "sft", "grpo"
    steps: int
    journal: Journal

    @property
    def roles(self) -> Learners:
        """Whose weights the recipe changes."""

    def price(self, step: int) -> int:
        """Tokens the coming step may spend at the most."""

    def step(self, step: int, trace: Trace, reserve: Reserve = ...) -> StepReport:
        """Do step `step` (0-based).

        Args:
            reserve: asked before the step may cost more than `price` said.
        """

    def serve(self, version: PolicyVersion) -> None:
        """Let whoever samples do it with the policy as it is, under this version."""

    def rewind(self) -> None:
        """Forget what a step began of which nothing is trained yet; it is done again by whoever goes on."""

    def save(self, path: Path) -> Mapping[str, str]:
        """Write what waits to be trained between two steps into a checkpoint; file name → digest."""

    def restore(self, path: Path) -> None:
        """Go on with it; the journal stands where the checkpoint says."""

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Measure the policy after `step` steps, if it is due; changes nothing."""

    def probe_price(self, step: int) -> int:
        """Tokens `probe(step)` may spend at the most; 0 when none is due."""
