"""The process in which a reward's own code runs: `python -m posttrain.engine.rewards.worker FD CELL PARENT`.

Stdlib only, so that it starts in tens of milliseconds and holds nothing worth stealing. It enters its cell first
(`engine.rewards.cell`), then has one loop: read a call from the socket `FD`, run the function, answer. It waits for
nothing but its parent; the parent waits with a deadline and closes the cell when it passes. When the parent dies the
cell closes by itself. Whatever the reward prints goes to stderr, which is the job's log.

Messages are JSON behind an 8-byte big-endian length. The first is `open`, answered by what was found; then `score`
calls. Error answers are `{"error": {"kind": "load" | "raised" | "answer", "message": …}}`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import linecache
import os
import random
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from posttrain.domain.errors import InputError
from posttrain.domain.rewards import entry_name
from posttrain.engine.rewards.cell import enter
from posttrain.engine.rewards.dialects import BATCHED, SINGLE, Binder, DialectError, detect

MAX_MESSAGE = 256 * 2**20  # bytes


class ReportedError(Exception):
    """Something to answer as an error: `kind` load | raised | answer, and one line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Channel(Protocol):
    """The two methods of a connected socket that messages need."""

    def sendall(self, data: bytes, /) -> None:
        """Write everything."""

    def recv(self, count: int, /) -> bytes:
        """Read at most `count` bytes; none at the end."""


def send(channel: Channel, value: Any) -> None:
    """Write one message."""
    data = json.dumps(value).encode()
    channel.sendall(struct.pack(">Q", len(data)) + data)


def receive(channel: Channel) -> Any:
    """Read one message.

    Raises:
        EOFError: the other end closed.
        ValueError: a message that is too long or is not JSON.
    """
    (length,) = struct.unpack(">Q", _exactly(channel, 8))
    if length > MAX_MESSAGE:
        raise ValueError(f"message of {length} bytes is longer than {MAX_MESSAGE}")
    return json.loads(_exactly(channel, length))


def _exactly(channel: Channel, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = channel.recv(min(count - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError("the other end closed the socket")
        chunks += chunk
    return bytes(chunks)


# --- the reward's source ----------------------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """Execute a reward's source file.

    Raises:
        ReportedError: it cannot be read or parsed, or raises while it is imported.
    """
    sys.path.insert(0, str(path.parent))  # its own sibling modules
    loader = importlib.machinery.SourceFileLoader("posttrain_reward", str(path))  # the file may have lost its suffix
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ReportedError("load", f"{path.name} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        raise ReportedError("load", f"{path.name}:{error.lineno} is not valid Python: {error.msg}") from error
    except OSError as error:
        raise ReportedError("load", f"{path.name} cannot be read: {error}") from error
    except (Exception, SystemExit) as error:
        raise ReportedError("raised", f"{place(error, path)} raised {one_line(error)} while it was imported") from error
    return module


def entry_function(module: ModuleType, path: Path, entry: str | None) -> Callable[..., Any]:
    """The function named `entry`; without a name: `score`, `compute_score`, or the only public function.

    Raises:
        ReportedError: there is no such function.
    """
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    try:
        entry = entry or entry_name(own, path.name)
    except InputError as error:
        raise ReportedError("load", str(error)) from error
    function = getattr(module, entry, None)
    if not callable(function):
        known = ", ".join(own) or "no function"
        raise ReportedError("load", f"{path.name} has no function {entry!r}; it defines {known}")
    result: Callable[..., Any] = function
    return result


def place(error: BaseException, path: Path) -> str:
    """`file:line` of the innermost frame in the reward's own folder."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == path.parent:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return path.name


def one_line(error: BaseException) -> str:
    """`ValueError: text` without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")


# --- scoring ----------------------------------------------------------------------------------------------------------


class Scorer:
    """A loaded reward function and how it is called."""

    def __init__(self, path: Path, entry: str | None, dialect: str | None) -> None:
        self.path = path
        self.function = entry_function(load(path), path, entry)
        self.name = getattr(self.function, "__name__", entry or "reward")
        try:
            self.binder = Binder(self.function)
            self.dialect = dialect or detect(self.binder.names)
        except DialectError as error:
            raise ReportedError("load", f"{self.where}: {error}") from error
        if self.dialect not in BATCHED and self.dialect not in SINGLE:
            raise ReportedError(
                "load", f"dialect must be one of {', '.join((*BATCHED, *SINGLE))}, got {self.dialect!r}"
            )

    @property
    def where(self) -> str:
        """`file.py:12 (score)`: the line of its definition."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        line = f":{code.co_firstlineno}" if code else ""
        return f"{self.path.name}{line} ({self.name})"

    def score(self, call: Mapping[str, Any], key: bytes) -> list[list[Any]]:
        """`[score, components]` for every completion of the call.

        Raises:
            ReportedError: it raised, or answered with something that is no score.
        """
        seed_from(key)
        if self.dialect in BATCHED:
            answer = self.run(BATCHED[self.dialect](call), f"a batch of {len(call['completions'])}")
            return [self.plain(item, f"completion {i}") for i, item in enumerate(self.batch(answer))]
        offers = SINGLE[self.dialect]
        return [
            self.plain(self.run(offers(call, i), f"completion {i} {text[:60]!r}"), f"completion {i}")
            for i, text in enumerate(call["completions"])
        ]

    def run(self, offered: dict[str, Any], subject: str) -> Any:
        """Call the function, awaiting it when it is asynchronous."""
        try:
            arguments = self.binder.bind(offered)
        except DialectError as error:
            raise ReportedError("load", f"{self.where}: {error}") from error
        try:
            answer = self.function(**arguments)
            return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            raise ReportedError("raised", f"{place(error, self.path)} raised {one_line(error)} on {subject}") from error

    def batch(self, answer: Any) -> list[Any]:
        """The list a batched function returned."""
        if isinstance(answer, Mapping):
            answer = answer.get("rewards", answer.get("scores"))
        if hasattr(answer, "tolist"):
            answer = answer.tolist()
        if not isinstance(answer, (list, tuple)):
            raise ReportedError("answer", f"{self.where} must return a list of scores, got {type(answer).__name__}")
        return list(answer)

    def plain(self, answer: Any, subject: str) -> list[Any]:
        """`[score, components]` out of a number, None, or a mapping with `score`."""
        if isinstance(answer, Mapping):
            if "score" not in answer:
                raise ReportedError(
                    "answer", f"{self.where} must return `score` in its mapping for {subject}, got {sorted(answer)}"
                )
            others = {str(name): value for name, value in answer.items() if name != "score"}
            numbers = {name: _number(value) for name, value in others.items()}
            components = {name: value for name, value in numbers.items() if value is not None}
            answer = answer["score"]
        else:
            components = {}
        value = _number(answer)
        if value is None and answer is not None:
            raise ReportedError(
                "answer", f"{self.where} must return a number or None for {subject}, got {type(answer).__name__}"
            )
        return [value, components]


async def _awaited(answer: Any) -> Any:
    return await answer


def _number(value: Any) -> float | None:
    """A Python float of any real scalar, numpy's and torch's too; None for everything else."""
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else None


def seed_from(key: bytes) -> None:
    """Seed the global generators from the call itself, so that a resumed run draws what the undisturbed run drew."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:4], "big")
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def serve(channel: socket.socket, notes: list[str]) -> None:
    """Answer calls until the parent closes the socket; `notes` says what the cell does not confine."""
    scorer: Scorer | None = None
    while True:
        try:
            message = receive(channel)
        except EOFError:
            return
        linecache.checkcache()
        try:
            if message["op"] == "open":
                scorer = Scorer(Path(message["path"]), message["entry"], message["dialect"])
                answer: Any = {"notes": notes, "dialect": scorer.dialect, "where": scorer.where}
            elif scorer is None:
                raise ReportedError("load", "no reward is open")
            else:
                key = json.dumps(message, sort_keys=True).encode()
                answer = {"scores": scorer.score(message, key)}
        except ReportedError as fault:
            answer = {"error": {"kind": fault.kind, "message": str(fault)}}
        except MemoryError:
            answer = {"error": {"kind": "raised", "message": "the reward ran out of the memory it may use"}}
        send(channel, answer)


def main() -> None:
    """Entry point. Arguments: the socket's descriptor, `{"limits", "hidden"}` as JSON, the parent's process id."""
    os.dup2(2, 1)
    descriptor, cell, parent = sys.argv[1:]
    notes = enter(int(parent), **json.loads(cell))
    serve(socket.socket(fileno=int(descriptor)), notes)


if __name__ == "__main__":
    main()
