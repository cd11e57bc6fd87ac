"""Operating-system processes by identity: a pid alone may stand for another process tomorrow. Linux (`/proc`).

Only the standard library: the supervisor imports this and must start fast.

Runs an engine program for as long as somebody waits for its answers: no attempt, no ledger, gone with its caller.

What is asked is one JSON document on the program's standard input; what it answers, a JSON line each. A line with
`error` and `exit_code` is the one-line error that it ended with.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from posttrain.domain.errors import (
    DeadlineError,
    InfrastructureError,
    InputError,
    IntegrityError,
    JobFailedError,
    PosttrainError,
    WorkspaceError,
)
from posttrain.domain.requests import SECRET_NAME

HEARTBEAT_SECONDS = 0.25  # between two signs of life of a supervisor
LEAVING_SECONDS = 60.0  # that a job may take to go once its result is there: freeing a GPU, leaving a cluster
_CONTROLS = (
    "WANDB_",
    "MLFLOW_",
    "PGPASS",
    "POSTTRAIN_LEDGER",
    "POSTTRAIN_SINK",
    "POSTTRAIN_TOKEN",
    "POSTTRAIN_SERVER",
    "POSTTRAIN_CONFIG",
)  # keys and addresses that are the control side's
_ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    | {"SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME"}
    | {"TRITON_CACHE_DIR", "VIRTUAL_ENV", "POSTTRAIN_CRASHPOINT", "POSTTRAIN_CRASHPOINT_ONCE", "POSTTRAIN_DEVICES"}
    | {"POSTTRAIN_DEVICE_LOCKS"}
)  # what a job of a server gets of its server's environment
_ALLOWED_BEGINNINGS = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_", "HSA_", "GPU_", "OMP_", "MKL_", "KMP_", "GOMP_"),
    *("OPENBLAS_", "NUMEXPR_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "RAY_"),
)
_KEYS = ("AWS_", "AZURE_", "GOOGLE_", "PG")
NEVER = (*_KEYS, "POSTTRAIN_", "PYTHON", *_CONTROLS)  # whoever names them
_PR_SET_DUMPABLE = 4
_PROC = Path("/proc")
_DEAD = ("Z", "X", "x")  # zombie, dead: nothing of the program runs any more
_ERRORS: dict[int, type[PosttrainError]] = {
    kind.exit_code: kind for kind in (InputError, JobFailedError, InfrastructureError, IntegrityError, WorkspaceError)
}
_SHOWN = 300  # characters of what a program that died said last


def supported() -> bool:
    """Whether this machine has what the functions here read."""
    return (_PROC / "self" / "stat").exists()


def without_trackers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for jobs and whatever works for them: no tracker's key, no password of the ledger."""
    return {name: value for name, value in environment.items() if not name.startswith(_CONTROLS)}


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for programs that need no key at all: none of a tracker, a store, a ledger or any service."""
    kept = without_trackers(environment)
    return {name: value for name, value in kept.items() if not (name.startswith(_KEYS) or SECRET_NAME.search(name))}


def of_a_server(environment: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The part of a server's environment that its jobs get: what a machine needs, and what an admin named; no keys.

    Args:
        named: variables that jobs get besides; those of the control side never.
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
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def identity(pid: int) -> str | None:
    """Boot id and start time of a process, `<boot>:<ticks>`; None when there is no such process (a zombie is one)."""
    stat = _stat(pid)
    return None if stat is None else f"{_boot()}:{stat[2]}"


def alive(pid: int, expected: str) -> bool:
    """Whether the process of this pid and identity still runs."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in _DEAD and f"{_boot()}:{stat[2]}" == expected


def send(pid: int, expected: str, number: int) -> None:
    """Send a signal to exactly this process; nothing happens when it is gone."""
    try:
        handle = os.pidfd_open(pid)  # holds on to the process, so the pid cannot be given away between look and signal
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
    """Kill the process group that `leader` (a pid with its identity) founded; whether all of it is gone.

    A pid is not given away while a group of that number has members: if somebody else has it, the group is gone.
    """
    found = identity(leader)
    if found not in (None, expected):
        return True
    members = group(leader)
    if members:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return True
        members = group(leader)
    return not members


def group(leader: int) -> list[int]:
    """The running processes of a group."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and stat[1] == leader and stat[0] not in _DEAD:
                found.append(int(entry.name))
    return found


def carrying(variable: str, value: str) -> list[int]:
    """The running processes that were started with this variable in their environment, as far as we may look."""
    wanted, found = f"{variable}={value}".encode(), []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    stat = _stat(int(entry.name))
                    found += [int(entry.name)] if stat is not None and stat[0] not in _DEAD else []
    return found


@cache
def _boot() -> str:
    return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, process group and start time (clock ticks after boot)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything, brackets too
    return fields[0], int(fields[2]), int(fields[19])


def answers(module: str, request: Mapping[str, Any], *, timeout: float) -> Iterator[dict[str, Any]]:
    """The answers of `python -m MODULE`, as they come.

    Args:
        timeout: seconds that all of it may take.

    Raises:
        PosttrainError: the one that the program ended with.
        InfrastructureError: it ended without a word. DeadlineError: it took longer than `timeout`.
    """
    given = without_keys(os.environ)
    environment = {name: value for name, value in given.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-s", "-P", "-m", module]
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), _give_up, (program, late))
        timer.daemon = True  # a process that a signal ends anywhere here ends at once, and the program with it
        try:
            timer.start()
            yield from _exchange(program, request)
            code = program.wait()
        finally:
            timer.cancel()
            _end(program)
        if late.is_set():
            raise DeadlineError(f"{module}: must answer within {timeout:g} s, got nothing more; allow it more time")
        if code != 0:
            raise InfrastructureError(f"{module}: ended with exit code {code}{_last_words(log)}; try again")


def _exchange(program: subprocess.Popen[str], request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    assert program.stdin is not None
    assert program.stdout is not None
    with contextlib.suppress(BrokenPipeError), program.stdin as asked:  # it may have died before it read
        json.dump({**request, "asked_by": os.getpid()}, asked)
    for line in program.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise _ERRORS.get(answer["exit_code"], JobFailedError)(answer["error"])
        yield answer


def _give_up(program: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    _end(program)


def _end(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)  # it leads a session of its own
    program.wait()


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return f": {lines[-1][-_SHOWN:]}" if lines else ""
