"""Passes over a data set as steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Passes:
    """`epochs` of a stage as a plan resolved them: `Passes(2, 250, documents=8000, per_step=64)`."""

    epochs: float
    steps: int
    documents: int
    per_step: int

    def __str__(self) -> str:
        plural = "" if self.steps == 1 else "s"
        return (
            f"epochs {self.epochs:g} = {self.steps} step{plural} ({self.documents} documents, {self.per_step} a step)"
        )


def passes_of(epochs: float, documents: int, per_step: int) -> Passes:
    """The least number of steps that take every document `epochs` times.

    The stream of documents goes on over the end of a pass (`engine.journal`), so no step is smaller than another, and
    the last one may take some of the next pass. Exact: `epochs` counts as the decimal number that was written.

    Args:
        epochs: > 0.
        documents: of the data set, >= 1.
        per_step: that a step takes, >= 1.
    """
    return Passes(epochs, math.ceil(Fraction(repr(epochs)) * documents / per_step), documents, per_step)
