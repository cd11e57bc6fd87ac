"""Does this machine confine what rewards do, and can the rewards and dataflows of a run be imported in their cells?

Both are asked of workers in other processes. What was found is remembered in the workspace: the first once per boot,
the second for the same bytes in the same environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.control.planning import Planned
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, WorkspaceError
from posttrain.domain.manifest import InputRef, StageManifest
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.workspace.opened import OpenWorkspace

_PROBE = "posttrain.engine.rewards.probe"
_SECONDS = 120.0  # for a worker on a busy machine
_REMEDY = "run where the kernel gives user namespaces, or trust what your rewards do: posttrain init --rewards trusted"


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a reward's cell is on this machine."""

    whole: bool  # a root of its own, no network, no other processes
    notes: tuple[str, ...]  # what is missing, in words


IN_AN_IMAGE = Confinement(False, ("in an image they reach what their job reaches",))


def confinement(cache: Path | None = None) -> Confinement:
    """Ask; what was found since the last boot is remembered in the folder `cache`.

    Raises:
        InfrastructureError: the worker gave no answer.
    """
    memory = cache / "confinement" / _machine() if cache else None
    known = read_json(memory) if memory else None
    if known is None:
        known = _ask()
        if memory:
            with contextlib.suppress(WorkspaceError):  # read-only: it is asked again next time
                make_folder(memory.parent)
                write_json(memory, known)
    return Confinement(bool(known["whole"]), tuple(known["notes"]))


def check_confinement(planned: Planned, workspace: OpenWorkspace) -> Iterator[str]:
    """What a person should know of how the rewards of a run will be confined.

    Raises:
        InputError: they cannot be, and the workspace does not trust them.
    """
    here, imaged = list[str](), list[str]()
    for stage in planned.manifest.stages:
        contract = planned.contracts.get(stage.name)
        if contract and any(kind == "reward" for kind, _ in contract.inputs.values()):
            (imaged if planned.manifest.image_of(stage) else here).append(stage.name)
    if here:
        yield from _judged(here, confinement(workspace.root / "cache"), trusted=workspace.trusts_rewards)
    if imaged:
        yield from _judged(imaged, IN_AN_IMAGE, trusted=workspace.trusts_rewards)


def check_imports(planned: Planned, workspace: OpenWorkspace, source: Path) -> None:
    """Import every reward, judge and dataflow of a run that runs on this machine, each in a cell; nowhere else.

    Where the machine gives no whole cell nothing is imported: then the job finds out.

    Raises:
        InputError: one cannot be imported; names the stage.
        InfrastructureError: the workers gave no answer.
    """
    memory = workspace.root / "cache" / "imports"
    with tempfile.TemporaryDirectory(prefix="posttrain-imports-") as scratch:
        asked = {
            (stage.name, slot): _import_order(stage, slot, kind, workspace, Path(scratch, f"{stage.name}.{at}"))
            for stage in planned.manifest.stages
            if stage.name in planned.contracts and not planned.manifest.image_of(stage)
            for at, (slot, (kind, _)) in enumerate(planned.contracts[stage.name].inputs.items())
            if kind in ("reward", "recipe")
        }
        keys = {place: memory / _import_key(order) for place, order in asked.items()}
        asked = {place: order for place, order in asked.items() if not keys[place].exists()}
        if not asked or not confinement(workspace.root / "cache").whole:
            return
        orders = [{key: value for key, value in order.items() if key != "digests"} for order in asked.values()]
        given = json.dumps({"asked": orders, "hidden": [str(workspace.root)]})
        found = _answer(["imports"], given, _SECONDS * len(asked))
    for (stage, _), line in zip(asked, found, strict=True):
        if line:
            raise InputError(f"{source}: stages.{stage}: {line}; mend it, or install what it imports")
    with contextlib.suppress(WorkspaceError):  # read-only: they are imported again next time
        make_folder(memory)
        for place in asked:
            write_json(keys[place], {})


def _import_order(
    stage: StageManifest, slot: str, kind: str, workspace: OpenWorkspace, scratch: Path
) -> dict[str, Any]:
    """What the worker needs to import what stands in a slot; of a file a copy, under its own name."""
    ref = stage.inputs[slot]
    beside = {
        name.removeprefix(f"{slot}/"): other for name, other in stage.inputs.items() if name.startswith(f"{slot}/")
    }
    scratch.mkdir()

    def place(of: InputRef, name: str) -> str:
        found = workspace.catalog.located(of, workspace.root / "cache")
        if isinstance(found, Path):
            return str(found)
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_bytes(found)
        return str(scratch / name)

    known = str(ref.meta.get("source") or "reward.py")
    return {
        "name": f"reward {known}",
        "place": place(ref, Path(known).name),
        "entry": ref.meta.get("entry"),
        "dialect": ref.meta.get("dialect") or "auto",
        "source": known,
        "network": list(ref.meta.get("network", ())),
        "secrets": list(ref.meta.get("secrets", ())),
        "files": {name: place(other, f"files/{name}") for name, other in beside.items()},
        "recipe": kind == "recipe",
        "digests": [ref.digest, *(other.digest for other in beside.values())],
    }


def _import_key(order: Mapping[str, Any]) -> str:
    """Of what is imported, and of everything that it may import."""
    placed = {key: value for key, value in order.items() if key not in ("place", "files")}
    folders = {path: str(os.stat(path).st_mtime_ns) for path in sorted(set(sys.path)) if os.path.isdir(path)}
    return digest_json([placed, sorted(order["files"]), folders, _machine()]).removeprefix("sha256:")


def _judged(stages: Collection[str], found: Confinement, *, trusted: bool) -> Iterator[str]:
    if not found.whole and not trusted:
        raise InputError(
            f"stages {', '.join(stages)}: rewards must be confined, and here they cannot be: {'; '.join(found.notes)}; "
            f"{_REMEDY}"
        )
    if not found.whole:
        yield f"rewards run as the workspace trusts them, not confined: {'; '.join(found.notes)}"


def _machine() -> str:
    """Boot, container, user and what runs."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else ""
    spaces = [os.readlink(place) for kind in ("user", "pid", "mnt") if os.path.exists(place := f"/proc/self/ns/{kind}")]
    return digest_json([booted, *spaces, os.getuid(), sys.executable, sys.prefix]).removeprefix("sha256:")


def _ask() -> dict[str, Any]:
    found: dict[str, Any] = _answer([], "", _SECONDS)
    return found


def _answer(words: list[str], given: str, seconds: float) -> Any:
    command = [sys.executable, "-s", "-P", "-m", _PROBE, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, input=given)
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        raise InfrastructureError(f"the reward worker gave no answer: {error}; try again") from error
