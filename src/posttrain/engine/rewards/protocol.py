"""What job and reward worker say to each other: JSON behind an 8-byte big-endian length, over a socket pair.

::

    worker: {"id": 0, "notes": […], "whole": true}               once it is confined, before any code of the user's
    job:    {"id": 1, "op": "open", "file", "entry", "dialect"}   ─▶    {"id": 1, "dialect", "where"} | fault
    job:    {"id": 2, "op": "score", "at": [0, 1, …], "prompts", …} ─▶  {"id": 2, "answers": [answer, …]}, repeated,
                                                                        then {"id": 2, "end": true} | fault
    answer: {"at": 0, "score": 0.5 | null, "components": {…}, "placed": [[7, 0.25], …]} | {"at": 1, "error": "one line"}
    fault:  {"id": 2, "fault": "load" | "raised" | "answer" | "memory", "message": "one line"}

The reward's code can write to the socket as well as the worker can, so the job believes nothing: an answer is bounded
in bytes, must be of one of these shapes, and carries the id of the request; what does not is malformed, and ends the
worker. Beside the socket the two share eight bytes, in which the worker says which completion it is at: whom to blame
when it dies or hangs. Standard library only.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.domain.requests import SHORTEST_SECRET
from posttrain.engine.rewards.answers import MAX_COMPONENTS, MAX_PLACES, MOST

MAX_REQUEST = 256 * 2**20  # bytes
MAX_ANSWER = 4 * 2**20  # bytes of one message: places of a long response
FULL = 2**16  # bytes of answers that are worth a message
MAX_TEXT = 1000  # characters of a line
FAULTS = ("load", "raised", "answer", "memory")


class MalformedError(Exception):
    """An answer that is none; the text says why."""


class Channel(Protocol):
    """The two methods of a connected socket that messages need."""

    def sendall(self, data: bytes, /) -> None:
        """Write everything."""

    def recv(self, count: int, /) -> bytes:
        """Read at most `count` bytes; none at the end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is confined."""

    whole: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """The reward is loaded."""

    dialect: str
    where: str  # file.py:12 (score)


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion's: a score, or one line on why there is none."""

    at: int
    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    placed: Mapping[int, float] = field(default_factory=dict)  # see `Score.at`


@dataclass(frozen=True, slots=True)
class Answers:
    """Those of some completions."""

    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class End:
    """All completions of the request have been answered."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The request as a whole failed."""

    kind: str
    message: str


class Redactor:
    """Puts the names of secrets in the place of their values, in whatever a reward prints or answers.

    A value is found as it is, with its whitespace collapsed, each of its longer lines, and any of these as JSON, as
    `repr` and as JSON of `repr`, whichever quotes stand around it.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        written = {
            form: f"[{name}]"
            for name, value in secrets.items()
            for text in (value, *filter(_is_telling, (" ".join(value.split()), *map(str.strip, value.splitlines()))))
            for once in (text, repr(text)[1:-1], repr(text + "'\"")[1:-4], json.dumps(text)[1:-1])
            for form in (once, repr(once)[1:-1], json.dumps(once)[1:-1])
        }
        self._texts = [(form, written[form]) for form in sorted(filter(None, written), key=len)[::-1]]
        self._forms = [(form.encode(errors="surrogateescape"), name.encode()) for form, name in self._texts]
        self.held = max((len(form) for form, _ in self._forms), default=1) - 1  # bytes that may begin a value

    def __call__(self, data: bytes) -> bytes:
        for form, name in self._forms:
            data = data.replace(form, name)
        return data

    def text(self, text: str) -> str:
        """As of bytes, before anything of the text is cut or collapsed."""
        for form, name in self._texts:
            text = text.replace(form, name)
        return text


def _is_telling(line: str) -> bool:
    return len(line) >= SHORTEST_SECRET


Message = Ready | Opened | Answers | End | Fault


def send(channel: Channel, value: Any) -> None:
    """Write one message."""
    data = json.dumps(value).encode()
    channel.sendall(struct.pack(">Q", len(data)) + data)


def send_answers(channel: Channel, request: int, answers: Iterator[Mapping[str, Any]], seconds: float = 0.02) -> None:
    """Write answers as they come, those of a while in one message."""
    held: list[bytes] = []
    size, due = 0, time.monotonic() + seconds
    try:
        for answer in answers:
            held.append(json.dumps(answer).encode())
            size += len(held[-1])
            if size > FULL or time.monotonic() > due:
                _send_held(channel, request, held)
                held, size, due = [], 0, time.monotonic() + seconds
    finally:
        _send_held(channel, request, held)


def _send_held(channel: Channel, request: int, held: Sequence[bytes]) -> None:
    if held:
        data = b'{"id": %d, "answers": [%s]}' % (request, b", ".join(held))
        channel.sendall(struct.pack(">Q", len(data)) + data)


def receive_request(channel: Channel) -> Any:
    """Read one request.

    Raises:
        EOFError: the other end closed.
        ValueError: too long, or not JSON.
    """
    return json.loads(_frame(channel, MAX_REQUEST))


def receive(channel: Channel, expected: int, clean: Callable[[bytes], bytes] = lambda data: data) -> Message:
    """Read one answer to the request `expected`.

    Args:
        clean: what is done with its bytes before they are read.

    Raises:
        EOFError: the other end closed.
        MalformedError: too long, not JSON, of no known shape, or an answer to another request.
    """
    try:
        value = json.loads(clean(_frame(channel, MAX_ANSWER)))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"what is not JSON or too large: {_line(error)}") from None
    if not isinstance(value, dict):
        raise MalformedError(f"a {type(value).__name__}, expected a JSON object")
    if type(value.get("id")) is not int or value["id"] != expected:
        raise MalformedError(
            f"request {value.get('id')!r:.40} while request {expected} was asked, as a process that it forked may"
        )
    return _message(value)


def _message(value: dict[str, Any]) -> Message:
    keys = value.keys() - {"id"}
    if keys == {"notes", "whole"}:
        return Ready(value["whole"] is True, tuple(_text(note) for note in _list(value["notes"])))
    if keys == {"dialect", "where"}:
        return Opened(_text(value["dialect"]), _text(value["where"]))
    if keys == {"end"}:
        return End()
    if keys == {"fault", "message"} and value["fault"] in FAULTS:
        return Fault(value["fault"], _text(value["message"]))
    if keys == {"answers"} and isinstance(value["answers"], list):
        return Answers([_answer(item) for item in value["answers"]])
    raise _unknown(keys)


def _answer(value: Any) -> Answer:
    keys = value.keys() if isinstance(value, dict) else set()
    if keys == {"at", "error"}:
        return Answer(_index(value["at"]), None, error=_text(value["error"]))
    if keys - {"placed"} == {"at", "score", "components"}:
        score = None if value["score"] is None else _worth(value["score"])
        components = {} if value["components"] == {} else _components(value["components"])
        return Answer(_index(value["at"]), score, components, placed=_placed(value.get("placed", [])))
    raise _unknown(keys)


def _unknown(keys: Iterable[str]) -> MalformedError:
    return MalformedError(f"an object of unknown shape with the keys {', '.join(sorted(map(str, keys)))[:200]}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_COMPONENTS:
        raise MalformedError("something that must be a short list and is not")
    return value


def _components(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_COMPONENTS:
        raise MalformedError(f"components that are no map of at most {MAX_COMPONENTS} numbers")
    return {name[:MAX_TEXT]: _number(number) for name, number in value.items()}


def _placed(value: Any) -> dict[int, float]:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if not pairs or len(value) > MAX_PLACES:
        raise MalformedError(f"places that are no list of at most {MAX_PLACES} pairs")
    return {_index(token): _worth(score) for token, score in value}


def _worth(value: Any) -> float:
    number = _number(value)
    if abs(number) > MOST:
        raise MalformedError(f"the score {number:g}, expected one within ±{MOST:g}")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedError(f"a {type(value).__name__} where a number is expected")
    try:
        number = float(value)
    except OverflowError:
        raise MalformedError("a number that no float holds") from None
    if not math.isfinite(number):
        raise MalformedError(f"{number} where a finite number is expected")
    return number


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MalformedError(f"the completion {value!r:.40}, expected its number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"a {type(value).__name__} where a text is expected")
    readable = value[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair is no text
    return " ".join(readable.split())


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _frame(channel: Channel, most: int) -> bytes:
    (length,) = struct.unpack(">Q", _exactly(channel, 8))
    if length > most:
        raise ValueError(f"message of {length} bytes is longer than {most}")
    return _exactly(channel, length)


def _exactly(channel: Channel, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = channel.recv(min(count - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError("the other end closed the socket")
        chunks += chunk
    return bytes(chunks)
