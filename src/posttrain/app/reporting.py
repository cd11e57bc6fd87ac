"""What a run leaves for people: the learning-curve picture and the one-page report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.app.status import RunStatus, RunWatcher, baseline_run
from posttrain.app.workspace import Workspace
from posttrain.control import budgets
from posttrain.control.compare import Difference, compare
from posttrain.control.explain import explain_run
from posttrain.control.judging import read_evidence
from posttrain.control.lineage import Node, run_lineage
from posttrain.decision.statistics import rate_lower
from posttrain.domain.errors import IntegrityError, NotFoundError
from posttrain.domain.gates import GateReport
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.web.curves import CurveSeries, StageBoundary, learning_curve
from posttrain.web.report import BudgetRow, ChangeRow, RunReport, StageRow, run_report

# metric of a training stage → the panel it is drawn in
_PANELS = {
    "reward/mean": "training reward",
    "probe/accuracy": "held-out accuracy",
    "response_tokens/mean": "response length (tokens)",
}
_LOSS = {"loss": "training loss"}  # for runs that sample nothing
_CONFIDENCE = 0.95  # one-sided, each end of the bars


@dataclass(frozen=True, slots=True)
class Written:
    """Where a run's report and picture are."""

    report: Path
    curves: Path | None  # None: no stage reported anything to draw


@dataclass(frozen=True, slots=True)
class _Curves:
    """One run's lines on an axis that counts the steps of its stages one after another."""

    series: tuple[CurveSeries, ...]
    boundaries: tuple[StageBoundary, ...]


def write_report(workspace: Workspace, run_id: str) -> Written:
    """Write (again) `report.html` and `curves.png` into the run's folder.

    Raises:
        WorkspaceError: the folder cannot be written.
    """
    folder = workspace.root / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    watcher = RunWatcher(workspace, run_id, cached=True)
    status = watcher.read()
    manifest = workspace.wiring.manifest(status.run)
    curves = _curves(workspace, watcher, status, manifest, run_id)
    picture = None
    if curves.series:
        title = "\n".join([run_id, *(f"{s.record.name}: {s.begun}" for s in status.stages if s.begun)])
        learning_curve(folder / "curves.png", curves.series, boundaries=curves.boundaries, title=title)
        picture = (folder / "curves.png").read_bytes()
    report = _report(workspace, status, manifest, picture)
    run_report(folder / "report.html", report)
    return Written(folder / "report.html", folder / "curves.png" if picture else None)


def overlay(workspace: Workspace, runs: Sequence[tuple[str, str]], path: Path, title: str = "") -> Path:
    """Draw several runs on one picture.

    Args:
        runs: (label, run id); the stage boundaries drawn are the first run's.

    Raises:
        InputError: none of them reported anything to draw.
    """
    drawn = []
    for label, run_id in runs:
        watcher = RunWatcher(workspace, run_id, cached=True)
        status = watcher.read()
        drawn.append(_curves(workspace, watcher, status, workspace.wiring.manifest(status.run), label))
    series = [one for curves in drawn for one in curves.series]
    order = list(dict.fromkeys([*_PANELS.values(), *_LOSS.values()]))
    series.sort(key=lambda one: order.index(one.quantity))
    learning_curve(path, series, boundaries=drawn[0].boundaries if drawn else (), title=title)
    return path


def tree_lines(node: Node, prefix: str = "", joint: str = "") -> Iterator[str]:
    """A lineage as indented lines: kind, name, digest, details."""
    digest = f"  {node.digest}" if node.digest else ""
    details = "".join(f"  {key}: {' '.join(value.split())}" for key, value in node.details)
    yield f"{prefix}{joint}{node.kind} {node.name}{digest}{details}"
    below = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[joint]
    for index, child in enumerate(node.children):
        yield from tree_lines(child, below, "└─ " if index == len(node.children) - 1 else "├─ ")


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(workspace: Workspace, watcher: RunWatcher, status: RunStatus, manifest: Manifest, label: str) -> _Curves:
    """Stages without any of the main quantities (SFT) are drawn only when there is nothing else."""
    names = [stage.record.name for stage in status.stages]
    sampled = [name for name in names if watcher.watcher(name).curves.keys() & _PANELS.keys()]
    panels = _PANELS if sampled else _LOSS
    series: list[CurveSeries] = []
    boundaries: list[StageBoundary] = []
    offset, ends = 0, {}
    for name in sampled or [name for name in names if "loss" in watcher.watcher(name).curves]:
        seen = watcher.watcher(name)
        boundaries.append(StageBoundary(offset, name))
        for metric, panel in panels.items():
            points = seen.curve(metric)
            if points:
                steps, values = [offset + p.step for p in points], [p.value for p in points]
                series.append(CurveSeries(panel, label, steps, values))
        offset += max((step for curve in seen.curves.values() for step in curve), default=0)
        ends[name] = offset
    if sampled:
        series += _measured(workspace, status, manifest, label, ends)
    return _Curves(tuple(series), tuple(boundaries))


def _measured(
    workspace: Workspace, status: RunStatus, manifest: Manifest, label: str, ends: dict[str, int]
) -> Iterator[CurveSeries]:
    """The evaluation of a drawn stage's model on the data its probe samples from: a point with its exact limits."""
    probed = {ref.digest for stage in manifest.stages for slot, ref in stage.inputs.items() if slot == "probe"}
    rows = {stage.record.name: stage.record for stage in status.stages}
    for stage in manifest.stages:
        model = stage.inputs.get("model")
        if stage.kind != "evaluate" or model is None or model.name not in ends:
            continue
        found = _suite_accuracy(workspace, stage, rows[stage.name], probed)
        if found:
            rate, items = found
            right = round(rate * items)
            low = rate_lower(right, items, _CONFIDENCE)
            high = 1 - rate_lower(items - right, items, _CONFIDENCE)
            panel, step = _PANELS["probe/accuracy"], ends[model.name]
            yield CurveSeries(panel, label, [step], [rate], [min(low, rate)], [max(high, rate)])


def _suite_accuracy(
    workspace: Workspace, stage: StageManifest, record: StageRecord, probed: Iterable[str | None]
) -> tuple[float, int] | None:
    suites = {slot.removeprefix("suites."): ref for slot, ref in stage.inputs.items() if slot.startswith("suites.")}
    wanted = set(probed)
    ordered = sorted(suites, key=lambda name: suites[name].digest not in wanted)
    for name in ordered[:1]:
        try:
            measured = read_evidence(workspace.blobs.get(record.outputs["metrics"]["digest"]), name)
        except (KeyError, NotFoundError, IntegrityError):  # not measured yet, or its bytes are gone
            return None
        found = measured.get(f"{name}/accuracy")
        if found is not None:
            return float(found.values.mean()), len(found.item_ids)
    return None


# --- report -----------------------------------------------------------------------------------------------------------


def _report(workspace: Workspace, status: RunStatus, manifest: Manifest, picture: bytes | None) -> RunReport:
    run = status.run
    gates = explain_run(workspace.wiring, run.id).report
    other, changes = _changes(workspace, status, manifest, gates)
    return RunReport(
        run_id=run.id,
        name=run.name,
        state=run.state,
        owner=run.owner,
        seed=manifest.seed,
        manifest_digest=run.manifest_digest,
        reason=run.message,
        next_action=status.next_action,
        stages=tuple(_stage_rows(status)),
        gates=gates.verdicts if gates else (),
        lineage=tuple(tree_lines(run_lineage(workspace.wiring, run.id))),
        budgets=tuple(_budget_rows(workspace, status, manifest)),
        warnings=(*_warnings(changes, other), *_begun(status)),
        compared_with=other,
        changes=tuple(ChangeRow(c.path, c.before, c.after, c.notes) for c in changes),
        curve=picture,
    )


def _stage_rows(status: RunStatus) -> Iterator[StageRow]:
    for stage in status.stages:
        row = stage.record
        output = next((made["digest"] for made in row.outputs.values()), None)
        yield StageRow(
            name=row.name,
            kind=row.kind,
            state=row.state,
            cached_from=row.cached_from,
            attempts=len(stage.attempts),
            seconds=stage.seconds if stage.attempts else None,
            tokens=row.tokens,
            output=output,
        )


def _budget_rows(workspace: Workspace, status: RunStatus, manifest: Manifest) -> Iterator[BudgetRow]:
    rows = [stage.record for stage in status.stages]
    attempts = [attempt for stage in status.stages for attempt in stage.attempts]
    spent = budgets.spending(rows, attempts)
    yield BudgetRow("tokens", spent.tokens, manifest.budget.tokens)
    yield BudgetRow("seconds", round(spent.seconds, 1), manifest.budget.wall_clock)
    most = max((len(stage.attempts) for stage in status.stages), default=0)
    yield BudgetRow("attempts of one stage", most, manifest.budget.attempts)


def _changes(
    workspace: Workspace, status: RunStatus, manifest: Manifest, gates: GateReport | None
) -> tuple[str, list[Difference]]:
    """The run whose model the gates compared with (the channel's), and what this run has different."""
    other = baseline_run(workspace, manifest, gates)
    if other is None or other == status.run.id:
        return "", []
    theirs, _ = workspace.manifest_or_trouble(workspace.ledger.run(other))
    if theirs is None:
        return "", []
    return other, compare(workspace.wiring, theirs, manifest)


def _begun(status: RunStatus) -> Iterator[str]:
    """One line for every stage whose curve does not begin at its beginning."""
    for stage in status.stages:
        if stage.begun:
            yield f"{stage.record.name}: {stage.begun}; curve and trace begin behind them"


def _warnings(changes: Sequence[Difference], other: str) -> Iterator[str]:
    for change in changes:
        if change.after.startswith("reward:"):
            yield f"trained on {change.after}; the channel's model ({other}) was trained on {change.before}"
