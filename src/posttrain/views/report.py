"""A run's output for people: the learning-curve picture and the one-page report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.control import budgets
from posttrain.control.comparison import Difference, compare
from posttrain.control.lineage import Node, run_lineage
from posttrain.control.release_plan import selection_words
from posttrain.control.verdicts import explain_run
from posttrain.domain.gates import GateReport
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import StageRecord
from posttrain.telemetry.timeline import AttemptSpans, StepTime, step_times
from posttrain.trackers.rows import flat
from posttrain.views.series import LOSS, PANELS, SIZES, main_curves, stage_curves
from posttrain.views.status import RunStatus, RunWatcher, baseline_run, run_scores
from posttrain.views.trace import stage_samples, suite_answers
from posttrain.web.curves import learning_curve
from posttrain.web.report import (
    BudgetRow,
    RunReport,
    StageCurves,
    StageParameters,
    StageRow,
    SystemRow,
    run_report,
)
from posttrain.workspace.settings import OpenWorkspace


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a run's report and picture."""

    report: Path
    curves: Path | None  # None: no stage reported curves


def write_report(workspace: OpenWorkspace, run_id: str, folder: Path | None = None) -> Written:
    """Write or overwrite `report.html` and `curves.png` in `folder`, by default the run's folder.

    Raises:
        WorkspaceError: the folder cannot be written.
    """
    watcher, status, manifest = _read(workspace, run_id)  # called first, because it fails for an unknown run
    folder = folder or workspace.root / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    curves = main_curves(workspace, watcher, status, manifest, run_id)
    if curves.series:
        title = "\n".join([run_id, *(f"{s.record.name}: {s.begun}" for s in status.stages if s.begun)])
        learning_curve(folder / "curves.png", curves.series, boundaries=curves.boundaries, title=title)
    run_report(folder / "report.html", _report(workspace, watcher, status, manifest))
    return Written(folder / "report.html", folder / "curves.png" if curves.series else None)


def read_report(workspace: OpenWorkspace, run_id: str) -> RunReport:
    """Return the current contents of a run's report.

    Raises:
        NotFoundError: the run does not exist.
    """
    return _report(workspace, *_read(workspace, run_id))


def _read(workspace: OpenWorkspace, run_id: str) -> tuple[RunWatcher, RunStatus, Manifest]:
    watcher = RunWatcher(workspace, run_id, cached=True)
    status = watcher.read()
    return watcher, status, workspace.stores.manifest(status.run)


def overlay(workspace: OpenWorkspace, runs: Sequence[tuple[str, str]], path: Path, title: str = "") -> Path:
    """Draw several runs in one picture; return the path of the picture.

    Args:
        runs: (label, run id) of each run; only the stage boundaries of the first run are drawn.

    Raises:
        InputError: no run reported curves.
    """
    drawn = [main_curves(workspace, *_read(workspace, run_id), label) for label, run_id in runs]
    series = [one for curves in drawn for one in curves.series]
    order = list(dict.fromkeys([*PANELS.values(), *LOSS.values()]))
    series.sort(key=lambda one: order.index(one.quantity))
    learning_curve(path, series, boundaries=drawn[0].boundaries if drawn else (), title=title)
    return path


def tree_lines(node: Node, prefix: str = "", joint: str = "") -> Iterator[str]:
    """Yield a lineage as indented lines: kind, name, digest, details."""
    digest = f"  {node.digest}" if node.digest else ""
    details = "".join(f"  {key}: {' '.join(value.split())}" for key, value in node.details)
    yield f"{prefix}{joint}{node.kind} {node.name}{digest}{details}"
    below = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[joint]
    for index, child in enumerate(node.children):
        yield from tree_lines(child, below, "└─ " if index == len(node.children) - 1 else "├─ ")


# --- report -----------------------------------------------------------------------------------------------------------


def _report(workspace: OpenWorkspace, watcher: RunWatcher, status: RunStatus, manifest: Manifest) -> RunReport:
    run, rows = status.run, [stage.record for stage in status.stages]
    gates = explain_run(workspace.stores, run.id).report
    other, changes = _changes(workspace, status, manifest, gates)
    troubles: list[str] = []
    scores = run_scores(workspace, status)
    answers = tuple(suite_answers(workspace, manifest, rows, troubles))
    rewarded = (
        f"trained on {change.after}; the channel's model ({other}) was trained on {change.before}"
        for change in changes
        if change.after.startswith("reward:")
    )
    begun = (
        f"{stage.record.name}: {stage.begun}; the curves and the trace begin after these steps"
        for stage in status.stages
        if stage.begun
    )
    return RunReport(
        run_id=run.id,
        name=run.name,
        state=run.state,
        owner=run.owner,
        seed=manifest.seed,
        manifest_digest=run.manifest_digest,
        reason=status.why,
        next_action=status.next_action,
        stages=tuple(_stage_rows(status)),
        gates=gates.verdicts if gates else (),
        lineage=tuple(tree_lines(run_lineage(workspace.stores, run.id))),
        budgets=tuple(_budget_rows(workspace, status, manifest)),
        findings=tuple(watcher.findings(status)),
        warnings=(*scores.regressions, *rewarded, *begun, *status.warnings, *troubles),
        compared_with=other,
        changes=tuple(changes),
        scores=scores,
        curves=tuple(_stage_curves(workspace, watcher, status, manifest)),
        samples=tuple(stage_samples(workspace, run.id, rows)),
        answers=answers,
        parameters=tuple(_parameters(watcher, manifest)),
        system=tuple(_system_rows(watcher, status)),
    )


def _stage_rows(status: RunStatus) -> Iterator[StageRow]:
    for stage in status.stages:
        row = stage.record
        yield StageRow(
            name=row.name,
            kind=row.kind,
            state=row.state,
            cached_from=row.cached_from,
            attempts=len(stage.attempts),
            seconds=stage.seconds if stage.attempts else None,
            tokens=row.tokens,
            output=stage.output,
            best=stage.best,
        )


def _stage_curves(
    workspace: OpenWorkspace, watcher: RunWatcher, status: RunStatus, manifest: Manifest
) -> Iterator[StageCurves]:
    """Yield the curves of every stage that has metrics by step; the means of an evaluation are scores, not curves."""
    for stage in status.stages:
        name, kind = stage.record.name, stage.record.kind
        if not kind_of(kind).measures and watcher.watcher(name).curves:
            series = stage_curves(workspace, watcher, manifest, name, name)
            if not series:  # the job has reported only sizes
                continue
            yield StageCurves(name, kind, series, stage.begun, *_chosen(stage.record))


def _chosen(row: StageRecord) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the decision by a stage's probe, as text and as marked steps."""
    marks = {"best/step": "best", "stopped_early/step": "stopped"}
    found = tuple((int(row.metrics[name]), word) for name, word in marks.items() if name in row.metrics)
    return selection_words(row.metrics), found


def _parameters(watcher: RunWatcher, manifest: Manifest) -> Iterator[StageParameters]:
    """Yield the parameters of every job, with the sizes that the job used."""
    for stage in manifest.stages:
        inputs = tuple((slot, ref.word, ref.digest or "") for slot, ref in sorted(stage.inputs.items()))
        params = tuple((path, _said(value)) for path, value in flat(stage.params))
        if kind_of(stage.kind).driver is Driver.JOB:
            curves = watcher.watcher(stage.name).curves
            sizes = ((name, curves[name][max(curves[name])]) for name in sorted(curves) if name.startswith(SIZES))
            chosen = tuple(
                (name, f"{_said(int(value) if value == int(value) else value)} (used by the job)")
                for name, value in sizes
            )
            yield StageParameters(stage.name, stage.kind, inputs, params + chosen)


def _said(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _system_rows(watcher: RunWatcher, status: RunStatus) -> Iterator[SystemRow]:
    for stage in status.stages:
        seen = watcher.watcher(stage.record.name)
        speeds = list(seen.curves.get("tokens_per_second", {}).values())
        steps = step_times(AttemptSpans(stage.record.name, 0, list(seen.hand_offs)))
        if not (speeds or steps or stage.attempts):
            continue
        whole = sum(step.seconds for step in steps)
        names = dict.fromkeys(name for step in steps for name in step.phases)
        yield SystemRow(
            stage=stage.record.name,
            seconds=stage.seconds,
            tokens=stage.record.tokens,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            step_seconds=statistics.median(step.seconds for step in steps) if steps else None,
            steps=len(steps),
            phases=tuple(_phase(name, steps, whole) for name in names),
            resident=max(seen.curves.get("memory/peak_resident_mib", {}).values(), default=None),
            allocated=max(seen.curves.get("memory/peak_allocated_mib", {}).values(), default=None),
        )


def _phase(name: str, steps: Sequence[StepTime], whole: float) -> tuple[str, float, float]:
    """Return a hand-off's name, its median seconds over the steps that have it, and its share of the total time."""
    spent = [step.phases[name] for step in steps if name in step.phases]
    return name, statistics.median(spent), sum(spent) / whole if whole else 0.0


def _budget_rows(workspace: OpenWorkspace, status: RunStatus, manifest: Manifest) -> Iterator[BudgetRow]:
    rows = [stage.record for stage in status.stages]
    attempts = [attempt for stage in status.stages for attempt in stage.attempts]
    spent = budgets.spending(rows, attempts)
    yield BudgetRow("tokens", spent.tokens, manifest.budget.tokens)
    yield BudgetRow("seconds", round(spent.seconds, 1), manifest.budget.wall_clock)
    most = max((len(stage.attempts) for stage in status.stages), default=0)
    yield BudgetRow("attempts of one stage", most, manifest.budget.attempts)
    causes = Counter(attempt.stop_cause for attempt in attempts if attempt.stop_cause)
    yield from (BudgetRow(f"attempts stopped: {cause}", causes[cause], None) for cause in sorted(causes))


def _changes(
    workspace: OpenWorkspace, status: RunStatus, manifest: Manifest, gates: GateReport | None
) -> tuple[str, list[Difference]]:
    """Return the run that made the gates' baseline, and the differences between that run and this run."""
    other = baseline_run(workspace, manifest, gates)
    if other is None or other == status.run.id:
        return "", []
    theirs, _ = workspace.manifest_or_trouble(workspace.ledger.run(other))
    return ("", []) if theirs is None else (other, compare(workspace.ledger, theirs, manifest))
