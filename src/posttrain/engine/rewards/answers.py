"""What a reward's code answers about one completion, as numbers: its score, components, and where it was earned.

Standard library only: this runs inside the reward worker, and in part again in the job, which believes no worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TURNS, TOKENS = "turn_scores", "token_scores"
OWN = ("score", TURNS, TOKENS)  # of a mapping; its other numbers are components
MAX_COMPONENTS = 64
MAX_PLACES = 4096  # tokens of one completion at which something was earned


class AnswerError(ValueError):
    """An answer that is none; the text goes on after "FUNCTION must return"."""


def plain(answer: Any, subject: str, ends: Sequence[int]) -> dict[str, Any]:
    """Score, components and places out of a number, None, or a mapping with `score`, `turn_scores` or `token_scores`.

    Args:
        answer: what the reward's code gave; its own methods are that code too.
        subject: the completion, in words.
        ends: the last response token of every turn; empty: it is one turn.

    Raises:
        AnswerError: it is something else, not finite, or stands where nothing can be earned.
    """
    components: dict[str, float] = {}
    at: dict[int, float] = {}
    if isinstance(answer, Mapping):
        components, at = _components(answer), _placed(answer, ends, subject)
        answer = _whole(answer, subject)
    value = _number(answer)
    if value is None and (answer is not None or at):
        wanted = "a number" if at else "a number or None"
        raise AnswerError(f"{wanted} for {subject}, got {type(answer).__name__}")
    for name, number in (("score", value), *components.items()):
        if number is not None and not math.isfinite(number):
            raise AnswerError(
                f"finite numbers, got {number} as {name} of {subject}; return None for a completion that cannot be "
                "scored"
            )
    return {"score": value, "components": components, **({"placed": list(at.items())} if at else {})}


def refuse_places(at: Mapping[int, float], sampled: Sequence[bool]) -> None:
    """Hold places against a response.

    Args:
        sampled: [r] which of its tokens the policy decided.

    Raises:
        AnswerError: a token that it does not have, or that the policy did not sample.
    """
    for token in at:
        if not 0 <= token < len(sampled):
            raise AnswerError(f"{TOKENS} of tokens 0 to {len(sampled) - 1}, got one of token {token}")
        if not sampled[token]:
            raise AnswerError(f"{TOKENS} of tokens that the policy sampled, got one of token {token}, an observation's")


def _whole(answer: Mapping[str, Any], subject: str) -> Any:
    """What a mapping says that a completion is worth: `score`, or the sum of what it earned on its way."""
    if "score" in answer:
        return answer["score"]
    if any(answer.get(name) is not None for name in (TURNS, TOKENS)):
        earned = [*(answer.get(TURNS) or ()), *(answer.get(TOKENS) or {}).values()]
        return math.fsum(_number(value) or 0.0 for value in earned)
    raise AnswerError(f"`score` in its mapping for {subject}, got {list(map(str, answer))[:9]}")


def _components(answer: Mapping[str, Any]) -> dict[str, float]:
    others = {str(name)[:200]: _number(value) for name, value in answer.items() if name not in OWN}
    found = {name: value for name, value in others.items() if value is not None}
    if len(found) > MAX_COMPONENTS:
        raise AnswerError(f"at most {MAX_COMPONENTS} components, got {len(found)}")
    return found


def _placed(answer: Mapping[str, Any], ends: Sequence[int], subject: str) -> dict[int, float]:
    """Response token → what was earned at it."""
    found: dict[int, list[float]] = {}
    if answer.get(TURNS) is not None:
        scores, turns = list(answer[TURNS]), max(len(ends), 1)
        if len(scores) != turns:
            raise AnswerError(f"{TURNS} for each turn of {subject} ({turns}), got {len(scores)}")
        checked = [_finite(TURNS, score, subject) for score in scores]
        for end, score in zip(ends, checked, strict=False):  # of one turn alone, all of it stands at the end
            found.setdefault(end, []).append(score)
    tokens = answer.get(TOKENS)
    if tokens is not None:
        if not isinstance(tokens, Mapping):
            raise AnswerError(f"{TOKENS} as a map of tokens to numbers for {subject}, got {type(tokens).__name__}")
        for at, score in tokens.items():
            found.setdefault(_token(at, subject), []).append(_finite(TOKENS, score, subject))
    if len(found) > MAX_PLACES:
        raise AnswerError(f"scores of at most {MAX_PLACES} tokens of {subject}, got {len(found)}")
    return {at: math.fsum(scores) for at, scores in sorted(found.items())}


def _token(at: Any, subject: str) -> int:
    try:
        token = int(at)
        whole = token == float(at) and token >= 0
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise AnswerError(f"{TOKENS} of tokens by number from 0 for {subject}, got {at!r:.40}")
    return token


def _finite(name: str, given: Any, subject: str) -> float:
    value = _number(given)
    if value is None or not math.isfinite(value):
        shown = type(given).__name__ if value is None else f"{value}"
        raise AnswerError(f"finite numbers as {name} of {subject}, got {shown}")
    return value


def _number(value: Any) -> float | None:
    """A Python float of any real scalar, numpy's and torch's too; None for everything else."""
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else None
