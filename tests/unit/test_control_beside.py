"""What others change while a driver works beside its deciding thread: budgets, slots, stops, and who is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from control_bench import TRAIN_ONLY, Bench, fail, train
from test_control_billing import write_checkpoint

from posttrain.control import actions, budgets, stages, stages as actuator
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import FailureClass, InfrastructureError
from posttrain.store import attempts as store_attempts
from posttrain.store.attempts import AttemptFolder
from posttrain.store.journal import RUN, STAGE
from posttrain.store.work import WorkQueue

TWO: dict[str, Any] = {
    "stages": {
        "a": {"kind": "sft", "data": "train", "steps": 3},
        "b": {"kind": "sft", "data": "train", "steps": 4},
    },
    "gates": [],
    "release": None,
}


def until(bench: Bench, driver: Reconciler, run_id: str, condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        if driver.worth([run_id]):
            driver.step(run_id)
        bench.clock.sleep(0.2)
        driver.rest(0.01)
    raise AssertionError("never")


def leaves(step: int, tokens: int) -> Callable[[AttemptFolder], int]:
    def job(folder: AttemptFolder) -> int:
        write_checkpoint(folder, step, tokens)
        return fail(FailureClass.BUG, tokens=tokens)(folder) or 0

    return job


def test_two_stages_that_start_beside_each_other_know_what_the_other_took_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts |= {"a": [leaves(1, 400), None], "b": [leaves(1, 400), None]}
    first = bench.submit(budget={"tokens": 5000}, **TWO)
    assert bench.drive(first).state == "failed"
    assert {one.stage: one.tokens for one in bench.ledger.attempts(first)} == {"a": 400, "b": 400}
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=2), "here")
    put, go_on = store_attempts.put_tree, threading.Event()

    def slow(*words: Any) -> str:
        if "/b/" in str(words[1]):  # the hash of the second takes until the first has begun
            assert go_on.wait(60)
        return put(*words)

    monkeypatch.setattr(store_attempts, "put_tree", slow)
    second = bench.submit(budget={"tokens": 1000}, **TWO)
    until(bench, driver, second, lambda: bench.stage(second, "a").state == "running")
    go_on.set()
    for _ in range(100):
        if driver.worth([second]):
            driver.step(second)
        bench.clock.sleep(0.2)
        driver.rest(0.01)
    attempts = bench.ledger.attempts(second)
    taken = budgets.taken_over(attempts)
    reserved = sum(one.reserved_tokens or 0 for one in attempts)
    assert taken + reserved <= 1000, f"{taken} tokens were taken over, {reserved} are reserved"


def test_a_run_that_is_stopped_while_a_stage_begins_beside_does_not_end_before_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is committed after the rows of the pass were read, and before the run is `stopping`."""
    bench.scripts["sft"] = [None]
    planning, go_on, planned = threading.Event(), threading.Event(), threading.Event()
    plan, move = stages.plan_attempt, actuator._move_run

    def slow(*words: Any, **options: Any) -> None:
        planning.set()
        assert go_on.wait(60)
        plan(*words, **options)
        planned.set()

    def moved(stores: Any, order: Any) -> None:
        if order.state == "stopping":
            go_on.set()
            assert planned.wait(60)
        move(stores, order)

    monkeypatch.setattr(stages, "plan_attempt", slow)
    monkeypatch.setattr(actuator, "_move_run", moved)
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=2), "here")
    run_id = bench.submit(**TRAIN_ONLY)
    until(bench, driver, run_id, planning.is_set)
    actions.stop(bench.stores, run_id)
    until(bench, driver, run_id, lambda: bench.ledger.run(run_id).state == "stopped")
    assert bench.stage(run_id, "sft").state == "stopped"
    assert [one.state for one in bench.ledger.attempts(run_id)] == ["stopped"]


def test_a_run_that_fails_while_a_stage_begins_beside_ends_after_the_job_of_that_stage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is committed after the rows of the pass were read, in which the stage has no job."""
    bench.scripts |= {"a": [fail(FailureClass.BUG)], "b": [train()]}
    go_on, plan = threading.Event(), stages.plan_attempt

    def slow(stores: Any, jobs: Any, view: Any, stage: Any, *words: Any, **options: Any) -> None:
        if stage.name == "b":
            assert go_on.wait(60)
        plan(stores, jobs, view, stage, *words, **options)

    monkeypatch.setattr(stages, "plan_attempt", slow)
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=2), "here")
    run_id = bench.submit(**TWO)
    until(bench, driver, run_id, lambda: bench.stage(run_id, "a").state == "failed")
    for _ in range(20):
        if driver.worth([run_id]):
            driver.step(run_id)
        bench.clock.sleep(0.2)
    assert (bench.ledger.run(run_id).state, bench.ledger.attempts(run_id, "b")) == ("running", [])
    go_on.set()
    until(bench, driver, run_id, lambda: bench.ledger.run(run_id).state == "failed")
    assert [one.state for one in bench.ledger.attempts(run_id, "b")] == ["succeeded"]
    assert bench.stage(run_id, "b").state == "succeeded"


def test_a_run_with_a_failed_stage_ends_when_its_last_job_has_ended(bench: Bench) -> None:
    bench.scripts |= {"a": [fail(FailureClass.BUG)], "b": [None]}
    run_id = bench.submit(**TWO)
    for _ in range(10):
        bench.reconciler.tick(run_id)
        bench.clock.sleep(1)
    assert [bench.stage(run_id, name).state for name in "ab"] == ["failed", "running"]
    assert bench.ledger.run(run_id).state == "running"
    [attempt] = bench.ledger.attempts(run_id, "b")
    bench.executor.finish(attempt.name, train()(bench.jobs.folders.of(attempt)) or 0)
    assert bench.drive(run_id).state == "failed"
    assert bench.stage(run_id, "b").state == "succeeded"


def test_slots_are_counted_when_they_are_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is hashed, a driver dies whose job goes on, and another run takes the slot that is free."""
    bench.scripts["sft"] = [leaves(1, 100), None]
    first = bench.submit(**TRAIN_ONLY)
    bench.drive(first)
    lonely, third = (bench.submit(seed=seed, **TRAIN_ONLY) for seed in (2, 3))
    dying, other = (Reconciler(bench.stores, bench.jobs, name) for name in ("dying", "other"))
    for _ in range(4):
        dying.step(lonely)
    assert bench.stage(lonely, "sft").state == "running"
    put = store_attempts.put_tree

    def slow(*words: Any) -> str:
        bench.clock.sleep(20)
        for _ in range(4):
            other.step(third)
        return put(*words)

    monkeypatch.setattr(store_attempts, "put_tree", slow)
    second = bench.submit(budget={"attempts": 4}, **TRAIN_ONLY)
    for _ in range(4):
        bench.reconciler.step(second)
        bench.clock.sleep(0.5)
    live = [
        one.name
        for run in (lonely, third, second)
        for one in bench.ledger.attempts(run)
        if one.state in ("planned", "launched")
    ]
    assert len(live) <= bench.jobs.slots, live


def test_a_person_who_revives_a_stage_while_a_driver_takes_its_run_is_heard(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's rows are read before the claim, whose version counts the wake."""
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.queue.failed(STAGE, f"{run_id}/sft", "it broke", "", None)
    with pytest.raises(InfrastructureError):
        bench.drive(run_id)
    bench.reconciler.release(run_id)
    driver, person = Reconciler(bench.stores, bench.jobs, "there"), WorkQueue(bench.ledger, "a person")
    claim = driver.queue.claim

    def claims(*words: Any, **options: Any) -> Any:
        if any(row.dead_at for row in person.rows(STAGE, run_id)):
            person.revive(STAGE, f"{run_id}/sft")
        return claim(*words, **options)

    monkeypatch.setattr(driver.queue, "claim", claims)
    for _ in range(100):
        driver.step(run_id)  # raises where all that is left was set aside
        bench.clock.sleep(1)
    assert bench.stage(run_id, "sft").state == "running"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_stage_that_waits_for_budget_begins_when_it_is_free_though_all_threads_were_busy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """In one look the end of `a` is begun beside, and `b` is asked whether it can start, after that."""
    bench.scripts |= {"a": [None], "c": [train("c", tokens=500)], "b": [train("b", tokens=100)]}
    plan = {**TWO["stages"], "c": {"kind": "sft", "data": "train", "steps": 5}}
    plan["b"] = {**plan["b"], "model": "c"}
    run_id = bench.submit(**{**TWO, "stages": plan, "budget": {"tokens": 1000}})
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=threads), "here")
    until(bench, driver, run_id, lambda: bench.stage(run_id, "b").reason == "WaitingForBudget")
    for _ in range(50):
        if driver.worth([run_id]):
            driver.step(run_id)
        bench.clock.sleep(0.2)
        driver.rest(0.01)
    if threads == 2:  # another run's work takes one of them meanwhile
        go_on = threading.Event()
        driver._beside.begin("another", "stage", lambda: go_on.wait(60) and None)
    (attempt,) = bench.ledger.attempts(run_id, "a")
    train("a", tokens=100)(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    for _ in range(600):
        if driver.worth([run_id]):
            driver.step(run_id)
        bench.clock.sleep(0.5)
        driver.rest(0.01)
    if threads == 2:
        go_on.set()
    assert bench.stage(run_id, "a").state == "succeeded"
    assert bench.stage(run_id, "b").state == "succeeded", bench.stage(run_id, "b").message


def test_a_run_that_is_woken_while_work_goes_on_is_decided_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An approval, say, that comes after the work has looked for it, and that a look meanwhile has seen."""
    bench.scripts["sft"] = [None]
    going, go_on, starts = threading.Event(), threading.Event(), list[str]()
    start = actuator.start_ready

    def late(*words: Any) -> None:
        starts.append("start")
        if len(starts) > 1:
            start(*words)
            return
        going.set()
        assert go_on.wait(60)

    monkeypatch.setattr(actuator, "start_ready", late)
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=2), "here")
    run_id = bench.submit(**TRAIN_ONLY)
    until(bench, driver, run_id, going.is_set)
    driver.queue.wake(RUN, [run_id])
    assert driver.tick(run_id) is not None
    go_on.set()
    until(bench, driver, run_id, lambda: bench.stage(run_id, "sft").state == "running")
