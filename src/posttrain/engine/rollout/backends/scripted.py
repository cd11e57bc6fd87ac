"""A rollout engine that says what it is told: for tests of whatever stands above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.port import Generation
from posttrain.engine.samples import Trajectory

Script = Callable[[tuple[int, ...], int], Sequence[int]]


class ScriptedRollout(BatchedEngine):
    """`RolloutEngine` whose responses are `script(prompt, sample)`; it ends them as a sampling engine would.

    Args:
        logprob: reported for every token.
        context_length: tokens of prompt and response together that it accepts.
    """

    def __init__(
        self, script: Script, *, eos_token_id: int | None = None, logprob: float = -1.0, context_length: int = 4096
    ) -> None:
        super().__init__("scripted", context_length, lambda work: [self._answer(asked) for asked in work])
        self._script = script
        self._eos = eos_token_id
        self._logprob = logprob

    def _answer(self, asked: Generation) -> Trajectory:
        tokens = list(self._script(asked.tokens, asked.sample))[: asked.limit]
        ended = self._eos in tokens and not asked.sampling.ignore_eos
        if ended:
            tokens = tokens[: tokens.index(self._eos or 0) + 1]
        return Trajectory.answer(asked.tokens, tokens, [self._logprob] * len(tokens), truncated=not ended)
