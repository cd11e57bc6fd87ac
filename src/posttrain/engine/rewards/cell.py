"""The cell in which a reward's code runs. Nothing it starts outlives it, whatever it forks or detaches.

::

    job ── keeper ── init ── reward      the kernel gives namespaces: `init` is pid 1 of one of its own
    job ── keeper ────────── reward      it does not: the keeper adopts what the reward detaches

The keeper runs none of the reward's code. It waits for SIGTERM, which the job sends to close the cell and the kernel
sends when the job dies, or for the end of its child; then it kills everything below it, waits until that is gone, and
ends with its child's exit code (128 + n for signal n). With a PID namespace the kernel itself kills all that is in it
with its pid 1; without one the keeper is a child subreaper: what loses its parent becomes the keeper's child.

Stdlib only; single-threaded, because it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROCESSES = 256  # processes and threads that the reward may have
_MOUNT, _USER, _PID, _NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000  # CLONE_NEW…
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38  # PR_SET_…
_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_INERT = 0x1 | 0x2 | 0x4 | 0x8  # MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
_CAPABILITY_VERSION = 0x20080522
_LOST = {
    _NET: "the reward can reach the network",
    _PID: "the reward sees this machine's processes and can signal those of its user",
    _MOUNT: "the reward can read and write what its user can, the workspace too",
}
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}


def enter(parent: int, limits: Mapping[str, int], hidden: Sequence[str]) -> list[str]:
    """Go on as the confined process; the calling process stays behind as its keeper and never returns.

    The reward gets: no network, processes and mounts of its own, an empty folder where a `hidden` one is, no
    capabilities, no way to gain privileges, lower limits. Other files stay as readable and writable as they are for
    the user. RLIMIT_NPROC does not bind root.

    Args:
        parent: the process that must outlive this one.
        limits: `RLIMIT_…` → value.
        hidden: existing folders.

    Returns:
        What could not be confined, in words.
    """
    if sys.platform != "linux":
        return [f"{lost}: namespaces need Linux" for lost in _LOST.values()] + _limit(limits)
    libc = ctypes.CDLL(None, use_errno=True)
    tasks = PROCESSES + _own_tasks()  # counted while user ids still mean something
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    got, notes = _unshare(libc)
    if got & _MOUNT:
        notes += _hide(libc, hidden)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # after unshare: a change of credentials clears it
    if os.getppid() != parent:
        os._exit(1)  # it died before prctl took effect
    own = bool(got & _PID)
    _fork(libc, lambda child: _keep(child, own))
    if own:
        if got & _MOUNT:
            libc.mount(b"proc", b"/proc", b"proc", _INERT & ~1, None)  # its own; refused where /proc is masked
        _fork(libc, _reap)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    _drop_capabilities(libc)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    return notes + _limit({**limits, "RLIMIT_NPROC": tasks})


def _unshare(libc: Any) -> tuple[int, list[str]]:
    """Namespaces: with a user namespace (no privilege needed), without (root), or one by one; what is missing."""
    everything = _NET | _PID | _MOUNT
    if not libc.unshare(_USER | everything) or not libc.unshare(everything):
        return everything, []
    got, notes = 0, []
    for flag, lost in _LOST.items():
        if libc.unshare(flag) and libc.unshare(_USER | flag):
            notes.append(f"{lost}: unshare failed ({os.strerror(ctypes.get_errno())})")
        else:
            got |= flag
    return got, notes


def _hide(libc: Any, folders: Sequence[str]) -> list[str]:
    """Cover folders by empty ones that nobody may open, for this mount namespace only."""
    libc.mount(None, b"/", None, _PRIVATE, None)
    return [
        f"the reward can read and write {folder}: mount failed ({os.strerror(ctypes.get_errno())})"
        for folder in folders
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _INERT, b"size=4k,mode=0")
    ]


def _fork(libc: Any, stay: Callable[[int], NoReturn]) -> None:
    """Go on in a child that dies with this process, which stays with `stay(child)`."""
    this = os.getpid()
    child = os.fork()
    if child:
        stay(child)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (this, 0):  # 0: it is in another PID namespace
        os._exit(1)


def _keep(child: int, own: bool) -> NoReturn:
    """Wait for an order or the child's end, then leave nothing behind.

    Where the child is pid 1 of its `own` namespace, it is the only one to kill. /proc is not asked there: it may be
    that namespace's by now, and its numbers are other processes' here.
    """
    code = _wait(child)
    while True:
        for pid in ([] if own else _children()) or _unreaped(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # what this orphans becomes a child of this process, for the next round
        except ChildProcessError:
            os._exit(code)


def _reap(child: int) -> NoReturn:
    """Pid 1: collect the dead; end with the child, and the kernel ends all else in the namespace."""
    os._exit(_wait(child))


def _wait(child: int) -> int:
    while signal.sigwait(_AWAITED) != signal.SIGTERM:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if not pid:
                break
    return 128 + signal.SIGTERM


def _unreaped(child: int) -> list[int]:
    """The child, unless it has been waited for: its number may be another process's then."""
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return [child]


def _children() -> list[int]:
    """Direct children, by /proc (ps-style: `pid (name) state ppid …`)."""
    this, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(entry)
        if fields and int(fields[1]) == this:
            found.append(int(entry.name))
    return found


def _own_tasks() -> int:
    """Processes and threads of this user."""
    uid, total = os.getuid(), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = entry.stat().st_uid == uid
        except OSError:
            continue
        fields = _stat(entry) if mine else []
        total += int(fields[17]) if fields else 0
    return total


def _stat(process: Path) -> list[str]:
    """/proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _drop_capabilities(libc: Any) -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capset(ctypes.byref(header), ctypes.byref(none))


def _limit(limits: Mapping[str, int]) -> list[str]:
    notes = []
    for name, value in (*limits.items(), ("RLIMIT_CORE", 0)):
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError) as error:
            notes.append(f"the reward runs without {name}: {error}")
    return notes
