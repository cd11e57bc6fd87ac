"""Why a run is where it is: the reason, which number missed and by how much, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.control.judging import read_report
from posttrain.control.stores import Stores
from posttrain.domain.contracts import REPORT
from posttrain.domain.errors import (
    ApprovalError,
    ChannelClosedError,
    ConflictError,
    FailureClass,
    GateInconclusiveError,
    GateRejectedError,
    InfrastructureError,
    IntegrityError,
    JobFailedError,
    PolicyError,
    PosttrainError,
    RecalledError,
    StoppedError,
)
from posttrain.domain.gates import GateReport
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import AttemptState, RunState, StageState
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord

_REJECTED: Mapping[str, type[PosttrainError]] = {
    Reason.GATE_INCONCLUSIVE: GateInconclusiveError,
    Reason.CHANNEL_MOVED: ConflictError,
    Reason.POLICY_NOT_MET: PolicyError,
    Reason.CHANNEL_FROZEN: ChannelClosedError,
    Reason.RECALLED: RecalledError,
    Reason.APPROVAL_REJECTED: ApprovalError,
}


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


def outcome_error(run: RunRecord, stages: tuple[StageRecord, ...]) -> PosttrainError | None:
    """The error (and exit code) that a final run ends with; None when it succeeded."""
    message = f"run {run.id}: {run.message}" + (
        f"; next: {run.next_action}" if run.next_action and run.next_action not in run.message else ""
    )
    if run.state == RunState.STOPPED:
        return StoppedError(message)
    if run.state == RunState.REJECTED:
        return _REJECTED.get(run.reason, GateRejectedError)(message)
    if run.state != RunState.FAILED:
        return None
    reason = next((stage.reason for stage in stages if stage.state == StageState.FAILED), run.reason)
    if reason in (Reason.ATTEMPTS_EXHAUSTED, Reason.CIRCUIT_OPEN):
        return InfrastructureError(message)
    if reason == Reason.CORRUPT:
        return IntegrityError(message)
    if reason == Reason.BUDGET_EXCEEDED:
        return FailureClass.BUDGET.error(message)
    kind = reason.partition(":")[2]
    return (FailureClass(kind).error if kind else JobFailedError)(message)
