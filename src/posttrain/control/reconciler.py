"""The level-triggered reconciler: look at what should be and what is, act on the difference, record.

Loops and who unblocks whom::

    tick ──▶ each stage in topological order ──▶ settle the run
      ▲        pending  waits for upstream stages (an earlier tick), binds inputs ─▶ ready
      │        ready    waits for a slot, back-off, an identical stage elsewhere ──▶ running | from cache
      │        running  waits for the job's result.json (the job), observes ───────▶ succeeded | failed | ready again
      └── drive: sleeps between ticks; ends on a final state, a lost lease, or a detach

An error in one stage ends neither the others nor the driver (`control.trouble`).

Any process may die between any two lines: the next tick, in any process, derives what to do from the ledger and the
attempt folders alone. No outside work happens inside a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.control.attempts import Looks, advance_attempt
from posttrain.control.judging import judge_stage, release_stage
from posttrain.control.stages import bind_pending, start_ready
from posttrain.control.trouble import BACKOFF_SECONDS, Troubles
from posttrain.control.wiring import Wiring
from posttrain.domain.errors import ConflictError, DeadlineError, InfrastructureError
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import RunState, StageState, is_final
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, StageRecord

LEASE_SECONDS = 15.0
_MANIFEST_TRIES = 12  # with back-off, five minutes: a store that is away for longer is for a person
_DONE = (StageState.SUCCEEDED, StageState.SKIPPED)


@dataclass(frozen=True, slots=True)
class Tick:
    """What one pass found: the run afterwards, and whether anything changed (then look again at once)."""

    run: RunRecord
    changed: bool


class Reconciler:
    """Brings runs to where they should be.

    Args:
        owner: names this process in the lease.
        alive: whether another owner still lives, when that can be told: a dead one's lease need not run out first.
    """

    def __init__(self, wiring: Wiring, owner: str, alive: Callable[[str], bool] = lambda owner: True) -> None:
        self._wiring, self._owner, self._alive = wiring, owner, alive
        self._manifests: dict[str, Manifest] = {}
        self._troubles = Troubles(wiring)

    def tick(self, run_id: str) -> Tick | None:
        """One pass over one run; None when another live process holds its lease.

        Raises:
            IntegrityError: the manifest's bytes are corrupt.
            InfrastructureError: the store that holds the manifest does not answer.
        """
        run = self._wiring.ledger.run(run_id)
        if is_final("run", run.state):
            return Tick(run, changed=False)
        try:
            claimed = self._claim(run)
            return None if claimed is None else self._pass(claimed)
        except ConflictError:  # a person or another process moved first: read again
            return Tick(self._wiring.ledger.run(run_id), changed=True)

    def _claim(self, run: RunRecord) -> RunRecord | None:
        expires = (run.lease_expires or 0.0) - self._wiring.clock.now()
        if run.lease_owner == self._owner and expires > LEASE_SECONDS / 2:
            return run  # still ours for long enough: a renewal costs an fsync
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            if run.lease_owner not in (None, self._owner) and not self._alive(str(run.lease_owner)):
                transaction.release_claim(run, str(run.lease_owner))
            return transaction.claim(run, self._owner, LEASE_SECONDS)

    def release(self, run_id: str) -> None:
        """Give the lease back, so that another process need not wait for it to expire."""
        run = self._wiring.ledger.run(run_id)
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            transaction.release_claim(run, self._owner)

    def drive(
        self,
        run_id: str,
        *,
        interval: float = 0.1,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
    ) -> RunRecord:
        """Tick until the run is final; while another process holds the lease, only watch.

        Args:
            interval: seconds between passes that changed nothing.
            timeout: seconds; None: the run's own budget bounds it.
            watch: called after every pass, e.g. to draw.

        Raises:
            DeadlineError: `timeout` passed and the run is not final; it goes on when somebody drives it again.
        """
        until = None if timeout is None else self._wiring.clock.now() + timeout
        refused = 0
        while True:
            try:
                tick, refused = self.tick(run_id), 0
            except InfrastructureError:
                refused += 1
                if refused >= _MANIFEST_TRIES or (until is not None and self._wiring.clock.now() >= until):
                    raise
                self._wiring.clock.sleep(BACKOFF_SECONDS[min(refused, len(BACKOFF_SECONDS)) - 1])
                continue
            run = tick.run if tick else self._wiring.ledger.run(run_id)
            if watch:
                watch(run)
            if is_final("run", run.state):
                return run
            if until is not None and self._wiring.clock.now() >= until:
                raise DeadlineError(
                    f"run {run_id}: still {run.state} after {timeout:g} s; wait again or look: posttrain why {run_id}"
                )
            if tick is None or not tick.changed:
                self._wiring.clock.sleep(interval)

    def _pass(self, run: RunRecord) -> Tick:
        manifest = self._manifest(run)
        before = self._fingerprint(run)
        if run.state == RunState.PENDING:
            run = self._move(
                run, RunState.RUNNING, "Running", "stages are under way", started_at=self._wiring.clock.now()
            )
        if run.desired == "stopped" and run.state == RunState.RUNNING:
            run = self._move(run, RunState.STOPPING, "StopRequested", "waiting for jobs to checkpoint and end")
        looks = Looks(self._wiring, run.id)
        for stage in self._wiring.ledger.stages(run.id):
            if not self._troubles.waits(stage):
                with self._troubles.kept_to(stage):
                    self._advance(run, manifest, stage, looks)
        run = self._settle(run)
        return Tick(run, changed=self._fingerprint(run) != before)

    def _advance(self, run: RunRecord, manifest: Manifest, stage: StageRecord, looks: Looks) -> None:
        if is_final("stage", stage.state):
            return
        if stage.state == StageState.RUNNING:
            advance_attempt(self._wiring, run, manifest, stage, looks)
            return
        if run.state == RunState.STOPPING:
            self._move_stage(stage, StageState.STOPPED)
            return
        stages = {s.name: s for s in self._wiring.ledger.stages(run.id)}
        if any(s.state == StageState.FAILED for s in stages.values()):
            return  # nothing new starts in a run that is going to fail
        if stage.state == StageState.PENDING:
            bound = bind_pending(self._wiring, manifest, stage, stages)
            if bound is None:
                return
            stage = bound
        if stage.state != StageState.READY:
            return
        kind = kind_of(stage.kind)
        if kind.driver is Driver.JOB:
            start_ready(self._wiring, run, manifest, stage, stages)
        elif kind.judges:
            judge_stage(self._wiring, manifest, stage)
        else:
            release_stage(self._wiring, run, manifest, stage, stages)

    def _settle(self, run: RunRecord) -> RunRecord:
        stages = self._wiring.ledger.stages(run.id)
        if any(stage.state == StageState.RUNNING for stage in stages):
            return run
        for state, target in ((StageState.FAILED, RunState.FAILED), (StageState.REJECTED, RunState.REJECTED)):
            culprit = next((stage for stage in stages if stage.state == state), None)
            if culprit:
                self._not_reached(stages, culprit)
                message = f"stage {culprit.name}: {culprit.message}"
                return self._move(run, target, culprit.reason, message, culprit.next_action)
        if all(stage.state in _DONE for stage in stages):
            shipped = next((stage.message for stage in stages if kind_of(stage.kind).ships), "every stage is done")
            return self._move(run, RunState.SUCCEEDED, "Succeeded", shipped, f"posttrain get {run.id}")
        if run.state == RunState.STOPPING:
            return self._move(
                run, RunState.STOPPED, "Stopped", "stopped by a person", f"posttrain retry {run.id} resumes it"
            )
        return run

    def _not_reached(self, stages: Sequence[StageRecord], culprit: StageRecord) -> None:
        """Say of stages that will not start why they will not."""
        message = f"not reached: stage {culprit.name} {culprit.state}"
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            for stage in stages:
                if not is_final("stage", stage.state):
                    transaction.update_stage(
                        stage, reason="NotReached", message=message, next_action=culprit.next_action
                    )

    def _move(
        self,
        run: RunRecord,
        state: RunState,
        reason: str,
        message: str,
        next_action: str = "",
        started_at: float | None = None,
    ) -> RunRecord:
        columns: dict[str, Any] = {} if started_at is None else {"started_at": started_at}
        if is_final("run", state):
            columns["finished_at"] = self._wiring.clock.now()
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            return transaction.update_run(
                run, state=state, reason=reason, message=message, next_action=next_action, **columns
            )

    def _move_stage(self, stage: StageRecord, state: StageState) -> None:
        action = f"posttrain retry {stage.run_id} resumes it"
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            transaction.update_stage(
                stage, state=state, reason="Stopped", message="stopped by a person", next_action=action
            )

    def _manifest(self, run: RunRecord) -> Manifest:
        if run.manifest_digest not in self._manifests:
            self._manifests[run.manifest_digest] = self._wiring.manifest(run)
        return self._manifests[run.manifest_digest]

    def _fingerprint(self, run: RunRecord) -> tuple[object, ...]:
        stages = [(s.name, s.state, s.generation) for s in self._wiring.ledger.stages(run.id)]
        attempts = [(a.name, a.state) for a in self._wiring.ledger.attempts(run.id)]
        return (run.state, run.desired, *stages, *attempts)
