"""Facts that a job reports while it runs: values, streamed as JSON lines into the attempt folder's event segments.

The engine makes them and imports neither store nor telemetry; whoever reads them back gets the same values. A value is
read as the dataclass declares it, and a value of any other type raises.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from posttrain.domain.errors import IntegrityError

MOST_NUMBER = 1 << 53  # that anything counts: sums of them still fit a database
_LARGE = 1 << 63  # beyond it no database holds a whole number
MOST_TEXT = 1 << 14  # characters of what is kept in rows
T = TypeVar("T")


def shaped(form: Callable[..., T], raw: Mapping[str, Any]) -> T:
    """A dataclass of these fields. Elements of lists are not looked at: there may be millions.

    Raises:
        TypeError, ValueError: a field is missing, unknown, or of another type.
    """
    known = _checks(form)
    for name, value in raw.items():
        if name in known and not known[name](value):
            raise TypeError(f"{name} must be of type {_types(form)[name]}, got {repr(value)[:60]}")
    return form(**raw)


def count(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        TypeError: it is none.
    """
    if not _is_int(value) or not 0 <= value <= MOST_NUMBER:
        raise TypeError(f"must be a whole number from 0 to {MOST_NUMBER}, got {repr(value)[:60]}")
    return int(value)


def duration(value: Any) -> float:
    """Seconds: a number from 0 on, neither infinite nor NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value) or not 0 <= value < math.inf:
        raise TypeError(f"must be seconds, got {repr(value)[:60]}")
    return float(value)


def real(value: Any) -> float:
    """A number, which may be NaN.

    Raises:
        TypeError: it is none.
    """
    if not _is_number(value):
        raise TypeError(f"must be a number, got {repr(value)[:60]}")
    return value  # type: ignore[no-any-return]


def text(value: Any, most: int = MOST_TEXT) -> str:
    """Text that every database takes: no NUL, no half of a surrogate pair, cut where it is too long.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"must be text, got {repr(value)[:60]}")
    return value[:most].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGE


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


_READERS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
    "Mapping[str, float]": lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())),
    **{f"Sequence[{one}]": lambda value: isinstance(value, list | tuple) for one in ("int", "float", "str", "bool")},
}


@cache
def _types(form: Any) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(form)}


@cache
def _checks(form: Any) -> dict[str, Callable[[Any], bool]]:
    return {name: _READERS[kind] for name, kind in _types(form).items()}


@dataclass(frozen=True, slots=True)
class Metric:
    """Numbers of one step, e.g. `Metric(step=12, values={"reward/mean": 0.41}, at=1.7e9)`."""

    step: int
    values: Mapping[str, float]
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is. `step` is the liveness counter: it grows while the job lives, whatever the clocks say.

    `tokens` is what a budget meters, counted by one rule for every kind of job:

    * a prompt's tokens, once each time the prompt is read to be answered: samples of one prompt share that reading;
    * every generated token;
    * every token of a document trained on, prompt and response, once per optimiser step that it is part of.

    So supervised fine-tuning counts what it trains on, an evaluation what it reads and writes, and GRPO both: responses
    of groups with signal are generated and then trained on. Passes that neither answer nor train (the frozen reference
    of a KL penalty) are not counted.
    """

    step: int
    total: int
    phase: str  # "sft", "grpo", "evaluate" …
    tokens: int  # spent so far by this attempt's lineage
    at: float


@dataclass(frozen=True, slots=True)
class Span:
    """A timed hand-off: `[started, started + seconds)`."""

    name: str
    step: int
    started: float
    seconds: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """One line for a person: a warning, or what is going on."""

    message: str
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Sample:
    """One response's whole way through a step, from the prompt to the update that consumed it.

    Sequences are per response token, 0 at those that were observed, or empty where the role is absent or nothing was
    trained on it.
    """

    id: str  # "<step>.<prompt's position in the data stream>.<sample>", e.g. "12.388.3"; steps count from 0
    step: int
    prompt: str
    response: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    behaviour_logprobs: Sequence[float]
    truncated: bool
    versions: Sequence[str]  # policy versions that sampled it, "<incarnation>.<step>"
    reward: float | None
    fate: str  # "update 12, mini-batch 0" | "dropped: no score" | "dropped: group without signal", or another reason
    components: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"  # the reward's: ok | timeout | error | none
    advantages: Sequence[float] = ()
    logprobs: Sequence[float] = ()  # of the policy as the update found it
    ratios: Sequence[float] = ()  # exp(logprobs - old), the old being what the loss divides by
    clipped: Sequence[bool] = ()
    reference_logprobs: Sequence[float] = ()
    values: Sequence[float] = ()
    returns: Sequence[float] = ()
    earned: Sequence[float] = ()  # what of the reward stands where; empty: all of it at the end
    observed: Sequence[bool] = ()  # whether the policy did not sample it; empty: it sampled all
    temperature: float | None = None  # that it was sampled at, and that its log-probabilities are of; None: not known


Fact = Metric | Progress | Span | Note | Sample


FactSink = Callable[[Fact], None]


_KINDS: dict[str, type[Any]] = {"metric": Metric, "progress": Progress, "span": Span, "note": Note, "sample": Sample}


_NAMES = {kind: name for name, kind in _KINDS.items()}


_ARRAYS = {"Sequence[int]": "i", "Sequence[float]": "f", "Sequence[bool]": "b"}


_CODES = {f.name: _ARRAYS[str(f.type)] for f in fields(Sample) if str(f.type) in _ARRAYS}


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A JSON object whose `type` names the fact. A sample's numbers are bytes in base64, by their type code.

    That takes a fifth of the time of decimal numbers, and half of the bytes.
    """
    said = {f.name: getattr(fact, f.name) for f in fields(fact)}  # not asdict, which copies every list
    if isinstance(fact, Sample):
        said |= {name: _packed(code, said[name]) for name, code in _CODES.items() if len(said[name])}
    return {"type": _NAMES[type(fact)], **said}


def _packed(code: str, numbers: Sequence[float]) -> dict[str, str]:
    return {code: b64encode(array(code, numbers).tobytes()).decode("ascii")}


def _unpacked(given: Any) -> Any:
    """The numbers of `_packed`; what a release before it wrote is a list already."""
    if not isinstance(given, Mapping):
        return given
    [(code, text)] = given.items()
    numbers = array(code)
    numbers.frombytes(b64decode(text, validate=True))
    if code == "f":
        return [float(f"{value:.7g}") for value in numbers]  # seven digits: what float32 holds
    return list(map(bool, numbers)) if code == "b" else numbers.tolist()


def fact_from_json(value: Mapping[str, Any]) -> Fact:
    """The inverse of `fact_to_json`.

    Raises:
        IntegrityError: an unknown `type` or a missing field.
    """
    try:
        given = {key: item for key, item in value.items() if key != "type"}
        if value["type"] == "sample":
            given |= {name: _unpacked(given[name]) for name in _CODES.keys() & given.keys()}
        fact: Fact = shaped(_KINDS[value["type"]], given)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"event segment holds a fact that cannot be read: {error}; the job's version differs"
        ) from error
    return fact
