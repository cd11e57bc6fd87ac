"""The driver of a run: a command in the foreground, a background driver, or none; and background drivers themselves.

A background driver has one environment. The handover of a run to it writes a request, starts the driver unless it is
alive, and waits until the driver has the run. The driver and its jobs have the environment of the command that handed
over the run: the variables that jobs inherit (CUDA_VISIBLE_DEVICES, HF_HOME, …), the interpreter and the sources of
Posttrain. The driver's log, which includes the output of the process, has a bounded size and no possible secrets.

::

    drivers/
      runs/RUN.json   a request to drive a run to its end, and the background driver that has it
      KEY.lock        the lock that the background driver of one environment holds while it is alive
      KEY.log         the log of that driver

Requests are changed under a lock on `runs/`. A driver releases `KEY.lock` under the same lock, so no request is written
between the driver's last check and its end.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from posttrain._version import __version__
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, PosttrainError, WorkspaceError
from posttrain.domain.jobspec import SECRET_NAME
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.domain.records import RunRecord
from posttrain.execution.processes import process_alive
from posttrain.store.atomic import Refusal, held, make_folder, read_json, unwritable, write_json
from posttrain.workspace.served import is_served
from posttrain.workspace.settings import STORE_VARIABLE, VARIABLE, OpenWorkspace

FOLDER = "drivers"
_RUNS = "runs"
_SUFFIX = ".json"
_LOCK_SECONDS = 60.0  # maximum wait for other processes, which only change a small file
MOST_BYTES = 256 * 1024  # at this size the log is renamed to `KEY.1.log`, replacing the previous file of that name
_SOURCES = Path(__file__).parents[1]
_TERMINAL_NAMES = frozenset(  # variables that differ between terminals and do not affect jobs
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERMCAP", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "DISPLAY"),
        *("WAYLAND_DISPLAY", "XAUTHORITY", "GPG_TTY", "STY", "WINDOW", "TMUX", "TMUX_PANE", "LS_COLORS", "PS1", "PS2"),
        *("PROMPT", "PROMPT_COMMAND", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "VTE_VERSION", "INVOCATION_ID"),
        *("JOURNAL_STREAM", "DBUS_SESSION_BUS_ADDRESS", "SYSTEMD_EXEC_PID"),
    )
)
_TERMINAL_PREFIXES = (
    *("TERM_", "SSH_", "XDG_SE", "XDG_VTNR", "KITTY_", "ITERM_", "WEZTERM_", "KONSOLE_", "WT_", "VSCODE_", "HIST"),
)
LOCK_VARIABLE = "POSTTRAIN_DRIVER_LOCK"  # the descriptor through which a new driver holds its lock from its start
TAKEN_SECONDS = 60.0  # maximum wait for a driver; allows for a cold start of Python on a busy machine
_POLL = 0.02
_MODULE = "posttrain.app.background"
_started: list[subprocess.Popen[bytes]] = []  # drivers that this process started, to reap ended ones
_USER_INFO = re.compile(r"(://)[^\s@]+@")
_SHORTEST = 6  # minimum characters of a hidden value, because shorter values occur by chance
_HIDDEN = "…"


class DriverKind(StrEnum):
    """The kind of process that drives a run."""

    FOREGROUND = "foreground"  # a command, or a program that waits
    BACKGROUND = "background"
    SERVER = "server"  # the server of the workspace
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RunDriver:
    """The driver of an unfinished run."""

    kind: DriverKind
    pid: int | None = None
    host: str = ""
    log: str = ""  # the log of a background driver, even if the driver has ended or has given up the run
    trouble: str = ""  # why a background driver gave up the run, in one line

    @property
    def nobody(self) -> bool:
        """Whether no process drives the run."""
        return self.kind is DriverKind.NONE

    def __str__(self) -> str:
        if self.nobody:
            return "none"
        if self.kind is DriverKind.SERVER:
            return "server"
        elsewhere = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"{self.kind}, pid {self.pid}{elsewhere}"

    @property
    def words(self) -> str:
        """The driver as text, such as `in the background, pid 71` or `by the server`."""
        return "by the server" if self.kind is DriverKind.SERVER else f"in the {self}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a background driver to drive a run to its end."""

    run_id: str
    key: str  # the key of the environment for its jobs
    root: str  # the workspace's path in the requesting process: the request is not valid in a copy
    owner: str = ""  # `host:pid:start` of the driver that has the run
    trouble: str = ""  # why that driver gave up the run

    @property
    def taken(self) -> bool:
        """Whether a running driver of this host has the run. For other hosts only the run's lease shows this."""
        return (
            self.owner.startswith(f"{socket.gethostname()}:")
            and process_alive(self.owner)
            and not suspended(self.owner)
        )


def driven(run: RunRecord, now: float) -> bool:
    """Return whether a live process holds the run's lease."""
    return run.lease_owner is not None and (run.lease_expires or 0.0) > now and process_alive(run.lease_owner)


def _has_open(owner: str, root: Path) -> bool:
    """Return whether a process may have a file of this workspace open; the driver in a copied ledger has none open.

    True for a process of another host or user, which cannot be inspected.
    """
    host, pid, _ = owner.rsplit(":", 2)
    try:
        return host != socket.gethostname() or any(
            os.readlink(entry).startswith(f"{root}/") for entry in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return True


def run_driver(root: Path, run: RunRecord, now: float) -> RunDriver | None:
    """Return the driver of a run; None: the run has ended."""
    if is_final("run", run.state):
        return None
    if is_served(root):
        return RunDriver(DriverKind.SERVER)
    request = _readable(root, run.id)
    log = str(log_path(root, request.key)) if request else ""
    owner = str(run.lease_owner)
    if driven(run, now) and _has_open(owner, root):
        own = request is not None and request.owner == owner
        return _named(DriverKind.BACKGROUND if own else DriverKind.FOREGROUND, owner, log if own else "")
    if request and request.taken:
        return _named(DriverKind.BACKGROUND, request.owner, log)
    return RunDriver(DriverKind.NONE, log=log, trouble=request.trouble if request else "")


def background_of(request: Request, root: Path) -> RunDriver:
    """Return the background driver that has a request."""
    return _named(DriverKind.BACKGROUND, request.owner, str(log_path(root, request.key)))


def lock_path(root: Path, key: str) -> Path:
    """Return the path of the lock that an environment's background driver holds."""
    return root / FOLDER / f"{key}.lock"


def log_path(root: Path, key: str) -> Path:
    """Return the path of the log of an environment's background driver."""
    return root / FOLDER / f"{key}.log"


def runs_folder(root: Path) -> Path:
    """Return the folder of the requests."""
    return root / FOLDER / _RUNS


def read_request(root: Path, run_id: str) -> Request | None:
    """Return the request for a run; None: there is no request, or the request is for another path of the workspace.

    Raises:
        IntegrityError: the file is damaged.
    """
    path = runs_folder(root) / f"{run_id}{_SUFFIX}"
    record = read_json(path)
    if record is None:
        return None
    try:
        request = Request(run_id, **record)
    except TypeError as error:
        raise IntegrityError(f"{path} is not a driver request: {error}; remove it and run the command again") from error
    return request if request.root == str(root) else None


def write_request(root: Path, request: Request) -> None:
    """Write a request or its answer. Call this only under `requests_held`."""
    record = {key: value for key, value in asdict(request).items() if key != "run_id"}
    write_json(runs_folder(root) / f"{request.run_id}{_SUFFIX}", record)


def remove_request(root: Path, run_id: str) -> None:
    """Withdraw or finish a request. Call this only under `requests_held`."""
    path = runs_folder(root) / f"{run_id}{_SUFFIX}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def forget_request(root: Path, run_id: str) -> None:
    """Withdraw a request that no live driver has; after an error, the next driver removes the request."""
    with suppress(PosttrainError):
        if read_request(root, run_id) is not None:
            with requests_held(root):
                request = read_request(root, run_id)
                if request is not None and not request.taken:
                    remove_request(root, run_id)


def requested(root: Path) -> list[str]:
    """Return the runs with a request, the oldest first."""
    return [name.removesuffix(_SUFFIX) for _, _, name in fingerprint(root)]


def fingerprint(root: Path) -> list[tuple[int, int, str]]:
    """Return mtime, inode and name of each request, the oldest first; every change of a request changes the result."""
    found = []
    with suppress(FileNotFoundError), os.scandir(runs_folder(root)) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    state = entry.stat()
                    found.append((state.st_mtime_ns, state.st_ino, entry.name))
    return sorted(found)


def requests_held(root: Path) -> AbstractContextManager[None]:
    """Lock the requests, which one process at a time may change.

    Raises:
        WorkspaceError: the folder of the requests does not exist.
        InfrastructureError: another process, which may be suspended, does not release the lock.
    """
    folder = runs_folder(root)
    said = f"{folder}: another process has held the lock of this folder for {_LOCK_SECONDS:g} s; see posttrain doctor"
    return held(folder, refusal=Refusal(_LOCK_SECONDS, InfrastructureError(said)), make=False)


def suspended(owner: str) -> bool:
    """Return whether the process of `owner` is stopped (SIGSTOP)."""
    try:
        return str(psutil.Process(int(owner.rsplit(":", 2)[1])).status()) == psutil.STATUS_STOPPED
    except (psutil.NoSuchProcess, ValueError):
        return False


def _readable(root: Path, run_id: str) -> Request | None:
    """Return the request for a run; None even if the file is damaged, so that lists of runs still work."""
    try:
        return read_request(root, run_id)
    except (IntegrityError, OSError):
        return None


def _named(kind: DriverKind, owner: str, log: str) -> RunDriver:
    host, pid, _ = [*owner.rsplit(":", 2), "", ""][:3]
    return RunDriver(kind, int(pid) if pid.isdigit() else None, host, log)


class Veil:
    """Removes the values of variables that are named like secrets, and credentials in URLs, from text."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        named = {value for name, value in environment.items() if SECRET_NAME.search(name)}
        self._values = sorted((value for value in named if len(value) >= _SHORTEST), key=len, reverse=True)

    def over(self, text: str) -> str:
        """Return the text without these values."""
        for value in self._values:
            text = text.replace(value, _HIDDEN)
        return _USER_INFO.sub(rf"\1{_HIDDEN}@", text)


class DriverLog(io.TextIOBase):
    """The log of a background driver; errors in writing the file are ignored."""

    def __init__(self, path: Path, veil: Veil) -> None:
        self._path, self._veil = path, veil
        self._partial = ""
        self._lock = threading.RLock()  # an error in a finalizer is printed by the thread that prints

    def say(self, line: str) -> None:
        """Write one line, with the time."""
        said = " ".join(self._veil.over(line).split())  # before lines are joined, because a key may have several
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}\n")

    def write(self, text: str) -> int:
        """Write whole lines only, so a secret is not split."""
        with self._lock:
            whole, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                self._put(whole + end)
        return len(text)

    def bound(self) -> None:
        """Start another file if the current file is full; child processes continue to write to the old file."""
        with suppress(OSError):  # the workspace may be deleted, and must not be created again
            if self._path.stat().st_size < MOST_BYTES:
                return
            self._path.replace(previous(self._path))
            file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)

    def take_over(self) -> None:
        """Redirect Python's output to this log from now on."""
        sys.stdout = sys.stderr = self

    def _put(self, text: str) -> None:
        with suppress(OSError):  # a full disk
            os.write(2, self._veil.over(text).encode("utf-8", errors="replace"))
            self.bound()


def previous(path: Path) -> Path:
    """Return the path of the previous log: `KEY.1.log`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def last_line(path: Path, start: int) -> str:
    """Return the last line that was written from byte `start` on; empty: no line."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(MOST_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def driver_environment() -> dict[str, str]:
    """Return this process's variables, with relative paths made absolute."""
    kept = {name: value for name, value in os.environ.items() if name != STORE_VARIABLE}  # in workspace.json
    if kept.get(VARIABLE):
        kept[VARIABLE] = os.path.abspath(kept[VARIABLE])
    if kept.get("PYTHONPATH"):
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    return kept


def environment_key(root: Path) -> str:
    """Return a key of the environment: variables visible to jobs, interpreter, host, and the sources of Posttrain."""
    told = [
        f"{name}={value}"
        for name, value in sorted(driver_environment().items())
        if name not in (VARIABLE, *_TERMINAL_NAMES) and not name.startswith(_TERMINAL_PREFIXES)
    ]
    told += [str(root), socket.gethostname(), sys.executable, sys.prefix, str(_SOURCES), __version__, _sources()]
    return hashlib.sha256("\0".join(told).encode("utf-8", errors="surrogateescape")).hexdigest()[:8]


def _sources() -> str:
    """Return sizes and times of the sources of this package, which an upgrade changes."""
    found = []
    for folder, _, names in os.walk(_SOURCES):
        for path in (f"{folder}/{name}" for name in names if name.endswith(".py")):
            with suppress(FileNotFoundError):
                state = os.stat(path)
                found.append(f"{path}:{state.st_size}:{state.st_mtime_ns}")
    return "\n".join(sorted(found))


def detach(workspace: OpenWorkspace, run_id: str) -> RunDriver:
    """Hand a run over to a background driver of this machine; return as soon as the driver has the run.

    If a background driver already has the run, nothing changes. If a command in the foreground drives the run, the
    background driver continues when that command ends.

    Raises:
        InputError: the run has ended.
        WorkspaceError: the workspace cannot be written.
        InfrastructureError: no driver could be started, or it did not answer; no driver and no request remain.
    """
    run = workspace.ledger.run(run_id)
    if is_final("run", run.state):
        raise InputError(
            f"run {run.id}: has ended ({run.state}), so there is nothing to drive; see posttrain get {run.id}"
        )
    if workspace.read_only:
        raise WorkspaceError(f"{workspace.root}: is read-only, so nothing can drive run {run.id}; make it writable")
    root, key = workspace.root, environment_key(workspace.root)
    make_folder(runs_folder(root))
    with requests_held(root):  # a driver checks for new requests under this lock before it ends
        known = run_driver(root, workspace.ledger.run(run_id), workspace.ledger.clock.now())
        if known is not None and known.kind is DriverKind.BACKGROUND:
            return known
        request = read_request(root, run_id)
        if request is None or not request.taken:
            write_request(root, Request(run_id, key, str(root)))
    crashpoint("detach.after_request")
    try:
        return _await_taken(workspace, run_id, key)
    except BaseException:
        forget_request(root, run_id)  # unless a driver has just taken the run
        raise


def _await_taken(workspace: OpenWorkspace, run_id: str, key: str) -> RunDriver:
    """Start a driver unless one is alive, and wait until the driver has the run."""
    root, until = workspace.root, time.monotonic() + TAKEN_SECONDS
    log = log_path(root, key)
    process: subprocess.Popen[bytes] | None = None
    length = 0
    while True:
        request = read_request(root, run_id)
        if request is None:  # the run has already been driven to its end
            return RunDriver(DriverKind.NONE, log=str(log))
        if request.taken:
            return background_of(request, root)
        if process is not None and process.poll() is not None:
            why = Veil(os.environ).over(last_line(log, length)) or f"it ended with exit code {process.returncode}"
            raise InfrastructureError(f"run {run_id}: no background driver could start: {why}; {_instead(run_id, log)}")
        if process is None:
            length = log.stat().st_size if log.exists() else 0
            process = _start(root, key)
            crashpoint("detach.after_start")
        if time.monotonic() >= until:
            if process is not None:
                process.kill()
                process.wait()
            raise InfrastructureError(
                f"run {run_id}: no background driver took over the run within {TAKEN_SECONDS:g} s; "
                f"{_instead(run_id, log)}"
            )
        time.sleep(_POLL)


def _instead(run_id: str, log: Path) -> str:
    return f"its log is {log}; posttrain attach {run_id} drives it here"


def _start(root: Path, key: str) -> subprocess.Popen[bytes] | None:
    """Start a driver that holds the lock from its start; return None if a driver is already alive or starting.

    Raises:
        WorkspaceError: the lock or the log cannot be written.
        InfrastructureError: no process can be started.
    """
    _started[:] = [process for process in _started if process.poll() is None]
    path = lock_path(root, key)
    with ExitStack() as held:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log = os.open(log_path(root, key), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            held.callback(os.close, log)
        except BlockingIOError:
            return None
        except OSError as error:
            raise unwritable(path, error) from error
        command = [sys.executable, "-s", "-P", "-m", _MODULE, str(root), key]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
                env={**driver_environment(), LOCK_VARIABLE: str(lock)}, pass_fds=(lock,),
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(
                f"{root}: no background driver could start: {error.strerror or error}; "
                "posttrain attach drives a run in this terminal"
            ) from error
    _started.append(process)
    return process
