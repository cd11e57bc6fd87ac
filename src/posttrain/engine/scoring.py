"""From trajectories to scores: a reward function reads text, a reward model reads tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, final

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.rewards.port import RewardCall, RewardFunction, Score, probe_call
from posttrain.engine.roles.frozen import FrozenWorker
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.samples import Prompt, Trajectory


class Scorer(Protocol):
    """Scores responses. Wraps a reward function and the tokenizer, or a reward model."""

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One score per trajectory; `prompts` is parallel to it."""

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""


class RewardScorer:
    """A reward function as a `Scorer`.

    Args:
        reward: the function.
        tokenizer: makes tokens readable.
        errors_max: share of a step's completions that may fail to be scored.
        tell: called with one line when completions failed and the step goes on all the same, for the first such step.
    """

    def __init__(
        self,
        reward: RewardFunction,
        tokenizer: PreTrainedTokenizerBase,
        *,
        errors_max: float = 0.0,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._reward, self._tokenizer = reward, tokenizer
        self._errors_max, self._tell, self._told = errors_max, tell, False

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; those that failed are left out of their groups.

        Raises:
            RewardError: more of them failed than may, or all; see `RewardFunction.score`.
        """
        call = RewardCall(
            prompts=[prompt.text for prompt in prompts],
            completions=[self.text(t) for t in trajectories],
            rows=[prompt.row for prompt in prompts],
            prompt_ids=[t.prompt.tolist() for t in trajectories],
            completion_ids=[t.response.tolist() for t in trajectories],
        )
        scores = self._reward.score(call, int(self._errors_max * len(call) + 1e-9))
        failed = [score for score in scores if score.failed]
        if failed and not self._told:
            self._told = True
            self._tell(
                f"{failed[0].message}; {len(failed)} of {len(scores)} completions of this step are left out of their "
                "groups, later ones are counted as reward/errors and reward/timeouts"
            )
        return scores

    def text(self, trajectory: Trajectory) -> str:
        """A response as the reward reads it."""
        return decode_response(self._tokenizer, trajectory.response.tolist(), ended=trajectory.closed)

    def smoke_test(self, prompts: Sequence[Prompt]) -> None:
        """One call on the first rows, their answers as completions: a reward that fails on all of them is broken, and
        is told so before anything is generated.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        call = probe_call([prompt.text for prompt in prompts], [prompt.row for prompt in prompts])
        self._reward.score(call, max(len(call) - 1, 0))


@final
class ModelScorer:
    """A reward model as a `Scorer`."""

    def __init__(self, judge: WorkerGroup[FrozenWorker], tokenizer: PreTrainedTokenizerBase) -> None:
        self._judge, self._tokenizer = judge, tokenizer

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, read after its last token.

        Raises:
            DivergedError: one is no number: such a model judges nothing, and no response goes without for it.
        """
        batch = TokenBatch.pack([Document(t.prompt, t.response) for t in trajectories])
        judged = self._judge.map(FrozenWorker.fill, batch, "scores", "scores")
        scores: list[float] = judged.column("scores").tolist()
        odd = next((place for place, value in enumerate(scores) if not math.isfinite(value)), None)
        if odd is not None:
            raise DivergedError(
                f"the reward model must score with finite numbers, got {scores[odd]} for response {odd}"
            )
        return [Score(value) for value in scores]

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""
        return decode_response(self._tokenizer, trajectory.response.tolist(), ended=trajectory.closed)
