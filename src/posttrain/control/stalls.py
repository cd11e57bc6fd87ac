"""When a running job is taken for hung: a pure function of what was seen of its progress, look after look.

Progress is what the job reports through its channel (steps, tokens, the ends of phases), not that its process is there.
Silence counts as far as somebody watched it: a look adds the time since the last one, at the most a quarter of
`runtime.stall_after`. So a clock that jumps, a machine that slept and hours in which nobody drove the run make no job
look hung; what the job's own clock says is not asked. After four quarters of silence the job is asked for a checkpoint,
after the fifth it is killed: an answer in between is progress, and one that does not come delays the end by a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from posttrain.control.orders import AskToCheckpoint, KeepWatch, Kill, Say
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure
from posttrain.domain.manifest import Manifest
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, StageRecord, Watch
from posttrain.domain.waits import span

# the longest thing that an honest job says nothing of before it is over is one rollout: some hundred answers of 10,000
# tokens of a 7B model, decoded in several batches, take an hour or more; loading and a suite's largest batch take less
STALL_AFTER = 7200.0
LOOKS = 4  # in that time
_OVERDUE = 5.0  # seconds between looks at a watch whose time is past, such as one whose job survives its kill


def stall_after(manifest: Manifest, stage: str) -> float:
    """Seconds without progress that a stage's jobs may take: its own `runtime.stall_after`, else the run's."""
    own = manifest.stage(stage).params.get("runtime")
    limit = own.get("stall_after") if isinstance(own, Mapping) else None
    if isinstance(limit, int | float):
        return float(limit)
    return manifest.runtime.stall_after if manifest.runtime else STALL_AFTER


def due_in(watch: Watch, limit: float, now: float) -> float:
    """Seconds until a watched job is looked at again."""
    passed = now - watch.at
    left = limit / LOOKS - passed
    return left if passed >= 0 and left > 0 else min(limit / LOOKS, _OVERDUE)


def silence(
    stage: StageRecord, attempt: AttemptRecord, before: Watch | None, seen: str | None, limit: float, now: float
) -> AskToCheckpoint | KeepWatch | Kill | Say | None:
    """What is to be done about a live job's silence; None: nothing yet.

    Args:
        before: as of the last look; None: this is the first.
        seen: what the job has reported; None: its silence proves nothing now (it is queued, or not seen).
    """
    part = limit / LOOKS
    if before is None:
        return None if seen is None else KeepWatch(stage, attempt, Watch(attempt.name, stage.run_id, seen, 0.0, now))
    passed = now - before.at
    if 0 <= passed < part:
        return None
    if seen is None:
        return KeepWatch(stage, attempt, replace(before, at=now))
    if seen != before.progress:
        fresh = replace(before, progress=seen, quiet=0.0, at=now)
        return KeepWatch(stage, attempt, fresh, goes_on=attempt.reason == Reason.STALLED)
    watch = replace(before, quiet=before.quiet + min(part, max(0.0, passed)), at=now)
    quiet = f"no progress for {span(watch.quiet)}: it stands at {_place(watch)}"
    if attempt.reason != Reason.STALLED:
        if watch.quiet < limit:
            return KeepWatch(stage, attempt, watch)
        said = f"{quiet}; asked to checkpoint, to be killed in {span(part)} unless it moves"
        return AskToCheckpoint(stage, attempt, watch, said)
    if watch.quiet < limit + part:
        return KeepWatch(stage, attempt, watch)
    said = f"{quiet}; asked to checkpoint, and killed"
    return Kill(stage, attempt) if stage.message == said else Say(stage, Reason.STALLED, said)


def hung(watch: Watch | None, limit: float) -> Failure:
    """Why a job ended that was killed for its silence: equal where it hung at the same place again."""
    place = _place(watch) if watch else "its start"
    message = f"no progress for {span(limit)} (runtime.stall_after) at {place}: asked to checkpoint, then killed"
    return Failure(FailureClass.INFRASTRUCTURE, message, f"no progress at {place}")


def _place(watch: Watch) -> str:
    return watch.progress.partition(" | ")[0]
