"""What a picture is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurveSeries:
    """One line: a quantity of one run, e.g. `CurveSeries("held-out accuracy", "run A", (0, 60), (0.4, 0.97))`."""

    quantity: str  # the panel it belongs to; panels appear in the order of their first series
    run: str  # the legend's entry; a run has one colour in all panels
    steps: Sequence[float]  # [points], ascending
    values: Sequence[float]  # [points]; a NaN breaks the line
    low: Sequence[float] | None = None  # [points] confidence limits, both or none
    high: Sequence[float] | None = None
    smooth: tuple[Sequence[float], Sequence[float]] | None = None  # steps and running means, before thinning
    metric: str = ""  # as it was recorded, which says how its axis is drawn; empty: the quantity


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """Where a stage begins, on the axis of steps."""

    step: float
    name: str
