"""Who drives a run: a command in the foreground, a background driver, or nobody; and what background drivers are asked.

::

    drivers/
      runs/RUN.json   a run that a background driver is to take to its end, and which of them has it
      KEY.lock        held by the background driver of one environment for as long as it lives
      KEY.log         what that one says

Requests are changed under a lock on `runs/`. A driver also lets go of `KEY.lock` under it, so that no request is
written between its last look and its end.
"""

import os
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from posttrain.control.owners import process_alive
from posttrain.domain.errors import InfrastructureError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord
from posttrain.store.atomic import Refusal, held, read_json, unwritable, write_json
from posttrain.workspace.served import is_served

FOLDER = "drivers"
_RUNS = "runs"
_SUFFIX = ".json"
_LOCK_SECONDS = 60.0  # for others to change a small file


class DriverKind(StrEnum):
    """Where the process is that drives a run."""

    FOREGROUND = "foreground"  # a command, or a program that waits
    BACKGROUND = "background"
    SERVER = "server"  # that serves the workspace
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RunDriver:
    """Who drives an unfinished run."""

    kind: DriverKind
    pid: int | None = None
    host: str = ""
    log: str = ""  # of a background driver, also of one that is gone or gave the run up
    trouble: str = ""  # why a background driver gave the run up, one line

    @property
    def nobody(self) -> bool:
        """Whether it is left alone."""
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
        """`in the background, pid 71`, `by the server`."""
        return "by the server" if self.kind is DriverKind.SERVER else f"in the {self}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Request:
    """A run that a background driver is to take to its end."""

    run_id: str
    key: str  # of the environment that its jobs are to have
    root: str  # the workspace, as whoever asked saw it: a copy of it was not asked
    owner: str = ""  # `host:pid:start` of the driver that has it
    trouble: str = ""  # why that one gave it up

    @property
    def taken(self) -> bool:
        """Whether a driver of this host is at work that has it. Of other hosts only the run's lease tells."""
        return (
            self.owner.startswith(f"{socket.gethostname()}:")
            and process_alive(self.owner)
            and not suspended(self.owner)
        )


def driven(run: RunRecord, now: float) -> bool:
    """Whether a live process holds the run's lease."""
    return run.lease_owner is not None and (run.lease_expires or 0.0) > now and process_alive(run.lease_owner)


def _has_open(owner: str, root: Path) -> bool:
    """Whether a process has a file of this workspace open: the ledger of a copy names who drives the original.

    One that cannot be looked at, of another host or user, may have.
    """
    host, pid, _ = owner.rsplit(":", 2)
    try:
        return host != socket.gethostname() or any(
            os.readlink(entry).startswith(f"{root}/") for entry in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return True


def run_driver(root: Path, run: RunRecord, now: float) -> RunDriver | None:
    """Who drives a run; None: it has ended."""
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
    """The background driver that has a request."""
    return _named(DriverKind.BACKGROUND, request.owner, str(log_path(root, request.key)))


def lock_path(root: Path, key: str) -> Path:
    """What the background driver of an environment holds."""
    return root / FOLDER / f"{key}.lock"


def log_path(root: Path, key: str) -> Path:
    """What the background driver of an environment says."""
    return root / FOLDER / f"{key}.log"


def runs_folder(root: Path) -> Path:
    """Where the requests are."""
    return root / FOLDER / _RUNS


def read_request(root: Path, run_id: str) -> Request | None:
    """The request for a run; one that was written for another place than this workspace is none.

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
        raise IntegrityError(
            f"{path} is no request of a driver: {error}; remove it and run the command again"
        ) from error
    return request if request.root == str(root) else None


def write_request(root: Path, request: Request) -> None:
    """Ask, or answer. Only under `requests_held`."""
    record = {key: value for key, value in asdict(request).items() if key != "run_id"}
    write_json(runs_folder(root) / f"{request.run_id}{_SUFFIX}", record)


def remove_request(root: Path, run_id: str) -> None:
    """Take it back, or be done with it. Only under `requests_held`."""
    path = runs_folder(root) / f"{run_id}{_SUFFIX}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def forget_request(root: Path, run_id: str) -> None:
    """Take a request back that no living driver has; where that is impossible, the next driver sees to it."""
    with suppress(PosttrainError):
        if read_request(root, run_id) is not None:
            with requests_held(root):
                request = read_request(root, run_id)
                if request is not None and not request.taken:
                    remove_request(root, run_id)


def requested(root: Path) -> list[str]:
    """The runs with a request, the oldest first."""
    return [name.removesuffix(_SUFFIX) for _, _, name in fingerprint(root)]


def fingerprint(root: Path) -> list[tuple[int, int, str]]:
    """When each request was written, its inode and its name, the oldest first: another one after each change."""
    found = []
    with suppress(FileNotFoundError), os.scandir(runs_folder(root)) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    state = entry.stat()
                    found.append((state.st_mtime_ns, state.st_ino, entry.name))
    return sorted(found)


def requests_held(root: Path) -> AbstractContextManager[None]:
    """One process at a time changes requests, in a folder that is there.

    Raises:
        WorkspaceError: it is not, or not any more.
        InfrastructureError: somebody else, suspended perhaps, does not let go of it.
    """
    folder = runs_folder(root)
    said = f"{folder}: another process has held it for {_LOCK_SECONDS:g} s; look: posttrain doctor"
    return held(folder, refusal=Refusal(_LOCK_SECONDS, InfrastructureError(said)), make=False)


def suspended(owner: str) -> bool:
    """Whether the process `owner` names was stopped (SIGSTOP)."""
    try:
        return str(psutil.Process(int(owner.rsplit(":", 2)[1])).status()) == psutil.STATUS_STOPPED
    except (psutil.NoSuchProcess, ValueError):
        return False


def _readable(root: Path, run_id: str) -> Request | None:
    """A look at many runs survives a damaged file."""
    try:
        return read_request(root, run_id)
    except (IntegrityError, OSError):
        return None


def _named(kind: DriverKind, owner: str, log: str) -> RunDriver:
    host, pid, _ = [*owner.rsplit(":", 2), "", ""][:3]
    return RunDriver(kind, int(pid) if pid.isdigit() else None, host, log)
