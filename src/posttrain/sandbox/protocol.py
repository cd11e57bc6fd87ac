"""Messages between job and worker, and the numbers in a reward's answer.

A message is JSON after an 8-byte big-endian length, over a socket pair:

::

    worker: {"id": 0, "notes": […], "whole": true}               once it is confined, before it runs the user's code
    job:    {"id": 1, "op": "open", "file", "entry", "dialect"}   ─▶    {"id": 1, "dialect", "where"} | fault
    job:    {"id": 2, "op": "score", "at": [0, 1, …], "prompts", …} ─▶  {"id": 2, "answers": [answer, …]}, repeated,
                                                                        then {"id": 2, "end": true} | fault
    job:    {"id": 1, "op": "observer", "build", "given", …}      ─▶    {"id": 1, "dialect": "", "where"} | fault
    job:    {"id": 2, "op": "observe", "row", "responses"}        ─▶    {"id": 2, "seen": text | null}
                                                                        | {"id": 2, "unseen": "one line"}
    job:    {"id": 3, "op": "ping"}                               ─▶    {"id": 3, "end": true}
    job:    {"id": 1, "op": "program", "words", "variables", …}   ─▶    {"id": 1, "code": 0}, then a descriptor | fault
    answer: {"at": 0, "score": 0.5 | null, "components": {…}, "placed": [[7, 0.25], …]} | {"at": 1, "error": "one line"}
    fault:  {"id": 2, "fault": "load" | "raised" | "answer" | "memory", "message": "one line"}

Several observations may be open; their answers come in any order.

The reward's code can also write to the socket, so the job trusts no message: an answer is bounded in bytes, must have
one of these shapes and the id of the request; any other answer is malformed, and the job ends the worker. Job and
worker also share eight bytes, in which the worker writes the number of the completion being scored: this completion is
the cause if the worker dies or hangs.

A reward's answer for one completion is reduced to numbers: score, components, and the tokens at which the score was
earned.

The module uses only the standard library, because it runs in the reward worker; the job runs parts of it again, because
it trusts no worker.
"""

import json
import math
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.domain.jobspec import SHORTEST_SECRET

TURNS, TOKENS = "turn_scores", "token_scores"
OWN = ("score", TURNS, TOKENS)  # keys of a mapping; its other numbers are components
MAX_COMPONENTS = 64
MAX_PLACES = 2**16  # tokens of one completion with a score
MOST = 1e30  # maximum of a score; even times the largest weights it fits in float32
_LAST = 10**7  # maximum token index of a response of unknown length
Spans = Sequence[Sequence[int]]  # [first token, end) of every turn; empty: one turn of unknown length
MAX_REQUEST = 256 * 2**20  # bytes
MAX_ANSWER = 4 * 2**20  # bytes of one message: token scores of a long response
FULL = 2**16  # bytes of answers after which a message is sent
MAX_TEXT = 1000  # characters of a line
FAULTS = ("load", "raised", "answer", "memory")


class AnswerError(ValueError):
    """An invalid answer; the message continues "FUNCTION must return"."""


def plain(answer: Any, subject: str, spans: Spans) -> dict[str, Any]:
    """Return score, components and places of a number, None, or a mapping with `score`, `turn_scores` or
    `token_scores`.

    Args:
        answer: the reward's return value; its methods are untrusted code too.
        subject: the completion, as text.
        spans: the token spans of the completion's turns.

    Raises:
        AnswerError: a value has a wrong type, is not finite, or is at a place at which no score can be earned.
    """
    components: dict[str, float] = {}
    at: dict[int, float] = {}
    if isinstance(answer, Mapping):
        answer, components, at = _read(dict(answer), subject, spans)
    value = _number_of(answer)
    if value is None and (answer is not None or at):
        wanted = "a number" if at else "a number or None"
        raise AnswerError(f"{wanted} for {subject}, got {type(answer).__name__}")
    for name, number in (("score", value), *components.items()):
        if number is not None and not math.isfinite(number):
            raise AnswerError(
                f"finite numbers, got {number} as {name} of {subject}; return None for a completion that cannot be "
                "scored"
            )
    if value is not None and abs(value) > MOST:
        raise AnswerError(f"a score within ±{MOST:g} for {subject}, got {value:g}; scale it")
    return {"score": value, "components": components, **({"placed": list(at.items())} if at else {})}


def refuse_places(at: Mapping[int, float], sampled: Sequence[bool]) -> None:
    """Check the token scores of an untrusted worker against a response.

    Args:
        sampled: [r] whether the policy sampled each token.

    Raises:
        AnswerError: a token is outside the response, or was not sampled by the policy.
    """
    for token in at:
        if not 0 <= token < len(sampled):
            raise AnswerError(f"{TOKENS} of tokens 0 to {len(sampled) - 1}, got a score of token {token}")
        if not sampled[token]:
            raise AnswerError(
                f"{TOKENS} of tokens that the policy sampled, got a score of token {token}, which is in an observation"
            )


def _read(answer: dict[Any, Any], subject: str, spans: Spans) -> tuple[Any, dict[str, float], dict[int, float]]:
    """Return the score, the components, and the map from token to score of a mapping."""
    others = {str(name)[:200]: _number_of(value) for name, value in answer.items() if name not in OWN}
    components = {name: value for name, value in others.items() if value is not None}
    if len(components) > MAX_COMPONENTS:
        raise AnswerError(f"at most {MAX_COMPONENTS} components, got {len(components)}")
    turns, tokens = answer.get(TURNS), answer.get(TOKENS)
    earned = _by_turn(turns, subject, spans) if turns is not None else []
    if tokens is not None:
        earned += _by_token(tokens, subject, spans)
    if "score" not in answer and turns is None and tokens is None:
        names = list(map(str, answer))[:9]
        raise AnswerError(f"`score`, `{TURNS}` or `{TOKENS}` in its mapping for {subject}, got {names}")
    whole = answer["score"] if "score" in answer else math.fsum(value for _, value in earned)
    found: dict[int, list[float]] = {}
    for token, value in earned:
        if token is not None:
            found.setdefault(token, []).append(value)
    if len(found) > MAX_PLACES:
        raise AnswerError(f"scores of at most {MAX_PLACES} tokens of {subject}, got {len(found)}")
    return whole, components, {token: math.fsum(values) for token, values in sorted(found.items())}


def _by_turn(given: Any, subject: str, spans: Spans) -> list[tuple[int | None, float]]:
    """Return the last token of each turn and its score; nothing for a single turn, whose score counts at the end."""
    scores, turns = given.tolist() if hasattr(given, "tolist") else given, max(len(spans), 1)
    if not isinstance(scores, list | tuple):
        raise AnswerError(f"{TURNS} as a list of numbers for {subject}, got {type(scores).__name__}")
    if len(scores) != turns:
        raise AnswerError(f"{TURNS} for each turn of {subject} ({turns}), got {len(scores)}")
    ends: list[int | None] = [None] if turns == 1 else [int(stop) - 1 for _, stop in spans]
    return [(end, _finite(TURNS, score, subject)) for end, score in zip(ends, scores, strict=True)]


def _by_token(given: Any, subject: str, spans: Spans) -> list[tuple[int | None, float]]:
    if not isinstance(given, Mapping):
        raise AnswerError(f"{TOKENS} as a map of tokens to numbers for {subject}, got {type(given).__name__}")
    return [(_token(at, subject, spans), _finite(TOKENS, score, subject)) for at, score in dict(given).items()]


def _token(at: Any, subject: str, spans: Spans) -> int:
    try:
        token = int(at)
        whole = token == float(at) and token >= 0
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise AnswerError(f"{TOKENS} of tokens by number from 0 for {subject}, got {at!r:.40}")
    last = spans[-1][1] if spans else _LAST
    if token >= last:
        raise AnswerError(f"{TOKENS} of tokens 0 to {last - 1} of {subject}, got a score of token {token!r:.40}")
    if spans and not any(start <= token < stop for start, stop in spans):
        raise AnswerError(
            f"{TOKENS} of tokens that the policy sampled for {subject}, got a score of token {token}, which is in an "
            "observation"
        )
    return token


def _finite(name: str, given: Any, subject: str) -> float:
    value = _number_of(given)
    if value is None or not abs(value) <= MOST:  # false for NaN
        shown = type(given).__name__ if value is None else f"{value:g}"
        raise AnswerError(f"finite numbers within ±{MOST:g} as {name} of {subject}, got {shown}")
    return value


def _number_of(value: Any) -> float | None:
    """Return a Python float for any real scalar, including numpy's and torch's; None for other values."""
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf


class MalformedError(Exception):
    """A malformed answer; the message states why."""


class Channel(Protocol):
    """The methods of a connected socket that are needed for messages."""

    def sendall(self, data: bytes, /) -> None:
        """Write everything."""

    def recv(self, count: int, /) -> bytes:
        """Read at most `count` bytes; empty at the end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is confined."""

    whole: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """The reward or the observer is loaded."""

    dialect: str
    where: str  # file.py:12 (score)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one completion: a score, or an error line."""

    at: int
    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    placed: Mapping[int, float] = field(default_factory=dict)  # see `Score.at`


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers for some completions."""

    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class End:
    """All completions of the request have been answered, or the worker answers a ping."""

    request: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The answer to one call of `observe`: a text, None, or an error line."""

    request: int
    seen: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A program has ended; the descriptor of a tar file with its output follows."""

    code: int  # its exit code; negative: the signal that ended it


@dataclass(frozen=True, slots=True)
class Fault:
    """The request as a whole failed."""

    kind: str
    message: str


class Redactor:
    """Replaces the values of secrets by their names, in the output and the answers of a reward.

    It finds the value, the value with collapsed whitespace, each longer line of the value, and any of these as JSON, as
    `repr` and as JSON of `repr`, with either kind of quotes.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        written = {
            form: f"[{name}]"
            for name, value in secrets.items()
            for text in (value, " ".join(value.split()), *map(str.strip, value.splitlines()))
            if text is value or len(text) >= SHORTEST_SECRET
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
        """Redact text, before it is cut or collapsed."""
        for form, name in self._texts:
            text = text.replace(form, name)
        return text


Message = Ready | Opened | Answers | End | Observed | Ended | Fault


def send(channel: Channel, value: Any) -> None:
    """Write one message."""
    data = json.dumps(value).encode()
    channel.sendall(struct.pack(">Q", len(data)) + data)


def send_answers(channel: Channel, request: int, answers: Iterator[Mapping[str, Any]], seconds: float = 0.02) -> None:
    """Write answers as they arrive; answers within about `seconds` share a message."""
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
        EOFError: the socket's other end was closed.
        ValueError: the request is too long, or not JSON.
    """
    return json.loads(_frame(channel, MAX_REQUEST))


def receive(
    channel: Channel, expected: Collection[int], clean: Callable[[bytes], bytes] = lambda data: data
) -> Message:
    """Read one answer to a request of `expected`.

    Args:
        clean: applied to the bytes before they are parsed.

    Raises:
        EOFError: the socket's other end was closed.
        MalformedError: the answer is too long, is not JSON, has an unknown shape, or answers a different request.
    """
    try:
        value = json.loads(clean(_frame(channel, MAX_ANSWER)))
    except (ValueError, RecursionError) as error:
        raise MalformedError(
            f"with bytes that are not JSON or too large: {' '.join(str(error).split())[:200]}"
        ) from None
    if not isinstance(value, dict):
        raise MalformedError(f"a {type(value).__name__}, expected a JSON object")
    if type(value.get("id")) is not int or value["id"] not in expected:
        open_ = ", ".join(map(str, expected)) or "none"
        raise MalformedError(
            f"request {value.get('id')!r:.40} while request {open_:.60} was open, possibly from a process that "
            "its code forked"
        )
    return _message(value)


def _message(value: dict[str, Any]) -> Message:
    keys = value.keys() - {"id"}
    if keys == {"notes", "whole"}:
        return Ready(value["whole"] is True, tuple(_text(note) for note in _list(value["notes"])))
    if keys == {"dialect", "where"}:
        return Opened(_text(value["dialect"]), _text(value["where"]))
    if keys == {"end"}:
        return End(value["id"])
    if keys == {"code"} and type(value["code"]) is int:
        return Ended(value["code"])
    if keys == {"unseen"}:
        return Observed(value["id"], None, _text(value["unseen"]))
    if keys == {"seen"} and (value["seen"] is None or isinstance(value["seen"], str)):
        return Observed(value["id"], value["seen"])
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
        raise MalformedError("with a value that must be a short list")
    return value


def _components(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_COMPONENTS:
        raise MalformedError(f"components that are not a map of at most {MAX_COMPONENTS} numbers")
    return {name[:MAX_TEXT]: _number(number) for name, number in value.items()}


def _placed(value: Any) -> dict[int, float]:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if not pairs or len(value) > MAX_PLACES:
        raise MalformedError(f"places that are not a list of at most {MAX_PLACES} pairs")
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
        raise MalformedError("a number outside the range of a float") from None
    if not math.isfinite(number):
        raise MalformedError(f"{number} where a finite number is expected")
    return number


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MalformedError(f"the completion {value!r:.40}, expected its number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"a {type(value).__name__} where text is expected")
    # a lone surrogate is not valid text
    return " ".join(value[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8").split())


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
