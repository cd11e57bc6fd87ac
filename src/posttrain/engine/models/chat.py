"""Rows to token ids and back: chat templates, prompts, demonstrations.

Rows are canonical (`posttrain.data.rows`): `prompt` [+ `completion`], `messages`, or `text`. What the model produced is
never decoded and encoded again. What a row becomes is said by `domain.rendering`, which the plan asks too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import InputError
from posttrain.domain.rendering import TimeLimitError, examples, pairs, prompts, row_errors, time_limit

_RENDER_SECONDS = 10.0  # that one rendering may take: a hundred thousand times what one takes
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised document: the loss is on `completion`, whose last token is the end of sequence."""

    row: int  # position in the data set, from 0
    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, ended: bool) -> str:
    """A response as text, without its end of sequence.

    Other special tokens stay visible: a response that needs them dropped to look right is not right.

    Args:
        ended: the last token ends the sequence. The rollout knows it, the tokenizer does not: it names one such token
            where a model may have several.
    """
    said = np.asarray(tokens[:-1] if ended else tokens, dtype=np.int64)  # of a list transformers looks at every item
    return str(tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_turn(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """One of several responses as text; without special tokens, of which one may end it in the middle of a sample."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


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
    found = []
    for number, ids in enumerate(prompts(_Tokens(tokenizer), rows, name=name), start=1):
        if len(ids) + reserve > limit:
            room = f"{limit} - {reserve} (max_new_tokens)" if reserve else f"{limit}"
            least = f"set max_new_tokens to {limit - len(ids)} at most, or " if 0 < limit - len(ids) < reserve else ""
            act = f"{least}shorten or drop it"
            raise InputError(f"{name} row {number}: prompt must fit {room} tokens, got {len(ids)}; {act}")
        found.append(ids)
    return found


def encode_examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int) -> list[Example]:
    """Every demonstration of every row; a conversation gives one example per assistant turn.

    Raises:
        InputError: a row that cannot be rendered, or is longer than `limit` tokens (never cut); names data set and row.
    """
    found = []
    for number, turns in enumerate(examples(_Tokens(tokenizer), rows, name=name), start=1):
        for prompt, completion in turns:
            length = len(prompt) + len(completion)
            if length > limit:
                raise InputError(
                    f"{name} row {number}: prompt and completion must fit {limit} tokens, got {length}; "
                    "shorten the row, drop it or raise max_length"
                )
            found.append(Example(number - 1, prompt, completion))
    return found


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
    found = []
    for number, (prompt, chosen, rejected) in enumerate(pairs(_Tokens(tokenizer), rows, name=name), start=1):
        with row_errors(name, number):
            if chosen == rejected:
                raise InputError("chosen and rejected must differ, got the same response twice; drop the row")
        length = len(prompt) + max(len(chosen), len(rejected))
        if length > limit:
            raise InputError(
                f"{name} row {number}: prompt and response must fit {limit} tokens, got {length}; "
                "shorten the row, drop it or raise max_length"
            )
        found.append(PreferencePair(number - 1, prompt, chosen, rejected))
    return found


class _Tokens:
    """A tokenizer of transformers as `domain.rendering` asks for one."""

    raised = (TemplateError,)

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.end: int | None = tokenizer.eos_token_id  # once: transformers looks it up in its vocabulary
        self.templated = bool(tokenizer.chat_template)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        try:
            with time_limit(_RENDER_SECONDS):
                return str(
                    self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False)
                )
        except (TimeLimitError, MemoryError):
            raise InputError(
                f"the chat template must render a row within {_RENDER_SECONDS:g} s; simplify its loops"
            ) from None

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids
