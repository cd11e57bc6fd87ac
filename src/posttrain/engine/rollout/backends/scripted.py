"""A rollout engine with scripted responses, for tests of the components above it."""

from collections.abc import Callable, Sequence

from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.port import Generation
from posttrain.engine.samples import Trajectory

Script = Callable[[tuple[int, ...], int], Sequence[int]]


class ScriptedRollout(BatchedEngine):
    """`RolloutEngine` whose responses are `script(prompt, sample)`; they end by the same rules as sampled responses.

    Args:
        logprob: the log-probability that is reported for every token.
        context_length: maximum tokens of a prompt with its response.
        texts: decodes tokens to text, for stop strings; None: generations with stop strings are rejected.
    """

    def __init__(
        self,
        script: Script,
        *,
        eos_token_id: int | None = None,
        logprob: float = -1.0,
        context_length: int = 4096,
        texts: StopStrings | None = None,
    ) -> None:
        reads = texts is not None
        super().__init__(
            "scripted", context_length, lambda work: [self._answer(asked) for asked in work], reads_text=reads
        )
        self._script, self._texts = script, texts
        self._eos = eos_token_id
        self._logprob = logprob

    def _answer(self, asked: Generation) -> Trajectory:
        tokens = list(self._script(asked.tokens, asked.sample))[: asked.limit]
        ended = self._eos in tokens and not asked.sampling.ignore_eos
        if ended:
            tokens = tokens[: tokens.index(self._eos or 0) + 1]
        said, stop = tokens[: len(tokens) - ended], asked.sampling.stop
        tail = self._texts.tail(stop) if self._texts and stop else None
        at = next((at for at, token in enumerate(said) if tail and tail.ends(token)), None)
        stopped = at is not None
        tokens = tokens if at is None else tokens[: at + 1]
        cut, logprobs = not (ended or stopped), [self._logprob] * len(tokens)
        return Trajectory.answer(asked.tokens, tokens, logprobs, truncated=cut, stopped=stopped)
