"""Runs jobs as processes of this machine, each under a supervisor that outlives the command that launched it.

All state of a job is in its attempt folder (`spec.json`, `supervisor.json`, `supervisor.lock`, `exit.json`), so any
process can observe and kill the job. The kernel guarantees that a supervisor is alive exactly while it holds the lock;
a pid proves nothing.
"""

import errno
import fcntl
import functools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from posttrain.domain.errors import CapacityError, DeadlineError, InfrastructureError, InputError, PosttrainError
from posttrain.domain.jobs import (
    Accepted,
    Capacity,
    Cause,
    Exists,
    JobState,
    LogPage,
    Observation,
    Submission,
)
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.execution import processes
from posttrain.execution.environment import read_log
from posttrain.execution.executors.local import containers
from posttrain.execution.executors.local.devices import FOLDER_VARIABLE, Devices, holders
from posttrain.execution.executors.local.forkserver import ForkServer
from posttrain.execution.executors.local.supervisor import ALREADY_CLAIMED, NO_DEVICE, job_environment, private
from posttrain.store.atomic import create_json, make_folder, read_json, unwritable, write_json
from posttrain.store.attempts import unclaimed

_SUPERVISOR = "posttrain.execution.executors.local.supervisor"
_LAUNCH_SECONDS = 60.0  # allows for a cold start of Python on a busy machine
_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL, for jobs of older versions without a grace period
_KILL_SECONDS = 10.0  # time for the kernel to remove a killed process
_REMOVE_SECONDS = 120.0  # time for podman to remove a container
_POLL_SECONDS = 0.02
_NODE = os.uname().nodename
_ANSWERS = (0, ALREADY_CLAIMED, NO_DEVICE)  # exit codes of a supervisor's start


class LocalExecutor:
    """The `Executor` of a single machine (Linux)."""

    remote: ClassVar[bool] = False
    attests: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True
    avoids: ClassVar[bool] = False

    def __init__(
        self,
        preload: str | None = None,
        devices: Callable[[], Devices] = Devices,
        runs: Path | None = None,
        keep: Callable[[Mapping[str, str]], dict[str, str]] = processes.without_trackers,
        images: bool = False,
    ) -> None:
        """Create an executor; no process is started.

        Args:
            preload: a module that imports the packages of jobs (see `ForkServer`); None: every job imports by itself.
            devices: returns the machine's devices; called once, when a job first needs a device. Empty: jobs share all
                devices.
            runs: the folder that contains the attempt folders, for `list`.
            keep: selects the variables of this process's environment that jobs and their helpers get.
            images: whether jobs that name an image run in podman containers.
        """
        self.name, self.images = "podman" if images else "local", images
        self._keep = keep
        self._runs = runs
        self._forks = ForkServer(preload) if preload else None
        self._machine = functools.cache(devices)

    def submit(self, spec: JobSpec) -> Submission:
        """See `Executor.submit`. The handle is the supervisor's pid. The call never returns `Unknown`."""
        if not os.path.exists("/proc/self/stat"):
            raise InfrastructureError(
                "the local executor needs Linux's /proc, which this machine does not have; run on Linux"
            )
        refuse_elsewhere(spec, self._own(spec), images=self.images)
        folder = self._folder(spec)
        make_folder(folder)
        deadline, ours = time.monotonic() + _LAUNCH_SECONDS, False
        while True:
            claim = read_json(folder / "supervisor.json")
            if claim is not None:
                return Accepted(str(claim["pid"])) if ours else Exists(str(claim["pid"]))
            if time.monotonic() >= deadline:
                _withdraw(folder, _too_late(spec))
                continue
            code = self._start(folder, spec)
            if code == NO_DEVICE:
                raise CapacityError(self.capacity().lack(spec.devices) or "its devices were taken a moment ago")
            ours = code == 0
            if code == ALREADY_CLAIMED:
                time.sleep(_POLL_SECONDS)  # another supervisor holds the lock but has not written its claim yet

    def capacity(self) -> Capacity:
        """See `Executor.capacity`: the devices of this machine, with holders from any workspace."""
        machine = self._machine()
        try:
            if machine.names and not os.access(machine.folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return Capacity(len(machine.names), holders(machine))
        except OSError as error:
            raise InfrastructureError(
                f"the device locks in {machine.folder} cannot be used: {error.strerror or error}; "
                f"make the folder writable, or set {FOLDER_VARIABLE} to another folder"
            ) from error

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        """See `Executor.observe`."""
        return [_observe(self._folder(job)) for job in jobs]

    def trouble(self) -> str:
        """Return why jobs cannot run in images; empty: jobs can, or the executor is not configured for images."""
        return containers.trouble() if self.images else ""

    def kill(self, job: JobRef) -> None:
        """See `Executor.kill`; returns when the job has ended."""
        folder = self._folder(job)
        spec = read_json(folder / "spec.json") or {}
        most = _REMOVE_SECONDS if containers.SPEC in spec else _KILL_SECONDS
        for act, seconds in (
            (_terminate, float(spec.get("grace_seconds", _GRACE_SECONDS))),
            (_kill_job, most),
            (_kill_supervisor, most),
        ):
            act(folder, read_json(folder / "supervisor.json") or {})
            if _poll(lambda: _observe(folder).gone, seconds):
                return
        raise DeadlineError(f"job {job.name} still runs after SIGKILL; check its process, then try again")

    def list(self, prefix: str) -> list[Listed]:
        """See `Executor.list`."""
        found = []
        for claim in self._runs.glob("*/*/*/supervisor.json") if self._runs else ():
            folder = claim.parent
            if (folder / "exit.json").is_file():  # a cheap check for the many ended jobs
                continue
            try:
                asked = read_json(folder / "spec.json") or {}
                name = str(asked.get("name", ""))
                if name and name.startswith(prefix) and _observe(folder).live:
                    found.append(Listed(name, asked.get("labels") or {}, int(asked.get("epoch", 0))))
            except (PosttrainError, OSError, AttributeError, TypeError, ValueError):
                continue  # a damaged folder, or a copy without its locks, does not affect the others
        return sorted(found, key=lambda job: job.name)

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        """See `Executor.logs`."""
        return read_log(self._folder(job) / "log.txt", cursor)

    def _folder(self, job: JobRef) -> Path:
        return job.folder_below(self._runs or Path()).absolute()

    def _own(self, spec: JobSpec) -> dict[str, str]:
        """Return the variables that a job gets from this process: those for all jobs, and the secrets in the spec."""
        named = {name: os.environ[name] for name in spec.secrets if name in os.environ}
        return self._keep(os.environ) | processes.without_trackers(named)

    def _start(self, folder: Path, spec: JobSpec) -> int:
        machine = self._machine() if spec.devices else Devices()
        reserved = {"machine": asdict(machine), "devices": spec.devices if machine.names else 0}
        boxed = {containers.SPEC: containers.contained(spec, folder)} if spec.image else {}
        with unclaimed(folder) as free:
            if not free:  # replacing files that a running container covers would expose them
                return ALREADY_CLAIMED
            write_json(folder / "spec.json", {**spec.to_json(), "folder": str(folder), **reserved, **boxed})
        code, own = None, self._own(spec)
        if boxed:
            own = containers.variables(os.environ) | own
        elif self._forks is not None:
            code = self._forks.start(folder, job_environment(spec.environment, own), _LAUNCH_SECONDS)
        return code if code in _ANSWERS else _start_supervisor(folder, spec, own)


def refuse_elsewhere(spec: JobSpec, own: Mapping[str, str] | None = None, *, images: bool = False) -> None:
    """Reject specs that one machine without a scheduler cannot meet.

    Args:
        own: the environment that jobs get; None: this process's environment.
        images: whether jobs can run in images.

    Raises:
        InputError: the spec requires several pods, more resources than the machine has, or a different environment; or
            it names a secret that is not set.
    """
    group = spec.gang[0]
    here = "the local executor runs one pod on this machine, in this environment"
    wanted = {
        f"{len(spec.gang)} groups of pods": len(spec.gang) > 1,
        f"{group.min} to {group.max} pods": (group.min, group.max) != (1, 1),
        f"{group.kind} as its kind of GPU": bool(group.kind),
        f"{group.topology} as its topology": bool(group.topology),
        f"image {spec.image}": bool(spec.image) and not images,
        "a queue of a cluster": bool(spec.options or spec.python or spec.avoid or spec.time_limit),
    }
    if what := next((what for what, asked in wanted.items() if asked), ""):
        raise InputError(f"job {spec.name} requests {what}; {here}: request less, or use another executor")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for what, needed, has in (("cpus", group.cpus, os.cpu_count() or 1), ("bytes of memory", group.memory, memory)):
        if needed > has:
            raise InputError(f"job {spec.name} requests {needed} {what}, but this machine has {has}; request less")
    if lacking := [name for name in spec.secrets if name not in job_environment({}, own)]:
        raise InputError(
            f"job {spec.name} needs {', '.join(lacking)} in the environment of the process that drives its run, "
            "where it is not set (or is a variable that jobs never get, such as a tracker's or Python's); export it"
        )


def _observe(folder: Path) -> Observation:
    claim = read_json(folder / "supervisor.json")
    if claim is None:
        return Observation(JobState.UNKNOWN)
    seen = functools.partial(Observation, handle=str(claim["pid"]), node=_NODE)
    if _supervised(folder):
        state = JobState.RUNNING if "job_pid" in claim else JobState.STARTING
        return seen(state, seconds=_seconds(folder, None))
    box = (read_json(folder / "spec.json") or {}).get(containers.SPEC)
    record = _ended(folder, box)  # read after the lock is free: the record is complete or never will be
    seconds = _seconds(folder, record)
    if record is not None:
        code, cause = int(record["exit_code"]), Cause.OVERTIME if record.get("overtime") else None
        said = str(record.get("said", ""))  # the message about a container that podman did not start
        if "oom" in record:
            cause, most = Cause.OUT_OF_MEMORY, int(record["oom"]) / 2**30
            said = f"the kernel killed it, exit code {code}; its largest process held {most:.2f} GiB"
        return seen(JobState.EXITED, code, said, cause=cause, seconds=seconds)
    gone, job = "its supervisor has ended", _job(folder, read_json(folder / "supervisor.json"))
    if job is not None and not _poll(lambda: processes.kill_group(*job), _KILL_SECONDS):
        resists = f"{gone} and process {job[0]} is still running after SIGKILL"
        return seen(JobState.RUNNING, detail=resists, seconds=seconds)
    if box and not containers.is_copy(folder, box):
        if not containers.gone(box):
            resists = f"{gone} and podman does not report that container {box['name']} has ended; podman rm -f it"
            return seen(JobState.RUNNING, detail=resists, seconds=seconds)
        containers.forget(folder)
    return seen(JobState.LOST, detail=gone, seconds=seconds)


def _ended(folder: Path, box: Mapping[str, Any] | None) -> Any:
    """Return the supervisor's record of the end; a file forged by a job in a container lacks the secret `word`."""
    if not box:
        return read_json(folder / "exit.json")
    with suppress(PosttrainError, OSError):
        record = read_json(folder / "exit.json")
        if isinstance(record, dict) and record.get("word") == box["word"]:
            return record
    return None


def _seconds(folder: Path, ended: Any) -> float | None:
    """Return a job's seconds from the supervisor's record of the end, else from its last heartbeat."""
    claim = read_json(folder / "supervisor.json")
    if not claim or "started_at" not in claim:
        return None
    if ended is not None and "seconds" in ended:
        return float(ended["seconds"])
    beaten = (folder / "supervisor.lock").stat().st_mtime - float(claim["started_at"])
    return max(0.0, beaten) + processes.HEARTBEAT_SECONDS  # the supervisor may have died just before its next heartbeat


def _start_supervisor(folder: Path, spec: JobSpec, own: dict[str, str]) -> int:
    """Start a supervisor, wait until a supervisor has claimed the attempt, and return the exit code of the start.

    Raises:
        InfrastructureError: no supervisor has claimed the attempt, and none will.
    """
    command = [sys.executable, "-s", "-P", "-m", _SUPERVISOR, str(folder), str(folder / "spec.json")]
    try:
        with open(folder / "log.txt", "ab", opener=private) as log:
            # a separate session from the start, so Ctrl-C at the terminal does not reach the job
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=own,
            )  # fmt: skip
            code = process.wait(_LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # the supervisor that it forked has its own session and survives
        process.wait()
        _withdraw(folder, _too_late(spec))
        return ALREADY_CLAIMED
    except OSError as error:
        raise unwritable(folder, error) from error
    if code < 0:  # the process was killed, but the supervisor that it forked may claim the attempt
        _withdraw(folder, f"the supervisor of {spec.name} was killed while it started (signal {-code})")
        return ALREADY_CLAIMED
    if code not in _ANSWERS:
        raise InfrastructureError(
            f"the supervisor of {spec.name} failed with exit code {code}; see {folder / 'log.txt'}"
        )
    return code


def _withdraw(folder: Path, why: str) -> None:
    """Write a claim without a process, so a late supervisor starts no job; return if a supervisor claimed earlier.

    Raises:
        InfrastructureError: no supervisor has claimed the attempt, and from now on none can.
    """
    if create_json(folder / "supervisor.json", {"pid": os.getpid(), "identity": ""}):  # an identity that no process has
        raise InfrastructureError(why)


def _too_late(job: JobRef) -> str:
    return (
        f"the supervisor of {job.name} did not start within {_LAUNCH_SECONDS:g} s; "
        "try again when the machine is less busy"
    )


def _supervised(folder: Path) -> bool:
    """Return whether a supervisor holds the attempt; call it after the claim, when no other process needs the lock."""
    try:
        lock = os.open(folder / "supervisor.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _job(folder: Path, claim: Any) -> tuple[int, str] | None:
    """Return pid and identity of the job that runs in the folder; None: no job, or the folder is a copy."""
    if not claim or "job_pid" not in claim or _of_another(folder, claim["job_pid"]):
        return None
    return (claim["job_pid"], claim["job_identity"])


def _of_another(folder: Path, pid: int) -> bool:
    """Return whether a process runs in another folder that still exists, of which this folder is then a copy.

    Supervisor and job never change their working folder; a moved folder is the same folder.
    """
    try:
        place = os.stat(f"/proc/{pid}/cwd")
        return place.st_nlink > 0 and stat.S_ISDIR(place.st_mode) and not os.path.samestat(place, os.stat(folder))
    except OSError:  # the process has ended, or another user has its pid
        return False


def _terminate(folder: Path, claim: Any) -> None:
    if job := _job(folder, claim):
        processes.send(*job, signal.SIGTERM)


def _kill_job(folder: Path, claim: Any) -> None:
    if job := _job(folder, claim):
        processes.kill_group(*job)


def _kill_supervisor(folder: Path, claim: Any) -> None:
    if claim and not _of_another(folder, claim["pid"]):
        processes.send(claim["pid"], claim["identity"], signal.SIGKILL)


def _poll(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
