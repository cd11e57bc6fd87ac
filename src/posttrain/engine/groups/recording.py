"""Every call to a worker group becomes one span: which ranks were busy when, and how many bytes moved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from posttrain.domain.facts import Fact, FactSink, Span
from posttrain.engine.groups.port import Answer


def _nowhere(fact: Fact) -> None:
    """A sink for those who do not look."""


@final
@dataclass(slots=True)
class Recorder:
    """Where a run's groups report their calls. The controller sets `step` before each."""

    sink: FactSink = field(default=_nowhere)
    step: int = 0

    def call(
        self,
        role: str,
        pool: str,
        method: str,
        ranks: Sequence[int],
        answers: Sequence[Answer[Any]],
        begun: tuple[float, float],
        imbalance: float,
    ) -> None:
        """Say that a call has been answered; `begun` is its wall-clock and its performance-counter time."""
        if self.sink is _nowhere:
            return
        attributes = {
            "kind": "call",
            "role": role,
            "method": method,
            "pool": pool,
            "ranks": [[rank, a.started, a.seconds] for rank, a in zip(ranks, answers, strict=True)],
            "bytes_out": sum(a.bytes_out for a in answers),
            "bytes_in": sum(a.bytes_in for a in answers),
            "imbalance": imbalance,
        }
        self.sink(Span(f"{role}.{method}", self.step, begun[0], time.perf_counter() - begun[1], attributes))
