"""What could go wrong between two processes, two looks or two people, and must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, evaluate, fail, train

from posttrain.control import actions
from posttrain.control.decide import PREEMPTIONS_PER_ATTEMPT
from posttrain.control.lineage import release_lineage
from posttrain.control.verdicts import explain_run
from posttrain.control.verification import verify
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import ConflictError, FailureClass, InfrastructureError, NotFoundError, QuarantinedError
from posttrain.domain.jobs import JobResult, Output, Submission
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder
from posttrain.store.sealer import seal
from posttrain.store.trees import put_tree


def promote_rival(bench: Bench, words: str = "rival") -> str:
    """Another model goes live behind everybody's back."""
    (bench.root / words).mkdir(exist_ok=True)
    (bench.root / words / "model.safetensors").write_text(words)
    digest = put_tree(bench.stores.blobs, bench.root / words)
    live = bench.ledger.channel("prod")
    with bench.ledger.transaction("rival") as transaction:
        transaction.append_release("prod", digest, None, "promote", expected=live.sequence if live else 0)
    return digest


def test_the_gate_judges_against_the_model_whose_baseline_was_measured(bench: Bench) -> None:
    bench.drive(bench.submit())

    def moving(folder: AttemptFolder) -> int | None:
        promote_rival(bench)
        return evaluate(199)(folder)

    bench.scripts |= {"sft": [train("better")], "evaluate": [moving]}
    run = bench.drive(bench.submit(seed=2))
    assert (run.state, run.reason) == ("rejected", "ChannelMoved"), "the channel moved after its baseline was bound"
    assert isinstance(bench.error(run.id), ConflictError)
    report = explain_run(bench.stores, run.id).report
    assert report is not None
    assert report.baseline == bench.stage(run.id, "baseline-evaluate").inputs["model"]["digest"]


def test_time_in_which_nobody_looked_is_not_billed(bench: Bench) -> None:
    def job(folder: AttemptFolder) -> None:
        train()(folder)
        result = folder.read_result()
        assert result is not None
        (folder.path / "result.json").unlink()
        folder.write_result(replace(result, seconds=20.0))

    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"wall_clock": "10m"}, **TRAIN_ONLY)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    job(bench.jobs.folders.of(attempt))
    bench.clock.sleep(20)
    bench.executor.finish(attempt.name)
    bench.clock.sleep(3600)  # detached over lunch
    run = bench.drive(run_id)
    assert run.state == "succeeded"
    assert bench.ledger.attempts(run_id)[0].seconds == 20.0


def test_a_deadline_counts_from_the_launch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_before_launch(name: str) -> None:
        raise KeyboardInterrupt(name)

    run_id = bench.submit(budget={"wall_clock": "10m"}, **TRAIN_ONLY)
    bench.reconciler.tick(run_id)
    assert bench.ledger.attempts(run_id)[0].state == "planned"
    bench.clock.sleep(86400)  # the process that planned it died
    monkeypatch.setattr("posttrain.control.launch.crashpoint", die_before_launch)
    with pytest.raises(KeyboardInterrupt):
        bench.reconciler.tick(run_id)
    monkeypatch.undo()
    bench.clock.sleep(86400)  # and so did the one that wrote its order
    bench.reconciler.tick(run_id)
    assert bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).read_order().seconds_allowance == 600.0


def test_two_stages_share_a_budget(bench: Bench) -> None:
    bench.drive(bench.submit())  # now there is a baseline to measure beside the training
    bench.scripts |= {"sft": [train("other", tokens=600)], "baseline-evaluate": [evaluate(190)]}
    run = bench.drive(bench.submit(seed=2, budget={"tokens": 1000}))
    allowances = [bench.jobs.folders.of(a).read_order().token_allowance for a in bench.ledger.attempts(run.id)]
    assert sorted(allowances, reverse=True) == [500, 500, 390]


def test_two_stages_share_the_wall_clock(bench: Bench) -> None:
    bench.drive(bench.submit())
    bench.scripts |= {"sft": [None], "baseline-evaluate": [None]}
    run_id = bench.submit(seed=2, budget={"wall_clock": 600})
    for _ in range(4):
        bench.reconciler.tick(run_id)
    assert [bench.stage(run_id, name).state for name in ("sft", "baseline-evaluate")] == ["running", "running"]
    assert [one.reserved_seconds for one in bench.ledger.attempts(run_id)] == [300.0, 300.0]


def test_other_code_than_the_manifest_names_computes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = bench.submit()
    monkeypatch.setattr(NativeTrainer, "code_digest", lambda self: "sha256:" + "2" * 64)
    run = bench.drive(run_id)
    assert (run.state, run.reason) == ("failed", "CodeChanged")
    assert bench.launched == []


def test_other_code_is_not_answered_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of the engine computes the same file anew."""
    bench.drive(bench.submit(**TRAIN_ONLY))
    monkeypatch.setattr(NativeTrainer, "code_digest", lambda self: "sha256:" + "2" * 64)
    assert bench.drive(bench.submit(**TRAIN_ONLY)).state == "succeeded"
    assert bench.launched == ["sft", "sft"]


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_cached_file_that_is_gone_or_corrupt_is_computed_again(bench: Bench, damage: str) -> None:
    both = {"gates": [], "release": None}
    bench.drive(bench.submit(**both))
    [path] = [p for p in (bench.root / "blobs").rglob("*") if p.is_file() and p.read_bytes() == b"items"]
    path.unlink() if damage == "missing" else path.write_bytes(b"itemz")
    second = bench.drive(bench.submit(again=True, **both))
    assert (second.state, bench.launched) == ("succeeded", ["sft", "evaluate", "evaluate"])
    assert bench.stores.blobs.get(digest_bytes(b"items")) == b"items"


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_cached_result_whose_inner_blob_is_gone_or_corrupt_is_computed_again(bench: Bench, damage: str) -> None:
    bench.drive(bench.submit(**TRAIN_ONLY))
    for path in (bench.root / "blobs").rglob("*"):
        if path.is_file() and path.read_bytes() == b"weights":
            path.unlink() if damage == "missing" else path.write_bytes(b"weighty")
    second = bench.drive(bench.submit(again=True, **TRAIN_ONLY))
    assert (second.state, bench.launched) == ("succeeded", ["sft", "sft"])
    assert bench.stores.blobs.get(digest_bytes(b"weights")) == b"weights"


@pytest.mark.parametrize("path", ["outputs/absent", "/etc/hostname", "outputs/../job.json", "outputs/link"])
def test_an_output_that_is_missing_or_outside_its_folder_fails_the_stage(bench: Bench, path: str) -> None:
    def job(folder: AttemptFolder) -> int:
        folder.outputs.mkdir()
        (folder.outputs / "link").symlink_to("/etc/hostname")
        folder.write_result(JobResult("succeeded", {"model": Output(path, "file")}))
        return 0

    bench.scripts["sft"] = [job]
    run = bench.drive(bench.submit())
    assert (run.state, run.reason) == ("failed", "JobFailed:bug")
    assert "outputs/" in run.message


def test_a_damaged_result_ends_the_stage_instead_of_the_reconciler(bench: Bench) -> None:
    def job(folder: AttemptFolder) -> int:
        (folder.path / "result.json").write_text("{}")
        return 0

    bench.scripts["sft"] = [job]
    assert bench.drive(bench.submit()).reason == "JobFailed:bug"


def test_a_launch_that_fails_is_retried_with_back_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = ["no pty left", "no pty left"]
    submit_job = bench.executor.submit

    def refuse_twice(spec: JobSpec) -> Submission:
        if refusals and len(refusals) > 1:
            raise InfrastructureError(refusals.pop())
        return submit_job(spec)

    monkeypatch.setattr(bench.executor, "submit", refuse_twice)
    run = bench.drive(bench.submit())
    assert run.state == "succeeded"
    assert [a.state for a in bench.ledger.attempts(run.id, "sft")] == ["lost", "succeeded"]


def test_preemption_is_bounded_too(bench: Bench) -> None:
    def preempted(folder: AttemptFolder) -> int:
        folder.write_result(JobResult("stopped"))
        return 0

    bench.scripts["sft"] = [preempted]
    run = bench.drive(bench.submit(budget={"attempts": 1}))
    assert run.reason == "AttemptsExhausted"
    assert len(bench.launched) == PREEMPTIONS_PER_ATTEMPT


def test_a_stop_that_arrives_before_the_pointer_moves_keeps_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = bench.submit()

    def stop_late(name: str) -> None:
        if name == "promote.before_commit":
            actions.stop(bench.stores, run_id)

    monkeypatch.setattr("posttrain.control.verdicts.crashpoint", stop_late)
    assert bench.drive(run_id).state == "stopped"
    assert bench.ledger.channel("prod") is None
    monkeypatch.undo()
    actions.retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"


def test_a_launch_of_a_dead_process_is_found_when_the_run_is_stopped(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    run_id = bench.submit()
    bench.reconciler.tick(run_id)
    bench.reconciler.tick(run_id)
    launched = bench.ledger.attempts(run_id)[0]
    with bench.ledger.database.write(across="a test") as connection:  # as if it had died before it could say so
        connection.exec_driver_sql("UPDATE attempts SET state = 'planned', launched_at = NULL")
    actions.stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    assert bench.executor.cancelled == [launched.name]


def test_rollback_can_be_repeated_safely(bench: Bench) -> None:
    first = bench.drive(bench.submit())
    promote_rival(bench)
    promote_rival(bench, "other")
    entry = actions.rollback(bench.stores, "prod", to=first.id)
    assert actions.rollback(bench.stores, "prod", to=first.id) == entry
    with pytest.raises(ConflictError, match="release 3 must be live, got 4"):
        actions.rollback(bench.stores, "prod", since=3)


def test_a_row_that_was_edited_behind_the_ledgers_back_does_not_verify(bench: Bench) -> None:
    bench.drive(bench.submit())
    seal(bench.ledger)
    tree = release_lineage(bench.stores, "prod")
    before = verify(bench.stores, lambda: tree).problems  # the bench's datasets are digests without bytes
    assert not any("release" in problem for problem in before)
    with bench.ledger.database.write(across="a test") as connection:
        connection.exec_driver_sql("UPDATE releases SET model_digest = report_digest")
    added = set(verify(bench.stores, lambda: tree).problems) - set(before)
    assert [problem for problem in added if "release" in problem]


def test_a_job_that_was_told_to_end_from_outside_is_preempted_however_late_it_is_noticed(bench: Bench) -> None:
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit(budget={"wall_clock": 30}, **TRAIN_ONLY)
    for _ in range(3):
        bench.reconciler.tick(run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    bench.jobs.folders.of(attempt).write_result(JobResult("stopped", seconds=5.0))
    bench.executor.finish(attempt.name)
    bench.clock.sleep(3600)
    run = bench.drive(run_id)
    assert run.state == "succeeded"
    assert [a.reason for a in bench.ledger.attempts(run_id)] == ["Preempted", "Succeeded"]


@pytest.mark.parametrize("asked", ["from outside", "by a person"])
def test_no_attempt_starts_while_the_job_before_it_is_on_its_way_out(bench: Bench, asked: str) -> None:
    def stopped(folder: AttemptFolder) -> None:
        folder.write_result(JobResult("stopped"))  # and goes on running: leaving Python takes its time

    def alone(folder: AttemptFolder) -> int:
        assert bench.executor.cancelled == [bench.executor.launched[0].name]
        return train()(folder)

    bench.scripts["sft"] = [stopped, alone]
    run_id = bench.submit(**TRAIN_ONLY)
    if asked == "by a person":
        for _ in range(3):
            bench.reconciler.tick(run_id)
        actions.stop(bench.stores, run_id)
        assert bench.drive(run_id).state == "stopped"
        actions.retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"
    assert len(bench.launched) == 2


def test_a_rollback_goes_where_it_is_told_or_nowhere(bench: Bench) -> None:
    first = bench.drive(bench.submit())
    live = bench.ledger.channel("prod")
    assert live is not None
    twos = promote_rival(bench, "twos")
    threes = promote_rival(bench, "threes")
    assert actions.rollback(bench.stores, "prod", to="2").model_digest == twos, "release 2"
    by_digest = threes.removeprefix("sha256:")[:12]
    with pytest.raises(QuarantinedError, match=f"--to {by_digest} --lift-quarantine REASON"):
        actions.rollback(bench.stores, "prod", to=by_digest)
    assert actions.rollback(bench.stores, "prod", to=by_digest, lift_quarantine="a slip").model_digest == threes
    assert actions.rollback(bench.stores, "prod", to=first.id[:4]).model_digest == live.model_digest
    for nowhere in ("7", "2222", "absent", "4444abcd"):
        with pytest.raises(NotFoundError, match=f"'{nowhere}' was never live there"):
            actions.rollback(bench.stores, "prod", to=nowhere)


def test_promotion_opens_no_channel_by_a_slip(bench: Bench) -> None:
    run = bench.drive(bench.submit())
    with pytest.raises(NotFoundError, match="channel 'prdo' is unknown"):
        actions.promote(bench.stores, run.id, "prdo")
    assert bench.ledger.channels() == ["prod"]


def test_lineage_shows_the_stage_that_made_the_release_even_if_it_changed_nothing(bench: Bench) -> None:
    two = {
        "sft": RUN["stages"]["sft"],
        "more": {"kind": "sft", "model": "sft", "data": "train", "steps": 4},
        "evaluate": {**RUN["stages"]["evaluate"], "model": "more"},
    }
    bench.scripts["more"] = [train()]  # the same bytes
    run = bench.drive(bench.submit(stages=two, release={"channel": "prod", "model": "more"}))
    model = release_lineage(bench.stores, "prod").children[0]
    assert model.name == f"{run.id}/more"
    assert [child.name for child in model.children if child.kind == "model"] == [f"{run.id}/sft"]


def test_two_equal_stages_of_one_run_are_computed_once(bench: Bench) -> None:
    stages = dict.fromkeys(("one", "two"), RUN["stages"]["sft"])
    bench.scripts |= {"one": [train()], "two": [train()]}
    run = bench.drive(bench.submit(stages=stages, gates=[], release=None))
    assert len(bench.launched) == 1
    assert bench.stage(run.id, "two").cached_from == f"{run.id}/one"


def test_after_a_retry_no_stage_tells_the_old_story(bench: Bench) -> None:
    bench.scripts["sft"] = [fail(FailureClass.BUG), train()]
    run = bench.drive(bench.submit())
    assert bench.stage(run.id, "evaluate").reason == "NotReached"
    actions.retry(bench.stores, bench.jobs.folders, run.id)
    assert {s.reason for s in bench.ledger.stages(run.id)} == {"Retried", "WaitingForInputs", "ChannelEmpty"}
    assert bench.drive(run.id).state == "succeeded"
