"""Live attempts reserve what they may spend, which bounds jobs that ignore it and lets stages run side by side."""

from __future__ import annotations

from typing import Any

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, evaluate, train
from hypothesis import given, settings, strategies as st

from posttrain.control.decide import STOP_GRACE_SECONDS
from posttrain.control.wakeups import OBSERVE_SECONDS
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure, JobResult, Progress
from posttrain.domain.records import AttemptRecord
from posttrain.store.attempts import EventWriter, SpendingMeter

STEP = 0.1  # seconds between two steps of a driver
TWO: dict[str, Any] = {
    "stages": {name: {"kind": "sft", "data": "train", "steps": 3 + number} for number, name in enumerate(("a", "b"))},
    "gates": [],
    "release": None,
}


def live(bench: Bench, run_id: str) -> list[AttemptRecord]:
    return [one for one in bench.ledger.attempts(run_id) if one.state in ("planned", "launched")]


@pytest.mark.parametrize("heeds", [False, True])
@pytest.mark.parametrize("word", ["meter", "progress"])
def test_audit_7_tokens_reported_by_a_live_attempt_count(bench: Bench, word: str, heeds: bool) -> None:
    """A job that ignores its limit overspends at most its rate × (interval + grace)."""
    bench.scripts["sft"] = [None]
    run_id, rate, budget = bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY), 200.0, 1000
    for _ in range(6):
        bench.reconciler.step(run_id)
    (attempt,) = bench.ledger.attempts(run_id)
    folder, began, stopped = bench.jobs.folders.of(attempt), bench.clock.now(), None
    sink, meter = EventWriter(folder), SpendingMeter(folder)
    with sink, meter:
        while bench.ledger.run(run_id).state == "running":
            assert bench.clock.now() < began + 120, "nobody ends it"
            if attempt.name not in bench.executor.cancelled and stopped is None:
                spent = int(rate * (bench.clock.now() - began))
                meter(spent, 0) if word == "meter" else sink(Progress(1, 9, "sft", spent, bench.clock.now()))
                sink.flush()
            if heeds and stopped is None and folder.stop_requested():
                stopped = bench.clock.now()
                folder.write_result(JobResult("stopped", tokens=spent))
                bench.executor.finish(attempt.name)
            bench.clock.sleep(STEP)
            bench.reconciler.step(run_id)
    (ended,) = bench.ledger.attempts(run_id)
    grace = 0.0 if heeds else STOP_GRACE_SECONDS
    assert (bench.ledger.run(run_id).reason, ended.stop_cause) == ("BudgetExceeded", "budget")
    assert (ended.stop_requested_at or 0.0) - began <= budget / rate + OBSERVE_SECONDS
    assert budget < ended.tokens <= budget + rate * (OBSERVE_SECONDS + grace + 2 * STEP)


def test_audit_7_a_job_that_spends_all_it_may_is_left_alone(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY)
    for _ in range(6):
        bench.reconciler.step(run_id)
    (attempt,) = bench.ledger.attempts(run_id)
    with SpendingMeter(bench.jobs.folders.of(attempt)) as meter:
        meter(900, 100)
    for _ in range(200):
        bench.clock.sleep(STEP)
        bench.reconciler.step(run_id)
    assert bench.ledger.attempts(run_id)[0].stop_requested_at is None
    train(tokens=1000)(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "succeeded"


def test_audit_14_independent_stages_run_side_by_side_and_never_reserve_more_than_there_is(bench: Bench) -> None:
    bench.scripts |= {"a": [None], "b": [None]}
    run_id = bench.submit(budget={"tokens": 1001, "wall_clock": 600}, **TWO)
    for _ in range(6):
        bench.reconciler.step(run_id)
    first, second = live(bench, run_id)
    assert [one.state for one in bench.ledger.stages(run_id)] == ["running", "running"]
    assert (first.reserved_tokens, second.reserved_tokens) == (500, 501)
    assert (first.reserved_seconds, second.reserved_seconds) == (300.0, 300.0)
    order = bench.jobs.folders.of(second).read_order()
    assert (order.token_allowance, order.seconds_allowance) == (501, 300.0)


def test_audit_14_what_an_attempt_did_not_use_is_given_back(bench: Bench) -> None:
    """A stage whose share was too little goes on with all that is left, and that costs no attempt."""

    def short(folder: Any) -> int:
        failure = Failure(FailureClass.BUDGET, "token budget must cover the next step", "budget")
        folder.write_result(JobResult("failed", tokens=480, failure=failure))
        return 0

    bench.scripts |= {"a": [None], "b": [short, train(tokens=420)]}
    run_id = bench.submit(budget={"tokens": 1000, "attempts": 1}, **TWO)
    for _ in range(50):
        bench.clock.sleep(1.0)
        bench.reconciler.step(run_id)
    stage = bench.stage(run_id, "b")
    assert (stage.state, stage.reason) == ("ready", "WaitingForBudget"), "until the other gives back"
    (attempt,) = live(bench, run_id)
    train(tokens=90)(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "succeeded"
    reserved = [(one.stage, one.tokens, one.reserved_tokens) for one in bench.ledger.attempts(run_id)]
    assert reserved == [("a", 90, 500), ("b", 480, 500), ("b", 420, 430)]


def test_audit_14_a_stage_that_had_all_that_is_left_has_spent_the_budget(bench: Bench) -> None:
    def short(folder: Any) -> int:
        failure = Failure(FailureClass.BUDGET, "token budget must cover the next step", "budget")
        folder.write_result(JobResult("failed", tokens=480, failure=failure))
        return 0

    bench.scripts |= {"a": [train(tokens=90)], "b": [short]}
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TWO))
    assert (run.state, run.reason) == ("failed", "BudgetExceeded")
    assert [one.reserved_tokens for one in bench.ledger.attempts(run.id, "b")] == [500, 430]


@settings(max_examples=20)
@given(
    budget=st.integers(2, 2000),
    spends=st.lists(st.integers(0, 700), min_size=8, max_size=8),
    ways=st.lists(st.sampled_from(["done", "short", "lost", "preempted"]), min_size=8, max_size=8),
)
def test_audit_14_reservations_together_never_exceed_the_budget(
    tmp_path_factory: pytest.TempPathFactory, budget: int, spends: list[int], ways: list[str]
) -> None:
    """Jobs that keep to their allowance, whatever becomes of them."""
    bench = Bench(tmp_path_factory.mktemp("reserving"))

    def job(folder: Any) -> int:
        allowed = folder.read_order().token_allowance
        spent, way = min(spends.pop() if spends else 1, allowed), ways.pop() if ways else "done"
        with SpendingMeter(folder) as meter:
            meter(spent, 0)
        if way == "lost":
            return -9
        if way == "done":
            return int(train(str(folder.path), spent)(folder) or 0)
        failure = Failure(FailureClass.BUDGET, "the next step", "budget")
        ended = JobResult("failed", tokens=spent, failure=failure) if way == "short" else JobResult("stopped")
        folder.write_result(ended)
        return 0

    bench.scripts |= {"a": [job], "b": [job]}
    run_id = bench.submit(budget={"tokens": budget, "attempts": 9}, **TWO)
    for _ in range(400):
        if bench.ledger.run(run_id).state not in ("pending", "running"):
            break
        bench.reconciler.step(run_id)
        billed = sum(one.tokens for one in bench.ledger.attempts(run_id))
        assert billed + sum(one.reserved_tokens or 0 for one in live(bench, run_id)) <= budget
        bench.clock.sleep(1.0)
    assert bench.ledger.run(run_id).state in ("succeeded", "failed")
    bench.ledger.close()


def test_a_stage_whose_result_is_there_takes_no_share(bench: Bench) -> None:
    bench.drive(bench.submit())
    bench.scripts |= {"sft": [train("other"), None]}
    longer = [{**RUN["stages"], "sft": {**RUN["stages"]["sft"], "steps": steps}} for steps in (4, 5)]
    run_id = bench.submit(stages=longer[0], budget={"tokens": 1000})
    bench.scripts["evaluate"] = [evaluate(100)]
    assert bench.drive(bench.submit(stages=longer[1])).state == "rejected", (
        "it measures the baseline, and leaves the channel"
    )
    for _ in range(4):
        bench.reconciler.tick(run_id)
    assert [one.reserved_tokens for one in live(bench, run_id)] == [1000]
