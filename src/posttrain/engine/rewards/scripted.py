"""The fake reward: a Python callable in the own process. For tests of what uses rewards; it cannot be killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.domain.errors import InputError
from posttrain.engine.rewards.port import RewardCall, RewardError, Score, checked


class ScriptedReward:
    """Scores by calling `function(call)`; remembers the calls.

    Example: `ScriptedReward(lambda call: [float(c == r["answer"]) for c, r in zip(call.completions, call.rows)])`
    """

    notes: tuple[str, ...] = ()

    def __init__(self, function: Callable[[RewardCall], Sequence[float | None]]) -> None:
        self._function = function
        self._closed = False
        self.calls: list[RewardCall] = []

    def score(self, call: RewardCall) -> list[Score]:
        """See `RewardFunction.score`."""
        if self._closed:
            raise InputError("reward scripted is closed; open it again to score")
        self.calls.append(call)
        try:
            answers = list(self._function(call))
        except Exception as error:
            raise RewardError(f"reward scripted raised {type(error).__name__}: {error}") from error
        return checked([(None if a is None else float(a), {}) for a in answers], call, "scripted")

    def close(self) -> None:
        """See `RewardFunction.close`."""
        self._closed = True
