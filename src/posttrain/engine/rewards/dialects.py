"""Reward functions written for other engines, called as they expect to be called.

Stdlib only: this runs inside the reward worker. A call arrives as one JSON object with `prompts`, `completions`, `rows`
and optionally `prompt_ids`, `completion_ids`; the function's parameter names say which dialect it speaks
(`domain.rewards.DIALECTS`, the table that `plan` reads too):

========== =============================================== ===================================================
dialect    told by                                         called with
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
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from posttrain.domain.rewards import NO_COLUMNS, Signature, SignatureError, not_offered, refuse_nameless

Call = Mapping[str, Any]
Arguments = dict[str, Any]


def _columns(row: Mapping[str, Any]) -> Arguments:
    return {key: value for key, value in row.items() if key not in NO_COLUMNS}


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
    said = {"turns": [_turns(call, index) for index in range(len(rows))]}
    ids = {key: call[key] for key in ("prompt_ids", "completion_ids") if call.get(key) is not None}
    state = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return {**said, **columns, **ids, **state, "prompts": prompts, "completions": answers}


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for a trainer's logging hooks."""


def _openrlhf(call: Call) -> Arguments:
    queries = [prompt + answer for prompt, answer in zip(call["prompts"], call["completions"], strict=True)]
    return {"queries": queries, "prompts": call["prompts"], "labels": [row.get("answer") for row in call["rows"]]}


def _turns(call: Call, index: int) -> list[str]:
    """What the policy said in turn; a column of the data set with that name goes before."""
    return list(call["turns"][index]) if call.get("turns") is not None else [call["completions"][index]]


def _row(call: Call, index: int) -> Arguments:
    row, text = call["rows"][index], call["completions"][index]
    own = {"prompt": call["prompts"][index], "completion": text, "response": text, "row": dict(row)}
    return {"turns": _turns(call, index), **_columns(row), **_ids(call, index), **own}


def _areal(call: Call, index: int) -> Arguments:
    return {**_row(call, index), "completions": call["completions"][index]}


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
    """A map, which data sets also keep as its JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return dict(value) if isinstance(value, Mapping) else {}


class PlainParser:
    """What `parser` is for a function that came without one: verifiers' own default, which takes texts as they are."""

    def parse(self, text: str) -> str:
        """The text."""
        return text

    def get_assistant_messages(self, completion: Any) -> list[Any]:
        """Messages of the assistant."""
        return [message for message in completion if message.get("role") == "assistant"]

    def parse_answer(self, completion: Any) -> str | None:
        """A text itself, or the content of the last message of the assistant."""
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
    "areal": _areal,
    "verifiers": _verifiers,
    "verl": _verl,
    "slime": _slime,
}


def signature_of(function: Callable[..., Any]) -> Signature:
    """The parameters of a loaded function, of what a decorator or `functools.partial` wraps too."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), ""),
        nameless=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
    )


class Binder:
    """Picks what a function asks for by name out of what a dialect offers.

    Raises:
        SignatureError: the function has a positional-only parameter.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = signature_of(function)
        refuse_nameless(self.signature)

    def bind(self, offered: Arguments) -> Arguments:
        """The keyword arguments of one call.

        Raises:
            SignatureError: a parameter without default that nobody offers.
        """
        for name in self.signature.required:
            if name not in offered:
                raise SignatureError(not_offered(name, offered))
        if self.signature.takes_all:
            return offered
        return {name: offered[name] for name in self.signature.names if name in offered}
