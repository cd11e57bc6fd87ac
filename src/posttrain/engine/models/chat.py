"""Rows to token ids and back: chat templates, prompts, demonstrations.

Rows are canonical (`posttrain.data.rows`): `prompt` [+ `completion`], `messages`, or `text`. What the model produced is
never decoded and encoded again; what a template renders is checked to be a prefix of what it renders one turn later,
because a template that rewrites earlier turns would train on tokens that are never seen in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import InputError
from posttrain.domain.time_limit import TimeLimitError, time_limit

_RENDER_SECONDS = 10.0  # that one rendering may take: a hundred thousand times what one takes
Row = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised document: the loss is on `completion`, whose last token is the end of sequence."""

    row: int  # position in the data set, from 0
    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """Token ids up to where the model begins to write: `prompt`, or `messages` up to the last assistant message.

    Raises:
        InputError: the row has neither, or a chat prompt meets a tokenizer without chat template.
    """
    if row.get("prompt") is not None:
        prompt = row["prompt"]
        return _open_text(tokenizer, prompt) if isinstance(prompt, str) else _render(tokenizer, prompt, generate=True)
    if row.get("messages") is None:
        raise InputError(f"a prompt needs the column prompt or messages, got {', '.join(sorted(row))}")
    messages = list(row["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return _render(tokenizer, messages, generate=True)


def render_examples(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[tuple[list[int], list[int]]]:
    """Every (prompt ids, completion ids) of a demonstration: one per assistant turn of `messages`, else one.

    A `text` row is all completion but its first token, which nothing predicts.

    Raises:
        InputError: the row demonstrates nothing, or its template breaks the prefix.
    """
    if row.get("completion") is not None and row.get("prompt") is not None:
        return [render_example(tokenizer, row)]
    if row.get("messages") is not None:
        messages = list(row["messages"])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InputError("messages must hold an assistant message to learn from, got none")
        return [_turn(tokenizer, messages[:i], messages[i : i + 1]) for i in turns]
    if row.get("text") is not None:
        ids = _closed(tokenizer, _open_text(tokenizer, row["text"]))
        return [(ids[:1], ids[1:])]
    raise InputError(f"a demonstration needs completion, messages or text, got columns {', '.join(sorted(row))}")


def render_example(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids with the end of sequence) of a `prompt` + `completion` row.

    Raises:
        InputError: the template breaks the prefix.
    """
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(completion, add_special_tokens=False)
        return _open_text(tokenizer, prompt), _closed(tokenizer, ids)
    return _turn(tokenizer, prompt, completion)


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, ended: bool) -> str:
    """A response as text, without its end of sequence.

    Other special tokens stay visible: a response that needs them dropped to look right is not right.

    Args:
        ended: the last token ends the sequence. The rollout knows it, the tokenizer does not: it names one such token
            where a model may have several.
    """
    said = np.asarray(tokens[:-1] if ended else tokens, dtype=np.int64)  # of a list transformers looks at every item
    text: str = tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int, reserve: int = 0
) -> list[tuple[int, ...]]:
    """Prompt ids of every row.

    Args:
        name: how errors call the data set.
        limit: the model's context, tokens.
        reserve: tokens kept free for the response.

    Raises:
        InputError: a row that cannot be rendered, or does not fit; names data set and row (from 1).
    """
    prompts = []
    for number, row in enumerate(rows, start=1):
        with _row_errors(name, number):
            ids = render_prompt(tokenizer, row)
        if len(ids) + reserve > limit:
            room = f"{limit} - {reserve} (max_new_tokens)" if reserve else f"{limit}"
            raise InputError(f"{name} row {number}: prompt must fit {room} tokens, got {len(ids)}; shorten or drop it")
        prompts.append(tuple(ids))
    return prompts


def encode_examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int) -> list[Example]:
    """Every demonstration of every row; a conversation gives one example per assistant turn.

    Raises:
        InputError: a row that cannot be rendered, or is longer than `limit` tokens (never cut); names data set and row.
    """
    examples = []
    for number, row in enumerate(rows, start=1):
        with _row_errors(name, number):
            turns = render_examples(tokenizer, row)
        for prompt, completion in turns:
            length = len(prompt) + len(completion)
            if length > limit:
                raise InputError(
                    f"{name} row {number}: prompt and completion must fit {limit} tokens, got {length}; "
                    "shorten the row, drop it or raise max_length"
                )
            examples.append(Example(number - 1, tuple(prompt), tuple(completion)))
    return examples


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A preference row as token ids; both responses end with the end of sequence."""

    row: int
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def encode_preferences(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int
) -> list[PreferencePair]:
    """Every row's pair.

    Raises:
        InputError: a row without prompt, chosen and rejected, that cannot be rendered, whose responses are equal, or
            that is longer than `limit` tokens (never cut); names data set and row.
    """
    pairs = []
    for number, row in enumerate(rows, start=1):
        with _row_errors(name, number):
            prompt, chosen, rejected = render_preference(tokenizer, row)
            if chosen == rejected:
                raise InputError("chosen and rejected must differ, got the same response twice; drop the row")
        length = len(prompt) + max(len(chosen), len(rejected))
        if length > limit:
            raise InputError(
                f"{name} row {number}: prompt and response must fit {limit} tokens, got {length}; "
                "shorten the row, drop it or raise max_length"
            )
        pairs.append(PreferencePair(number - 1, tuple(prompt), tuple(chosen), tuple(rejected)))
    return pairs


def render_preference(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int], list[int]]:
    """(prompt ids, chosen ids, rejected ids), both responses with the end of sequence.

    Raises:
        InputError: it lacks one of the three, or the template breaks the prefix.
    """
    missing = [column for column in ("prompt", "chosen", "rejected") if row.get(column) is None]
    if missing:
        raise InputError(f"a preference needs prompt, chosen and rejected, got no {' and no '.join(missing)}")
    (prompt, chosen), (_, rejected) = (
        render_example(tokenizer, {"prompt": row["prompt"], "completion": row[column]})
        for column in ("chosen", "rejected")
    )
    return prompt, chosen, rejected


_BROKEN = (
    "the chat template renders an earlier turn differently once a later one follows, so prompts cannot be told from "
    "completions; use a template whose output only grows"
)


@contextmanager
def _row_errors(name: str, number: int) -> Iterator[None]:
    """Say which row it was."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} row {number}: {error}") from error
    except (ValueError, TypeError, KeyError, TemplateError, SyntaxError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name} row {number} cannot be rendered by the chat template: {reason}") from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, generate: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise InputError("a chat row needs a tokenizer with a chat template, the model has none; write prompts as text")
    try:
        with time_limit(_RENDER_SECONDS):
            ids: list[int] = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generate, tokenize=True, return_dict=False
            )
    except (TimeLimitError, MemoryError):
        raise InputError(
            f"the chat template must render a row within {_RENDER_SECONDS:g} s; simplify its loops"
        ) from None
    return ids


def _turn(tokenizer: PreTrainedTokenizerBase, before: Messages, answer: Messages) -> tuple[list[int], list[int]]:
    """Prompt ids, and what the template adds for the assistant's messages, up to the end of sequence."""
    prompt = _render(tokenizer, before, generate=True)
    whole = _render(tokenizer, [*before, *answer], generate=False)
    if whole[: len(prompt)] != prompt:
        raise InputError(_BROKEN)
    completion = whole[len(prompt) :]
    if tokenizer.eos_token_id in completion:  # templates may go on with a line break that is never generated
        last = len(completion) - completion[::-1].index(tokenizer.eos_token_id)
        return prompt, completion[:last]
    return prompt, _closed(tokenizer, completion)


def _open_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text with the tokenizer's own beginning of sequence but without an end."""
    ids: list[int] = tokenizer.encode(text)
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _closed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
