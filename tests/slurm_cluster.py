"""A Slurm cluster of our own on loopback: one controller and two nodes of one machine, each with two fake GPUs.

`with Cluster() as cluster:` starts munge, slurmctld and two slurmd in a temporary folder; the end stops them all. The
programs need root, as slurmd does. `low` jobs give way to `high` jobs: they are requeued.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NODES = ("ada", "bob")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "munged")
_PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
_PATIENCE = 60.0  # seconds: a start takes one
_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
MinJobAge={age}
KillWait=3
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=ada NodeHostname={host} NodeAddr=127.0.0.1 Port={ada} CPUs=4 RealMemory=2000 Gres=gpu:h100:2 State=UNKNOWN
NodeName=bob NodeHostname={host} NodeAddr=127.0.0.1 Port={bob} CPUs=4 RealMemory=2000 Gres=gpu:h100:2 State=UNKNOWN
PartitionName=low Nodes=ada,bob Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5 MaxTime=60 State=UP
PartitionName=high Nodes=ada,bob PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""
_DEVICES = """
NodeName=ada Name=gpu Type=h100 File=/dev/tty[0-1]
NodeName=bob Name=gpu Type=h100 File=/dev/tty[2-3]
"""


class MissingError(Exception):
    """Slurm is not installed, or this user may not start it."""


def check() -> None:
    """Check that Slurm can be started here.

    Raises:
        MissingError: it cannot.
    """
    missing = [name for name in _PROGRAMS if _program(name) is None]
    if missing or os.geteuid() != 0:
        why = f"lacks {', '.join(missing)}" if missing else "needs root"
        raise MissingError(f"make slurm {why}; apt-get install -y --no-install-recommends {_PACKAGES}, as root")


class Cluster:
    """One cluster.

    Args:
        age: seconds for which the controller keeps an ended job.
    """

    def __init__(self, age: int = 600) -> None:
        check()
        self._age = age
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        for name in ("munge", "state"):
            (self.folder / name).mkdir()
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start_munge()
            self.start("slurmctld")
            for node in NODES:
                self.start(node)
            self._wait_for_nodes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str) -> None:
        """Start the controller (`slurmctld`) or the daemon of a node."""
        path = str(_program("slurmctld" if name == "slurmctld" else "slurmd"))
        node = [] if name == "slurmctld" else ["-N", name]
        self._run(name, [path, "-D", "-f", self.environment["SLURM_CONF"], *node])

    def stop(self, name: str, how: int = signal.SIGKILL) -> None:
        """End the controller or the daemon of a node."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(how)
            process.wait(_PATIENCE)

    def lose(self, node: str) -> None:
        """Let a node fail: its daemon and everything that runs under it are killed."""
        self.stop(node)
        for pid in _found("-f", "slurmstepd"):
            if self._of_node(pid, node):
                for one in [*_descendants(pid), pid]:
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)

    def ask(self, *words: str) -> str:
        """Return the output of a Slurm command."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=_PATIENCE, env={**os.environ, **self.environment}
        )
        return done.stdout.strip()

    def close(self) -> None:
        """Stop everything and remove the folder."""
        if "slurmctld" in self._processes:
            subprocess.run(["scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root"], check=False,
                           env={**os.environ, **self.environment}, capture_output=True)  # fmt: skip
        for name in NODES:
            self.lose(name)
        for name in [*self._processes]:
            self.stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of_node(self, pid: int, node: str) -> bool:
        try:
            return f"/spool-{node}".encode() in Path(f"/proc/{pid}/environ").read_bytes() or any(
                f"/spool-{node}" in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()
            )
        except OSError:
            return False

    def _configure(self) -> None:
        ports = dict(zip(("port", *NODES), free_ports(3), strict=True))
        words = {"host": socket.gethostname().partition(".")[0], "folder": self.folder, "age": self._age, **ports}
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(**words))
        (self.folder / "gres.conf").write_text(_DEVICES)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        (place / "key").write_bytes(os.urandom(1024))
        (place / "key").chmod(0o400)
        words = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={place / name}" for option, name in words.items()]
        self._run("munged", [str(_program("munged")), "--foreground", "--force", *options])
        _wait((place / "socket").exists, (self.folder / "munged.out").read_text)

    def _run(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                command, stdout=out, stderr=out, cwd="/", env={"PATH": os.environ["PATH"], **self.environment}
            )

    def _wait_for_nodes(self) -> None:
        def idle() -> bool:
            done = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format", "%N %T"], capture_output=True, text=True, check=False,
                env={**os.environ, **self.environment},
            )  # fmt: skip
            return {f"{node} idle" for node in NODES} <= set(done.stdout.split("\n"))

        _wait(idle, lambda: "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log")))


def _found(*words: str) -> list[int]:
    done = subprocess.run(["pgrep", *words], capture_output=True, check=False)
    return list(map(int, done.stdout.split()))


def _descendants(pid: int) -> list[int]:
    return [one for child in _found("-P", str(pid)) for one in (*_descendants(child), child)]


def _wait(done: Callable[[], bool], why: Callable[[], str]) -> None:
    until = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > until:
            raise RuntimeError(f"Slurm did not start: {why()[-3000:]}")
        time.sleep(0.1)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def free_ports(many: int) -> list[int]:
    """Return ports on loopback that nothing uses now."""
    found = [socket.socket() for _ in range(many)]
    for one in found:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in found]
    for one in found:
        one.close()
    return ports


if __name__ == "__main__":
    try:
        check()
    except MissingError as error:
        sys.exit(str(error))
