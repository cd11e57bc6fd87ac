"""Rendering of rows to token ids; stop strings, a time limit for chat templates, and the kind of a model.

Rows become token ids of prompts, demonstrations, labelled completions and preference pairs, many rows at a time. Rows
are canonical (`data.rows`): `prompt` [+ `completion`, or `chosen` and `rejected`], `messages`, or `text`. `Tokens` is a
tokenizer with its chat template: the engine passes the tokenizer of transformers, a plan its own reader of the same
files. Rows are rendered in turn and their texts are encoded together, one batch per call; the result, and the first
rejected row with its error, are the same as if each row were encoded before the next is rendered. Each rendering must
be a prefix of the rendering one turn later, since a template that rewrites earlier turns would train on tokens that
inference never produces.

Stop strings end a response; `stop_fault` checks them. `LEAST_TEMPERATURE` is the least temperature of sampling.

`time_limit` limits the running time of untrusted programs such as chat templates. It raises an exception in the thread
that runs the program, which interrupts Python code between bytecodes. It does not interrupt a single operation in C;
the caller must prevent long operations.

`is_classifier` reads a model's kind from its `config.json`.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.domain.errors import InputError

Ids = tuple[int, ...]
Row = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
LEAST_TEMPERATURE = 1e-6  # of sampling; logits divided by less can overflow
_BATCH = 1000  # rows whose texts are in memory at the same time
_BROKEN = (
    "the chat template renders an earlier turn differently once a later one follows, so prompts cannot be separated "
    "from completions; use a template whose output only grows"
)
# errors of a template or a tokenizer; SyntaxError: jinja's compiled code nests too many blocks for Python
_WRONG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
RAISED: tuple[type[Exception], ...] = (*_WRONG, RecursionError, SyntaxError)
MOST_STOPS, MOST_STOP = 16, 256  # maximum number of stop strings, and of characters in each
_LOOK = 0.05  # seconds between checks of deadlines
CONFIG = "config.json"


class Tokens(Protocol):
    """A tokenizer with its chat template."""

    @property
    def end(self) -> int | None:
        """The end-of-sequence token; None: undefined."""

    @property
    def raised(self) -> tuple[type[Exception], ...]:
        """The exceptions that the template itself raises."""

    @property
    def templated(self) -> bool:
        """Whether there is a chat template."""

    def render(self, messages: Messages, *, generate: bool) -> str:
        """Return the text of a conversation; with `generate` up to the beginning of the model's response."""

    def encode(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        """Return the token ids of each text; with `special`, including special tokens around the text."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and its answer, if any. In a chat, both are renderings, and `answer` includes the prompt."""

    prompt: str
    answer: str | None
    chat: bool


_Draft = Callable[[Tokens, Row], list[_Turn]]
_Known = dict[tuple[str, bool], Ids]  # (text, special) → ids


def prompts(tokens: Tokens, rows: Sequence[Row], *, name: str) -> Iterator[Ids]:
    """Yield the prompt of every row: `prompt`, or `messages` without the final assistant messages.

    Args:
        name: the data set's name in errors.

    Raises:
        InputError: a row has neither column or cannot be rendered, or is a chat and the tokenizer has no chat template;
            the message names data set and row (from 1).
    """
    for _, [(prompt, _)] in _encoded(tokens, rows, name, _prompt):
        yield prompt


def examples(
    tokens: Tokens, rows: Sequence[Row], *, name: str, labelled: bool = False
) -> Iterator[list[tuple[Ids, Ids]]]:
    """Yield each row's demonstrations as (prompt, completion): one per assistant turn of `messages`, otherwise one.

    With `labelled`, a row gives the completions whose labels `labels_of` returns.

    Completions end with the end-of-sequence token. A `text` row is a completion except for its first token, which is
    not predicted.

    Raises:
        InputError: a row has no demonstration or cannot be rendered, or a rendering is not a prefix of the next; the
            message names data set and row (from 1).
    """
    for _, found in _encoded(tokens, rows, name, _labelled if labelled else _examples):
        yield [turn if turn[1] else _begun(_closed(tokens, turn[0])) for turn in found]


def pairs(tokens: Tokens, rows: Sequence[Row], *, name: str) -> Iterator[tuple[Ids, Ids, Ids]]:
    """Yield (prompt, chosen, rejected) for every row; both responses end with the end-of-sequence token.

    Raises:
        InputError: a row lacks one of the three or cannot be rendered, or a rendering is not a prefix of the next; the
            message names data set and row (from 1).
    """
    for _, [(prompt, chosen), (_, rejected)] in _encoded(tokens, rows, name, _pair):
        yield prompt, chosen, rejected


@contextmanager
def row_errors(name: str, number: int, raised: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Add the number of the row to errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} row {number}: {error}") from error
    except RAISED + raised as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name} row {number} cannot be rendered by the chat template: {reason}") from error


# --- turns of a row ---------------------------------------------------------------------------------------------------


def _prompt(tokens: Tokens, row: Row) -> list[_Turn]:
    if row.get("prompt") is not None:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return [_Turn(prompt, None, chat=False)]
        return [_Turn(_rendered(tokens, prompt, generate=True), None, chat=True)]
    if row.get("messages") is None:
        raise InputError(f"a prompt needs the column prompt or messages, got {', '.join(sorted(row))}")
    messages = list(row["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return [_Turn(_rendered(tokens, messages, generate=True), None, chat=True)]


def _examples(tokens: Tokens, row: Row) -> list[_Turn]:
    if row.get("completion") is not None and row.get("prompt") is not None:
        return _answers(tokens, row["prompt"], [row["completion"]])
    if row.get("messages") is not None:
        messages = list(row["messages"])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InputError("messages must contain an assistant message to learn from, got none")
        return [turn for i in turns for turn in _answers(tokens, messages[:i], [messages[i : i + 1]])]
    if row.get("text") is not None:
        return [_Turn(row["text"], None, chat=False)]
    raise InputError(f"a demonstration needs completion, messages or text, got columns {', '.join(sorted(row))}")


def _pair(tokens: Tokens, row: Row) -> list[_Turn]:
    missing = [column for column in ("prompt", "chosen", "rejected") if row.get(column) is None]
    if missing:
        raise InputError(f"a preference needs prompt, chosen and rejected, got no {' and no '.join(missing)}")
    return _answers(tokens, row["prompt"], [row["chosen"], row["rejected"]])


def labels_of(row: Row) -> tuple[bool, ...]:
    """Return the labels of a row's completions: `label` of `completion`, or true and false of `chosen` and `rejected`.

    Raises:
        InputError: the row has neither form, or its label is not a boolean.
    """
    if row.get("completion") is None and row.get("chosen") is not None:
        return True, False
    if missing := [column for column in ("prompt", "completion", "label") if row.get(column) is None]:
        raise InputError(
            "a labelled row needs prompt, completion and label, or prompt, chosen and rejected, got no "
            f"{' and no '.join(missing)}; add it, or drop the row"
        )
    if not isinstance(row["label"], bool):
        raise InputError(f"label must be true or false, got {row['label']!r:.60}; write a boolean, in JSON or Parquet")
    return (row["label"],)


def _labelled(tokens: Tokens, row: Row) -> list[_Turn]:
    return _pair(tokens, row) if len(labels_of(row)) == 2 else _answers(tokens, row["prompt"], [row["completion"]])


def _answers(tokens: Tokens, prompt: str | Messages, answers: Sequence[Any]) -> list[_Turn]:
    """Return a turn for each of several answers to one prompt."""
    if isinstance(prompt, str):
        return [_Turn(prompt, answer, chat=False) for answer in answers]
    before = _rendered(tokens, prompt, generate=True)
    return [_Turn(before, _rendered(tokens, [*prompt, *answer], generate=False), chat=True) for answer in answers]


def _rendered(tokens: Tokens, messages: Messages, *, generate: bool) -> str:
    if not tokens.templated:
        raise InputError(
            "a chat row needs a tokenizer with a chat template, but the model has no template; write prompts as text"
        )
    if not messages:
        raise InputError("a chat row needs at least one message before the answer, got none")
    return tokens.render(messages, generate=generate)


# --- batches ----------------------------------------------------------------------------------------------------------


def _encoded(
    tokens: Tokens, rows: Sequence[Row], name: str, draft: _Draft
) -> Iterator[tuple[int, list[tuple[Ids, Ids]]]]:
    """Yield the rows' numbers and turns, in order."""
    for start in range(0, len(rows), _BATCH):
        drafts, broken = _drafts(tokens, rows[start : start + _BATCH], name, start + 1, draft)
        try:
            together = _known(tokens, drafts)
        except RAISED:
            together = None  # encoded row by row below, to find the row of the error
        for number, turns in enumerate(drafts, start=start + 1):
            with row_errors(name, number):
                known = _known(tokens, [turns]) if together is None else together
                found = [_ids(tokens, turn, known) for turn in turns]
            yield number, found
        if broken is not None:
            raise broken


def _drafts(
    tokens: Tokens, rows: Sequence[Row], name: str, first: int, draft: _Draft
) -> tuple[list[list[_Turn]], InputError | None]:
    """Return the turns of the rows, up to the first row that cannot be rendered, and that row's error."""
    drafts: list[list[_Turn]] = []
    for number, row in enumerate(rows, start=first):
        try:
            with row_errors(name, number, tokens.raised):
                drafts.append(draft(tokens, row))
        except InputError as error:
            return drafts, error
    return drafts, None


def _known(tokens: Tokens, drafts: Sequence[Sequence[_Turn]]) -> _Known:
    """Return every text of the rows with its ids; equal texts are encoded once."""
    turns = [turn for draft in drafts for turn in draft]
    chats = [text for turn in turns for text in (turn.prompt if turn.chat else None, turn.answer) if text is not None]
    known: _Known = {}
    for special, texts in ((False, chats), (True, [turn.prompt for turn in turns if not turn.chat])):
        distinct = list(dict.fromkeys(texts))
        if distinct:
            found = tokens.encode(distinct, special=special)
            known.update(((text, special), tuple(ids)) for text, ids in zip(distinct, found, strict=True))
    return known


def _ids(tokens: Tokens, turn: _Turn, known: _Known) -> tuple[Ids, Ids]:
    """Return the ids of a turn's prompt and completion; the completion is empty only without an answer."""
    prompt = known[turn.prompt, not turn.chat]
    if not turn.chat and prompt and prompt[-1] == tokens.end:  # keep the beginning of sequence, drop the end
        prompt = prompt[:-1]
    if turn.answer is None:
        return prompt, ()
    answer = known[turn.answer, False]
    if not turn.chat:
        return prompt, _closed(tokens, answer)
    if answer[: len(prompt)] != prompt:
        raise InputError(_BROKEN)
    completion = answer[len(prompt) :]
    if tokens.end in completion:  # templates may add a line break that is never generated
        return prompt, completion[: len(completion) - completion[::-1].index(tokens.end)]
    return prompt, _closed(tokens, completion)


def _closed(tokens: Tokens, ids: Ids) -> Ids:
    return ids if ids and ids[-1] == tokens.end else (*ids, -1 if tokens.end is None else tokens.end)


def _begun(ids: Ids) -> tuple[Ids, Ids]:
    return ids[:1], ids[1:]


def stop_fault(stop: Sequence[str]) -> str | None:
    """Return the error in a list of stop strings; None: the list is valid."""
    if isinstance(stop, str):  # otherwise its letters would count as strings
        return f"must be a list of strings, got the string {stop[:20]!r}; write [{stop[:20]!r}]"
    if len(stop) > MOST_STOPS:
        return f"must be at most {MOST_STOPS} strings, got {len(stop)}; leave some out"
    for one in stop:
        if not 1 <= len(one) <= MOST_STOP:
            found = f"got {len(one)}: {one[:20]!r}"
            return f"must contain strings of 1 to {MOST_STOP} characters, {found}; cut or remove it"
        if any(sign == "\ufffd" or "\ud800" <= sign <= "\udfff" for sign in one):
            return f"must contain text, got {one!r}, of which a part stands for no character; remove it"
    return None


class TimeLimitError(BaseException):
    """The time limit was exceeded. Not an `Exception`, so code that catches `Exception` does not swallow it."""


class _Watcher:
    """One thread that checks all deadlines; started with the first deadline, and again in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[int, float] = {}  # thread → moment
        self._fired = set[int]()  # threads in which an exception was raised
        self._process = 0

    def arm(self, seconds: float) -> None:
        """Set the deadline of this thread.

        Raises:
            RuntimeError: this thread has a deadline already.
        """
        if self._process != os.getpid():
            self._lock, self._due, self._fired, self._process = threading.Lock(), {}, set(), os.getpid()
            threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
        with self._lock:
            if threading.get_ident() in self._due:
                raise RuntimeError("time limits must not nest")
            self._due[threading.get_ident()] = time.monotonic() + seconds

    def disarm(self) -> None:
        """Remove the deadline; afterwards no exception arrives.

        An exception that may be pending is received, not cancelled: in CPython 3.11, a cancelled one leaves a mark that
        makes the process hang as soon as a debugger or a profiler traces it.
        """
        thread = threading.get_ident()
        while True:
            try:
                with self._lock:
                    self._due.pop(thread, None)
                    fired = thread in self._fired
                    self._fired.discard(thread)
                if not fired:
                    return
                _raise_in(thread)  # replaces one that is pending
                while True:
                    pass
            except TimeLimitError:
                continue

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, moment in self._due.items() if moment <= now]:
                    # raised at every check until the block ends: code that catches everything may swallow one exception
                    self._fired.add(thread)
                    _raise_in(thread)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))


_WATCHER = _Watcher()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block with `TimeLimitError` after this many seconds. Blocks do not nest.

    Raises:
        TimeLimitError: the block took longer.
    """
    _WATCHER.arm(seconds)
    try:
        yield
    finally:
        _WATCHER.disarm()


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether `architectures` names a sequence classifier, a model that scores responses and generates none."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def refuse_equal(chosen: object, rejected: object) -> None:
    """Raise InputError if the two responses of a preference are equal."""
    if chosen == rejected:
        raise InputError("chosen and rejected must differ, got the same response twice; drop the row")


def check_labels(rows: Sequence[Row], name: str, *, both: bool) -> None:
    """Reject rows without a boolean label or with a pair of equal responses, and a single labelled completion.

    Args:
        both: whether some completions must have the label true and others false.

    Raises:
        InputError: a row or the set of labels is rejected; the message names the data set and the row (from 1).
    """
    found: list[bool] = []
    for number, row in enumerate(rows, start=1):
        with row_errors(name, number):
            found += (labels := labels_of(row))
            if len(labels) == 2:
                refuse_equal(row["chosen"], row.get("rejected"))
    if len(found) < 2:
        raise InputError(
            f"{name} must have at least 2 labelled completions, since a prompt is also paired with the completion of "
            f"another row, got {len(found)}; add rows"
        )
    if both and len(set(found)) == 1:
        only, other = ("true", "false") if found[0] else ("false", "true")
        raise InputError(
            f"{name} must have labels true and false, got only {only} in {len(rows)} rows; add rows with label {other}"
        )


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of routed experts of a layer in a `config.json`, and the number that compute a token.

    Both are 0 for a dense model.
    """
    experts = _first_set(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return experts, min(_first_set(config, "num_experts_per_tok", "moe_k", "moe_topk") or 1, experts)


def _first_set(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these numbers that is set; 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int) and config[name]), 0)
