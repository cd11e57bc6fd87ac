"""What a run's stages recorded, as series to draw: the picture of the main quantities, and every panel of a page."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from posttrain.control.judging import read_evidence
from posttrain.decision.gates import estimate
from posttrain.decision.statistics import rate_lower
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.views.status import RunStatus, RunWatcher
from posttrain.web.panels import Curve, CurveSeries, StageBoundary, rank
from posttrain.workspace.opened import OpenWorkspace

# metric of a training stage → the panel of the picture that it is drawn in
PANELS = {
    "reward/mean": "training reward",
    "probe/accuracy": "held-out accuracy",
    "agreement": "agreement with the teacher",
    "response_tokens/mean": "response length (tokens)",
}
LOSS = {"loss": "training loss", "accuracy": "pairs ranked rightly"}  # where nothing is scored
_SCORED = frozenset({"reward/mean", "probe/accuracy"})
KEPT = 600  # points of a curve that a page is given
_MEANS = 160  # points of a running mean
_EACH = 0.975  # one-sided, each end of a 95 % interval
_ERRORS = {"reward/mean": "reward/stderr"}  # metric → the one that is its standard error, which needs no panel
_NORMAL = 1.96  # standard errors to each side of a 95 % interval


@dataclass(frozen=True, slots=True)
class Curves:
    """One run's lines on an axis that counts the steps of its stages one after another."""

    series: tuple[CurveSeries, ...]
    boundaries: tuple[StageBoundary, ...]


def main_curves(
    workspace: OpenWorkspace, watcher: RunWatcher, status: RunStatus, manifest: Manifest, label: str
) -> Curves:
    """Stages without any of the main quantities (SFT) are drawn only when there is nothing else; the loss is drawn
    where no stage scores what it samples (distillation).
    """
    names = [stage.record.name for stage in status.stages]
    sampled = [name for name in names if watcher.watcher(name).curves.keys() & PANELS.keys()]
    scored = any(watcher.watcher(name).curves.keys() & _SCORED for name in sampled)
    panels = PANELS if scored else LOSS | (PANELS if sampled else {})
    series: list[CurveSeries] = []
    boundaries: list[StageBoundary] = []
    offset, ends = 0, {}
    for name in sampled or [name for name in names if "loss" in watcher.watcher(name).curves]:
        seen = watcher.watcher(name)
        boundaries.append(StageBoundary(offset, name))
        for metric, words in panels.items():
            points = seen.curve(metric)
            if points:
                steps, values = [offset + p.step for p in points], [p.value for p in points]
                series.append(CurveSeries(words, label, steps, values, metric=metric))
        offset += max((step for curve in seen.curves.values() for step in curve), default=0)
        ends[name] = offset
    if sampled:
        series += _measured(workspace, status, manifest, label, ends)
    return Curves(tuple(series), tuple(boundaries))


def stage_curves(
    workspace: OpenWorkspace, watcher: RunWatcher, manifest: Manifest, stage: str, label: str
) -> dict[str, CurveSeries]:
    """Every recorded metric of a stage, thinned without losing its extremes, what matters most first.

    Where the sampling noise is known, it is the series' limits.
    """
    recorded = watcher.watcher(stage).curves
    found = {}
    for metric in sorted(recorded.keys() - set(_ERRORS.values()), key=rank):
        points = sorted(recorded[metric].items())
        curve = Curve.of([step for step, _ in points], [value for _, value in points])
        kept = curve.thinned(KEPT)
        low, high = _noise(workspace, manifest.stage(stage), metric, kept, recorded)
        values = [*kept.values.tolist(), *[float("nan")] * curve.dropped]
        steps = [*kept.steps.tolist(), *[points[-1][0]] * curve.dropped]
        found[metric] = CurveSeries(metric, label, steps, values, low, high, _smooth(curve), metric)
    return found


def _smooth(curve: Curve) -> tuple[list[float], list[float]] | None:
    """The running mean of a curve that will be thinned: extremes alone have another one."""
    if len(curve.values) <= KEPT:
        return None
    means = curve.smoothed(len(curve.values) // 20).thinned(_MEANS)
    return means.steps.tolist(), means.values.tolist()


def _noise(
    workspace: OpenWorkspace,
    stage: StageManifest,
    metric: str,
    curve: Curve,
    recorded: Mapping[str, Mapping[int, float]],
) -> tuple[list[float] | None, list[float] | None]:
    """95 % limits of what a metric would have been on other samples of the same size; None where nobody knows."""
    if curve.dropped:
        return None, None
    if metric == "probe/accuracy":
        items = _probe_items(workspace, stage)
        if items is None:
            return None, None
        right = [round(value * items) for value in curve.values]
        lows = [rate_lower(one, items, _EACH) for one in right]
        return lows, [1 - rate_lower(items - one, items, _EACH) for one in right]
    errors = recorded.get(_ERRORS.get(metric, ""), {})
    if not all(step in errors for step in curve.steps):
        return None, None
    sides = [_NORMAL * errors[int(step)] for step in curve.steps]
    pairs = list(zip(curve.values.tolist(), sides, strict=True))
    return [value - side for value, side in pairs], [value + side for value, side in pairs]


def _probe_items(workspace: OpenWorkspace, stage: StageManifest) -> int | None:
    """How many rows the probe asks; None where the registry does not know how many there are."""
    ref = stage.inputs.get("probe")
    wanted = (stage.params.get("probe") or {}).get("items")
    if ref is None or ref.digest is None or not wanted:
        return None
    rows = [asset.meta.get("rows") for asset in workspace.ledger.assets_by_digest(ref.digest)]
    known = [row for row in rows if isinstance(row, int) and row > 0]
    return min(known[0], int(wanted)) if known else None


def _measured(
    workspace: OpenWorkspace, status: RunStatus, manifest: Manifest, label: str, ends: Mapping[str, int]
) -> Iterator[CurveSeries]:
    """The evaluation of a drawn stage's model on the data its probe samples from: a point with its exact limits."""
    probed = {ref.digest for stage in manifest.stages for slot, ref in stage.inputs.items() if slot == "probe"}
    rows = {stage.record.name: stage.record for stage in status.stages}
    for stage in manifest.stages:
        model = stage.inputs.get("model")
        if not stage.measures or model is None or model.name not in ends:
            continue
        found = _suite_accuracy(workspace, stage, rows[stage.name], probed)
        if found:
            rate, low, high = found
            words, step = PANELS["probe/accuracy"], ends[model.name]
            yield CurveSeries(
                words, label, [step], [rate], [min(low, rate)], [max(high, rate)], metric="probe/accuracy"
            )


def _suite_accuracy(
    workspace: OpenWorkspace, stage: StageManifest, record: StageRecord, probed: Collection[str | None]
) -> tuple[float, float, float] | None:
    suites = {slot.removeprefix("suites."): ref for slot, ref in stage.inputs.items() if slot.startswith("suites.")}
    for name in sorted(suites, key=lambda name: suites[name].digest not in probed)[:1]:
        try:
            measured = read_evidence(workspace.blobs.get(record.outputs["metrics"]["digest"]), name)
            one = estimate(f"{name}/accuracy", measured[f"{name}/accuracy"])
        except (KeyError, NotFoundError, IntegrityError, InputError):  # not measured yet, or its bytes are gone
            return None
        if one.low is not None and one.high is not None:
            return one.value, one.low, one.high
    return None
