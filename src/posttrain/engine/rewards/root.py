"""The file system of a reward: a root of its own that holds, read-only, what it needs and nothing else.

::

    /usr /bin /lib …       the system's programs and libraries          read-only
    sys.prefix …           the interpreter and its environment          read-only, at their own paths
    /reward                its source and the files that the run declares  read-only
    /etc                   a few files made here, certificates, time zone  read-only
    /dev                   null, zero, full, random, urandom; shm of its own
    /proc                  its own PID namespace's                      read-only; empty where the kernel refuses one
    /tmp                   its scratch: home and working folder         bounded in bytes

Built by pid 1 of the cell, with the capabilities that its user namespace gives; standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOME, SOURCE = "/tmp", "/reward"  # in the cell
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SHARED_MEMORY = 256 * 2**20  # bytes of /dev/shm
_INODES = 65536
_MOUNT = 0x00020000  # CLONE_NEWNS
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8  # MS_… and MOUNT_ATTR_… alike
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 32, 4096, 16384, 1 << 18, 2
_SET_ATTRIBUTES, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_WHOLE_TREE = 0x8000  # AT_RECURSIVE


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
    """Build the root over the folder `base`, move into it, and lose sight of the machine's own.

    Args:
        base: an empty folder.
        readable: existing files and folders that the reward needs, at their own paths.
        hidden: folders that are empty for it where they lie in a readable one.
        source: the folder that becomes `/reward`.
        scratch: bytes of `/tmp`.
        hosts: name → address, for `/etc/hosts`.

    Returns:
        What is missing, in words.

    Raises:
        OSError: the kernel refuses a step; this process has a mount namespace of its own by then, or none.
    """
    _done(libc.unshare(_MOUNT), "unshare")
    _mount(libc, None, "/", None, _RECURSIVE | _PRIVATE)
    _mount(libc, "tmpfs", base, "tmpfs", _NO_SUID | _NO_DEVICES, f"size=1m,nr_inodes={_INODES},mode=755")
    root = Path(base)
    (root / HOME[1:]).mkdir()  # before what is shown: an environment may lie in it
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
    inert = _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC  # as root even /proc/sys is writable by its owner
    missing = libc.mount(b"proc", os.fsencode(root / "proc"), b"proc", inert, None)
    _mount(libc, None, base, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    _enter(libc, base)
    return ["the reward finds /proc empty: the kernel refuses one of its own here"] if missing else []


def _enter(libc: Any, base: str) -> None:
    os.chdir(base)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown on {os.uname().machine}")
    _done(libc.syscall(number, b".", b"."), "pivot_root")  # the old root now lies over the new one
    _done(libc.umount2(b".", _DETACH), "umount")
    os.chdir(HOME)


def _show(libc: Any, root: Path, path: str) -> None:
    """A path of the machine at the same place; links stay links."""
    place = root / path[1:]
    if not os.path.lexists(path) or os.path.lexists(place):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        place.symlink_to(os.readlink(path))
    else:
        _bind(libc, path, place)


def _bind(libc: Any, path: str, place: Path) -> None:
    """A read-only view without devices and set-user-id programs, of everything mounted below too."""
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
        # writing to a device needs no writable mount, changing its mode does: root would change the machine's
        _mount(libc, None, str(folder / name), None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_EXEC)
    for name, target in (("fd", "self/fd"), ("stdin", "self/fd/0"), ("stdout", "self/fd/1"), ("stderr", "self/fd/2")):
        (folder / name).symlink_to(f"/proc/{target}")
    options = f"size={_SHARED_MEMORY},nr_inodes=4096,mode=700"
    _mount(libc, "tmpfs", str(folder / "shm"), "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, options)


def _settings(root: Path, hosts: Mapping[str, str]) -> None:
    """Names for the own user, the own machine and the declared hosts, and no others."""
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
