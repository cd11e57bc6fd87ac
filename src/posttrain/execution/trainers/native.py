"""The native trainer: Posttrain's own engine, launched as a process, never imported here."""

from __future__ import annotations

import functools
import glob
import os
import platform
import re
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ValidationError

from posttrain.domain.canonical import digest_files, digest_json
from posttrain.domain.engines import refuse_unfit
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobCommand, JobOrder, JobResult
from posttrain.domain.kinds import (
    OWN,
    StageContract,
    installed_kind,
    kind_names,
    kind_of,
    refuse_malformed,
)
from posttrain.domain.placement import COLLOCATED, Placement
from posttrain.domain.rewards import JUDGES
from posttrain.domain.roles import SERVED
from posttrain.domain.validation import explain, unknown_kind, validated
from posttrain.store.attempts import AttemptFolder

if TYPE_CHECKING:
    from posttrain.engine.config import StageConfig

# Model and reward sources enter by digest; these other sources and libraries also decide results.
_DECIDING_ROOMS = (
    *("engine", "jobs", "sandbox", "data/files.py", "data/rows.py", "foreign/evaluations.py"),
    *("serving/answers.py", "serving/texts.py", "serving/wire.py"),
    *("domain/canonical.py", "domain/engines.py", "domain/kinds.py", "domain/placement.py", "domain/rendering.py"),
    *("domain/rewards.py", "domain/roles.py", "domain/adapters.py", "domain/harnesses.py"),
    *("pacing/admission.py", "pacing/balance.py"),
    *("planner/residency.py", "planner/shape.py", "planner/sizes.py"),
)
# torch's version names its build (2.13.0+cpu, +cu130); jinja2 renders chat templates, pyarrow reads
# Parquet rows, regex reads answers, peft computes adapters.
_DECIDING_LIBRARIES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "jinja2",
    "pyarrow",
    "regex",
    "peft",
)
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
_CHOSEN_BY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_CHOOSES = re.compile(r"\d|GPU-|MIG-")  # the start of a list with at least one visible device


class NativeTrainer:
    """Compiles stages to `python -m posttrain.jobs.…`."""

    name: ClassVar[str] = "native"

    def code_digest(self) -> str:
        """Return the digest of the engine's sources, its libraries' versions, and the platform."""
        return digest_json({**_sources(), "platform": _platform()})

    def check(self, kind: str, params: Mapping[str, Any]) -> StageContract:
        """Validate and normalise parameters; slots replace the names of inputs, so names do not affect cache keys.

        Raises:
            InputError: a kind or parameter is unknown, a value is out of range, or the stage lacks a placed role.
        """
        from posttrain.engine.config import config_class  # takes 60 ms, and most commands check no stage

        model = config_class(kind, params)
        if model is None:
            return _installed_contract(kind, params)
        found = installed_kind(kind)
        with found.plugin.calling("its parameters") if found else nullcontext():
            return self._contract(kind, params, model)

    def _contract(self, kind: str, params: Mapping[str, Any], model: type[StageConfig]) -> StageContract:
        config: StageConfig = validated(model, dict(params), kind)
        load = config.load(kind)
        for field, (name, needs) in config.engines().items():
            refuse_unfit(field, name, needs)
        return config.contract(_name_by_slot(config), load)

    def compile(self, order: JobOrder) -> JobCommand:
        """Return the process to launch. OpenMP is configured before torch is imported (spin-waiting is 9x slower)."""
        kind = kind_of(order.kind)
        if not kind.module:
            raise InputError(f"kind {order.kind!r} must be installed; install its package")
        threads = str(order.params.get("runtime", {}).get("threads", 1))
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        return JobCommand(kind.module, environment, self.devices(order.kind, order.params))

    def devices(self, kind: str, params: Mapping[str, Any]) -> int:
        """Return 1 for a single process, else the number of GPUs of the stage's pools.

        The number is 0 for a stage on a named cluster or on CPUs, or of an installed kind without `runtime.device`.
        """
        runtime = params.get("runtime") or {}
        unasked = kind not in OWN and "device" not in runtime  # the needs of an installed kind are unknown
        if unasked or kind_of(kind).from_nothing or runtime.get("device") == "cpu" or runtime.get("ray_address"):
            return 0
        placement = Placement.model_validate(params.get("placement", COLLOCATED))
        return 1 if placement.is_inline else sum(pool.resources.gpus for pool in placement.pools().values())

    def collect(self, attempt: AttemptFolder) -> JobResult | None:
        """Return the result that the job wrote; None: there is no result yet."""
        return attempt.read_result()


def _installed_contract(kind: str, params: Mapping[str, Any]) -> StageContract:
    """Return the contract of a stage whose kind an installed package defines.

    Raises:
        InputError: no package defines the kind, or the package raises an error or returns an invalid contract.
    """
    found = installed_kind(kind)
    if found is None:
        raise InputError(f"kind: {unknown_kind(kind, kind_names())}")
    with found.plugin.calling("its contract"):
        try:
            contract = found.check(params)
        except ValidationError as error:
            raise explain(error, kind, BaseModel) from error
    refuse_malformed(contract, str(found.plugin))
    if lacks := [name for name, form in found.kind.outputs.items() if contract.outputs.get(name) != form]:
        raise InputError(f"{found.plugin}: its contract must declare the output {', '.join(lacks)} in the kind's form")
    return contract


@functools.cache
def _sources() -> dict[str, Any]:
    found = find_spec("posttrain")
    if found is None or not found.submodule_search_locations:
        raise InputError("posttrain: is not an installed package, so its sources cannot be digested; install it")
    root = Path(found.submodule_search_locations[0])
    sources = [
        p for room in _DECIDING_ROOMS for p in ([root / room] if room.endswith(".py") else (root / room).rglob("*.py"))
    ]
    files = digest_files({path.relative_to(root).as_posix(): path for path in sorted(sources)})
    return {"files": files, "libraries": {name: _version(name) for name in _DECIDING_LIBRARIES}}


def _platform() -> dict[str, Any]:
    """Return the facts of the platform that decide results in addition to the parameters.

    The job resolves `device: auto` and `dtype: auto` with torch: bf16 on CUDA, fp32 on CPU. Torch is not imported on
    this side, so a stage's cache key contains not the resolved values but the facts that decide them. A workspace that
    moves to a machine with a GPU, or gets another build of torch, computes again instead of reusing a CPU result for a
    GPU. This is conservative: at worst an equal result is computed twice.
    """
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "accelerator": _accelerator(),
    }


def gpu_visible() -> bool:
    """Return whether a job launched from here would find a GPU, as far as can be determined without torch."""
    return _accelerator() == ["there"]


def _accelerator() -> list[str]:
    """Return `there` and variables that hide all devices; empty if there is no device file (CUDA, WSL, ROCm).

    A job inherits these variables from the process that launches it.
    """
    if not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return []
    return ["there", *(name for name in _CHOSEN_BY if name in os.environ and not _CHOOSES.match(os.environ[name]))]


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"


def _name_by_slot(config: StageConfig) -> dict[str, Any]:
    params: dict[str, Any] = config.model_dump(mode="json", exclude={"epochs"})  # `steps` contains the epochs
    for slot, (kind, _) in config.inputs().items():
        first, _, rest = slot.partition(".")
        if kind == "reward":
            if ":" not in slot:  # the names of weighted rewards distinguish them, also in metrics
                (params["suites"][rest] if slot.startswith(JUDGES) else params)["reward"] = slot
        elif slot.startswith(SERVED):
            params[first][rest]["serve"] = slot
        elif rest:
            params[first][rest]["model" if kind == "model" else "data"] = slot
        elif isinstance(params[first], dict):
            params[first]["data"] = slot
        else:
            params[first] = slot
    return params
