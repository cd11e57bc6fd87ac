"""Whether another attempt would help."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure
from posttrain.domain.manifest import Manifest
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord

PREEMPTIONS_PER_ATTEMPT = 4  # a preempted job did nothing wrong, but a place that always preempts is no place


def why_not_again(manifest: Manifest, tried: Sequence[AttemptRecord], failure: Failure) -> tuple[Reason, str] | None:
    """The reason and the words when another attempt would be pointless; the last of `tried` is the one that failed."""
    preempted = failure.kind is FailureClass.PREEMPTED
    if failure.kind is FailureClass.BUDGET:
        return None  # it gets more of the budget than it had, which ends
    own = [a for a in tried[:-1] if a.reason not in (Reason.PREEMPTED, Reason.BUDGET_EXCEEDED)]
    if own and failure.signature and own[-1].failure_signature == failure.signature:
        return Reason.CIRCUIT_OPEN, "the same failure twice in a row"
    made = len(tried) if preempted else len(own) + 1
    if made >= manifest.budget.attempts * (PREEMPTIONS_PER_ATTEMPT if preempted else 1):
        return Reason.ATTEMPTS_EXHAUSTED, f"{made} attempts, the budget's limit"
    return None
