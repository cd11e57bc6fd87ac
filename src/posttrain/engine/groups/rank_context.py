"""Where a worker finds itself: its rank, its device, and what its neighbours lend it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from posttrain.domain.errors import InputError

T = TypeVar("T")


@final
@dataclass(slots=True)
class RankContext:
    """One rank of a resource pool, as the workers in it see it: `RankContext("main", rank=1, size=2, device="cpu")`.

    Workers of several roles can stand in one place. They stay separate objects of separate classes; what one of them
    shares, it lends by type: the policy lends its model, and a rollout engine beside it decodes from those weights.
    """

    pool: str = "main"
    rank: int = 0
    size: int = 1
    device: str = "cpu"  # "cpu", "cuda:0"
    collective: bool = False  # whether torch.distributed's default group consists of exactly the pool's ranks
    sequence_parallel: int = 1  # consecutive ranks that compute one shard together
    _lent: dict[type[Any], Any] = field(default_factory=dict, repr=False)

    def lend(self, thing: object) -> None:
        """Share an object with the workers that come after; the next of the same type replaces it."""
        self._lent[type(thing)] = thing

    def borrow(self, kind: type[T]) -> T | None:
        """What a neighbour lent of this very type; None when nobody did."""
        found: T | None = self._lent.get(kind)
        return found

    def need_collectives(self, worker: str) -> None:
        """Refuse to go on where ranks could not talk to each other.

        Raises:
            InputError: several ranks without a process group.
        """
        if self.size > 1 and not self.collective:
            raise InputError(
                f"{worker} on {self.size} ranks needs a process group, got ranks inside one process; "
                "place it in a Ray pool or on 1 rank"
            )
