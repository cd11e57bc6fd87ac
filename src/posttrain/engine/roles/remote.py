"""A frozen role whose predictions another server computes: `posttrain serve-model`, vLLM or SGLang.

The server gets each sample as token ids, and returns for its response tokens the likeliest tokens with their
log-probabilities, at temperature 1. `owned_by` in the server's list of models decides the form of the request:

==========  =================  =====================================================================================
sglang      POST /generate     `top_logprobs_num`; answers from the first response token on
others      POST /completions  `prompt_logprobs`; answers for the whole sample (vLLM allows as many likeliest tokens
                               as its `--max-logprobs`, 20 by default)
==========  =================  =====================================================================================

An answer is checked: it has a row for each response token, with that token in it, enough tokens of the student's
vocabulary, and probabilities that add up to at most 1. A server that does not answer is asked again, for minutes. The
stage fails if the server switches to another model, by the fingerprint in its answers, or by its list of models after
it was away.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import ssl
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from posttrain.domain.errors import InfrastructureError, InputError, StoppedError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.wide import TopK, WideRows

PATIENCE = 300.0  # seconds for which a server may be away
AT_FIRST = 60.0  # the same for a server that has never answered
_OPENS = 120.0  # the same while the workers of a role start, after the controller has reached the server
_CONNECTS, _SILENCE = 10.0, 600.0  # seconds for a connection, and for one answer
_TOGETHER = 16  # requests at a time
_PIECE, _MOST_BYTES = 1 << 20, 1 << 30  # of an answer
_LONGEST_PAUSE = 5.0  # seconds between two tries
_LATER = (408, 429)  # statuses after which a request is repeated, besides those of a failed server
_OK, _UNKNOWN, _FAILED = 200, 404, 500
_ROUTELESS = (_UNKNOWN, 405)
_KEYLESS = (401, 403)
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # errors of a connection that ended, and not of its certificate
_SHOWN = 300  # characters of a server's message
_ROUNDING = 0.01  # by which the probabilities of a row may exceed 1 in all
_NAMED = 8  # models that an error names
_MOST_ID = 2**31  # token ids are below
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1

Row = Mapping[int, float]  # token → log-probability
T = TypeVar("T")


def _printed(line: str) -> None:
    print(line, flush=True)


class _AwayError(Exception):
    """The server does not answer, or not yet."""


class _NoRouteError(InputError):
    """The server has no such path."""


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """The address of a model: `RemoteSource("teacher", "https://teacher.example/v1", "big")`.

    Raises:
        InputError: the key has characters that no request can have.
    """

    role: str
    url: str  # up to /v1
    model: str  # its name in requests
    key: str = field(default="", repr=False)
    patience: float = PATIENCE
    identity: str = ""  # what the server must serve under this name; empty: not known yet
    tell: Callable[[str], None] = field(default=_printed, compare=False, repr=False)  # reports that the server is away
    stopping: Callable[[], bool] = field(default=bool, compare=False, repr=False)  # whether waiting must end

    def __post_init__(self) -> None:
        if self.key and not _KEY.fullmatch(self.key):
            raise InputError(f"the key of {self.role} must have letters, digits and . _ ~ + / - =; export it again")

    def open(self, patience: float = _OPENS) -> RemoteModel:
        """Return the model; wait for at most `patience` seconds for its server. Errors: see `RemoteModel`."""
        return RemoteModel(self, patience)

    def find(self, patience: float) -> str:
        """Return the model's name at its server; wait for at most `patience` seconds for the server.

        Only servers that list their models are asked whether they have it.

        Raises:
            InputError: the server refuses the key, or does not have the model.
            InfrastructureError: the server does not answer.
        """
        return _Server(self).find(patience)


class _Server:
    """A server that answers in OpenAI's form."""

    def __init__(self, source: RemoteSource) -> None:
        self._source, self._parts = source, urlsplit(source.url)
        self._base, self._name = self._parts.path.rstrip("/"), f"{source.role} at {source.url}"
        self._reading, self._telling, self._ending = threading.Lock(), threading.Lock(), threading.Event()
        self._away, self._connections = 0.0, set[http.client.HTTPConnection]()  # since when; 0: it answers

    def find(self, patience: float) -> str:
        """See `RemoteSource.find`."""
        try:
            return self._listed(self._patiently(self._entries, patience))
        except _NoRouteError:
            return self._source.model

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return the models that the server lists."""
        listed = self._ask_once("GET", f"{self._base}/models", None, lambda answer: answer)
        entries: dict[str, Mapping[str, Any]]
        entries = self._read("a list of models", lambda: {str(one["id"]): dict(one) for one in listed["data"]})
        if not entries:
            raise _AwayError("it serves no model yet")
        return entries

    def _listed(self, entries: Mapping[str, Any]) -> str:
        own = [name for name, one in entries.items() if not one.get("parent")]
        name = own[0] if self._source.model == "model" not in entries and len(own) == 1 else self._source.model
        if name not in entries:
            raise self._error(f"must serve the model {name}, got {_few(entries)}; correct `model`")
        return name

    def _refuse_other_model(self) -> None:
        """Check after an outage that the server has the same model as before."""

    def _read(self, what: str, read: Callable[[], T]) -> T:
        """Return a part of an answer.

        Raises:
            InputError: the answer does not have it.
        """
        try:
            return read()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._error(
                f"must answer {what}, as vLLM, SGLang and Posttrain do ({type(error).__name__}: {str(error)[:80]}); "
                "use one of these servers, or name a model instead of a URL"
            ) from error

    def _patiently(self, ask: Callable[[], T], reachable: float = math.inf) -> T:
        """Call `ask`, again while the server is away; then check that the server has the same model as before.

        Args:
            reachable: seconds within which a connection must be possible, if fewer than `patience`.

        Raises:
            InputError: the server refuses the request, its answer has another form, or it serves another model now.
            InfrastructureError: the server was away for longer than `patience`.
            StoppedError: a stop was requested while the server was away.
        """
        since, pause = 0.0, 0.2
        while True:
            try:
                if since:
                    self._refuse_other_model()
                found = ask()
                self._report("")
                return found
            except (_AwayError, OSError, UnicodeError, http.client.HTTPException) as error:
                why, now = self._line(str(error) or type(error).__name__), time.monotonic()
                since = since or now
                if isinstance(error, ssl.SSLError | UnicodeError) and not isinstance(error, _CUT):
                    raise self._error(f"cannot be reached ({why}); correct the url, or the certificate") from error
                patience = self._source.patience
                patience = patience if isinstance(error, _AwayError) else min(patience, reachable)
                if now >= since + patience or self._ending.is_set():
                    raise InfrastructureError(
                        f"{self._name} did not answer for {patience:g} s ({why}); check the url and the server, then "
                        "retry"
                    ) from error
                self._report(f"does not answer ({why}); trying for {patience:g} s")
                if self._source.stopping():
                    raise StoppedError(f"{self._name} did not answer when the stop was requested") from error
                self._ending.wait(min(pause, _LONGEST_PAUSE, since + patience - now))
                pause *= 2

    def _report(self, trouble: str) -> None:
        """Report that the server is away, or answers again, once for all requests."""
        with self._telling:
            now, since = time.monotonic(), self._away
            if bool(trouble) != bool(since):
                self._away = now if trouble else 0.0
                self._source.tell(f"{self._name} {trouble or f'answers again after {now - since:.0f} s'}")

    def _ask_once(self, method: str, path: str, body: bytes | None, take: Callable[[Any], T]) -> T:
        """Send one request; return what `take` makes of the JSON of its answer, one answer at a time."""
        until = time.monotonic() + _SILENCE
        secure, key = self._parts.scheme == "https", self._source.key
        opened = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        with closing(opened(str(self._parts.hostname), self._parts.port, timeout=_CONNECTS)) as connection:
            connection.connect()
            connection.sock.settimeout(_SILENCE)
            self._connections.add(connection)
            try:
                kept = {"content-type": "application/json"} if body else {}
                connection.request(method, path, body, kept | ({"authorization": f"Bearer {key}"} if key else {}))
                response, data = connection.getresponse(), bytearray()
                while piece := response.read1(_PIECE):
                    data += piece
                    if len(data) > _MOST_BYTES or time.monotonic() > until:
                        raise _AwayError(f"an answer must end within {_SILENCE:g} s and {_MOST_BYTES} bytes")
            finally:
                self._connections.discard(connection)
        if response.length:
            raise _AwayError(f"its answer ended {response.length} bytes early")
        if response.status >= _FAILED or response.status in _LATER:
            raise _AwayError(f"status {response.status}: {self._message(data)}")
        if response.status != _OK:
            why = f"{self._message(data)}{self._hint(response)}"
            error = self._error(f"refused {path} with status {response.status}: {why}")
            raise _NoRouteError(str(error)) if response.status in _ROUTELESS else error
        with self._reading:
            return take(self._read("JSON", lambda: json.loads(data)))

    def _hint(self, response: http.client.HTTPResponse) -> str:
        if response.status in _KEYLESS:
            return "; its key is refused" if self._source.key else "; name the variable with its key in `key`"
        ends = self._parts.path.rstrip("/").endswith("/v1")
        return "; the url usually ends in /v1" if response.status == _UNKNOWN and not ends else ""

    def _message(self, data: bytearray) -> str:
        """Return a server's message."""
        try:
            found = json.loads(data)
            found = found.get("error", found.get("detail", found))
            text = str(found.get("message", found) if isinstance(found, dict) else found)
        except (ValueError, AttributeError, RecursionError):
            text = data[: 4 * _SHOWN].decode(errors="replace")
        return self._line(text)[:_SHOWN]

    def _line(self, text: str) -> str:
        """Return a text that may be the server's in one line of ASCII, without the key."""
        text = text.replace(self._source.key, "[key]") if self._source.key else text
        plain = "".join(one if one.isprintable() else " " for one in text[: 4 * _SHOWN])
        return " ".join(plain.split()).encode("ascii", "backslashreplace").decode()

    def _error(self, text: str) -> InputError:
        return InputError(self._line(f"{self._name} {text}"))


class RemoteModel(_Server):
    """A model on another server.

    Raises:
        InputError: the server does not have the model, or another one than `identity`, or does not report its context.
        InfrastructureError: the server does not answer.
    """

    def __init__(self, source: RemoteSource, patience: float) -> None:
        super().__init__(source)
        self._fingerprint = self.identity = ""
        self._first_error: Exception | None = None  # of the requests of a batch
        self.model, entry, most = self._patiently(self._entry, patience)
        self.context_length = most - 1  # a request generates one token after the sample
        self._sglang = entry.get("owned_by") == "sglang"
        self.identity = self._identity(entry)
        if source.identity and self.identity != source.identity:
            raise self._other(self.identity, source.identity)
        self.about = self._line(f"{self._name}: {self.model}, {self.identity}, context {most}")

    def _entry(self) -> tuple[str, Mapping[str, Any], int]:
        """Return the model's name, its entry in the server's list, and the context."""
        entries = self._entries()
        name = self._listed(entries)
        base = entries.get(str(entries[name].get("parent")), {})
        most = entries[name].get("max_model_len") or base.get("max_model_len")  # vLLM's adapters have none
        if type(most) is not int or most < 2:
            raise self._error(
                f"must report max_model_len of {name}, as vLLM, SGLang and Posttrain do, got {most!r:.40}; use one of "
                "these servers, or name a model instead of a URL"
            )
        return name, entries[name], most

    def _identity(self, entry: Mapping[str, Any]) -> str:
        """Return what identifies the model: serve-model's digest, or the folder that other servers list."""
        told = f"digest {entry['digest']}" if entry.get("digest") else f"from {entry.get('root') or self.model}"
        return self._line(told)

    def refuse_other_tokens(self, encode: Callable[[str], Sequence[int]], texts: Iterable[str]) -> None:
        """Check that the server tokenizes texts as the student does.

        Args:
            encode: returns the student's token ids of a text, with the tokenizer's special tokens only if the server
                always adds them (`adds_special_tokens`).

        Raises:
            InputError: it tokenizes a text differently, or does not report the token ids.
        """
        for text in filter(None, texts):
            found, wanted = self._tokens(text), list(encode(text))
            if wanted != found:
                pairs = enumerate(zip(wanted, found, strict=False))
                there = next((n for n, (own, other) in pairs if own != other), min(len(wanted), len(found)))
                raise self._error(
                    f"must have the student's tokenizer, but it tokenizes {text[:40]!r} differently (from token "
                    f"{there} on); serve a model of the student's family"
                )

    @property
    def source(self) -> RemoteSource:
        """The address of this model, for processes that must find the same model there."""
        return replace(self._source, model=self.model, identity=self.identity)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the server adds special tokens to texts in any case."""
        return self._sglang

    def hold(self, batch: TokenBatch, width: int, vocabulary: int | None) -> WideRows:
        """Return the `width` likeliest tokens at every response token; see `FrozenWorker.hold`."""
        counts = batch.response_lengths.tolist()
        starts, held = [0, *accumulate(counts)], TopK.empty(sum(counts), width)

        def likeliest(rows: Sequence[Row]) -> TopK:
            shared = (_known(row, vocabulary) for row in rows)
            ordered = [sorted(row.items(), key=lambda one: (-one[1], one[0]))[:width] for row in shared]
            ids = torch.tensor([[token for token, _ in row] for row in ordered], dtype=torch.int32)
            return TopK(ids, torch.tensor([[value for _, value in row] for row in ordered]))

        for document, _, found in self._scored(batch, width, vocabulary, lambda _, rows: likeliest(rows)):
            held.rows(starts[document], starts[document + 1]).put(found)
        return WideRows(held, tuple(counts))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probability of every response token, and 0 for other tokens, [T]."""
        found = torch.zeros(len(batch.tokens))

        def own(tokens: Sequence[int], rows: Sequence[Row]) -> Tensor:
            return torch.tensor([row[token] for token, row in zip(tokens, rows, strict=True)])

        for _, places, values in self._scored(batch, 0, None, own):
            found[places] = values
        return found

    def _scored(
        self,
        batch: TokenBatch,
        width: int,
        vocabulary: int | None,
        take: Callable[[Sequence[int], Sequence[Row]], T],
    ) -> Iterator[tuple[int, list[int], T]]:
        """Yield each document with a response, the places of its response tokens in the batch, and what `take` makes.

        `take` gets the response tokens and their rows, and runs before the next answer is read: the rows in Python's
        objects are several times as large as the answer.
        """
        starts, tokens = [0, *accumulate(batch.lengths)], batch.tokens.tolist()
        learned = torch.nonzero(batch.response_mask)[:, 0].tolist()
        ends = [bisect_left(learned, start) for start in starts]

        def asked(document: int) -> tuple[int, list[int], T]:
            places, begin = learned[ends[document] : ends[document + 1]], starts[document]
            text, first = tokens[begin : starts[document + 1]], places[0] - begin

            def checked(rows: Sequence[Row]) -> T:
                self._check(rows, text[first:], width, vocabulary)
                own = [rows[place - places[0]] for place in places]  # without observations in between
                return take([tokens[place] for place in places], own)

            try:
                return document, places, self._rows(text, first, width, checked)
            except Exception as error:
                self._end(error)
                raise

        pool = ThreadPoolExecutor(_TOGETHER, thread_name_prefix=self._source.role)
        try:
            yield from pool.map(asked, [one for one in range(batch.documents) if ends[one] < ends[one + 1]])
        except Exception as error:  # of the first document that failed, perhaps since another had failed before
            raise self._first_error or error from None
        finally:
            pool.shutdown(cancel_futures=True)
            self._first_error = None
            self._ending.clear()

    def _end(self, error: Exception) -> None:
        """End the requests of other threads, after an error of one."""
        with self._telling:
            self._first_error = self._first_error or error
        self._ending.set()
        for one in list(self._connections):
            with suppress(OSError, AttributeError):  # closed already
                one.sock.shutdown(socket.SHUT_RDWR)

    def probe(self, tokens: int, width: int) -> None:
        """Ask for the likeliest tokens of a sample of this length, so that limits of the server appear early.

        Raises:
            InputError: the server refuses it.
        """
        text = [0] * min(tokens, self.context_length)
        self._rows(text, 1, width, lambda rows: self._check(rows, text[1:], width, None))

    def _rows(self, tokens: Sequence[int], first: int, width: int, take: Callable[[Sequence[Row]], T]) -> T:
        """Return what `take` makes of token → log-probability at each place from `first` on.

        Each place has its own token, and the `width` likeliest tokens.
        """
        if not self._sglang:
            body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": width}
            what = f"prompt_logprobs of each token (top_k {width})"
            return self._complete(body, lambda choice: take(self._read(what, lambda: list(_of_vllm(choice, first)))))
        body = {"input_ids": tokens, "logprob_start_len": first - 1, "top_logprobs_num": width}
        what, count = f"input_top_logprobs of each token (top_k {width})", len(tokens) - first
        return self._generate(body, lambda meta: take(self._read(what, lambda: list(_of_sglang(meta, count, width)))))

    def _tokens(self, text: str) -> list[int]:
        if self._sglang:
            body = {"text": text, "logprob_start_len": 0}
            return self._generate(
                body,
                lambda meta: self._read(
                    "input_token_logprobs", lambda: _ids(t for _, t, *_ in meta["input_token_logprobs"])
                ),
            )
        body = {"prompt": text, "max_tokens": 1, "return_token_ids": True, "add_special_tokens": False}
        return self._complete(
            body, lambda choice: self._read("prompt_token_ids", lambda: _ids(choice["prompt_token_ids"]))
        )

    def _complete(self, body: Mapping[str, Any], take: Callable[[Any], T]) -> T:
        def taken(answer: Any) -> T:
            self._same(str(self._read("an object", lambda: answer.get("system_fingerprint") or "")))
            return take(self._read("choices", lambda: answer["choices"][0]))

        return self._ask("completions", {"model": self.model, **body}, taken)

    def _generate(self, body: Mapping[str, Any], take: Callable[[Any], T]) -> T:
        given = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True, **body}
        return self._ask("generate", given, lambda answer: take(self._read("meta_info", lambda: answer["meta_info"])))

    def _same(self, fingerprint: str) -> None:
        self._fingerprint = self._fingerprint or fingerprint
        if fingerprint != self._fingerprint:
            raise self._other(fingerprint[:80], self._fingerprint[:80])

    def _other(self, now: str, before: str) -> InputError:
        return self._error(f"must stay the same model during a stage, got {now} after {before}; serve that one again")

    def _check(self, rows: Sequence[Row], tokens: Sequence[int], width: int, vocabulary: int | None) -> None:
        """Check the rows of one sample.

        Raises:
            InputError: the rows are not those of the sample's response tokens.
        """
        faults = (_fault(row, token, width, vocabulary) for row, token in zip(rows, tokens, strict=False))
        fault = "" if len(rows) == len(tokens) else f"{len(rows)} rows for {len(tokens)} tokens"
        if fault := fault or next(filter(None, faults), ""):
            raise self._error(f"must return the likeliest tokens of each response token, got {fault}")

    def _ask(self, route: str, body: Mapping[str, Any], take: Callable[[Any], T]) -> T:
        """Return what `take` makes of the answer to a request; errors: see `_patiently`."""
        base = self._base.removesuffix("/v1") if route == "generate" else self._base
        data = json.dumps(body).encode()
        return self._patiently(lambda: self._ask_once("POST", f"{base}/{route}", data, take))

    def _refuse_other_model(self) -> None:
        if not self.identity:
            return
        _, entry, _ = self._entry()
        if (now := self._identity(entry)) != self.identity:
            raise self._other(now, self.identity)


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_NAMED]) + (f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else "")


def _known(row: Row, vocabulary: int | None) -> Row:
    """Return the tokens of a row that are in the student's vocabulary; a teacher's may be padded."""
    return {token: value for token, value in row.items() if 0 <= token < (vocabulary or _MOST_ID)}


def _fault(row: Row, token: int, width: int, vocabulary: int | None) -> str:
    """Return why a row cannot be that of a token; empty: it can be."""
    if token not in row:
        return f"a row without its own token {token}"
    if (shared := len(_known(row, vocabulary))) < width:
        few = f"{shared} likeliest tokens of the student's vocabulary ({vocabulary}) instead of {width}"
        return f"{few}; serve a model of the student's family, or lower top_k"
    if odd := next((value for value in row.values() if not math.isfinite(value)), None):
        return f"a log-probability of {odd}"
    total = sum(map(math.exp, row.values())) if max(row.values()) <= 1 else math.inf
    return "" if total <= 1 + _ROUNDING else f"probabilities of {total:.3g} in all"


def _ids(given: Iterable[Any]) -> list[int]:
    return [int(one) for one in given]


def _of_vllm(choice: Any, first: int) -> Iterator[Row]:
    for row in choice["prompt_logprobs"][first:]:
        yield {int(token): float(one["logprob"]) for token, one in row.items()}


def _of_sglang(meta: Any, count: int, width: int) -> Iterator[Row]:
    """Yield the last `count` rows; those before begin at the place before them, whose row is empty."""
    tops = meta["input_top_logprobs"][-count:] if width else [()] * count
    for (value, token, *_), top in zip(meta["input_token_logprobs"][-count:], tops, strict=True):
        yield {int(token): float(value), **{int(other): float(one) for one, other, *_ in top}}
