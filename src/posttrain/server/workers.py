"""Child processes of a server: the driver, and workers for requests that the server does not carry out itself.

Between exec and `close_to_others`, every process of the account, even a job, can read `/proc/PID/environ`. Therefore a
child starts with the machine's variables and without keys, and receives the whole environment over a socket. Unlike a
pipe, a socket cannot be opened through `/proc/PID/fd`. The socket stays open until the server ends, which the child
detects.

Workers start when they are needed and end when they are idle. `Asking` is the handle with which a caller waits for a
request: it passes on the request's reports of progress, and can end the request.
"""

from __future__ import annotations

import json
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from posttrain.domain.errors import BusyError, DeadlineError, InfrastructureError, StoppedError
from posttrain.domain.jobspec import SECRET_NAME
from posttrain.execution.processes import close_to_others, of_a_server

DESCRIPTOR = 3  # of a worker: the end of its socket
PIECE = "2"  # marks a report of progress; 0 and 1 mark a problem and a result
_LENGTH = 8  # bytes of the length that precedes the environment
# prefixes of variables that the interpreter and libc read before the environment can be sent
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
_START = "from posttrain.server.workers import begin; begin({}, {})"
REQUEST_SECONDS = 900.0  # limit for a request while its connection waits
OPERATION_SECONDS = 21600.0  # limit for an operation
_HANDOVER = 60.0  # seconds within which a child must read its environment
IDLE_SECONDS = 300.0  # seconds without a request after which a worker ends
_LOOK = 0.5  # seconds between two checks whether a waiting request was ended


def start(
    module: str, words: Sequence[str], descriptor: int, passed: Collection[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `module`; return the process and the server's end of its socket.

    Args:
        descriptor: the descriptor of the child's end of the socket; 0 is the child's stdin.
        passed: further descriptors that the child inherits, all different from `descriptor`.

    Raises:
        OSError: the process cannot be started or ended immediately.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _START.format(number, descriptor), module, *words],
                stdin=subprocess.DEVNULL, pass_fds=(number, *passed), cwd="/", start_new_session=True,
                env=at_start(os.environ),
            )  # fmt: skip
        try:
            said = json.dumps(dict(os.environ)).encode()
            ours.settimeout(_HANDOVER)  # the environment may be larger than what a socket holds
            ours.sendall(len(said).to_bytes(_LENGTH) + said)
            ours.settimeout(None)
        except OSError:
            process.kill()
            process.wait()
            raise
    except OSError:
        ours.close()
        raise
    return process, ours


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the server's environment with which a child starts; this part contains no key."""
    early = {name for name in environment if name.startswith(_READ_AT_START) and not SECRET_NAME.search(name)}
    return of_a_server(environment) | {name: environment[name] for name in early}


def begin(inherited: int, descriptor: int) -> None:
    """Prevent other processes from reading this child, receive the environment, and run the named module."""
    close_to_others()
    if inherited != descriptor:
        os.dup2(
            inherited, descriptor, inheritable=descriptor == 0
        )  # a program that inherits no stdin would get its next file as stdin
        os.close(inherited)
    else:
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=os.dup(descriptor)) as server:
        length = int.from_bytes(server.recv(_LENGTH, socket.MSG_WAITALL))
        said = server.recv(length, socket.MSG_WAITALL)
    if not length or len(said) != length:
        raise SystemExit("the server has ended")
    os.environ.update(json.loads(said))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


class Asking:
    """The handle of one request to a worker.

    Args:
        told: receives each report of progress as JSON, in the thread that waits for the worker.
        deadline: seconds that the request may take, including the wait for a worker.
    """

    def __init__(self, told: Callable[[bytes], None] = lambda _: None, deadline: float = REQUEST_SECONDS) -> None:
        self.told, self.deadline = told, deadline
        self._kill: Callable[[], None] | None = None
        self.over = False  # whether the request was ended
        self._lock = threading.Lock()

    def held_by(self, kill: Callable[[], None] | None) -> None:
        """Set the function that kills the request's worker; None: no worker carries out the request.

        Raises:
            StoppedError: the request was already ended.
        """
        with self._lock:
            if self.over and kill is not None:
                raise StoppedError("the request was cancelled before it was carried out")
            self._kill = kill

    def end(self) -> None:
        """End the request: kill its worker; uncommitted changes are lost."""
        with self._lock:
            self.over = True
            if self._kill is not None:
                self._kill()


class Refused(Exception):  # noqa: N818  # it is an answer
    """The worker returned a problem."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document.get("detail"))
        self.document = document


class Answers(Protocol):
    """Carries out verbs that read files or compute."""

    def ask(
        self, asker: Mapping[str, Any], verb: str, sent: Mapping[str, Any], request: str, asking: Asking | None = None
    ) -> bytes:
        """Return a verb's result as JSON. Raises `Refused` if the verb raised an error."""


class Workers:
    """A few workers for one workspace; each carries out one request at a time.

    Args:
        words: arguments for the workers' logs (`logs.Logging.words`).
        most: maximum number of concurrent processes.
        deadline: seconds that a request may take, including the wait for a worker.
    """

    def __init__(self, root: Path, words: Sequence[str] = (), most: int = 3, deadline: float = REQUEST_SECONDS) -> None:
        self._root, self._words, self._deadline = root, words, deadline
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # None: a process that may be started
        for _ in range(most):
            self._free.put(None)
        self._closed = False
        self._lock = threading.Lock()
        self._all: set[_Process] = set()

    def ask(
        self, asker: Mapping[str, Any], verb: str, sent: Mapping[str, Any], request: str, asking: Asking | None = None
    ) -> bytes:
        """Return a verb's result as JSON.

        Args:
            asking: receives the reports of progress, and may end the request.

        Raises:
            StoppedError: the request was ended.
            Refused: the verb raised an error.
            BusyError: no worker was free in time.
            DeadlineError: the request took too long and was ended.
            InfrastructureError: the worker died.
        """
        asking = asking or Asking(deadline=self._deadline)
        until = time.monotonic() + asking.deadline
        process = self._taken(asking, until)
        try:
            if process is None or not process.alive:
                process = self._start()
            asking.held_by(process.kill)
            line = json.dumps({"asker": asker, "verb": verb, "sent": sent, "request": request}).encode() + b"\n"
            done, body = process.ask(line, until - time.monotonic(), asking.told)
            asking.held_by(None)
        except BaseException as error:
            asking.held_by(None)
            try:
                self._end(process)
            finally:
                self._free.put(None)
            if asking.over and isinstance(error, InfrastructureError):
                raise StoppedError(f"{verb.replace('_', ' ')}: was cancelled while it was carried out") from error
            raise
        self._free.put(process)
        if not done:
            raise Refused(json.loads(body))
        return body

    def _taken(self, asking: Asking, until: float) -> _Process | None:
        while not asking.over and not self._closed:
            try:
                return self._free.get(timeout=max(0.0, min(_LOOK, until - time.monotonic())))
            except queue.Empty as error:
                if time.monotonic() >= until:
                    raise BusyError("the server is overloaded; try again later") from error
        if self._closed:
            raise _shutting_down()
        raise StoppedError("the request was cancelled before it was carried out")

    def tidy(self) -> None:
        """End workers that have been idle for `IDLE_SECONDS`."""
        kept = []
        with suppress(queue.Empty):
            while True:
                one = self._free.get_nowait()
                if one is not None and time.monotonic() - one.used > IDLE_SECONDS:
                    self._end(one)
                    one = None
                kept.append(one)
        for one in sorted(kept, key=lambda one: one.used if one else 0.0):
            self._free.put(one)

    def ids(self) -> dict[str, list[int]]:
        """Return the ids of the running processes, by kind."""
        with self._lock:
            return {"worker": [one.id for one in self._all]}

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._closed = True
            every = set(self._all)
        for one in every:
            self._end(one)

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise _shutting_down()
            made = _Process(self._root, self._words)
            self._all.add(made)
            return made

    def _end(self, one: _Process | None) -> None:
        if one is None:
            return
        one.end()
        with self._lock:
            self._all.discard(one)


def _shutting_down() -> InfrastructureError:
    return InfrastructureError("the server is shutting down; try again")


class _Process:
    """One worker process."""

    def __init__(self, root: Path, words: Sequence[str]) -> None:
        try:
            self._process, self._ours = start("posttrain.server.worker", [str(root), *words], DESCRIPTOR)
        except OSError as error:
            raise InfrastructureError(f"a worker of the server cannot be started ({error}); try again") from error
        self._stream, self.id = self._ours.makefile("rwb"), self._process.pid
        self.used = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, seconds: float, told: Callable[[bytes], None]) -> tuple[bool, bytes]:
        self._ours.settimeout(max(0.001, seconds))
        try:
            self._stream.write(line)
            self._stream.flush()
            while True:
                done, _, length = self._stream.readline().decode().partition(" ")
                body = self._stream.read(int(length)) if length else b""
                if done != PIECE or len(body) != int(length):
                    break
                told(body)
        except TimeoutError as error:
            raise DeadlineError(
                f"the request was ended, since it exceeded its limit of {seconds:.0f} s; request less at a time"
            ) from error
        except OSError as error:
            raise InfrastructureError(f"a worker of the server died ({error}); try again") from error
        if not length or len(body) != int(length):
            raise InfrastructureError("a worker of the server died; try again")
        self.used = time.monotonic()
        return done == "1", body

    def kill(self) -> None:
        """Kill the process during a request; the request's caller gets an error."""
        with suppress(ProcessLookupError):  # another thread may have collected it
            os.killpg(self.id, signal.SIGKILL)

    def end(self) -> None:
        self._ours.close()
        if self.alive:
            self.kill()
        self._process.wait()
