"""Rewards that are objects: rubrics and tasks of verifiers, classes with `__call__`.

Standard library only: this runs inside the reward worker, and asks of an object only what it has.

* A rubric of verifiers 0.1 to 0.3 (`vf.Rubric(funcs=[…], weights=[…], parser=…)`, its subclasses and groups), or an
  environment that has one: its own `score_rollout` is called, and its functions are the components.
* A task of verifiers 0.4 (`class T(vf.Task[D])` with `@vf.reward` methods): it is made from the row, and its own
  `score` is called on a trace of prompt and completion.

verifiers 0.1 to 0.3 log what a reward function raises and count it as 0.0; here it is an error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

ENVIRONMENT = "load_environment"  # the function by which a module of verifiers gives its environment


class NoRewardError(Exception):
    """The object cannot be called as a reward; the text says why."""


def as_function(value: Any, namespace: Mapping[str, Any]) -> tuple[Callable[..., Any], str | None]:
    """What to call for what a reward's entry names, and the dialect it speaks when that is known.

    Args:
        namespace: names of the reward's module.

    Raises:
        NoRewardError: it is nothing that scores.
    """
    if inspect.isfunction(value) and value.__name__ == ENVIRONMENT:
        value = value()
    if not callable(value) or hasattr(value, "score_rollout"):
        rubric = value if hasattr(value, "score_rollout") else getattr(value, "rubric", None)
        if not hasattr(rubric, "score_rollout"):
            raise NoRewardError(f"must be a function, or a rubric or task of verifiers, got {type(value).__name__}")
        return _of_rubric(rubric), "verifiers"
    if inspect.isclass(value):
        if hasattr(value, "data_type") and hasattr(value, "score"):
            return _of_task(value), "verifiers"
        return _instance(value), None
    names = inspect.signature(value).parameters
    if "parser" in names and "parser" in namespace:
        return _parsing(value, namespace["parser"]), "verifiers"
    return value, None


def _parsing(function: Callable[..., Any], parser: Any) -> Callable[..., Any]:
    """A function that gets its own file's parser."""

    @functools.wraps(function)
    def score(**given: Any) -> Any:
        return function(**{**given, "parser": parser})

    return score


def _instance(made: type) -> Callable[..., Any]:
    if "__call__" not in dir(made) or getattr(made.__call__, "__objclass__", None) is type:
        raise NoRewardError(f"class {made.__name__} must have __call__ to be a reward")
    needed = [
        name
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if needed:
        raise NoRewardError(
            f"class {made.__name__} must be made without arguments, its __init__ needs {', '.join(needed)}; "
            f"name an object of it: reward = {made.__name__}(…)"
        )
    result: Callable[..., Any] = made()
    return result


# --- verifiers 0.1 to 0.3 ---------------------------------------------------------------------------------------------


def _of_rubric(rubric: Any) -> Callable[..., Any]:
    if getattr(rubric, "has_group_rewards", False):
        raise NoRewardError(
            "rubric has functions of whole groups (prompts, completions, states in the plural), which are not called "
            "here; score one completion"
        )
    wanted = inspect.signature(rubric.score_rollout).parameters

    async def score(prompt: Any, completion: Any, answer: Any, info: Any, task: Any, state: Any, **columns: Any) -> Any:
        given = {"prompt": prompt, "completion": completion, "answer": answer, "info": info, "task": task}
        state = {**state, "responses": [], "trajectory": [], "timing": {}, "turn": 1}
        if "completion" in wanted:
            takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
            own = {"parser", "row", "response", "prompt_ids", "completion_ids"}
            more = {name: value for name, value in columns.items() if takes_all and name not in own}
            named = {name: value for name, value in given.items() if name in wanted or takes_all}
            found = await rubric.score_rollout(**{**more, **named, "state": state})
        else:
            gates = {"score_sem": asyncio.Semaphore(1)} if "score_sem" in wanted else {}
            found = await rubric.score_rollout(state, **gates)
            found = state if found is None else found
        return _weighed(found)

    return _raising(score)


def _weighed(found: Any) -> dict[str, Any]:
    """`{"score", component…}` of what `score_rollout` gives: a map, an object, or the state that it filled."""
    if not isinstance(found, Mapping):
        return {**dict(found.metrics), "score": found.reward}
    if "metrics" in found:
        return {**dict(found["metrics"]), "score": found["reward"]}
    return {**{name: value for name, value in found.items() if name != "reward"}, "score": found["reward"]}


def _raising(score: Callable[..., Any]) -> Callable[..., Any]:
    """Raise what verifiers only logs."""

    class Kept(logging.Handler):
        """The errors that were logged."""

        def __init__(self) -> None:
            super().__init__(logging.ERROR)
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    @functools.wraps(score)
    async def checked(**given: Any) -> Any:
        kept, logger = Kept(), logging.getLogger("verifiers")
        logger.addHandler(kept)
        try:
            found = await score(**given)
        finally:
            logger.removeHandler(kept)
        if kept.lines:
            raise RuntimeError(kept.lines[0])
        return found

    return checked


# --- verifiers 0.4 ----------------------------------------------------------------------------------------------------


def _of_task(task: Any) -> Callable[..., Any]:
    vf = sys.modules.get("verifiers.v1")
    if vf is None:
        raise NoRewardError(f"class {task.__name__} must be a Task of verifiers.v1, which it did not import")

    async def score(prompt: Any, completion: Any, row: Any, answer: Any, info: Any, task: Any, **_: Any) -> Any:
        data = made.data_type().model_validate({**row, "answer": answer, "info": info, "prompt": prompt})
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        nodes = [
            vf.MessageNode(parent=at - 1 if at else None, message=message, sampled=at >= len(asked))
            for at, message in enumerate([*asked, *said])
        ]
        judged = made(data)
        about = vf.TraceTask(type=made.__name__, data=data, key=judged.key, hash=judged.hash)
        trace = vf.Trace(task=about, agent=vf.AgentInfo.model_construct(), nodes=nodes, is_completed=True, ok=True)
        await judged.score(trace)
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        if not parts:
            raise RuntimeError(f"{made.__name__} has no @reward method that scores without a runtime")
        return {**trace.metrics, **parts, "score": trace.reward}

    made = task
    return score
