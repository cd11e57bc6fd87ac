"""How an attempt goes from intent to result: launch once, observe, collect, retry what infrastructure broke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.control import budgets
from posttrain.control.fencing import another_runs, give_up, unheeded
from posttrain.control.launching import SUBMISSION_UNKNOWN, launch_attempt, look, record_launch, say
from posttrain.control.requests import job_of
from posttrain.control.trained import register_trained
from posttrain.control.wiring import Wiring
from posttrain.domain.crashpoints import crashpoint
from posttrain.domain.errors import FailureClass, InputError, IntegrityError, StaleWriteError
from posttrain.domain.facts import Progress
from posttrain.domain.jobs import ANOTHER_RUNS, Cause, Failure, JobResult, JobState, Observation, Signal
from posttrain.domain.kinds import kind_of
from posttrain.domain.lifecycle import AttemptState, RunState, StageState
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.execution.ports import Trainer
from posttrain.execution.processes import LEAVING_SECONDS
from posttrain.store.trees import put_tree, stored_sizes

BACKOFF_SECONDS = (0.5, 2.0, 8.0, 30.0)
STOP_GRACE_SECONDS = 30.0
PREEMPTIONS_PER_ATTEMPT = 4  # a preempted job did nothing wrong, but a place that always preempts is no place

_ENDED_FOR = {
    Cause.OUT_OF_MEMORY: (FailureClass.OUT_OF_MEMORY, "out of memory"),
    Cause.OVERTIME: (FailureClass.BUDGET, "its maximum runtime, by budget.wall_clock, is over"),
}


class Looks:
    """What the executor says of a run's live attempts: asked once for all of them, and only if somebody asks."""

    def __init__(self, wiring: Wiring, run_id: str) -> None:
        self._wiring, self._run_id = wiring, run_id
        self._seen: dict[str, Observation] | None = None

    def of(self, attempt: AttemptRecord) -> Observation:
        """One look; of this pass, or a moment old."""
        if self._seen is None:
            self._seen = self._all()
        return self._seen.get(attempt.name) or look(self._wiring, attempt)

    def _all(self) -> dict[str, Observation]:
        launched = [a for a in self._wiring.ledger.attempts(self._run_id) if a.state == AttemptState.LAUNCHED]
        try:
            seen = self._wiring.executor.observe([job_of(self._wiring, attempt) for attempt in launched])
        except Exception:  # then each is asked for by itself: what concerns one stops no other
            return {}
        return {attempt.name: one for attempt, one in zip(launched, seen, strict=True)}


def advance_attempt(
    wiring: Wiring, run: RunRecord, manifest: Manifest, stage: StageRecord, looks: Looks | None = None
) -> None:
    """One look at the live attempt of a running stage, and what follows from it."""
    stage, attempt = _read_together(wiring, stage)
    trainer = wiring.trainer(manifest.stage(stage.name).trainer)
    try:
        if attempt.state == AttemptState.PLANNED:
            _begin(wiring, run, manifest, stage, attempt, trainer)
            return
        seen = looks.of(attempt) if looks else look(wiring, attempt)  # first: who is gone has said its last word
        result = trainer.collect(wiring.folder(attempt)) or _without_word(wiring, run, manifest, attempt, trainer, seen)
        if isinstance(result, Observation):
            _unheard(wiring, manifest, stage, attempt, result)
            return
        if _leaves(wiring, attempt, result, seen):
            return
        result = _why_stopped(run, manifest, attempt, result)
        if result.status == "failed" and result.failure and result.failure.kind.retried:
            _retry(wiring, manifest, stage, attempt, result.failure, AttemptState.FAILED, result)
            return
        outputs = _publish(wiring, attempt, result)
        _refuse_lacking(manifest.stage(stage.name), result, outputs)
    except (InputError, IntegrityError) as error:  # what is in its folder cannot be read: no retry would mend that
        what = "cannot be launched" if attempt.state == AttemptState.PLANNED else "left what cannot be collected"
        failure = Failure(FailureClass.BUG, f"the job {what}: {error}", "collect")
        _end(wiring, stage, attempt, JobResult("failed", failure=failure), {})
        return
    crashpoint("collect.after_publish")
    _end(wiring, stage, attempt, result, outputs)
    crashpoint("collect.after_commit")


def _unheard(wiring: Wiring, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord, seen: Observation) -> None:
    """A job without a result: lost if it is proven to be gone, else waited for."""
    if seen.gone:
        _lost(wiring, manifest, stage, attempt, seen)
    elif seen.hidden:
        say(wiring, stage, "JobNotVisible", "the executor does not see the job, which proves nothing; looking again")
    elif stage.reason == "JobNotVisible":
        say(wiring, stage, "Running", f"attempt {attempt.number}")


def _leaves(wiring: Wiring, attempt: AttemptRecord, result: JobResult, seen: Observation) -> bool:
    """Whether the job of a result still holds memory on its way out: nothing that would need it starts before.

    An executor lets it go for `LEAVING_SECONDS`; one that does not see to that is asked to, a while later.
    """
    if seen.gone:
        return False
    now = wiring.clock.now()
    if now - (attempt.launched_at or now) - result.seconds < 2 * LEAVING_SECONDS:
        return True
    wiring.executor.kill(job_of(wiring, attempt))
    return not look(wiring, attempt).gone


def _read_together(wiring: Wiring, stage: StageRecord) -> tuple[StageRecord, AttemptRecord]:
    """A running stage and its live attempt, of one moment: between two reads another process may end both.

    Raises:
        StaleWriteError: the stage does not run any more.
    """
    with wiring.ledger.snapshot() as now:
        current = next(s for s in now.stages(stage.run_id) if s.name == stage.name)
        attempts = now.attempts(stage.run_id, stage.name)
    if current.state != StageState.RUNNING:
        raise StaleWriteError(f"stage {stage.run_id}/{stage.name} moved on since it was read; read it again")
    if attempts[-1].state not in (AttemptState.PLANNED, AttemptState.LAUNCHED):
        raise AssertionError(f"{attempts[-1].name} is {attempts[-1].state} while its stage runs")
    return current, attempts[-1]


def _begin(
    wiring: Wiring, run: RunRecord, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord, trainer: Trainer
) -> None:
    """Launch a planned attempt; when the run is being stopped, only find out whether somebody did so before dying."""
    if run.state == RunState.STOPPING:
        seen = look(wiring, attempt) if wiring.folder(attempt).has_order() else Observation(JobState.UNKNOWN)
        if seen.hidden:
            say(wiring, stage, SUBMISSION_UNKNOWN, "nobody can say yet whether there is a job to stop; looking again")
        elif seen.state is JobState.UNKNOWN:
            if give_up(wiring, attempt, "the run was stopped before it was launched"):
                _end(wiring, stage, attempt, JobResult("stopped"), {})
        else:
            record_launch(wiring, attempt, seen.handle, stage)
        return
    failure = launch_attempt(wiring, manifest, stage, attempt, trainer)
    if failure:
        _retry(wiring, manifest, stage, attempt, failure, AttemptState.LOST)


def _why_stopped(run: RunRecord, manifest: Manifest, attempt: AttemptRecord, result: JobResult) -> JobResult:
    """A job that stopped though no person asked: it was told to end for the budget, or from outside."""
    if result.status != "stopped" or run.desired == "stopped":
        return result
    asked = attempt.stop_requested_at is not None  # and a run that nobody stopped asks for the budget's sake only
    preempted = Failure(FailureClass.PREEMPTED, "the job was told to end from outside (SIGTERM)", "")
    spent = f"the budget ({budgets.declared(manifest)}) is spent; raise it in run.yaml and submit again"
    over = Failure(FailureClass.BUDGET, spent, "budget")
    return replace(result, status="failed", failure=over if asked else preempted)


def _without_word(
    wiring: Wiring,
    run: RunRecord,
    manifest: Manifest,
    attempt: AttemptRecord,
    trainer: Trainer,
    seen: Observation,
) -> JobResult | Observation:
    """What becomes of a job without a result; see to it that it ends when a person or the budget says so."""
    if seen.gone:
        seen = look(wiring, attempt)  # what was seen is a moment old, and an executor may start a job anew
    running = seen.seconds or 0.0
    spent = budgets.spending(wiring.ledger.stages(run.id), wiring.ledger.attempts(run.id), running=running)
    over = budgets.exhausted(manifest, spent)
    ending = bool(over or run.state == RunState.STOPPING) and not _may_go_on(wiring, attempt)
    if ending and not seen.gone:
        wiring.executor.kill(job_of(wiring, attempt))
        seen = look(wiring, attempt)
    if not seen.gone:
        return seen
    if another_runs(wiring, attempt, seen):
        return Observation(JobState.RUNNING)
    said = trainer.collect(wiring.folder(attempt))  # it may have ended between the two looks
    if said is not None or not ending:
        return said or seen
    if over:
        return JobResult("failed", failure=Failure(FailureClass.BUDGET, over, "budget"))
    return JobResult("stopped", message=unheeded(wiring, attempt))


def _may_go_on(wiring: Wiring, attempt: AttemptRecord) -> bool:
    """Ask the job to checkpoint and end; whether its grace still runs. No wait: the next tick looks again."""
    now = wiring.clock.now()
    if attempt.stop_requested_at is not None:
        return now < attempt.stop_requested_at + STOP_GRACE_SECONDS
    wiring.executor.signal(job_of(wiring, attempt), Signal.STOP)
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_attempt(attempt, reason="StopRequested", stop_requested_at=now)
    return True


def _publish(wiring: Wiring, attempt: AttemptRecord, result: JobResult) -> dict[str, dict[str, str]]:
    """Put what a job left into the store. Only the collector publishes.

    Raises:
        IntegrityError: an output that is missing, or that lies outside the attempt's `outputs/`.
    """
    crashpoint("collect.before_publish")
    if result.status != "succeeded":
        return {}
    outputs, folder = {}, wiring.folder(attempt)
    allowed = folder.outputs.resolve()
    for name, output in result.outputs.items():
        path = folder.path / output.path
        if allowed not in path.resolve().parents or not path.exists():
            raise IntegrityError(f"output {name} must be a file or folder below outputs/, got {output.path!r}")
        digest = put_tree(wiring.blobs, path) if output.form == "tree" else wiring.blobs.put_file(path)
        outputs[name] = {"digest": digest, "form": output.form}
    return outputs


def _refuse_lacking(plan: StageManifest, result: JobResult, outputs: Mapping[str, Mapping[str, str]]) -> None:
    """Raises IntegrityError where a job that succeeded left less, or something else, than its stage declares."""
    for name, form in plan.outputs.items() if result.status == "succeeded" else ():
        left = outputs[name]["form"] if name in outputs else "nothing"
        if left != form:
            raise IntegrityError(f"it must leave output {name} as a {form}, as its stage declares, got {left}")


def _end(
    wiring: Wiring, stage: StageRecord, attempt: AttemptRecord, result: JobResult, outputs: dict[str, dict[str, str]]
) -> None:
    give_up(wiring, attempt, f"it ended: {result.status}")
    now, failure = wiring.clock.now(), result.failure
    seconds = _seconds(wiring, attempt, result.seconds)
    attempt_state = AttemptState(result.status)
    stage_state = StageState(result.status)
    reason = {"succeeded": "Succeeded", "stopped": "Stopped"}.get(result.status) or _reason(failure)
    default = "stopped by a person" if result.status == "stopped" else "done"
    message = failure.message if failure else result.message or default
    action = "" if result.status == "succeeded" else _next_action(stage, failure)
    tokens = _billed(wiring, attempt, result.tokens)
    sizes = stored_sizes(wiring.blobs, {output["digest"]: output["form"] for output in outputs.values()})
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_attempt(
            attempt,
            state=attempt_state,
            reason=reason,
            message=message,
            failure_signature=failure.signature if failure else None,
            tokens=tokens,
            finished_at=now,
            seconds=seconds,
        )
        transaction.update_stage(
            stage,
            state=stage_state,
            reason=reason,
            message=message,
            next_action=action,
            outputs=outputs,
            sizes=sizes,
            metrics=dict(result.metrics),
            tokens=stage.tokens + tokens,
            finished_at=now,
        )
        register_trained(transaction, wiring, stage, outputs, sizes)
        if result.status == "succeeded" and stage.cache_key:
            transaction.put_cache(stage.cache_key, stage.run_id, stage.name)


def _reason(failure: Failure | None) -> str:
    if failure is None:
        return "JobFailed"
    if failure.signature.startswith(IntegrityError.__name__):  # the class of what was raised comes first
        return "Corrupt"
    return "BudgetExceeded" if failure.kind is FailureClass.BUDGET else "JobFailed:" + failure.kind.value


def _next_action(stage: StageRecord, failure: Failure | None) -> str:
    if failure is None:
        return f"posttrain retry {stage.run_id} resumes it"
    return {
        FailureClass.BUDGET: "raise the budget in run.yaml and submit again",
        FailureClass.BAD_INPUT: f"mend what the message names and submit again, or posttrain retry {stage.run_id}",
        FailureClass.OUT_OF_MEMORY: f"{kind_of(stage.kind).fitting} and submit again",
        FailureClass.DIVERGED: "lower the learning rate and submit again",
    }.get(failure.kind, f"posttrain logs {stage.run_id} {stage.name}; mend the cause and submit again")


def _lost(wiring: Wiring, manifest: Manifest, stage: StageRecord, attempt: AttemptRecord, seen: Observation) -> None:
    """A job that is gone without a result."""
    detail = seen.detail or (f"exit code {seen.exit_code}" if seen.exit_code is not None else "its process is gone")
    if seen.state is JobState.UNKNOWN:
        detail = "the executor has no job of that name any more"
    if seen.cause in _ENDED_FOR:
        kind, why = _ENDED_FOR[seen.cause]
        over = Failure(kind, f"the executor ended the job: {why} ({detail})", seen.cause.value)
        _end(wiring, stage, attempt, JobResult("failed", failure=over), {})
        return
    if seen.cause is Cause.PREEMPTED:
        gone = Failure(FailureClass.PREEMPTED, f"the executor preempted the job ({detail})", "")
        _retry(wiring, manifest, stage, attempt, gone, AttemptState.LOST)
        return
    # neither a kill nor a late start says anything about the job; an exit code does: twice the same comes a third time
    mute = seen.exit_code is None or seen.exit_code < 0 or seen.exit_code == ANOTHER_RUNS
    signature = "" if mute else f"exit {seen.exit_code}"
    failure = Failure(FailureClass.INFRASTRUCTURE, f"the job ended without a result ({detail})", signature)
    _retry(wiring, manifest, stage, attempt, failure, AttemptState.LOST)


def _retry(
    wiring: Wiring,
    manifest: Manifest,
    stage: StageRecord,
    attempt: AttemptRecord,
    failure: Failure,
    ended: AttemptState,
    said: JobResult | None = None,
) -> None:
    """Back off and try again, unless the attempts are used up or the same thing happened twice in a row."""
    give_up(wiring, attempt, f"it ended: {failure.message}")
    said = said or JobResult("failed")
    tried = [a for a in wiring.ledger.attempts(stage.run_id, stage.name) if a.number > stage.retried_after]
    preempted = failure.kind is FailureClass.PREEMPTED
    why = _why_not_again(manifest, tried, failure)
    now, wait = wiring.clock.now(), BACKOFF_SECONDS[min(len(tried), len(BACKOFF_SECONDS)) - 1]
    tokens, seconds = _billed(wiring, attempt, said.tokens), _seconds(wiring, attempt, said.seconds)
    if why:
        state, reason, message = StageState.FAILED, why[0], f"{failure.message}; {why[1]}"
        action = f"posttrain logs {stage.run_id} {stage.name}; then posttrain retry {stage.run_id}"
    else:
        state, reason, action = StageState.READY, "BackOff", "none needed"
        message = f"{failure.message}; trying again in {wait:g} s"
    with wiring.ledger.transaction(wiring.actor) as transaction:
        transaction.update_attempt(
            attempt,
            state=ended,
            reason="Preempted" if preempted else "Lost" if ended is AttemptState.LOST else _reason(failure),
            message=failure.message,
            failure_signature=failure.signature or None,
            tokens=tokens,
            finished_at=now,
            seconds=seconds,
        )
        transaction.update_stage(
            stage,
            state=state,
            reason=reason,
            message=message,
            next_action=action,
            tokens=stage.tokens + tokens,
            not_before=now + wait,
        )


def _why_not_again(manifest: Manifest, tried: Sequence[AttemptRecord], failure: Failure) -> tuple[str, str] | None:
    """The reason and the words when another attempt would be pointless; the last of `tried` is the one that failed."""
    preempted = failure.kind is FailureClass.PREEMPTED
    own = [a for a in tried[:-1] if a.reason != "Preempted"]
    if own and failure.signature and own[-1].failure_signature == failure.signature:
        return "CircuitOpen", "the same failure twice in a row"
    made = len(tried) if preempted else len(own) + 1
    if made >= manifest.budget.attempts * (PREEMPTIONS_PER_ATTEMPT if preempted else 1):
        return "AttemptsExhausted", f"{made} attempts, the budget's limit"
    return None


def _inherited(wiring: Wiring, attempt: AttemptRecord) -> int:
    try:
        return wiring.folder(attempt).read_order().tokens_inherited
    except (InputError, IntegrityError):  # never written, or damaged since: then nothing was spent that can be told
        return 0


def _billed(wiring: Wiring, attempt: AttemptRecord, said: int) -> int:
    """What this attempt itself spent: its lineage's tokens less those its checkpoint brought along.

    Whichever of its words says the most: its result, its progress, or the meter, which also holds what a step that was
    cut short may have cost. So retries never spend more than was declared.
    """
    progress = _last_progress(wiring, attempt)
    words = (said, progress.tokens if progress else 0, wiring.folder(attempt).metered() or 0)
    return max(0, max(words) - _inherited(wiring, attempt))


def _seconds(wiring: Wiring, attempt: AttemptRecord, said: float) -> float:
    """How long the job ran: by the executor's record, which knows of lost ones too; at least what the job says."""
    return max(said, look(wiring, attempt).seconds or 0.0)


def _last_progress(wiring: Wiring, attempt: AttemptRecord) -> Progress | None:
    try:
        return wiring.folder(attempt).last_progress()
    except IntegrityError:  # a damaged event segment tells nothing, and must not keep a run from ending
        return None
