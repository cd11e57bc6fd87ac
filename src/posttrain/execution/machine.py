"""Facts about this machine: the resources that a placement can request, and the conditions for ranks to connect.

A placement can request cores, memory and GPUs; these resources are read without torch. The conditions for ranks to
connect are read here and judged in `preflight.cluster_checks`. Queries that load torch or ray run in another process,
with a deadline.
"""

import glob
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from posttrain.domain.errors import InputError
from posttrain.execution.executors.local.devices import Devices
from posttrain.execution.trainers.native import gpu_visible
from posttrain.planner.residency import ACCELERATOR
from posttrain.planner.sizes import Room

DEVICES_VARIABLE = "POSTTRAIN_DEVICES"
_ASK_SECONDS = 60.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_CUDA_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_VENDOR = re.compile(r"NVIDIA|TESLA|GEFORCE|QUADRO|AMD|INSTINCT|RADEON|RTX|GTX|PRO|GRAPHICS|DEVICE")
REFUSED_TOKEN = "the cluster refuses this machine's authentication token"
PACKAGES = ("posttrain", "torch", "transformers", "safetensors", "numpy", "ray")
_RESOLVE_SECONDS = 20.0
_SMI_SECONDS = 60.0
_PROBE_SECONDS = 120.0
_RAY_SECONDS = 60.0
_TORCH_PROBE = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps([n, torch.cuda.get_device_name(0) if n else '']))"
)
_RAY_PROBE = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps([ray.__version__, len(nodes), ray.cluster_resources()]))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: `Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)`."""

    name: str = ""  # empty: `nvidia-smi` did not answer
    memory: int | None = None  # bytes
    id: str = ""  # GPU-5ebe…, the same in every process; empty: `nvidia-smi` did not answer

    @property
    def kind(self) -> str:
        """`H100` for `NVIDIA H100 80GB HBM3`, as Ray names kinds; empty if the name is unknown."""
        words = re.split(r"[\s-]+", self.name.upper())
        return next((word for word in words if word and not _VENDOR.fullmatch(word)), "")


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that a job finds if it is started here."""

    cpus: int
    memory: int | None = None  # bytes that the processes of this machine (or container) share
    gpus: tuple[Gpu, ...] = ()

    def resources(self) -> dict[str, float]:
        """Return the resources in Ray's form for a cluster."""
        kinds = {f"{ACCELERATOR}{gpu.kind}": 1.0 for gpu in self.gpus if gpu.kind}
        return {"CPU": float(self.cpus), "GPU": float(len(self.gpus)), **kinds}

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of the smallest GPU; None: no GPU, or unknown."""
        sizes = [gpu.memory for gpu in self.gpus]
        return min((size for size in sizes if size is not None), default=None) if None not in sizes else None


def this_machine() -> Machine:
    """Read this machine's resources. Runs `nvidia-smi` only if a device file shows a GPU."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cpus, _memory(), visible(_asked(), os.environ)[: allowed()] if gpu_visible() else ())


def room_of(machine: Machine) -> Room:
    """Return the memory from which the sizes of a stage are chosen."""
    return Room(machine.gpu_memory, machine.memory, bool(machine.gpus))


def allowed() -> int | None:
    """Return how many devices POSTTRAIN_DEVICES allows jobs to have; None: all.

    Raises:
        InputError: the value of POSTTRAIN_DEVICES is not a number of devices.
    """
    given = os.environ.get(DEVICES_VARIABLE)
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or not int(given):
        raise InputError(
            f"{DEVICES_VARIABLE} must be a number of devices, at least 1, got {given!r}; "
            "to compute on CPUs, set runtime.device: cpu"
        )
    return int(given)


def local_devices() -> Devices:
    """Return the devices for jobs of this machine, each for one job at a time; empty without a GPU.

    POSTTRAIN_DEVICES limits the number of devices; without a GPU, that many devices are simulated, so that sharing can
    be tried anywhere.

    Raises:
        InputError: POSTTRAIN_DEVICES is not a number of devices.
    """
    bound = allowed()
    if not gpu_visible():
        return Devices(tuple(str(number) for number in range(bound or 0)))
    if not any(glob.glob(pattern) for pattern in _CUDA_FILES):
        return Devices(("0",), variable="")  # the number of GPUs is unknown: jobs take the first, one at a time
    gpus = visible(_asked(), os.environ)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = map(str, range(len(gpus))) if chosen is None else (word.strip() for word in chosen.split(","))
    return Devices(tuple(gpu.id or word for gpu, word in zip(gpus, words, strict=False))[:bound])


def visible(answer: str | None, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a job would see.

    Args:
        answer: the output of `nvidia-smi`; None: there was no output, so device files are counted.
        environment: the variables; CUDA_VISIBLE_DEVICES selects GPUs by index or by (a prefix of) a UUID.
    """
    if answer is None:
        found = {str(index): Gpu() for index in range(len(glob.glob("/dev/nvidia[0-9]*")) or 1)}
    else:
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 3]
        sizes = {text: int(text) * 2**20 for *_, text in rows if text.isdigit()}
        found = {f"{index} {uuid}": Gpu(name, sizes.get(size), uuid) for index, uuid, name, size in rows}
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return tuple(found.values()) if chosen is None else tuple(_chosen(chosen.split(","), found))


def _chosen(words: Iterable[str], found: Mapping[str, Gpu]) -> Iterable[Gpu]:
    """Yield the selected GPUs; as in CUDA, the list ends at the first missing device."""
    for word in words:
        named = word.strip()
        match = next((g for key, g in found.items() if named and _is_named(key, named)), None)
        if match is None and not named.startswith("MIG-"):
            return
        yield match or Gpu()


def _is_named(key: str, word: str) -> bool:
    index, _, uuid = key.partition(" ")
    return word == index or (word.startswith("GPU-") and uuid.startswith(word))


def _asked() -> str | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution: `Package("2.13.0", ">=3.10", ("numpy>=1.26",))`."""

    version: str
    python: str = ""  # the versions of Python that the distribution declares
    requires: tuple[str, ...] = ()  # requirements, with their markers


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: `Interface("eth0", up=True, addresses=("192.0.2.2",))`."""

    name: str
    up: bool
    addresses: tuple[str, ...]  # IPv4 and IPv6

    @property
    def loopback(self) -> bool:
        """Whether the interface leads only to this machine."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)


@dataclass(frozen=True, slots=True)
class Gpus:
    """Facts about NVIDIA devices that are read without torch, and the devices that torch sees, if it was queried."""

    files: int = 0  # device files /dev/nvidia0 …
    listed: int | None = None  # number of devices that nvidia-smi lists; None: nvidia-smi is not installed
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    torch: int | None = None  # number of devices that torch sees; None: it was not queried or did not answer
    torch_name: str = ""  # name of the first device
    torch_trouble: str = ""  # why torch did not answer


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; None: unlimited."""

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    rdma: bool  # whether there is a device that needs locked memory


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The facts that the cluster checks read."""

    python: str
    packages: Mapping[str, Package]  # without missing packages
    environ: Mapping[str, str]
    host: str
    resolved: tuple[str, ...]  # addresses of the host name; may be empty
    interfaces: tuple[Interface, ...]
    listening: Mapping[int, str] | None  # TCP port → process; None: not permitted to read
    local_ports: tuple[int, int] | None  # range of the ports of outgoing connections
    memory: int  # bytes, within a container's limit
    shared: tuple[int, int] | None  # size and free space of /dev/shm, in bytes
    gpus: Gpus = field(default_factory=Gpus)
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """The answer of an existing cluster, or why there was no answer."""

    version: str = ""
    nodes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    trouble: str = ""


def is_loopback(address: str) -> bool:
    """Return whether an IP address is the machine itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def read_machine(*, probe: bool = False) -> ClusterFacts:
    """Return the facts of this machine.

    Args:
        probe: whether to also query torch, in another process, which takes seconds.
    """
    host = socket.gethostname()
    usage = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return ClusterFacts(
        python=platform.python_version(),
        packages=_packages(),
        environ=dict(os.environ),
        host=host,
        resolved=_resolve(host),
        interfaces=_interfaces(),
        listening=_listening(),
        local_ports=_local_ports(),
        memory=_memory(),
        shared=(usage.total, usage.free) if usage else None,
        gpus=_gpus(probe),
        limits=_limits(),
    )


def ask_ray(address: str) -> RayAnswer:
    """Return a running Ray cluster's answer to a brief join, in another process; Ray rejects other versions itself."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RAY_PROBE, address],
            capture_output=True,
            text=True,
            timeout=_RAY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return RayAnswer(trouble=f"no answer within {_RAY_SECONDS:g} s")
    return ray_answer(done.returncode, done.stdout, done.stderr)


def ray_answer(returncode: int, stdout: str, stderr: str) -> RayAnswer:
    """Parse the output of the process that queried Ray."""
    if "InvalidAuthToken" in stderr:  # Ray's own exception only reports a failed connection
        return RayAnswer(trouble=REFUSED_TOKEN)
    if returncode:
        return RayAnswer(trouble=_last_words(stderr) or f"ray ended with {returncode}")
    version, nodes, resources = json.loads(stdout.splitlines()[-1])
    return RayAnswer(version, nodes, resources)


def _last_words(stderr: str) -> str:
    """Return an exception's message on one line: the text from the last line that starts with `SomeError:`."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)]
    return " ".join(" ".join(lines[starts[-1] :] if starts else lines[-1:]).split())


def _packages() -> dict[str, Package]:
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            about = metadata.metadata(name)
            python = str(about.json.get("requires_python", ""))
            found[name] = Package(about["Version"], python, tuple(metadata.requires(name) or ()))
    return found


def _resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of a host name, in the resolver's order, without waiting for a broken resolver."""
    answers: list[str] = []

    def ask() -> None:
        with suppress(OSError):
            answers.extend(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return tuple(dict.fromkeys(answers))


def _interfaces() -> tuple[Interface, ...]:
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name, name in states and states[name].isup, tuple(a.address for a in addresses if a.family in families)
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def _listening() -> dict[int, str] | None:
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    return {c.laddr.port: _process(c.pid) for c in connections if c.status == psutil.CONN_LISTEN and c.laddr}


def _process(pid: int | None) -> str:
    if pid is None:
        return "another user's process"
    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


def _local_ports() -> tuple[int, int] | None:
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _memory() -> int:
    """Return the bytes of memory of this machine, or of the container if the container has fewer."""
    limits = [int(text) for text in map(_read, _MEMORY_LIMITS) if text.isdigit()]  # no file: ""; no limit: "max"
    return min([psutil.virtual_memory().total, *limits])


def _gpus(probe: bool) -> Gpus:
    files = sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit())
    told = _torch_sees() if probe else ()
    return Gpus(files, _listed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"), *told)


def _listed_gpus() -> int | None:
    if not shutil.which("nvidia-smi"):
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def _torch_sees() -> tuple[int | None, str, str]:
    """Return the number of devices, the name of the first device, and why torch did not answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, "", f"torch did not start within {_PROBE_SECONDS:g} s"
    if done.returncode:
        return None, "", _last_words(done.stderr) or f"torch ended with {done.returncode}"
    count, name = json.loads(done.stdout.splitlines()[-1])
    return count, name, ""


def _limits() -> Limits:
    def of(kind: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(kind)
        return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)

    rdma = Path("/sys/class/infiniband")
    return Limits(*of(resource.RLIMIT_NOFILE), of(resource.RLIMIT_MEMLOCK)[0], rdma.is_dir() and any(rdma.iterdir()))
