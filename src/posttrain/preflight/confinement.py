"""Does this machine confine what rewards do? Asked of a worker in another process, once per boot and workspace."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.control.planning import Planned
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, WorkspaceError
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
    command = [sys.executable, "-s", "-P", "-m", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        raise InfrastructureError(f"the reward worker gave no answer: {error}; try again") from error
    return found
