"""Talks to served models: over the address of a running server, or of one that is started for the conversation."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.domain.errors import AccessError, BusyError, InfrastructureError, InputError, PosttrainError
from posttrain.workspace.served import model_at

_SECONDS = 600.0  # within which the next piece of an answer must arrive
KEY = "POSTTRAIN_KEY"  # the variable with the key of a server at another address
_ENDS = 20.0  # seconds in which a started server ends
_SHOWN = 400  # characters of an error
Message = dict[str, str]


@dataclass(slots=True)
class Talker:
    """A served model: `Talker("http://127.0.0.1:8470")`."""

    url: str  # without /v1
    key: str = field(default="", repr=False)
    name: str = ""  # in requests; "": the only model
    release: str = ""
    digest: str = ""  # of the model that answered last
    finish_reason: str = ""  # of the last answer
    tokens: int = 0  # of the last answer

    def answer(self, messages: Sequence[Message], **sampling: Any) -> Iterator[str]:
        """Yield the response to a conversation in pieces.

        Args:
            sampling: further fields of the request; None: left out.

        Raises:
            InputError: the server refused the request.
            AccessError: the key is missing or of another model.
            BusyError: the server has too many requests.
            InfrastructureError: the server cannot be reached, or ended while it answered.
        """
        given = {name: value for name, value in sampling.items() if value is not None}
        given |= {"model": self.name} if self.name else {}
        asked = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **given}
        body = json.dumps(asked).encode()
        connection = self._connection()
        try:
            connection.request("POST", "/v1/chat/completions", body, self._headers())
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refused(response.status, response.read())
            self.digest = response.getheader("posttrain-model-digest", "")
            yield from self._texts(response)
        except (OSError, http.client.HTTPException) as error:
            raise InfrastructureError(
                f"{self.url}: the served model cannot be reached or ended while it answered: {error}; try again"
            ) from error
        finally:
            connection.close()

    def _texts(self, response: http.client.HTTPResponse) -> Iterator[str]:
        """Yield the texts of a stream's events, until its last event."""
        for line in response:
            event = line.strip().removeprefix(b"data: ")
            if event == b"[DONE]":
                return
            if not event:
                continue
            try:
                found = json.loads(event)
                if "error" in found:
                    raise _refused(int(found["error"].get("code") or 500), event)
                self.tokens = int((found.get("usage") or {}).get("completion_tokens", self.tokens))
                self.finish_reason = next((str(one["finish_reason"]) for one in found["choices"] if
                                           one.get("finish_reason")), self.finish_reason)  # fmt: skip
                text = "".join(str(one["delta"].get("content") or "") for one in found["choices"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise http.client.HTTPException(f"the answer is not that of a served model: {event[:60]!r}") from error
            if text:
                yield text
        raise http.client.IncompleteRead(b"")

    def _connection(self) -> http.client.HTTPConnection:
        scheme, host, port = "", "", None
        with suppress(ValueError):
            parts = urlsplit(self.url)
            scheme, host, port = parts.scheme, parts.hostname or "", parts.port
        if scheme not in ("http", "https") or not host:
            raise InputError(f"--url must be the address of a served model, as http://HOST:PORT, got {self.url!r}")
        if scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context)
        return http.client.HTTPConnection(host, port, timeout=_SECONDS)

    def _headers(self) -> dict[str, str]:
        said = {"content-type": "application/json"}
        return {**said, "authorization": f"Bearer {self.key}"} if self.key else said


def _refused(status: int, data: bytes) -> PosttrainError:
    try:
        message = str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}: {data[:_SHOWN].decode(errors='replace')}"
    if status == http.client.UNAUTHORIZED:
        message += f"; set {KEY}"
    message = message.replace("lower max_tokens", "lower --max-new-tokens").replace(
        "use /v1/completions", "ask it with posttrain sample MODEL PROMPT --text"
    )
    kinds: Mapping[int, type[PosttrainError]] = {401: AccessError, 403: AccessError, 429: BusyError}
    return kinds.get(status, InputError if status < 500 else InfrastructureError)(message[:_SHOWN])


def running(root: Path, project: str, channel: str) -> Talker | None:
    """Return the newest served model of a channel of a workspace on this machine; None: there is none."""
    found = model_at(root, project, channel)
    return None if found is None else Talker(found.url, found.key, channel)


@contextmanager
def started(model: str, words: Sequence[str]) -> Iterator[Talker]:
    """Serve a model for the time of the block, on a free port of this machine.

    Args:
        words: further words of `posttrain serve-model`.

    Raises:
        InputError: the model cannot be served.
    """
    command = [sys.executable, "-P", "-m", "posttrain", "serve-model", model, "--port", "0", *words]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "NO_COLOR": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            serving = next((line for line in process.stdout if line.startswith("serving ")), "")
            if not serving:
                process.wait(_ENDS)
                errors.seek(0)
                last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "no output")
                raise InputError(last.removeprefix("error: ")[:_SHOWN])
            _, release, digest, _, address, *_ = serving.split()
            yield Talker(address.removesuffix("/v1"), "", model, release, digest)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(_ENDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
