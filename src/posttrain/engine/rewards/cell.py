"""The cell in which a reward's code runs. It reaches nothing, and nothing it starts outlives it.

::

    job ── keeper ── init ── reward      the kernel gives namespaces: `init` is pid 1 of one of its own
    job ── keeper ────────── reward      it does not: the keeper adopts what the reward detaches

The keeper runs none of the reward's code. It waits for SIGTERM, which the job sends to close the cell and the kernel
sends when the job dies, or for the end of its child; then it kills everything below it, waits until that is gone, and
ends with its child's exit code (128 + n for signal n). With a PID namespace the kernel itself kills all that is in it
with its pid 1; without one the keeper is a child subreaper: what loses its parent becomes the keeper's child. Where no
cgroup bounds the cell's memory and processes, the keeper looks at both ten times a second.

With namespaces the reward has a root of its own (`root`), no network but declared hosts, no other process and no
shared memory of others in sight. Without them Landlock and a filter of system calls hold back what they can
(`barriers`), and `Confinement.whole` is false: `plan` refuses that unless the workspace trusts its rewards.

Standard library only; single-threaded, because it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from posttrain.engine.rewards.barriers import fence_files, filter_calls, give_up_privileges
from posttrain.engine.rewards.root import HOME, SETTINGS, SOURCE, SYSTEM, move_in
from posttrain.engine.rewards.watch import INTERVAL, Group, Watch

_UTS, _IPC, _USER, _PID, _NET = 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000  # CLONE_NEW…
_CGROUP = 0x02000000
_NAMESPACES = _UTS | _IPC | _PID | _NET | _CGROUP
_PDEATHSIG, _DUMPABLE, _SUBREAPER = 1, 4, 36  # PR_SET_…
_EXITING = 4  # PF_EXITING, among the flags of /proc/PID/stat
_INTERFACE_FLAGS, _SET_INTERFACE_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_NAMES = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
_RESOLVER = ("/etc/resolv.conf", "/etc/gai.conf", "/etc/host.conf")
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}


@dataclass(frozen=True, slots=True)
class CellPlan:
    """What a cell is made of; JSON values, for it goes to the worker as an argument."""

    base: str  # an empty folder of the job's, over which the root is mounted
    source: str  # a folder with the reward's source and declared files
    scratch: str  # a folder of the job's, in which the reward works where it can have no root of its own
    readable: Sequence[str]  # interpreter, environment
    hidden: Sequence[str]  # empty for the reward where they lie in a readable one
    limits: Mapping[str, int]  # RLIMIT_… → value, of each process
    memory: int  # bytes of all its processes and its scratch
    processes: int  # with threads
    scratch_bytes: int
    hosts: Mapping[str, str]  # declared hosts → their address in the cell
    ports: Sequence[tuple[str, int]] = ()  # (address, port) in the cell, to be relayed by the job


@dataclass(frozen=True, slots=True)
class Confinement:
    """What came of it."""

    whole: bool  # namespaces and a root of its own; else notes say what is missing
    notes: tuple[str, ...]
    home: str  # its scratch
    source: str  # where the folder `source` is now
    listeners: tuple[socket.socket, ...] = ()  # one per port


def enter(parent: int, plan: CellPlan) -> Confinement:
    """Go on as the confined process; the calling process stays behind as its keeper and never returns.

    Args:
        parent: the process that must outlive this one.
        plan: what the reward needs.
    """
    if sys.platform != "linux":
        notes = ("the reward can read, write and reach what its user can: cells need Linux", *_limit(plan.limits))
        return Confinement(False, notes, plan.scratch, plan.source)
    libc = ctypes.CDLL(None, use_errno=True)
    tasks = plan.processes + _own_tasks()  # counted while user ids still mean something
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    group = Group.make(plan.memory, plan.processes)
    notes = _unshare(libc)
    apart = not notes
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # after unshare: a change of credentials clears it
    if os.getppid() != parent:
        os._exit(1)  # it died before prctl took effect
    watch = None if group else Watch(os.getpid(), plan.memory, plan.processes)
    left = Path(plan.base).parent
    _fork(libc, lambda child: _keep(child, apart, group, watch, lambda: _sweep(parent, left)))
    if group:
        with contextlib.suppress(OSError):
            group.join()
    rooted = apart
    listeners = _listeners(plan.ports) if apart else ()
    if apart:
        try:
            notes += move_in(
                libc,
                plan.base,
                readable=plan.readable,
                hidden=plan.hidden,
                source=plan.source,
                scratch=plan.scratch_bytes,
                hosts=plan.hosts,
            )
        except OSError as error:
            rooted = False
            notes.append(f"the reward has no root of its own: {error}")
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)
        _fork(libc, _reap)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    notes += _confine(libc, plan, apart, rooted, {**plan.limits, "RLIMIT_NPROC": tasks})
    home, source = (HOME, SOURCE) if rooted else (plan.scratch, plan.source)
    return Confinement(apart and rooted, tuple(notes), home, source, listeners)


def _confine(libc: Any, plan: CellPlan, apart: bool, rooted: bool, limits: Mapping[str, int]) -> list[str]:
    """The last steps, in the process that will run the reward's code; what is missing, in words."""
    give_up_privileges(libc)
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self
    notes = []
    if not rooted:
        ports = () if apart else tuple(port for _, port in plan.ports)
        readable = (*SYSTEM, *SETTINGS, *_NAMES, *(_RESOLVER if ports else ()), *plan.readable, plan.source)
        notes = fence_files(libc, readable, [plan.scratch], ports)
        if plan.ports and apart:
            notes.append("the reward cannot reach the hosts that it declares: they need a root of its own")
        notes.append("the reward can fill the disk: its scratch has no bound without a root of its own")
        notes.append("the reward can change modes, times and limits of what its user owns")
    notes += filter_calls(libc, apart=apart, sockets=apart or bool(plan.ports))
    return notes + _limit(limits)


def _unshare(libc: Any) -> list[str]:
    """All namespaces or none: with a user namespace (no privilege needed), else as root; what is missing, in words."""
    trial = os.fork()
    if not trial:  # a namespace that is half made cannot be left
        os._exit(_unshare_as_user(libc))
    why = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if not why:
        return [] if not _unshare_as_user(libc) else ["the reward shares this machine's processes, network and files"]
    if not libc.unshare(_NAMESPACES):
        return []
    return [
        f"the reward shares this machine's processes, network and files, but for what Landlock and a filter of system "
        f"calls hold back: no namespaces ({os.strerror(why)})"
    ]


def _unshare_as_user(libc: Any) -> int:
    """Every namespace, below a user namespace in which the own numbers are the same; the error's number, or 0."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_USER | _NAMESPACES):
        return ctypes.get_errno()
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:  # root without the capability to give its number away
        return error.errno or errno.EPERM
    return 0


def _listeners(ports: Sequence[tuple[str, int]]) -> tuple[socket.socket, ...]:
    """Sockets of this network namespace, for the job to accept from."""
    if not ports:
        return ()
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _INTERFACE_FLAGS, request))[1]
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    return tuple(socket.create_server((address, port), backlog=16) for address, port in ports)


def _fork(libc: Any, stay: Callable[[int], NoReturn]) -> None:
    """Go on in a child that dies with this process, which stays with `stay(child)`."""
    this = os.getpid()
    child = os.fork()
    if child:
        stay(child)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (this, 0):  # 0: it is in another PID namespace
        os._exit(1)


def _keep(child: int, apart: bool, group: Group | None, watch: Watch | None, last: Callable[[], None]) -> NoReturn:
    """Wait for an order, a bound passed or the child's end, then leave nothing behind.

    Where the child is pid 1 of its own namespace, it is the only one to kill: the numbers of others are theirs.
    """
    code = _wait(child, watch)
    while True:
        for pid in ([] if apart else _children()) or _unreaped(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # what this orphans becomes a child of this process, for the next round
        except ChildProcessError:
            break
    if group:
        code = group.passed() or code
        group.remove()
    last()
    os._exit(code)


def _sweep(job: int, folder: Path) -> None:
    """Remove what a job that died, or is about to, cannot: its pipes close a while before it has another parent."""
    said = _stat(Path("/proc", str(job)))
    if os.getppid() != job or (said and int(said[6]) & _EXITING):
        shutil.rmtree(folder, ignore_errors=True)


def _reap(child: int) -> NoReturn:
    """Pid 1: collect the dead; end with the child, and the kernel ends all else in the namespace."""
    os._exit(_wait(child, None))


def _wait(child: int, watch: Watch | None) -> int:
    while True:
        if watch is None:
            came: int | None = signal.sigwait(_AWAITED)
        else:
            told = signal.sigtimedwait(_AWAITED, INTERVAL)
            came = told.si_signo if told else None
        if came == signal.SIGTERM:
            return 128 + signal.SIGTERM
        ended = _collect(child) if came else None
        if ended is None and watch:
            ended = watch.over()
        if ended is not None:
            return ended


def _collect(child: int) -> int | None:
    """Reap whoever has ended; the child's exit code when it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not pid:
            return None


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
