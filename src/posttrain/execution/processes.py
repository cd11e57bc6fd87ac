"""Operating-system processes by identity, and the environments that they get.

An identity is more than a pid, which another process may reuse. Linux only (`/proc`). The module imports only the
standard library, since the supervisor imports it and must start fast.
"""

import ctypes
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from posttrain.domain.jobspec import SECRET_NAME

HEARTBEAT_SECONDS = 0.25  # seconds between two heartbeats of a supervisor
LEAVING_SECONDS = 60.0  # time for a job to end after its result: freeing a GPU, leaving a cluster
_CONTROLS = (
    "WANDB_",
    "MLFLOW_",
    "PGPASS",
    "POSTTRAIN_LEDGER",
    "POSTTRAIN_SINK",
    "POSTTRAIN_TOKEN",
    "POSTTRAIN_SERVER",
    "POSTTRAIN_CONFIG",
)  # keys and addresses of the control side
_ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    | {"SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME"}
    | {"TRITON_CACHE_DIR", "VIRTUAL_ENV", "POSTTRAIN_CRASHPOINT", "POSTTRAIN_CRASHPOINT_ONCE", "POSTTRAIN_DEVICES"}
    | {"POSTTRAIN_DEVICE_LOCKS"}
)  # variables of a server's environment that its jobs get
_ALLOWED_BEGINNINGS = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_", "HSA_", "GPU_", "OMP_", "MKL_", "KMP_", "GOMP_"),
    *("OPENBLAS_", "NUMEXPR_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "RAY_"),
)
_KEYS = ("AWS_", "AZURE_", "GOOGLE_", "PG")
NEVER = (*_KEYS, "POSTTRAIN_", "PYTHON", *_CONTROLS)  # variables that jobs never get, even if an admin names them
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PROC = Path("/proc")
_PRCTL = ctypes.CDLL(None).prctl
_DEAD = ("Z", "X", "x")  # zombie, dead: the program no longer runs


def without_trackers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for jobs and their helpers, without keys of trackers or passwords of the ledger."""
    return {name: value for name, value in environment.items() if not name.startswith(_CONTROLS)}


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for programs, without the keys of a tracker, a store, a ledger or any other service."""
    kept = without_trackers(environment)
    return {name: value for name, value in kept.items() if not (name.startswith(_KEYS) or SECRET_NAME.search(name))}


def of_a_server(environment: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of a server that its jobs get: the machine's variables and the `named` ones, but no keys.

    Args:
        named: additional variables for jobs, set by an admin; variables of the control side are never included.
    """
    given = {name for name in named if not name.startswith(NEVER)}
    return {
        name: value
        for name, value in environment.items()
        if name in given
        or ((name in _ALLOWED or name.startswith(_ALLOWED_BEGINNINGS)) and not SECRET_NAME.search(name))
    }


def close_to_others() -> None:
    """Keep this process's memory and environment from other processes of the same account (root excepted)."""
    _PRCTL(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; called between fork and exec."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def identity(pid: int) -> str | None:
    """Return the boot id and start time of a process (or zombie), as `<boot>:<ticks>`; None: no such process."""
    stat = _stat(pid)
    return None if stat is None else f"{_boot()}:{stat[2]}"


def alive(pid: int, expected: str) -> bool:
    """Return whether the process of this pid and identity still runs."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in _DEAD and f"{_boot()}:{stat[2]}" == expected


def process_name() -> str:
    """Return `host:pid:start` of this process: the name of an owner of leases, never that of a later process."""
    return f"{os.uname().nodename}:{os.getpid()}:{(_stat(os.getpid()) or ('', 0, 0))[2]}"


def process_alive(owner: str) -> bool:
    """Return whether the process `owner` may still be alive; always True for another host."""
    host, pid, started = [*owner.rsplit(":", 2), "", ""][:3]
    if host != os.uname().nodename or not pid.isdigit():
        return True
    stat = _stat(int(pid))
    return stat is not None and stat[0] not in _DEAD and str(stat[2]) == started


def send(pid: int, expected: str, number: int) -> None:
    """Send a signal to exactly this process; do nothing if it has ended."""
    try:
        handle = os.pidfd_open(pid)  # prevents reuse of the pid between check and signal
    except (ProcessLookupError, PermissionError):
        return
    try:
        if alive(pid, expected):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def kill_group(leader: int, expected: str) -> bool:
    """Kill the process group of `leader` (a pid with its identity); return whether all its processes have ended.

    A pid is not reused while a group of that number has members: if another process has the pid, the group has ended.
    """
    if identity(leader) not in (None, expected) or not group(leader):
        return True
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return True
    return not group(leader)


def group(leader: int) -> list[int]:
    """Return the running processes of a group."""
    return [pid for pid, of in _running() if of == leader]


def carrying(variable: str, value: str) -> list[int]:
    """Return the running processes that were started with this variable and whose environment is readable."""
    wanted, found = f"{variable}={value}".encode(), []
    for pid in (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        with suppress(OSError):
            stat = _stat(pid) if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0") else None
            found += [pid] if stat is not None and stat[0] not in _DEAD else []
    return found


def _running() -> Iterator[tuple[int, int]]:
    """Yield every running process and its group."""
    for entry in _PROC.iterdir():
        stat = _stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[0] not in _DEAD:
            yield int(entry.name), stat[1]


@cache
def _boot() -> str:
    return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, process group and start time (clock ticks after boot); None: no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before these may contain any character, including brackets
    return fields[0], int(fields[2]), int(fields[19])
