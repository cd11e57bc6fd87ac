"""A run's trace: where its time went as files to look at, and the whole way of its recorded samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.control.launching import trained_elsewhere
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError, nearest
from posttrain.domain.facts import Sample, Span
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import make_folder, write_atomic
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import tree_listing
from posttrain.telemetry.chrome import chrome_trace
from posttrain.telemetry.timeline import AttemptSpans, StageTimeline, summarise
from posttrain.web.trace import TracePage, trace_page
from posttrain.workspace.opened import OpenWorkspace


@dataclass(frozen=True, slots=True)
class WrittenTrace:
    """Where a run's trace is, and what it says."""

    run_id: str
    trace: Path  # for ui.perfetto.dev or chrome://tracing
    page: Path
    stages: tuple[StageTimeline, ...]
    samples: int
    notes: tuple[str, ...]  # segments that could not be read and were left out
    begun: tuple[str, ...] = ()  # stages that went on from another's checkpoint

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    """A sample, and which attempt recorded it."""

    stage: str
    attempt: int
    sample: Sample
    pieces: tuple[str, ...] = ()  # text per response token; empty where the tokenizer is not at hand

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"stage": self.stage, "attempt": self.attempt, **asdict(self.sample), "pieces": list(self.pieces)}


def write_trace(workspace: OpenWorkspace, run_id: str, stage: str | None, folder: Path) -> WrittenTrace:
    """Write `<run>-trace.json` and `<run>-trace.html` into `folder`, of one stage or of all.

    Raises:
        NotFoundError: the run has no such stage.
        InputError: no stage has said where its time goes.
        WorkspaceError: `folder` cannot be written.
    """
    notes: list[str] = []
    attempts = [_spans(*told, notes) for told in stage_attempts(workspace, run_id, stage)]
    if not any(attempt.spans for attempt in attempts):
        raise InputError(
            f"trace: run {run_id} must have a training stage that took a step"
            f"{f' (stage {stage})' if stage else ''}, got no spans; see posttrain get {run_id}"
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
    """The recorded samples by stage and step. Of a step that was lost and redone, those of the last attempt.

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
    """One sample with the text of its tokens.

    Raises:
        NotFoundError: it was not recorded, or the run has no such stage.
        InputError: several stages recorded a sample of that id.
    """
    everything = recorded_samples(workspace, run_id, stage)
    found = [one for one in everything if one.sample.id == sample]
    if not found:
        raise NotFoundError(_unknown(run_id, sample, everything))
    if len(found) > 1:
        stages = ", ".join(one.stage for one in found)
        raise InputError(f"sample {sample} must name one stage's, got it of {stages}; add --stage")
    (one,) = found
    pieces = _pieces(workspace, run_id, one)
    return RecordedSample(one.stage, one.attempt, one.sample, tuple(pieces))


def stage_attempts(
    workspace: OpenWorkspace, run_id: str, stage: str | None
) -> list[tuple[str, AttemptRecord, AttemptFolder]]:
    """The attempts of a run in order; of a reused stage, those that computed it.

    Raises:
        NotFoundError: there is no such run or stage.
    """
    with workspace.ledger.snapshot() as now:
        rows = now.stages(now.run(run_id).id)
    if stage is not None and stage not in {row.name for row in rows}:
        raise NotFoundError(f"run {run_id} has no stage {stage!r}{nearest(stage, [row.name for row in rows])}")
    found = []
    for row in rows:
        if stage in (None, row.name):
            origin, _, name = (row.cached_from or f"{run_id}/{row.name}").rpartition("/")
            for attempt in workspace.ledger.attempts(origin, name):
                found.append((row.name, attempt, workspace.jobs.folders.of(attempt)))
    return found


def _begun(workspace: OpenWorkspace, run_id: str, stage: str | None) -> Iterator[str]:
    """One line for every stage that went on from another stage's checkpoint: its trace begins there."""
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
        return f"run {run_id} has recorded no sample, so not {sample_id!r} either; {more}"
    wanted = _numbers(sample_id)
    width = max(len(wanted), 3)

    def distance(one: RecordedSample) -> tuple[int, ...]:
        own = _numbers(one.sample.id)
        pairs = zip(own + (0,) * (width - len(own)), wanted + (0,) * (width - len(wanted)), strict=True)
        return tuple(abs(a - b) for a, b in pairs)

    near = ", ".join(dict.fromkeys(one.sample.id for one in sorted(recorded, key=distance)[:3]))
    return f"run {run_id} has not recorded sample {sample_id!r}; nearest recorded: {near}; {more}"


def _pieces(workspace: OpenWorkspace, run_id: str, one: RecordedSample) -> list[str]:
    """Text of each response token by the stage's own tokenizer; none where it cannot be had."""
    row = next(row for row in workspace.ledger.stages(run_id) if row.name == one.stage)
    model = row.inputs.get("model")
    try:
        listing = tree_listing(workspace.blobs, str(model["digest"])) if model else {}
        if "tokenizer.json" not in listing:
            return []
        data = workspace.blobs.get(listing["tokenizer.json"].digest)
    except PosttrainError:
        return []  # its model is gone: the ids still say which tokens they were
    return _decoded(data, one.sample.tokens)


def _decoded(tokenizer_json: bytes, tokens: Sequence[int]) -> list[str]:
    import tokenizers  # here: the other views need no tokenizer

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    except Exception:  # tokenizers raises plain Exception for a file of a newer format
        return []
