"""The ports of rewards and of `observe` methods, and a fake of each.

Every implementation of a reward receives a call and returns one score per completion. Every implementation of an
observer receives a row and the policy's responses, and returns the text of the next observation. The fakes are Python
callables in the caller's process, for tests of code that uses rewards and observers; they cannot be killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from posttrain.domain.errors import InputError, JobFailedError


class RewardError(JobFailedError):
    """The reward's own code failed; the message names its file and line, or the exceeded time-out."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """Completions to score; every field has one entry per completion, and members of a group are adjacent.

    Example: `RewardCall(prompts=["Q: sort 31"], completions=["A: 13"], rows=[{"prompt": …, "answer": "13"}])`
    """

    prompts: Sequence[str]  # as text
    completions: Sequence[str]  # as text, without the end-of-sequence token
    rows: Sequence[Mapping[str, Any]]  # the data set row of each completion: JSON values
    prompt_ids: Sequence[Sequence[int]] | None = None  # for dialects with token ids
    completion_ids: Sequence[Sequence[int]] | None = None
    turns: Sequence[Sequence[str]] | None = None  # the policy's turns; None: each completion is one turn
    # the token span of each turn in the response: [first, end)
    turn_spans: Sequence[Sequence[Sequence[int]]] | None = None

    def __post_init__(self) -> None:
        wanted = len(self.completions)
        for name in ("prompts", "rows", "prompt_ids", "completion_ids", "turns", "turn_spans"):
            value = getattr(self, name)
            if value is not None and len(value) != wanted:
                raise InputError(f"RewardCall.{name} must have one entry per completion ({wanted}), got {len(value)}")

    def __len__(self) -> int:
        return len(self.completions)


Status = Literal["ok", "error", "timeout", "none"]


@dataclass(frozen=True, slots=True)
class Score:
    """One completion's reward: `Score(0.5)`, `Score(None)` (the function declined), `Score.failed("error", "…")`.

    A completion without a score is left out of its group; it does not count as zero. The part of a score that is not
    in `at` belongs to the whole response, and counts at its last token.
    """

    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    status: Status = "ok"  # none: no score, no failure; error: raised, died or returned no number
    message: str = ""  # of a failure: one line
    parts: Mapping[str, Score] = field(default_factory=dict)  # for a weighted sum: score of each reward
    at: Mapping[int, float] = field(default_factory=dict)  # response token → its part of the score

    def __post_init__(self) -> None:
        if self.score is None and self.status == "ok":
            object.__setattr__(self, "status", "none")

    @classmethod
    def failure(cls, status: Literal["error", "timeout"], message: str) -> Score:
        """Return the score of a completion that could not be scored."""
        return cls(None, {}, status, message)

    @property
    def failed(self) -> bool:
        """Whether the scoring failed."""
        return self.status in ("error", "timeout")


def weighted(weights: Mapping[str, float], parts: Mapping[str, Score]) -> Score:
    """Return the weighted sum of the scores of one completion, with the parts as components.

    A completion with a failed part has no score. A part without a score adds nothing; if no part has a score, the sum
    has none. The sum is rounded once (`math.fsum`), so the order is irrelevant, and one part with weight 1 keeps its
    score, bit for bit.

    Args:
        weights: name → weight of each part.
        parts: name → score.
    """
    known = {name: one.score for name, one in parts.items() if one.score is not None}
    components = dict(known)
    for name, one in parts.items():
        components |= {f"{name}/{inner}": value for inner, value in one.components.items()}
    failed = next((one for one in parts.values() if one.failed), None)
    if failed is not None:
        return Score(None, components, failed.status, failed.message, parts)
    if not known:
        return Score(None, components, parts=parts)
    try:
        total = math.fsum(weights[name] * value for name, value in known.items())
    except (OverflowError, ValueError):  # beyond the range of floats, or infinities of both signs
        total = math.inf
    if math.isfinite(total):
        at: dict[int, list[float]] = {}
        for name, one in parts.items():
            for token, value in one.at.items():
                at.setdefault(token, []).append(weights[name] * value)
        return Score(total, components, parts=parts, at={token: math.fsum(at[token]) for token in sorted(at)})
    terms = " + ".join(f"{weights[name]:g} · {value:g}" for name, value in known.items())
    return Score(None, components, "error", f"the weighted sum of rewards must be finite, got {terms}", parts)


class RewardFunction(Protocol):
    """Scores completions.

    Every implementation returns exactly one `Score` per completion, in order, each finite or None. A completion on
    which the reward's code raises, hangs, dies or returns no number has the status `error` or `timeout`; the other
    completions are still scored. A batched function that raises is called again with fewer completions until each
    failing completion is isolated. An implementation raises `RewardError` (and never returns a zero instead) if more
    than `allowed` completions fail, if all fail, or if an answer is for an unknown completion; `InputError` if the
    function does not exist; and `InfrastructureError` if the function's process is repeatedly killed from outside. The
    same call must return the same scores, because otherwise a resumed run would differ from an uninterrupted run: a
    reward must not depend on earlier calls, the clock or the network. `close` may be called twice; scoring after
    `close` is an `InputError`.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users about the execution, e.g. that the network could not be cut off."""

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch, of which at most `allowed` completions may fail.

        Args:
            places: the indices of the completions in their step, if the batch is a part of a step; the caller then
                checks whether all completions failed. None: the batch is the whole step.
        """

    def close(self) -> None:
        """Release all resources; kill the worker."""


def refuse_failures(scores: Iterable[Score], total: int | None, allowed: int) -> None:
    """Raise if too many completions failed, or if all of them failed.

    Args:
        scores: the scores so far.
        total: completions of the step; None if the scores are only a part of it.
        allowed: the number of completions that may fail.

    Raises:
        RewardError: too many completions failed; the message has the first failure's line.
    """
    failed = [score for score in scores if score.failed]
    if failed and (len(failed) > allowed or len(failed) == total):
        of = "" if total is None else f" of {total}"
        many = f"{len(failed)}{of} completions" if of else f"{len(failed)} completions of this step so far"
        more = f"; {many} failed, at most {allowed} may (reward_errors_max)"
        raise RewardError(failed[0].message + (more if total != 1 else ""))


def part_of(call: RewardCall, chosen: Sequence[int]) -> RewardCall:
    """Return the call restricted to some of its completions."""
    given = ((column.name, getattr(call, column.name)) for column in fields(call))
    kept: dict[str, Any] = {name: None if column is None else [column[i] for i in chosen] for name, column in given}
    return RewardCall(**kept)


def groups_of(call: RewardCall, chosen: Sequence[int]) -> list[list[int]]:
    """Return the indices grouped by prompt; completions of one prompt are adjacent."""
    groups: list[list[int]] = []
    for i in chosen:
        last = groups[-1][-1] if groups else i
        if groups and call.prompts[i] == call.prompts[last] and call.rows[i] == call.rows[last]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def shortened(text: str, limit: int = 60) -> str:
    """Return `text` as one quoted line of about `limit` characters at most."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def probe_call(
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[Sequence[int]],
    encode: Callable[[str], Sequence[int]] = lambda text: [0] * (len(text) + 1),
    *,
    turns: int = 1,
    count: int = 4,
) -> RewardCall:
    """Return a reward call that contains the first rows, with their reference answers as the completions.

    The call is scored before step 1, so a broken reward fails within seconds instead of after an hour. The scores are
    not used. With several turns, each turn of a completion is the answer.

    Args:
        encode: returns the tokens of a response, at least one; by default, one token per character and one end token.
    """
    answers = ["" if row.get("answer") is None else str(row["answer"]) for row in rows[:count]]
    ids = [list(encode(answer)) for answer in answers]
    said: dict[str, Any] = {}
    if turns > 1:
        spans = [[[0, len(one)]] * turns for one in ids]
        said = {"turns": [[answer] * turns for answer in answers], "turn_spans": spans}
    return RewardCall(list(prompts[:count]), answers, list(rows[:count]), list(prompt_ids[:count]), ids, **said)


def try_out(reward: RewardFunction, call: RewardCall) -> None:
    """Reject a reward that fails on every completion of a synthetic call (`probe_call`).

    Raises:
        RewardError: all completions failed; the message has the first failure's line.
    """
    scores = reward.score(call, len(call), range(len(call)))
    if scores and all(score.failed for score in scores):
        raise RewardError(
            f"{scores[0].message}; all {len(call)} trial completions before the stage failed (each is its row's answer)"
        )


Answer = float | Score | None


class ScriptedReward:
    """Scores by calling `function(call)`; records the calls.

    Example: `ScriptedReward(lambda call: [float(c == r["answer"]) for c, r in zip(call.completions, call.rows)])`
    """

    notes: tuple[str, ...] = ()

    def __init__(self, function: Callable[[RewardCall], Sequence[Answer]]) -> None:
        self._function = function
        self._closed = False
        self.calls: list[RewardCall] = []

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """See `RewardFunction.score`."""
        if self._closed:
            raise InputError("reward scripted is closed; open it again to score")
        self.calls.append(call)
        scores = self._scored(call, list(range(len(call))))
        refuse_failures(scores, len(call) if places is None else None, allowed)
        return scores

    def _scored(self, call: RewardCall, chosen: list[int]) -> list[Score]:
        """Score all completions in one call or, if that call raises, one by one."""
        try:
            answers = list(self._function(part_of(call, chosen)))
        except Exception as error:
            if len(chosen) > 1:
                return [score for i in chosen for score in self._scored(call, [i])]
            where = f"completion {chosen[0]} {shortened(call.completions[chosen[0]])}"
            return [Score.failure("error", f"reward scripted raised {type(error).__name__}: {error} on {where}")]
        if len(answers) != len(chosen):
            raise RewardError(f"scripted must return one score per completion ({len(chosen)}), got {len(answers)}")
        return [self._plain(answer, call, i) for i, answer in zip(chosen, answers, strict=True)]

    def _plain(self, answer: Answer, call: RewardCall, index: int) -> Score:
        if isinstance(answer, Score):
            return answer
        if answer is None or math.isfinite(answer):
            return Score(None if answer is None else float(answer))
        where = f"completion {index} {shortened(call.completions[index])}"
        return Score.failure("error", f"scripted must return finite numbers, got {answer} as score of {where}")

    def close(self) -> None:
        """See `RewardFunction.close`."""
        self._closed = True


# --- observers --------------------------------------------------------------------------------------------------------

MAX_OBSERVED = 2 * 2**20  # bytes of an observation as JSON
Observe = Callable[[Mapping[str, Any], Sequence[str]], Any]


class ObserveError(Exception):
    """One call of `observe` failed; the message is one line."""


class Observer(Protocol):
    """Calls a user's `observe(row, responses)`, possibly several times concurrently.

    The result of a call does not depend on other calls or on the order of calls. A call that raises, returns neither
    text nor None, returns more than `MAX_OBSERVED` bytes, takes longer than the time-out or ends its process raises
    `ObserveError` from its future; the other calls return their texts. `InfrastructureError` (the process is repeatedly
    killed from outside) and `RewardError` (an answer to an unknown call) are raised from the futures of all calls that
    have not ended, and from `begin`. `observe` is called again if its process ends before it returns, so it must be a
    function of its arguments. `close` may be called twice; `begin` after `close` is an `InputError`.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users about the execution, e.g. that the network could not be cut off."""

    @property
    def where(self) -> str:
        """The definition of `observe`, for errors: `observe (guess.py:7)`."""

    def begin(self, row: Mapping[str, Any], responses: Sequence[str]) -> Future[str | None]:
        """Begin a call; the result is the next observation, or None if the sample has ended.

        Args:
            row: the row of the data set: JSON values.
            responses: the texts of the policy's responses so far, in order.
        """

    def close(self) -> None:
        """Release all resources; calls that have not ended raise InputError."""


def error_line(error: BaseException) -> str:
    """Return `ValueError: text` without line breaks, even if the exception's text cannot be read."""
    try:
        said = str(error)
    except BaseException:  # of a class of the user
        said = "its text cannot be read"
    return " ".join(f"{type(error).__name__}: {said}".encode("utf-8", "replace").decode().split())[:300].rstrip(": ")


class ObserveFunction:
    """A user's `observe`, asynchronous or not, whose every failure is an `ObserveError` with one line."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        code = getattr(inspect.unwrap(observe), "__code__", None)
        self._folder = Path(code.co_filename).parent if code else None
        self._defined = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "of no file"
        self.where = f"observe ({self._defined})"

    def __call__(self, row: Mapping[str, Any], responses: Sequence[str]) -> str | None:
        """Return the observation.

        Raises:
            ObserveError: see `Observer`.
        """
        try:
            seen = self._observe(row, responses)
            seen = asyncio.run(awaited(seen)) if inspect.isawaitable(seen) else seen
            size = len(json.dumps(seen)) if issubclass(type(seen), str) else 0
        except BaseException as error:  # after any error, the other samples continue
            line = f"observe: {self._place(error)} raised {error_line(error)}; fix it, or the row"
            raise ObserveError(line) from error
        if seen is not None and not issubclass(type(seen), str):  # a mock may claim to be text
            raise ObserveError(f"{self.where} must return text or None, got {type(seen).__name__}; fix it")
        if size > MAX_OBSERVED:
            raise ObserveError(f"{self.where} must return at most {MAX_OBSERVED} bytes as JSON, got {size}; shorten it")
        return cast(str | None, seen)

    def _place(self, error: BaseException) -> str:
        """Return the innermost frame in the folder of `observe`, or its definition: `guess.py:12`."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).parent == self._folder]
        return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else self._defined


async def awaited(answer: Any) -> Any:
    """Return what an awaitable returns: `asyncio.run` accepts only coroutines."""
    return await answer


class ScriptedObserver:
    """Calls `observe` immediately, in this process."""

    notes: tuple[str, ...] = ()

    def __init__(self, observe: Observe) -> None:
        self._function, self._closed = ObserveFunction(observe), False
        self.where = self._function.where

    def begin(self, row: Mapping[str, Any], responses: Sequence[str]) -> Future[str | None]:
        """See `Observer.begin`."""
        if self._closed:
            raise InputError("the observer is closed; open it again")
        answer: Future[str | None] = Future()
        try:
            answer.set_result(self._function(row, responses))
        except ObserveError as error:
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        """See `Observer.close`."""
        self._closed = True
