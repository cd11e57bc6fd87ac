"""Waiting for what a server carries out longer than a connection waits."""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from posttrain.api.problems import raised
from posttrain.client.transport import Transport
from posttrain.domain.errors import DeadlineError, InfrastructureError, NotFoundError

_PREFER = "respond-async, wait=10"
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds between two looks, the last one again and again
_TELL = 5.0  # seconds between two lines for a person
_MOST_SECONDS = 22200.0  # that an operation is waited for: longer than a server carries one out
_REPEATS = 20  # times that a request is asked again whose server is gone


def carried_out(transport: Transport, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
    """The answer of a request that may take long.

    A server that ended meanwhile is asked again with the same key, so nothing is done twice. Who interrupts the wait
    cancels the request.

    Raises:
        PosttrainError: the problem that the server answered with. InfrastructureError: it ended again and again.
        DeadlineError: it takes longer than a server lets one take.
    """
    headers = {"prefer": _PREFER, "idempotency-key": secrets.token_hex(16)}
    for _ in range(_REPEATS):
        reply = transport.ask(method, path, body=body, headers=headers)
        if reply.status != http.client.ACCEPTED:
            return reply.body
        try:
            return _awaited(transport, reply.headers["location"], json.loads(reply.body))
        except NotFoundError:  # of its operation: that server is gone; whoever answers now knows the key
            continue
        except KeyboardInterrupt:
            transport.ask("DELETE", reply.headers["location"])
            raise
    raise InfrastructureError(f"server {transport.url}: ended {_REPEATS} times while it carried this out; ask again")


def _awaited(transport: Transport, place: str, said: dict[str, Any]) -> bytes:
    looks, told = 0, time.monotonic()
    until = told + _MOST_SECONDS
    while said["state"] == "running":
        if time.monotonic() > until:
            words = said["verb"].replace("_", " ")
            raise DeadlineError(
                f"{words}: still under way after {_MOST_SECONDS:g} s; look at what is there before you ask again"
            )
        time.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
        looks += 1
        said = json.loads(transport.ask("GET", place).body)
        if time.monotonic() - told >= _TELL and said["state"] == "running":
            told = time.monotonic()
            words = f": {said['progress']}" if said.get("progress") else ""
            print(f"{said['verb'].replace('_', ' ')}: {said['seconds']:.0f} s{words}", file=sys.stderr)
    if "problem" in said:
        raise raised(said["problem"])
    return json.dumps(said["answer"]).encode()
