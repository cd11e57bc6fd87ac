"""One worker process of a reward, the layout of its cell, and the folder of an open reward.

Messages have deadlines. The job determines the layout, which is the part of this machine that a reward may read, before
the cell exists. If a job is killed, the keeper of the cell removes the folder of the open reward; if the keeper cannot
do so, the next reward removes the folder.
"""

import fcntl
import json
import mmap
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from posttrain.domain.errors import InputError
from posttrain.domain.rewards import source_name
from posttrain.sandbox import protocol, worker
from posttrain.sandbox.barriers import OVER_MEMORY, OVER_PROCESSES
from posttrain.sandbox.cell import CellPlan, Relay

LIMITS: Mapping[str, int] = {
    "RLIMIT_AS": 8 * 2**30,  # bytes of address space: libraries such as numpy reserve much and use little
    "RLIMIT_FSIZE": 2**30,  # bytes per file written
    "RLIMIT_NOFILE": 256,
}
# in addition for each concurrent call of `observe`: a thread's stack and arena, an event loop
_EACH = {"RLIMIT_AS": 256 * 2**20, "RLIMIT_NOFILE": 16}
_ENGINE = {"RLIMIT_AS": 32 * 2**30}  # in addition for an observer, which imports torch
MEMORY = 8 * 2**30  # bytes of all processes together, at most half of the machine's memory
PROCESSES = 256  # processes and threads that the reward may have
SCRATCH = 2**30  # bytes that the reward may write
LOOPBACK = "127.0.0.1"  # the job's machine, if a reward declares it; it has no hostname
_PACKAGE = Path(__file__).resolve().parents[2]  # the folder of the package posttrain, which contains the worker
PREFIX = "posttrain-cell-"
END_TIMEOUT = 5.0  # seconds for the keeper to kill the reward's processes, before the keeper is killed
START_TIMEOUT = 60.0  # seconds for a worker to start and to confine itself, on a busy machine
PRINTED = 2**20  # bytes of the reward's output that are copied into the job's log
_NOWHERE = b"\xff" * 8  # value of the marker before the first completion
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # from people or for lack of memory


@dataclass(frozen=True, slots=True)
class Provision:
    """The files, hosts and secrets that a run declares for its reward."""

    files: Mapping[str, Path]  # name next to the source → a file or folder
    network: Sequence[str] = ()  # host:port
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variable → value, for its environment alone
    variables: Mapping[str, str] = field(default_factory=dict)  # the same for values that are not secret


def lay_out(
    scratch: Path,
    source: Path | None,
    name: str,
    *,
    whole: bool = False,
    hidden: Sequence[Path] = (),
    provision: Provision,
    concurrency: int = 0,
    readable: Sequence[str] = (),
) -> CellPlan:
    """Put the source and files of a reward or an observer into a folder, and return the plan of its cell.

    Args:
        scratch: an empty folder of the job.
        source: the file, or a blob named by its digest; None: the code is in an installed package.
        name: the file's name in the cell.
        whole: whether the reward is the source's whole folder.
        hidden: folders that a reward must not see.
        provision: declared files and hosts.
        concurrency: the number of calls of `observe` at a time, for whose threads and files the limits leave room.
        readable: existing folders that the code may read, in addition to the interpreter's.
    """
    for folder in ("root", "source", "work"):
        (scratch / folder).mkdir()
    kit = scratch / "source"
    if source and whole:
        shutil.copytree(source.parent, kit, dirs_exist_ok=True)
    elif source and source.suffix == ".py":
        for module in source.parent.glob("*.py"):  # modules that the reward may import from its folder
            shutil.copyfile(module, kit / module.name)
    if source:
        shutil.copyfile(source, kit / name)
    _copy_files(provision.files, kit)
    places = dict(zip(provision.network, _addresses(provision.network), strict=True))
    readable = [*_readable(), *readable]
    return CellPlan(
        base=str(scratch / "root"),
        source=str(kit),
        scratch=str(scratch / "work"),
        readable=readable,
        # a folder that contains a readable path is not hidden; its other content is invisible in the cell anyway
        hidden=[
            str(place)
            for place in (folder.resolve() for folder in hidden)
            if not any(Path(path).is_relative_to(place) for path in readable)
        ],
        limits=_limits(concurrency),
        memory=min(MEMORY, psutil.virtual_memory().total // 2),
        processes=PROCESSES + 2 * concurrency,  # an asynchronous call may need a thread in addition
        scratch_bytes=SCRATCH,
        hosts={host: address for word, (address, _) in places.items() if (host := word.rpartition(":")[0]) != LOOPBACK},
        ports=list(places.values()),
        variables=provision.variables,
    )


def _copy_files(files: Mapping[str, Path], kit: Path) -> None:
    for given, path in files.items():
        target = kit / given
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)


def _limits(concurrency: int) -> dict[str, int]:
    engine = _ENGINE if concurrency else {}
    return {name: value + concurrency * _EACH.get(name, 0) + engine.get(name, 0) for name, value in LIMITS.items()}


def source_file(path: Path, file: str = "") -> Path:
    """Return the reward's source file: `path`, or, in a folder, the named file, `reward.py` or the only Python file.

    Raises:
        InputError: the file does not exist; the folder has several Python files and none is called `reward.py`.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"reward source {path.name} does not exist; give a Python file or a folder that contains one")
    return path / source_name({p.name for p in path.glob("*.py")}, file, path.name)


def _readable() -> list[str]:
    """Return the outermost folders of interpreter, environment, this package, and paths that `.pth` files add.

    A folder that contains a home folder is left out, so modules in it cannot be imported.
    """
    homes = {Path("/"), *Path.home().parents, Path.home()}
    wanted = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    wanted += [Path(os.path.realpath(sys.executable)).parent.parent, _PACKAGE, *_added()]
    found = {path for path in wanted if path not in homes}
    return sorted(str(path) for path in found if not any(other in path.parents for other in found))


def _added() -> Iterator[Path]:
    """Yield folders of packages that are installed in place."""
    for folder in map(Path, site.getsitepackages()):
        for file in folder.glob("*.pth"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("/") and Path(line).is_dir():
                    yield Path(line).resolve()


def _addresses(network: Sequence[str]) -> list[tuple[str, int]]:
    """Return a loopback address of the cell for every declared host, the same for equal hosts."""
    hosts = list(dict.fromkeys(word.rpartition(":")[0] for word in network))
    places = {host: host if host == LOOPBACK else f"127.0.1.{number}" for number, host in enumerate(hosts, start=1)}
    return [(places[host], int(port)) for host, _, port in (word.rpartition(":") for word in network)]


class Scratch:
    """A new temporary folder, locked until it is closed. Folders that no process locks are removed.

    The kernel releases the lock when the process dies.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for left in parent.glob(f"{PREFIX}*"):
            _sweep(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # another process removed it before it was locked, so retry
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._held, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._held)

    def close(self) -> None:
        """Remove the folder. A second call has no effect."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


def _sweep(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # deleted, or of another user
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # locked
    finally:
        os.close(held)


class EndedError(Exception):
    """The worker has ended; the message gives the cause, and `killed` records whether it was killed from outside."""

    def __init__(self, message: str, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


class LateError(Exception):
    """The deadline has passed, and the worker was killed."""


class NotConfinedError(Exception):
    """The worker did not report its confinement in time, e.g. because the machine is too busy."""


class Log:
    """Copies the output of all of a reward's workers to the job's log, up to a limit."""

    def __init__(self) -> None:
        self.left, self.dropped = PRINTED, 0

    def write(self, chunk: bytes) -> None:
        """Copy a chunk up to the limit."""
        os.write(2, chunk[: self.left])
        self.dropped += max(len(chunk) - self.left, 0)
        self.left -= min(len(chunk), self.left)

    def end(self) -> None:
        """Report the number of bytes left out."""
        if self.dropped:
            os.write(2, f"\n[{self.dropped} more bytes of the reward's output were dropped]\n".encode())
        self.dropped = 0


class Session:
    """A started and confined worker.

    Args:
        plan: the plan of the worker's cell.
        network: declared hosts, one per port of the plan.
        log: receives the worker's output.
        secrets: variable → value, for the worker's environment; redacted in the worker's output and answers.

    Raises:
        NotConfinedError: the worker was not confined in time.
        EndedError: the worker was killed earlier.
    """

    def __init__(
        self,
        plan: CellPlan,
        network: Sequence[str] = (),
        log: Log | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._clean, self._plan = protocol.Redactor(secrets), plan
        self._process, self._channel, self._output, self._marker = _start(plan, secrets)
        self._printed = threading.Thread(target=_copy, args=(self._output, log or Log(), self._clean), daemon=True)
        self._printed.start()
        self._relay: Relay | None = None
        self._last = 0
        try:
            deadline = time.monotonic() + START_TIMEOUT
            ready = self.hear((0,), deadline)
            if not isinstance(ready, protocol.Ready):
                raise NotConfinedError("its worker did not report that it is confined")
            self.confined, self.notes = ready.whole, ready.notes
            if plan.ports and ready.whole:
                found = self.descriptors(len(plan.ports), deadline)
                self._relay = Relay([socket.socket(fileno=number) for number in found], network)
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
        """Send a request; yield its answers, including the final message.

        Raises:
            LateError: the answers took longer than `seconds` in total.
            EndedError: the worker has ended.
            protocol.MalformedError: an answer is malformed.
            ValueError, TypeError: the request is not JSON.
        """
        self._marker[:] = _NOWHERE
        moment = time.monotonic() + seconds
        request_id = self.tell(request, moment)
        while True:
            answer = self.hear((request_id,), moment)
            yield answer
            if not isinstance(answer, protocol.Answers):
                return

    def tell(self, request: Mapping[str, Any], moment: float) -> int:
        """Send a request; return its id.

        Raises:
            LateError: the worker did not read the request before `moment` (`time.monotonic`), and was killed.
            EndedError: the worker has ended.
            ValueError, TypeError: the request is not JSON.
        """
        self._last += 1
        with self._faults():
            protocol.send(_Deadline(self._channel, moment), {**request, "id": self._last})
        return self._last

    def hear(self, requests: Collection[int], moment: float) -> protocol.Message:
        """Return the next message, which answers one of the requests.

        Raises:
            LateError: the message did not come before `moment` (`time.monotonic`), and the worker was killed.
            EndedError: the worker has ended.
            protocol.MalformedError: the message is malformed, or answers no such request.
        """
        with self._faults():
            return protocol.receive(_Deadline(self._channel, moment), requests, self._clean)

    def descriptors(self, count: int, moment: float) -> list[int]:
        """Return open descriptors that the worker sends; see `hear` for the errors."""
        with self._faults():
            self._channel.settimeout(max(moment - time.monotonic(), 0.001))
            return list(socket.recv_fds(self._channel, 1, count)[1])

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message arrives, or when the worker has ended."""
        return self._channel.fileno()

    @property
    def at(self) -> int:
        """The completion that the worker's marker shows, for functions that score one completion at a time."""
        return int.from_bytes(self._marker[:], "big")

    def close(self) -> None:
        """Kill the worker and all its descendants, detached or not."""
        self._channel.close()
        if self._relay:
            self._relay.close()
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._printed.join(END_TIMEOUT)  # writes the whole output before other lines

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Convert socket errors to the errors of a session; the worker is killed."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise LateError from None
        except (EOFError, OSError):  # or another thread closed the socket
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)  # wait, so that the exit code is the worker's
            self.close()
            raise self._ending() from None

    def _ending(self) -> EndedError:
        code = self._process.returncode or 0
        limits = {
            OVER_MEMORY: f"more than {MEMORY / 2**30:g} GiB of memory, or half of the machine's",
            OVER_PROCESSES: f"more than {self._plan.processes} processes and threads",
        }
        if code in limits:
            return EndedError(f"used {limits[code]} and was killed", killed=False)
        number = -code if code < 0 else code - 128  # the keeper's exit codes follow the convention of shells
        how = f"signal {number}" if number > 0 else f"exit code {code}"
        return EndedError(f"ended its process ({how}) instead of answering", killed=code < 0 or number in OUTSIDE)


class _Deadline:
    """A socket with one deadline for all its operations."""

    def __init__(self, channel: socket.socket, moment: float) -> None:
        self._channel = channel
        self.moment = moment

    def sendall(self, data: bytes, /) -> None:
        """See `socket.sendall`."""
        self._arm()
        self._channel.sendall(data)

    def recv(self, count: int, /) -> bytes:
        """See `socket.recv`."""
        self._arm()
        return self._channel.recv(count)

    def _arm(self) -> None:
        left = self.moment - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)


def _start(plan: CellPlan, secrets: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int, mmap.mmap]:
    """Start a worker with a minimal environment; the declared secrets are the only variables taken from the job's."""
    ours, theirs = socket.socketpair()
    output, printing = os.pipe()
    shared = os.memfd_create("marker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # eight shared bytes
    os.ftruncate(shared, 8)
    fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    environment = {
        **plan.variables,
        **secrets,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": plan.scratch,
        "TMPDIR": plan.scratch,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(worker.PACKAGES),
        "PYTHONHASHSEED": "0",  # sets of strings must have the same order in every run
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    cell = json.dumps(asdict(plan))
    command = [sys.executable, "-s", "-P", "-m", worker.__name__, str(theirs.fileno()), str(shared), cell]
    command += [str(os.getpid()), *secrets]  # names only; the worker redacts the values
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
    """Copy the reward's output to stderr up to a limit; read the rest as well, so that the reward never blocks."""
    with suppress(OSError):
        rest = b""
        while chunk := os.read(output, 1 << 16):
            rest = clean(rest + chunk)
            ready = max(len(rest) - clean.held, 0)
            log.write(rest[:ready])
            rest = rest[ready:]
        log.write(rest)
        log.end()
    os.close(output)
