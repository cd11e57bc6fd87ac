"""At most one job of an attempt computes, and none of an attempt that ended, whatever the executor says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from control_bench import TRAIN_ONLY, Bench, train, vanish

from posttrain.control import actions
from posttrain.control.attempts import assume_dead
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.jobs import ANOTHER_RUNS
from posttrain.domain.records import AttemptRecord, Event
from posttrain.execution.processes import identity
from posttrain.store.mailbox import ControlKind

GONE = "another boot:1"  # the identity of no process


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def begun_elsewhere(bench: Bench, process: str) -> tuple[str, AttemptRecord]:
    """A run whose launched job found that `process` has its attempt."""
    bench.scripts["sft"] = [lambda folder: folder.mailbox.start(1, process) and None, train()]  # type: ignore[func-returns-value]
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    bench.executor.finish(attempt.name, ANOTHER_RUNS)
    return run_id, attempt


def test_a_run_that_is_stopped_before_a_launch_leaves_a_tombstone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suspended(name: str) -> None:
        raise KeyboardInterrupt(name)

    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    monkeypatch.setattr("posttrain.control.launch.crashpoint", suspended)
    with pytest.raises(KeyboardInterrupt):  # its order is written, and it is about to launch
        bench.reconciler.tick(run_id)
    monkeypatch.undo()
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    channel = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).mailbox
    held = channel.start(1, "the job that was launched at last")
    assert held is not None
    assert held.cancelled == "the run was stopped before it was launched"


def test_a_job_that_began_meanwhile_is_not_stopped_unseen(bench: Bench) -> None:
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    folder = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0])
    folder.mailbox.start(1, identity(os.getpid()) or "")
    actions.stop(bench.stores, run_id)
    bench.reconciler.tick(run_id)
    assert bench.ledger.attempts(run_id)[0].state == "planned"
    (folder.path / "start.json").unlink()
    folder.mailbox.start(1, GONE)
    assert bench.drive(run_id).state == "stopped"


def test_nothing_begins_an_attempt_that_was_lost(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(), train()]
    run = bench.drive(bench.submit(**TRAIN_ONLY))
    assert run.state == "succeeded"
    for attempt in bench.ledger.attempts(run.id):
        held = bench.jobs.folders.of(attempt).mailbox.start(attempt.number, "late")
        assert held is not None
        assert (held.epoch, held.cancelled.startswith("it ended: ")) == (attempt.number, True)


def test_the_result_of_a_job_that_began_before_the_launched_one_counts(bench: Bench) -> None:
    run_id, attempt = begun_elsewhere(bench, identity(os.getpid()) or "")
    for _ in range(3):
        bench.reconciler.tick(run_id)
    (seen,) = bench.ledger.attempts(run_id)
    assert (seen.state, seen.reason) == ("launched", "AnotherRuns")
    assert f"process {os.getpid()} of " in (seen.message or "")
    train()(bench.jobs.folders.of(attempt))
    assert bench.drive(run_id).state == "succeeded"
    assert bench.launched == ["sft"]


def test_a_start_whose_process_is_gone_is_a_lost_attempt(bench: Bench) -> None:
    run_id, _ = begun_elsewhere(bench, GONE)
    assert bench.drive(run_id).state == "succeeded"
    assert [attempt.state for attempt in bench.ledger.attempts(run_id)] == ["lost", "succeeded"]


def test_a_run_is_not_stopped_while_another_job_of_its_attempt_computes(bench: Bench) -> None:
    run_id, attempt = begun_elsewhere(bench, identity(os.getpid()) or "")
    bench.reconciler.tick(run_id)
    actions.stop(bench.stores, run_id)
    folder = bench.jobs.folders.of(attempt)
    for _ in range(3):
        bench.reconciler.tick(run_id)
        bench.clock.sleep(60)
    assert bench.ledger.run(run_id).state == "stopping"
    assert folder.stop_requested()
    (folder.path / "start.json").unlink()
    folder.mailbox.start(1, GONE)
    assert bench.drive(run_id).state == "stopped"


@pytest.mark.parametrize("heeded", [False, True])
def test_who_stops_a_run_learns_that_its_job_did_not_heed_it(bench: Bench, heeded: bool) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    actions.stop(bench.stores, run_id)
    bench.reconciler.tick(run_id)
    if heeded:
        bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).acknowledge(ControlKind.STOP)
    assert bench.drive(run_id).state == "stopped"
    assert bench.stage(run_id, "sft").message == "stopped by a person" + (
        "" if heeded else "; the job ignored the stop and was killed, so steps since its last checkpoint are lost"
    )


def test_a_job_that_was_gone_before_anybody_asked_did_not_fail_to_heed(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    bench.jobs.executor.kill(bench.jobs.folders.job(attempt))
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert bench.stage(run_id, "sft").message.startswith("stopped by a person; its job had already ended (")


@pytest.fixture
def elsewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose attempt was begun by a process of another host."""
    with monkeypatch.context() as there:
        there.setattr("posttrain.store.mailbox.socket.gethostname", lambda: "a-host-that-died")
        run_id, _ = begun_elsewhere(bench, GONE)
    for _ in range(20):
        bench.reconciler.tick(run_id)
        bench.clock.sleep(600.0)
    return run_id


def test_a_process_of_another_host_is_waited_for_and_a_person_is_told(bench: Bench, elsewhere: str) -> None:
    stage = bench.stage(elsewhere, "sft")
    assert (stage.state, stage.reason, len(bench.ledger.attempts(elsewhere))) == ("running", "AnotherRuns", 1)
    assert "of a-host-that-died began this attempt" in stage.message
    assert stage.next_action.endswith(f"posttrain dead {elsewhere}/sft --assume-dead")


def test_a_person_may_say_that_it_is_dead(bench: Bench, elsewhere: str) -> None:
    assert assume_dead(bench.stores, bench.jobs, elsewhere, "sft").reason == "AssumedDead"
    assert bench.drive(elsewhere).state == "succeeded"
    first, second = bench.ledger.attempts(elsewhere)
    assert (first.state, second.state) == ("lost", "succeeded")
    said = [event.payload.get("changes", {}) for event in bench.ledger.events(subject_prefix=elsewhere)]
    said += [event.payload.get("changes", {}) for event in _pending(bench, elsewhere)]
    assert any(changes.get("message") == "test reported its job as dead" for changes in said)


def test_a_stop_after_that_word_waits_for_nobody(bench: Bench, elsewhere: str) -> None:
    assume_dead(bench.stores, bench.jobs, elsewhere, "sft")
    actions.stop(bench.stores, elsewhere)
    assert bench.drive(elsewhere).state == "stopped"


def test_what_is_seen_is_not_assumed(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(**TRAIN_ONLY)
    for _ in range(4):
        bench.reconciler.tick(run_id)
    for stage, error in (("sft", InputError), ("none", NotFoundError)):
        with pytest.raises(error) as caught:
            assume_dead(bench.stores, bench.jobs, run_id, stage)
        assert "\n" not in str(caught.value)


def test_a_process_that_is_seen_to_live_is_not_assumed_dead(bench: Bench) -> None:
    run_id, _ = begun_elsewhere(bench, identity(os.getpid()) or "")
    for _ in range(3):
        bench.reconciler.tick(run_id)
    with pytest.raises(InputError, match="of this host is alive"):
        assume_dead(bench.stores, bench.jobs, run_id, "sft")


def _pending(bench: Bench, run_id: str) -> list[Event]:
    with bench.ledger.snapshot() as now:
        return now.pending_events(run_id)
