"""`python -m posttrain.serving`: serves one model to the programs of a job, without a workspace.

The first line of standard input is the request: `{"folder", "name", "digest", "key", "context", "kv_cache", "runtime",
"granted"}`. The first answer is `{"url", "facts"}`, once the model is loaded. Then the server reports what its callers
spend, `{"spent", "held", "wanted", "answered", "refused"}`: tokens of complete answers, of answers in progress at most,
and of the request that waits for a grant; the number of complete answers, and why the last refused request is wrong. A
further line `{"granted": TOKENS}` raises the tokens that they may spend in total. The server ends with its standard
input.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from posttrain.domain.errors import AuthenticationError
from posttrain.server.connections import Room, most_of, raise_files
from posttrain.server.service import Bind, HttpServer, Systemd, configured, listen
from posttrain.serving.app import Door, Limits, Spending, build
from posttrain.serving.engines import Models, Release, Served

_REPORTED = 0.5  # seconds between two reports
Told = queue.SimpleQueue[Mapping[str, Any] | BaseException | None]


class OneKey:
    """Serves the callers that have this key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def check(self, key: str | None) -> str:
        """See `Keys.check`."""
        if key is None or not hmac.compare_digest(key.encode(), self._key):
            raise AuthenticationError("the key of the job that serves this model is needed")
        return "job"


def serve(asked: tuple[Mapping[str, Any], IO[str]]) -> Iterator[Mapping[str, Any]]:
    """Serve a model until the lines end; yield the address, and then reports of the spent tokens."""
    told = Told()
    threading.Thread(target=_run, args=(*asked, told), daemon=True).start()
    while (found := told.get()) is not None:
        if isinstance(found, BaseException):
            raise found
        yield found


def _run(request: Mapping[str, Any], lines: IO[str], told: Told) -> None:
    try:
        asyncio.run(_serve(request, lines, told))
        told.put(None)
    except BaseException as error:
        told.put(error)


async def _serve(request: Mapping[str, Any], lines: IO[str], told: Told) -> None:
    runtime = request["runtime"]
    settings = {"runtime": runtime, "kv_cache": request["kv_cache"], "threads": runtime.get("threads", 1)}
    models = Models(settings, _as_judged)
    door = Door(request["name"], models, Limits(context=request["context"]), OneKey(request["key"]))
    spending = door.spending
    spending.granted, spending.short = request["granted"], lambda: told.put(spending.to_json())
    bind, room = Bind(port=0), Room(most_of(raise_files()))
    with listen(bind, room) as listening:
        await models.use(Release(request["name"], request["digest"], lambda: Path(request["folder"])))
        server = HttpServer(configured(build(door), bind, room), Systemd({}))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        assert models.served is not None
        told.put({"url": bind.near(listening.getsockname()[1]), "facts": models.served.engine.facts})
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=_hear, args=(lines, loop, spending, ended), daemon=True).start()
        reported = (0, "")
        over = asyncio.create_task(ended.wait())
        while not over.done() and not serving.done():
            if reported != (now := (spending.answered, spending.refused)):
                reported = now
                spending.short()
            await asyncio.wait({serving, over}, timeout=_REPORTED, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        await models.close()
        spending.short()


async def _as_judged(served: Served) -> None:
    """Accept the model of the job, which is the one that it measures."""


def _hear(lines: IO[str], loop: asyncio.AbstractEventLoop, spending: Spending, ended: asyncio.Event) -> None:
    for line in lines:
        loop.call_soon_threadsafe(spending.grant, json.loads(line)["granted"])
    loop.call_soon_threadsafe(ended.set)


if __name__ == "__main__":
    from posttrain.jobs.entry import converse

    converse(serve)
