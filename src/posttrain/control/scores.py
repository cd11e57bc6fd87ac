"""Scores of a run: every metric of every suite, before and after training, and the responses behind the scores.

Scores are read from the evaluations' per-item results. *Before* is either a model that the run started from (the
channel's, the base model, or an earlier stage's), if an evaluation of this run measured that model on the same suite,
or a model with which a gate compares. No score is estimated from training.

A model's responses in an evaluation are read item by item from `items.parquet`. Texts are read in batches, and only the
selected texts stay in memory.
"""

import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.control.release_plan import RIVAL
from posttrain.control.verdicts import read_evidence
from posttrain.decision.gates import CONFIDENCE, Estimate, Evidence, Paired, estimate, paired
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.kinds import HARNESS, METRICS, better, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import StageRecord
from posttrain.domain.rewards import JUDGES

T = TypeVar("T")
_MARGIN = 0.02  # the largest `margin` in a suggested gate; `plan` prints the gate's power on the current items
JUDGED = ("reward", "sampled_reward")  # metrics of a suite that depend on its reward
# parameters of a harness that change what the model reads: scores with different ones are not compared
_PROMPTED = ("num_fewshot", "chat", "add_bos_token", "max_length", "max_new_tokens", "temperature")
_LIGHT = ("suite", "item_id", "kind", "sample_index", "correct", "truncated", "tokens")
_TEXTS = ("prompt", "answer", "response", "extracted")
_REWARD, _COMPONENTS = "reward", "components"  # columns; the second contains JSON
_BATCH = 512  # rows


@dataclass(frozen=True, slots=True)
class Before:
    """The same metric of a model from which the measured model was trained, or which it would replace."""

    of: str  # channel prod | base model:tiny@1 | stage sft
    stage: str  # the stage of the run that measured the earlier model
    estimate: Estimate
    paired: Paired | None  # after - before; None: the values cannot be paired
    unpaired: str = ""  # why the values cannot be paired

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        compared = {"difference": paired_json(self.paired), "unpaired": self.unpaired}
        return {"of": self.of, "stage": self.stage, **asdict(self.estimate), **compared}


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one suite, measured on one model."""

    stage: str  # the evaluate stage
    suite: str
    metric: str  # as gates name it: heldout/accuracy
    of: str  # the measured model: stage grpo | base … | channel …
    estimate: Estimate
    before: tuple[Before, ...]  # empty: the run measured no earlier model
    trained: bool = True  # whether this run trained the model; an input model has no earlier model

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        told = {"stage": self.stage, "suite": self.suite, "metric": self.metric, "of": self.of}
        return {**told, **asdict(self.estimate), "before": [one.to_json() for one in self.before]}


@dataclass(frozen=True, slots=True)
class Scores:
    """A run's scores, and errors in reading them."""

    rows: tuple[Score, ...] = ()
    troubles: tuple[str, ...] = ()
    confidence: float = CONFIDENCE  # two-sided confidence of all intervals
    regressions: tuple[str, ...] = ()  # a line for each metric that is significantly worse than before

    @property
    def methods(self) -> tuple[str, ...]:
        """The distinct methods of the intervals."""
        own = [row.estimate.method for row in self.rows]
        return tuple(dict.fromkeys([*own, *(b.paired.method for row in self.rows for b in row.before if b.paired)]))

    @property
    def lone(self) -> bool:
        """Whether a trained model has a score without an earlier model to compare with."""
        return any(row.trained and not row.before for row in self.rows)

    @property
    def trained(self) -> bool:
        """Whether any score is of a model that this run trained."""
        return any(row.trained for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "confidence": self.confidence,
            "rows": [row.to_json() for row in self.rows],
            "regressions": list(self.regressions),
            "troubles": list(self.troubles),
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """One evaluation with its per-item values."""

    stage: StageManifest
    record: StageRecord
    evidence: Mapping[str, Evidence]  # metric → values

    @property
    def model(self) -> InputRef:
        """The ref of the measured model."""
        return self.stage.inputs["model"]

    @property
    def digest(self) -> str:
        """The digest of the measured model."""
        return str(self.record.inputs.get("model", {}).get("digest", ""))

    def identity(self, metric: str) -> tuple[str, str]:
        """Return the identity of a measurement across evaluations: the suite's data, and the metric in it."""
        suite, _, quantity = metric.partition("/")
        data = self.stage.inputs.get(f"suites.{suite}")
        if HARNESS in self.stage.inputs:
            how = digest_json({name: self.stage.params[name] for name in _PROMPTED})
            return f"{self.stage.inputs[HARNESS].digest} {how} {suite}", quantity
        judged = f" {self.judge(suite)}" if quantity in JUDGED else ""
        return (data.digest or data.name if data else suite), f"{quantity}{judged}"

    def judge(self, suite: str) -> str:
        """Return the digest of a suite's reward functions, weights and range; empty without a reward."""
        params, own = self.stage.params.get("suites", {}).get(suite, {}), f"{JUDGES}{suite}"
        slots = {slot: ref for slot, ref in self.stage.inputs.items() if re.split("[:/]", slot)[0] == own}
        if not slots:
            return ""
        called = {
            slot.removeprefix(own): [ref.digest, {k: v for k, v in ref.meta.items() if k != "source"}]
            for slot, ref in slots.items()
        }
        weights = params.get("reward") if isinstance(params.get("reward"), Mapping) else None
        return digest_json([called, weights, params.get("reward_range")])


def run_scores(blobs: BlobStore, manifest: Manifest, rows: Mapping[str, StageRecord]) -> Scores:
    """Return all scores of a run that are measured so far.

    Args:
        rows: the row of each stage, by name.
    """
    troubles: list[str] = []
    found = list(measurements(blobs, manifest, rows, troubles))
    scores: dict[str, list[Score]] = {}
    used: set[str] = set()  # evaluations whose values are shown as earlier values
    for one in found:
        scores[one.stage.name] = list(_scores(one, _earlier(manifest, one, found), manifest, troubles))
        used |= {before.stage for score in scores[one.stage.name] for before in score.before}
    shown = [s for stage, own in scores.items() for s in own if s.before or stage not in used]
    final = f"stage {released(manifest)}"
    ranked = tuple(sorted(shown, key=lambda score: score.of != final))
    judged = [score for score in ranked if score.trained and (manifest.release is None or score.of == final)]
    return Scores(ranked, tuple(troubles), regressions=tuple(_regressions(manifest, judged)))


def _regressions(manifest: Manifest, scores: Iterable[Score]) -> Iterator[str]:
    """Yield a line for each earlier model with a better score: the whole interval of the difference is worse than 0.

    The metric of a gate has priority. For a run with a release, the line suggests a gate that would fail on these data.
    """
    found: dict[str, list[tuple[Score, Before, Paired]]] = {}
    for score in scores:
        for before in score.before:
            if before.paired is not None and _worse(score.metric, before.paired):
                found.setdefault(f"{score.of} is significantly worse than {before.of}", []).append(
                    (score, before, before.paired)
                )
    judged = {rule.metric for rule in manifest.gates}
    compared = {rule.metric for rule in manifest.gates if rule.needs_baseline}
    for words, rows in found.items():
        score, before, pair = min(rows, key=lambda row: (row[0].metric not in compared, row[0].metric not in judged))
        values = f"{before.estimate.value:.3g} → {score.estimate.value:.3g}, {pair} on {pair.items} items"
        others = [other.metric for other, _, _ in rows if other is not score]
        also = f"; also worse by {', '.join(others)}" if others else ""
        advice = (
            ""
            if score.metric in compared or manifest.release is None
            else f"; to stop such a release, add to gates: {{{_gate(score, before, pair)}}}"
        )
        yield f"{words}: {score.metric} {values}{also}{advice}"


def _worse(metric: str, pair: Paired) -> bool:
    direction = better(metric)
    return direction is not None and (pair.low > 0 if direction == "lower" else pair.high < 0)


def _gate(score: Score, before: Before, pair: Paired) -> str:
    rival = {"channel": "channel", "base": "base"}.get(before.of.split()[0], before.of.partition(" ")[2])
    lower = ", direction: lower" if better(score.metric) == "lower" else ""
    margin = f"margin: {min(_MARGIN, abs(pair.difference) / 2):.2g}"
    return f"name: no-regression, metric: {score.metric}{lower}, not_worse_than: {rival}, {margin}"


def measurements(
    blobs: BlobStore, manifest: Manifest, rows: Mapping[str, StageRecord], troubles: list[str]
) -> Iterator[Measured]:
    """Yield every ended evaluation of a run, in the order of its stages.

    Args:
        troubles: list to which a line is appended for each evaluation with unreadable results.
    """
    for stage in manifest.stages:
        record = rows.get(stage.name)
        made = record.outputs.get(METRICS) if record and stage.measures else None
        if record is None or made is None:
            continue
        try:
            evidence = read_evidence(blobs.get(made["digest"]), stage.name)
        except (IntegrityError, NotFoundError) as error:
            troubles.append(f"{stage.name}: {error}")
            continue
        yield Measured(stage, record, evidence)


def model_words(manifest: Manifest, ref: InputRef) -> str:
    """Return a model's human-readable name."""
    if ref.source == "stage":
        return f"stage {ref.word}"
    if ref.source == "channel":
        return f"channel {ref.name}"
    return f"base {ref.name}" if any("model" in stage.outputs for stage in manifest.stages) else ref.name


def _earlier(manifest: Manifest, one: Measured, found: list[Measured]) -> list[Measured]:
    """Return the evaluations of the models with which the gates compare this model, and of this model's ancestors.

    The channel's model comes first, then the other models of gates, then the ancestors, oldest first.
    """
    line = list(_ancestors(manifest, one.model))
    others = [other for other in found if other.model != one.model]
    rivals = one.model.source == "stage" and released(manifest) in (None, one.model.word)
    channels = [other for other in others if other.model.source == "channel" and rivals]
    line = [model for model in line if model.source != "channel"]
    gated = [model for model in _rivals(manifest) if rivals and model not in line]
    beside = [other for other in others if other.model in gated]
    older = [(line.index(other.model), other) for other in others if other.model in line]
    return [*channels, *beside, *(other for _, other in sorted(older, key=lambda it: -it[0]))]


def _rivals(manifest: Manifest) -> list[InputRef]:
    """Return the models of this run with which its gates compare."""
    inputs = [stage.inputs for stage in manifest.stages if kind_of(stage.kind).judges]
    named = [(RIVAL + rule.rival, own) for rule in manifest.gates if rule.rival for own in inputs]
    return [own[slot] for slot, own in named if slot in own]


def released(manifest: Manifest) -> str | None:
    """Return the name of the released model in the run file; None without a release."""
    return manifest.release.model if manifest.release else None


def _ancestors(manifest: Manifest, model: InputRef) -> Iterator[InputRef]:
    """Yield the models from which this model was trained, the nearest first."""
    while model.source == "stage":
        maker = next(stage for stage in manifest.stages if stage.name == model.name)
        if "model" not in maker.inputs:
            return
        model = maker.inputs["model"]
        yield model


def _scores(one: Measured, earlier: list[Measured], manifest: Manifest, troubles: list[str]) -> Iterator[Score]:
    for metric, evidence in one.evidence.items():
        try:
            after = estimate(metric, evidence)
            before = tuple(_before(one, metric, earlier, manifest))
        except InputError as error:
            troubles.append(f"{one.stage.name}: {error}")
            continue
        suite, words = metric.partition("/")[0], model_words(manifest, one.model)
        yield Score(one.stage.name, suite, metric, words, after, before, one.model.source == "stage")


def _before(one: Measured, metric: str, earlier: list[Measured], manifest: Manifest) -> Iterator[Before]:
    """Yield one result per evaluation; among equal suites, the suite with the same name has priority."""
    for other in earlier:
        same = [name for name in other.evidence if other.identity(name) == one.identity(metric)]
        if not same:
            continue
        name, pair, why = metric if metric in same else same[0], None, ""
        try:
            pair = paired(metric, one.evidence[metric], other.evidence[name])
        except InputError as error:
            why = str(error)
        yield Before(
            model_words(manifest, other.model), other.stage.name, estimate(name, other.evidence[name]), pair, why
        )


def paired_json(one: Paired | None) -> dict[str, Any] | None:
    """Return plain JSON."""
    if one is None:
        return None
    limits = {"value": one.difference, "low": one.low, "high": one.high, "method": one.method}
    counts = {"higher": one.higher, "lower": one.lower, "same": one.same, "items": one.items}
    return {**limits, **counts, "mcnemar_p": one.mcnemar_p}


@dataclass(frozen=True, slots=True)
class Answered:
    """One response without its texts."""

    row: int  # number of the row in the file
    suite: str
    item_id: str
    kind: str  # greedy | sample
    sample: int
    correct: bool | None  # None: no answer to compare with
    truncated: bool | None  # None: a harness does not record it
    tokens: int | None
    reward: float | None = None  # None: the suite has no reward


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its texts."""

    answered: Answered
    prompt: str
    answer: str  # the expected answer
    response: str
    extracted: str | None  # the compared part of the response; None: no answer found
    components: Mapping[str, float] = field(default_factory=dict)  # component of the reward → value


class Responses:
    """The responses of one evaluation.

    Args:
        data: the bytes of `items.parquet`.
        source: the name of the file in errors.

    Raises:
        IntegrityError: the bytes are not such a Parquet file.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        try:
            self._file = pq.ParquetFile(io.BytesIO(data))
            missing = [name for name in (*_LIGHT, *_TEXTS) if name not in self._file.schema_arrow.names]
            if missing:
                raise ValueError(f"column {missing[0]} is missing")
            known = self._file.schema_arrow.names
            self._scored = [name for name in (_REWARD, _COMPONENTS) if name in known]  # absent in earlier versions
            columns = self._file.read(columns=[*_LIGHT, *self._scored[:1]]).to_pydict()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise IntegrityError(f"{source}: responses cannot be read: {error}; evaluate again") from error
        self.all: Sequence[Answered] = [
            Answered(place, *row) for place, row in enumerate(zip(*columns.values(), strict=True))
        ]

    def greedy(self, suite: str) -> list[Answered]:
        """Return the greedy responses to a suite, one per item, in the suite's order."""
        return [one for one in self.all if one.suite == suite and one.kind == "greedy"]

    @property
    def suites(self) -> list[str]:
        """The names of the suites."""
        return list(dict.fromkeys(one.suite for one in self.all))

    def texts(self, chosen: Collection[Answered]) -> dict[int, Response]:
        """Return the whole responses, by row.

        Raises:
            IntegrityError: the file is damaged.
        """
        wanted = {one.row: one for one in chosen}
        found: dict[int, Response] = {}
        if not wanted:
            return found
        try:
            row = 0
            for batch in self._file.iter_batches(batch_size=_BATCH, columns=[*_TEXTS, *self._scored[1:]]):
                for place in range(batch.num_rows):
                    if row in wanted:
                        prompt, answer, response, extracted = (batch[name][place].as_py() for name in _TEXTS)
                        parts = batch[_COMPONENTS][place].as_py() if _COMPONENTS in self._scored else None
                        said = prompt or "", answer or "", response or "", extracted
                        found[row] = Response(wanted[row], *said, json.loads(parts or "{}"))
                    row += 1
        except (OSError, ValueError, pa.ArrowException) as error:
            raise IntegrityError(f"{self._source}: responses cannot be read: {error}; evaluate again") from error
        return found


def spread(rows: Sequence[T], most: int) -> list[T]:
    """Return at most `most` rows, evenly spaced, since the beginning of a suite may differ from the rest."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // max(1, most - 1)] for place in range(most)]
