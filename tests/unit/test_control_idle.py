"""What waits costs nothing: the statements of an idle driver, and what wakes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from control_bench import TRAIN_ONLY, Bench, train
from sqlalchemy import event

from posttrain.control import actions
from posttrain.control.reconciler import Reconciler
from posttrain.domain.jobs import Capacity
from posttrain.execution.trainers.native import NativeTrainer

AT_MOST = 25.0  # statements a trained stage: it was 99.5


@contextmanager
def statements(bench: Bench) -> Iterator[list[str]]:
    """Every statement that reaches the database meanwhile."""
    told: list[str] = []

    def hear(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            told.append(statement)

    engine = bench.ledger.database._engine
    event.listen(engine, "before_cursor_execute", hear)
    try:
        yield told
    finally:
        event.remove(engine, "before_cursor_execute", hear)


def test_audit_39_a_stage_of_a_run_without_a_budget_asks_the_ledger_no_more_than_that_often(bench: Bench) -> None:
    """A run of eight training stages, from its first pass to its end."""
    stages: dict[str, object] = {"s1": {"kind": "sft", "data": "train", "steps": 3}}
    stages |= {f"s{n}": {"kind": "sft", "data": "train", "steps": 3, "model": f"s{n - 1}"} for n in range(2, 9)}
    bench.scripts = {name: [train(name)] for name in stages}
    run_id = bench.submit(stages=stages, gates=[], release=None)
    with statements(bench) as told:
        assert bench.drive(run_id).state == "succeeded"
    assert len(bench.ledger.stages(run_id)) == 8
    assert len(told) / 8 <= AT_MOST, len(told) / 8


def waiting(bench: Bench, runs: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """So many runs that wait for devices."""
    monkeypatch.setattr(NativeTrainer, "devices", lambda self, kind, params: 1)
    monkeypatch.setattr(bench.executor, "capacity", lambda: Capacity(1, {"0": "another"}))
    ids = [bench.submit(again=True, seed=number, **TRAIN_ONLY) for number in range(runs)]
    for _ in range(6):
        for run_id in ids:
            bench.reconciler.step(run_id)
        bench.clock.sleep(1.0)
    assert {bench.stage(run_id, "sft").reason for run_id in ids} == {"WaitingForDevices"}
    return ids


def idle(bench: Bench, ids: list[str], seconds: int) -> float:
    """Statements in a second of a driver that looks ten times in it."""
    with statements(bench) as told:
        for _ in range(seconds * 10):
            for run_id in ids:
                bench.reconciler.step(run_id)
            bench.clock.sleep(0.1)
    return len(told) / seconds


@pytest.mark.parametrize("runs", [1, 25, pytest.param(1000, marks=pytest.mark.slow)])
def test_runs_that_wait_cost_less_than_two_statements_a_second_however_many(
    bench: Bench, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = waiting(bench, runs, monkeypatch)
    assert idle(bench, ids, 60 if runs < 100 else 10) < 2.0


def test_a_running_job_costs_no_more(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    for _ in range(6):
        bench.reconciler.step(run_id)
    assert bench.stage(run_id, "sft").state == "running"
    assert idle(bench, [run_id], 50) < 2.0


def test_what_they_wait_for_wakes_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = waiting(bench, 3, monkeypatch)
    bench.scripts["sft"] = [train()]
    monkeypatch.setattr(bench.executor, "capacity", lambda: Capacity(1, {}))
    for _ in range(40):
        for run_id in ids:
            bench.reconciler.step(run_id)
        bench.clock.sleep(0.1)
    assert {bench.ledger.run(run_id).state for run_id in ids} == {"succeeded"}


def test_a_person_wakes_a_driver_within_its_next_question(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    for _ in range(6):
        bench.reconciler.step(run_id)
    actions.stop(bench.stores, run_id)
    for _ in range(10):
        bench.clock.sleep(0.1)
        bench.reconciler.step(run_id)
    assert bench.ledger.run(run_id).state == "stopping"


def test_the_end_of_an_identical_stage_wakes_who_waits_for_it(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    first, second = bench.submit(**TRAIN_ONLY), bench.submit(again=True, **TRAIN_ONLY)
    other = Reconciler(bench.stores, bench.jobs, "there")
    for _ in range(6):
        bench.reconciler.step(first)
        other.step(second)
    assert bench.stage(second, "sft").reason == "WaitingForIdenticalStage"
    train()(bench.jobs.folders.of(bench.ledger.attempts(first)[0]))
    bench.executor.finish(bench.ledger.attempts(first)[0].name)
    for _ in range(12):
        bench.clock.sleep(0.1)
        bench.reconciler.step(first)
        other.step(second)
    assert bench.ledger.run(first).state == "succeeded"
    for _ in range(12):
        bench.clock.sleep(0.1)
        other.step(second)
    assert bench.stage(second, "sft").reason == "CacheHit"


def test_a_driver_beside_one_that_holds_a_run_only_asks(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.step(run_id)
    watcher = Reconciler(replace(bench.stores, actor="watcher"), bench.jobs, "there")
    with statements(bench) as told:
        for _ in range(100):
            bench.reconciler.keep()
            assert watcher.step(run_id).run.state in ("pending", "running")
            bench.clock.sleep(0.1)
    assert not [words for words in told if words.startswith(("INSERT", "DELETE"))]
