"""The driver of a run (a command in the foreground, a background driver, or none), and requests to background drivers.

::

    drivers/
      runs/RUN.json   a request to drive a run to its end, and the background driver that has it
      KEY.lock        the lock that the background driver of one environment holds while it is alive
      KEY.log         the log of that driver

Requests are changed under a lock on `runs/`. A driver releases `KEY.lock` under the same lock, so no request is written
between the driver's last check and its end.
"""

import os
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from posttrain.domain.errors import InfrastructureError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.execution.processes import process_alive
from posttrain.store.atomic import Refusal, held, read_json, unwritable, write_json
from posttrain.workspace.served import is_served

FOLDER = "drivers"
_RUNS = "runs"
_SUFFIX = ".json"
_LOCK_SECONDS = 60.0  # maximum wait for other processes, which only change a small file


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
