"""From trajectories to scores: a reward function reads text, a reward model reads tokens.

What is sampled together is scored in stretches of the data stream, each as soon as its last response is there. How
long a stretch is follows from the stage alone, so what is scored in one call does not depend on who was fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.worker_group import Future, WorkerGroup
from posttrain.engine.models.chat import decode_response, decode_turn
from posttrain.engine.rewards.answers import AnswerError, refuse_places
from posttrain.engine.rewards.port import (
    RewardCall,
    RewardError,
    RewardFunction,
    Score,
    probe_call,
    refuse_failures,
    try_out,
)
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.training import FrozenWorker
from posttrain.engine.samples import Prompt, Trajectory

_STRETCHES = 8  # of what is sampled together, at the most


def _held_against(trajectory: Trajectory, score: Score) -> Score:
    """The score, or a failure where the environment failed, or at tokens at which nothing can be earned; its parts and
    components stay.
    """
    fault = trajectory.fault if trajectory.status == "error" else ""
    if score.at and not fault:
        try:
            refuse_places(score.at, trajectory.sampled.tolist())
        except AnswerError as error:
            fault = f"the reward must return {error}; its worker did not look"
    return replace(score, score=None, status="error", message=fault, at={}) if fault else score


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """Which responses of those that are sampled together: `Stretch(first=64, total=256)`."""

    first: int
    total: int


def response_text(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> str:
    """What a response says."""
    return decode_response(tokenizer, trajectory.response.tolist(), ended=trajectory.closed)


class Scorer(Protocol):
    """Scores responses. Wraps a reward function and the tokenizer, or a reward model."""

    def groups(self, prompts: int, tokens: int) -> int:
        """How many groups are scored together, where so many are sampled together, of so many tokens each at most."""

    @property
    def early(self) -> bool:
        """Whether it can score while the rollout works, and takes none of its memory."""

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """One score per trajectory; `prompts` is parallel to it.

        Stretches come in any order, each once; what they are worth is asked for in order.
        """

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""


class RewardScorer:
    """A reward function as a `Scorer`.

    Args:
        reward: the function.
        tokenizer: makes tokens readable.
        errors_max: share of a step's completions that may fail to be scored.
        processes: that score side by side.
        placed: whether the algorithm reads at which tokens a score was earned.
        turns: of a response, at the most.
        name: how errors call the reward.
        tell: called with one line when completions failed and the step goes on all the same, and when nobody reads at
            which tokens a score was earned; once each.
    """

    def __init__(
        self,
        reward: RewardFunction,
        tokenizer: PreTrainedTokenizerBase,
        *,
        errors_max: float = 0.0,
        processes: int = 1,
        placed: bool = True,
        turns: int = 1,
        name: str = "the reward",
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._reward, self._tokenizer, self._processes = reward, tokenizer, processes
        self._errors_max, self._tell, self._told = errors_max, tell, False
        self._placed, self._told_placed, self._most = placed, False, turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")  # one call at a time
        self._scored: list[Score] = []  # of what is sampled together, so far
        self._name, self._step = name, 0  # responses of a step

    def groups(self, prompts: int, tokens: int) -> int:
        """See `Scorer`; at least one for each process."""
        return max(-(-prompts // _STRETCHES), self._processes)

    @property
    def early(self) -> bool:
        """It has processes of its own."""
        return True

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """See `Scorer`; those that failed are left out of their groups.

        `result` raises RewardError where more failed than may, or all of those that were sampled together; see
        `RewardFunction.score`.
        """
        call = RewardCall(
            prompts=[prompt.text for prompt in prompts],
            completions=[self.text(t) for t in trajectories],
            rows=[prompt.row for prompt in prompts],
            prompt_ids=[t.prompt.tolist() for t in trajectories],
            completion_ids=[t.response.tolist() for t in trajectories],
            **self._turns(trajectories),
        )
        places = range(stretch.first, stretch.first + len(call))
        whole, allowed = len(call) == stretch.total, int(self._errors_max * stretch.total + 1e-9)
        answer = self._thread.submit(self._reward.score, call, allowed, None if whole else places)

        def wait() -> Sequence[Score]:
            scores = [_held_against(t, score) for t, score in zip(trajectories, answer.result(), strict=True)]
            self._accept(scores, stretch, allowed)
            return scores

        return Future(wait, answer.done)

    def _turns(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """What the policy said in turn, and where each turn ends; nothing where every response is one."""
        if all(len(t.segments) <= 2 for t in trajectories):
            return {}
        said = [[decode_turn(self._tokenizer, s.tokens.tolist()) for s in t.turns] for t in trajectories]
        return {"turns": said, "turn_spans": [t.turn_spans for t in trajectories]}

    def _accept(self, scores: Sequence[Score], stretch: Stretch, allowed: int) -> None:
        """Judge the failures of a step by all of its stretches so far.

        Raises:
            RewardError: too many, or all; or the reward declined every one.
        """
        self._scored = [*(self._scored if stretch.first else ()), *scores]
        last = len(self._scored) == stretch.total
        if not (self._placed or self._told_placed) and any(score.at for score in scores):
            self._told_placed = True
            self._tell(
                "the reward says at which tokens a score was earned, and this algorithm gives each response one "
                "advantage: their sum counts; ppo and reinforce_plus_plus credit each token with what follows it"
            )
        refuse_failures(self._scored, stretch.total if last else None, allowed)
        self._step = max(self._step, stretch.total)  # what takes the place of single groups is less than a step
        if last and stretch.total == self._step and all(score.score is None for score in self._scored):
            raise RewardError(
                f"{self._name} gave no number to any of the {stretch.total} responses of this step, so nothing is "
                "learnt from it; a reward that returns None declines a response: return a number for some of them"
            )
        failed = [score for score in self._scored if score.failed]
        if last and failed and not self._told:
            self._told = True
            self._tell(
                f"{failed[0].message}; {len(failed)} of {stretch.total} completions of this step are left out of their "
                "groups, later ones are counted as reward/errors and reward/timeouts"
            )

    def text(self, trajectory: Trajectory) -> str:
        """A response as the reward reads it."""
        return response_text(self._tokenizer, trajectory)

    def smoke_test(self, prompts: Sequence[Prompt]) -> None:
        """One call on the first rows, their answers as completions: a reward that fails on all of them is broken, and
        is told so before anything is generated.

        Raises:
            RewardError: see `RewardFunction.score`.
        """
        end = self._tokenizer.eos_token_id
        call = probe_call(
            [prompt.text for prompt in prompts],
            [prompt.row for prompt in prompts],
            [prompt.tokens for prompt in prompts],
            lambda text: [*self._tokenizer.encode(text, add_special_tokens=False), *([] if end is None else [end])],
            turns=self._most,
        )
        try_out(self._reward, call)


@final
class ModelScorer:
    """A reward model as a `Scorer`.

    Args:
        judge: its ranks.
        tokenizer: makes tokens readable.
        tokens: that fill a micro-batch on each of them.
        early: whether it may work while the rollout does (`Roles.early`).
    """

    def __init__(
        self,
        judge: WorkerGroup[FrozenWorker],
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokens: int = 16384,
        early: bool = False,
    ) -> None:
        self._judge, self._tokenizer, self._tokens, self.early = judge, tokenizer, tokens * judge.ranks, early

    def groups(self, prompts: int, tokens: int) -> int:
        """See `Scorer`; enough to fill a micro-batch on every rank."""
        return max(-(-prompts // _STRETCHES), -(-self._tokens // tokens))

    def begin(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch
    ) -> Future[Sequence[Score]]:
        """See `Scorer`; read after the last token.

        `result` raises DivergedError where one is no number: such a model judges nothing, and no response goes without
        for it.
        """
        batch = TokenBatch.pack([Document(t.prompt, t.response) for t in trajectories])
        judged = self._judge.nonblocking.map(FrozenWorker.fill, batch, "scores", "scores")

        def wait() -> Sequence[Score]:
            scores: list[float] = judged.result().column("scores").tolist()
            odd = next((place for place, value in enumerate(scores) if not math.isfinite(value)), None)
            if odd is not None:
                raise DivergedError(
                    f"the reward model must score with finite numbers, got {scores[odd]} for response "
                    f"{stretch.first + odd}"
                )
            return [_held_against(t, Score(value)) for t, value in zip(trajectories, scores, strict=True)]

        return Future(wait, judged.done)

    def text(self, trajectory: Trajectory) -> str:
        """A response as text."""
        return response_text(self._tokenizer, trajectory)
