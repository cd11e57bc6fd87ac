"""The fake reward: a Python callable in the own process. For tests of what uses rewards; it cannot be killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from posttrain.domain.errors import InputError
from posttrain.engine.rewards.port import RewardCall, RewardError, Score, part_of, refuse_failures, shortened

Answer = float | Score | None


class ScriptedReward:
    """Scores by calling `function(call)`; remembers the calls.

    Example: `ScriptedReward(lambda call: [float(c == r["answer"]) for c, r in zip(call.completions, call.rows)])`
    """

    notes: tuple[str, ...] = ()

    def __init__(self, function: Callable[[RewardCall], Sequence[Answer]]) -> None:
        self._function = function
        self._closed = False
        self.calls: list[RewardCall] = []

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """See `RewardFunction.score`."""
        if self._closed:
            raise InputError("reward scripted is closed; open it again to score")
        self.calls.append(call)
        scores = self._scored(call, list(range(len(call))))
        refuse_failures(scores, len(call) if places is None else None, allowed)
        return scores

    def _scored(self, call: RewardCall, chosen: list[int]) -> list[Score]:
        """Together; where that raises, one by one."""
        try:
            answers = list(self._function(part_of(call, chosen)))
        except Exception as error:
            if len(chosen) > 1:
                return [score for i in chosen for score in self._scored(call, [i])]
            where = f"completion {chosen[0]} {shortened(call.completions[chosen[0]])}"
            return [Score.failure("error", f"reward scripted raised {type(error).__name__}: {error} on {where}")]
        if len(answers) != len(chosen):
            raise RewardError(f"scripted must return one score per completion ({len(chosen)}), got {len(answers)}")
        return [self._plain(answer, call, i) for i, answer in zip(chosen, answers, strict=True)]

    def _plain(self, answer: Answer, call: RewardCall, index: int) -> Score:
        if isinstance(answer, Score):
            return answer
        if answer is None or math.isfinite(answer):
            return Score(None if answer is None else float(answer))
        where = f"completion {index} {shortened(call.completions[index])}"
        return Score.failure("error", f"scripted must return finite numbers, got {answer} as score of {where}")

    def close(self) -> None:
        """See `RewardFunction.close`."""
        self._closed = True
