"""Comparisons of evaluations, item by item, and of two runs' manifests, field by field.

Evaluations are compared side by side: the scores of each evaluation, and the differences from the first evaluation's
scores. Differences between manifests include the history of each changed asset.

The runs of a sweep, settings × seeds, are ranked on one metric of one model's evaluation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from posttrain.control.scores import Measured, measurements, model_words, paired_json, released
from posttrain.data.imports import Curve
from posttrain.decision.gates import CONFIDENCE, Estimate, Evidence, Paired, estimate, paired
from posttrain.decision.power import Ranking, rank
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import GateRule
from posttrain.domain.kinds import StageContract, better, few_seeds
from posttrain.domain.manifest import InputRef, Manifest
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.store.ledger import Ledger, Stores

_ABSENT = "(absent)"
# settings that affect results, and the defaults of settings that a manifest may omit
_ALWAYS, _SAMPLED = ("extract", "max_new_tokens", "stop"), ("temperature", "samples", "top_k", "top_p", "min_p")
_UNSAID = {"stop": [], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
MOST = 26  # maximum subjects of a comparison, which are labelled A to Z


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs, such as `stages.grpo.inputs.reward`, with both values and lines that explain them."""

    path: str
    before: str
    after: str
    notes: tuple[str, ...] = ()


def compare(ledger: Ledger, first: Manifest, second: Manifest) -> list[Difference]:
    """Return the differences that affect results or the release; names and owners of the runs are not compared.

    An asset that several stages use is listed once.
    """
    found: dict[tuple[str, str], Difference] = {}
    for path, before, after in _walk("", _plain(first), _plain(second)):
        difference = _asset_difference(ledger, path, before, after) or Difference(path, _show(before), _show(after))
        found.setdefault((difference.before, difference.after) if difference.notes else (path, ""), difference)
    return list(found.values())


def _plain(manifest: Manifest) -> dict[str, Any]:
    value = manifest.model_dump(mode="json", exclude={"manifest", "name", "owner", "stages"})
    value["gates"] = {gate["name"]: gate for gate in value["gates"]}
    value["stages"] = {}
    for stage in manifest.stages:
        value["stages"][stage.name] = {
            **stage.model_dump(mode="json", exclude={"name", "inputs"}),
            "inputs": dict(stage.inputs),
        }
    return value


def _walk(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _walk(f"{path}.{key}" if path else key, before.get(key, _ABSENT), after.get(key, _ABSENT))
    elif before != after:
        yield path, before, after


def _show(value: Any) -> str:
    """Return a value as written in a run file; for a whole stage, only the kind, because the manifest has the rest."""
    if isinstance(value, InputRef):
        return value.name
    if isinstance(value, dict):
        if {"kind", "inputs", "params"} <= value.keys():
            return f"({value['kind']} stage)"
        said = (f"{key}: {_show(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(said) + "}"
    return "none" if value is None else str(value)


def _asset_difference(ledger: Ledger, path: str, before: Any, after: Any) -> Difference | None:
    if not (isinstance(before, InputRef) and isinstance(after, InputRef) and before.digest and after.digest):
        return None
    notes = [f"digest: {before.digest} → {after.digest}"] if before.digest != after.digest else []
    notes += [
        f"{key}: {_meant(before, key)} → {_meant(after, key)}"
        for key in sorted(before.meta.keys() | after.meta.keys())
        if before.meta.get(key) != after.meta.get(key)
    ]
    old, new = (_described(ledger, ref) for ref in (before, after))
    notes += [
        f"{key}: {old.get(key, _ABSENT)} → {new.get(key, _ABSENT)}"
        for key in sorted(old.keys() | new.keys())
        if key not in before.meta and old.get(key) != new.get(key)
    ]
    if before.name == after.name:
        return Difference(path, _called(before), _called(after), tuple(notes))
    return Difference(path, before.name, after.name, tuple(notes))


def _meant(ref: InputRef, key: str) -> str:
    return _show(ref.meta[key]) if key in ref.meta else _ABSENT


def _called(ref: InputRef) -> str:
    """Return the name of an asset; for a reward, with the function, because one file may contain several functions."""
    return f"{ref.name} ({ref.meta['entry']})" if "entry" in ref.meta else ref.name


def _described(ledger: Ledger, ref: InputRef) -> dict[str, Any]:
    """Return the registry's facts about an asset; empty for a path that was never registered."""
    for asset in ledger.assets_by_digest(ref.digest or ""):
        if asset.ref == ref.name:
            at = datetime.fromtimestamp(asset.created_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            flat = {key: value for key, value in asset.meta.items() if isinstance(value, str | int | float)}
            return {"registered by": asset.created_by, "registered at": at, **flat}
    return {}


@dataclass(frozen=True, slots=True)
class Subject:
    """One compared model, with the evaluations that measured it."""

    label: str  # A, B …
    run: RunRecord
    manifest: Manifest
    rows: Mapping[str, StageRecord]
    evaluations: tuple[Measured, ...]  # all evaluations are of one model

    @property
    def name(self) -> str:
        """`RUN/STAGE`, or `RUN/STAGE+STAGE` for several evaluations."""
        return f"{self.run.id}/{'+'.join(one.stage.name for one in self.evaluations)}"

    @property
    def model(self) -> str:
        """The model's human-readable name."""
        return model_words(self.manifest, self.evaluations[0].model)

    @property
    def digest(self) -> str:
        """The model's digest."""
        return self.evaluations[0].digest

    def measured(self, metric: str, other: Measured | None = None) -> tuple[Measured, str] | None:
        """Return the evaluation that has a metric, and the evaluation's name for the metric.

        Args:
            other: an evaluation that has the metric, to identify equal data under another suite's name.
        """
        named = next(((one, metric) for one in self.evaluations if metric in one.evidence), None)
        if named or other is None:
            return named
        wanted = other.identity(metric)
        same = ((one, name) for one in self.evaluations for name in one.evidence if one.identity(name) == wanted)
        return next(same, None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One subject's value of one metric."""

    estimate: Estimate | None  # None: the metric was not measured
    paired: Paired | None = None  # the difference from the first subject; None for the first, or if pairing fails
    unpaired: str = ""  # why the values cannot be paired


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all subjects."""

    metric: str
    better: str | None  # higher | lower | None: neither
    cells: tuple[Cell, ...]  # in the order of the subjects


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One field that differs between the manifests."""

    path: str
    values: tuple[str, ...]  # in the order of the subjects
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedHistory:
    """Metrics by step of an imported run. The items are unknown, so the metrics cannot be paired."""

    label: str
    ref: str
    digest: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The output of `posttrain compare`."""

    subjects: tuple[Subject, ...]
    metrics: tuple[MetricRow, ...]
    parameters: tuple[ParameterRow, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE
    histories: tuple[ImportedHistory, ...] = ()
    warnings: tuple[str, ...] = ()  # a line if there are too few seeds for a comparison

    @property
    def methods(self) -> tuple[str, ...]:
        """The distinct methods of the intervals."""
        cells = [cell for row in self.metrics for cell in row.cells]
        own = [cell.estimate.method for cell in cells if cell.estimate]
        return tuple(dict.fromkeys([*own, *(cell.paired.method for cell in cells if cell.paired)]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "subjects": [
                {
                    "label": one.label,
                    "run": one.run.id,
                    "stages": [measured.stage.name for measured in one.evaluations],
                    "model": one.model,
                    "digest": one.digest,
                }
                for one in self.subjects
            ],
            "confidence": self.confidence,
            "metrics": [
                {
                    "metric": row.metric,
                    "better": row.better,
                    "values": {s.label: _cell_json(c) for s, c in zip(self.subjects, row.cells, strict=True)},
                }
                for row in self.metrics
            ],
            "parameters": [
                {"path": row.path, "values": dict(zip((s.label for s in self.subjects), row.values, strict=True))}
                for row in self.parameters
            ],
            "notes": list(self.notes),
            "histories": [asdict(one) for one in self.histories],
            "warnings": list(self.warnings),
        }


def subject(stores: Stores, label: str, run: RunRecord, stage: str | None) -> Subject:
    """Return the subject that one argument of the command line names.

    Args:
        stage: an evaluate stage; None: the evaluations of the run's released model, else of the last evaluated model.

    Raises:
        InputError: the run has no such evaluation, or the evaluation has not ended.
    """
    manifest = stores.manifest(run)
    rows = {row.name: row for row in stores.ledger.stages(run.id)}
    evaluators = [one.name for one in manifest.stages if one.measures]
    if stage is not None and stage not in evaluators:
        known = nearest(stage, evaluators) or " (the run has none)"
        raise InputError(f"compare: {run.id}/{stage} must be an evaluate stage, got {stage!r}{known}")
    troubles: list[str] = []
    found = [one for one in measurements(stores.blobs, manifest, rows, troubles) if stage in (None, one.stage.name)]
    if not found:
        what = f"{run.id}/{stage}" if stage else f"run {run.id}"
        state = troubles[0] if troubles else "no evaluation has ended"
        raise InputError(f"compare: {what} has no evaluation: {state}; see posttrain get {run.id}")
    chosen = _chosen(manifest, found)
    return Subject(label, run, manifest, rows, tuple(one for one in found if one.model == chosen))


def _chosen(manifest: Manifest, found: Sequence[Measured]) -> InputRef:
    own = [one for one in found if one.model.source == "stage"] or list(found)
    return next((one.model for one in own if one.model.word == released(manifest)), own[-1].model)


def side_by_side(ledger: Ledger, subjects: Sequence[Subject], histories: Sequence[ImportedHistory] = ()) -> Comparison:
    """Return a comparison of all subjects with the first subject.

    Args:
        histories: imported histories, which are shown next to the subjects but not compared.

    Raises:
        InputError: no two subjects share a metric.
    """
    rows = tuple(
        MetricRow(metric, better(metric), _cells(subjects, metric, owner))
        for metric, owner in _metrics(subjects).items()
    )
    if not histories and not any(sum(cell.estimate is not None for cell in row.cells) > 1 for row in rows):
        told = "; ".join(f"{one.label} {', '.join(m for e in one.evaluations for m in e.evidence)}" for one in subjects)
        raise InputError(f"compare: the models have no metric in common: {told}; evaluate them on the same suite")
    notes = dict.fromkeys(note for one in subjects[1:] for note in _settings(subjects[0], one))
    parameters, warnings = tuple(_parameters(ledger, subjects)), _few_seeds(subjects)
    return Comparison(tuple(subjects), rows, parameters, tuple(notes), histories=tuple(histories), warnings=warnings)


def _few_seeds(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Return a warning if models of several settings are compared and one setting has too few seeds."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for one in subjects:
        settings = digest_json(one.manifest.model_dump(mode="json", exclude={"name", "owner", "seed"}))
        seeds.setdefault((settings, one.model), set()).add(one.manifest.seed)
    return few_seeds(min(map(len, seeds.values()))) if len(seeds) > 1 else ()


def _metrics(subjects: Sequence[Subject]) -> dict[str, Measured]:
    """Return, by metric, the first evaluation that has it; other names of the same measurement are omitted."""
    found: dict[str, Measured] = {}
    for one in subjects:
        for measured in one.evaluations:
            for metric in measured.evidence:
                known = {owner.identity(name) for name, owner in found.items()}
                if metric not in found and measured.identity(metric) not in known:
                    found[metric] = measured
    return found


def _cells(subjects: Sequence[Subject], metric: str, owner: Measured) -> tuple[Cell, ...]:
    first: Evidence | None = None
    told = ""  # the identity of the first measurement; another subject may have another reward
    cells = []
    for place, one in enumerate(subjects):
        held = one.measured(metric, owner)
        if held is None:
            cells.append(Cell(None))
            continue
        evidence = held[0].evidence[held[1]]
        try:
            value = estimate(metric, evidence)
        except InputError as error:
            cells.append(Cell(None, None, str(error)))
            continue
        alike = held[0].identity(held[1])[1]
        if place == 0:
            first, told = evidence, alike
            cells.append(Cell(value))
        elif first is not None and alike != told:
            cells.append(Cell(value, None, f"its reward differs from that of {subjects[0].label}"))
        elif first is None:
            cells.append(Cell(value, None, f"{subjects[0].label} did not measure it"))
        else:
            cells.append(_paired(metric, value, evidence, first))
    return tuple(cells)


def _paired(metric: str, value: Estimate, evidence: Evidence, first: Evidence) -> Cell:
    try:
        return Cell(value, paired(metric, evidence, first))
    except InputError as error:
        return Cell(value, None, str(error))


def _settings(first: Subject, other: Subject) -> list[str]:
    """Return notes on suites that were measured with different settings, because settings also explain differences."""
    found = []
    for mine in first.evaluations:
        for theirs in other.evaluations:
            ours, suites = mine.stage.params.get("suites", {}), theirs.stage.params.get("suites", {})
            for name in ours.keys() & suites.keys():
                keys = (*_ALWAYS, *(_SAMPLED if (ours[name].get("samples") and suites[name].get("samples")) else ()))
                pairs = [(key, *((_UNSAID | said[name]).get(key) for said in (ours, suites))) for key in keys]
                changed = [f"{key} {one} → {another}" for key, one, another in pairs if one != another]
                if changed:
                    told = ", ".join(changed)
                    found.append(
                        f"suite {name}: the settings of {other.label} differ from those of {first.label}: {told}"
                    )
            if first.manifest.code.get(mine.stage.trainer) != other.manifest.code.get(theirs.stage.trainer):
                found.append(f"the evaluation code of {other.label} and {first.label} differs ({theirs.stage.trainer})")
    return found


def _parameters(ledger: Ledger, subjects: Sequence[Subject]) -> list[ParameterRow]:
    """Return the fields that differ between the manifests, with a column for each subject."""
    values: dict[str, list[str | None]] = {}
    before: dict[str, str] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for place, other in enumerate(subjects[1:], start=1):
        if other.run.id == subjects[0].run.id:
            continue
        for change in compare(ledger, subjects[0].manifest, other.manifest):
            values.setdefault(change.path, [None] * len(subjects))[place] = change.after
            before[change.path] = change.before
            notes.setdefault(change.path, change.notes)
    return [
        ParameterRow(path, tuple(before[path] if one is None else one for one in found), notes[path])
        for path, found in values.items()
    ]


def _cell_json(cell: Cell) -> dict[str, Any] | None:
    if cell.estimate is None:
        return None
    return {**asdict(cell.estimate), "difference": paired_json(cell.paired), "unpaired": cell.unpaired}


Runs = Mapping[int, str]  # seed → run id


def swept_model(manifest: Manifest, released: str | None) -> str:
    """Return the model by which settings are ranked, as named in a run file.

    This is the released model if an evaluation measures it, else the model of the last evaluation.

    Raises:
        InputError: there is no evaluation.
    """
    words = [stage.inputs["model"].word for stage in manifest.stages if stage.measures]
    if not words:
        raise InputError("sweep: needs an evaluate stage whose metric compares the runs, got none; add one")
    return released if released in words and released else words[-1]


def swept_metric(
    manifest: Manifest,
    contracts: Mapping[str, StageContract],
    gates: Sequence[GateRule],
    model: str,
    named: str | None,
) -> str:
    """Return the ranking metric: the named metric, else the first gate's, else the evaluation's first metric.

    Args:
        contracts: stage → its contract, whose metrics the stage measures.
        model: the result of `swept_model`.

    Raises:
        InputError: no evaluation of the model has that metric.
    """
    chosen = [s for s in manifest.stages if s.measures and s.inputs["model"].word == model]
    known = [metric for stage in chosen for metric in contracts[stage.name].metrics]
    wanted = named or next((gate.metric for gate in gates if gate.metric in known), known[0])
    if wanted not in known:
        raise InputError(
            f"sweep: --metric must be a metric that the run file measures, got {wanted!r}{nearest(wanted, known)}"
        )
    return wanted


def metric_direction(metric: str, gates: Sequence[GateRule], named: str | None) -> str:
    """Return the direction in which the metric improves: higher or lower.

    Raises:
        InputError: the direction is unknown.
    """
    gate = next((gate for gate in gates if gate.metric == metric), None)
    gated = gate and ("higher" if gate.higher_is_better else "lower")
    found = named or gated or better(metric)
    if found is None:
        raise InputError(f"sweep: --better must be higher or lower for metric {metric}, got none; add it")
    return found


def rank_runs(
    stores: Stores, settings: Sequence[Runs], model: str, metric: str, direction: str
) -> tuple[Ranking, tuple[str, ...]]:
    """Rank settings by their runs' measurements of one model so far; also return the read errors."""
    troubles: list[str] = []
    measured: list[dict[int, Evidence]] = []
    for runs in settings:
        found = {seed: _evidence(stores, run, model, metric, troubles) for seed, run in runs.items()}
        measured.append({seed: evidence for seed, evidence in found.items() if evidence is not None})
    return rank(metric, measured, direction), tuple(troubles)


def ranking_json(ranking: Ranking, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return plain JSON.

    Args:
        settings: other facts about each setting.
    """
    rows = [
        {
            **own,
            "mean": asdict(one.mean) if one.mean else None,
            "values": {str(seed): value for seed, value in one.values.items()},
            "rank": [one.best, one.worst] if one.mean else None,
        }
        for own, one in zip(settings, ranking.settings, strict=True)
    ]
    pairs = [
        {"first": d.first, "second": d.second, "difference": d.value, "low": d.low, "high": d.high, "seeds": d.seeds}
        for d in ranking.differences
    ]
    return {
        "confidence": ranking.confidence,
        "settings": rows,
        "differences": pairs,
        "notes": list(ranking.notes),
        "warnings": list(ranking.warnings),
    }


def _evidence(stores: Stores, run_id: str, model: str, metric: str, troubles: list[str]) -> Evidence | None:
    """Return a run's measurement of the model; None if the model was not measured."""
    manifest, rows = stores.manifest(stores.ledger.run(run_id)), {row.name: row for row in stores.ledger.stages(run_id)}
    found = [
        one
        for one in measurements(stores.blobs, manifest, rows, troubles)
        if one.model.word == model and metric in one.evidence
    ]
    return found[-1].evidence[metric] if found else None
