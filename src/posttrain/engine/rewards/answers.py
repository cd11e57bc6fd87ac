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
MAX_PLACES = 2**16  # tokens of one completion at which something was earned
MOST = 1e30  # of a score: with the largest weights float32 holds it
_LAST = 10**7  # token of a response whose length nobody told
Spans = Sequence[Sequence[int]]  # [first token, token after the last] of every turn; empty: one turn, of unknown length


class AnswerError(ValueError):
    """An answer that is none; the text goes on after "FUNCTION must return"."""


def plain(answer: Any, subject: str, spans: Spans) -> dict[str, Any]:
    """Score, components and places out of a number, None, or a mapping with `score`, `turn_scores` or `token_scores`.

    Args:
        answer: what the reward's code gave; its own methods are that code too.
        subject: the completion, in words.
        spans: where its turns lie among the response's tokens.

    Raises:
        AnswerError: it is something else, not finite, or stands where nothing can be earned.
    """
    components: dict[str, float] = {}
    at: dict[int, float] = {}
    if isinstance(answer, Mapping):
        answer, components, at = _read(dict(answer), subject, spans)
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
    if value is not None and abs(value) > MOST:
        raise AnswerError(f"a score within ±{MOST:g} for {subject}, got {value:g}; scale it")
    return {"score": value, "components": components, **({"placed": list(at.items())} if at else {})}


def refuse_places(at: Mapping[int, float], sampled: Sequence[bool]) -> None:
    """Hold places against a response, whatever a worker said.

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


def _read(answer: dict[Any, Any], subject: str, spans: Spans) -> tuple[Any, dict[str, float], dict[int, float]]:
    """What a mapping says that a completion is worth, its components, and token → what of it was earned there."""
    others = {str(name)[:200]: _number(value) for name, value in answer.items() if name not in OWN}
    components = {name: value for name, value in others.items() if value is not None}
    if len(components) > MAX_COMPONENTS:
        raise AnswerError(f"at most {MAX_COMPONENTS} components, got {len(components)}")
    turns, tokens = answer.get(TURNS), answer.get(TOKENS)
    earned = _by_turn(turns, subject, spans) if turns is not None else []
    if tokens is not None:
        earned += _by_token(tokens, subject, spans)
    if "score" not in answer and turns is None and tokens is None:
        names = list(map(str, answer))[:9]
        raise AnswerError(f"`score`, `{TURNS}` or `{TOKENS}` in its mapping for {subject}, got {names}")
    whole = answer["score"] if "score" in answer else math.fsum(value for _, value in earned)
    found: dict[int, list[float]] = {}
    for token, value in earned:
        if token is not None:
            found.setdefault(token, []).append(value)
    if len(found) > MAX_PLACES:
        raise AnswerError(f"scores of at most {MAX_PLACES} tokens of {subject}, got {len(found)}")
    return whole, components, {token: math.fsum(values) for token, values in sorted(found.items())}


def _by_turn(given: Any, subject: str, spans: Spans) -> list[tuple[int | None, float]]:
    """The last token of each turn and its score; of one turn alone no token: all of it stands at the end."""
    scores, turns = given.tolist() if hasattr(given, "tolist") else given, max(len(spans), 1)
    if not isinstance(scores, list | tuple):
        raise AnswerError(f"{TURNS} as a list of numbers for {subject}, got {type(scores).__name__}")
    if len(scores) != turns:
        raise AnswerError(f"{TURNS} for each turn of {subject} ({turns}), got {len(scores)}")
    ends: list[int | None] = [None] if turns == 1 else [int(stop) - 1 for _, stop in spans]
    return [(end, _finite(TURNS, score, subject)) for end, score in zip(ends, scores, strict=True)]


def _by_token(given: Any, subject: str, spans: Spans) -> list[tuple[int | None, float]]:
    if not isinstance(given, Mapping):
        raise AnswerError(f"{TOKENS} as a map of tokens to numbers for {subject}, got {type(given).__name__}")
    return [(_token(at, subject, spans), _finite(TOKENS, score, subject)) for at, score in dict(given).items()]


def _token(at: Any, subject: str, spans: Spans) -> int:
    try:
        token = int(at)
        whole = token == float(at) and token >= 0
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise AnswerError(f"{TOKENS} of tokens by number from 0 for {subject}, got {at!r:.40}")
    last = spans[-1][1] if spans else _LAST
    if token >= last:
        raise AnswerError(f"{TOKENS} of tokens 0 to {last - 1} of {subject}, got one of token {token!r:.40}")
    if spans and not any(start <= token < stop for start, stop in spans):
        raise AnswerError(
            f"{TOKENS} of tokens that the policy sampled for {subject}, got one of token {token}, observed"
        )
    return token


def _finite(name: str, given: Any, subject: str) -> float:
    value = _number(given)
    if value is None or not abs(value) <= MOST:  # which no NaN is
        shown = type(given).__name__ if value is None else f"{value:g}"
        raise AnswerError(f"finite numbers within ±{MOST:g} as {name} of {subject}, got {shown}")
    return value


def _number(value: Any) -> float | None:
    """A Python float of any real scalar, numpy's and torch's too; None for everything else."""
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf
