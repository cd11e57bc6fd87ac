"""The control plane over an executor that loses answers, shows jobs late, forgets them and starts them anew: one job
of an attempt, nothing lost, and `why` says what is waited for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from control_bench import TRAIN_ONLY, Bench, train

from posttrain.control import actions
from posttrain.control.attempts import give_up
from posttrain.domain.jobs import ANOTHER_RUNS, Cause
from posttrain.execution.executors.fake import Hostility
from posttrain.execution.processes import identity
from posttrain.store.attempts import AttemptFolder
from posttrain.store.audit import verify_rows

FAR = {"idempotent": False, "visible_after": 20.0, "settles_after": 60.0}  # seconds


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, {"sft": [train()]})


def be(bench: Bench, **words: float) -> None:
    bench.executor.hostility = Hostility(**{**FAR, **words})  # type: ignore[arg-type]


def ticks(bench: Bench, run_id: str, count: int = 3) -> Any:
    for _ in range(count):
        bench.reconciler.tick(run_id)
    return bench.stage(run_id, "sft")


def names(bench: Bench) -> list[str]:
    return [spec.name.rsplit("-", 1)[1] for spec in bench.executor.launched]


@pytest.mark.parametrize("trouble", ["lose_answers", "lose_requests", "late_requests"])
def test_an_unknown_submission_is_observed_and_never_submitted_under_another_name(bench: Bench, trouble: str) -> None:
    be(bench, **{trouble: 1})
    run_id = bench.submit(**TRAIN_ONLY)
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason) == ("running", "SubmissionUnknown")
    generation = ticks(bench, run_id).generation
    assert ticks(bench, run_id).generation == generation, "waiting writes nothing"
    assert bench.drive(run_id).state == "succeeded"
    assert names(bench) == ["1"]
    assert [a.state for a in bench.ledger.attempts(run_id)] == ["succeeded"]


def test_a_job_that_is_not_seen_yet_is_not_lost(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    be(bench)
    run_id = bench.submit(**TRAIN_ONLY)
    stage = ticks(bench, run_id)
    assert bench.ledger.attempts(run_id)[0].state == "launched"
    assert (stage.state, stage.reason) == ("running", "JobNotVisible")
    bench.clock.sleep(21)
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason, stage.message) == ("running", "Running", "attempt 1")
    assert names(bench) == ["1"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_the_executor_forgot_is_what_its_result_says_and_lost_without_one(bench: Bench, ended: bool) -> None:
    bench.scripts["sft"] = [None, train("again")]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    if ended:
        train()(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    bench.executor.hostility.purges_after = 5.0
    bench.clock.sleep(6)
    assert bench.drive(run_id).state == "succeeded"
    assert [a.state for a in bench.ledger.attempts(run_id)] == (["succeeded"] if ended else ["lost", "succeeded"])


def test_a_requeue_keeps_the_attempt(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    bench.clock.sleep(10)
    bench.executor.requeue(attempt.name)
    assert ticks(bench, run_id).state == "running"
    bench.clock.sleep(5)
    train()(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "succeeded"
    [attempt] = bench.ledger.attempts(run_id)
    assert (attempt.number, attempt.state) == (1, "succeeded")
    assert 15.0 <= attempt.seconds < 20.0, "what both incarnations ran is billed"


def test_a_requeued_job_that_finds_its_own_start_is_tried_again_as_often_as_it_happens(bench: Bench) -> None:
    bench.scripts["sft"] = [None, None, train()]
    run_id = bench.submit(**TRAIN_ONLY)
    for number in (1, 2):
        while len(bench.executor.launched) < number:
            bench.clock.sleep(1)
            ticks(bench, run_id)
        attempt = bench.ledger.attempts(run_id)[-1]
        bench.jobs.folders.of(attempt).mailbox.start(number, identity(os.getpid()) or "")
        bench.executor.requeue(attempt.name)
        bench.executor.finish(attempt.name, ANOTHER_RUNS)
    assert bench.drive(run_id).state == "succeeded"
    assert [a.state for a in bench.ledger.attempts(run_id)] == ["lost", "lost", "succeeded"]


def test_a_job_that_seems_gone_for_a_moment_and_was_requeued_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    name = bench.ledger.attempts(run_id)[0].name
    bench.executor.lose(name)
    observe, looks = bench.executor.observe, list[int]()

    def anew(jobs: Any) -> Any:
        seen = observe(jobs)
        if not looks:
            bench.executor.requeue(name)
        looks.append(len(jobs))
        return seen

    monkeypatch.setattr(bench.executor, "observe", anew)
    assert ticks(bench, run_id, 1).state == "running"
    assert [a.state for a in bench.ledger.attempts(run_id)] == ["launched"]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_run_is_not_stopped_before_it_is_known_whether_there_is_a_job(bench: Bench, arrives: bool) -> None:
    bench.scripts["sft"] = [None]
    be(bench, **{"late_requests" if arrives else "lose_requests": 1})
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    actions.stop(bench.stores, run_id)
    stage = ticks(bench, run_id)
    assert (stage.state, stage.reason) == ("running", "SubmissionUnknown")
    assert bench.drive(run_id).state == "stopped"
    assert names(bench) == (["1"] if arrives else [])
    assert len(bench.executor.cancelled) == len(names(bench)), "what came late was ended"


@pytest.mark.parametrize("stopped", [True, False])
def test_what_a_job_left_counts_though_its_submission_was_never_answered_and_it_is_forgotten(
    bench: Bench, stopped: bool
) -> None:
    be(bench, lose_answers=1, purges_after=5.0)
    run_id = bench.submit(**TRAIN_ONLY)
    assert ticks(bench, run_id).reason == "SubmissionUnknown"
    if stopped:
        actions.stop(bench.stores, run_id)
    bench.clock.sleep(61)  # it ran to its end, and the executor has forgotten it
    bench.drive(run_id)
    [attempt] = bench.ledger.attempts(run_id)
    assert (attempt.state, bench.stage(run_id, "sft").state) == ("succeeded", "succeeded")
    assert names(bench) == ["1"]


def test_a_result_that_comes_between_a_look_and_the_end_of_an_attempt_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(bench, lose_requests=1)
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    actions.stop(bench.stores, run_id)
    folder = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0])

    def late(folders: Any, attempt: Any, why: str, **words: Any) -> bool:
        if folder.mailbox.answered() is None:
            folder.mailbox.start(1, "a process that is gone")
            train()(folder)
        return give_up(folders, attempt, why, **words)

    monkeypatch.setattr("posttrain.control.attempts.give_up", late)
    bench.drive(run_id)
    assert [a.state for a in bench.ledger.attempts(run_id)] == ["succeeded"]


def test_a_kill_that_does_nothing_is_done_again_and_nothing_ends_before_the_job_does(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    bench.executor.hostility.deaf = 2
    actions.stop(bench.stores, run_id)
    bench.clock.sleep(1)
    ticks(bench, run_id, 1)
    bench.clock.sleep(31)
    assert ticks(bench, run_id, 2).state == "running"
    assert bench.drive(run_id).state == "stopped"
    assert len(bench.executor.cancelled) == 1


def test_silence_says_nothing_of_a_job(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    bench.executor.hostility.silent = 7
    stage = ticks(bench, run_id, 1)
    assert (stage.state, stage.reason) == ("running", "Troubled")
    attempt = bench.ledger.attempts(run_id)[0]
    train()(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    assert bench.drive(run_id).state == "succeeded"
    assert len(bench.ledger.attempts(run_id)) == 1


@pytest.mark.parametrize(
    ("cause", "reasons"),
    [
        (Cause.PREEMPTED, ["Preempted", "Succeeded"]),
        (Cause.NODE_LOST, ["Lost", "Succeeded"]),
        (Cause.OUT_OF_MEMORY, ["JobFailed:out_of_memory"]),
    ],
)
def test_why_a_job_is_gone_decides_what_follows(bench: Bench, cause: Cause, reasons: list[str]) -> None:
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit(**TRAIN_ONLY)
    ticks(bench, run_id)
    bench.executor.lose(bench.ledger.attempts(run_id)[0].name, cause)
    run = bench.drive(run_id)
    assert [a.reason for a in bench.ledger.attempts(run_id)] == reasons
    if cause is Cause.OUT_OF_MEMORY:
        assert "lower runtime.micro_batch_tokens" in run.next_action


def test_one_pass_asks_once_for_all_jobs_of_a_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {name: {"kind": "sft", "data": "train", "steps": steps} for steps, name in enumerate("ab", 1)}
    bench.scripts |= {"a": [None], "b": [None]}
    run_id = bench.submit(stages=stages, gates=[], release=None)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    observe, asked = bench.executor.observe, list[int]()
    monkeypatch.setattr(bench.executor, "observe", lambda jobs: (asked.append(len(jobs)), observe(jobs))[1])
    bench.reconciler.tick(run_id)
    assert asked == [2]


def test_audit_1_a_job_that_edits_its_order_changes_nothing_that_the_ledger_ordered(bench: Bench) -> None:
    """What is published is what the ledger ordered: the order file is the job's, and nobody reads it back."""
    tries = 2

    def edits(folder: AttemptFolder) -> int:
        order = json.loads((folder.path / "job.json").read_text())
        found.append(order)
        bad = {"name": "another-sft-9", "kind": "evaluate", "seed": 99, "params": {}, "inputs": {}, "epoch": 9}
        bad |= {"resume": "sha256:" + "ab" * 32, "resumed_from": "another/sft", "resumed_step": 9}
        bad |= {"token_allowance": 10**9}
        (folder.path / "job.json").write_text(json.dumps({**order, **bad}))
        return -9 if len(found) < tries else train()(folder) or 0

    found: list[dict[str, Any]] = []
    honest = bench.submit(**TRAIN_ONLY)
    assert bench.drive(honest).state == "succeeded"
    bench.scripts["sft"] = [edits, edits]
    run_id = bench.submit(**TRAIN_ONLY, seed=18)
    before = bench.stage(honest, "sft")
    assert bench.drive(run_id).state == "succeeded"
    after = bench.stage(run_id, "sft")
    assert (after.kind, after.inputs) == (before.kind, before.inputs)
    assert after.outputs["model"] == bench.stage(honest, "sft").outputs["model"]
    first, second = found
    ordered = ("kind", "seed", "params", "inputs", "resume", "resumed_from", "resumed_step", "token_allowance")
    assert [first[name] for name in ordered] == [second[name] for name in ordered], "the next attempt reads no order"
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert [one.stage for one in bench.ledger.attempts(run_id)] == ["sft", "sft"]
    assert verify_rows(bench.ledger)
