"""The cell in which a reward's code runs, its file system, and its connections to declared hosts.

The code has no other connections, and no process outlives its cell:

::

    job ── keeper ── init ── reward      with namespaces: `init` is pid 1 of a separate PID namespace
    job ── keeper ────────── reward      without: the keeper adopts processes that the reward detaches

The keeper runs none of the reward's code. It waits for the end of its child or for SIGTERM, which the job sends to
close the cell and the kernel sends when the job dies. The keeper then kills all its descendants, waits until they have
ended, and exits with its child's exit code (128 + n for signal n). With a PID namespace, the kernel kills every process
in it when pid 1 ends; without a namespace the keeper is a child subreaper, so orphaned processes become its children.
If no cgroup bounds the cell's memory and processes, the keeper checks both ten times a second.

With namespaces the reward has a separate root, a network of only the declared hosts, and no access to other processes
and their shared memory. Without namespaces, Landlock and a system call filter restrict the reward as far as possible
(`sandbox.barriers`), and `Confinement.whole` is false: `plan` rejects this unless the workspace trusts its rewards.

The module uses only the standard library, and only one thread, because it forks.

The file system of a reward is a separate root that contains only the files that the reward needs, read-only:

::

    /usr /bin /lib …       the system's programs and libraries          read-only
    sys.prefix …           the interpreter and its environment          read-only, at their own paths
    /reward                its source and the files that the run declares  read-only
    /etc                   a few generated files, certificates, time zone  read-only
    /dev                   null, zero, full, random, urandom; a separate shm
    /proc                  of the cell's PID namespace                  read-only; empty where the kernel refuses one
    /tmp                   scratch: home and working folder             bounded in bytes

Pid 1 of the cell builds this root, with the capabilities of its user namespace, using only the standard library.

The job connects a cell only to the hosts that its reward declares. The listening sockets are in the cell's network
namespace, which has no other route; the job accepts connections on them and connects to the hosts, with one thread per
direction. The reward uses the host's name as usual (`/etc/hosts` of the cell maps the name to the listener), so TLS
verifies the requested name.
"""

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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from posttrain.sandbox.barriers import INTERVAL, Group, Watch, fence_files, filter_calls, give_up_privileges

HOME, SOURCE = "/tmp", "/reward"  # in the cell
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SHARED_MEMORY = 256 * 2**20  # bytes of /dev/shm
_INODES = 65536
_MOUNT = 0x00020000  # CLONE_NEWNS
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8  # values of both MS_… and MOUNT_ATTR_…
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 32, 4096, 16384, 1 << 18, 2
_SET_ATTRIBUTES, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_WHOLE_TREE = 0x8000  # AT_RECURSIVE
_UTS, _IPC, _USER, _PID, _NET = 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000  # CLONE_NEW…
_CGROUP = 0x02000000
_NAMESPACES = _UTS | _IPC | _PID | _NET | _CGROUP
_PDEATHSIG, _DUMPABLE, _SUBREAPER = 1, 4, 36  # PR_SET_…
_EXITING = 4  # PF_EXITING, among the flags of /proc/PID/stat
_INTERFACE_FLAGS, _SET_INTERFACE_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_NAMES = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
_RESOLVER = ("/etc/resolv.conf", "/etc/gai.conf", "/etc/host.conf")
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
_CONNECT_SECONDS = 10.0
_MOST = 64  # connections at a time
_CHUNK = 1 << 16


def move_in(
    libc: Any,
    base: str,
    *,
    readable: Sequence[str],
    hidden: Sequence[str],
    source: str,
    scratch: int,
    hosts: Mapping[str, str],
) -> list[str]:
    """Build the root over the folder `base`, move into it, and detach the machine's own root.

    Args:
        base: an empty folder.
        readable: existing files and folders that the reward needs, at their own paths.
        hidden: folders inside readable folders that are empty for the reward.
        source: the folder that becomes `/reward`.
        scratch: bytes of `/tmp`.
        hosts: name → address, for `/etc/hosts`.

    Returns:
        The missing parts, as text.

    Raises:
        OSError: the kernel denies a step; this process may already have a separate mount namespace.
    """
    _done(libc.unshare(_MOUNT), "unshare")
    _mount(libc, None, "/", None, _RECURSIVE | _PRIVATE)
    _mount(libc, "tmpfs", base, "tmpfs", _NO_SUID | _NO_DEVICES, f"size=1m,nr_inodes={_INODES},mode=755")
    root = Path(base)
    (root / HOME[1:]).mkdir()  # first: an environment may be in /tmp
    options = f"size={scratch},nr_inodes={_INODES},mode=700"
    _mount(libc, "tmpfs", str(root / HOME[1:]), "tmpfs", _NO_SUID | _NO_DEVICES, options)
    for path in (*SYSTEM, *SETTINGS, *readable):
        _show(libc, root, path)
    for folder in hidden:
        if (root / folder[1:]).is_dir():
            _mount(libc, "tmpfs", str(root / folder[1:]), "tmpfs", _READ_ONLY | _NO_SUID, "size=4k,mode=0")
    _bind(libc, source, root / SOURCE[1:])
    _devices(libc, root)
    _settings(root, hosts)
    (root / "proc").mkdir(exist_ok=True)
    inert = _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC  # otherwise root, which owns proc, could write /proc/sys
    missing = libc.mount(b"proc", os.fsencode(root / "proc"), b"proc", inert, None)
    _mount(libc, None, base, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir(base)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown on {os.uname().machine}")
    _done(libc.syscall(number, b".", b"."), "pivot_root")  # the old root is now mounted over the new one
    _done(libc.umount2(b".", _DETACH), "umount")
    os.chdir(HOME)
    return ["the reward has an empty /proc: the kernel does not allow a separate one"] if missing else []


def _show(libc: Any, root: Path, path: str) -> None:
    """Make a path of the machine visible at the same path; links stay links."""
    place = root / path[1:]
    if not os.path.lexists(path) or os.path.lexists(place):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        place.symlink_to(os.readlink(path))
    else:
        _bind(libc, path, place)


def _bind(libc: Any, path: str, place: Path) -> None:
    """Mount a path recursively, read-only, without devices and set-user-id programs."""
    if os.path.isdir(path):
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.touch()
    _mount(libc, path, str(place), None, _BIND | _RECURSIVE)
    flags = struct.pack("QQQQ", _READ_ONLY | _NO_SUID | _NO_DEVICES, 0, 0, 0)
    there, size = os.fsencode(place), ctypes.c_size_t(len(flags))
    if not libc.syscall(_SET_ATTRIBUTES, -100, there, _WHOLE_TREE, flags, size):
        return
    for mount in _mounts_below(str(place)):  # before Linux 5.12
        kept = os.statvfs(mount).f_flag & (_NO_SUID | _NO_DEVICES | _NO_EXEC)
        _mount(libc, None, mount, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | kept)


def _mounts_below(place: str) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    plain = [point.encode().decode("unicode_escape") for point in points]  # a blank is \040
    return [point for point in plain if point == place or point.startswith(place + "/")]


def _devices(libc: Any, root: Path) -> None:
    folder = root / "dev"
    (folder / "shm").mkdir(parents=True)
    for name in _DEVICES:
        (folder / name).touch()
        _mount(libc, f"/dev/{name}", str(folder / name), None, _BIND)
        # devices are writable on a read-only mount, but root cannot change the mode of the machine's device
        _mount(libc, None, str(folder / name), None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_EXEC)
    for name, target in (("fd", "self/fd"), ("stdin", "self/fd/0"), ("stdout", "self/fd/1"), ("stderr", "self/fd/2")):
        (folder / name).symlink_to(f"/proc/{target}")
    options = f"size={_SHARED_MEMORY},nr_inodes=4096,mode=700"
    _mount(libc, "tmpfs", str(folder / "shm"), "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, options)


def _settings(root: Path, hosts: Mapping[str, str]) -> None:
    """Write the names of the user, of localhost and of the declared hosts."""
    folder = root / "etc"
    folder.mkdir(exist_ok=True)
    user, group = os.getuid(), os.getgid()
    (folder / "passwd").write_text(f"reward:x:{user}:{group}::{HOME}:/bin/sh\n")
    (folder / "group").write_text(f"reward:x:{group}:\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    names = {"localhost": "127.0.0.1", **hosts}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))


def _mount(
    libc: Any, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _done(libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def _done(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The settings of a cell, as JSON values because the worker receives them as an argument."""

    base: str  # an empty folder of the job, over which the root is mounted
    source: str  # a folder with the reward's source and declared files
    scratch: str  # the reward's working folder if it has no separate root
    readable: Sequence[str]  # interpreter, environment
    hidden: Sequence[str]  # folders inside readable folders that are empty for the reward
    limits: Mapping[str, int]  # RLIMIT_… → value, of each process
    memory: int  # bytes of all processes and scratch
    processes: int  # threads included
    scratch_bytes: int
    hosts: Mapping[str, str]  # declared hosts → their address in the cell
    ports: Sequence[tuple[str, int]] = ()  # (address, port) in the cell, to be relayed by the job
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment; none is secret


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement that was achieved."""

    whole: bool  # with namespaces and a separate root; if not, notes list the missing parts
    notes: tuple[str, ...]
    home: str  # the reward's scratch
    source: str  # path of the folder `source` in the cell
    listeners: tuple[socket.socket, ...] = ()  # one per port


def enter(parent: int, plan: CellPlan) -> Confinement:
    """Return in the confined process; the calling process becomes the keeper of that process and never returns.

    Args:
        parent: the job's process; the calling process ends when the job's process ends.
        plan: the settings of the cell.
    """
    if sys.platform != "linux":
        notes = (
            "the reward can read and write all files of its user, and reach any host: cells need Linux",
            *_limit(plan.limits),
        )
        return Confinement(False, notes, plan.scratch, plan.source)
    libc = ctypes.CDLL(None, use_errno=True)
    tasks = plan.processes + _own_tasks()  # before the user namespace changes user ids
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    group = Group.make(plan.memory, plan.processes)
    notes = _unshare(libc)
    apart = not notes
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # after unshare, because a change of credentials clears it
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl took effect
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
            notes.append(f"the reward has no separate root: {error}")
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)
        # pid 1 reaps processes and ends with the child; then the kernel kills the rest of the namespace
        _fork(libc, lambda child: os._exit(_wait(child, None)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    notes += _confine(libc, plan, apart, rooted, {**plan.limits, "RLIMIT_NPROC": tasks})
    home, source = (HOME, SOURCE) if rooted else (plan.scratch, plan.source)
    return Confinement(apart and rooted, tuple(notes), home, source, listeners)


def _confine(libc: Any, plan: CellPlan, apart: bool, rooted: bool, limits: Mapping[str, int]) -> list[str]:
    """Take the last steps in the process that will run the reward's code; return the missing parts, as text."""
    give_up_privileges(libc)
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # /proc/self must be readable
    notes = []
    if not rooted:
        ports = () if apart else tuple(port for _, port in plan.ports)
        readable = (*SYSTEM, *SETTINGS, *_NAMES, *(_RESOLVER if ports else ()), *plan.readable, plan.source)
        notes = fence_files(libc, readable, [plan.scratch], ports)
        if plan.ports and apart:
            notes.append("the reward cannot reach the hosts that it declares: they need a separate root")
        notes.append("the reward can fill the disk: its scratch has no size limit without a separate root")
        notes.append(
            "the reward can change the modes and times of its user's files, and the limits of its user's processes"
        )
    notes += filter_calls(libc, apart=apart, sockets=apart or bool(plan.ports))
    return notes + _limit(limits)


def _unshare(libc: Any) -> list[str]:
    """Enter all namespaces or none: unprivileged in a user namespace, else as root; return missing parts as text."""
    trial = os.fork()
    if not trial:  # tried in a child, because a namespace cannot be left
        os._exit(_unshare_as_user(libc))
    why = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if not why:
        return [] if not _unshare_as_user(libc) else ["the reward shares this machine's processes, network and files"]
    if not libc.unshare(_NAMESPACES):
        return []
    return [
        f"the reward shares this machine's processes, network and files, except what Landlock and the system call "
        f"filter deny: no namespaces ({os.strerror(why)})"
    ]


def _unshare_as_user(libc: Any) -> int:
    """Enter a new user namespace with the same ids, and new namespaces in it; return the error number, or 0."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_USER | _NAMESPACES):
        return ctypes.get_errno()
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:  # root without the capability to map its id
        return error.errno or errno.EPERM
    return 0


def _listeners(ports: Sequence[tuple[str, int]]) -> tuple[socket.socket, ...]:
    """Return sockets in this network namespace, one per port; the job accepts connections on them."""
    if not ports:
        return ()
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", 0)))[1]
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    return tuple(socket.create_server((address, port), backlog=16) for address, port in ports)


def _fork(libc: Any, stay: Callable[[int], NoReturn]) -> None:
    """Fork; return in the child, which dies with this process, while this process runs `stay(child)`."""
    this = os.getpid()
    child = os.fork()
    if child:
        stay(child)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (this, 0):  # 0: the parent is in another PID namespace
        os._exit(1)


def _keep(child: int, apart: bool, group: Group | None, watch: Watch | None, last: Callable[[], None]) -> NoReturn:
    """Wait for SIGTERM, an exceeded bound or the child's end, then kill the cell's processes and remove its folder.

    If the child is pid 1 of a namespace, only the child is killed, and the kernel kills the rest.
    """
    code = _wait(child, watch)
    while True:
        for pid in ([] if apart else _children()) or _unreaped(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # orphans become children of this process, for the next round
        except ChildProcessError:
            break
    if group:
        code = group.passed() or code
        group.remove()
    last()
    os._exit(code)


def _sweep(job: int, folder: Path) -> None:
    """Remove the folder of a job that died or is exiting (pipes close before children are reparented)."""
    said = _stat(Path("/proc", str(job)))
    if os.getppid() != job or (said and int(said[6]) & _EXITING):
        shutil.rmtree(folder, ignore_errors=True)


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
    """Reap all ended processes; return the child's exit code if the child is among them."""
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
    """Return the child's pid, or nothing if the child was reaped, because another process may then have the pid."""
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return [child]


def _children() -> list[int]:
    """Return direct children, read from /proc (`pid (name) state ppid …`)."""
    this, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(entry)
        if fields and int(fields[1]) == this:
            found.append(int(entry.name))
    return found


def _own_tasks() -> int:
    """Count processes and threads of this user."""
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
    """Return the fields of /proc/PID/stat, beginning with the state; empty if the process has ended."""
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


class Relay:
    """Forwards connections that it accepts in the cell to hosts outside.

    Args:
        listeners: one per destination.
        destinations: `host:port`.
    """

    def __init__(self, listeners: Sequence[socket.socket], destinations: Sequence[str]) -> None:
        self._listeners = tuple(listeners)
        self._places = threading.BoundedSemaphore(_MOST)
        self._open: set[socket.socket] = set()
        for listener, destination in zip(listeners, destinations, strict=True):
            threading.Thread(target=self._accept, args=(listener, destination), daemon=True).start()

    def close(self) -> None:
        """End all connections, and stop accepting."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
            listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # ends the threads' reads

    def _accept(self, listener: socket.socket, destination: str) -> None:
        host, _, port = destination.rpartition(":")
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                inside.close()
                continue
            threading.Thread(target=self._serve, args=(inside, (host, int(port))), daemon=True).start()

    def _serve(self, inside: socket.socket, destination: tuple[str, int]) -> None:
        try:
            with inside, socket.create_connection(destination, _CONNECT_SECONDS) as outside:
                outside.settimeout(None)
                self._open |= {inside, outside}
                back = threading.Thread(target=_pump, args=(outside, inside), daemon=True)
                back.start()
                _pump(inside, outside)
                back.join()
                self._open -= {inside, outside}
        except OSError:
            return  # refused or unknown host: the reward's connection closes
        finally:
            self._places.release()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
