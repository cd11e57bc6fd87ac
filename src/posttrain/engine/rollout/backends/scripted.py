"""A rollout engine that says what it is told: for tests of whatever stands above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.engine.rollout.port import SamplingParams, check_request
from posttrain.engine.samples import Trajectory

Script = Callable[[tuple[int, ...], int], Sequence[int]]


class ScriptedRollout:
    """`RolloutEngine` whose responses are `script(prompt, sample)`; it ends them as a sampling engine would.

    Args:
        logprob: reported for every token.
        context_length: tokens of prompt and response together that it accepts.
    """

    def __init__(
        self, script: Script, *, eos_token_id: int | None = None, logprob: float = -1.0, context_length: int = 4096
    ) -> None:
        self._script = script
        self._eos = eos_token_id
        self._logprob = logprob
        self._context_length = context_length

    @property
    def name(self) -> str:
        """Which implementation this is."""
        return "scripted"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        sampling: SamplingParams,
        prompt_keys: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.generate`."""
        request = check_request(prompts, samples, sampling, prompt_keys, limits, context_length=self._context_length)
        answers: list[Trajectory] = []
        for row in range(request.rows):
            prompt, sample = divmod(row, samples)
            tokens = list(self._script(request.prompts[prompt], sample))[: request.limits[row]]
            ended = self._eos in tokens and not sampling.ignore_eos
            if ended:
                tokens = tokens[: tokens.index(self._eos or 0) + 1]
            answers.append(request.trajectory(row, tokens, [self._logprob] * len(tokens), ended=ended))
        return answers
