"""The engine processes of a served model, and the switch from one release to the next.

Each model has a separate process (`jobs.serve_model`), so the memory of a former release is free when its process has
ended, and a release that cannot be loaded has no effect. A request holds the model with which it began until its answer
is complete. A switch loads the new model beside the old one; new requests get the new model at once, and the old
one ends after its last request. At most two models are in memory: a third one waits until the first has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from posttrain.domain.errors import InfrastructureError, InputError, JobFailedError
from posttrain.execution.processes import without_keys
from posttrain.serving.texts import Texts

log = logging.getLogger("posttrain.serving")
_LINE = 1 << 30  # maximum bytes of one answer
_ENDS = 10.0  # seconds in which a process without orders ends
_SHOWN = 300  # maximum characters of a failed process's last words
LOADING = 3600.0  # seconds within which a model must be loaded
_RESTART = 60.0  # seconds for which a request waits for an engine that is started again
_STEADY = 60.0  # seconds after which an engine that ends has not failed at its start
_AGAIN = (0.5, 2.0, 10.0, 30.0)  # seconds before an engine that died is started again


class EngineLostError(InfrastructureError):
    """The engine's process ended before it had answered; the request can be repeated."""


@dataclass(frozen=True, slots=True)
class Part:
    """What an engine has answered about one generation: new tokens, and in the last part what ended it."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of a text without its first token, and of the token after it; see `PromptLogprobs`."""

    id: str
    logprobs: list[float]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]
    next_tokens: list[int]
    next_logprobs: list[float]

    def tops(self) -> list[dict[int, float]]:
        """Return the likeliest tokens at each place, the likeliest first."""
        pairs = zip(self.top_tokens, self.top_logprobs, strict=True)
        return [dict(zip(*pair, strict=True)) for pair in pairs]


class EngineProcess:
    """One process with one model. Its answers go to the requests that wait for them."""

    def __init__(self, process: asyncio.subprocess.Process, words: IO[bytes]) -> None:
        self._process, self._words = process, words
        self._waiting: dict[str, asyncio.Queue[Part | Scored | Exception]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.facts: Mapping[str, Any] = {}  # what `jobs.bodies.serving.serve` answers first

    @classmethod
    async def start(cls, settings: Mapping[str, Any]) -> EngineProcess:
        """Start a process, and return it when its model is loaded.

        Args:
            settings: the request of `jobs.bodies.serving.serve`.

        Raises:
            InputError, JobFailedError: the model cannot be loaded.
            InfrastructureError: the process ended, or needed more than an hour.
        """
        environment = {name: value for name, value in without_keys(os.environ).items() if not name.startswith("PYTHON")}
        words = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - open as long as the process
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-s", "-P", "-m", "posttrain.jobs.serve_model", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=words, env=environment, start_new_session=True, limit=_LINE,
        )  # fmt: skip
        engine = cls(process, words)
        try:
            await engine._send({**settings, "asked_by": os.getpid()})
            async with asyncio.timeout(LOADING):
                engine.facts = await engine._line()
        except BaseException:
            await engine.kill()
            raise
        engine._reader = asyncio.create_task(engine._read())
        return engine

    @property
    def running(self) -> bool:
        """Whether the process answers."""
        return self._reader is not None and not self._reader.done()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def generate(self, work: Sequence[Mapping[str, Any]], *, stream: bool) -> AsyncIterator[Part]:
        """Yield the parts of several generations as they arrive; abort those that are left when the caller leaves.

        Args:
            work: the fields of each `Generation`.
            stream: whether tokens come before a generation has ended.

        Raises:
            InputError: the engine refused the generations.
            JobFailedError: the model's numbers are not finite.
            EngineLostError: the process ended.
        """
        left = {str(one["id"]) for one in work}
        async with self._answers(left) as take:
            await self._send({"generate": work, "stream": stream})
            while left:
                part = await take()
                assert isinstance(part, Part)
                left -= {part.id} if part.by else set()
                yield part

    async def score(self, texts: Mapping[str, Sequence[int]], top: int, policy: str = "") -> dict[str, Scored]:
        """Return the scores of texts by their ids, under a policy; see `generate` for the errors."""
        found, left = dict[str, Scored](), set(texts)
        async with self._answers(left) as take:
            await self._send({"score": {"texts": texts, "top": top, "policy": policy}})
            while left:
                scored = await take()
                assert isinstance(scored, Scored)
                found[scored.id] = scored
                left.discard(scored.id)
        return found

    async def close(self) -> None:
        """End the process after its last answer; kill it if it does not end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDS):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the process now."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        self._words.close()

    @asynccontextmanager
    async def _answers(self, left: set[str]) -> AsyncIterator[Callable[[], Awaitable[Part | Scored]]]:
        """Receive the answers about these ids; abort those that are left at the end."""
        answers, names = asyncio.Queue[Part | Scored | Exception](), list(left)
        if not self.running:
            raise EngineLostError("the engine of the model has ended and is started again; repeat the request")

        async def take() -> Part | Scored:
            found = await answers.get()
            if isinstance(found, Exception):
                raise found
            return found

        self._waiting |= dict.fromkeys(names, answers)
        try:
            yield take
        except (InputError, JobFailedError):
            left.clear()  # the engine has answered for all of them
            raise
        finally:
            for name in names:
                self._waiting.pop(name, None)
            if left and self.running:
                with suppress(EngineLostError):
                    await asyncio.shield(self._send({"abort": sorted(left)}))

    async def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        except (OSError, RuntimeError) as error:
            raise EngineLostError(
                "the engine of the model has ended and is started again; repeat the request"
            ) from error

    async def _line(self) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            InputError, JobFailedError: the error that ended the process.
            InfrastructureError: the process ended without one.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            raise InfrastructureError(f"the engine of the model ended with exit code {code}{self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            kind = InputError if found["exit_code"] == InputError.exit_code else JobFailedError
            raise kind(found["error"])
        return found

    async def _read(self) -> None:
        """Give every answer to the request that waits for it, until the process ends."""
        try:
            while True:
                self._share(await self._line())
        except Exception as error:
            lost = EngineLostError("the engine of the model ended while it answered; repeat the request")
            if self._waiting:
                log.error("%s", error)
            for answers in {id(one): one for one in self._waiting.values()}.values():
                answers.put_nowait(lost)

    def _share(self, found: Mapping[str, Any]) -> None:
        for name, message, asked_wrongly in found.get("failed", ()):
            self._put(name, InputError(message) if asked_wrongly else JobFailedError(message))
        for name, *scores in found.get("scored", ()):
            self._put(name, Scored(name, *scores))
        for name, tokens, logprobs in found.get("deltas", ()):
            self._put(name, Part(name, tokens, logprobs))
        for name, tokens, logprobs, by in found.get("done", ()):
            self._put(name, Part(name, tokens, logprobs, by))

    def _put(self, name: str, found: Part | Scored | Exception) -> None:
        if answers := self._waiting.get(name):  # None: the request has left
            answers.put_nowait(found)

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][-_SHOWN:]}" if lines else ""


@dataclass(frozen=True, slots=True)
class Release:
    """A model to serve."""

    name: str  # as people named it: prod@3, run:sort/sft, model:base
    digest: str
    folder: Callable[[], Path]  # brings its files to this machine
    adapters: Mapping[str, Release] = field(default_factory=dict)  # further adapters of its base, by name

    def settings(self) -> dict[str, Any]:
        """Bring all files to this machine; return the model and the adapters as an engine expects them."""
        return {
            "folder": str(self.folder()),
            "adapters": {name: str(one.folder()) for name, one in self.adapters.items()},
        }


@dataclass(slots=True, eq=False)
class Served:
    """A model in memory, with the requests that it answers."""

    release: Release
    texts: Texts
    engine: EngineProcess
    requests: int = 0
    compared: float | None = None  # largest difference from the recorded log-probabilities; None: none are recorded
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # while no request holds it
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # while its engine answers

    @property
    def context(self) -> int:
        """The maximum number of tokens in a prompt with its response."""
        return int(self.engine.facts["context"])


Check = Callable[[Served], Awaitable[None]]


class Models:
    """The model that new requests get, and the one before it while it still answers.

    Args:
        settings: of every engine, see `EngineProcess.start`.
        check: raises for a model that differs from the judged one; called before any request gets the model.
    """

    def __init__(self, settings: Mapping[str, Any], check: Check) -> None:
        self._settings, self._check = settings, check
        self._served: Served | None = None
        self._leaving: Served | None = None
        self._loading, self._ending = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.trouble = "the model is being loaded"  # why no request is answered, or the release is not the newest one
        self.switches = self.restarts = 0

    @property
    def served(self) -> Served | None:
        """The model that new requests get; None: none is loaded."""
        return self._served

    @property
    def loaded(self) -> list[Served]:
        """The models in memory."""
        return [one for one in (self._served, self._leaving) if one is not None]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Served]:
        """Hold the current model for one request.

        Raises:
            EngineLostError: no model is loaded.
        """
        served = self._served
        if served is None:
            raise EngineLostError(f"{self.trouble}; try again")
        served.requests += 1
        served.idle.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(served.ready.wait(), _RESTART)
        try:
            yield served
        finally:
            served.requests -= 1
            if not served.requests:
                served.idle.set()

    async def use(self, release: Release) -> None:
        """Serve a release: load it beside the current one, check it, and give it to all later requests.

        Raises:
            PosttrainError: the release cannot be loaded, or differs from the judged model; the current one stays.
        """
        async with self._loading:
            if self._leaving is not None and self._leaving.release.digest == release.digest:
                self._served, self._leaving = self._leaving, self._served  # a rollback before the former one has ended
                self._switched(release)
                return
            await self._leave()  # at most two in memory
            settings = await asyncio.to_thread(release.settings)
            texts = await asyncio.to_thread(Texts, Path(settings["folder"]))
            served = Served(release, texts, await EngineProcess.start({**self._settings, **settings}))
            texts.context = served.context
            served.idle.set()
            served.ready.set()
            try:
                await self._check(served)
            except BaseException:
                await served.engine.kill()
                raise
            self._served, self._leaving = served, self._served
            self._spawn(self._keep(served))
            self._switched(release)

    async def close(self) -> None:
        """End all engines, after the requests that hold them."""
        last, self._served, self._leaving = self.loaded, None, None
        for one in last:
            await one.idle.wait()
            await one.engine.close()
        for task in self._tasks:
            task.cancel()

    def _switched(self, release: Release) -> None:
        self.trouble, self.switches = "", self.switches + 1
        if self.switches > 1:  # the command reports the first one
            log.info("serving %s %s", release.name, release.digest)
        self._spawn(self._leave())

    async def _leave(self) -> None:
        """End the former model after its last request."""
        async with self._ending:
            leaving = self._leaving
            if leaving is None:
                return
            await leaving.idle.wait()
            if self._leaving is leaving:  # a rollback may have taken it back
                self._leaving = None
                await leaving.engine.close()

    async def _keep(self, served: Served) -> None:
        """Start the engine of a model again whenever it ends while the model is served."""
        tries = 0
        while True:
            begun = time.monotonic()
            await served.engine.ended()
            if served not in self.loaded:
                return
            tries = tries + 1 if time.monotonic() - begun < _STEADY else 0
            served.ready.clear()
            log.error("the engine of %s ended and is started again", served.release.name)
            self.restarts += 1
            await asyncio.sleep(_AGAIN[min(tries, len(_AGAIN) - 1)])
            if served not in self.loaded:
                return
            try:
                settings = await asyncio.to_thread(served.release.settings)
                engine = await EngineProcess.start({**self._settings, **settings})
            except Exception as error:  # a full disk or too many processes, which may pass
                self.trouble = f"the engine of {served.release.name} cannot be started: {error}"
                log.error("%s", self.trouble)
                continue
            if served not in self.loaded:  # a switch while it started
                await engine.kill()
                return
            served.engine = engine
            served.ready.set()
            self.trouble = ""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)
