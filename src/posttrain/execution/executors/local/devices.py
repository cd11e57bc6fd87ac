"""Device locks of this machine's jobs: one lock file per device, shared by all workspaces and users.

::

    /run/lock/posttrain-device-GPU-5ebe….lock      locked (flock) by the supervisor of the job that has the device
        {"attempt": "sort-1f3a-sft-1", "user": "ada", "folder": …, "pid": …, "job_pid": …, "token": …}

The kernel releases a lock when its supervisor ends in any way; a file without a lock proves nothing. A job dies with
its supervisor, but slightly later, and processes that the job started elsewhere (a Ray cluster) end even later. So a
process that gets a lock first searches for processes of the previous holder: the holder's process group, and processes
with the holder's token in their environment. While any of these processes exists, the device is not free.

The files are in a sticky folder, where every user can create files and no user can remove the files of others. The
files contain no secrets, and their content is not trusted, since every user can write it. This module uses only the
standard library, since the supervisor imports it.
"""

import fcntl
import json
import os
import pwd
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.execution import processes

FOLDER_VARIABLE = "POSTTRAIN_DEVICE_LOCKS"
TOKEN_VARIABLE = "POSTTRAIN_DEVICE_TOKEN"
_FOLDERS = ("/run/lock", "/tmp")
_SHARED = stat.S_ISVTX | stat.S_IWOTH
_LONGEST = 65536  # maximum bytes of a record
_LONGEST_WORD = 1000  # maximum characters of a word
_SHOWN = 120  # maximum characters of a shown field
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def lock_folder() -> str:
    """Return the folder of this machine's device locks, in which all users can create files.

    Containers that share devices must also share this folder, which POSTTRAIN_DEVICE_LOCKS then names.
    """
    if named := os.environ.get(FOLDER_VARIABLE):
        return named
    for folder in _FOLDERS:
        with suppress(OSError):
            if os.stat(folder).st_mode & _SHARED == _SHARED:
                return folder
    return _FOLDERS[-1]


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices for jobs that this process starts: `Devices(("GPU-5ebe…", "GPU-77c1…"))`.

    The names of the devices are the same in every process of the machine, and valid in the list of `variable`.
    """

    names: Sequence[str] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"  # restricts a job to its devices; empty: no variable does
    folder: str = field(default_factory=lock_folder)  # the folder of the lock files


class Taken:
    """Locks of devices, held until `close` or the end of the process."""

    def __init__(self, locks: Mapping[str, int]) -> None:
        self._locks = dict(locks)
        self.names = [*locks]  # the devices, in the machine's order

    def sign(self, record: Mapping[str, Any]) -> None:
        """Record the holder; called before the job may use a device."""
        data = json.dumps(dict(record), ensure_ascii=True).encode()[:_LONGEST]
        for lock in self._locks.values():
            with suppress(OSError):  # another user's read-only file is locked nevertheless
                os.pwrite(lock, data + b"\n", 0)
                os.ftruncate(lock, len(data) + 1)

    def touch(self) -> None:
        """Update the files' times, so cleaners of temporary folders do not delete them."""
        for lock in self._locks.values():
            with suppress(OSError):
                os.utime(lock)

    def close(self) -> None:
        """Release the locks."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks = {}


def take(devices: Devices, count: int) -> Taken | None:
    """Lock the first `count` free devices; return None and lock no device if fewer devices are free.

    Raises:
        OSError: a lock file can be neither created nor opened.
    """
    locks: dict[str, int] = {}
    for name in devices.names:
        if len(locks) == count:
            break
        lock = _lock(_path(devices, name))
        if lock is not None and not _left(lock):
            locks[name] = lock
        elif lock is not None:
            os.close(lock)
    taken = Taken(locks)
    if len(locks) == count:
        return taken
    taken.close()
    return None


def show(spec: dict[str, Any], taken: Taken) -> str:
    """Restrict a job to its devices by its environment; return the token that its processes carry."""
    if not taken.names:
        return ""
    token, variable = os.urandom(8).hex(), spec["machine"]["variable"]
    spec["environment"] |= {TOKEN_VARIABLE: token} | ({variable: ",".join(taken.names)} if variable else {})
    return token


def signature(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return a job's name, user and folder, to show to users who wait for its devices."""
    return {"attempt": spec["name"][:_LONGEST_WORD], "user": _user(), "folder": spec["folder"][:_LONGEST_WORD]}


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except (KeyError, OSError):  # a container without a passwd entry
        return str(os.getuid())


def holders(devices: Devices) -> dict[str, str]:
    """Return, by device, a description of the holder of each device that is not free now.

    Raises:
        OSError: a lock file can be neither created nor opened.
    """
    return {name: who for name in devices.names if (who := _holder(_path(devices, name)))}


def _holder(path: Path) -> str:
    if not path.exists():
        return ""
    lock = _file(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        left = _left(lock)
        if not left:
            _forget(lock)
        return f"process {left[0]} that {_words(_record(lock))} left" if left else ""
    except BlockingIOError:
        return _words(_record(lock))
    finally:
        os.close(lock)


def _forget(lock: int) -> None:
    """Clear the record of a holder without processes, so later checks are cheap."""
    with suppress(OSError):  # another process has locked it, or the file is read-only
        if os.fstat(lock).st_size:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)


def _words(record: Any) -> str:
    """Return a description such as `sort-1f3a-sft-1 of ada (in /home/ada/.posttrain/runs/…)`."""
    if not isinstance(record, dict) or not record.get("attempt"):
        return "another job"
    name, user, place = (_shown(record.get(key)) for key in ("attempt", "user", "folder"))
    return name + (f" of {user}" if user else "") + (f" (in {place})" if place else "")


def _shown(word: object) -> str:
    """Return a field of another user's file, safe to print on a terminal."""
    text = "".join(c if c.isprintable() else "?" for c in word) if isinstance(word, str) else ""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _path(devices: Devices, name: str) -> Path:
    return Path(devices.folder, f"posttrain-device-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock")


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of the file at `path`; None: another process holds it."""
    while True:
        lock = _file(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(lock, path):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        os.close(lock)  # the file was removed since it was opened, so other processes would lock a new file


def _file(path: Path) -> int:
    lock = None
    while lock is None:  # a cleaner may remove the file between the two calls
        lock = _make(path)
        lock = _open(path) if lock is None else lock
    return lock


def _make(path: Path) -> int | None:
    try:
        lock = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    os.fchmod(lock, 0o666)  # overrides the umask: every user must be able to open the file
    return lock


def _open(path: Path) -> int | None:
    """Open the existing file, which must not be a link; None: it no longer exists."""
    try:
        try:
            lock = os.open(path, _FLAGS | os.O_RDWR)
        except PermissionError:
            lock = os.open(path, _FLAGS | os.O_RDONLY)
    except FileNotFoundError:
        return None
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(lock)
        raise OSError(f"{path} is not a regular file with exactly one link; remove it")
    return lock


def _same(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _record(lock: int) -> Any:
    try:
        return json.loads(os.pread(lock, _LONGEST, 0))
    except (ValueError, RecursionError):
        return None


def _left(lock: int) -> list[int]:
    """Return the processes of the previous holder that still run."""
    record = _record(lock)
    if not isinstance(record, dict):
        return []
    pid, identity, token = (record.get(key) for key in ("job_pid", "job_identity", "token"))
    found: list[int] = []
    # a pid is not reused while its group has members: if another process has it, the group has ended
    if isinstance(pid, int) and pid > 1 and isinstance(identity, str) and processes.identity(pid) in (None, identity):
        found += processes.group(pid)
    if isinstance(token, str) and token:
        found += processes.carrying(TOKEN_VARIABLE, token)
    return found
