"""A run as trackers are told of it: its rows, from the facts of its attempts and its gates' verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.control.judging import read_report
from posttrain.domain.errors import PosttrainError
from posttrain.domain.gates import GateReport, Outcome
from posttrain.domain.kinds import REPORT, Driver, kind_of
from posttrain.domain.lifecycle import StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.telemetry.tracking import Ending, Row, StageFeed, TrackedRun
from posttrain.workspace.opened import OpenWorkspace

_NUMBERS = ("estimate", "baseline_estimate", "difference", "limit", "threshold")  # of a verdict
_OF_RESULT = ("best", "stopped_early", "fallback")  # groups of metrics that only a stage's result says


class RunSource:
    """Reads one run again and again; gives each of its rows once."""

    def __init__(self, workspace: OpenWorkspace, run_id: str) -> None:
        self._workspace, self._id = workspace, run_id
        self._feeds: dict[str, StageFeed] = {}
        self._lost: dict[str, str] = {}

    def about(self) -> TrackedRun:
        """What is known of it before its first row."""
        run = self._workspace.ledger.run(self._id)
        manifest, _ = self._workspace.manifest_or_trouble(run)
        stages = [stage.name for stage in self._workspace.ledger.stages(run.id)]
        params = dict(_params(manifest)) if manifest else {}
        identity = self._workspace.identity()
        return TrackedRun(run.id, run.name, run.owner, run.manifest_digest, run.created_at, params, stages, identity)

    def read(self) -> tuple[Iterator[Row], Ending | None]:
        """What is new; and how the run ended, once it has: then no row comes after these."""
        with self._workspace.ledger.snapshot() as now:
            run, stages = now.run(self._id), now.stages(self._id)
            attempts = {}
            for stage in stages:
                origin = stage.cached_from.rpartition("/") if stage.cached_from else (run.id, "/", stage.name)
                attempts[stage.name] = now.attempts(origin[0], origin[2])  # a reused stage's where it was computed
        report = self._report(stages)
        rows = (row for stage in stages for row in self._rows(stage, attempts[stage.name], report))
        return rows, _ending(run, stages, report) if is_final("run", run.state) else None

    def remarks(self) -> str:
        """What a person should know of what was read, in one line; empty: nothing."""
        feeds = list(self._feeds.values())
        said = []
        differing = sum(feed.differing for feed in feeds)
        if differing:
            first = next(feed.difference for feed in feeds if feed.difference)
            said.append(f"{differing} values of steps done again differ and were left as first written ({first})")
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
        if (
            kind_of(stage.kind).measures and stage.state == StageState.SUCCEEDED
        ):  # also where its attempts were cleared away
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
    """(the step at which they stand, values): the best model's at its step, so they lie on the probe's curve."""
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
    """`{"optimizer": {"betas": […]}}` → `optimizer.betas`, […]."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
