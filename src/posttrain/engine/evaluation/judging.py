"""A reward function as the judge of an evaluation: every response gets a number of the declared range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from posttrain.domain.measures import ItemRange
from posttrain.engine.evaluation.evaluate import Item
from posttrain.engine.rewards.port import RewardCall, RewardError, RewardFunction, Score, probe_call, shortened, try_out
from posttrain.engine.samples import Trajectory


@final
class RewardJudge:
    """Scores responses of one suite.

    A gate judges on the range that the suite declares (ADR 0011), so a value outside of it is an error and is never
    clipped, and an item without a value is one too: what is left out would be chosen by the model.

    Args:
        reward: the function.
        suite: its name, for errors.
        possible: what a response may be worth.
    """

    def __init__(self, reward: RewardFunction, suite: str, possible: ItemRange) -> None:
        self._reward, self._suite, self._possible = reward, suite, possible

    def smoke_test(self, items: Sequence[Item]) -> None:
        """One call on the first items, before anything is generated.

        Raises:
            RewardError: it fails on all of them.
        """
        call = probe_call([i.text for i in items], [i.row for i in items], [i.prompt for i in items])
        try_out(self._reward, call)

    def __call__(
        self, items: Sequence[Item], texts: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> Sequence[Score]:
        """One score per response; the arguments are parallel.

        Raises:
            RewardError: a response could not be scored, was declined, or is worth what the range does not have; names
                item and value.
        """
        call = RewardCall(
            prompts=[item.text for item in items],
            completions=list(texts),
            rows=[item.row for item in items],
            prompt_ids=[t.prompt.tolist() for t in trajectories],
            completion_ids=[t.response.tolist() for t in trajectories],
        )
        scores = self._reward.score(call, len(call), range(len(call)))  # which of them failed is said here
        for item, text, score in zip(items, texts, scores, strict=True):
            self._refuse(item, text, score)
        return scores

    def _refuse(self, item: Item, text: str, score: Score) -> None:
        what = f"suite {self._suite}: item {item.id[:19]}… ({shortened(item.text)})"
        if score.failed:
            raise RewardError(f"{what}: {score.message}; an evaluation needs a score of every item")
        if score.score is None:
            raise RewardError(
                f"{what}: must have a score, its reward gave none to {shortened(text)}; give every response one"
            )
        low, high = self._possible.low, self._possible.high
        if not low <= score.score <= high:
            raise RewardError(
                f"{what}: must be worth {low:g} to {high:g} (reward_range), got {score.score:.17g} for "
                f"{shortened(text)}; mend the reward, or declare its range"
            )
