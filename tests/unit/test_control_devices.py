"""A stage whose devices are taken waits, says who has them, costs no attempt, and starts when they are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_bench import TRAIN_ONLY, Bench, train

from posttrain.control import actions
from posttrain.domain.errors import CapacityError
from posttrain.domain.jobs import Capacity, Submission
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.trainers.native import NativeTrainer

TAKEN = Capacity(2, {"0": "a-1 of ada", "1": "b-1 of bob (in /home/bob)"})
SAID = "needs 1 of 2 devices, but none is free: 0 is held by a-1 of ada; 1 is held by b-1 of bob (in /home/bob)"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, {"sft": [train()]})


def ticks(bench: Bench, run_id: str, count: int = 3) -> Any:
    for _ in range(count):
        bench.reconciler.tick(run_id)
    return bench.stage(run_id, "sft")


def test_a_stage_waits_for_devices_and_says_who_has_them(bench: Bench) -> None:
    run_id = bench.submit(**TRAIN_ONLY)
    bench.executor.room = TAKEN
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason, stage.message) == ("ready", "WaitingForDevices", SAID)
    generation = stage.generation
    assert ticks(bench, run_id).generation == generation, "waiting writes nothing"
    assert bench.ledger.attempts(run_id) == []
    bench.executor.room = Capacity(2, {"0": "a-1 of ada"})
    assert bench.drive(run_id).state == "succeeded"
    assert [spec.devices for spec in bench.executor.launched] == [1]


def test_an_attempt_whose_devices_somebody_else_got_waits_and_is_the_one_that_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refuse = bench.executor.submit, [True, True]

    def late(spec: JobSpec) -> Submission:
        if refuse:
            refuse.pop()
            raise CapacityError(SAID)
        return submit(spec)

    monkeypatch.setattr(bench.executor, "submit", late)
    run_id = bench.submit(**TRAIN_ONLY)
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason, stage.message) == ("running", "WaitingForDevices", SAID)
    assert bench.drive(run_id).state == "succeeded"
    attempts = bench.ledger.attempts(run_id)
    assert [(a.number, a.state) for a in attempts] == [(1, "succeeded")]


def test_a_started_stage_says_no_more_that_it_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    stage = ticks(bench, run_id, 1)
    assert bench.ledger.attempts(run_id)[0].state == "planned"
    bench.executor.room = TAKEN
    assert ticks(bench, run_id).reason == "WaitingForDevices"
    bench.executor.room = Capacity()
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason, stage.message) == ("running", "Running", "attempt 1")


def test_who_died_after_launching_finds_the_job_though_it_holds_the_devices_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(place: str) -> None:
        if place == "attempt.after_launch":
            raise KeyboardInterrupt

    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    monkeypatch.setattr("posttrain.control.launch.crashpoint", dies)
    with pytest.raises(KeyboardInterrupt):
        ticks(bench, run_id)
    monkeypatch.undo()
    bench.executor.room = TAKEN
    assert ticks(bench, run_id).reason == "Running"
    assert bench.ledger.attempts(run_id)[0].state == "launched"
    assert len(bench.executor.launched) == 1


def test_a_waiting_run_can_be_stopped(bench: Bench) -> None:
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id, 1)
    bench.executor.room = TAKEN
    assert ticks(bench, run_id).reason == "WaitingForDevices"
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert bench.executor.launched == []


def test_a_machine_that_has_fewer_devices_than_a_stage_needs_is_no_place_to_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bench.submit(**TRAIN_ONLY)
    monkeypatch.setattr(NativeTrainer, "devices", lambda *_: 4)
    bench.executor.room = TAKEN
    run = bench.drive(run_id)
    assert (run.state, run.reason) == ("failed", "JobFailed:bad_input")
    assert "requests 4 devices, but this machine has 2" in run.message


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("init_model", {}, 0),
        ("evaluate", {"runtime": {"device": "auto"}}, 1),
        ("evaluate", {"runtime": {"device": "cpu"}}, 0),
        ("sft", {"placement": "collocated"}, 1),
        ("sft", {"placement": {"collocated": {"gpus": 4}}}, 4),
        ("grpo", {"placement": {"policy": {"gpus": 2}, "rollout": {"gpus": 3}}}, 5),
        ("grpo", {"placement": {"policy": {"ranks": 2}, "rollout": {"cpus": 1}}}, 0),
        ("grpo", {"placement": {"policy": {"gpus": 8}}, "runtime": {"ray_address": "10.0.0.1:6379"}}, 0),
    ],
)
def test_how_many_devices_of_its_machine_a_stage_needs(kind: str, params: dict[str, Any], wanted: int) -> None:
    assert NativeTrainer().devices(kind, params) == wanted
