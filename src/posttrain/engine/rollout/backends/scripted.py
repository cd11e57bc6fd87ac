"""A rollout engine with scripted responses, for tests of the components above it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

import numpy as np

from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.port import Generation
from posttrain.engine.samples import Floats, Ints

Script = Callable[[tuple[int, ...], int], Sequence[int]]


class ScriptedRollout(BatchedEngine):
    """`RolloutEngine` whose responses are `script(prompt, sample)`; they end by the same rules as sampled responses.

    Args:
        logprob: the log-probability that is reported for every token.
        context_length: maximum tokens of a prompt with its response.
        texts: decodes tokens to text, for stop strings; None: generations with stop strings are rejected.
        others: the scripts of further policies, by name.
        pace: tokens that a step gives to every response.
    """

    def __init__(
        self,
        script: Script,
        *,
        eos_token_id: int | None = None,
        logprob: float = -1.0,
        context_length: int = 4096,
        texts: StopStrings | None = None,
        others: Mapping[str, Script] | None = None,
        pace: int = 2**31,
    ) -> None:
        scripts = {"": script, **(others or {})}

        def batch(work: Sequence[Generation]) -> ScriptedBatch:
            return ScriptedBatch([self._scripted(asked, scripts[asked.policy]) for asked in work], logprob, pace)

        super().__init__("scripted", context_length, batch, reads_text=texts is not None, policies=tuple(others or ()))
        self._texts, self._eos = texts, eos_token_id

    def _scripted(self, asked: Generation, script: Script) -> tuple[Sequence[int], bool, bool]:
        """Return the tokens, whether a token or a string ended them, and whether a string did."""
        tokens = list(script(asked.tokens, asked.sample))[: asked.limit]
        ended = self._eos in tokens and not asked.sampling.ignore_eos
        if ended:
            tokens = tokens[: tokens.index(self._eos or 0) + 1]
        said, stop = tokens[: len(tokens) - ended], asked.sampling.stop
        tail = self._texts.tail(stop) if self._texts and stop else None
        at = next((at for at, token in enumerate(said) if tail and tail.ends(token)), None)
        return (tokens, ended, False) if at is None else (tokens[: at + 1], True, True)


@final
class ScriptedBatch:
    """`Batch` of known responses.

    Args:
        answers: of each row: tokens, whether a token or a string ended them, and whether a string did.
        logprob: the log-probability of every token.
        pace: tokens that a step gives to every response.
    """

    def __init__(
        self, answers: Sequence[tuple[Sequence[int], bool, bool]], logprob: float = -1.0, pace: int = 2**31
    ) -> None:
        self._answers, self._logprob, self._pace = answers, logprob, pace
        self._step, self._lengths = 0, dict[int, int]()  # of rows that are over

    def step(self) -> list[int]:
        """See `Batch.step`."""
        self._step += self._pace
        over = [
            at for at, (tokens, *_) in enumerate(self._answers) if at not in self._lengths and len(tokens) <= self._step
        ]
        self._lengths |= {at: len(self._answers[at][0]) for at in over}
        return over

    def said(self, row: int) -> tuple[Ints, Floats]:
        """See `Batch.said`."""
        tokens = np.asarray(self._answers[row][0][: self._lengths.get(row, self._step)], dtype=np.int32)
        return tokens, np.full(len(tokens), self._logprob, np.float32)

    def ended(self, row: int) -> tuple[bool, bool]:
        """See `Batch.ended`."""
        whole = self._lengths.get(row) == len(self._answers[row][0])
        return whole and self._answers[row][1], whole and self._answers[row][2]

    def stop(self, rows: Collection[int]) -> None:
        """See `Batch.stop`."""
        self._lengths |= dict.fromkeys(rows, self._step)

    def reread(self) -> None:
        """See `Batch.reread`; a script does not change."""
