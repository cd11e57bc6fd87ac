"""Gates alone: a file of gates judges the results of evaluations that ran elsewhere, without a workspace.

::

    gates:                                                     # the gates of run.yaml
      - {name: accuracy, metric: gsm8k/exact_match, at_least: 0.6}
      - {name: no-regression, metric: gsm8k/exact_match, not_worse_than: base, margin: 0.02}
    ranges: {summaries/rouge1: [0, 1]}                         # of metrics whose results declare no range
    seed: 0                                                    # of the limits of means

The rules, their ranges and the verdicts are those of a run's gate stage. Evidence that a gate stage judges as ERROR
(missing or unequal items, NaN, a value out of range) is invalid input here.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet
from pydantic import Field, PlainValidator

from posttrain.control.verdicts import read_evidence
from posttrain.data.files import read_file
from posttrain.decision.gates import Baseline, Evidence, judge_all
from posttrain.domain.canonical import derive_seed, digest_json
from posttrain.domain.errors import (
    GateInconclusiveError,
    GateRejectedError,
    InputError,
    IntegrityError,
    PosttrainError,
    meant,
)
from posttrain.domain.gates import GateReport, GateRule, Outcome
from posttrain.domain.kinds import RATE, ItemRange
from posttrain.domain.runspec import read_yaml
from posttrain.domain.validation import Frozen, validated
from posttrain.foreign.evaluations import Measured, read_evaluation
from posttrain.web.report import GatePage, gate_page

PARQUET = "parquet"
_COLUMNS = ("metric", "item_id", "value", "binary", "low", "high")
RESULTS, AGAINST = "--results", "--against"
_SUFFIXES = (".parquet", ".json", ".eval")  # of the files in a folder that are read
_METRICS, _RESPONSES = "metrics.parquet", "items.parquet"  # the outputs of an evaluation
_LISTED = 30  # metrics that an error lists


def _range_of(value: Any) -> ItemRange:
    if value == "rate":
        return RATE
    numbers = isinstance(value, list) and [type(one) in (int, float) and math.isfinite(one) for one in value]
    if numbers != [True, True] or value[0] >= value[1]:
        raise ValueError(
            f"must be rate, or the least and the greatest value of an item, such as [0, 10], got {value!r:.60}"
        )
    return ItemRange(float(value[0]), float(value[1]))


class GateFile(Frozen):
    """A file of gates without a run."""

    gates: Annotated[tuple[GateRule, ...], Field(min_length=1)]
    ranges: dict[str, Annotated[ItemRange, PlainValidator(_range_of)]] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0, lt=2**53)


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """A file with results."""

    file: str
    format: str  # parquet, lm-eval or inspect
    digest: str  # of the metrics, items and values in the file


@dataclass(slots=True)
class _Model:
    """The results of one model."""

    option: str  # the option that names the files
    files: list[ResultsFile] = field(default_factory=list)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    sources: dict[str, ResultsFile] = field(default_factory=dict)  # metric → its file
    measured: dict[str, Measured] = field(default_factory=dict)  # the metrics of other programs, as they were read

    @property
    def digest(self) -> str:
        """The digest of the results, in any order of files."""
        return digest_json(sorted(one.digest for one in self.files))


@dataclass(frozen=True, slots=True)
class GateCheck:
    """The verdicts on results."""

    report: GateReport  # its digests of models are those of the results
    results: tuple[ResultsFile, ...]
    against: tuple[ResultsFile, ...]
    not_judged: tuple[Measured, ...]  # metrics that are no means of items
    notes: tuple[str, ...]

    @property
    def outcome(self) -> PosttrainError | None:
        """The error with which the command ends; None: every gate passes."""
        if self.report.outcome is Outcome.PASS:
            return None
        error = GateInconclusiveError if self.report.outcome is Outcome.INCONCLUSIVE else GateRejectedError
        failed = [one for one in self.report.verdicts if one.outcome is not Outcome.PASS]
        names = ", ".join(f"{one.gate} {one.outcome}" for one in failed)
        return error(
            f"{len(failed)} of {len(self.report.verdicts)} gates did not pass: {names}; see their reasons above"
        )

    @property
    def unjudged(self) -> Iterator[str]:
        """A line per metric that no gate can judge, with the reason."""
        for one in self.not_judged:
            value = "" if one.value is None else f" {one.value:.4g}"
            parts = "" if one.numerator is None else f" ({one.numerator:.4g} over {one.denominator:.4g})"
            yield f"not judged: {one.metric}{value}{parts}: {one.refused}"

    def to_json(self) -> dict[str, Any]:
        """Return the verdicts, the files and the metrics without items as plain JSON."""
        keys = ("metric", "value", "numerator", "denominator", "refused")
        return {
            "outcome": self.report.outcome.value,
            "report": self.report.model_dump(mode="json"),
            "results": [asdict(one) for one in self.results],
            "against": [asdict(one) for one in self.against],
            "not_judged": [{key: getattr(one, key) for key in keys} for one in self.not_judged],
            "notes": list(self.notes),
        }


def check_gates(path: Path, results: Sequence[Path], against: Sequence[Path] = ()) -> GateCheck:
    """Judge the gates of a file on results.

    Args:
        path: the file of gates.
        results: files or folders with the results of the judged model.
        against: files or folders with the results of the model with which gates compare.

    Raises:
        InputError: a file is invalid, a gate needs a workspace, or a gate cannot be judged on these results.
    """
    spec = validated(GateFile, read_yaml(path), str(path))
    rivals = sorted({rule.rival for rule in spec.gates if rule.rival})
    for rule in spec.gates:
        _refuse_rival(f"{path}: gates.{rule.name}", rule, rivals, bool(against))
    ours, theirs = _read(RESULTS, results, spec, path), _read(AGAINST, against, spec, path)
    unknown = next((name for name in spec.ranges if name not in ours.evidence), None)
    if unknown is not None:
        raise InputError(
            f"{path}: ranges: must name metrics of {RESULTS}, got {unknown!r}{_among(unknown, ours)}; correct the name"
        )
    for rule in spec.gates:
        _check(f"{path}: gates.{rule.name}", rule, [ours, theirs] if rule.rival else [ours])
    report = judge_all(
        spec.gates,
        ours.evidence,
        {rival: Baseline(theirs.digest, theirs.evidence) for rival in rivals},
        candidate_digest=ours.digest,
        evaluator_digest=None,
        seed=derive_seed(spec.seed, "gate"),
    )
    wrong = next((verdict for verdict in report.verdicts if verdict.outcome is Outcome.ERROR), None)
    if wrong is not None:
        raise InputError(_complete(f"{path}: gates.{wrong.gate}: {wrong.reason}"))
    used = [model.measured.get(rule.metric) for rule in spec.gates for model in (ours, theirs)]
    notes = [one.note for one in used if one and one.note]
    notes += [f"{AGAINST} was not used, because no gate compares with another model"] if against and not rivals else []
    refused = tuple(one for one in ours.measured.values() if one.refused)
    return GateCheck(report, tuple(ours.files), tuple(theirs.files), refused, tuple(sorted(set(notes))))


def write_gate_page(path: Path, check: GateCheck, gates: Path) -> None:
    """Write the page with the verdicts.

    Args:
        gates: the file of gates.

    Raises:
        InputError: the page would replace an input.
        WorkspaceError: `path` cannot be written.
    """
    read = {Path(one.file) for one in check.results + check.against} | {gates}
    if path.exists() and any(path.samefile(one) for one in read):
        raise InputError(f"--page: must not be a file that the command reads, got {path}; choose another path")
    options = ((RESULTS, check.results), (AGAINST, check.against))
    shown = tuple((option, one.file, one.format, one.digest) for option, files in options for one in files)
    gate_page(path, GatePage(check.report, shown, check.not_judged, check.notes))


def _complete(message: str) -> str:
    """Return an error with a next action."""
    return message if ";" in message else f"{message.rstrip('.')}; evaluate again"


def _refuse_rival(where: str, rule: GateRule, rivals: Sequence[str], against: bool) -> None:
    """Reject a gate that needs a workspace or a model without results."""
    if rule.meets_channel:
        raise InputError(
            f"{where}: must compare with a number or with the model of {AGAINST}, got channel, which only a workspace "
            f"has; write base, and give the released model's results with {AGAINST}"
        )
    if rule.rival and not against:
        raise InputError(f"{where}: compares with {rule.rival}, so it needs that model's results; add {AGAINST} FILE")
    if rule.rival and len(rivals) > 1:
        raise InputError(
            f"{where}: the gates of one file must compare with one model, that of {AGAINST}, got "
            f"{' and '.join(rivals)}; use a file for each"
        )


def _read(option: str, paths: Sequence[Path], spec: GateFile, gates: Path) -> _Model:
    """Return the results of a model; each metric is in one file only."""
    model = _Model(option)
    for path in (file for one in paths for file in _files(one)):
        kind, evidence, measured = _contents(path)
        values = {name: [list(one.item_ids), [repr(value) for value in one.values]] for name, one in evidence.items()}
        source = ResultsFile(str(path), kind, digest_json(values))
        model.files.append(source)
        for name, found in evidence.items():
            if name in model.sources:
                raise InputError(
                    f"{path}: each metric must be in one file of {option}, got {name} here and in "
                    f"{model.sources[name].file}; leave one of them out"
                )
            given = spec.ranges.get(name)
            if given and kind == PARQUET and found.range not in (None, given):
                raise InputError(f"{gates}: ranges.{name}: must be the range that {path} declares; remove the line")
            model.sources[name] = source
            model.evidence[name] = replace(found, range=given or found.range)
        model.measured |= {one.metric: one for one in measured}
    return model


def _files(path: Path) -> Iterator[Path]:
    """Yield the results files of a folder, or the file itself."""
    found = [one for one in sorted(path.rglob("*")) if one.suffix in _SUFFIXES and one.is_file()]
    found = [one for one in found if one.name != _RESPONSES or one.with_name(_METRICS) not in found]
    if path.is_dir() and not found:
        raise InputError(f"{path}: must contain results ({', '.join(_SUFFIXES)}), got a folder without; check the path")
    if not path.is_dir() and path.exists() and not path.is_file():
        raise InputError(f"{path}: must be a file or a folder, got something else; check the path")
    yield from found or [path]


def _contents(path: Path) -> tuple[str, Mapping[str, Evidence], Sequence[Measured]]:
    """Return a file's format, its values by metric, and the metrics of another program as they were read."""
    with path.open("rb") as opened:
        if opened.read(4) == b"PAR1":
            return PARQUET, _parquet(path), ()
    kind, measured = read_evaluation(path)
    values = {one.metric: np.array(list(one.items.values()), dtype=np.float64) for one in measured}
    return kind, {one.metric: Evidence(tuple(one.items), values[one.metric], one.range) for one in measured}, measured


def _parquet(path: Path) -> dict[str, Evidence]:
    try:
        deque(read_file(path, str(path)), maxlen=0)  # rejects a file that unpacks to far more than its size
        absent = [name for name in _COLUMNS if name not in pyarrow.parquet.read_schema(path).names]
        if absent:
            raise InputError(f"{path}: must have the columns {', '.join(_COLUMNS)}, got no {absent[0]}; add it")
        found = read_evidence(path.read_bytes(), str(path))
    except (InputError, IntegrityError) as error:
        raise InputError(_complete(str(error))) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: values must be numbers ({error!s:.100}); write them as numbers") from error
    wrong = [name for metric, one in found.items() for name in (metric, *one.item_ids) if not isinstance(name, str)]
    if wrong:
        raise InputError(f"{path}: metric and item_id must be text, got {wrong[0]!r:.60}; write them as text")
    return found


def _among(word: str, model: _Model) -> str:
    """Return the name that was meant, and the metrics that gates can judge."""
    names = sorted(name for name in model.evidence if name not in model.measured or not model.measured[name].refused)
    listed = names if len(names) <= _LISTED else [*names[:_LISTED], f"and {len(names) - _LISTED} more"]
    return f"{meant(word, names)} (available: {', '.join(listed) or 'none'})"


def _check(where: str, rule: GateRule, models: Sequence[_Model]) -> None:
    """Reject a gate that cannot be judged: its metric, its values, or its threshold."""
    for model in models:
        possible = _range(where, rule.metric, model)
        try:
            rule.check_range(possible)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


def _range(where: str, metric: str, model: _Model) -> ItemRange:
    """Return the range of a metric that a gate can judge."""
    if metric not in model.evidence:
        raise InputError(
            f"{where}: metric: must be a metric of {model.option}, got {metric!r}{_among(metric, model)}; correct it"
        )
    evidence, source = model.evidence[metric], model.sources[metric]
    if metric in model.measured and model.measured[metric].refused:
        raise InputError(f"{where}: {metric} cannot be judged: {model.measured[metric].refused}; use another metric")
    lacking = [evidence.item_ids[place] for place in np.flatnonzero(~np.isfinite(evidence.values)).tolist()]
    if lacking:
        raise InputError(
            f"{where}: {metric} must have a finite value for every item, got none or NaN for {len(lacking)} items of "
            f"{source.file}, e.g. {lacking[0]!r}; evaluate these items again"
        )
    if evidence.range is None:
        raise InputError(
            f"{where}: {metric} needs the range of an item's value, which {source.file} does not declare; add "
            f"ranges: {{{metric}: [LEAST, GREATEST]}}"
        )
    other = np.flatnonzero((evidence.values != 0) & (evidence.values != 1))
    if evidence.range.binary and source.format != PARQUET and len(other):
        raise InputError(
            f"{where}: {metric} must be 0 or 1 for each item, got {evidence.values[other[0]]:g} for "
            f"{evidence.item_ids[other[0]]!r}; add ranges: {{{metric}: [0, 1]}}"
        )
    return evidence.range
