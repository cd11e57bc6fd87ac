"""Handover of a run to a background driver, and the environment of the driver and its jobs.

A handover writes a request for the run, starts a driver unless one is alive, and waits until the driver has the run.

One background driver drives the runs of one workspace that were handed over from one environment. The driver and its
jobs have the environment of the command that handed over the run: the variables that jobs inherit
(CUDA_VISIBLE_DEVICES, HF_HOME, …), the interpreter and the sources of Posttrain.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from posttrain._version import __version__
from posttrain.domain.errors import InfrastructureError, InputError, WorkspaceError
from posttrain.domain.lifecycle import is_final
from posttrain.domain.ports import crashpoint
from posttrain.drivers.log import Veil, last_line
from posttrain.drivers.requests import (
    DriverKind,
    Request,
    RunDriver,
    background_of,
    forget_request,
    lock_path,
    log_path,
    read_request,
    requests_held,
    run_driver,
    runs_folder,
    write_request,
)
from posttrain.store.atomic import make_folder, unwritable
from posttrain.workspace.settings import STORE_VARIABLE, VARIABLE, OpenWorkspace

_SOURCES = Path(__file__).parents[1]
_OF_A_TERMINAL = frozenset(  # variables that differ between terminals and do not affect jobs
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERMCAP", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "DISPLAY"),
        *("WAYLAND_DISPLAY", "XAUTHORITY", "GPG_TTY", "STY", "WINDOW", "TMUX", "TMUX_PANE", "LS_COLORS", "PS1", "PS2"),
        *("PROMPT", "PROMPT_COMMAND", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "VTE_VERSION", "INVOCATION_ID"),
        *("JOURNAL_STREAM", "DBUS_SESSION_BUS_ADDRESS", "SYSTEMD_EXEC_PID"),
    )
)
_OF_TERMINALS = (
    *("TERM_", "SSH_", "XDG_SE", "XDG_VTNR", "KITTY_", "ITERM_", "WEZTERM_", "KONSOLE_", "WT_", "VSCODE_", "HIST"),
)
LOCK_VARIABLE = "POSTTRAIN_DRIVER_LOCK"  # the descriptor through which a new driver holds its lock from its start
TAKEN_SECONDS = 60.0  # maximum wait for a driver; allows for a cold start of Python on a busy machine
_POLL = 0.02
_MODULE = "posttrain.app.background"
_started: list[subprocess.Popen[bytes]] = []  # drivers that this process started, to reap ended ones


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
        if name not in (VARIABLE, *_OF_A_TERMINAL) and not name.startswith(_OF_TERMINALS)
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
