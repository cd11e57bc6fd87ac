"""From trajectories to scores: the reward function reads text, the recipe holds tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import Document, TokenBatch, Trajectory
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.recipes.sampling import Prompt
from posttrain.engine.rewards.port import RewardCall, RewardFunction, Score, probe_call
from posttrain.engine.roles.reward_model import RewardModelWorker


class RewardScorer:
    """A reward function behind GRPO's `Scorer`."""

    def __init__(self, reward: RewardFunction, tokenizer: PreTrainedTokenizerBase) -> None:
        self._reward, self._tokenizer = reward, tokenizer

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        call = RewardCall(
            prompts=[prompt.text for prompt in prompts],
            completions=[self.text(t) for t in trajectories],
            rows=[prompt.row for prompt in prompts],
            prompt_ids=[t.prompt for t in trajectories],
            completion_ids=[t.tokens for t in trajectories],
        )
        return self._reward.score(call)

    def text(self, trajectory: Trajectory) -> str:
        """A response as the reward reads it."""
        return decode_response(self._tokenizer, trajectory.tokens, ended=not trajectory.truncated)

    def rehearse(self, prompts: Sequence[Prompt]) -> None:
        """One call on the first rows, their answers as completions: a broken reward fails before anything is generated.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        self._reward.score(probe_call([prompt.text for prompt in prompts], [prompt.row for prompt in prompts]))


class ModelScorer:
    """A reward model behind the recipes' `Scorer`."""

    def __init__(self, judge: WorkerGroup[RewardModelWorker], tokenizer: PreTrainedTokenizerBase) -> None:
        self._judge, self._tokenizer = judge, tokenizer

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, read after its last token."""
        batch = TokenBatch.pack([Document(t.prompt, t.tokens) for t in trajectories])
        return [Score(value) for value in self._judge.map(RewardModelWorker.score, batch).values]

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""
        return decode_response(self._tokenizer, trajectory.tokens, ended=not trajectory.truncated)
