"""The parent of one local job, which starts the job, outlives the job's launcher, and records how the job ended.

`python -m posttrain.execution.executors.local.supervisor ATTEMPT_DIR SPEC.json`

::

    launcher ──▶ intermediate ──fork──▶ supervisor ──fork──▶ job
                    │ exits when the         │ holds supervisor.lock while it lives
                    ▼ claim is written       │ 1. supervisor.json: the claim. A supervisor that finds a claim ends
                 0 claimed                   │ 2. forks; the child waits on a pipe
                75 claimed by another        │ 3. supervisor.json with the job's pid and start; the child runs the job
                76 no device is free         │    (before 1: locks the job's devices, or claims nothing)
                                             │ 4. waits, and four times a second records the job's time as the lock's
                                             │    mtime; kills the rest of the job's process group; exit.json

The launcher waits for the intermediate, which waits for the claim (a byte, or the end of the pipe if the supervisor
dies). A launcher whose time is over writes a claim itself, so a later supervisor starts no job. The forked child waits
for a byte from the supervisor in the same way; the supervisor waits only for the job. The job dies with its supervisor
(parent-death signal), so a lost supervisor means a lost job.

The module imports only the standard library and modules of Posttrain that do the same, to start fast.
"""

import ctypes
import fcntl
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from types import FrameType
from typing import Any, NoReturn

from posttrain.domain.ports import crashpoint
from posttrain.execution.executors.local import devices
from posttrain.execution.processes import HEARTBEAT_SECONDS, LEAVING_SECONDS, identity, without_trackers
from posttrain.store.atomic import create_json, write_json

ALREADY_CLAIMED = 75
NO_DEVICE = 76
_FAILED = 70
_CANNOT_EXECUTE = 127
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_RESERVE = ".reserve"  # a file that reserves disk space for the record of the end
_CGROUPS = Path("/sys/fs/cgroup")
_COUNTS = ("memory.events", "memory.oom_control")
_DYING_SECONDS = 10.0  # from the kernel's kill until the process has released its memory and ended
_PR_SET_PDEATHSIG = 1
_BOX = "container"  # the key in spec.json, equal to that in `containers`
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
Start = Callable[[Path, dict[str, Any]], NoReturn]


def main(attempt_dir: str, spec_file: str, start: Start | None = None) -> int:
    """Detach a supervisor for the attempt; return an exit code: claimed, claimed by another, or no device.

    Args:
        start: the function by which the forked process becomes the job; None: `execute`.
    """
    folder, asked, launchers = Path(attempt_dir), Path(spec_file).absolute(), {os.getpid(), os.getppid()}
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return {b"1": 0, b"0": ALREADY_CLAIMED, b"2": NO_DEVICE}.get(os.read(reading, 1), _FAILED)
    os.close(reading)
    os.setsid()
    os.chdir(folder)
    try:
        crashpoint("supervisor.before_claim")
        claimed = _claim(folder, asked)
        word = b"0" if claimed is None else b"1"
    except _NoDeviceError:
        claimed, word = None, b"2"
    with suppress(BrokenPipeError):  # the launcher has stopped waiting; the claim on disk decides
        os.write(writing, word)
    os.close(writing)
    if claimed is not None:
        lock, spec, taken = claimed
        _supervise(folder, spec, contain if _BOX in spec else start or execute, taken, launchers)
        taken.close()
        os.close(lock)  # after exit.json: a process that finds the lock free can read the record
    os._exit(0)


class _NoDeviceError(Exception):
    """Fewer devices are free than the job needs."""


def _claim(folder: Path, asked: Path) -> tuple[int, dict[str, Any], devices.Taken] | None:
    """Write the claim; return the lock's descriptor, the spec and the job's devices.

    None: this attempt has or had a supervisor. The spec is read under the lock, so no process replaces the spec
    afterwards.

    Raises:
        _NoDeviceError: not enough devices are free; nothing is claimed.
    """
    lock = os.open(folder / "supervisor.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    if (folder / "exit.json").exists() or (folder / "supervisor.json").exists():
        return None
    spec = json.loads(asked.read_bytes())
    taken = devices.take(devices.Devices(**spec["machine"]), spec["devices"])
    if taken is None:
        raise _NoDeviceError
    return (lock, spec, taken) if create_json(folder / "supervisor.json", _self()) else None


def _self() -> dict[str, Any]:
    return {"pid": os.getpid(), "identity": identity(os.getpid())}


def _supervise(
    folder: Path, spec: dict[str, Any], start: Start, taken: devices.Taken, launchers: Collection[int]
) -> None:
    record = {**_self(), **devices.signature(spec), "token": devices.show(spec, taken)}
    taken.sign(record)
    spec["taken"] = taken.names
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    os.umask(0o077)  # only the owner can read a job's files
    kills = OomKills(folder_of_cgroup(), launchers)
    with suppress(OSError):
        (folder / _RESERVE).write_bytes(bytes(4096))
    crashpoint("supervisor.before_spawn")
    job, release = _fork_job(folder, spec, start)
    started, begun = time.time(), time.monotonic()
    claim = {**_self(), "job_pid": job, "job_identity": identity(job), "started_at": started}
    os.utime(folder / "supervisor.lock", (started, started))
    write_json(folder / "supervisor.json", claim)
    taken.sign({**record, **claim})  # before the job may touch a device
    os.write(release, b"1")
    os.close(release)

    def forward(number: int, _: FrameType | None) -> None:
        kills.asked()
        os.kill(job, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    crashpoint("supervisor.after_spawn")
    most = spec.get("max_seconds")
    limit = Limit(math.inf if most is None else most, spec.get("grace_seconds", 0.0), begun, folder / "log.txt")

    def beat() -> None:
        _beat(folder, started, begun, taken)
        kills.look()

    code = wait(job, folder / "result.json", beat, limit)
    box = spec.get(_BOX)
    if box:
        from posttrain.execution.executors.local import containers  # late, because other jobs do not need it

        code = containers.code_of(box, code)
        said = containers.last_words(folder) if code == containers.REFUSED else ""
        containers.clear(folder, box, lambda: _beat(folder, started, begun, taken))
    spent = time.monotonic() - begun
    ended: dict[str, Any] = {"exit_code": code, "at": time.time(), "seconds": spent, "overtime": limit.over}
    ended |= {"word": box["word"], "said": said} if box else {}
    if code in _KILLED and not limit.over:
        ended |= kills.told(code)
    with suppress(OSError):  # frees space for the record of the end on a full disk
        (folder / _RESERVE).unlink()
    crashpoint("supervisor.before_exit_record")
    if (folder / "exit.json").is_dir():  # a job may have created the folder
        (folder / "exit.json").rename(folder / f".exit.json.{time.monotonic_ns()}")
    write_json(folder / "exit.json", ended)


def folder_of_cgroup() -> Path | None:
    """Return the folder of this process's cgroup that counts OOM kills; None: there is no counter."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers in ("", "memory"):
            for folder in (_CGROUPS / controllers / place.strip("/"), _CGROUPS / controllers):
                if any((folder / name).is_file() for name in _COUNTS):
                    return folder
    return None


class OomKills:
    """Detects OOM kills of a job by the counter of its cgroup.

    If other processes share the cgroup, the counter may refer to another process.

    Args:
        folder: the cgroup's folder; None: there is no counter.
        launchers: processes that may be in the cgroup in addition to this process and its children.
    """

    def __init__(self, folder: Path | None, launchers: Collection[int] = ()) -> None:
        self._folder, self._own, self._launchers = folder, {os.getpid()}, launchers
        self._shared = self._asked = False
        self._seen: list[tuple[float, int]] = []
        self.look()

    def look(self) -> None:
        """Record the number of OOM kills, and whether the cgroup is shared; called repeatedly while the job runs."""
        now = time.monotonic()
        while len(self._seen) > 1 and self._seen[1][0] < now - _DYING_SECONDS:
            del self._seen[0]
        self._seen.append((now, self._count()))
        self._shared = self._shared or self._others()

    def asked(self) -> None:
        """Record that the job was asked to end, so a later kill is no evidence of a lack of memory."""
        self._asked = True

    def told(self, code: int) -> dict[str, Any]:
        """Return the entries about memory for the record of the end of a killed job."""
        if self._asked or self._count() <= self._seen[0][1]:
            return {}
        if self._shared:
            hint = (
                "memory ran out, and the kernel killed a process, possibly this job, in a cgroup that the job shares "
                "with other processes"
            )
            return {"said": f"exit code {code}; {hint}"}
        return {"oom": getrusage(RUSAGE_CHILDREN).ru_maxrss * 1024}  # bytes of the largest process

    def _count(self) -> int:
        for name in _COUNTS if self._folder else ():
            with suppress(OSError, ValueError, StopIteration):
                said = (self._folder / name).read_text().splitlines()  # type: ignore[operator]
                return int(next(line.split()[1] for line in said if line.startswith("oom_kill ")))
        return 0

    def _others(self) -> bool:
        """Return whether the cgroup contains a process that this process did not start."""
        if self._folder is None:
            return False
        with suppress(OSError, ValueError):
            there = set(map(int, (self._folder / "cgroup.procs").read_text().split())) - {*self._launchers}
            self._own |= {pid for pid in there - self._own if self._descends(pid)}
            return not there <= self._own
        return True

    def _descends(self, pid: int) -> bool:
        while pid > 1 and pid not in self._own:
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # the process has ended
                return True
        return pid in self._own


def _beat(folder: Path, started: float, begun: float, taken: devices.Taken) -> None:
    """Record the job's running time, in case this process is killed. Changes of the wall clock do not count."""
    at = started + time.monotonic() - begun
    taken.touch()
    with suppress(OSError):  # a disk error must not end the job
        os.utime(folder / "supervisor.lock", (at, at))


def _fork_job(folder: Path, spec: dict[str, Any], start: Start) -> tuple[int, int]:
    """Fork the job's process; return its pid and the descriptor whose first byte starts the job."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # before the fork, so the child loads nothing
    supervisor = os.getpid()
    waiting, release = os.pipe()
    job = os.fork()
    if job == 0:
        try:
            os.close(release)
            os.setpgid(0, 0)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == supervisor and os.read(waiting, 1):
                start(folder, spec)
        finally:
            os._exit(_CANNOT_EXECUTE)
    os.close(waiting)
    with suppress(PermissionError, ProcessLookupError):  # the child also sets the group
        os.setpgid(job, job)
    return job, release


def execute(folder: Path, spec: dict[str, Any]) -> NoReturn:
    """Replace this process with the job, in a new Python interpreter."""
    settle(folder)
    os.execve(sys.executable, command(spec["module"], folder), job_environment(spec["environment"]))


def command(module: str, folder: Path) -> list[str]:
    """Return the command that runs a job in a new Python interpreter."""
    # -P, -s: no imports from the attempt folder or the home; -S: no file of site-packages runs before environments are
    # compared. Compiled files have a separate folder: Python would trust a forged compiled file next to its source
    words = [sys.executable, "-s", "-S", "-P", "-X", f"pycache_prefix={compiled()}"]
    return [*words, str(Path(__file__).with_name("bootstrap.py")), module, str(folder)]


def contain(folder: Path, spec: dict[str, Any]) -> NoReturn:
    """Replace this process with podman, which runs the job in its container."""
    from posttrain.execution.executors.local import containers

    settle(folder)
    containers.become(folder, spec)


def settle(folder: Path) -> None:
    """Read from /dev/null, write to the attempt's log, unblock signals."""
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def job_environment(given: Mapping[str, str], kept: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a job's variables: the given variables, and this process's except those for Python and trackers.

    Args:
        kept: the variables that jobs get from the submitting process; None: this process's variables.
    """
    own = without_trackers(os.environ if kept is None else kept)
    return {name: value for name, value in own.items() if not name.startswith("PYTHON")} | dict(given)


def compiled() -> str:
    """Return the folder of this user's compiled files."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "posttrain", "compiled")


def private(path: str, flags: int) -> int:
    """Open a file that only its owner can access; an opener for `open`."""
    return os.open(path, flags, 0o600)


class Limit:
    """A job's maximum runtime; afterwards the job is terminated, and killed after its grace."""

    def __init__(self, seconds: float, grace: float, begun: float, log: Path) -> None:
        self.over = False
        self._seconds, self._grace, self._begun, self._log = seconds, grace, begun, log

    def enforce(self, job: int) -> None:
        """End the job if its time is over; called repeatedly. The pid of the job is the id of its process group."""
        ran = time.monotonic() - self._begun
        if ran > self._seconds and not self.over:
            self.over = True
            os.kill(job, signal.SIGTERM)
            with suppress(OSError), open(self._log, "a", opener=private) as log:
                log.write(f"the job has reached its maximum runtime of {self._seconds:g} s and is being ended\n")
        elif ran > self._seconds + self._grace:
            os.killpg(job, signal.SIGKILL)


def wait(job: int, result: Path, beat: Callable[[], None], limit: Limit) -> int:
    """Wait for the job, kill its process group, and return the exit code, negative for a signal.

    A job that has written its result must end within `LEAVING_SECONDS`, since its run starts no other job before the
    end.
    """
    ended, since = os.pidfd_open(job), math.inf
    while not select.select([ended], [], [], HEARTBEAT_SECONDS)[0]:
        beat()
        limit.enforce(job)
        since = min(since, time.monotonic()) if result.exists() else math.inf
        if time.monotonic() - since > LEAVING_SECONDS:
            os.killpg(job, signal.SIGKILL)
    os.close(ended)
    os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)  # leaves a zombie, so the group id is not reused
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    with suppress(ProcessLookupError):
        os.killpg(job, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
