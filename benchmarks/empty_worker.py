"""A worker that does nothing, in a module that every process can import."""

from __future__ import annotations

from typing import final

from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import RankContext


@final
class Empty:
    """A worker that does nothing."""

    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank

    def nothing(self) -> int:
        """Return an empty answer."""
        return self._rank

    def batch(self, batch: TokenBatch) -> TokenBatch:
        """Return the argument."""
        return batch
