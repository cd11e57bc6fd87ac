"""A reward function in several processes side by side: what `placement: {reward: {cpus: 8}}` asks for."""

from __future__ import annotations

from collections.abc import Sequence
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
