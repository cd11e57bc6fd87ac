"""How a run that has ended ended, as the error that a command or a caller gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from posttrain.domain.lifecycle import RunState, StageState
from posttrain.domain.reasons import Reason
from posttrain.domain.records import RunRecord, StageRecord

_REJECTED: Mapping[str, type[PosttrainError]] = {
    Reason.GATE_INCONCLUSIVE: GateInconclusiveError,
    Reason.CHANNEL_MOVED: ConflictError,
    Reason.POLICY_NOT_MET: PolicyError,
    Reason.CHANNEL_FROZEN: ChannelClosedError,
    Reason.RECALLED: RecalledError,
    Reason.APPROVAL_REJECTED: ApprovalError,
}


def outcome_error(run: RunRecord, stages: Iterable[StageRecord]) -> PosttrainError | None:
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
