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
stage fails if the fingerprint in the answers changes, since the server has switched to another model.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.wide import TopK, WideRows

PATIENCE = 300.0  # seconds for which a server may be unreachable
_CONNECTS, _SILENCE = 10.0, 600.0  # seconds for a connection, and for one answer
_TOGETHER = 16  # requests at a time
_PIECE, _MOST_BYTES = 1 << 20, 1 << 30  # of an answer
_LONGEST_PAUSE = 5.0  # seconds between two tries
_LATER = (408, 429)  # statuses after which a request is repeated, besides those of a failed server
_OK, _FAILED = 200, 500
_SHOWN = 300  # characters of a server's message
_ROUNDING = 0.01  # by which the probabilities of a row may exceed 1 in all

Row = Mapping[int, float]  # token → log-probability
T = TypeVar("T")


class _AwayError(Exception):
    """The server does not answer, or not yet."""


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """The address of a model: `RemoteSource("teacher", "https://teacher.example/v1", "big")`."""

    role: str
    url: str  # up to /v1
    model: str  # its name in requests
    key: str = field(default="", repr=False)
    patience: float = PATIENCE

    def open(self) -> RemoteModel:
        """Return the model. Errors: see `RemoteModel`."""
        return RemoteModel(self)


class RemoteModel:
    """A model on another server.

    Raises:
        InputError: the server does not have the model, or does not report its context.
        InfrastructureError: the server does not answer.
    """

    def __init__(self, source: RemoteSource) -> None:
        self._source, self._parts = source, urlsplit(source.url)
        self._base, self._name = self._parts.path.rstrip("/"), f"{source.role} at {source.url}"
        self._reading, self._ending, self._fingerprint = threading.Lock(), threading.Event(), ""
        self._away = False  # whether the log has that the server does not answer
        listed = self._ask("GET", f"{self._base}/models")
        entries = self._read("a list of models", lambda: {str(one["id"]): one for one in listed["data"]})
        if source.model not in entries:
            known = ", ".join(sorted(entries))[:_SHOWN] or "none"
            raise InputError(f"{self._name} must serve the model {source.model}, got {known}; correct `model`")
        entry, most = entries[source.model], entries[source.model].get("max_model_len")
        if not isinstance(most, int):
            raise InputError(
                f"{self._name} must report max_model_len of {source.model}, as vLLM, SGLang and Posttrain do, got "
                f"{most!r:.40}; use one of these servers, or name a model instead of a URL"
            )
        self.context_length = most - 1  # a request generates one token after the sample
        self._sglang = entry.get("owned_by") == "sglang"
        release = entry.get("digest") or entry.get("root") or ""
        print(f"{self._name}: {source.model} {release}, context {most}")

    def refuse_other_tokens(self, encode: Callable[[str], Sequence[int]], texts: Iterable[str]) -> None:
        """Check that the server divides texts into the student's tokens.

        Raises:
            InputError: it divides a text into other tokens, or does not report its tokens.
        """
        for text in filter(None, texts):
            found, wanted = self._tokens(text), list(encode(text))
            if wanted != found:
                there = next(
                    (n for n, (own, other) in enumerate(zip(wanted, found, strict=False)) if own != other),
                    min(len(wanted), len(found)),
                )
                raise InputError(
                    f"{self._name} must have the student's tokenizer, but it divides {text[:40]!a} into other tokens "
                    f"(from token {there} on); serve a model of the student's family"
                )

    def hold(self, batch: TokenBatch, width: int, vocabulary: int | None) -> WideRows:
        """Return the `width` likeliest tokens at every response token; see `FrozenWorker.hold`."""
        counts = batch.response_lengths.tolist()
        starts, held = [0, *accumulate(counts)], TopK.empty(sum(counts), width)
        for document, _, rows in self._scored(batch, width, vocabulary):
            shared = (_known(row, vocabulary) for row in rows)
            likeliest = [sorted(row.items(), key=lambda one: (-one[1], one[0]))[:width] for row in shared]
            ids = torch.tensor([[token for token, _ in row] for row in likeliest], dtype=torch.int32)
            values = torch.tensor([[value for _, value in row] for row in likeliest])
            held.rows(starts[document], starts[document + 1]).put(TopK(ids, values))
        return WideRows(held, tuple(counts))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probability of every response token, and 0 for other tokens, [T]."""
        found, tokens = torch.zeros(len(batch.tokens)), batch.tokens.tolist()
        for _, places, rows in self._scored(batch, 0, None):
            found[places] = torch.tensor([row[tokens[place]] for place, row in zip(places, rows, strict=True)])
        return found

    def _scored(
        self, batch: TokenBatch, width: int, vocabulary: int | None
    ) -> Iterator[tuple[int, list[int], list[Row]]]:
        """Yield each document with a response, the places of its response tokens in the batch, and their rows."""
        starts, tokens = [0, *accumulate(batch.lengths)], batch.tokens.tolist()
        learned = torch.nonzero(batch.response_mask)[:, 0].tolist()
        ends = [bisect_left(learned, start) for start in starts]

        def asked(document: int) -> tuple[int, list[int], list[Row]]:
            places, begin = learned[ends[document] : ends[document + 1]], starts[document]
            text = tokens[begin : starts[document + 1]]
            rows = self._rows(text, places[0] - begin, width)
            self._check(rows, text[places[0] - begin :], width, vocabulary)
            return document, places, [rows[place - places[0]] for place in places]  # without observations in between

        pool = ThreadPoolExecutor(_TOGETHER, thread_name_prefix=self._source.role)
        try:
            yield from pool.map(asked, [one for one in range(batch.documents) if ends[one] < ends[one + 1]])
        finally:
            self._ending.set()  # requests that wait for the server after an error of another end
            pool.shutdown(cancel_futures=True)
            self._ending.clear()

    def _rows(self, tokens: Sequence[int], first: int, width: int) -> list[Row]:
        """Return token → log-probability at each place from `first` on: of the place's own token, and the likeliest."""
        if not self._sglang:
            body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": width}
            choice = self._complete(body)
            return self._read("prompt_logprobs of each token", lambda: list(_of_vllm(choice, first)))
        body = {"input_ids": tokens, "logprob_start_len": first - 1, "top_logprobs_num": width}
        meta, count = self._generate(body), len(tokens) - first
        return self._read("input_top_logprobs of each token", lambda: list(_of_sglang(meta, count, width)))

    def _tokens(self, text: str) -> list[int]:
        if self._sglang:
            meta = self._generate({"text": text, "logprob_start_len": 0})
            return self._read("the tokens of a text", lambda: [int(t) for _, t, *_ in meta["input_token_logprobs"]])
        choice = self._complete({"prompt": text, "max_tokens": 1, "return_token_ids": True})
        return self._read("prompt_token_ids", lambda: [int(token) for token in choice["prompt_token_ids"]])

    def _complete(self, body: Mapping[str, Any]) -> Any:
        found = self._ask("POST", f"{self._base}/completions", {"model": self._source.model, **body})
        self._same(str(self._read("an object", lambda: found.get("system_fingerprint") or "")))
        return self._read("choices", lambda: found["choices"][0])

    def _generate(self, body: Mapping[str, Any]) -> Any:
        sampling = {"max_new_tokens": 0, "temperature": 0}
        given = {"sampling_params": sampling, "return_logprob": True, **body}
        found = self._ask("POST", f"{self._base.removesuffix('/v1')}/generate", given)
        return self._read("meta_info", lambda: found["meta_info"])

    def _same(self, fingerprint: str) -> None:
        with self._reading:
            self._fingerprint = self._fingerprint or fingerprint
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{self._name} must stay the same model during a stage, got {fingerprint[:80]!r} after "
                f"{self._fingerprint[:80]!r}; serve one release, then retry"
            )

    def _check(self, rows: Sequence[Row], tokens: Sequence[int], width: int, vocabulary: int | None) -> None:
        """Check the rows of one sample.

        Raises:
            InputError: the rows are not those of the sample's response tokens.
        """
        faults = (_fault(row, token, width, vocabulary) for row, token in zip(rows, tokens, strict=False))
        fault = "" if len(rows) == len(tokens) else f"{len(rows)} rows for {len(tokens)} tokens"
        if fault := fault or next(filter(None, faults), ""):
            raise InputError(f"{self._name} must return the likeliest tokens of each response token, got {fault}")

    def _read(self, what: str, read: Callable[[], T]) -> T:
        """Return a part of an answer.

        Raises:
            InputError: the answer does not have it.
        """
        try:
            return read()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self._name} must answer {what}, as vLLM, SGLang and Posttrain do ({type(error).__name__}: {error}); "
                "use one of these servers, or name a model instead of a URL"
            ) from error

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer; ask again while the server is unreachable.

        Raises:
            InputError: the server refuses the request, or its answer is not JSON.
            InfrastructureError: the server was unreachable for longer than `patience`.
        """
        until, tried = time.monotonic() + self._source.patience, 0
        while True:
            try:
                return self._ask_once(method, path, None if body is None else json.dumps(body).encode())
            except ssl.SSLCertVerificationError as error:
                raise InputError(
                    f"{self._name} has a certificate that is not trusted here: {error}; correct it"
                ) from error
            except (_AwayError, OSError, http.client.HTTPException) as error:
                why = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
                if time.monotonic() >= until or self._ending.is_set():
                    patience = f"{self._source.patience:g} s"
                    raise InfrastructureError(
                        f"{self._name} did not answer within {patience} ({why}); check the server, then retry"
                    ) from error
                if not self._away:
                    print(f"{self._name} does not answer ({why}); trying for {self._source.patience:g} s", flush=True)
                self._away = True
                self._ending.wait(min(0.2 * 2**tried, _LONGEST_PAUSE))
                tried += 1

    def _ask_once(self, method: str, path: str, body: bytes | None) -> Any:
        until = time.monotonic() + _SILENCE
        secure, key = self._parts.scheme == "https", self._source.key
        opened = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        with closing(opened(str(self._parts.hostname), self._parts.port, timeout=_CONNECTS)) as connection:
            connection.connect()
            connection.sock.settimeout(_SILENCE)
            kept = {"content-type": "application/json"} if body else {}
            connection.request(method, path, body, kept | ({"authorization": f"Bearer {key}"} if key else {}))
            response, data = connection.getresponse(), bytearray()
            while piece := response.read1(_PIECE):
                data += piece
                if len(data) > _MOST_BYTES or time.monotonic() > until:
                    raise _AwayError(f"an answer must end within {_SILENCE:g} s and {_MOST_BYTES} bytes")
        if response.status >= _FAILED or response.status in _LATER:
            raise _AwayError(f"status {response.status}: {self._message(data)}")
        if response.status != _OK:
            raise InputError(f"{self._name} refused {path} with status {response.status}: {self._message(data)}")
        with self._reading:  # an answer in Python's objects is several times as large, so one at a time
            self._away = False
            return self._read("JSON", lambda: json.loads(data))

    def _message(self, data: bytearray) -> str:
        """Return a server's message in one line, without the key."""
        try:
            found = json.loads(data)
            found = found.get("error", found)
            text = str(found.get("message", found) if isinstance(found, dict) else found)
        except (ValueError, AttributeError):
            text = data[: 4 * _SHOWN].decode(errors="replace")
        text = " ".join(text.split())
        return ascii(text.replace(self._source.key, "[key]") if self._source.key else text)[1:-1][:_SHOWN]


def _known(row: Row, vocabulary: int | None) -> Row:
    """Return the tokens of a row that are in the student's vocabulary; a teacher's may be padded."""
    return {token: value for token, value in row.items() if 0 <= token < (vocabulary or math.inf)}


def _fault(row: Row, token: int, width: int, vocabulary: int | None) -> str:
    """Return why a row cannot be that of a token; empty: it can be."""
    if token not in row:
        return f"a row without its own token {token}"
    if (shared := len(_known(row, vocabulary))) < width:
        return f"{shared} likeliest tokens of the student's vocabulary ({vocabulary}) instead of {width}"
    total = sum(map(math.exp, row.values())) if max(row.values()) <= 1 else math.inf
    return "" if total <= 1 + _ROUNDING else f"probabilities of {total:.3g} in all"


def _of_vllm(choice: Any, first: int) -> Iterator[Row]:
    for row in choice["prompt_logprobs"][first:]:
        yield {int(token): float(one["logprob"]) for token, one in row.items()}


def _of_sglang(meta: Any, count: int, width: int) -> Iterator[Row]:
    """Yield the last `count` rows; those before begin at the place before them, whose row is empty."""
    tops = meta["input_top_logprobs"][-count:] if width else [()] * count
    for (value, token, *_), top in zip(meta["input_token_logprobs"][-count:], tops, strict=True):
        yield {int(token): float(value), **{int(other): float(one) for one, other, *_ in top}}
