"""Reward functions written for other engines, called as they expect to be called.

Stdlib only: this runs inside the reward worker. A call arrives as one JSON object with `prompts`, `completions`, `rows`
and optionally `prompt_ids`, `completion_ids`; the function's parameter names say which dialect it speaks:

========== =============================================== ===================================================
dialect    told by                                         called with
========== =============================================== ===================================================
verl       `solution_str`                                  data_source, solution_str, ground_truth, extra_info
openrlhf   `queries`                                       queries (prompt + response), prompts, labels; batch
slime      `args, sample`                                  sample.prompt, .response, .label, .metadata
areal      `prompt` and `completions`                      one completion as `completions`, ids, row columns
trl        `prompts` or `completions`                      batch; every column as a list; chat rows as messages
verifiers  `state`, `parser` or `task` with `completion`   messages for chat rows, answer, info, task, state
row        `completion` (or `response`)                    strings; prompt, completion, answer, row columns
========== =============================================== ===================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

Call = Mapping[str, Any]
Arguments = dict[str, Any]


class DialectError(Exception):
    """The function asks for something the call does not have; the text says what."""


def _columns(row: Mapping[str, Any]) -> Arguments:
    return {key: value for key, value in row.items() if key not in ("prompt", "completion", "completions", "messages")}


def _conversational(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), list)


def _ids(call: Call, index: int) -> Arguments:
    return {key: call[key][index] for key in ("prompt_ids", "completion_ids") if call.get(key) is not None}


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
    ids = {key: call[key] for key in ("prompt_ids", "completion_ids") if call.get(key) is not None}
    state = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return {**columns, **ids, **state, "prompts": prompts, "completions": answers}


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for a trainer's logging hooks."""


def _openrlhf(call: Call) -> Arguments:
    queries = [prompt + answer for prompt, answer in zip(call["prompts"], call["completions"], strict=True)]
    return {"queries": queries, "prompts": call["prompts"], "labels": [row.get("answer") for row in call["rows"]]}


def _row(call: Call, index: int) -> Arguments:
    row, text = call["rows"][index], call["completions"][index]
    own = {"prompt": call["prompts"][index], "completion": text, "response": text, "row": dict(row)}
    return {**_columns(row), **_ids(call, index), **own}


def _areal(call: Call, index: int) -> Arguments:
    return {**_row(call, index), "completions": call["completions"][index]}


def _verifiers(call: Call, index: int) -> Arguments:
    arguments = _row(call, index)
    row = call["rows"][index]
    if _conversational(row):
        arguments["prompt"] = row["prompt"]
        arguments["completion"] = [{"role": "assistant", "content": call["completions"][index]}]
    return {"info": {}, "task": "default", "parser": None, **arguments, "state": dict(arguments)}


def _verl(call: Call, index: int) -> Arguments:
    row = call["rows"][index]
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("answer")
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": call["completions"][index],
        "ground_truth": truth,
        "extra_info": row.get("extra_info"),
    }


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


BATCHED: Mapping[str, Callable[[Call], Arguments]] = {"trl": _trl, "openrlhf": _openrlhf}
SINGLE: Mapping[str, Callable[[Call, int], Arguments]] = {
    "row": _row,
    "areal": _areal,
    "verifiers": _verifiers,
    "verl": _verl,
    "slime": _slime,
}
DIALECTS = (*BATCHED, *SINGLE)


def detect(parameters: Sequence[str]) -> str:
    """The dialect that a function with these parameter names speaks.

    Raises:
        DialectError: the names are of no known dialect.
    """
    names = set(parameters)
    if "solution_str" in names:
        return "verl"
    if "queries" in names:
        return "openrlhf"
    if {"args", "sample"} <= names:
        return "slime"
    if "completions" in names:
        return "areal" if "prompt" in names else "trl"
    if "prompts" in names:
        return "trl"
    if names & {"state", "parser", "task"}:
        return "verifiers"
    if names & {"completion", "response"}:
        return "row"
    raise DialectError(
        f"parameters ({', '.join(parameters)}) are of no known dialect; name the text `completion`, or give dialect: "
        f"one of {', '.join(DIALECTS)}"
    )


class Binder:
    """Picks what a function asks for by name out of what a dialect offers.

    Raises:
        DialectError: the function has a positional-only parameter.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        for parameter in named:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise DialectError(f"parameter {parameter.name!r} is positional-only; parameters are given by name")
        self.names = [p.name for p in named]
        self._required = [p.name for p in named if p.default is p.empty]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def bind(self, offered: Arguments) -> Arguments:
        """The keyword arguments of one call.

        Raises:
            DialectError: a parameter without default that nobody offers.
        """
        for name in self._required:
            if name not in offered:
                raise DialectError(
                    f"parameter {name!r} is neither a column of the data set nor part of the call; "
                    f"known: {', '.join(sorted(offered))}"
                )
        return offered if self._takes_all else {name: offered[name] for name in self.names if name in offered}
