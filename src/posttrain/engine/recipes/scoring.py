"""From trajectories to scores: the reward function reads text, the recipe holds tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import Trajectory
from posttrain.engine.models.chat import decode_response
from posttrain.engine.recipes.grpo import Prompt
from posttrain.engine.rewards.port import RewardCall, RewardFunction, probe_call


class RewardScorer:
    """A reward function behind GRPO's `Scorer`."""

    def __init__(self, reward: RewardFunction, tokenizer: PreTrainedTokenizerBase) -> None:
        self._reward, self._tokenizer = reward, tokenizer

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
        """One score per trajectory.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        call = RewardCall(
            prompts=[prompt.text for prompt in prompts],
            completions=[decode_response(self._tokenizer, t.tokens, ended=not t.truncated) for t in trajectories],
            rows=[prompt.row for prompt in prompts],
            prompt_ids=[t.prompt for t in trajectories],
            completion_ids=[t.tokens for t in trajectories],
        )
        return [score.score for score in self._reward.score(call)]

    def rehearse(self, prompts: Sequence[Prompt]) -> None:
        """One call on the first rows, their answers as completions: a broken reward fails before anything is generated.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        self._reward.score(probe_call([prompt.text for prompt in prompts], [prompt.row for prompt in prompts]))
