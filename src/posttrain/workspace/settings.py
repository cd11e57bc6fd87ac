"""`workspace.json`, what a workspace is told when it is made: written once, or as a person says later.

::

    {"format": …, "store": …, "ledger": …, "id": …, "rewards": …, "trackers": …, "executor": …, "channel": …,
     "job_variables": …, "model_limits": …}
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.execution.processes import NEVER
from posttrain.store.atomic import read_json, write_json
from posttrain.store.blobs import blobs_url
from posttrain.workspace.ledgers import KEY

FOLDER = ".posttrain"
VARIABLE = "POSTTRAIN_WORKSPACE"
STORE_VARIABLE = "POSTTRAIN_STORE"
SETTINGS = "workspace.json"
TRUSTED = "trusted"
LOCAL, PODMAN = "local", "podman"
OWN_EXECUTORS = (LOCAL, PODMAN)
EXECUTOR = "executor"  # the key of one that is not local
VARIABLES = "job_variables"  # the key of names of variables that jobs of a server get besides
LIMITS = "model_limits"  # the key of what a model folder may hold (`data.assets.ModelLimits`)
CHANNEL = "channel"  # the key of a URL below which attempts have their channels; absent: in their folders
_FORMAT = "posttrain.workspace/1"
OWN_STORE = "blobs"  # below the workspace, which can then be moved as a whole


def record_places(
    root: Path, url: str, place: Path | str, rewards: str | None, trackers: Mapping[str, Any] | None, channel: str = ""
) -> None:
    """Where artifacts, ledger and channels of a new workspace are, and what a person says of rewards and trackers."""
    with settings_lock(root):
        known = read_json(root / SETTINGS)
        places = ({} if isinstance(place, Path) else {KEY: place}) | ({CHANNEL: channel} if channel else {})
        record = known or fresh_record(root, url) | places
        if rewards is not None:
            record = {key: value for key, value in record.items() if key != "rewards"}
            record |= {"rewards": TRUSTED} if rewards == TRUSTED else {}
        if trackers is not None:
            record = {key: value for key, value in record.items() if key != "trackers"}
            record |= {"trackers": dict(trackers)} if trackers else {}
        if record != known:
            write_json(root / SETTINGS, record)


def fresh_record(root: Path, url: str) -> dict[str, Any]:
    """Of a workspace that says nothing else."""
    return {"format": _FORMAT, "store": OWN_STORE if url == blobs_url(root / OWN_STORE) else url}


def record_variables(root: Path, names: Collection[str]) -> None:
    """Which variables of a server's environment its jobs get besides those that a machine needs; none: no others.

    Raises:
        InputError: a name that is none, or of a variable that no job of a server gets.
    """
    for name in names:
        if not name.isidentifier() or name.startswith(NEVER):
            raise InputError(
                f"init: --job-variable must be the name of a variable, and none of {', '.join(NEVER[:4])}…, which are "
                f"the server's own; got {name[:80]!a}"
            )
    with settings_lock(root):
        record = {key: value for key, value in read_json(root / SETTINGS).items() if key != VARIABLES}
        write_json(root / SETTINGS, record | ({VARIABLES: sorted(set(names))} if names else {}))


def record_limits(root: Path, limits: Mapping[str, int]) -> None:
    """What a model folder may hold, in place of what was recorded before; empty: the defaults."""
    with settings_lock(root):
        record = {key: value for key, value in read_json(root / SETTINGS).items() if key != LIMITS}
        write_json(root / SETTINGS, record | ({LIMITS: dict(limits)} if limits else {}))


@contextmanager
def settings_lock(root: Path) -> Iterator[None]:
    """One process at a time reads and writes workspace.json; the folder itself is locked, for nothing to be left."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
