"""What the controller asks of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from posttrain.engine.journal import Journal
from posttrain.engine.tracing import StepReport, Trace
from posttrain.engine.weights.view import PolicyVersion


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
