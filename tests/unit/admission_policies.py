"""Another admission policy than the product's, for tests of what drives one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.pacing.admission import InOrder, Pace


@dataclass(frozen=True)
class Few:
    """The exact lag, but never more than so many prompts at once."""

    lag: int
    most: int

    def capacity(self, prompts: int) -> int:
        return InOrder(self.lag).capacity(prompts)

    def admit(self, pace: Pace) -> tuple[int, int]:
        if any(not entry.ready for entry in pace.held):
            return 0, 0
        batch, count = InOrder(self.lag).admit(pace)
        return batch, min(count, self.most)

    def select(self, pace: Pace) -> Sequence[int] | None:
        return InOrder(self.lag).select(pace)
