"""When a run is looked at again: a time that its rows name, or a sign that one of its jobs moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.control.decide import STOP_GRACE_SECONDS, View
from posttrain.control.jobs import Jobs
from posttrain.control.requests import job_of
from posttrain.control.stalls import due_in, stall_after
from posttrain.domain.lifecycle import AttemptState, StageState
from posttrain.domain.manifest import Manifest
from posttrain.domain.ports import Clock
from posttrain.domain.reasons import Reason
from posttrain.domain.records import AttemptRecord, StageRecord, Watch
from posttrain.domain.waits import times as due_times
from posttrain.domain.waits import wait_of, waiting
from posttrain.store.work import NEVER

UNSEEN_SECONDS = 60.0  # between looks at a job that gives no sign
FAR_SECONDS = 2.0  # between looks at channels in an object store
_SOON = 1.0  # to an attempt whose launch is not recorded
_WAITS: Mapping[str, float] = {  # for what gives no sign: nobody writes a row of this run when it is over
    Reason.WAITING_FOR_IDENTICAL_STAGE: 60.0,  # its end wakes the run; its driver's does not
    Reason.SUBMISSION_UNKNOWN: 2.0,
    Reason.JOB_NOT_VISIBLE: 2.0,
}
_WATCHED = (Reason.LAUNCHED, Reason.STALLED)  # attempts whose silence counts
_LIVE = (AttemptState.PLANNED, AttemptState.LAUNCHED)


def look_again_after(
    manifest: Manifest,
    stages: Sequence[StageRecord],
    attempts: Sequence[AttemptRecord],
    watches: Sequence[Watch],
    now: float,
) -> float:
    """Seconds until these rows of a run alone make it worth a look."""
    times = [NEVER]
    for stage in stages:
        if stage.state in (StageState.READY, StageState.RUNNING):
            times.append(_WAITS.get(stage.reason, NEVER))
        if stage.state == StageState.READY and stage.not_before is not None and stage.not_before > now:
            times.append(stage.not_before - now)
        if (
            waiting(stage) and stage.reason != Reason.WAITING_FOR_APPROVAL
        ):  # `not_before` of it, and until when its signal is waited for
            times += [at - now for at in due_times(wait_of(manifest, stage.name), stage) if at > now]
    for_devices = {stage.name for stage in stages if stage.reason == Reason.WAITING_FOR_DEVICES}  # signs: `Pulse`
    for attempt in attempts:
        if attempt.state == AttemptState.PLANNED and attempt.stage not in for_devices:
            times.append(_SOON)
        elif attempt.state == AttemptState.LAUNCHED:
            times.append(UNSEEN_SECONDS)
            if attempt.stop_requested_at is not None:
                times.append(max(_SOON, attempt.stop_requested_at + STOP_GRACE_SECONDS - now))
    watched = {attempt.name: attempt.stage for attempt in attempts if attempt.reason in _WATCHED}
    silent = [watch for watch in watches if watch.attempt in watched]
    times += [due_in(watch, stall_after(manifest, watched[watch.attempt]), now) for watch in silent]
    if manifest.budget.wall_clock is not None and any(attempt.state in _LIVE for attempt in attempts):
        spent = sum(_seconds(attempt, now) for attempt in attempts)
        times.append(max(_SOON, manifest.budget.wall_clock - spent))
    return min(times)


class Pulse:
    """The signs that the jobs of one run give without the ledger: what the executor sees, what their channels hold.

    Args:
        capacity: who has the executor's devices, as of a moment ago: asked where a stage waits for them.
    """

    def __init__(self, clock: Clock, jobs: Jobs, capacity: Callable[[], Any]) -> None:
        self._clock, self._jobs, self._capacity = clock, jobs, capacity
        self._live: list[AttemptRecord] = []
        self._waits_for_devices = False
        self._seen: dict[str, Any] = {}
        self._asked, self._words = -NEVER, list[bool]()

    def follow(self, view: View | None) -> None:
        """Take over which jobs there are, after every look at the run; of a run that others look at (None) no one's."""
        attempts, stages = (view.attempts, view.stages) if view else ((), ())
        self._live = [attempt for attempt in attempts if attempt.state == AttemptState.LAUNCHED]
        self._waits_for_devices = any(stage.reason == Reason.WAITING_FOR_DEVICES for stage in stages)

    def moved(self) -> bool:
        """Whether a sign is another than at the last call; one that was never seen is.

        What is seen is kept before the run is looked at, so that nothing which happens meanwhile is missed.
        """
        before, self._seen = self._seen, self._signs()
        if self._waits_for_devices:
            self._seen[Reason.WAITING_FOR_DEVICES] = self._capacity()
        return self._seen != before

    def _signs(self) -> dict[str, Any]:
        try:
            looks = self._jobs.executor.observe([job_of(self._jobs.folders, attempt) for attempt in self._live])
            words = self._answers()
        except Exception as error:  # the look at the run tells of it
            return {"error": type(error).__name__}
        names = [attempt.name for attempt in self._live]
        return dict(zip(names, zip(looks, words, strict=True), strict=True)) if names else {}

    def _answers(self) -> list[bool]:
        """Which of them have said their last word; another machine is asked for that less often than a folder."""
        now = self._clock.now()
        far = bool(self._jobs.folders.channels())
        if far and 0 <= now - self._asked < FAR_SECONDS and len(self._words) == len(self._live):
            return self._words
        self._asked = now
        self._words = [self._jobs.folders.of(attempt).channel.answered() is not None for attempt in self._live]
        return self._words


def _seconds(attempt: AttemptRecord, now: float) -> float:
    if attempt.state == AttemptState.LAUNCHED and attempt.launched_at is not None:
        return now - attempt.launched_at
    return attempt.seconds
