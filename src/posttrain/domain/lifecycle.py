"""State machines as data: run, stage, attempt, release.

Every transition is a compare-and-set on (id, generation) with its event; a transition that is not in these tables is
a bug and is refused. The diagrams in docs/architecture.md are generated from them (`handbook/states.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from posttrain.domain.errors import ConflictError


class RunState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    REJECTED = "rejected"  # a gate said no: the run worked, the model did not ship
    FAILED = "failed"


class StageState(StrEnum):
    PENDING = "pending"  # inputs not there yet
    READY = "ready"  # inputs there, no live attempt
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    SKIPPED = "skipped"  # nothing to do (for example: the channel is empty, so there is no baseline to judge)
    REJECTED = "rejected"
    STOPPED = "stopped"
    FAILED = "failed"


class AttemptState(StrEnum):
    PLANNED = "planned"  # the intent is committed, the executor may not know yet
    LAUNCHED = "launched"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # gone without a result: retried elsewhere


class ReleaseState(StrEnum):
    PROPOSED = "proposed"
    LIVE = "live"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"


Table = Mapping[str, frozenset[str]]


def _table(rows: Mapping[StrEnum, tuple[StrEnum, ...]]) -> Table:
    return {str(source): frozenset(map(str, targets)) for source, targets in rows.items()}


RUN = _table(
    {
        RunState.PENDING: (RunState.RUNNING, RunState.STOPPING, RunState.FAILED),
        RunState.RUNNING: (RunState.STOPPING, RunState.SUCCEEDED, RunState.REJECTED, RunState.FAILED),
        RunState.STOPPING: (RunState.STOPPED, RunState.FAILED, RunState.SUCCEEDED, RunState.REJECTED),
        RunState.STOPPED: (RunState.RUNNING,),
        RunState.FAILED: (RunState.RUNNING,),
        RunState.SUCCEEDED: (),
        RunState.REJECTED: (),
    }
)
STAGE = _table(
    {
        StageState.PENDING: (StageState.READY, StageState.SKIPPED, StageState.SUCCEEDED, StageState.STOPPED),
        StageState.READY: (
            StageState.RUNNING,
            StageState.SUCCEEDED,  # stage cache, or a stage that needs no process
            StageState.SKIPPED,
            StageState.REJECTED,
            StageState.FAILED,
            StageState.STOPPED,
        ),
        StageState.RUNNING: (StageState.SUCCEEDED, StageState.FAILED, StageState.STOPPED, StageState.READY),
        StageState.SUCCEEDED: (),
        StageState.SKIPPED: (),
        StageState.REJECTED: (),
        StageState.STOPPED: (StageState.PENDING,),
        StageState.FAILED: (StageState.PENDING,),
    }
)
ATTEMPT = _table(
    {
        AttemptState.PLANNED: (AttemptState.LAUNCHED, AttemptState.LOST, AttemptState.STOPPED, AttemptState.FAILED),
        AttemptState.LAUNCHED: (AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.STOPPED, AttemptState.LOST),
        AttemptState.SUCCEEDED: (),
        AttemptState.STOPPED: (),
        AttemptState.FAILED: (),
        AttemptState.LOST: (),
    }
)
RELEASE = _table(
    {
        ReleaseState.PROPOSED: (ReleaseState.LIVE,),
        ReleaseState.LIVE: (ReleaseState.SUPERSEDED, ReleaseState.ROLLED_BACK),
        ReleaseState.SUPERSEDED: (ReleaseState.LIVE,),
        ReleaseState.ROLLED_BACK: (ReleaseState.LIVE,),
    }
)
TABLES: Mapping[str, Table] = {"run": RUN, "stage": STAGE, "attempt": ATTEMPT, "release": RELEASE}
INITIAL: Mapping[str, str] = {
    "run": RunState.PENDING,
    "stage": StageState.PENDING,
    "attempt": AttemptState.PLANNED,
    "release": ReleaseState.PROPOSED,
}


def check_transition(machine: str, source: str, target: str) -> None:
    """Refuse a transition that is not in the table.

    Raises:
        ConflictError: `source → target` is not drawn.
    """
    if target not in TABLES[machine].get(source, frozenset()):
        allowed = ", ".join(sorted(TABLES[machine].get(source, ()))) or "nothing: it is final"
        raise ConflictError(f"{machine} cannot go from {source} to {target}; from {source} it can go to {allowed}")


def is_final(machine: str, state: str) -> bool:
    """Whether nothing leaves `state` without a person (`retry`)."""
    if machine in ("run", "stage"):
        return state in ("succeeded", "rejected", "failed", "stopped", "skipped")
    return not TABLES[machine][state]
