"""When a running job is taken for hung: a pure function of what was seen of its progress, look after look.

Progress is what the job reports through its channel (steps, tokens, the ends of phases), not that its process is there.
Silence counts as far as somebody watched it: a look a quarter of `runtime.stall_after` after the last one adds that
quarter, and one that comes far too late adds nothing. So a clock that jumps, a machine that slept and hours in which
nobody drove the run make no job look hung; what the job's own clock says is not asked. After four quarters of silence
the job is asked for a checkpoint, after the fifth it is killed: what it reports in between takes all of it back, and an
answer that does not come delays the end by a quarter. That a job is killed for its silence is written down before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from posttrain.control.orders import AskToCheckpoint, KeepWatch, Kill
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import PHASE_SECONDS, Failure
from posttrain.domain.manifest import Manifest
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, StageRecord, Watch
from posttrain.domain.waits import span

# the longest thing that an honest job says nothing of before it is over is one rollout: some hundred answers of 10,000
# tokens of a 7B model, decoded in several batches, take an hour or more; loading and a suite's largest batch take less
STALL_AFTER = 7200.0
LOOKS = 4  # in that time
_LATE = 2  # planned intervals, after which nobody can be said to have watched in between
_OVERDUE = 5.0  # seconds between looks at a watch whose time is past, such as one whose job survives its kill


def stall_after(manifest: Manifest, stage: str) -> float:
    """Seconds without progress that a stage's jobs may take: its own `runtime.stall_after`, else the run's."""
    own = manifest.stage(stage).params.get("runtime")
    limit = own.get("stall_after") if isinstance(own, Mapping) else None
    if isinstance(limit, int | float):
        return float(limit)
    return manifest.runtime.stall_after if manifest.runtime else STALL_AFTER


def phase_seconds(limit: float) -> float:
    """Seconds after which a job tells the end of a phase by itself: one that moves is not to look silent."""
    return min(PHASE_SECONDS, limit / LOOKS)


def due_in(watch: Watch, limit: float, now: float) -> float:
    """Seconds until a watched job is looked at again."""
    passed = now - watch.at
    left = 0.0 if _over(watch, limit) else limit / LOOKS - passed
    return left if passed >= 0 and left > 0 else min(limit / LOOKS, _OVERDUE)


def silence(
    stage: StageRecord, attempt: AttemptRecord, before: Watch | None, seen: str | None, limit: float, now: float
) -> AskToCheckpoint | KeepWatch | Kill | None:
    """What is to be done about a live job's silence; None: nothing yet.

    Args:
        before: as of the last look; None: this is the first.
        seen: what the job has reported; None: its silence proves nothing now (it is queued, or not seen).
    """
    part = limit / LOOKS
    if before is None:
        return None if seen is None else KeepWatch(stage, attempt, Watch(attempt.name, stage.run_id, seen, 0.0, now))
    if condemned(attempt, before, limit):
        return Kill(stage, attempt) if seen is not None else None
    passed, asked = now - before.at, attempt.reason == Reason.STALLED
    waits = 0 <= passed < part
    if seen is not None and seen != before.progress and (asked or not waits):
        return KeepWatch(stage, attempt, replace(before, progress=seen, quiet=0.0, at=now), goes_on=asked)
    if waits:
        return None
    if seen is None:
        return KeepWatch(stage, attempt, replace(before, at=now))
    watch = replace(before, quiet=before.quiet + (part if 0 <= passed <= _LATE * part else 0.0), at=now)
    quiet = f"no progress for {span(watch.quiet)}: it stands at {_place(watch)}"
    if not asked:
        if watch.quiet < limit:
            return KeepWatch(stage, attempt, watch)
        said = f"{quiet}; asked to checkpoint, to be killed in {span(part)} unless it moves"
        return AskToCheckpoint(stage, attempt, watch, said)
    said = f"{quiet}; asked to checkpoint, and killed" if _over(watch, limit) else ""
    return KeepWatch(stage, attempt, watch, said=said)


def condemned(attempt: AttemptRecord, watch: Watch | None, limit: float) -> bool:
    """Whether it was decided that a job is killed for its silence; one that was asked for a checkpoint only is not."""
    return attempt.reason == Reason.STALLED and watch is not None and _over(watch, limit)


def hung(watch: Watch | None, limit: float) -> Failure:
    """Why a job ended that was killed for its silence: equal where it hung at the same place again."""
    place = _place(watch) if watch else "its start"
    message = f"no progress for {span(limit)} (runtime.stall_after) at {place}: asked to checkpoint, then killed"
    return Failure(FailureClass.INFRASTRUCTURE, message, f"no progress at {place}")


def _over(watch: Watch, limit: float) -> bool:
    return watch.quiet >= limit + limit / LOOKS


def _place(watch: Watch) -> str:
    return watch.progress.partition(" | ")[0]
