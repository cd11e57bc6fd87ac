"""Released models in MLflow's registry: each a version, and an alias for each channel that follows it.

Whoever moves a channel starts one process, `posttrain track CHANNEL`, and does not wait for it; a run's own writer does
the same at the run's end. One process at a time writes a channel (`channels/NAME/trackers.lock`) and reads the channel
only then, so the last one writes what the channel points at last. `channels/NAME/tracking.json` says what it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.control.lineage import run_lineage
from posttrain.decision.releases import moves
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError, TrackerError
from posttrain.domain.ids import PROJECT_VARIABLE
from posttrain.domain.records import DEFAULT_PROJECT, ReleaseEntry
from posttrain.domain.trackers import Trackers
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.telemetry.tracking import ChannelState, Registry, Version
from posttrain.trackers.tracking import (
    STATES,
    TROUBLE,
    WRITTEN,
    TrackerState,
    describe,
    line,
    of_run,
    of_workspace,
    opened,
    sole_writer,
    start_writer,
    target,
)
from posttrain.workspace.opened import OpenWorkspace

_MOST = 4900  # characters of a tag
_REGISTRY = "mlflow"
REGISTRIES = (_REGISTRY,)


def register_channel(workspace: OpenWorkspace, name: str) -> list[TrackerState]:
    """Bring every registry to where the channel is.

    Returns:
        How they stand.

    Raises:
        InputError: no registry is chosen by the workspace or a run that the channel served.
        TrackerError: one could not be written; the others were.
    """
    chosen = list(_registries(workspace, name))
    if not chosen:
        raise InputError(f"channel {name}: no model registry is chosen; name one: posttrain init --tracker mlflow")
    folder = _folder(workspace, name)
    make_folder(folder)
    troubles = []
    with sole_writer(folder, waits=True):
        state, sequence = channel_state(workspace, name)
        told = []
        for words in chosen:
            said = {"where": _where(words), "sequence": sequence}
            try:
                with opened(_REGISTRY, words) as registry:
                    assert isinstance(registry, Registry)
                    registry.follow(state)
                told.append({**said, "state": WRITTEN, "message": ""})
            except Exception as error:
                trouble = line(error, target(words))
                told.append({**said, "state": TROUBLE, "message": trouble})
                remedy = f"posttrain track {name} tries again"
                troubles.append(TrackerError(f"channel {name}: tracker {_REGISTRY}: {trouble}; {remedy}"))
        write_json(folder / STATES, told)
    if troubles:
        raise troubles[0]
    return channel_states(workspace, name)


def channel_states(workspace: OpenWorkspace, name: str) -> list[TrackerState]:
    """How the registries of a channel stand; none where none is chosen."""
    live, remedy = workspace.ledger.channel(name), f"posttrain track {name} writes it"
    if live is None:
        return []
    try:
        wanted = [_where(words) for words in _registries(workspace, name)]
        said = read_json(_folder(workspace, name) / STATES) or []
    except (InputError, IntegrityError) as error:
        return [TrackerState(_REGISTRY, TROUBLE, str(_folder(workspace, name)), str(error))]
    found = []
    for where in wanted:
        known = next((one for one in said if one["where"] == where), None)
        if known is None or known["sequence"] != live.sequence:
            message = f"release {live.sequence} is not there yet; {remedy}"
            found.append(TrackerState(_REGISTRY, "waiting", where, message))
        elif known["state"] == TROUBLE:
            found.append(TrackerState(_REGISTRY, TROUBLE, where, f"{known['message']}; {remedy}"))
        else:
            found.append(TrackerState(_REGISTRY, WRITTEN, where))
    return found


def announce(workspace: OpenWorkspace, channel: str) -> None:
    """Have the registries told that a channel moved, without waiting for them."""
    with suppress(PosttrainError, OSError):  # `get CHANNEL` says that it is not there yet
        if not any(True for _ in _registries(workspace, channel)):
            return
        folder = _folder(workspace, channel)
        make_folder(folder)
        start_writer(workspace, [channel], folder, {PROJECT_VARIABLE: workspace.ledger.project})


def channel_state(workspace: OpenWorkspace, channel: str) -> tuple[ChannelState, int]:
    """The channel as a registry is told of it, and its release number."""
    history = workspace.ledger.history(channel)
    first: dict[str, ReleaseEntry] = {}
    for entry in moves(history):
        first.setdefault(entry.model_digest, entry)
    versions = tuple(Version(e.model_digest, e.run_id, _tags(workspace, e)) for e in first.values())
    live = workspace.ledger.channel(channel)
    assert live is not None  # whoever calls has looked
    return ChannelState(channel, versions, live.model_digest, workspace.blobs.url), live.sequence


def _tags(workspace: OpenWorkspace, entry: ReleaseEntry) -> dict[str, str]:
    tags = {"channel": entry.channel, "release": str(entry.sequence), "report": entry.report_digest or ""}
    tags["export"] = f"posttrain export {entry.channel}@{entry.sequence} DIR"
    if entry.run_id is None:
        return tags
    tags |= {"run": entry.run_id, "manifest": workspace.ledger.run(entry.run_id).manifest_digest}
    try:
        nodes = run_lineage(workspace.stores, entry.run_id).walk()
        made_from = [f"{node.kind} {node.name} {node.digest or ''}".strip() for node in nodes]
        told = json.dumps(list(dict.fromkeys(made_from)), ensure_ascii=False)
        tags["lineage"] = told if len(told) <= _MOST else f"{told[:_MOST]}…"
    except PosttrainError as error:  # part of it is gone: the version is there all the same
        tags["lineage"] = f"cannot be read: {error}"[:_MOST]
    return {key: value for key, value in tags.items() if value}


def _registries(workspace: OpenWorkspace, channel: str) -> Iterator[Any]:
    """The choices of MLflow, each target once: the workspace's, and those of runs that the channel served."""
    runs = dict.fromkeys(entry.run_id for entry in workspace.ledger.history(channel) if entry.run_id)
    seen = set()
    for chosen in (of_workspace(workspace), *(of_run(workspace, run) for run in runs)):
        words = chosen.mlflow
        if words is not None and (target := (words.tracking_uri, words.registered_model)) not in seen:
            seen.add(target)
            yield words


def _where(words: Any) -> str:
    return f"{dict(describe(Trackers.of({_REGISTRY: words})))[_REGISTRY]}, model {words.registered_model}"


def _folder(workspace: OpenWorkspace, channel: str) -> Path:
    project = workspace.ledger.project
    return workspace.root / "channels" / (channel if project == DEFAULT_PROJECT else f"{project}@{channel}")
