"""A reward function in several processes side by side: what `placement: {reward: {cpus: 8}}` asks for.

Several rewards as one: what `reward: {right: 1.0, brief: 0.2}` asks for. Total = Σ wᵢ · rᵢ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import final

from posttrain.engine.rewards.port import RewardCall, RewardFunction, Score, groups_of, part_of, refuse_failures
from posttrain.pacing.balancing import balance


@final
class ParallelReward:
    """`RewardFunction` over equal ones, each in a process of its own.

    Completions of one prompt stay together, because a function may compare them; so what a function sees of *other*
    prompts depends on how many processes there are, and a score should not.

    Args:
        functions: at least one; closed with this one.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._threads = ThreadPoolExecutor(len(self._functions), thread_name_prefix="reward")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know; said once."""
        return self._functions[0].notes

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch, of which at most `allowed` completions may fail; the first process's error is raised.

        Raises:
            RewardError, InputError: see `RewardFunction`.
        """
        if len(self._functions) == 1:
            return self._functions[0].score(call, allowed, places)
        groups = groups_of(call, range(len(call)))
        shards = balance([sum(len(call.completions[i]) + 1 for i in g) for g in groups], len(self._functions)).shards
        chosen = [[i for group in shard for i in groups[group]] for shard in shards]
        asked = [
            (mine, self._threads.submit(function.score, part_of(call, mine), allowed, _placed(mine, places)))
            for function, mine in zip(self._functions, chosen, strict=True)
            if mine
        ]
        wait([answer for _, answer in asked])  # where one fails, the others are still at work: nobody asks them twice
        scores: dict[int, Score] = {}
        for mine, answer in asked:
            scores |= zip(mine, answer.result(), strict=True)
        refuse_failures(scores.values(), len(call) if places is None else None, allowed)
        return [scores[i] for i in range(len(call))]

    def close(self) -> None:
        """Kill every process."""
        for function in self._functions:
            function.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _placed(mine: Sequence[int], places: Sequence[int] | None) -> Sequence[int]:
    return mine if places is None else [places[i] for i in mine]


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
