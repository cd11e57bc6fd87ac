"""Checks, before a job runs, that a data set's rows fit a model. Counts tokens as the engine does, without torch.

`domain.rendering` renders rows for the control side and the engine. The engine tokenizes rendered rows with
transformers, which the control side does not import. This module reads the same two files, `tokenizer.json` and the
chat template, with `tokenizers` and `jinja2`; a test compares the token ids with those of the engine. For a tokenizer
without `tokenizer.json`, only the job makes these checks.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from posttrain.data.rows import Row
from posttrain.domain import rendering
from posttrain.domain.errors import InputError

Read = Callable[[str], bytes | None]  # returns a file in the model's folder by name; None: it does not exist
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys under which templates read a message's reasoning
_SHOWN = 60  # maximum characters of a wrong value in an error
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")
_RENDER_SECONDS = 10.0  # maximum time of one rendering, 100,000 times the usual time
_MEAN_SECONDS = 0.1
_MOST_RENDERED = 10**7  # maximum characters of one rendered row
_SIMPLER = "simplify its loops"
_MOST_REPEATED, _MOST_BITS = 10**6, 10**5  # limits per operation: characters or items; bits of a number


class PlanTokenizer:
    """A model's tokenizer and chat template.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        template: Jinja source; None if the model has no template.
        special: variables of the template, such as `eos_token` → the token's text.
    """

    def __init__(self, tokenizer: Any, template: str | None, special: Mapping[str, str]) -> None:
        self.tokenizer, self._special = tokenizer, special
        self._source, self._compiled = template, cast(Any, None)
        self._renders, self._spent = 0, 0.0
        # the id of the end-of-sequence token; None if the files do not name this token
        self.end: int | None = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None

    def begin(self) -> None:
        """Forget the time of earlier renderings, because the rows of another data set follow."""
        self._renders, self._spent = 0, 0.0

    @property
    def raised(self) -> tuple[type[Exception], ...]:
        """The exceptions that a template raises itself."""
        from jinja2 import TemplateError  # imported here, because only plans need it

        return (TemplateError,)

    @property
    def templated(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the text of a conversation. Raises InputError if rendering takes too long or the text is too long."""
        given = [_message(message) for message in messages]
        begun = time.monotonic()
        try:
            with rendering.time_limit(_RENDER_SECONDS):
                if self._compiled is None:
                    self._compiled = _environment().from_string(self._source)
                text = self._compiled.render(
                    messages=given, add_generation_prompt=generate, tools=tools, documents=None, **self._special
                )
        except (rendering.TimeLimitError, MemoryError):
            raise InputError(f"the chat template must render a row within {_RENDER_SECONDS:g} s; {_SIMPLER}") from None
        self._renders, self._spent = self._renders + 1, self._spent + time.monotonic() - begun
        if self._spent > _RENDER_SECONDS + _MEAN_SECONDS * self._renders:
            mean = f"{self._spent / self._renders:.2g} s for each of {self._renders} renderings"
            raise InputError(
                f"the chat template must take less than {_MEAN_SECONDS:g} s per row, got {mean}; {_SIMPLER}"
            )
        if len(text) > _MOST_RENDERED:
            raise InputError(
                f"the chat template must render at most {_MOST_RENDERED} characters per row, got {len(text)}"
            )
        return str(text)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text; with `special`, include the tokenizer's special tokens around the text."""
        return [found.ids for found in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]


def open_tokenizer(read: Read) -> PlanTokenizer | None:
    """Return the tokenizer of a model; None if it cannot be read without transformers."""
    import tokenizers  # imported here, because only plans need it

    data = read("tokenizer.json")
    if data is None:
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        config = json.loads(read("tokenizer_config.json") or b"{}")
        template = _template(read, config)
        known = {**json.loads(read("special_tokens_map.json") or b"{}"), **config}
        special = {name: text for name in _SPECIAL for text in _texts([known.get(name)])}
        tokenizer.add_special_tokens([*special.values(), *_texts(config.get("extra_special_tokens"))])
    except Exception:  # tokenizers raises plain Exception for a newer file format
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return PlanTokenizer(tokenizer, template, special)


def context_length(read: Read) -> int | None:
    """Return the context length in tokens from `config.json`; None if the file does not contain it."""
    config = json.loads(read("config.json") or b"{}")
    text = config.get("text_config") or config
    return next((int(text[key]) for key in _CONTEXT if text.get(key)), None)


def check_answers(rows: Sequence[Row], name: str) -> None:
    """Reject rows that cannot be marked right or wrong.

    Raises:
        InputError: a row has no reference answer; the message names the data set and the row (from 1).
    """
    for number, row in enumerate(rows, start=1):
        answer = row.get("answer")
        if answer is None:
            there = ", ".join(sorted(column for column, value in row.items() if value is not None))
            raise InputError(
                f"{name} row {number} must have an answer as text, got no answer in the columns {there}; add "
                "`answer`, or drop the row"
            )
        if not isinstance(answer, str):
            shown = json.dumps(answer, ensure_ascii=False, default=str)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
            raise InputError(
                f"{name} row {number} must have an answer as text, got answer {shown} ({type(answer).__name__}); "
                "quote it or drop the row"
            )


def check_prompts(
    rows: Sequence[Row], tokenizer: PlanTokenizer, *, name: str, context: int | None, reserve: int
) -> None:
    """Reject prompts that leave no room for their responses.

    Args:
        context: maximum number of tokens of prompt and response together; None: no limit.
        reserve: maximum number of tokens of a response.

    Raises:
        InputError: a row cannot be rendered or does not fit; the message names the data set and the row (from 1).
    """
    for number, prompt in enumerate(rendering.prompts(tokenizer, rows, name=name), start=1):
        with rendering.row_errors(name, number):
            length = len(_begun(prompt))
        if context is not None and length + reserve > context:
            raise InputError(
                f"{name} row {number}: prompt of {length} tokens + a response of up to {reserve} exceeds the context "
                f"of {context}; shorten or drop the row, or lower max_new_tokens"
            )


def check_characters(rows: Sequence[Row], *, name: str, context: int, reserve: int) -> None:
    """Reject prompts that leave no room for their responses in a model that does not exist yet.

    The tokens of such a model will be characters and special tokens.

    Args:
        context: maximum number of tokens of prompt and response together.
        reserve: maximum number of tokens of a response.

    Raises:
        InputError: the text of a row alone does not fit; the message names the data set and the row (from 1).
    """
    for number, row in enumerate(rows, start=1):
        prompt = row.get("prompt") or ""
        said = [prompt] if isinstance(prompt, str) else [turn.get("content") for turn in prompt]
        length = sum(len(text) for text in said if isinstance(text, str))
        if length + reserve > context:
            raise InputError(
                f"{name} row {number}: prompt of at least {length} tokens + a response of up to {reserve} exceeds the "
                f"context of {context}; shorten or drop the row, lower max_new_tokens or raise context_length"
            )


def check_demonstrations(
    rows: Sequence[Row],
    tokenizer: PlanTokenizer,
    *,
    name: str,
    context: int | None,
    longest: int | None,
    labelled: bool = False,
) -> None:
    """Reject demonstrations that are too long, since demonstrations are never truncated.

    Args:
        context: the model's limit in tokens for prompt and completion together; None: no limit.
        longest: the stage's limit in tokens; None: no limit.
        labelled: whether the rows are labelled completions.

    Raises:
        InputError: a row cannot be rendered, has no demonstration or does not fit; the message names the data set and
            the row (from 1).
    """
    for number, turns in enumerate(rendering.examples(tokenizer, rows, name=name, labelled=labelled), start=1):
        with rendering.row_errors(name, number):
            length = max(len(_begun(prompt)) + len(completion) for prompt, completion in turns)
        _refuse_longer(length, longest, context, f"{name} row {number}: prompt and completion")


def _refuse_longer(length: int, longest: int | None, context: int | None, what: str) -> None:
    limits = [(longest, "max_length"), (context, "the context")]
    limit, word = min(((n, word) for n, word in limits if n is not None), default=(length, ""))
    if length > limit:
        raise InputError(
            f"{what} of {length} tokens exceed {word} of {limit}; "
            f"shorten or drop the row{', or raise max_length' if word == 'max_length' else ''}"
        )


def _begun(prompt: rendering.Ids) -> rendering.Ids:
    """Return a prompt's tokens; reject an empty prompt, since the first token of a document is not predicted."""
    if not prompt:
        raise InputError("a prompt must have at least one token, got an empty prompt; write a prompt, or drop the row")
    return prompt


def check_responses_differ(rows: Sequence[Row], name: str) -> None:
    """Reject preference pairs with equal responses, before tokenisation.

    Raises:
        InputError: a pair has equal responses; the message names the data set and the row (from 1).
    """
    for number, row in enumerate(rows, start=1):
        if row.get("chosen") is not None:
            with rendering.row_errors(name, number):
                rendering.refuse_equal(row["chosen"], row.get("rejected"))


def check_pairs(
    rows: Sequence[Row], tokenizer: PlanTokenizer, *, name: str, context: int | None, longest: int | None
) -> None:
    """Reject preference pairs that are too long or have equal responses.

    Args:
        context: the model's limit in tokens for prompt and response together; None: no limit.
        longest: the stage's limit in tokens; None: no limit.

    Raises:
        InputError: a row cannot be rendered or does not fit, or its responses have the same tokens; the message names
            the data set and the row (from 1).
    """
    for number, (prompt, chosen, rejected) in enumerate(rendering.pairs(tokenizer, rows, name=name), start=1):
        with rendering.row_errors(name, number):
            length = len(_begun(prompt)) + max(len(chosen), len(rejected))
            rendering.refuse_equal(chosen, rejected)
        _refuse_longer(length, longest, context, f"{name} row {number}: prompt and response")


# --- the inputs of a chat template, as in transformers ----------------------------------------------------------------


def _template(read: Read, config: Mapping[str, Any]) -> str | None:
    file = read("chat_template.jinja")
    if file is not None:
        return file.decode()
    found = config.get("chat_template")
    if isinstance(found, list):  # the file contains several templates, each with a name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found or None


def _texts(tokens: Any) -> list[str]:
    """Return the texts of tokens, each of which is written as text or as `{"content": text, …}`."""
    values = tokens.values() if isinstance(tokens, Mapping) else tokens or ()
    found = [value.get("content") if isinstance(value, Mapping) else value for value in values]
    return [text for text in found if isinstance(text, str) and text]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null fields; its reasoning is under every key that templates use."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _huge(operator: str, left: Any, right: Any) -> bool:
    """Return whether the result of a product, power or format operation would be larger than any prompt needs."""
    bits = [number.bit_length() for number in (left, right) if isinstance(number, int)]
    if operator == "%":
        return isinstance(left, str) and re.search(r"%[^a-zA-Z%]*[0-9*]{4}", left) is not None
    if operator == "**":
        return len(bits) == 2 and bits[0] * max(right, 0) > _MOST_BITS
    if len(bits) == 2:
        return sum(bits) > _MOST_BITS
    repeated = [len(side) for side in (left, right) if hasattr(side, "__len__")]
    return bool(bits and repeated) and repeated[0] * max(left if isinstance(left, int) else right, 0) > _MOST_REPEATED


def _environment() -> Any:
    """Return the sandboxed Jinja environment of chat templates: trimmed blocks, loop controls, `generation` blocks."""
    from jinja2 import TemplateError, ext, nodes, sandbox

    class Generation(ext.Extension):
        """The tag `{% generation %}`, which marks an assistant's text and does not change it."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class Bounded(sandbox.ImmutableSandboxedEnvironment):
        """A Jinja environment that rejects operations that take minutes in a single C call."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _huge(operator, left, right):
                raise TemplateError(f"creates a value that is too large with {operator}")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
