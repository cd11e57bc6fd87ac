"""Attacks on a reward's cell, as functions that return whether they succeeded; played by `test_reward_attacks`.

As a reward: `score(completion, canaries)` plays the attack that the completion names. As a script it opens itself as
a reward and prints what every attack came to: `python reward_attacks.py CANARIES.json`.
"""

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import sysconfig

_libc = ctypes.CDLL(None, use_errno=True)


def _writes(path):
    try:
        with open(path, "ab") as file:
            file.write(b"")
    except OSError:
        return False
    return True


def _reads(path):
    try:
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _lists(path):
    try:
        return bool(os.listdir(path))
    except OSError:
        return False


def _calls(number, *arguments):
    """Whether a system call is let through."""
    return _libc.syscall(number, *arguments) != -1 or ctypes.get_errno() not in (
        errno.EPERM,
        errno.ENOSYS,
        errno.EACCES,
    )


def _connects(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as made:
            made.settimeout(2)
            made.connect(address)
    except OSError:
        return False
    return True


def _makes(family, kind, protocol=0):
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        return False
    return True


# --- files ------------------------------------------------------------------------------------------------------------


def write_pth(c):
    return any(_writes(os.path.join(sysconfig.get_path(name), "evil.pth")) for name in ("purelib", "platlib"))


def write_sitecustomize(c):
    return _writes(os.path.join(sysconfig.get_path("purelib"), "sitecustomize.py"))


def change_a_library(c):
    import numpy

    return _writes(numpy.__file__)


def change_the_standard_library(c):
    return _writes(os.__file__)


def change_the_engine(c):
    import posttrain

    return _writes(posttrain.__file__)


def change_the_interpreter(c):
    return _writes(os.path.realpath(sys.executable))


def change_its_own_source(c):
    return _writes(__file__)


def write_usr_local(c):
    return _writes("/usr/local/evil")


def write_etc(c):
    return _writes("/etc/ld.so.preload") or _writes("/etc/passwd")


def write_root(c):
    return _writes("/evil")


def write_home(c):
    return _writes(os.path.join(c["home"], "evil"))


def read_home(c):
    return _reads(os.path.join(c["home"], "secret"))


def read_ssh_keys(c):
    return any(_lists(os.path.join(home, ".ssh")) for home in ("/root", "/home", os.path.expanduser("~")))


def write_workspace(c):
    return _writes(os.path.join(c["workspace"], "ledger.db"))


def read_workspace(c):
    return _reads(os.path.join(c["workspace"], "ledger.db"))


def read_temporary_files_of_others(c):
    return _reads(c["temporary"])


def read_shadow(c):
    return _reads("/etc/shadow")


def read_private_keys(c):
    return _lists("/etc/ssl/private")


def climb_out(c):
    return any(_reads(os.path.join(top, c["home"].lstrip("/"), "secret")) for top in ("/..", "/proc/1/root"))


def link_to_outside(c):
    try:
        os.link(os.path.join(c["home"], "secret"), os.path.join(os.environ["HOME"], "link"))
    except OSError:
        return False
    return True


def make_a_device(c):
    try:
        os.mknod(os.path.join(os.environ["HOME"], "device"), 0o60600, os.makedev(8, 0))
    except OSError:
        return False
    return True


def read_devices(c):
    return any(map(_reads, ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda")))


def fill_the_disk(c):
    made = 0
    try:
        for number in range(4):
            with open(os.path.join(os.environ["HOME"], f"big{number}"), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2**29)
                made += 2**29
    except OSError:
        pass
    finally:
        for number in range(4):
            if os.path.exists(os.path.join(os.environ["HOME"], f"big{number}")):
                os.unlink(os.path.join(os.environ["HOME"], f"big{number}"))
    return made > 2**30


def change_modes_of_devices(c):
    for name in ("null", "full", "urandom"):
        try:
            os.chmod(f"/dev/{name}", os.stat(f"/dev/{name}").st_mode & 0o7777 ^ 0)
            return True
        except OSError:
            continue
    return False


# --- the kernel's settings --------------------------------------------------------------------------------------------


def write_core_pattern(c):
    return _writes("/proc/sys/kernel/core_pattern")


def write_sysctl(c):
    return _writes("/proc/sys/vm/drop_caches") or _writes("/proc/sysrq-trigger")


def write_sys(c):
    return _lists("/sys/kernel") or _writes("/sys/fs/cgroup/cgroup.procs")


def set_host_name(c):
    return not _libc.sethostname(b"evil", 4)


def set_the_clock(c):
    return not _libc.stime(ctypes.byref(ctypes.c_long(0))) if hasattr(_libc, "stime") else False


# --- other processes --------------------------------------------------------------------------------------------------


def read_environments(c):
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    found.append(c["secret"].encode() in file.read())
            except OSError:
                continue
    return any(found)


def own_environment(c):
    return c["secret"] in os.environ.values()


def signal_the_job(c):
    try:
        os.kill(c["job"], 0)
        os.kill(c["job"], signal.SIGCONT)
    except OSError:
        return False
    return os.getppid() != 0 or c["job"] == os.getppid()


def kill_its_init(c):
    os.kill(os.getppid(), signal.SIGCONT) if os.getppid() != 1 else None
    return False if os.getppid() == 1 else _survives(os.getppid())


def _survives(pid):
    try:
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return False
    return True


def read_memory_of_init(c):
    return _reads("/proc/1/mem") or _reads("/proc/1/environ")


def trace_a_process(c):
    return _calls(101 if os.uname().machine == "x86_64" else 117, 16, os.getppid(), 0, 0)


def read_memory_by_call(c):
    return _calls(310 if os.uname().machine == "x86_64" else 270, os.getppid(), None, 0, None, 0, 0)


def steal_a_descriptor(c):
    return _calls(438, 0, 0, 0)


def inherited_descriptors(c):
    """A file of the job's that was left open, or the marker made a file to fill."""
    for number in range(3, 256):
        try:
            os.pwrite(number, b"x", 2**20)
            return True
        except OSError:
            continue
    return False


def cut_the_marker(c):
    """The job reads eight shared bytes; a shorter file would end it."""
    for number in range(3, 256):
        try:
            os.ftruncate(number, 0)
            return True
        except OSError:
            continue
    return False


# --- memory of others -------------------------------------------------------------------------------------------------


def shared_memory_files(c):
    return _reads(f"/dev/shm/{c['shm']}")


def system_v_memory(c):
    return _libc.shmget(c["sysv"], 0, 0) != -1


def memory_that_no_process_holds(c):
    try:
        os.close(os.memfd_create("hoard"))
        return True
    except OSError:
        return _libc.shmget(0, 4096, 0o1600) != -1


# --- the network ------------------------------------------------------------------------------------------------------


def reach_the_internet(c):
    return _connects(socket.AF_INET, ("192.0.2.1", 9), socket.SOCK_DGRAM)


def reach_the_hosts_loopback(c):
    return _connects(socket.AF_INET, ("127.0.0.1", c["port"]))


def reach_the_hosts_loopback_6(c):
    return _connects(socket.AF_INET6, ("::1", c["port"]))


def reach_a_unix_socket(c):
    return _connects(socket.AF_UNIX, c["unix"])


def reach_an_abstract_socket(c):
    return _connects(socket.AF_UNIX, "\0" + c["abstract"])


def raw_sockets(c):
    return _makes(socket.AF_INET, socket.SOCK_RAW, 1) or _makes(socket.AF_PACKET, socket.SOCK_RAW)


def virtual_machine_sockets(c):
    return _makes(40, socket.SOCK_STREAM)


def crypto_sockets(c):
    return _makes(38, socket.SOCK_SEQPACKET)


# --- more rights ------------------------------------------------------------------------------------------------------


def regain_capabilities(c):
    header, wanted = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    return not _libc.capset(ctypes.byref(header), ctypes.byref(wanted))


def become_root_by_program(c):
    with open("/proc/self/status") if os.path.exists("/proc/self/status") else open(os.devnull) as file:
        status = file.read()
    return bool(status) and ("NoNewPrivs:\t1" not in status or "CapEff:\t0000000000000000" not in status)


def new_user_namespace(c):
    return not _libc.unshare(0x10000000)


def clone_into_namespaces(c):
    number = 56 if os.uname().machine == "x86_64" else 220
    pid = _libc.syscall(number, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
    return pid > 0


def clone3_into_namespaces(c):
    return _calls(435, ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, *[0] * 10)), 88)


def enter_namespaces(c):
    return _calls(308 if os.uname().machine == "x86_64" else 268, 0, 0)


def mount_over(c):
    return not _libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)


def remount_writable(c):
    return not _libc.mount(None, b"/", None, 32 | 4096, None)


def unmount(c):
    return not _libc.umount2(b"/proc", 2)


def new_mount_calls(c):
    return any(_calls(number, 0, 0, 0, 0, 0) for number in (428, 429, 430, 431, 432, 433, 442))


def change_root(c):
    try:
        os.chroot("/tmp")
    except OSError:
        return False
    return True


def open_by_handle(c):
    return _calls(304 if os.uname().machine == "x86_64" else 265, -100, None, 0)


def kernel_programs(c):
    return _calls(321 if os.uname().machine == "x86_64" else 280, 0, None, 0)


def performance_events(c):
    return _calls(298 if os.uname().machine == "x86_64" else 241, None, 0, -1, -1, 0)


def user_faults(c):
    return _calls(323 if os.uname().machine == "x86_64" else 282, 0)


def rings(c):
    return _calls(425, 1, None)


def kernel_keys(c):
    return _calls(250 if os.uname().machine == "x86_64" else 219, 0, -3, 0)


def calls_of_another_table(c):
    """x32: the same calls by other numbers, which a filter by number could forget."""
    if os.uname().machine != "x86_64":
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(1 if _libc.syscall(0x40000000 + 272, 0x10000000) == 0 else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def raise_its_limits(c):
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        return False
    return True


def read_standard_input(c):
    return bool(os.read(0, 1))


_HELPERS = ("score", "play")
ATTACKS = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and not name.startswith("_") and name not in _HELPERS
}


def score(completion, canaries):
    try:
        return float(ATTACKS[completion](canaries))
    except OSError:
        return 0.0


def play(canaries):
    """What every attack came to: score, or the failure's line."""
    from pathlib import Path

    from posttrain.sandbox.port import RewardCall
    from posttrain.sandbox.process import open_reward

    canaries["job"] = os.getpid()
    names = sorted(ATTACKS)
    rows = [{"canaries": canaries} for _ in names]
    with open_reward(Path(__file__), "score", timeout=60, hidden=[Path(canaries["workspace"])]) as reward:
        scores = reward.score(RewardCall([""] * len(names), names, rows), allowed=len(names) - 1)
        return {
            "confined": reward.confined,
            "notes": reward.notes,
            "results": {n: s.message if s.failed else s.score for n, s in zip(names, scores, strict=True)},
        }


if __name__ == "__main__":
    import json
    from pathlib import Path

    print(json.dumps(play(json.loads(Path(sys.argv[1]).read_text()))))
