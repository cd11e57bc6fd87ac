"""Restrictions of a reward's process, and bounds on the memory and processes of its cell.

Before the reward's code runs, the process permanently gives up capabilities, system calls and, without a separate file
system, access to files. Three kernel mechanisms are used through their plain interfaces, because the worker has only
the standard library: `capset`, seccomp filters (Linux 3.5, x86-64 and arm64) and Landlock (Linux 5.13). The
restrictions cannot be undone, and child processes inherit them.

Memory and the number of processes are bounded for the whole cell, even for root, to whom rlimits do not apply. A cgroup
(version 2) bounds them if a cgroup can be created; otherwise the process that waits for the cell checks the cell's
processes ten times a second. Between two checks, only the limits of each process bound a cell.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CAPABILITY_VERSION = 0x20080522
_NO_NEW_PRIVS, _SECCOMP, _FILTER_MODE = 38, 22, 2  # prctl
# --- system calls -----------------------------------------------------------------------------------------------------

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name → number on (x86_64, aarch64): ways to other processes, mounts and namespaces, and rarely used kernel code
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory that no process owns is not counted by `Watch`
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
# separated by an IPC namespace, if the process has one
_SHARED = {"mq_open": (240, 180), "msgget": (68, 186), "semget": (64, 190)}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and NEWTIME
_INTERNET = (2, 10)  # inet, inet6
_FAMILIES = (1, *_INTERNET, 16)  # and unix, netlink: those that a network namespace isolates, unlike vsock
# TCP that Landlock does not cover: data in the first segment without connect, and listen without bind
_SENDS = {"sendto": (3, (44, 206)), "sendmsg": (2, (46, 211)), "sendmmsg": (3, (307, 269))}  # index of the flags
_FAST_OPEN, _LISTEN = 0x20000000, (50, 201)
_PROTOCOLS = (0, 6, 17)  # the family's default, TCP, UDP; Landlock does not cover others such as multipath TCP
_X32 = 0x40000000
_LOAD, _EQUAL, _ATLEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
INTERVAL = 0.1  # seconds between checks
OVER_MEMORY, OVER_PROCESSES = 97, 98  # the cell's exit codes
_RESIDENT = ("RssAnon:", "RssShmem:", "VmSwap:")  # memory of this process alone, in KiB
_CONTROLLERS = Path("/sys/fs/cgroup")


def give_up_privileges(libc: Any) -> None:
    """Drop all capabilities; executing a privileged file no longer grants any."""
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capset(ctypes.byref(header), ctypes.byref(none))
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls(libc: Any, *, apart: bool, sockets: bool) -> list[str]:
    """Deny the system calls of `_DENIED`, and sockets: all, or those that a network namespace does not isolate.

    Requires `give_up_privileges` first.

    Args:
        apart: whether this process has separate namespaces; without them System V IPC is denied too.
        sockets: whether to allow the families of `_FAMILIES`; without namespaces only those of `_INTERNET`, because
            unix sockets would reach the machine's unix sockets.

    Returns:
        The missing restrictions, as text.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return [f"system calls are not filtered: no system call numbers for {machine}"]
    program = b"".join(_program(_AUDIT_ARCH[machine], 0 if machine == "x86_64" else 1, apart, sockets))
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    if libc.prctl(_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(header, len(header)), 0, 0):
        return [f"system calls are not filtered: {os.strerror(ctypes.get_errno())}"]
    return []


def _program(arch: int, column: int, apart: bool, sockets: bool) -> list[bytes]:
    """Return a classic BPF program: every rule loads, compares, and returns or continues with the next rule."""
    refuse = _ERRNO | errno.EPERM
    rules = [
        _step(_LOAD, _ARCH_AT),
        _step(_EQUAL, arch, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        *_when(_ATLEAST, _X32, _KILL),
    ]
    for numbers in (*_DENIED.values(), *(() if apart else _SHARED.values())):
        rules += _when(_EQUAL, numbers[column], refuse)
    rules += _when(_EQUAL, _CLONE3[column], _ERRNO | errno.ENOSYS)  # flags in memory; the C library falls back to clone
    rules += _of(_CLONE[column], [_argument(0), *_when(_ANY_BIT, _NEW_NAMESPACES, refuse)])
    if sockets and not apart:
        rules += _when(_EQUAL, _LISTEN[column], refuse)
        for place, numbers in _SENDS.values():
            rules += _of(numbers[column], [_argument(place), *_when(_ANY_BIT, _FAST_OPEN, refuse)])
    return [*rules, *_of(_SOCKET[column], _sockets(apart, refuse) if sockets else [_step(_RETURN, refuse)]), _ALLOWED]


def _sockets(apart: bool, refuse: int) -> list[bytes]:
    """Allow sockets of some families and, without a network namespace, of some protocols only."""
    rules = [_argument(0)]
    for family in _FAMILIES if apart else _INTERNET:
        rules += _when(_EQUAL, family, _ALLOW) if apart else [_step(_EQUAL, family, 0, 2 * len(_PROTOCOLS) + 2)]
        if not apart:
            rules += [_argument(2), *(step for one in _PROTOCOLS for step in _when(_EQUAL, one, _ALLOW))]
            rules += [_step(_RETURN, refuse)]
    return [*rules, _step(_RETURN, refuse)]


def _of(number: int, rules: list[bytes]) -> list[bytes]:
    """Return rules for one system call; the call's number is loaded before and after the rules."""
    return [_step(_EQUAL, number, 0, len(rules) + 1), *rules, _step(_LOAD, _NUMBER_AT)]


def _argument(place: int) -> bytes:
    """Load the lower half of an argument."""
    return _step(_LOAD, _ARGUMENTS_AT + 8 * place)


def _when(test: int, value: int, then: int) -> list[bytes]:
    """Return rules that return `then` if the test holds, and otherwise continue."""
    return [_step(test, value, 0, 1), _step(_RETURN, then)]


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


_ALLOWED = _step(_RETURN, _ALLOW)


# --- files ------------------------------------------------------------------------------------------------------------

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the numbers of every architecture


_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3


_TRUNCATE, _DEVICE_CONTROL = 1 << 14, 1 << 15


_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_CONTROL


_NETWORK, _SCOPES = 0b11, 0b11  # bind and connect of TCP; abstract unix sockets and signals


_CONNECT, _PATH_RULE, _PORT_RULE = 0b10, 1, 2


_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def fence_files(libc: Any, readable: Sequence[str], writable: Sequence[str], ports: Sequence[int] = ()) -> list[str]:
    """Restrict this process to these paths by Landlock; return the missing restrictions, as text.

    Requires `give_up_privileges` first. If the kernel supports it, TCP (except to `ports`, of any host), abstract unix
    sockets, and signals to processes outside the cell are also denied.
    """
    abi = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return ["the reward can read and write all files of its user: the kernel has no Landlock"]
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, _NETWORK, _SCOPES)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return [f"the reward can read and write all files of its user: Landlock {os.strerror(ctypes.get_errno())}"]
    try:
        for path in (*readable, *_DEVICES):
            _allow(libc, rules, path, (_EXECUTE | _READ | _LIST | (_WRITE if path in _DEVICES else 0)) & handled)
        for path in writable:
            _allow(libc, rules, path, handled)
        for port in ports if abi >= 4 else ():
            libc.syscall(_ADD, rules, _PORT_RULE, struct.pack("=QQ", _CONNECT, port), 0)
        if libc.syscall(_RESTRICT, rules, 0):
            return [f"the reward can read and write all files of its user: Landlock {os.strerror(ctypes.get_errno())}"]
    finally:
        os.close(rules)
    notes = [] if abi >= 6 else ["the reward can signal processes of its user: Landlock has a version before 6"]
    if ports:
        where = "any host at the declared ports, and any host by UDP" if abi >= 4 else "any host"
        notes.append(f"the reward can reach {where}, not only the hosts that it declares")
    return notes


def _allow(libc: Any, rules: int, path: str, access: int) -> None:
    if not Path(path).exists():
        return
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        access &= -1 if Path(path).is_dir() else _OF_FILES
        libc.syscall(_ADD, rules, _PATH_RULE, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


class Watch:
    """Checks whether the descendants of a process exceed a bound.

    Args:
        root: the process.
        memory: bytes.
        processes: threads included.
        proc: the mount point of proc.
    """

    def __init__(self, root: int, memory: int, processes: int, proc: Path = Path("/proc")) -> None:
        self._root, self._memory, self._processes, self._proc = root, memory, processes, proc

    def over(self) -> int | None:
        """Return the exit code of the exceeded bound, or None."""
        tasks, held = 0, 0
        for pid in below(self._root, self._proc):
            found = _status(self._proc / str(pid))
            tasks, held = tasks + found[0], held + found[1]
        if tasks > self._processes:
            return OVER_PROCESSES
        return OVER_MEMORY if held > self._memory else None


def _status(process: Path) -> tuple[int, int]:
    """Return the threads and bytes of a process; zeros if it has ended."""
    try:
        lines = (process / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(None, 1) for line in lines if line.startswith((*_RESIDENT, "Threads:")))
    held = sum(int(fields[name].split()[0]) for name in _RESIDENT if name in fields)
    return int(fields.get("Threads:", "0")), held * 1024


def below(root: int, proc: Path = Path("/proc")) -> list[int]:
    """Return all descendants of a process, adopted ones included."""
    found, edge = [], [root]
    while edge:
        edge = [child for pid in edge for child in _children(pid, proc)]
        found += edge
    return found


def _children(pid: int, proc: Path) -> list[int]:
    children: list[int] = []
    for task in proc.glob(f"{pid}/task/[0-9]*"):
        with contextlib.suppress(OSError):
            children += [int(word) for word in (task / "children").read_text().split()]
    return children


class Group:
    """A dedicated cgroup for one cell: the kernel enforces the bounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, memory: int, processes: int, root: Path = _CONTROLLERS, own: str | None = None) -> Group | None:
        """Return a new group below this process's group or below that group's parent.

        None: no group with both bounds can be created.

        Args:
            memory: bytes, swap included.
            processes: threads included.
            root: the mount point of the hierarchy.
            own: this process's group; by default as the kernel reports it.
        """
        place = _own_group() if own is None else own
        if place is None or not (root / "cgroup.controllers").exists():
            return None
        here = root / place.lstrip("/")
        for parent in (here, here.parent):
            with contextlib.suppress(OSError):
                if not {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
                    continue
                folder = parent / f"posttrain-reward-{uuid.uuid4().hex[:12]}"
                folder.mkdir()
                group = cls(folder)
                try:
                    (folder / "memory.max").write_text(str(memory))
                    (folder / "pids.max").write_text(str(processes))
                    with contextlib.suppress(OSError):  # a kernel without swap accounting
                        (folder / "memory.swap.max").write_text("0")
                    (folder / "memory.oom.group").write_text("1")
                except OSError:
                    group.remove()
                    raise
                return group
        return None

    def join(self) -> None:
        """Move the calling process into the group; the children of the process stay in the group."""
        (self.folder / "cgroup.procs").write_text("0")

    def passed(self) -> int | None:
        """Return the exit code of the memory bound if the kernel killed a process at it, else None."""
        with contextlib.suppress(OSError, ValueError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            if int(events.get("oom_kill", "0")):
                return OVER_MEMORY
        return None

    def remove(self) -> None:
        """Remove the group, if it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _own_group() -> str | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)
