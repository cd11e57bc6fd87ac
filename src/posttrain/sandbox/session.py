"""One worker process of a reward, from its start to its end: messages with deadlines, and how it ended."""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from posttrain.sandbox import protocol, worker
from posttrain.sandbox.barriers import OVER_MEMORY, OVER_PROCESSES
from posttrain.sandbox.cell import CellPlan, Relay
from posttrain.sandbox.layout import MEMORY, PROCESSES

END_TIMEOUT = 5.0  # seconds the keeper may take to kill what the reward started, before it is killed itself
START_TIMEOUT = 60.0  # seconds a worker may take to start and to confine itself, on a busy machine
PRINTED = 2**20  # bytes of the reward's output that go into the job's log
_LIMITS = {
    OVER_MEMORY: f"more than {MEMORY / 2**30:g} GiB of memory, or half of the machine's",
    OVER_PROCESSES: f"more than {PROCESSES} processes and threads",
}
_NOWHERE = b"\xff" * 8  # the marker before the first completion
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent by people and by machines that run low


class EndedError(Exception):
    """The worker is gone; the text says how, `killed` whether from outside."""

    def __init__(self, message: str, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


class LateError(Exception):
    """The deadline passed; the worker is killed."""


class NotConfinedError(Exception):
    """The worker did not come to say how it is confined: the machine is too busy, or something is broken."""


class Log:
    """How much a reward may still print into the job's log, over all workers that it has had."""

    def __init__(self) -> None:
        self.left, self.dropped = PRINTED, 0

    def write(self, chunk: bytes) -> None:
        """Copy what there is room for."""
        os.write(2, chunk[: self.left])
        self.dropped += max(len(chunk) - self.left, 0)
        self.left -= min(len(chunk), self.left)

    def end(self) -> None:
        """Say what was left out."""
        if self.dropped:
            os.write(2, f"\n[{self.dropped} more bytes that the reward printed are not kept]\n".encode())
        self.dropped = 0


class Session:
    """A started and confined worker.

    Args:
        plan: of its cell.
        network: declared hosts, one per port of the plan.
        log: where its output goes.
        secrets: variable → value, for its environment; they are redacted in what it prints and answers.

    Raises:
        NotConfinedError: it did not come to be confined. EndedError: it was killed before.
    """

    def __init__(
        self,
        plan: CellPlan,
        network: Sequence[str] = (),
        log: Log | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._clean = protocol.Redactor(secrets)
        self._process, self._channel, self._output, self._marker = _start(plan, secrets)
        self._printed = threading.Thread(target=_copy, args=(self._output, log or Log(), self._clean), daemon=True)
        self._printed.start()
        self._relay: Relay | None = None
        self._last = 0
        try:
            deadline = time.monotonic() + START_TIMEOUT
            ready = self._receive(deadline)
            if not isinstance(ready, protocol.Ready):
                raise NotConfinedError("its worker did not say that it is confined")
            self.confined, self.notes = ready.whole, ready.notes
            if plan.ports and ready.whole:
                self._relay = Relay(self._listeners(len(plan.ports), deadline), network)
        except (protocol.MalformedError, EndedError, LateError) as error:
            self.close()
            if isinstance(error, EndedError) and error.killed:
                raise
            why = str(error) or f"was not confined within {START_TIMEOUT:g} s"
            raise NotConfinedError(f"its worker {why}") from None
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], seconds: float) -> Iterator[protocol.Message]:
        """Send a request; yields its answers up to and with the last one.

        Raises:
            LateError: it took longer than `seconds` in all. EndedError: the worker ended.
            protocol.MalformedError: an answer that is none. ValueError, TypeError: the request is not JSON.
        """
        self._last += 1
        self._marker[:] = _NOWHERE
        deadline = _Deadline(self._channel, time.monotonic() + seconds)
        with self._faults():
            protocol.send(deadline, {**request, "id": self._last})
        while True:
            answer = self._receive(deadline.moment)
            yield answer
            if not isinstance(answer, protocol.Answers):
                return

    @property
    def at(self) -> int:
        """The completion that a function which scores one after the other is at, as the worker says."""
        return int.from_bytes(self._marker[:], "big")

    def close(self) -> None:
        """Kill the worker and everything it started, detached or not."""
        self._channel.close()
        if self._relay:
            self._relay.close()
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._printed.join(END_TIMEOUT)  # all it printed stands in the log before anything else does

    def _receive(self, moment: float) -> protocol.Message:
        with self._faults():
            return protocol.receive(_Deadline(self._channel, moment), self._last, self._clean)

    def _listeners(self, count: int, moment: float) -> list[socket.socket]:
        self._channel.settimeout(max(moment - time.monotonic(), 0.001))
        with self._faults():
            _, found, _, _ = socket.recv_fds(self._channel, 1, count)
        return [socket.socket(fileno=number) for number in found]

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """What goes wrong with the socket, as what it means; the worker is gone afterwards."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise LateError from None
        except (EOFError, OSError):  # also a socket that another thread closed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)  # let it finish exiting, to tell its own exit code from our kill
            self.close()
            raise self._ending() from None

    def _ending(self) -> EndedError:
        code = self._process.returncode or 0
        if code in _LIMITS:
            return EndedError(f"used {_LIMITS[code]} and was killed", killed=False)
        number = -code if code < 0 else code - 128  # the keeper answers as shells do
        how = f"signal {number}" if number > 0 else f"exit code {code}"
        return EndedError(f"ended its process ({how}) instead of answering", killed=code < 0 or number in _OUTSIDE)


class _Deadline:
    """A socket whose operations all end at one moment."""

    def __init__(self, channel: socket.socket, moment: float) -> None:
        self._channel = channel
        self.moment = moment

    def sendall(self, data: bytes, /) -> None:
        """As `socket.sendall`."""
        self._arm()
        self._channel.sendall(data)

    def recv(self, count: int, /) -> bytes:
        """As `socket.recv`."""
        self._arm()
        return self._channel.recv(count)

    def _arm(self) -> None:
        left = self.moment - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)


def _start(plan: CellPlan, secrets: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int, mmap.mmap]:
    """Start a worker with a minimal environment: of our variables the reward's code gets the secrets that it names."""
    ours, theirs = socket.socketpair()
    output, printing = os.pipe()
    shared = os.memfd_create("marker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # eight bytes that both see
    os.ftruncate(shared, 8)
    fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    environment = {
        **secrets,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": plan.scratch,
        "TMPDIR": plan.scratch,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(worker.PACKAGES),
        "PYTHONHASHSEED": "0",  # iteration over sets of strings must not differ from run to run
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    cell = json.dumps(asdict(plan))
    command = [sys.executable, "-s", "-P", "-m", worker.__name__, str(theirs.fileno()), str(shared), cell]
    command += [str(os.getpid()), *secrets]  # their names: the worker keeps their values out of what it answers
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), shared),
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=printing,
                env=environment,
                cwd=plan.scratch,
                start_new_session=True,
            )
        marker = mmap.mmap(shared, 8)
    finally:
        os.close(printing)
        os.close(shared)
    return process, ours, output, marker


def _copy(output: int, log: Log, clean: protocol.Redactor) -> None:
    """Copy what the reward prints to stderr up to a limit; read on, so that it never waits for its log."""
    with contextlib.suppress(OSError):
        rest = b""
        while chunk := os.read(output, 1 << 16):
            rest = clean(rest + chunk)
            ready = max(len(rest) - clean.held, 0)
            log.write(rest[:ready])
            rest = rest[ready:]
        log.write(rest)
        log.end()
    os.close(output)
