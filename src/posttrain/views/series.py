"""The recorded metrics of a run's stages as series to draw: the main quantities, and every panel of a page.

This module also resolves the arguments of `posttrain compare` to evaluations, and writes the comparison page.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from posttrain.control.comparison import MOST, Comparison, ImportedHistory, Subject, side_by_side, subject
from posttrain.control.scores import Answered, Measured, Responses, spread
from posttrain.control.verdicts import read_evidence
from posttrain.data.imports import curves, recorded
from posttrain.data.refs import parse_ref
from posttrain.decision.gates import estimate
from posttrain.decision.statistics import rate_lower
from posttrain.domain.canonical import is_digest
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.kinds import METRICS
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import StageRecord, stage_of
from posttrain.views.status import RunStatus, RunWatcher
from posttrain.views.trace import shortened
from posttrain.web.panels import Curve, CurveSeries, StageBoundary, rank
from posttrain.web.report import Changed, ComparePage, ItemPair, SubjectFacts, compare_page
from posttrain.workspace.settings import OpenWorkspace

# metric of a training stage → its panel in the picture
PANELS = {
    "reward/mean": "training reward",
    "probe/accuracy": "held-out accuracy",
    "agreement": "agreement with the teacher",
    "response_tokens/mean": "response length (tokens)",
}
LOSS = {"loss": "training loss", "accuracy": "pairs ranked correctly"}  # used if no stage scores samples
_SCORED = frozenset({"reward/mean", "probe/accuracy"})
KEPT = 600  # maximum number of points of a curve in a page
_MEANS = 160  # maximum number of points of a running mean
_EACH = 0.975  # one-sided confidence at each end of a 95 % interval
_ERRORS = {"reward/mean": "reward/stderr"}  # metric → metric of its standard error, which gets no panel
_NORMAL = 1.96  # standard errors to each side of a 95 % interval
_SHOWN = 16  # maximum number of won items, and of lost items
_HISTORY = "history:"
SIZES = "sizes/"  # prefix of sizes that a job used, which are recorded with its metrics
_TRAINING = "train/"  # prefix of training metrics in transformers' trackers


@dataclass(frozen=True, slots=True)
class Curves:
    """The lines of one run, on an axis on which the steps of the run's stages follow each other."""

    series: tuple[CurveSeries, ...]
    boundaries: tuple[StageBoundary, ...]


def main_curves(
    workspace: OpenWorkspace, watcher: RunWatcher, status: RunStatus, manifest: Manifest, label: str
) -> Curves:
    """Return the main curves of a run.

    Stages without a main quantity (SFT) are drawn only if there are no other stages. The loss is drawn only if no stage
    scores its samples (as in distillation).
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
    """Return every recorded metric of a stage except the sizes that the stage used, most important first.

    A curve is thinned without losing its extremes. If a curve's sampling noise is known, the series has limits.
    """
    recorded = watcher.watcher(stage).curves
    found = {}
    drawn = {name for name in recorded if not name.startswith(SIZES)} - set(_ERRORS.values())
    for metric in sorted(drawn, key=rank):
        points = sorted(recorded[metric].items())
        curve = Curve.of([step for step, _ in points], [value for _, value in points])
        kept = curve.thinned(KEPT)
        low, high = _noise(workspace, manifest.stage(stage), metric, kept, recorded)
        values = [*kept.values.tolist(), *[float("nan")] * curve.dropped]
        steps = [*kept.steps.tolist(), *[points[-1][0]] * curve.dropped]
        found[metric] = CurveSeries(metric, label, steps, values, low, high, _smooth(curve), metric)
    return found


def _smooth(curve: Curve) -> tuple[list[float], list[float]] | None:
    """Return the running mean of a curve that will be thinned, because the mean of the extremes would differ."""
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
    """Return 95 % limits for a metric's values on other samples of the same size; None if the limits are unknown."""
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
    """Return the number of rows in the probe; None if the registry does not contain the probe's data."""
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
    """Yield, for each drawn stage whose model was evaluated on the probe's data, a point with exact limits."""
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
        except (KeyError, NotFoundError, IntegrityError, InputError):  # not measured yet, or the bytes were deleted
            return None
        if one.low is not None and one.high is not None:
            return one.value, one.low, one.high
    return None


def compare_runs(workspace: OpenWorkspace, words: Sequence[str]) -> Comparison:
    """Compare runs or single evaluate stages with the first one named; return the comparison.

    Args:
        words: `RUN` or `RUN/STAGE`, in which a run's id may be shortened; `history:NAME` for an imported run.

    Raises:
        InputError: there are too few or too many subjects, a subject is named twice, or a subject has no evaluation.
        NotFoundError: there is no such run.
    """
    if not 2 <= len(words) <= MOST:
        raise InputError(f"compare: name 2 to {MOST} runs or RUN/STAGE, got {len(words)}; posttrain ls lists the runs")
    outside = [word for word in words if word.startswith(_HISTORY)]
    labelled = list(zip(ascii_uppercase, [*(word for word in words if word not in outside), *outside], strict=False))
    subjects = [_subject(workspace, label, word) for label, word in labelled if word not in outside]
    if not subjects:
        raise InputError(f"compare: at least one run must be named, got only imported histories {', '.join(outside)}")
    histories = [_imported(workspace, label, word) for label, word in labelled if word in outside]
    names = [*(one.name for one in subjects), *(one.ref for one in histories)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"compare: {twice} was named several times; name another run or RUN/STAGE")
    return side_by_side(workspace.ledger, subjects, histories)


def _imported(workspace: OpenWorkspace, label: str, word: str) -> ImportedHistory:
    ref = parse_ref(word, "history")
    asset = workspace.ledger.asset(ref.kind, ref.name, ref.version)
    return ImportedHistory(label, asset.ref, asset.digest, tuple(curves(workspace.blobs.get(asset.digest))))


def _subject(workspace: OpenWorkspace, label: str, word: str) -> Subject:
    name, _, stage = (_comparing_measured(workspace, word) if is_digest(word) else word).partition("/")
    return subject(workspace.stores, label, workspace.ledger.find_run(name), stage or None)


def _comparing_measured(workspace: OpenWorkspace, digest: str) -> str:
    """Return `RUN/STAGE` of the newest finished evaluation of a model.

    Raises:
        InputError: the model was not evaluated.
    """
    with workspace.ledger.snapshot() as now:
        used = [stage_of(edge.consumer) for edge in now.uses_of_bytes(digest) if edge.slot == "model"]
        rows = now.stages(*{place[0] for place in used if place})
    found = [row for row in rows if (row.run_id, row.name) in used and METRICS in row.outputs]
    if found:
        newest = max(found, key=lambda row: (row.finished_at or 0.0, row.run_id))
        return f"{newest.run_id}/{newest.name}"
    raise InputError(f"compare: the model {digest} was not evaluated; run posttrain eval FOLDER SUITE")


def write_comparison(workspace: OpenWorkspace, found: Comparison, path: Path) -> None:
    """Write the page of a comparison.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    compare_page(path, comparison(workspace, found))


def comparison(workspace: OpenWorkspace, found: Comparison) -> ComparePage:
    """Return the contents of a comparison's page."""
    watchers = {one.run.id: RunWatcher(workspace, one.run.id, cached=True) for one in found.subjects}
    statuses = {run: watcher.read() for run, watcher in watchers.items()}
    facts = tuple(
        SubjectFacts(one.run.state, one.manifest.seed, statuses[one.run.id].seconds, statuses[one.run.id].tokens)
        for one in found.subjects
    )
    troubles: list[str] = []
    changed = [each for other in found.subjects[1:] for each in _changed(workspace, found.subjects[0], other, troubles)]
    several = len(watchers) + len(found.histories) > 1  # a single run's curves cannot be compared
    drawn = tuple(_overlaid(workspace, found, watchers).items()) if several else ()
    return ComparePage(found, facts, tuple(changed), drawn, tuple(dict.fromkeys(troubles)))


def _overlaid(
    workspace: OpenWorkspace, found: Comparison, watchers: dict[str, RunWatcher]
) -> dict[str, dict[str, list[CurveSeries]]]:
    """Return stage → metric → lines, one for each run; stages with the same name are overlaid."""
    stages: dict[str, dict[str, list[CurveSeries]]] = {}
    for run, watcher in watchers.items():
        subjects = [one for one in found.subjects if one.run.id == run]
        label = f"{', '.join(one.label for one in subjects)} {subjects[0].run.name}"
        for stage in subjects[0].manifest.stages:
            if not stage.measures and watcher.watcher(stage.name).curves:
                own = stage_curves(workspace, watcher, subjects[0].manifest, stage.name, label)
                for metric, series in own.items():
                    stages.setdefault(stage.name, {}).setdefault(metric, []).append(series)
    for one in found.histories:
        for name, steps, values in recorded(workspace.blobs.get(one.digest)):
            for metrics in stages.values():
                if (metric := name.removeprefix(_TRAINING)) in metrics:  # the run has a metric with that name
                    line = Curve.of(steps.tolist(), values.tolist()).thinned(KEPT)
                    label = f"{one.label} {one.ref}"
                    metrics[metric].append(CurveSeries(metric, label, line.steps.tolist(), line.values.tolist()))
    return {stage: dict(sorted(metrics.items(), key=lambda it: rank(it[0]))) for stage, metrics in stages.items()}


def _changed(workspace: OpenWorkspace, first: Subject, other: Subject, troubles: list[str]) -> Iterator[Changed]:
    """Yield, for every common suite, the items on which exactly one subject is right or has the higher reward."""
    for mine in first.evaluations:
        for theirs in other.evaluations:
            ours, answers = _responses(workspace, mine, troubles), _responses(workspace, theirs, troubles)
            if ours is None or answers is None:
                continue
            for suite in ours.suites:
                there = (metric.partition("/")[0] for metric in theirs.evidence)
                same = next((one for one in there if mine.identity(f"{suite}/") == theirs.identity(f"{one}/")), None)
                if same is not None:
                    yield _suite(ours, answers, suite, same, other.label)


def _suite(ours: Responses, theirs: Responses, suite: str, there: str, label: str) -> Changed:
    known = {one.item_id: one for one in ours.greedy(suite)}
    pairs = [(known[one.item_id], one) for one in theirs.greedy(there) if one.item_id in known]
    won = [pair for pair in pairs if _worth(pair[1]) > _worth(pair[0])]
    lost = [pair for pair in pairs if _worth(pair[0]) > _worth(pair[1])]
    shown = [_spread(won), _spread(lost)]
    texts = ours.texts({mine for part in shown for mine, _ in part})
    answers = theirs.texts({one for part in shown for _, one in part})
    won_shown, lost_shown = (
        tuple(ItemPair(shortened(texts[mine.row]), shortened(answers[one.row])) for mine, one in part) for part in shown
    )
    return Changed(label, suite, len(won), len(lost), won_shown, lost_shown)


def _worth(one: Answered) -> float:
    """Return 1 for a right response, 0 for a wrong response, and the reward for an item without an answer."""
    return (one.reward or 0.0) if one.correct is None else float(one.correct)


def _spread(pairs: Sequence[tuple[Answered, Answered]]) -> list[tuple[Answered, Answered]]:
    """Return a selection of pairs, spread from the first to the last."""
    by_row = {mine.row: (mine, other) for mine, other in pairs}
    return [by_row[mine.row] for mine in spread([mine for mine, _ in pairs], _SHOWN)]


def _responses(workspace: OpenWorkspace, one: Measured, troubles: list[str]) -> Responses | None:
    made = one.record.outputs.get("items")
    try:
        return Responses(workspace.blobs.get(made["digest"]), one.stage.name) if made else None
    except (IntegrityError, NotFoundError) as error:
        troubles.append(f"{one.record.run_id}/{one.stage.name}: {error}")
        return None
