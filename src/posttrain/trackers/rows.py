"""The rows of a run for trackers, and released models in MLflow's registry.

The rows of a run come from the facts of its attempts and its gates' verdicts.

A released model is a version in the registry, with an alias for each channel that points at it. A command that moves a
channel starts the process `posttrain track CHANNEL` and does not wait for it; a run's writer does the same work at the
end of the run. One process at a time writes a channel (`channels/NAME/trackers.lock`). The process reads the channel
after it has the lock, so the last writer writes the latest release. `channels/NAME/tracking.json` records the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.control.lineage import run_lineage
from posttrain.control.verdicts import read_report
from posttrain.decision.releases import moves
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError, TrackerError
from posttrain.domain.gates import GateReport, Outcome
from posttrain.domain.ids import PROJECT_VARIABLE
from posttrain.domain.kinds import REPORT, Driver, kind_of
from posttrain.domain.lifecycle import StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import DEFAULT_PROJECT, AttemptRecord, ReleaseEntry, RunRecord, StageRecord
from posttrain.domain.trackers import Trackers
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.telemetry.tracker import ChannelState, Ending, Registry, Row, StageFeed, TrackedRun, Version
from posttrain.trackers.choice import (
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
from posttrain.workspace.settings import OpenWorkspace

_NUMBERS = ("estimate", "baseline_estimate", "difference", "limit", "threshold")  # a verdict's numeric fields
_OF_RESULT = ("best", "stopped_early", "fallback")  # groups of metrics that only a stage's result contains
_MOST = 4900  # maximum characters of a tag
_REGISTRY = "mlflow"
REGISTRIES = (_REGISTRY,)


class RunSource:
    """Reads one run repeatedly; returns each of its rows once."""

    def __init__(self, workspace: OpenWorkspace, run_id: str) -> None:
        self._workspace, self._id = workspace, run_id
        self._feeds: dict[str, StageFeed] = {}
        self._lost: dict[str, str] = {}

    def about(self) -> TrackedRun:
        """Return the description of the run, which trackers receive before the first row."""
        run = self._workspace.ledger.run(self._id)
        manifest, _ = self._workspace.manifest_or_trouble(run)
        stages = [stage.name for stage in self._workspace.ledger.stages(run.id)]
        params = dict(_params(manifest)) if manifest else {}
        identity = self._workspace.identity()
        return TrackedRun(run.id, run.name, run.owner, run.manifest_digest, run.created_at, params, stages, identity)

    def read(self) -> tuple[Iterator[Row], Ending | None]:
        """Return new rows and, if the run has ended, its ending; in that case these rows are the last."""
        with self._workspace.ledger.snapshot() as now:
            run, stages = now.run(self._id), now.stages(self._id)
            origins = {one.name: (one.cached_from or f"{run.id}/{one.name}").rpartition("/") for one in stages}
            attempts = {name: now.attempts(of, stage) for name, (of, _, stage) in origins.items()}
        report = self._report(stages)
        rows = (row for stage in stages for row in self._rows(stage, attempts[stage.name], report))
        return rows, _ending(run, stages, report) if is_final("run", run.state) else None

    def remarks(self) -> str:
        """Return remarks for people about the rows read so far, in one line; "" if there are none."""
        feeds = list(self._feeds.values())
        said = []
        differing = sum(feed.differing for feed in feeds)
        if differing:
            first = next(feed.difference for feed in feeds if feed.difference)
            said.append(f"{differing} values of repeated steps differ from the first values, which were kept ({first})")
        damaged = [trouble for feed in feeds for trouble in feed.troubles] + list(self._lost.values())
        if damaged:
            said.append(f"{len(damaged)} parts could not be read and are missing ({damaged[0]})")
        return "; ".join(said)

    def _rows(self, stage: StageRecord, attempts: list[AttemptRecord], report: GateReport | None) -> Iterator[Row]:
        feed = self._feeds.setdefault(stage.name, StageFeed(self._workspace.root, stage.name))
        if kind_of(stage.kind).judges:
            if report is not None:
                yield from feed.take(0, stage.finished_at or 0.0, dict(_verdicts(report)))
            return
        yield from feed.read(attempts)
        if kind_of(stage.kind).measures and stage.state == StageState.SUCCEEDED:  # even if facts were deleted
            yield from feed.take(0, stage.finished_at or 0.0, stage.metrics)
        elif stage.state == StageState.SUCCEEDED:
            for step, values in _of_result(stage.metrics):
                yield from feed.take(step, stage.finished_at or 0.0, values)

    def _report(self, stages: list[StageRecord]) -> GateReport | None:
        gate = next((stage for stage in stages if kind_of(stage.kind).judges and REPORT in stage.outputs), None)
        if gate is None:
            return None
        try:
            return read_report(self._workspace.blobs, gate.outputs[REPORT]["digest"])
        except PosttrainError as error:
            self._lost[gate.name] = str(error)
            return None


def _of_result(metrics: Mapping[str, float]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values) from a stage's result; the best model's values have the step of that model."""
    for group in _OF_RESULT:
        values = {name: value for name, value in metrics.items() if name.startswith(f"{group}/")}
        if values:
            yield int(values.get(f"{group}/step", 0)), values


def _verdicts(report: GateReport) -> Iterator[tuple[str, float]]:
    for verdict in report.verdicts:
        yield f"{verdict.gate}/passed", float(verdict.outcome is Outcome.PASS)
        for name in _NUMBERS:
            value = getattr(verdict, name)
            if value is not None:
                yield f"{verdict.gate}/{name}", float(value)


def _ending(run: RunRecord, stages: list[StageRecord], report: GateReport | None) -> Ending:
    summary = {f"{stage.name}/{name}": float(value) for stage in stages for name, value in stage.metrics.items()}
    verdicts = {verdict.gate: str(verdict.outcome) for verdict in report.verdicts} if report else {}
    return Ending(run.state, run.message, run.finished_at, summary, verdicts)


def _params(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    yield "seed", manifest.seed
    for stage in manifest.stages:
        if kind_of(stage.kind).driver is not Driver.JOB:
            continue
        yield f"{stage.name}.kind", stage.kind
        yield from ((f"{stage.name}.{slot}", ref.word) for slot, ref in sorted(stage.inputs.items()))
        for path, value in flat(stage.params):
            if f"{path}" not in stage.inputs:
                yield f"{stage.name}.{path}", value if isinstance(value, str | int | float) else json.dumps(value)


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for the leaves of nested maps, such as (`optimizer.betas`, […])."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def register_channel(workspace: OpenWorkspace, name: str) -> list[TrackerState]:
    """Update every registry to the channel's current state.

    Returns:
        The states of the registries.

    Raises:
        InputError: no registry is chosen, by the workspace or by a run whose model the channel pointed at.
        TrackerError: a registry could not be written; the other registries were written.
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
    """Return the states of a channel's registries; empty if no registry is chosen."""
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
            found.append(
                TrackerState(
                    _REGISTRY, "waiting", where, f"release {live.sequence} is not in the registry yet; {remedy}"
                )
            )
        elif known["state"] == TROUBLE:
            found.append(TrackerState(_REGISTRY, TROUBLE, where, f"{known['message']}; {remedy}"))
        else:
            found.append(TrackerState(_REGISTRY, WRITTEN, where))
    return found


def announce(workspace: OpenWorkspace, channel: str) -> None:
    """Update the registries after a channel moved, without waiting for them."""
    with suppress(PosttrainError, OSError):  # `get CHANNEL` reports a missing entry in the registry
        if not any(True for _ in _registries(workspace, channel)):
            return
        folder = _folder(workspace, channel)
        make_folder(folder)
        start_writer(workspace, [channel], folder, {PROJECT_VARIABLE: workspace.ledger.project})


def channel_state(workspace: OpenWorkspace, channel: str) -> tuple[ChannelState, int]:
    """Return the channel's state for a registry, and its release number."""
    history = workspace.ledger.history(channel)
    first: dict[str, ReleaseEntry] = {}
    for entry in moves(history):
        first.setdefault(entry.model_digest, entry)
    versions = tuple(Version(e.model_digest, e.run_id, _tags(workspace, e)) for e in first.values())
    live = workspace.ledger.channel(channel)
    assert live is not None  # every caller has checked this
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
    except PosttrainError as error:  # if a part was deleted, the version is written without the lineage
        tags["lineage"] = f"cannot be read: {error}"[:_MOST]
    return {key: value for key, value in tags.items() if value}


def _registries(workspace: OpenWorkspace, channel: str) -> Iterator[Any]:
    """Yield the MLflow choices of the workspace and of runs whose models the channel pointed at, each target once."""
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
