"""What an attempt is told, what it leaves and what it costs: over scripted jobs that leave checkpoints and progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, train, vanish

from driving import drive
from posttrain.control import actions
from posttrain.control.decide import BACKOFF_SECONDS
from posttrain.control.launch import trained_elsewhere
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import FailureClass, StaleWriteError
from posttrain.domain.jobs import CheckpointCommit, Failure, JobResult, JobState, Observation, Output, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import AttemptRecord
from posttrain.execution.processes import LEAVING_SECONDS
from posttrain.store import attempts as store_attempts
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.trees import file_digest, put_tree, tree_digest


def leave_checkpoint(folder: AttemptFolder, step: int, tokens: int) -> Path:
    """A committed checkpoint as the engine leaves it."""
    path = folder.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, "tokens": tokens}))
    (path / "policy.safetensors").write_bytes(b"weights of step %d" % step)
    shards = {name: file_digest(path / name) for name in ("state.json", "policy.safetensors")}
    (path / "COMMIT").write_text(json.dumps(CheckpointCommit(step, shards).to_json()))
    return path


def dies_after(checkpoints: dict[int, int], tokens: int) -> Callable[[AttemptFolder], int]:
    """A job that leaves checkpoints (step → tokens of its lineage), has spent `tokens`, and is killed."""

    def job(folder: AttemptFolder) -> int:
        for step, spent in checkpoints.items():
            leave_checkpoint(folder, step, spent)
        return vanish(tokens=tokens)(folder)

    return job


def under_way(bench: Bench, **changes: Any) -> tuple[str, AttemptFolder, str]:
    """A run whose training job was launched and goes on: its id, the job's folder and name."""
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit(**{**TRAIN_ONLY, **changes})
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    assert attempt.state == "launched"
    return run_id, bench.jobs.folders.of(attempt), attempt.name


def test_a_job_is_told_all_that_decides_its_result(bench: Bench) -> None:
    bench.drive(bench.submit(seed=23))
    first = bench.ledger.attempts(bench.ledger.runs()[0].id, "sft")[0]
    order = bench.jobs.folders.of(first).read_order()
    manifest = bench.stores.manifest(bench.ledger.runs()[0])
    assert (order.kind, order.seed, dict(order.params)) == ("sft", 23, dict(manifest.stage("sft").params))
    assert {slot: (blob.digest, blob.form, dict(blob.meta)) for slot, blob in order.inputs.items()} == {
        slot: (ref.digest, ref.form, dict(ref.meta)) for slot, ref in manifest.stage("sft").inputs.items()
    }
    assert (order.resume, order.tokens_inherited) == (None, 0)
    assert (order.token_allowance, order.seconds_allowance) == (None, None)
    assert (order.store_url, order.cache_dir) == (bench.stores.blobs.url, str(bench.root / "cache"))


def test_a_job_of_a_server_is_let_in_before_it_is_launched_and_told_of_no_store(bench: Bench) -> None:
    let_in: list[str] = []

    class Access:
        def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
            assert (folder / "job.json").exists()
            assert len(bench.launched) == len(let_in)
            let_in.append(attempt.name)

    bench.jobs = replace(bench.jobs, access=Access())
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    assert bench.drive(bench.submit()).state == "succeeded"
    attempts = bench.ledger.attempts(bench.ledger.runs()[0].id)
    assert sorted(let_in) == sorted(attempt.name for attempt in attempts)
    for attempt in attempts:
        order = bench.jobs.folders.of(attempt).read_order()
        assert (order.store_url, order.served) == ("", True)
        assert bench.stores.blobs.url not in json.dumps(order.to_json())


def test_each_attempt_resumes_from_the_newest_checkpoint_there_is(bench: Bench) -> None:
    bench.scripts["sft"] = [
        dies_after({1: 100, 2: 250}, tokens=300),
        dies_after({3: 350}, tokens=400),
        vanish(tokens=500),
        train(tokens=700),
    ]
    run = bench.drive(bench.submit(budget={"tokens": 2000}, **TRAIN_ONLY))
    assert run.state == "succeeded"
    attempts = bench.ledger.attempts(run.id)
    orders = [bench.jobs.folders.of(attempt).read_order() for attempt in attempts]
    second = tree_digest(bench.jobs.folders.of(attempts[0]).checkpoints / "step-00000002")
    third = tree_digest(bench.jobs.folders.of(attempts[1]).checkpoints / "step-00000003")
    assert [order.resume for order in orders] == [None, second, third, third]
    assert [order.resume for order in orders] == [attempt.resume for attempt in attempts]
    assert [order.tokens_inherited for order in orders] == [0, 250, 350, 350]


def test_audit_24_of_two_checkpoints_of_one_step_the_newest_attempts_is_resumed_from(bench: Bench) -> None:
    bench.scripts["sft"] = [dies_after({2: 250}, tokens=300), dies_after({2: 260}, tokens=400), train(tokens=700)]
    run = bench.drive(bench.submit(budget={"tokens": 2000}, **TRAIN_ONLY))
    first, second, third = bench.ledger.attempts(run.id)
    made = [tree_digest(bench.jobs.folders.of(one).checkpoints / "step-00000002") for one in (first, second)]
    assert made[0] != made[1]
    assert [second.resume, third.resume] == made


def test_a_checkpoint_that_is_dropped_while_it_is_published_is_passed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever overtook this process started the job again, which prunes."""

    def overtaken(blobs: BlobStore, folder: Path) -> str:
        if folder.name == "step-00000002":
            (folder / "policy.safetensors").unlink(missing_ok=True)
        return put_tree(blobs, folder)

    monkeypatch.setattr(store_attempts, "put_tree", overtaken)
    bench.scripts["sft"] = [dies_after({1: 100, 2: 250}, tokens=300), train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    first, second = bench.ledger.attempts(run.id)
    assert second.resume == tree_digest(bench.jobs.folders.of(first).checkpoints / "step-00000001")


def test_tokens_are_billed_once_however_often_they_are_inherited(bench: Bench) -> None:
    bench.scripts["sft"] = [dies_after({2: 250}, 300), dies_after({3: 350}, 400), train(tokens=700)]
    run = bench.drive(bench.submit(budget={"tokens": 2000}, **TRAIN_ONLY))
    attempts = bench.ledger.attempts(run.id)
    assert [attempt.tokens for attempt in attempts] == [300, 150, 350]
    assert bench.stage(run.id, "sft").tokens == 800
    allowances = [bench.jobs.folders.of(attempt).read_order().token_allowance for attempt in attempts]
    assert allowances == [2000, 2000 - 300 + 250, 2000 - 450 + 350], "what the lineage may have spent at its end"


def test_an_attempt_that_dies_before_its_first_word_has_spent_nothing(bench: Bench) -> None:
    bench.scripts["sft"] = [dies_after({2: 250}, 300), vanish(), train(tokens=700)]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert [attempt.tokens for attempt in bench.ledger.attempts(run.id)] == [300, 0, 450]


def test_what_lost_attempts_spent_adds_up(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(tokens=100), vanish(tokens=200), train(tokens=500)]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert bench.stage(run.id, "sft").tokens == 800


def test_a_result_that_comes_between_two_looks_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id, folder, name = under_way(bench)

    def observe(spec: JobSpec) -> Observation:
        if folder.read_result() is None:  # it ends after its result was looked for, and before it is looked at
            train("late")(folder)
        return Observation(JobState.EXITED, exit_code=0)

    monkeypatch.setattr(bench.executor, "observe", observe)
    bench.reconciler.tick(run_id)
    monkeypatch.undo()
    assert bench.drive(run_id).state == "succeeded"
    assert [(a.name, a.state) for a in bench.ledger.attempts(run_id)] == [(name, "succeeded")]


@pytest.mark.parametrize("why", ["budget", "person"])
def test_the_last_word_of_a_job_that_was_cancelled_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    run_id, folder, _ = under_way(bench, budget={"wall_clock": 60})
    kill = bench.executor.kill

    def last_word(spec: JobSpec) -> None:
        train("just in time", tokens=77)(folder)
        kill(spec)

    monkeypatch.setattr(bench.executor, "kill", last_word)
    if why == "budget":
        bench.clock.sleep(61)
    else:
        actions.stop(bench.stores, run_id)
    run = bench.drive(run_id)
    assert (run.state, bench.stage(run_id, "sft").tokens) == ("succeeded", 77)


@pytest.mark.parametrize(("why", "ended"), [("budget", "failed"), ("person", "stopped")])
def test_a_job_that_says_no_last_word_is_billed_what_it_had_said(bench: Bench, why: str, ended: str) -> None:
    run_id, folder, _ = under_way(bench, budget={"wall_clock": 60})
    with EventWriter(folder) as sink:
        sink(Progress(1, 3, "sft", 300, bench.clock.now() + 5))
    if why == "budget":
        bench.clock.sleep(61)
    else:
        actions.stop(bench.stores, run_id)
    run = bench.drive(run_id)
    assert (run.state, bench.stage(run_id, "sft").tokens) == (ended, 300)


def test_a_result_counts_once_its_job_is_gone(bench: Bench) -> None:
    """Until then it holds memory that the next stage needs."""
    run_id, folder, name = under_way(bench)
    train()(folder)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    assert bench.stage(run_id, "sft").state == "running"
    bench.executor.finish(name, -9)  # however it went
    bench.reconciler.tick(run_id)
    assert bench.stage(run_id, "sft").state == "succeeded"
    assert bench.executor.cancelled == []


def test_a_job_that_does_not_go_by_itself_is_ended(bench: Bench) -> None:
    def stays(folder: AttemptFolder) -> None:
        train()(folder)

    bench.scripts["sft"] = [stays]
    run_id = bench.submit()
    began = bench.clock.now()
    assert bench.drive(run_id).state == "succeeded"
    assert bench.executor.cancelled == [bench.executor.launched[0].name]
    assert 2 * LEAVING_SECONDS <= bench.clock.now() - began < 3 * LEAVING_SECONDS


def test_a_checkpoint_that_its_job_would_refuse_is_passed_over(bench: Bench) -> None:
    def dies(folder: AttemptFolder) -> int:
        leave_checkpoint(folder, 1, 100)
        (leave_checkpoint(folder, 2, 250) / "stray.safetensors").write_bytes(b"x")
        return -9

    bench.scripts["sft"] = [dies, train()]
    run_id = bench.submit(**TRAIN_ONLY)
    assert bench.drive(run_id).state == "succeeded"
    assert bench.jobs.folders.of(bench.ledger.attempts(run_id)[1]).read_order().resumed_step == 1


def test_an_attempt_that_goes_on_from_another_run_counts_what_it_took(bench: Bench) -> None:
    """The second as the first: what the checkpoint cost is of this run's budget, and who paid for it is said."""

    def spends(step: int, tokens: int) -> Callable[[AttemptFolder], int]:
        def job(folder: AttemptFolder) -> int:
            leave_checkpoint(folder, step, tokens)
            over = Failure(FailureClass.BUDGET, "spent", "budget")
            folder.write_result(JobResult("failed", tokens=tokens, failure=over))
            return 0

        return job

    bench.scripts["sft"] = [spends(1, 300), spends(2, 900), train(tokens=1000)]
    first = bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY)
    assert bench.drive(first).state == "failed"
    second = bench.submit(budget={"tokens": 1100}, **TRAIN_ONLY)
    assert bench.drive(second).state == "failed"
    actions.retry(bench.stores, bench.jobs.folders, first)
    bench.drive(first)
    attempts = bench.ledger.attempts(first, "sft")
    order = bench.jobs.folders.of(attempts[-1]).read_order()
    assert (order.resumed_from, order.tokens_inherited) == (f"{second}/sft", 900)
    assert order.token_allowance is not None
    assert order.token_allowance <= 1000
    assert trained_elsewhere(bench.stores, bench.jobs.folders, attempts) == f"steps 1-2 were trained in {second}/sft"


def test_the_order_of_a_job_that_runs_is_left_alone(bench: Bench) -> None:
    run_id, folder, _ = under_way(bench, budget={"wall_clock": "10m"})
    before = folder.read_order()
    with bench.ledger.database.write(
        across="a test"
    ) as connection:  # as if who launched it had died before it could say so
        connection.exec_driver_sql("UPDATE attempts SET state = 'planned', launched_at = NULL")
    bench.clock.sleep(100)
    Reconciler(bench.stores, replace(bench.jobs, trust_rewards=True), "here").tick(run_id)
    assert bench.ledger.attempts(run_id)[0].state == "launched"
    assert folder.read_order() == before


def test_an_order_that_no_job_has_read_says_what_holds_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wrote it died before the launch; meanwhile a person took back the trust in rewards."""

    def dies(spec: JobSpec) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.executor, "submit", dies)
    run_id = bench.submit(**TRAIN_ONLY)
    with pytest.raises(KeyboardInterrupt):
        drive(Reconciler(bench.stores, replace(bench.jobs, trust_rewards=True), "here"), run_id)
    monkeypatch.undo()
    attempt = bench.ledger.attempts(run_id)[0]
    assert (attempt.state, bench.jobs.folders.of(attempt).read_order().trust_rewards) == ("planned", True)
    assert bench.drive(run_id).state == "succeeded"
    assert not bench.jobs.folders.of(attempt).read_order().trust_rewards


def test_what_a_job_measured_is_kept(bench: Bench) -> None:
    run = bench.drive(bench.submit())
    assert bench.stage(run.id, "sft").metrics == {"loss": 0.5}
    again = bench.drive(bench.submit(again=True))
    assert bench.stage(again.id, "sft").metrics == {"loss": 0.5}, "of a reused result, too"


def test_a_result_that_failed_leaves_nothing_and_answers_for_nothing(bench: Bench) -> None:
    def half(folder: AttemptFolder) -> int:
        train("half a model")(folder)
        (folder.path / "result.json").unlink()
        failure = Failure(FailureClass.BUG, "it broke", "it broke")
        folder.write_result(JobResult("failed", {"model": Output("outputs/model", "tree")}, failure=failure))
        return 0

    bench.scripts["sft"] = [half, train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert (run.state, bench.stage(run.id, "sft").outputs) == ("failed", {})
    again = bench.drive(bench.submit(again=True, **TRAIN_ONLY))
    assert (again.state, bench.launched) == ("succeeded", ["sft", "sft"])


def test_back_off_is_waited_for_and_grows(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(), vanish(), vanish(), train()]
    run_id = bench.submit(budget={"attempts": 5}, **TRAIN_ONLY)
    bench.drive(run_id)
    attempts = bench.ledger.attempts(run_id)
    waits = [later.created_at - (earlier.finished_at or 0.0) for earlier, later in pairwise(attempts)]
    assert all(wait >= least for wait, least in zip(waits, BACKOFF_SECONDS, strict=False))


def test_kills_never_open_the_circuit_and_equal_exit_codes_do(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(-9), vanish(-9), vanish(3), vanish(-9), vanish(3), vanish(3)]
    run = bench.drive(bench.submit(budget={"attempts": 9}, **TRAIN_ONLY))
    assert run.reason == "CircuitOpen"
    assert len(bench.launched) == 6


def test_a_retry_forgives_the_attempts_of_its_own_stage_only(bench: Bench) -> None:
    stages = {"sft": RUN["stages"]["sft"], "more": {"kind": "sft", "model": "sft", "data": "train", "steps": 4}}
    bench.scripts |= {"sft": [vanish(), train()], "more": [vanish()]}
    run = bench.drive(bench.submit(stages=stages, gates=[], release=None, budget={"attempts": 2}))
    assert (run.state, bench.launched) == ("failed", ["sft", "sft", "more", "more"])
    actions.retry(bench.stores, bench.jobs.folders, run.id)
    assert bench.stage(run.id, "more").not_before is None, "a person does not wait for a back-off"
    run = bench.drive(run.id)
    assert (run.state, bench.launched[4:]) == ("failed", ["more", "more"]), "as many attempts as before, no more"


def test_a_damaged_event_segment_costs_the_bill_not_the_run(bench: Bench) -> None:
    def job(folder: AttemptFolder) -> int:
        folder.events.mkdir()
        (folder.events / "000001.jsonl").write_bytes(b'{"half a')
        return -9

    bench.scripts["sft"] = [job, train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert run.state == "succeeded"
    assert [attempt.tokens for attempt in bench.ledger.attempts(run.id)] == [0, 100]


def test_a_lost_race_is_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = bench.submit(**TRAIN_ONLY)
    lost = [StaleWriteError("stage sft changed since it was read")]

    def advance(*given: Any) -> Any:
        if lost:
            raise lost.pop()
        return real(*given)

    real = Reconciler._advance
    monkeypatch.setattr(Reconciler, "_advance", advance)
    assert bench.drive(run_id).state == "succeeded"


def test_a_person_who_stops_a_run_wins_races(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id, _, _ = under_way(bench)
    stale = bench.ledger.run(run_id)
    with bench.ledger.transaction("somebody") as transaction:
        transaction.update_run(stale, message="moved meanwhile")
    looks = [stale]
    read = bench.ledger.run
    monkeypatch.setattr(bench.ledger, "run", lambda run: looks.pop() if looks else read(run))
    assert actions.stop(bench.stores, run_id).desired == "stopped"


def test_the_first_start_of_a_stage_is_kept(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(), train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    first, second = bench.ledger.attempts(run.id)
    started = bench.stage(run.id, "sft").started_at
    assert started == first.created_at
    assert started < second.created_at


def test_the_moment_of_a_launch_is_told(bench: Bench) -> None:
    """What `posttrain status` counts a running job's time from; the intent may be older."""
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    planned = bench.ledger.attempts(run_id)[0]
    assert (planned.state, planned.launched_at) == ("planned", None)
    bench.clock.sleep(5)
    bench.reconciler.tick(run_id)
    launched = bench.ledger.attempts(run_id)[0]
    assert (launched.state, launched.launched_at) == ("launched", bench.clock.now())


def test_a_lease_is_renewed_before_it_runs_out(bench: Bench) -> None:
    run_id, _, _ = under_way(bench)
    for _ in range(10):
        bench.clock.sleep(5)
        bench.reconciler.tick(run_id)
        assert (bench.ledger.run(run_id).lease_expires or 0.0) > bench.clock.now() + 5


def test_a_job_that_was_told_to_end_for_the_budget_was_not_preempted(bench: Bench) -> None:
    run_id, folder, name = under_way(bench, budget={"wall_clock": 60})
    bench.clock.sleep(61)
    bench.reconciler.tick(run_id)
    assert folder.stop_requested()
    folder.write_result(JobResult("stopped", tokens=7))
    bench.executor.finish(name)
    bench.drive(run_id)
    assert [attempt.reason for attempt in bench.ledger.attempts(run_id)] == ["BudgetExceeded"]


def test_a_run_that_is_stopped_launches_nothing_that_was_only_planned(bench: Bench) -> None:
    bench.scripts["sft"] = [train()]
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    assert [attempt.state for attempt in bench.ledger.attempts(run_id)] == ["planned"]
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert bench.launched == []
