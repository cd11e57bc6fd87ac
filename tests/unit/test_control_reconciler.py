"""The reconciler over scripted jobs: launches, retries, stage cache, budgets, gates, releases, leases."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, evaluate, fail, train, vanish

from driving import drive
from posttrain.control import actions, launch
from posttrain.control.decide import STOP_GRACE_SECONDS, View, decide_stage
from posttrain.control.jobs import AttemptFolders
from posttrain.control.reconciler import LEASE_SECONDS, Reconciler
from posttrain.control.verdicts import explain_run
from posttrain.domain.errors import (
    BudgetExceededError,
    FailureClass,
    GateRejectedError,
    InfrastructureError,
    InputError,
    JobFailedError,
    NotFoundError,
    StoppedError,
)
from posttrain.domain.jobs import JobResult
from posttrain.domain.records import StageRecord
from posttrain.store.attempts import AttemptFolder
from posttrain.store.ledger import Stores
from posttrain.store.work import Work


def test_a_run_goes_from_submission_to_release(bench: Bench) -> None:
    run = bench.drive(bench.submit())
    assert (run.state, bench.error(run.id)) == ("succeeded", None)
    assert bench.launched == ["sft", "evaluate"]
    assert bench.stage(run.id, "baseline-evaluate").reason == "ChannelEmpty"
    live = bench.ledger.channel("prod")
    assert live is not None
    assert live.model_digest == bench.stage(run.id, "sft").outputs["model"]["digest"]
    assert live.report_digest == bench.stage(run.id, "gate").outputs["report"]["digest"]


def test_submitting_the_same_manifest_attaches(bench: Bench) -> None:
    first = bench.submit()
    bench.drive(first)
    assert bench.submit() == first
    again = bench.submit(again=True)
    assert again != first
    assert [run.repeat for run in bench.ledger.runs()] == [2, 1]
    bench.drive(again)
    assert bench.launched == ["sft", "evaluate"], "the stage cache answers for the second run"
    assert bench.stage(again, "sft").cached_from == f"{first}/sft"
    assert bench.stage(again, "release").reason == "AlreadyLive"


def test_a_worse_model_does_not_ship(bench: Bench) -> None:
    good = bench.drive(bench.submit())
    bench.scripts |= {"sft": [train("other")], "evaluate": [evaluate(150)]}
    run = bench.drive(bench.submit(seed=2))
    assert (run.state, run.reason) == ("rejected", "GateFailed")
    assert isinstance(bench.error(run.id), GateRejectedError)
    assert bench.launched[2:] == ["sft", "baseline-evaluate", "evaluate"]
    report = explain_run(bench.stores, run.id).report
    assert report is not None
    assert {v.gate: str(v.outcome) for v in report.verdicts} == {"accuracy": "fail", "steady": "fail"}
    live = bench.ledger.channel("prod")
    assert live is not None
    assert live.run_id == good.id
    assert bench.stage(run.id, "release").reason == "NotReached"
    with pytest.raises(GateRejectedError):
        actions.promote(bench.stores, run.id, "prod")


def test_a_channel_that_moved_since_the_gate_looked_is_left_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = "sha256:" + "1" * 64

    def promote_another(name: str) -> None:
        if name == "gate.after_commit":
            with bench.ledger.transaction("rival") as transaction:
                transaction.append_release("prod", rival, None, "promote", expected=0)

    monkeypatch.setattr("posttrain.control.verdicts.crashpoint", promote_another)
    run = bench.drive(bench.submit())
    assert (run.state, run.reason) == ("rejected", "ChannelMoved")
    live = bench.ledger.channel("prod")
    assert live is not None
    assert live.model_digest == rival


def test_nothing_new_starts_in_a_run_that_is_going_to_fail(bench: Bench) -> None:
    stages = {name: {"kind": "sft", "data": "train", "steps": steps} for steps, name in enumerate("abc", 1)}
    bench.scripts |= {"a": [fail(FailureClass.BUG)], "b": [None], "c": [train()]}
    run_id = bench.submit(stages=stages, gates=[], release=None)
    for _ in range(5):  # two slots: c waits for the one that a leaves
        bench.reconciler.tick(run_id)
    assert [bench.stage(run_id, name).state for name in "abc"] == ["failed", "running", "ready"]
    attempt = bench.ledger.attempts(run_id, "b")[0]
    train()(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "failed"
    assert bench.launched == ["a", "b"]
    assert bench.stage(run_id, "c").reason == "NotReached"


def test_lost_jobs_are_retried_with_back_off(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(), vanish(), train()]
    run = bench.drive(bench.submit())
    assert run.state == "succeeded"
    attempts = bench.ledger.attempts(run.id, "sft")
    assert [a.state for a in attempts] == ["lost", "lost", "succeeded"]
    gaps = [later.created_at - earlier.finished_at for earlier, later in pairwise(attempts)]
    assert gaps[0] >= 0.5
    assert gaps[1] >= 2.0


def test_attempts_are_bounded(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish()]
    run = bench.drive(bench.submit(budget={"attempts": 3}))
    assert (run.state, run.reason) == ("failed", "AttemptsExhausted")
    assert isinstance(bench.error(run.id), InfrastructureError)
    assert len(bench.launched) == 3
    bench.scripts["sft"] = [vanish(), train()]
    actions.retry(bench.stores, bench.jobs.folders, run.id)
    assert bench.drive(run.id).state == "succeeded", "a retry counts attempts afresh"


def test_the_same_exit_twice_in_a_row_opens_the_circuit(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(exit_code=3)]
    run = bench.drive(bench.submit())
    assert run.reason == "CircuitOpen"
    assert len(bench.launched) == 2


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureClass.BUG, JobFailedError),
        (FailureClass.DIVERGED, JobFailedError),
        (FailureClass.OUT_OF_MEMORY, JobFailedError),
        (FailureClass.BAD_INPUT, InputError),
        (FailureClass.BUDGET, BudgetExceededError),
    ],
)
def test_what_a_retry_would_repeat_is_not_retried(bench: Bench, kind: FailureClass, error: type[Exception]) -> None:
    bench.scripts["sft"] = [fail(kind)]
    run = bench.drive(bench.submit())
    assert run.state == "failed"
    assert "it broke" in run.message
    assert run.next_action
    assert bench.launched == ["sft"]
    assert type(bench.error(run.id)) is error


def test_a_broken_disk_is_retried_once_then_named(bench: Bench) -> None:
    bench.scripts["sft"] = [fail(FailureClass.INFRASTRUCTURE, "disk full"), train()]
    assert bench.drive(bench.submit()).state == "succeeded"
    bench.scripts["sft"] = [fail(FailureClass.INFRASTRUCTURE, "disk full")]
    run = bench.drive(bench.submit(seed=2))
    assert run.reason == "CircuitOpen"
    assert "disk full" in run.message


def test_the_token_budget_counts_lost_work_and_is_handed_on(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(tokens=300), train(tokens=500)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY))
    assert run.state == "succeeded"
    orders = [bench.jobs.folders.of(a).read_order() for a in bench.ledger.attempts(run.id)]
    assert [o.token_allowance for o in orders] == [1000, 700]
    assert bench.stage(run.id, "sft").tokens == 800


def test_a_spent_budget_launches_nothing_more(bench: Bench) -> None:
    bench.scripts["sft"] = [train(tokens=1000)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}))
    assert (run.state, run.reason) == ("failed", "BudgetExceeded")
    assert isinstance(bench.error(run.id), BudgetExceededError)
    assert bench.launched == ["sft"]
    assert "1000 of 1000 tokens" in run.message


def test_a_spent_wall_clock_launches_nothing_more(bench: Bench) -> None:
    def late(folder: AttemptFolder) -> int:
        bench.clock.sleep(60)
        code = train()(folder)
        assert code is not None
        return code

    bench.scripts["sft"] = [late]
    run = bench.drive(bench.submit(budget={"wall_clock": 60}))
    assert (run.state, run.reason) == ("failed", "BudgetExceeded")
    assert bench.stage(run.id, "sft").state == "succeeded"
    assert bench.launched == ["sft"]
    assert "60 of 60 s" in run.message


def test_the_wall_clock_budget_stops_a_running_job(bench: Bench) -> None:
    bench.scripts["sft"] = [None]  # runs for ever
    run = bench.drive(bench.submit(budget={"wall_clock": 60}))
    assert run.reason == "BudgetExceeded"
    assert bench.executor.cancelled == [f"{run.id}-sft-1"], "it was asked first, and had its grace"
    asked = bench.ledger.attempts(run.id)[0].stop_requested_at
    assert asked is not None
    assert bench.clock.now() - asked >= STOP_GRACE_SECONDS


def test_a_job_that_ends_itself_for_the_wall_clock_is_over_budget_not_stopped(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"wall_clock": 60})
    for _ in range(3):
        bench.reconciler.tick(run_id)
    bench.clock.sleep(61)
    bench.reconciler.tick(run_id)
    folder = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0])
    assert folder.stop_requested()
    folder.write_result(JobResult("stopped", tokens=7))
    run = bench.drive(run_id)
    assert (run.state, run.reason) == ("failed", "BudgetExceeded")


def test_a_preempted_job_goes_on_without_using_up_an_attempt(bench: Bench) -> None:
    def preempted(folder: AttemptFolder) -> int:
        folder.write_result(JobResult("stopped"))  # SIGTERM from outside: it checkpointed and ended
        return 0

    bench.scripts["sft"] = [preempted, preempted, preempted, vanish(), train()]
    run = bench.drive(bench.submit(budget={"attempts": 2}))
    assert run.state == "succeeded"
    assert [a.reason for a in bench.ledger.attempts(run.id, "sft")] == ["Preempted"] * 3 + ["Lost", "Succeeded"]


def test_stop_and_go_on(bench: Bench) -> None:
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit()
    for _ in range(3):
        bench.reconciler.tick(run_id)
    assert bench.stage(run_id, "sft").state == "running"
    actions.stop(bench.stores, run_id)
    run = bench.drive(run_id)
    assert run.state == "stopped"
    assert isinstance(bench.error(run_id), StoppedError)
    with pytest.raises(InputError, match="already ended"):
        actions.stop(bench.stores, run_id)
    actions.retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"
    with pytest.raises(InputError, match="retry needs a stopped or failed run, got succeeded"):
        actions.retry(bench.stores, bench.jobs.folders, run_id)


def test_a_stop_starts_nothing_in_the_places_that_become_free(bench: Bench) -> None:
    stages = {name: {"kind": "sft", "data": "train", "steps": steps} for steps, name in enumerate("abc", 1)}
    bench.scripts |= {"a": [None, train("a")], "b": [None, train("b")], "c": [train("c")]}
    run_id = bench.submit(stages=stages, gates=[], release=None)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert [bench.stage(run_id, name).state for name in "abc"] == ["stopped"] * 3
    assert (bench.launched, bench.ledger.attempts(run_id, "c")) == (["a", "b"], [])
    actions.retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"


def test_a_run_that_nobody_drives_is_not_waited_for(bench: Bench) -> None:
    bench.scripts["sft"] = [None, train()]
    gone = Reconciler(bench.stores, bench.jobs, "gone")
    for _ in range(3):
        gone.tick(bench.submit(**TRAIN_ONLY))
    second = bench.submit(again=True, **TRAIN_ONLY)
    for _ in range(3):
        bench.reconciler.tick(second)
    assert bench.stage(second, "sft").reason == "WaitingForIdenticalStage"
    bench.clock.sleep(LEASE_SECONDS + 1)
    assert bench.drive(second).state == "succeeded"
    assert bench.launched == ["sft", "sft"]


def test_only_the_lease_holder_acts_and_a_dead_one_is_succeeded(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit()
    bench.reconciler.tick(run_id)
    dead: set[str] = set()
    other = Reconciler(bench.stores, bench.jobs, "there", alive=lambda owner: owner not in dead)
    assert other.tick(run_id) is None
    dead.add("here")
    assert other.tick(run_id) is not None
    patient = Reconciler(bench.stores, bench.jobs, "elsewhere")
    assert patient.tick(run_id) is None
    bench.clock.sleep(LEASE_SECONDS + 1)
    assert patient.tick(run_id) is not None, "an expired lease is free"
    patient.release(run_id)
    assert bench.reconciler.tick(run_id) is not None


def test_rollback_returns_to_the_model_before(bench: Bench) -> None:
    first = bench.drive(bench.submit())
    bench.scripts |= {"sft": [train("better")], "evaluate": [evaluate(199)]}
    second = bench.drive(bench.submit(seed=2))
    assert [e.run_id for e in bench.ledger.history("prod")] == [first.id, second.id]
    entry = actions.rollback(bench.stores, "prod")
    assert (entry.run_id, entry.action) == (first.id, "rollback")
    lift = {"lift_quarantine": "a slip"}
    assert actions.rollback(bench.stores, "prod", to=second.id, **lift).run_id == second.id
    assert actions.rollback(bench.stores, "prod", to="1", **lift).run_id == first.id
    assert [e.action for e in bench.ledger.history("prod")] == ["promote"] * 2 + ["rollback"] * 3
    with pytest.raises(NotFoundError, match="did you mean 'prod'"):
        actions.rollback(bench.stores, "prd")


def test_nothing_starts_in_a_run_that_another_driver_ended_a_moment_ago(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is suspended after its claim; another one rejects the run, while one of its stages backs off."""
    more = {"stages": {**RUN["stages"], "more": {**RUN["stages"]["sft"], "steps": 4}}}
    bench.scripts |= {"evaluate": [evaluate(10)], "more": [vanish(), vanish(), None]}
    run_id = bench.submit(**more)
    late = Reconciler(bench.stores, bench.jobs, "there")
    claim = late._claim

    def claim_late(name: str, row: Work | None) -> object:
        held = claim(name, row)
        bench.clock.sleep(LEASE_SECONDS + 1)
        drive(bench.reconciler, name, interval=0.01)
        bench.clock.sleep(3600)
        return held

    monkeypatch.setattr(late, "_claim", claim_late)
    late.tick(run_id)
    run, stage = bench.ledger.run(run_id), bench.stage(run_id, "more")
    assert (run.state, stage.state) == ("rejected", "ready"), "it was waiting for its next attempt"
    assert bench.reconciler.queue.look("run", run_id) is None
    manifest, rows = bench.stores.manifest(run), tuple(bench.ledger.stages(run_id))
    view = View(run, manifest, rows, tuple(bench.ledger.attempts(run_id)))
    assert decide_stage(view, "more", None, bench.clock.now() + 3600) is None
    assert decide_stage(replace(view, run=replace(run, state="running")), "more", None, bench.clock.now() + 3600)


def test_no_part_of_a_budget_is_reserved_twice_whoever_starts_stages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is suspended while it starts a stage; another one takes the run over, and starts another stage."""
    more = {"stages": {**RUN["stages"], "more": {**RUN["stages"]["sft"], "steps": 4}}, "budget": {"tokens": 1000}}
    bench.scripts |= {"sft": [vanish(), None], "more": [None]}
    run_id = bench.submit(**more)
    look, suspended = launch.find_checkpoint, []

    def suspends(stores: Stores, folders: AttemptFolders, stage: StageRecord, *words: object) -> object:
        if stage.name == "more" and not suspended:
            suspended.append(stage.name)
            bench.clock.sleep(LEASE_SECONDS + 1)
            Reconciler(bench.stores, bench.jobs, "there").tick(run_id)
        return look(stores, folders, stage, *words)

    monkeypatch.setattr(launch, "find_checkpoint", suspends)
    while not suspended:
        bench.reconciler.tick(run_id)
    found = {one.stage: one.reserved_tokens for one in bench.ledger.attempts(run_id) if one.state != "lost"}
    assert (found.keys(), sum(found.values())) == ({"sft", "more"}, 1000)
