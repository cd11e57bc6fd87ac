"""What every engine in this process keeps of its work: the ids, whether it is paused, which version samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Generation, InFlight


@final
class Intake:
    """Holds what is submitted against what the port promises. Weights are read in place: one policy, updated paused.

    Args:
        reads_text: whether the engine knows what its tokens say, without which no response ends at a string.
    """

    def __init__(self, name: str, context_length: int, *, reads_text: bool = False) -> None:
        self._name, self._context_length, self._reads_text = name, context_length, reads_text
        self._ids: set[str] = set()
        self.paused = False
        self.version = ""

    def take(self, work: Sequence[Generation]) -> None:
        """Note new work.

        Raises:
            InputError: see `RolloutEngine.submit`.
        """
        ids: set[str] = set()
        for generation in work:
            self._served(generation.policy)
            if generation.id in self._ids or generation.id in ids:
                raise InputError(f"generation {generation.id} must have an id of its own, got one in work already")
            if generation.sampling.stop and not self._reads_text:
                raise InputError(
                    f"generation {generation.id} must have no stop strings, got {generation.sampling.stop[0]!r}: "
                    f"rollout engine {self._name} was opened without a tokenizer; open it with one"
                )
            total = len(generation.tokens) + generation.limit
            if total > self._context_length:
                raise InputError(
                    f"generation {generation.id} must fit the context of {self._context_length} tokens, "
                    f"got {len(generation.tokens)} + {generation.limit}; shorten the prompt or the limit"
                )
            ids.add(generation.id)
        self._ids |= ids

    def give(self, ids: Iterable[str]) -> None:
        """These have been answered."""
        self._ids.difference_update(ids)

    def update(self, policy: str, version: str, in_flight: InFlight, begun: int) -> None:
        """See `RolloutEngine.update`; `begun` responses would go on."""
        self._served(policy)
        if not self.paused:
            raise InputError(
                f"rollout engine {self._name} reads weights in place and must be paused to update to {version}, "
                "got one at work; call pause first"
            )
        if begun and in_flight == "finish":
            raise InputError(
                f"rollout engine {self._name} reads weights in place, so none may have begun to finish under the old "
                f"ones, got {begun}; update with recompute or keep_kv, or take them first"
            )
        self.version = version

    def _served(self, policy: str) -> None:
        if policy:
            raise InputError(f"rollout engine {self._name} serves one policy, got {policy}; leave the policy away")
