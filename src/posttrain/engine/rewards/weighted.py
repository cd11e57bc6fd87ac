"""Several rewards as one: what `reward: {right: 1.0, brief: 0.2}` asks for. Total = Σ wᵢ · rᵢ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

from posttrain.engine.rewards.port import RewardCall, RewardFunction, Score, refuse_failures


@final
class WeightedReward:
    """`RewardFunction` over several, each asked about every completion, one after the other.

    A completion on which one of them fails has no score, whatever the others say. One that has no opinion (`None`) adds
    nothing, as in TRL; where none has one there is no score. The sum is rounded once (`math.fsum`), so the order of
    writing decides nothing, and one reward with weight 1 scores as it does alone, bit for bit.

    Args:
        parts: name → weight and function; at least one; closed with this one.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._parts = {name: parts[name] for name in sorted(parts)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of any of them, each line once."""
        return tuple(dict.fromkeys(note for _, function in self._parts.values() for note in function.notes))

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch; a completion that several rewards fail on counts once.

        Raises:
            RewardError, InputError: see `RewardFunction`.
        """
        told = {name: function.score(call, allowed, places) for name, (_, function) in self._parts.items()}
        totals = [self._total({name: scores[i] for name, scores in told.items()}) for i in range(len(call))]
        refuse_failures(totals, len(call) if places is None else None, allowed)
        return totals

    def _total(self, parts: Mapping[str, Score]) -> Score:
        known = {name: one.score for name, one in parts.items() if one.score is not None}
        components = dict(known)
        for name, one in parts.items():
            components |= {f"{name}/{inner}": value for inner, value in one.components.items()}
        failed = next((one for one in parts.values() if one.failed), None)
        if failed is not None:
            return Score(None, components, failed.status, failed.message, parts)
        if not known:
            return Score(None, components, parts=parts)
        weighed = [self._parts[name][0] * value for name, value in known.items()]
        try:
            total = math.fsum(weighed)
        except (OverflowError, ValueError):  # beyond what a float holds, or infinities of both signs
            total = math.inf
        if math.isfinite(total):
            return Score(total, components, parts=parts, at=self._at(parts))
        terms = " + ".join(f"{self._parts[name][0]:g} · {value:g}" for name, value in known.items())
        return Score(None, components, "error", f"the weighted sum of rewards must be finite, got {terms}", parts)

    def _at(self, parts: Mapping[str, Score]) -> dict[int, float]:
        """Where the parts say that they were earned, each with its weight."""
        found: dict[int, list[float]] = {}
        for name, one in parts.items():
            for token, value in one.at.items():
                found.setdefault(token, []).append(self._parts[name][0] * value)
        return {token: math.fsum(values) for token, values in sorted(found.items())}

    def close(self) -> None:
        """Close every one of them."""
        for _, function in self._parts.values():
            function.close()
