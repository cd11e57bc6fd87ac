"""A served model for tests: its process, and requests to it over plain HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from workbench import PATIENCE, Workbench


class ServedModel:
    """`posttrain serve-model` in a workspace."""

    def __init__(self, bench: Workbench, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.process = bench.start("serve-model", *words, env=env)
        self.log: list[str] = []
        self.url = self._url()
        self.host = urlsplit(self.url).netloc

    def _url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving "):
                for pipe in (self.process.stdout, self.process.stderr):  # a full pipe would stop the server
                    threading.Thread(target=lambda pipe=pipe: self.log.extend(pipe or ()), daemon=True).start()
                return line.partition(" at ")[2].partition("/v1 ")[0]
        _, errors = self.process.communicate(timeout=PATIENCE)
        raise AssertionError(f"the server ended with {self.process.returncode}: {errors}")

    def ask(self, path: str, body: Any = None, *, key: str = "") -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON (or text) of one request."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("GET" if body is None else "POST", path, data, headers)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, json.loads(said) if "json" in found.get("content-type", "") else said.decode()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer of `/v1/completions`, greedy unless told otherwise."""
        status, headers, found = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, found
        assert headers["posttrain-model-digest"] == found["system_fingerprint"]
        return dict(found)

    def texts(self, prompt: Any, **fields: Any) -> list[str]:
        """The texts of `complete`."""
        return [choice["text"] for choice in self.complete(prompt, **fields)["choices"]]

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The pieces of a stream, which ends as streams of OpenAI do."""
        status, headers, text = self.ask(path, {**body, "stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE)


@contextmanager
def serving(
    bench: Workbench, *words: str, port: str = "0", env: Mapping[str, str] | None = None
) -> Iterator[ServedModel]:
    """A served model until the end of the block."""
    served = ServedModel(bench, *words, "--port", port, "--log-format", "json", env=env)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait(PATIENCE)


def children(process: subprocess.Popen[str]) -> list[int]:
    """The engines of a server."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as listed:
        return [int(word) for word in listed.read().split()]
