"""What every reward is, whatever runs it: one call in, one score per completion out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.domain.errors import InputError, JobFailedError


class RewardError(JobFailedError):
    """The reward's own code failed; the message names its file and line, or the time-out it passed."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """Completions to score; every field holds one entry per completion, members of a group side by side.

    Example: `RewardCall(prompts=["Q: sort 31"], completions=["A: 13"], rows=[{"prompt": …, "answer": "13"}])`
    """

    prompts: Sequence[str]  # what the model read, as text
    completions: Sequence[str]  # what it wrote, without the end-of-sequence token
    rows: Sequence[Mapping[str, Any]]  # the data set row each completion belongs to: JSON values
    prompt_ids: Sequence[Sequence[int]] | None = None  # for dialects that ask for token ids
    completion_ids: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        wanted = len(self.completions)
        for name in ("prompts", "rows", "prompt_ids", "completion_ids"):
            value = getattr(self, name)
            if value is not None and len(value) != wanted:
                raise InputError(f"RewardCall.{name} must hold one entry per completion ({wanted}), got {len(value)}")

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True, slots=True)
class Score:
    """One completion's reward. `score=None` means unscored: the completion is left out of its group, it is not a
    zero.
    """

    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scores completions.

    Every implementation: returns exactly one `Score` per completion, in order, each finite or None; raises
    `RewardError` (never a made-up zero) when the reward's code raises, answers with something else, or passes its
    time-out, and `InputError` when there is no such function. The same call gives the same scores, or a resumed run
    would differ from an undisturbed one: a reward must not depend on earlier calls, the clock or the network. `close`
    may be called twice; scoring after it is an `InputError`.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how it runs, e.g. that the network could not be cut off."""

    def score(self, call: RewardCall) -> list[Score]:
        """Score one batch."""

    def close(self) -> None:
        """Release what it holds; kills a worker."""


def checked(answers: Sequence[tuple[float | None, Mapping[str, float]]], call: RewardCall, source: str) -> list[Score]:
    """Scores made of a reward's raw answers.

    Raises:
        RewardError: not one answer per completion, or NaN / infinity in a score or a component.
    """
    if len(answers) != len(call):
        raise RewardError(
            f"{source} must return one score per completion ({len(call)}), got {len(answers)}; fix the reward's return"
        )
    for index, (score, components) in enumerate(answers):
        for name, value in (("score", score), *components.items()):
            if value is not None and not math.isfinite(value):
                raise RewardError(
                    f"{source} must return finite numbers, got {value} as {name} of completion {index} "
                    f"{shortened(call.completions[index])}; return None for a completion that cannot be scored"
                )
    return [Score(score, dict(components)) for score, components in answers]


def shortened(text: str, limit: int = 60) -> str:
    """`text` as one quoted line of at most about `limit` characters."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def probe_call(prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], count: int = 4) -> RewardCall:
    """A call on the first rows, answered with the rows' own answers: scored before step 1, a broken reward fails within
    seconds instead of after an hour. The scores themselves mean nothing; token ids are empty.
    """
    answers = [str(row.get("answer", "")) for row in rows[:count]]
    none: list[tuple[int, ...]] = [() for _ in answers]
    return RewardCall(list(prompts[:count]), answers, list(rows[:count]), none, none)
