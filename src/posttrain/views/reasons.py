"""Why a stage is where it is, in words: what it waits for, and what a person would do next."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.waits import span, waiting

DONE = (StageState.SUCCEEDED, StageState.SKIPPED)


def asks(row: StageRecord) -> bool:
    """Whether it asks a person for something, who may have done it since."""
    return waiting(row) or (row.state == StageState.REJECTED and kind_of(row.kind).ships)


def waiting_for(manifest: Manifest, rows: Sequence[StageRecord]) -> dict[str, str]:
    """Stage → the unfinished stages it waits for, as words."""
    undone = {row.name for row in rows if row.state not in DONE}
    return {stage.name: ", ".join(sorted(stage.upstream() & undone)) for stage in manifest.stages}


def stage_words(run: RunRecord, row: StageRecord, above: str, now: float) -> tuple[str, str]:
    """Why the stage is where it is, and what a person would do next."""
    if row.state in DONE:  # whatever its row asked for before that
        return row.message or row.state, "none needed"
    if row.state == StageState.RUNNING:
        return row.message or row.state, row.next_action or "none needed"
    if row.state in (StageState.PENDING, StageState.READY):
        if is_final("run", run.state):
            return f"not started: the run ended first ({run.state})", run.next_action or f"posttrain why {run.id}"
        told = row.message if row.state == StageState.READY else ""
        if waiting(row) and row.not_before is not None and row.not_before > now:
            told += f" (in {span(row.not_before - now)})"
        return told or (f"waits for {above}" if above else "its turn comes next"), row.next_action or "none needed"
    return row.message or row.state, row.next_action or f"posttrain why {run.id}"
