"""Calls of reward functions and reward objects written for other engines, in their calling conventions.

The module uses only the standard library, because it runs inside the reward worker. A call arrives as one JSON object
with `prompts`, `completions`, `rows` and optionally `prompt_ids`, `completion_ids`; the function's parameter names
determine its dialect (`domain.rewards.DIALECTS`, the table that `plan` also reads):

========== =============================================== ===================================================
dialect    detected by                                     called with
========== =============================================== ===================================================
verl       `solution_str`                                  data_source, solution_str, ground_truth, extra_info
verl_batch `solution_strs`                                 the same four in the plural, as lists
openrlhf   `queries`                                       queries (prompt + response), prompts, labels; batch
slime      `args, sample`                                  sample.prompt, .response, .label, .metadata
areal      `prompt` and `completions`                      one completion as `completions`, ids, row columns
trl        `prompts` or `completions`                      batch; every column as a list; chat rows as messages
verifiers  `state`, `parser`, `task` or `info`             messages for chat rows, answer, info, task, state, parser
row        `completion` (or `response`)                    strings; prompt, completion, answer, row columns
========== =============================================== ===================================================

A reward can also be an object: an instance with `__call__`, or one of the following. Only the object's methods are
used.

* A rubric of verifiers 0.1 to 0.3 (`vf.Rubric(funcs=[…], weights=[…], parser=…)`, its subclasses and groups), or an
  environment that has a rubric: `score_rollout` is called, and the rubric's functions are the components.
* A task of verifiers 0.4 (`class T(vf.Task[D])` with `@vf.reward` methods): the task is created from the row, and
  `score` is called on a trace of prompt and completion.

verifiers 0.1 to 0.3 log an exception of a reward function and count it as 0.0; here the exception is an error.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from posttrain.domain.rewards import NO_COLUMNS, Signature, SignatureError, not_offered, refuse_nameless

Call = Mapping[str, Any]
Arguments = dict[str, Any]
ENVIRONMENT = "load_environment"  # the function of a verifiers module that returns its environment


def _columns(row: Mapping[str, Any]) -> Arguments:
    return {key: value for key, value in row.items() if key not in NO_COLUMNS}


def _conversational(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), list)


def _trl(call: Call) -> Arguments:
    rows = call["rows"]
    chats = [_conversational(row) for row in rows]
    prompts = [row["prompt"] if chat else text for row, chat, text in zip(rows, chats, call["prompts"], strict=True)]
    answers = [
        [{"role": "assistant", "content": text}] if chat else text
        for chat, text in zip(chats, call["completions"], strict=True)
    ]
    names = list(dict.fromkeys(name for row in rows for name in _columns(row)))
    columns = {name: [row.get(name) for row in rows] for name in names}
    said = {"turns": [_turns(call, index) for index in range(len(rows))]}
    ids = {key: call[key] for key in ("prompt_ids", "completion_ids") if call.get(key) is not None}
    state = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return {**said, **columns, **ids, **state, "prompts": prompts, "completions": answers}


def _ignore(*_: Any, **__: Any) -> None:
    """Replace a trainer's logging hooks."""


def _openrlhf(call: Call) -> Arguments:
    return {
        "queries": [prompt + answer for prompt, answer in zip(call["prompts"], call["completions"], strict=True)],
        "prompts": call["prompts"],
        "labels": [row.get("answer") for row in call["rows"]],
    }


def _turns(call: Call, index: int) -> list[str]:
    """Return the policy's turns, which functions receive as `turns` unless the data set has a column `turns`."""
    return list(call["turns"][index]) if call.get("turns") is not None else [call["completions"][index]]


def _row(call: Call, index: int) -> Arguments:
    row, text = call["rows"][index], call["completions"][index]
    own = {"prompt": call["prompts"][index], "completion": text, "response": text, "row": dict(row)}
    ids = {key: call[key][index] for key in ("prompt_ids", "completion_ids") if call.get(key) is not None}
    return {"turns": _turns(call, index), **_columns(row), **ids, **own}


def _verifiers(call: Call, index: int) -> Arguments:
    arguments = _row(call, index)
    row = call["rows"][index]
    if _conversational(row):
        arguments["prompt"] = row["prompt"]
        arguments["completion"] = [{"role": "assistant", "content": call["completions"][index]}]
    given = {"task": "default", "answer": "", **arguments, "info": _map(row.get("info"))}
    state = {**given, "input": {**row, "info": given["info"]}}
    return {"parser": PlainParser(), **given, "state": state}


def _map(value: Any) -> dict[str, Any]:
    """Return a map; JSON text is parsed, because some data sets store maps as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return dict(value) if isinstance(value, Mapping) else {}


class PlainParser:
    """The default `parser`, as in verifiers: it returns texts unchanged."""

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def get_assistant_messages(self, completion: Any) -> list[Any]:
        """Return the messages of the assistant."""
        return [message for message in completion if message.get("role") == "assistant"]

    def parse_answer(self, completion: Any) -> str | None:
        """Return a text unchanged, or the content of the assistant's last message."""
        if isinstance(completion, str):
            return completion
        said = self.get_assistant_messages(completion)
        return str(said[-1].get("content") or "") if said else None


def _verl(call: Call, index: int) -> Arguments:
    row = call["rows"][index]
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("answer")
    extra = row.get("extra_info")
    return {
        "data_source": row.get("data_source") or "",
        "solution_str": call["completions"][index],
        "ground_truth": truth,
        "extra_info": {} if extra is None else extra,
    }


def _verl_batch(call: Call) -> Arguments:
    each = [_verl(call, index) for index in range(len(call["completions"]))]
    plural = {"data_sources": "data_source", "solution_strs": "solution_str", "ground_truths": "ground_truth"}
    return {many: [row[one] for row in each] for many, one in (plural | {"extra_infos": "extra_info"}).items()}


def _slime(call: Call, index: int) -> Arguments:
    row = call["rows"][index]
    sample = SimpleNamespace(
        index=index,
        prompt=call["prompts"][index],
        response=call["completions"][index],
        label=row.get("answer"),
        metadata=dict(row),
    )
    return {"args": SimpleNamespace(), "sample": sample}


BATCHED: Mapping[str, Callable[[Call], Arguments]] = {"trl": _trl, "openrlhf": _openrlhf, "verl_batch": _verl_batch}


SINGLE: Mapping[str, Callable[[Call, int], Arguments]] = {
    "row": _row,
    "areal": lambda call, index: {**_row(call, index), "completions": call["completions"][index]},
    "verifiers": _verifiers,
    "verl": _verl,
    "slime": _slime,
}


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the parameters of a loaded function, even inside a decorator or `functools.partial`."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), ""),
        nameless=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
    )


class Binder:
    """Selects a function's arguments by name from those that a dialect provides.

    Raises:
        SignatureError: the function has a positional-only parameter.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = signature_of(function)
        refuse_nameless(self.signature)

    def bind(self, offered: Arguments) -> Arguments:
        """Return the keyword arguments of one call.

        Raises:
            SignatureError: a parameter without a default is not provided.
        """
        for name in self.signature.required:
            if name not in offered:
                raise SignatureError(not_offered(name, offered))
        if self.signature.takes_all:
            return offered
        return {name: offered[name] for name in self.signature.names if name in offered}


class NoRewardError(Exception):
    """The object cannot be called as a reward; the message states why."""


def as_function(value: Any, namespace: Mapping[str, Any]) -> tuple[Callable[..., Any], str | None]:
    """Return the function that scores for the object of a reward's entry, and the function's dialect if it is known.

    Args:
        namespace: names of the reward's module.

    Raises:
        NoRewardError: the object cannot score.
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
    if "parser" in inspect.signature(value).parameters and "parser" in namespace:
        return _parsing(value, namespace["parser"]), "verifiers"
    return value, None


def _parsing(function: Callable[..., Any], parser: Any) -> Callable[..., Any]:
    """Return the function with the parser of its module as an argument."""

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
            f"class {made.__name__} must take no arguments, but its __init__ requires {', '.join(needed)}; "
            f"name an instance: reward = {made.__name__}(…)"
        )
    result: Callable[..., Any] = made()
    return result


# --- verifiers 0.1 to 0.3 ---------------------------------------------------------------------------------------------


def _of_rubric(rubric: Any) -> Callable[..., Any]:
    if getattr(rubric, "has_group_rewards", False):
        raise NoRewardError(
            "the rubric has a function that scores a whole group (with a parameter such as `prompts`, `completions` or "
            "`states`), which is not supported; use functions that score one completion"
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
    """Return `{"score", component…}` from the result of `score_rollout`: a map, an object, or the filled state."""
    if not isinstance(found, Mapping):
        return {**dict(found.metrics), "score": found.reward}
    if "metrics" in found:
        return {**dict(found["metrics"]), "score": found["reward"]}
    return {**{name: value for name, value in found.items() if name != "reward"}, "score": found["reward"]}


def _raising(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a score function so that errors that verifiers only logs are raised."""

    class Kept(logging.Handler):
        """A handler that collects logged errors."""

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
        raise NoRewardError(
            f"class {task.__name__} has `data_type` and `score` as a task of verifiers has, but verifiers.v1 was not "
            "imported; derive the class from verifiers.v1.Task"
        )

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
