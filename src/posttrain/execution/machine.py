"""What this machine has that a placement can ask for: cores, memory, GPUs. Asked without torch."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from posttrain.domain.errors import InputError
from posttrain.execution.executors.local.devices import Devices
from posttrain.execution.trainers.native import gpu_visible
from posttrain.planner.feasibility import ACCELERATOR
from posttrain.planner.sizes import Room

DEVICES_VARIABLE = "POSTTRAIN_DEVICES"
_ASK_SECONDS = 60.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_CUDA_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_VENDOR = re.compile(r"NVIDIA|TESLA|GEFORCE|QUADRO|AMD|INSTINCT|RADEON|RTX|GTX|PRO|GRAPHICS|DEVICE")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: `Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)`."""

    name: str = ""  # empty: nobody could be asked
    memory: int | None = None  # bytes
    id: str = ""  # GPU-5ebe…, the same in every process; empty: nobody could be asked

    @property
    def kind(self) -> str:
        """`H100` of `NVIDIA H100 80GB HBM3`, as Ray names kinds; empty when the name is not known."""
        words = re.split(r"[\s-]+", self.name.upper())
        return next((word for word in words if word and not _VENDOR.fullmatch(word)), "")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a job started from here would find."""

    cpus: int
    memory: int | None = None  # bytes that the processes of this machine (or container) share
    gpus: tuple[Gpu, ...] = ()

    def resources(self) -> dict[str, float]:
        """In the form in which Ray counts a cluster's."""
        kinds = {f"{ACCELERATOR}{gpu.kind}": 1.0 for gpu in self.gpus if gpu.kind}
        return {"CPU": float(self.cpus), "GPU": float(len(self.gpus)), **kinds}

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of the smallest GPU; None without one, or when it is not known."""
        sizes = [gpu.memory for gpu in self.gpus]
        return min((size for size in sizes if size is not None), default=None) if None not in sizes else None


def this_machine() -> Machine:
    """Look around. Asks `nvidia-smi` only where a device file says that there is a GPU."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [int(text) for text in map(_read, _MEMORY_LIMITS) if text.isdigit()]
    gpus = visible(_asked(), os.environ)[: allowed()] if gpu_visible() else ()
    return Machine(cpus, min([psutil.virtual_memory().total, *limits]), gpus)


def room_of(machine: Machine) -> Room:
    """What the sizes of a stage are chosen from."""
    return Room(machine.gpu_memory, machine.memory, bool(machine.gpus))


def allowed() -> int | None:
    """How many devices POSTTRAIN_DEVICES allows jobs to have; None: all that are there.

    Raises:
        InputError: it is no number of devices.
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
    """The devices that jobs of this machine are given, each to one at a time; none without a GPU.

    POSTTRAIN_DEVICES bounds them; where there is no GPU it pretends so many, so that sharing can be tried anywhere.

    Raises:
        InputError: POSTTRAIN_DEVICES is no number of devices.
    """
    bound = allowed()
    if not gpu_visible():
        return Devices(tuple(str(number) for number in range(bound or 0)))
    if not any(glob.glob(pattern) for pattern in _CUDA_FILES):
        return Devices(("0",), variable="")  # nobody tells how many: jobs take the first, one at a time
    gpus = visible(_asked(), os.environ)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = map(str, range(len(gpus))) if chosen is None else (word.strip() for word in chosen.split(","))
    return Devices(tuple(gpu.id or word for gpu, word in zip(gpus, words, strict=False))[:bound])


def visible(answer: str | None, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a job would see.

    Args:
        answer: of `nvidia-smi`; None: it could not be asked, so device files are counted.
        environment: whose CUDA_VISIBLE_DEVICES chooses among them, by index or by (the beginning of) a UUID.
    """
    if answer is None:
        files = len(glob.glob("/dev/nvidia[0-9]*")) or 1
        found = {str(index): Gpu() for index in range(files)}
    else:
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 3]
        found = {f"{index} {uuid}": Gpu(name, _mebibytes(size), uuid) for index, uuid, name, size in rows}
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return tuple(found.values()) if chosen is None else tuple(_chosen(chosen.split(","), found))


def _chosen(words: Iterable[str], found: Mapping[str, Gpu]) -> Iterable[Gpu]:
    """As CUDA reads the list: it ends at the first device that is not there."""
    for word in words:
        named = word.strip()
        match = next((g for key, g in found.items() if named and _is_named(key, named)), None)
        if match is None and not named.startswith("MIG-"):
            return
        yield match or Gpu()


def _is_named(key: str, word: str) -> bool:
    index, _, uuid = key.partition(" ")
    return word == index or (word.startswith("GPU-") and uuid.startswith(word))


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


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
