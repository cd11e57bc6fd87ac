"""A run's trace: files that show how the run used its time, recorded samples in full, and a few responses.

The responses are recorded training samples, and wrong and right responses in the run's evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.control.launch import trained_elsewhere
from posttrain.control.release_plan import ADDED
from posttrain.control.scores import Answered, Response, Responses, model_words, released, spread
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, PosttrainError
from posttrain.domain.jobs import Sample, Span
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.store.atomic import make_folder, write_atomic
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import tree_listing
from posttrain.telemetry.timeline import AttemptSpans, StageTimeline, chrome_trace, summarise
from posttrain.views.logs import stage_attempts
from posttrain.views.status import sampling_words
from posttrain.web.report import SampledStep, StageSamples, SuiteAnswers, TracePage, trace_page
from posttrain.workspace.settings import OpenWorkspace

_SEGMENTS = 24  # maximum number of segments of recorded samples that are read
_STEPS = 5  # maximum number of shown steps of a stage, spread from the first to the last
_MEMBERS = 4  # maximum number of shown members of a group
_WRONG, _RIGHT = 24, 6  # maximum numbers of shown responses for a suite
_CUT = 4_000  # maximum characters of a text in a page


@dataclass(frozen=True, slots=True)
class WrittenTrace:
    """The files of a run's trace, and its contents."""

    run_id: str
    trace: Path  # the file for ui.perfetto.dev or chrome://tracing
    page: Path
    stages: tuple[StageTimeline, ...]
    samples: int
    notes: tuple[str, ...]  # lines about segments that could not be read and are omitted
    begun: tuple[str, ...] = ()  # lines about stages that resumed another stage's checkpoint

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "run": self.run_id,
            "trace": str(self.trace),
            "page": str(self.page),
            "stages": [stage.to_json() for stage in self.stages],
            "samples": self.samples,
            "notes": list(self.notes),
            "begun": list(self.begun),
        }


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample, and the attempt that recorded it."""

    stage: str
    attempt: int
    sample: Sample
    pieces: tuple[str, ...] = ()  # text of each response token; empty without a tokenizer

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"stage": self.stage, "attempt": self.attempt, **asdict(self.sample), "pieces": list(self.pieces)}


def write_trace(workspace: OpenWorkspace, run_id: str, stage: str | None, folder: Path) -> WrittenTrace:
    """Write `<run>-trace.json` and `<run>-trace.html` for one stage or all stages into `folder`.

    Raises:
        NotFoundError: the run has no such stage.
        InputError: no stage has reported spans.
        WorkspaceError: `folder` cannot be written.
    """
    notes: list[str] = []
    attempts = [_spans(*told, notes) for told in stage_attempts(workspace, run_id, stage)]
    if not any(attempt.spans for attempt in attempts):
        raise InputError(
            f"trace: {f'stage {stage} of ' if stage else ''}run {run_id} has reported no spans; a training stage "
            f"reports them from its first step; see posttrain get {run_id}"
        )
    recorded = recorded_samples(workspace, run_id, stage, say=notes.append)
    run = workspace.ledger.run(run_id)
    make_folder(folder)
    trace, page = folder / f"{run_id}-trace.json", folder / f"{run_id}-trace.html"
    write_atomic(trace, json.dumps(chrome_trace(attempts), separators=(",", ":")).encode())
    samples = [one.sample for one in recorded]
    begun = tuple(_begun(workspace, run_id, stage))
    trace_page(page, TracePage(run_id, run.name, run.state, attempts, samples, notes, begun))
    return WrittenTrace(run_id, trace, page, tuple(summarise(attempts)), len(samples), tuple(notes), begun)


def recorded_samples(
    workspace: OpenWorkspace,
    run_id: str,
    stage: str | None = None,
    step: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[RecordedSample]:
    """Return the recorded samples by stage and step; for a step that was repeated, the samples of the last attempt.

    Raises:
        NotFoundError: the run has no such stage.
    """
    found: dict[tuple[str, str], RecordedSample] = {}
    order: dict[str, int] = {}
    for name, attempt, folder in stage_attempts(workspace, run_id, stage):
        order.setdefault(name, len(order))
        for sample in folder.recorded_samples(lambda error: say(str(error))):
            if step in (None, sample.step):
                found[name, sample.id] = RecordedSample(name, attempt.number, sample)
    return sorted(found.values(), key=lambda one: (order[one.stage], _numbers(one.sample.id)))


def recorded_sample(workspace: OpenWorkspace, run_id: str, sample: str, stage: str | None = None) -> RecordedSample:
    """Return one sample with the text of its tokens.

    Raises:
        NotFoundError: the sample was not recorded, or the run has no such stage.
        InputError: several stages recorded a sample with that id.
    """
    everything = recorded_samples(workspace, run_id, stage)
    found = [one for one in everything if one.sample.id == sample]
    if not found:
        raise NotFoundError(_unknown(run_id, sample, everything))
    if len(found) > 1:
        stages = ", ".join(one.stage for one in found)
        raise InputError(f"sample {sample} must be in one stage, got stages {stages}; add --stage")
    (one,) = found
    return RecordedSample(one.stage, one.attempt, one.sample, tuple(_pieces(workspace, run_id, one)))


def _begun(workspace: OpenWorkspace, run_id: str, stage: str | None) -> Iterator[str]:
    """Yield one line for every stage that resumed another stage's checkpoint, at which the stage's trace begins."""
    found: dict[str, list[AttemptRecord]] = {}
    for name, attempt, _ in stage_attempts(workspace, run_id, stage):
        found.setdefault(name, []).append(attempt)
    for name, attempts in found.items():
        words = trained_elsewhere(workspace.stores, workspace.jobs.folders, attempts)
        if words:
            yield f"{name}: {words}"


def _spans(stage: str, attempt: AttemptRecord, folder: AttemptFolder, notes: list[str]) -> AttemptSpans:
    facts, _ = folder.facts(unreadable=lambda error: notes.append(str(error)))
    return AttemptSpans(stage, attempt.number, [fact for fact in facts if isinstance(fact, Span)])


def _numbers(sample_id: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in sample_id.split("."))


def _unknown(run_id: str, sample_id: str, recorded: Sequence[RecordedSample]) -> str:
    more = "`trace: {groups: all}` in the stage's parameters records more in another run"
    if not recorded:
        return f"run {run_id} has recorded no samples, so there is no sample {sample_id!r}; {more}"
    wanted = _numbers(sample_id)
    width = max(len(wanted), 3)

    def distance(one: RecordedSample) -> tuple[int, ...]:
        own = _numbers(one.sample.id)
        pairs = zip(own + (0,) * (width - len(own)), wanted + (0,) * (width - len(wanted)), strict=True)
        return tuple(abs(a - b) for a, b in pairs)

    near = ", ".join(dict.fromkeys(one.sample.id for one in sorted(recorded, key=distance)[:3]))
    return f"run {run_id} has not recorded sample {sample_id!r}; nearest recorded: {near}; {more}"


def _pieces(workspace: OpenWorkspace, run_id: str, one: RecordedSample) -> list[str]:
    """Return the text of each response token, by the stage's tokenizer; empty if the tokenizer is not available."""
    row = next(row for row in workspace.ledger.stages(run_id) if row.name == one.stage)
    model = row.inputs.get("model")
    try:
        listing = tree_listing(workspace.blobs, str(model["digest"])) if model else {}
        if "tokenizer.json" not in listing:
            return []
        data = workspace.blobs.get(listing["tokenizer.json"].digest)
    except PosttrainError:
        return []  # the model was deleted, but the token ids remain
    return _decoded(data, one.sample.tokens)


def _decoded(tokenizer_json: bytes, tokens: Sequence[int]) -> list[str]:
    import tokenizers  # imported here, because other views need no tokenizer

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    except Exception:  # tokenizers raises plain Exception for a newer file format
        return []


def stage_samples(workspace: OpenWorkspace, run_id: str, stages: Sequence[StageRecord]) -> Iterator[StageSamples]:
    """Yield, for every stage with samples, one group at each of a few steps, with its best and worst members."""
    for row in stages:
        said = [
            sample
            for _, _, folder in stage_attempts(workspace, run_id, row.name)
            for sample in folder.some_samples(_SEGMENTS)
        ]
        steps: dict[int, dict[str, dict[str, Sample]]] = {}
        for sample in said:  # for a repeated step, the last attempt's samples
            steps.setdefault(sample.step, {}).setdefault(sample.id.rpartition(".")[0], {})[sample.id] = sample
        chosen = spread(sorted(steps), _STEPS)
        if chosen:
            groups = (next(iter(steps[step].values())) for step in chosen)
            shown = tuple(
                SampledStep(step, len(group), _members(group.values()))
                for step, group in zip(chosen, groups, strict=True)
            )
            yield StageSamples(row.name, shown)


def _members(group: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return the best member, the worst and some between, best first; members without a score come last."""
    ordered = sorted(group, key=lambda one: (one.reward is None, -(one.reward or 0.0)))
    return tuple(spread(ordered, _MEMBERS))


def suite_answers(
    workspace: OpenWorkspace, manifest: Manifest, rows: Sequence[StageRecord], troubles: list[str]
) -> Iterator[SuiteAnswers]:
    """Yield wrong and right greedy responses for each suite of the run file's evaluations.

    The evaluations of the released model come first.

    Args:
        troubles: receives a line for each unreadable evaluation.
    """
    records = {row.name: row for row in rows}
    evaluations = [s for s in manifest.stages if s.measures and not s.name.startswith(ADDED)]
    for stage in sorted(evaluations, key=lambda one: one.inputs["model"].word != released(manifest)):
        made = records[stage.name].outputs.get("items")
        if made is None:
            continue
        try:
            found = Responses(workspace.blobs.get(made["digest"]), stage.name)
            for suite in found.suites:
                greedy = found.greedy(suite)
                shown = _suite(found, greedy, stage.name, suite, model_words(manifest, stage.inputs["model"]))
                if not shown.items and not shown.scored:  # of perplexities
                    continue
                suites = stage.params.get("suites")  # in a stage of another kind, it may have any type
                asked = suites.get(suite) if isinstance(suites, Mapping) else None
                yield replace(shown, sampled=sampling_words(asked if isinstance(asked, Mapping) else {}))
        except (IntegrityError, NotFoundError) as error:
            troubles.append(f"{stage.name}: {error}")


def _suite(found: Responses, greedy: Sequence[Answered], stage: str, suite: str, of: str) -> SuiteAnswers:
    wrong = [one for one in greedy if one.correct is False]
    right = [one for one in greedy if one.correct]
    scored = [one for one in greedy if one.correct is None and one.reward is not None]
    scored.sort(key=lambda one: one.reward or 0.0)
    shown_wrong, shown_right = spread(wrong, _WRONG), spread(right, _RIGHT)
    low, high = scored[: _WRONG // 2], scored[_WRONG // 2 :][-_RIGHT:]
    texts = found.texts({*shown_wrong, *shown_right, *low, *high})
    return SuiteAnswers(
        stage=stage,
        suite=suite,
        of=of,
        items=len(wrong) + len(right),
        wrong=len(wrong),
        cut=sum(bool(one.truncated) for one in wrong),
        wrong_shown=tuple(shortened(texts[one.row]) for one in shown_wrong),
        right_shown=tuple(shortened(texts[one.row]) for one in shown_right),
        scored=len(scored),
        low_shown=tuple(shortened(texts[one.row]) for one in low),
        high_shown=tuple(shortened(texts[one.row]) for one in reversed(high)),
    )


def shortened(one: Response) -> Response:
    """Return the response with its texts cut for a page."""
    extracted = None if one.extracted is None else one.extracted[:_CUT]
    return replace(
        one, prompt=one.prompt[:_CUT], answer=one.answer[:_CUT], response=one.response[:_CUT], extracted=extracted
    )
