"""An error in one stage: told, tried again with back-off, and no other stage or driver ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, evaluate, train
from sqlalchemy import text

from driving import drive
from posttrain.control import actions, reconciler
from posttrain.control.wakeups import PATIENCE_SECONDS
from posttrain.domain.errors import ConflictError, InfrastructureError, IntegrityError, StaleWriteError
from posttrain.domain.jobs import JobResult, Observation, Output
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import AttemptState, StageState
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import ObjectBlobs
from posttrain.store.journal import RUN as RUN_WORK, STAGE
from posttrain.store.transaction import Transaction
from posttrain.store.work import WorkQueue

TWO: dict[str, Any] = {
    "stages": {
        "one": {"kind": "sft", "data": "train", "steps": 3},
        "two": {"kind": "sft", "data": "train", "steps": 4},
    },
    "gates": [],
    "release": None,
}


def faulty(times: int, error: Exception, real: Callable[..., Any], hit: Callable[..., bool] = lambda *_: True) -> Any:
    """`real`, which raises the first `times` times that `hit` says so; counts the calls that raised."""

    def call(*arguments: Any, **named: Any) -> Any:
        if call.raised < times and hit(*arguments):  # type: ignore[attr-defined]
            call.raised += 1  # type: ignore[attr-defined]
            raise error
        return real(*arguments, **named)

    call.raised = 0  # type: ignore[attr-defined]
    return call


def away() -> InfrastructureError:
    return InfrastructureError("artifact store s3://b does not answer: 503 Service Unavailable; try again")


def test_a_store_that_answers_503_for_one_stage_ends_neither_the_other_nor_the_driver(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts |= {"one": [train("weights of one")], "two": [train("weights of two")]}
    put_file = bench.stores.blobs.put_file
    of_one = lambda path: Path(path).read_text() == "weights of one"  # noqa: E731
    flaky = faulty(3, away(), put_file, of_one)
    monkeypatch.setattr(bench.stores.blobs, "put_file", flaky)
    run_id = bench.submit(**TWO)
    told: list[str] = []
    started = bench.clock.now()

    def watch(_: object) -> None:
        one, two = bench.stage(run_id, "one"), bench.stage(run_id, "two")
        if one.reason == "Troubled" and one.message not in told:
            told.append(one.message)
            assert two.state in ("running", "succeeded", "pending")
        if len(told) == 2:
            assert two.state == "succeeded", "the other stage went on"

    run = drive(bench.reconciler, run_id, interval=0.1, timeout=3600, watch=watch)
    assert (run.state, flaky.raised) == ("succeeded", 3)
    assert [words.rpartition("checking again in ")[2] for words in told] == ["0.5 s", "2 s", "8 s"]
    assert all("503" in words for words in told)
    assert bench.clock.now() - started >= 10.5, "with back-off"
    assert [a.state for a in bench.ledger.attempts(run_id, "one")] == ["succeeded"], "its job ran once"
    assert bench.stage(run_id, "one").reason == "Succeeded"


@pytest.mark.parametrize("call", ["get", "check"])
def test_a_503_while_judging_and_releasing_is_tried_again(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.drive(bench.submit())
    bench.scripts["sft"] = [train("better")]
    run_id = bench.submit(seed=2)
    flaky = faulty(4, away(), getattr(bench.stores.blobs, call))
    monkeypatch.setattr(bench.stores.blobs, call, flaky)
    assert bench.drive(run_id).state == "succeeded"
    assert flaky.raised == 4
    live = bench.ledger.channel("prod")
    assert live is not None
    assert live.run_id == run_id


def test_a_stage_that_is_well_again_tells_no_trouble(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.scripts |= {"one": [None], "two": [None]}
    run_id = bench.submit(**TWO)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    monkeypatch.setattr(bench.executor, "observe", faulty(2, away(), bench.executor.observe))
    bench.reconciler.tick(run_id)
    assert bench.stage(run_id, "one").reason == "Troubled"
    bench.clock.sleep(1.0)
    bench.reconciler.tick(run_id)
    assert (bench.stage(run_id, "one").reason, bench.stage(run_id, "one").message) == ("Running", "attempt 1")


@pytest.mark.slow
def test_trouble_without_end_ends_the_driver_and_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = bench.submit()
    put_file = bench.stores.blobs.put_file
    monkeypatch.setattr(bench.stores.blobs, "put_file", faulty(10**9, away(), put_file))
    started = bench.clock.now()
    with pytest.raises(InfrastructureError, match=rf"503.*; fix the cause, then posttrain dead {run_id}/sft --retry"):
        drive(bench.reconciler, run_id, interval=60.0, timeout=10 * PATIENCE_SECONDS)
    assert PATIENCE_SECONDS <= bench.clock.now() - started < 1.1 * PATIENCE_SECONDS
    assert (bench.stage(run_id, "sft").state, bench.stage(run_id, "sft").reason) == ("running", "SetAside")
    monkeypatch.setattr(bench.stores.blobs, "put_file", put_file)
    with pytest.raises(InfrastructureError, match="set aside"):
        bench.drive(run_id)
    WorkQueue(bench.ledger, "a person").revive(STAGE, f"{run_id}/sft")
    assert bench.drive(run_id).state == "succeeded"
    assert [one for one in WorkQueue(bench.ledger, "a person").rows() if one.kind != "sweep"] == []
    assert bench.launched == ["sft", "evaluate"], "what the job left was collected"


def test_a_bug_is_told_with_its_traceback_and_not_hidden_for_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts |= {"one": [None], "two": [train()]}
    observe, run_id = bench.executor.observe, bench.submit(**TWO)
    broken = faulty(
        10**9, KeyError("wires"), observe, hit=lambda jobs: any(job.name.endswith("-one-1") for job in jobs)
    )
    monkeypatch.setattr(bench.executor, "observe", broken)
    with pytest.raises(InfrastructureError, match="unexpected KeyError: 'wires'; set aside after 5 tries"):
        bench.drive(run_id)
    (dead,) = WorkQueue(bench.ledger, "a person").rows(dead=True)
    assert (dead.object, dead.failures) == (f"{run_id}/one", 5)
    assert dead.traceback.rstrip().endswith("KeyError: 'wires'")
    assert bench.stage(run_id, "two").state == "succeeded"


def test_a_person_who_stops_or_lets_go_on_has_everything_looked_at_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts |= {"one": [None], "two": [train()]}
    observe, run_id = bench.executor.observe, bench.submit(**TWO)
    broken = faulty(
        10**9, KeyError("wires"), observe, hit=lambda jobs: any(job.name.endswith("-one-1") for job in jobs)
    )
    monkeypatch.setattr(bench.executor, "observe", broken)
    with pytest.raises(InfrastructureError, match="set aside"):
        bench.drive(run_id)
    monkeypatch.setattr(bench.executor, "observe", observe)
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert [one for one in WorkQueue(bench.ledger, "a person").rows() if one.kind != "sweep"] == []


@pytest.mark.slow
def test_a_run_whose_manifest_is_gone_is_set_aside_and_goes_on_when_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, real = bench.submit(), bench.stores.blobs.get
    monkeypatch.setattr(bench.stores.blobs, "get", faulty(10**9, away(), real))
    with pytest.raises(InfrastructureError, match="503"):
        drive(bench.reconciler, run_id, interval=20.0, timeout=10 * PATIENCE_SECONDS)
    with pytest.raises(InfrastructureError, match=f"set aside after .* tries: .*503.*posttrain dead {run_id} --retry"):
        bench.drive(run_id)
    (told,) = [one for one in bench.ledger.pending_events() if one.kind == "run.set_aside"]
    assert told.subject == run_id
    assert "503" in told.payload["error"]
    monkeypatch.setattr(bench.stores.blobs, "get", real)
    WorkQueue(bench.ledger, "a person").revive("run", run_id)
    assert bench.drive(run_id).state == "succeeded"


def test_a_manifest_that_cannot_be_fetched_at_once_is_asked_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bench.submit()
    monkeypatch.setattr(bench.stores.blobs, "get", faulty(3, away(), bench.stores.blobs.get))
    assert bench.drive(run_id).state == "succeeded"


@pytest.mark.parametrize("method", ["update_stage", "update_attempt", "update_run"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_lost_race_is_looked_at_again(bench: Bench, method: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write of the run loses to another process, nothing ends with it and nothing is done twice."""
    real, calls = getattr(Transaction, method), []

    def lose_once(self: Transaction, record: Any, **columns: Any) -> Any:
        calls.append(record)
        if len(calls) == nth:
            raise StaleWriteError("the row changed since it was read")
        return real(self, record, **columns)

    met: list[object] = []
    monkeypatch.setattr(reconciler, "record_failure", lambda *of, **_: met.append(of))
    monkeypatch.setattr(Transaction, method, lose_once)
    run = bench.drive(bench.submit())
    assert (run.state, bench.launched) == ("succeeded", ["sft", "evaluate"])
    assert len(bench.ledger.history("prod")) == 1
    assert met == [], "a race is no trouble, after which a run would wait longer and longer"


def test_a_race_that_wakes_nobody_is_looked_at_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost need not be a row of this run: another run's release to the same channel, a deadlock."""
    real, lost = Transaction.put_cache, []

    def lose_some(self: Transaction, *row: Any) -> Any:
        if len(lost) < 3:
            lost.append(row)
            raise ConflictError("cache entry sha256:1 cannot be added")
        return real(self, *row)

    monkeypatch.setattr(Transaction, "put_cache", lose_some)
    run = drive(bench.reconciler, bench.submit(), interval=0.1, timeout=120)
    assert (run.state, len(lost)) == ("succeeded", 3)


def test_a_driver_that_lost_its_lease_frees_nothing_of_its_successors(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, other = bench.submit(), WorkQueue(bench.ledger, "there")
    real = bench.stores.blobs.get

    def overtaken(*words: Any) -> Any:
        bench.clock.sleep(100.0)  # suspended beyond its lease
        assert other.claim([run_id], early=True)
        raise away()

    monkeypatch.setattr(bench.stores.blobs, "get", overtaken)
    tick = bench.reconciler.tick(run_id)
    assert tick is not None
    assert not tick.changed
    monkeypatch.setattr(bench.stores.blobs, "get", real)
    row = other.look("run", run_id)
    assert row is not None
    assert (row.lease_owner, row.failures) == ("there", 0)


def test_a_result_that_cannot_be_read_ends_nothing_before_its_job_is_gone(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(stages={"sft": RUN["stages"]["sft"]}, gates=[], release=None)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    (bench.jobs.folders.of(attempt).path / "result.json").write_text("{")
    job = bench.executor.launched[-1]
    while bench.stage(run_id, "sft").state == "running":
        assert bench.ledger.attempts(run_id)[0].state == "launched"
        bench.reconciler.tick(run_id)
    assert not bench.executor.observe([job])[0].live
    assert "cannot be collected" in bench.stage(run_id, "sft").message


def test_a_race_for_the_release_stages_row_is_not_taken_for_a_moved_channel(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = Transaction.update_stage, []

    def lose_once(self: Transaction, stage: Any, **columns: Any) -> Any:
        if stage.kind == "release" and columns.get("reason") == "Promoted" and not lost:
            lost.append(stage)
            raise StaleWriteError("the row changed since it was read")
        return real(self, stage, **columns)

    monkeypatch.setattr(Transaction, "update_stage", lose_once)
    run = bench.drive(bench.submit())
    assert (run.state, len(lost), len(bench.ledger.history("prod"))) == ("succeeded", 1, 1)


def test_a_driver_that_slept_past_its_lease_does_not_end_on_what_its_successor_did(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the rows and what it does about them, another process ends stage and attempt."""
    bench.scripts["sft"] = [None]
    run_id = bench.submit()
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    real, done = bench.executor.observe, []

    def overtaken(jobs: Any) -> Any:
        if not done:
            done.append(True)
            bench.executor.lose(attempt.name)
            with bench.ledger.transaction("successor") as transaction:
                transaction.update_attempt(attempt, state=AttemptState.LOST, reason="Lost")
                transaction.update_stage(bench.stage(run_id, "sft"), state=StageState.READY, reason="BackOff")
        return real(jobs)

    bench.scripts["sft"] = [train()]
    monkeypatch.setattr(bench.executor, "observe", overtaken)
    bench.reconciler.tick(run_id)
    assert done
    monkeypatch.undo()
    bench.reconciler.tick(run_id)
    assert len(bench.ledger.attempts(run_id, "sft")) == 2, "at once: it only came second, which is no trouble"
    assert bench.drive(run_id).state == "succeeded"


def test_a_result_that_appears_between_two_looks_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job writes its result and exits after the look for a result and before the look at the process."""
    bench.scripts["sft"] = [None]
    run_id = bench.submit()
    for _ in range(3):
        bench.reconciler.tick(run_id)
    real, finished = bench.executor.observe, []

    def observe(jobs: Sequence[JobSpec]) -> list[Observation]:
        for spec in jobs:
            if spec.name.endswith("sft-1") and not finished:
                finished.append(train()(AttemptFolder(spec.folder)))
                bench.executor.lose(spec.name)
        return real(jobs)

    monkeypatch.setattr(bench.executor, "observe", observe)
    assert bench.drive(run_id).state == "succeeded"
    assert [a.state for a in bench.ledger.attempts(run_id, "sft")] == ["succeeded"]


@pytest.mark.parametrize("ask", ["stop", "budget"])
def test_a_result_that_appears_while_the_job_is_cancelled_is_not_lost(
    bench: Bench, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"wall_clock": 60})
    for _ in range(3):
        bench.reconciler.tick(run_id)
    real = bench.executor.kill

    def kill(spec: JobSpec) -> None:
        folder = AttemptFolder(spec.folder)
        (folder.outputs / "model").mkdir(parents=True)
        (folder.outputs / "model" / "model.safetensors").write_text("weights")
        folder.write_result(JobResult("succeeded", {"model": Output("outputs/model", "tree")}, {}, 77))
        real(spec)

    monkeypatch.setattr(bench.executor, "kill", kill)
    if ask == "stop":
        actions.stop(bench.stores, run_id)
    else:
        bench.clock.sleep(100)
    run = bench.drive(run_id)
    stage = bench.stage(run_id, "sft")
    assert (stage.state, stage.tokens) == ("succeeded", 77), run
    assert stage.outputs["model"]["digest"]


# --- what a channel may point at --------------------------------------------------------------------------------------


def spoil(bench: Bench, words: bytes, how: str) -> None:
    """Weights in the store go missing or rot."""
    for path in (bench.root / "blobs").rglob("*"):
        if path.is_file() and path.read_bytes() == words:
            path.chmod(0o644)
            path.unlink() if how == "missing" else path.write_bytes(words + b"!")


@pytest.mark.parametrize("how", ["missing", "corrupt"])
@pytest.mark.parametrize("to", [None, "1"])
def test_a_rollback_to_broken_weights_is_refused_and_moves_nothing(bench: Bench, how: str, to: str | None) -> None:
    bench.drive(bench.submit())
    bench.scripts |= {"sft": [train("better")], "evaluate": [evaluate(199)]}
    bench.drive(bench.submit(seed=2))
    before = bench.ledger.history("prod")
    spoil(bench, b"weights", how)
    with pytest.raises(
        IntegrityError, match=r"channel prod stays at release 2: model sha256:.*cannot be released"
    ) as told:
        actions.rollback(bench.stores, "prod", to)
    assert "\n" not in str(told.value)
    assert bench.ledger.history("prod") == before


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_a_promotion_of_broken_weights_is_refused_and_moves_nothing(bench: Bench, how: str) -> None:
    run = bench.drive(bench.submit())
    before = bench.ledger.history("prod")
    spoil(bench, b"weights", how)
    with pytest.raises(IntegrityError, match="channel prod does not move"):
        actions.promote(bench.stores, run.id, "prod")
    assert bench.ledger.history("prod") == before


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_a_run_does_not_ship_weights_that_rotted_while_they_were_judged(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "posttrain.control.verdicts.crashpoint",
        lambda name: spoil(bench, b"weights", how) if name == "gate.after_commit" else None,
    )
    run = bench.drive(bench.submit())
    assert (run.state, run.reason) == ("failed", "Corrupt")
    assert isinstance(bench.error(run.id), IntegrityError)
    assert bench.ledger.channels() == []


def test_stage_names_may_begin_like_a_reserved_one(bench: Bench) -> None:
    stages = {"baseline": RUN["stages"]["sft"], "gates": RUN["stages"]["sft"], "bases": RUN["stages"]["sft"]}
    bench.scripts |= {name: [train()] for name in stages}
    assert bench.drive(bench.submit(stages=stages, gates=[], release=None)).state == "succeeded"


def test_rows_that_cannot_be_read_are_the_trouble_of_their_run(bench: Bench) -> None:
    bench.scripts["sft"] = [None, train()]
    broken, sound = bench.submit(**TRAIN_ONLY), bench.submit(again=True, seed=2, **TRAIN_ONLY)
    bench.reconciler.step(broken)
    with bench.ledger.database.write(across="a test") as connection:
        torn = text("UPDATE stages SET inputs = '{' WHERE run_id = :run")
        assert connection.execute(torn, {"run": broken}).rowcount
    bench.scripts["sft"] = [train()]
    for _ in range(60):
        bench.clock.sleep(1.0)
        bench.reconciler.step(broken)
        bench.reconciler.step(sound)
    assert bench.ledger.run(sound).state == "succeeded"
    (row,) = [one for one in WorkQueue(bench.ledger, "me").rows(RUN_WORK) if one.object == broken]
    assert row.failures >= 3


def test_one_statement_reads_what_two_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the queue and of the run, with a stage in trouble beside a run that was looked at in vain."""
    bench.scripts |= {"one": [train()], "two": [train()]}
    monkeypatch.setattr(bench.stores.blobs, "put_file", faulty(100, away(), bench.stores.blobs.put_file))
    run_id = bench.submit(**TWO)
    for _ in range(8):
        bench.clock.sleep(1.0)
        bench.reconciler.step(run_id)
    queue = WorkQueue(bench.ledger, "me")
    queue.failed(RUN_WORK, run_id, "no answer", "Traceback: " + "line " * 1000, 1.0)
    apart = queue.of_run(run_id)
    assert {run_id, f"{run_id}/one", f"{run_id}/two"} == set(apart)
    together, rows = queue.look_at(run_id)
    assert together == {name: replace(one, traceback="") for name, one in apart.items()}
    with bench.ledger.snapshot() as now:
        assert rows == now.rows_of(run_id)
    assert len(rows.attempts) == 2


def test_a_store_that_does_not_answer_when_a_job_is_launched_costs_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.scripts["sft"] = [train()]
    run_id = bench.submit(**TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    assert [one.state for one in bench.ledger.attempts(run_id)] == ["planned"]
    away, has = iter([True] * 3), ObjectBlobs.has

    def asked(self: ObjectBlobs, digest: str) -> bool:
        if next(away, False):
            raise InfrastructureError("the store does not answer (503)")
        return has(self, digest)

    monkeypatch.setattr(ObjectBlobs, "has", asked)
    assert bench.drive(run_id).state == "succeeded"
    assert [one.state for one in bench.ledger.attempts(run_id)] == ["succeeded"]
    assert not next(away, False), "it was asked again"
