"""Why a job was stopped is recorded, and decides what becomes of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from control_bench import TRAIN_ONLY, Bench, train, vanish

from posttrain.control import actions
from posttrain.control.jobs import AttemptFolders
from posttrain.control.reconciler import Reconciler
from posttrain.control.verdicts import explain_run
from posttrain.domain.errors import CapacityError, FailureClass, InfrastructureError, JobFailedError, WorkspaceError
from posttrain.domain.jobs import (
    ANOTHER_RUNS,
    NO_MEMORY,
    NO_SPACE,
    NODE_FAILED,
    Capacity,
    Cause,
    Failure,
    JobResult,
    Submission,
)
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import AttemptState, StopCause
from posttrain.domain.placement import Cluster
from posttrain.domain.records import AttemptRecord
from posttrain.execution.executors.fake import FakeExecutor, Hostility
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import mailbox_at


def begun(bench: Bench, **budget: float) -> tuple[str, AttemptRecord]:
    """A run whose first job computes; the next one succeeds."""
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit(budget=budget, **TRAIN_ONLY)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    return run_id, bench.ledger.attempts(run_id)[0]


def ordered(bench: Bench, attempt: AttemptRecord, cause: StopCause) -> None:
    """Whoever schedules jobs orders a stop."""
    with bench.ledger.transaction("scheduler") as transaction:
        transaction.update_attempt(attempt, stop_requested_at=bench.clock.now(), stop_cause=cause)


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("cause", [StopCause.PREEMPTED, StopCause.DRAINED, StopCause.SUPERSEDED])
def test_audit_9_a_scheduler_that_takes_a_job_away_spends_no_budget_and_no_attempt(
    bench: Bench, cause: StopCause, heeds: bool
) -> None:
    run_id, attempt = begun(bench, tokens=1000, wall_clock=600, attempts=1)
    ordered(bench, attempt, cause)
    if heeds:
        bench.jobs.folders.of(attempt).write_result(JobResult("stopped", tokens=7))
        bench.executor.finish(attempt.name)
    run = bench.drive(run_id)
    assert run.state == "succeeded"
    first, second = bench.ledger.attempts(run_id)
    assert (first.reason, first.stop_cause, second.stop_cause) == ("Preempted", cause, None)
    assert bench.executor.cancelled == ([] if heeds else [attempt.name]), "ended after the grace where it does not heed"


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (Cause.PREEMPTED, StopCause.PREEMPTED),
        (Cause.DRAINED, StopCause.DRAINED),
        (Cause.OVERTIME, StopCause.PREEMPTED),  # of a queue: the run declares no wall clock
    ],
)
def test_audit_9_what_the_executor_takes_away_goes_on(bench: Bench, seen: Cause, cause: StopCause) -> None:
    run_id, attempt = begun(bench, tokens=1000, attempts=1)
    bench.executor.lose(attempt.name, seen)
    assert bench.drive(run_id).state == "succeeded"
    assert bench.ledger.attempts(run_id)[0].stop_cause == cause


def test_audit_9_every_stop_names_its_cause(bench: Bench) -> None:
    run_id, attempt = begun(bench)
    bench.executor.lose(attempt.name)
    bench.scripts["sft"] = [None]
    for _ in range(4):
        bench.clock.sleep(1.0)
        bench.reconciler.tick(run_id)
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    found = explain_run(bench.stores, run_id).lost
    assert [(one.state, one.stop_cause) for one in found] == [("lost", "infrastructure"), ("stopped", "person")]
    run_id, attempt = begun(bench, wall_clock=30)
    bench.clock.sleep(40)
    assert bench.drive(run_id).reason == "BudgetExceeded"
    assert bench.ledger.attempts(run_id)[0].stop_cause == StopCause.BUDGET


def test_audit_10_launches_that_fail_alike_are_lost_infrastructure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kills supervisors while they launch says nothing about the job: tries remain."""
    submit, refusals = bench.executor.submit, [1, 2, 3]

    def killed(request: JobSpec) -> Submission:
        if refusals:
            refusals.pop()
            raise InfrastructureError(f"the supervisor of {request.name} was killed while it started (signal 9)")
        return submit(request)

    monkeypatch.setattr(bench.executor, "submit", killed)
    bench.scripts["sft"] = [train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert run.state == "succeeded"
    found = [(one.state, one.stop_cause) for one in bench.ledger.attempts(run.id)]
    assert found == [(AttemptState.LOST, "infrastructure")] * 3 + [(AttemptState.SUCCEEDED, None)]


def test_audit_9_a_stop_that_nobody_ordered_is_no_spent_budget(bench: Bench) -> None:
    """Rows of a release before name no cause."""
    run_id, attempt = begun(bench, tokens=1000)
    with bench.ledger.transaction("before") as transaction:
        changed = transaction.update_attempt(attempt, stop_requested_at=bench.clock.now())
    assert replace(changed, stop_requested_at=None).stop_cause is None
    bench.jobs.folders.of(attempt).write_result(JobResult("stopped", tokens=7))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "succeeded"


@pytest.mark.parametrize(
    ("code", "words", "action", "error"),
    [
        pytest.param(NO_MEMORY, "out of memory", "micro_batch_tokens", JobFailedError, id="test_audit_35_no_memory"),
        pytest.param(NO_SPACE, "the disk is full", "free some space", WorkspaceError, id="test_audit_36_no_space"),
    ],
)
def test_audit_35_36_a_job_that_could_not_even_say_so_is_not_tried_again_blindly(
    bench: Bench, code: int, words: str, action: str, error: type[Exception]
) -> None:
    bench.scripts["sft"] = [vanish(code), train()]
    run_id = bench.submit(**TRAIN_ONLY)
    run, stage = bench.drive(run_id), bench.stage(run_id, "sft")
    (attempt,) = bench.ledger.attempts(run_id)
    assert (run.state, attempt.state) == ("failed", "failed")
    assert words in attempt.message
    assert stage.reason == attempt.reason == f"JobFailed:{'out_of_memory' if code == NO_MEMORY else 'disk_full'}"
    assert action in stage.next_action
    assert type(bench.error(run_id)) is error
    actions.retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"
    assert len(bench.ledger.attempts(run_id)) == 2


@pytest.mark.parametrize("code", [NO_MEMORY, NO_SPACE])
def test_audit_36_the_code_of_a_job_that_was_asked_to_stop_is_no_full_disk(bench: Bench, code: int) -> None:
    run_id, attempt = begun(bench)
    with bench.ledger.transaction("ann") as transaction:
        transaction.update_attempt(attempt, stop_requested_at=bench.clock.now(), stop_cause="preempted")
    bench.executor.finish(attempt.name, code)
    assert bench.drive(run_id).state == "succeeded"
    assert "JobFailed" not in bench.ledger.attempts(run_id)[0].reason


class Elsewhere(FakeExecutor):
    """The fake on other machines."""

    remote = True


def began(spec: JobSpec) -> bool:
    """Whether a process of a node began the attempt."""
    with patch("posttrain.store.mailbox.socket", SimpleNamespace(gethostname=lambda: "node")):
        return mailbox_at(spec.mailbox).start(spec.epoch, "a process of a node") is None


def elsewhere(folder: Path, job: Callable[[JobSpec], int | None]) -> Bench:
    """A control plane whose jobs have nothing but a mailbox."""
    made = Bench(folder)
    made.executor = Elsewhere(job, made.clock.now)
    folders = AttemptFolders(folder, (folder / "mail").as_uri, lambda _: True, made.stores.blobs.url)
    made.jobs = replace(made.jobs, executor=made.executor, folders=folders)
    made.reconciler = Reconciler(made.stores, made.jobs, "here")
    return made


@pytest.mark.timeout(60)
def test_a_stop_ends_a_run_whose_job_elsewhere_began_unnoticed_and_was_dropped(tmp_path: Path) -> None:
    """Its submission had no answer, it ended before anybody looked, and the scheduler keeps no ended jobs."""

    def job(spec: JobSpec) -> int:
        began(spec)
        return NODE_FAILED

    bench = elsewhere(tmp_path, job)
    bench.executor.hostility = Hostility(lose_answers=1, purges_after=0.0)
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.executor.launched:
        bench.reconciler.step(run_id)
        bench.clock.sleep(0.5)
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"


@pytest.mark.timeout(60)
def test_a_job_that_a_cluster_refuses_for_now_is_submitted_again_though_devices_here_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(spec: JobSpec) -> int:
        began(spec)
        mailbox_at(spec.mailbox).answer(JobResult("failed", failure=Failure(FailureClass.BUG, "b", "b")).to_json())
        return 0

    bench = elsewhere(tmp_path, job)
    cluster, real, asked = bench.executor, bench.executor.submit, list[float]()
    cluster.name = "slurm-a"  # type: ignore[misc]

    def submit(spec: JobSpec) -> Submission:
        asked.append(bench.clock.now())
        if len(asked) < 5:
            raise CapacityError("executor slurm-a does not answer; asking again within 30 s")
        return real(spec)

    monkeypatch.setattr(cluster, "submit", submit)
    monkeypatch.setattr(NativeTrainer, "devices", lambda self, kind, params: 1)
    here = FakeExecutor(None, bench.clock.now)
    here.room = Capacity(devices=1, held={"0": "another job"})
    flavours = {"h100": {"executor": "slurm-a", "gpus_per_node": 1}}
    declared = Cluster.model_validate(
        {"executors": {"slurm-a": {"kind": "slurm"}}, "flavours": flavours, "default": "h100"}
    )
    bench.jobs = replace(bench.jobs, executor=here, declared=lambda: (declared, {"slurm-a": cluster}))
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    run_id = bench.submit(**TRAIN_ONLY)
    bench.drive(run_id)
    assert [later - sooner for sooner, later in pairwise(asked[1:])] == pytest.approx([15.0] * 3, abs=2.0)
    assert bench.ledger.attempts(run_id)[0].failure_signature == "b"


@pytest.mark.timeout(60)
def test_a_job_elsewhere_that_gave_way_to_a_twin_is_not_waited_for_when_the_twin_is_lost(tmp_path: Path) -> None:
    begun: list[str] = []

    def job(spec: JobSpec) -> int | None:
        begun.append(spec.name)
        if not began(spec):
            return ANOTHER_RUNS
        if spec.epoch > 1:
            mailbox_at(spec.mailbox).answer(JobResult("failed", failure=Failure(FailureClass.BUG, "b", "b")).to_json())
            return 0
        return None

    bench = elsewhere(tmp_path, job)
    bench.executor.hostility = Hostility(idempotent=False, twice=1)
    run_id = bench.submit(**TRAIN_ONLY)
    while len(begun) < 2:
        bench.reconciler.step(run_id)
        bench.clock.sleep(0.5)
    bench.executor.lose(begun[0], Cause.NODE_LOST, 0)
    bench.drive(run_id)
    states = [(one.state, one.failure_signature) for one in bench.ledger.attempts(run_id)]
    assert (states[0][0], states[1]) == ("lost", ("failed", "b"))
