"""Why a run is where it is: the reason, which number missed and by how much, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.control.judging import read_report
from posttrain.control.stores import Stores
from posttrain.domain.contracts import REPORT
from posttrain.domain.gates import GateReport
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `posttrain why` prints."""

    run: RunRecord
    stages: tuple[StageRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    report: GateReport | None

    @property
    def lost(self) -> tuple[AttemptRecord, ...]:
        """Attempts that did not end well, or were stopped."""
        bad = (AttemptState.LOST, AttemptState.FAILED)
        return tuple(attempt for attempt in self.attempts if attempt.state in bad or attempt.stop_cause)


def explain_run(stores: Stores, run_id: str) -> Explanation:
    """Gather the facts of one run."""
    run = stores.ledger.run(run_id)
    stages = tuple(stores.ledger.stages(run.id))
    gate = next((stage for stage in stages if kind_of(stage.kind).judges and REPORT in stage.outputs), None)
    report = read_report(stores.blobs, gate.outputs[REPORT]["digest"]) if gate else None
    return Explanation(run, stages, tuple(stores.ledger.attempts(run.id)), report)
