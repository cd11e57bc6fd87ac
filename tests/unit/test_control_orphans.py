"""Jobs that no live attempt owns are ended; those of another workspace, or of a copy, never."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cli_world import make_world
from control_bench import TRAIN_ONLY, Bench, train

from posttrain.app.workspace import init_workspace, open_workspace
from posttrain.control.attempts import Orphans, end_orphans, find_orphans
from posttrain.control.reconciler import SWEEP_SECONDS, Reconciler
from posttrain.domain.errors import DeadlineError, InfrastructureError
from posttrain.domain.jobs import JobState
from posttrain.domain.jobspec import JobRef, JobSpec, Listed


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, {"sft": [None, train()]})
    made.jobs = replace(made.jobs, workspace=lambda: "here")
    made.reconciler._jobs = made.jobs
    return made


def launched(bench: Bench) -> JobSpec:
    """The job of a run that goes on."""
    run_id = bench.submit(**TRAIN_ONLY)
    count = len(bench.executor.launched)
    while len(bench.executor.launched) == count:
        bench.reconciler.tick(run_id)
    return bench.executor.launched[-1]


def alive(bench: Bench, job: JobRef) -> bool:
    return bench.executor.observe([job])[0].live


def found_in(bench: Bench) -> Orphans:
    return find_orphans(bench.stores.ledger, bench.jobs, bench.executor)


def ended_in(bench: Bench) -> list[str]:
    return end_orphans(bench.stores.ledger, bench.jobs, bench.executor)


def orphan(bench: Bench, asked: JobSpec, name: str, **labels: str) -> JobSpec:
    """A job beside the ones that the ledger knows."""
    request = replace(asked, name=name, labels={**asked.labels, **labels})
    bench.scripts["sft"] = [None]
    bench.executor.submit(request)
    return request


def test_the_jobs_of_live_attempts_are_nobodys_orphans(bench: Bench) -> None:
    assert found_in(bench) == Orphans()
    job = launched(bench)
    assert found_in(bench) == Orphans()
    assert ended_in(bench) == []
    assert alive(bench, job)


@pytest.mark.parametrize("known", [True, False], ids=["a run that goes on", "a run that a restored ledger lost"])
def test_a_job_of_this_workspace_that_no_live_attempt_owns_is_ended(bench: Bench, known: bool) -> None:
    mine = launched(bench)
    gone = orphan(bench, mine, "gone-sft-9", **({} if known else {"run": "gone"}))
    found = Listed(gone.name, gone.labels, 1)
    assert found_in(bench) == Orphans(ours=(found,))
    assert ended_in(bench) == ["job gone-sft-9 was ended: no attempt owns it"]
    assert not alive(bench, gone)
    assert alive(bench, mine)
    assert found_in(bench) == Orphans()


def test_a_job_that_outlived_its_attempt_is_ended(bench: Bench) -> None:
    job = launched(bench)
    folder = bench.jobs.folders.of(bench.ledger.attempts(job.labels["run"])[0])
    train()(folder)
    bench.executor.finish(job.name)
    assert bench.drive(job.labels["run"]).state == "succeeded"
    bench.executor.requeue(job.name)  # of its own accord
    assert ended_in(bench) == [f"job {job.name} was ended: no attempt owns it"]
    assert bench.executor.observe([job])[0].state is JobState.EXITED


@pytest.mark.parametrize("workspace", ["elsewhere", ""], ids=["another workspace", "a job of before labels"])
def test_a_job_of_somebody_else_is_told_and_left_alone(bench: Bench, workspace: str) -> None:
    other = orphan(bench, launched(bench), "other-sft-1", workspace=workspace)
    assert [job.name for job in found_in(bench).strangers] == ["other-sft-1"]
    assert ended_in(bench) == []
    assert alive(bench, other)


def test_a_workspace_that_does_not_know_itself_ends_nothing(bench: Bench) -> None:
    job = orphan(bench, launched(bench), "gone-sft-9", workspace="")
    bench.jobs = replace(bench.jobs, workspace=lambda: "")
    assert found_in(bench).ours == ()
    ended_in(bench)
    assert alive(bench, job)


def test_one_that_resists_stops_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = launched(bench)
    orphan(bench, mine, "a-sft-1")
    second = orphan(bench, mine, "b-sft-1")
    kill = bench.executor.kill

    def resists(job: JobRef) -> None:
        if job.name == "a-sft-1":
            raise DeadlineError("still runs after SIGKILL")
        kill(job)

    monkeypatch.setattr(bench.executor, "kill", resists)
    said = "job a-sft-1, which no attempt owns, could not be ended: still runs after SIGKILL"
    assert ended_in(bench) == [
        said,
        "job b-sft-1 was ended: no attempt owns it",
    ]
    assert not alive(bench, second)


@pytest.mark.slow
def test_doctor_tells_of_them_and_ends_them_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.ok("run", "run.yaml")
    job = world.executor.launched[-1]
    assert "no orphaned processes" in world.ok("doctor")
    world.executor.requeue(job.name)  # of its own accord
    told = world.ok("doctor")
    assert f"running, but no attempt owns them: {job.name}" in told
    assert "posttrain doctor --end-orphans" in told
    assert f"job {job.name} was ended: no attempt owns it" in world.ok("doctor", "--end-orphans")
    assert "no orphaned processes" in world.ok("doctor")


def test_a_copy_of_a_workspace_has_other_jobs(tmp_path: Path) -> None:
    with closing(init_workspace(tmp_path / "one")) as one:
        place = one.place()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with closing(open_workspace(tmp_path / "one")) as again, closing(open_workspace(tmp_path / "two")) as copy:
        assert again.place() == place
        assert copy.identity() == again.identity()
        assert copy.place() != place


def test_a_driver_sweeps_now_and_then_and_one_of_several_does(bench: Bench) -> None:
    mine = launched(bench)
    gone = orphan(bench, mine, "gone-sft-9")
    other = Reconciler(bench.stores, bench.jobs, "there")
    bench.reconciler.step(mine.labels["run"])
    assert alive(bench, gone), "not at once: whoever just began may know less than it will"
    bench.clock.sleep(SWEEP_SECONDS + 1)
    bench.reconciler.step(mine.labels["run"])
    assert not alive(bench, gone)
    assert alive(bench, mine)
    (event,) = [one for one in bench.ledger.pending_events() if one.kind == "orphans.ended"]
    assert event.payload["jobs"] == ["job gone-sft-9 was ended: no attempt owns it"]
    again = orphan(bench, mine, "gone-sft-10")
    other.step(mine.labels["run"])
    assert alive(bench, again), "another did so a moment ago"
    bench.clock.sleep(SWEEP_SECONDS + 1)
    other.step(mine.labels["run"])
    assert not alive(bench, again)


def test_an_executor_that_is_away_stops_no_drive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = launched(bench)

    def away(prefix: str) -> list[Listed]:
        raise InfrastructureError("the executor does not answer")

    monkeypatch.setattr(bench.executor, "list", away)
    bench.clock.sleep(SWEEP_SECONDS + 1)
    assert bench.reconciler.step(mine.labels["run"]).run.state == "running"
