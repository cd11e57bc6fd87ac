"""A job that reports no progress is found, asked for a checkpoint, and killed; one that moves never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, Script, resolve, train

from posttrain.control import actions
from posttrain.control.decide import STALL_AFTER, stall_after
from posttrain.control.plan import plan_run
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobResult, Note, Progress, Span
from posttrain.domain.manifest import deciding
from posttrain.domain.records import AttemptRecord
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store import attempts
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.mailbox import ControlKind

HOUR, LOOK = 3600.0, 900.0


def stage(limit: object) -> dict[str, Any]:
    """The training stage alone, with a limit of its own."""
    return {**TRAIN_ONLY, "stages": {"sft": {**RUN["stages"]["sft"], "runtime": {"stall_after": limit}}}}


def begins(folder: AttemptFolder) -> None:
    """A job that comes to its third step, and runs on."""
    with EventWriter(folder) as sink:
        sink(Progress(3, 9, "sft", 30, 0.0))


class Watched:
    """A run of one training stage, looked at as a driver does."""

    def __init__(self, bench: Bench, begins: Script | None = begins, **changes: Any) -> None:
        bench.scripts["sft"] = [begins]
        self.bench, self.run = bench, bench.submit(**(TRAIN_ONLY | changes))
        for _ in range(6):
            bench.reconciler.step(self.run)

    @property
    def attempt(self) -> AttemptRecord:
        return self.bench.ledger.attempts(self.run)[-1]

    @property
    def folder(self) -> AttemptFolder:
        return self.bench.jobs.folders.of(self.attempt)

    @property
    def asked(self) -> int:
        """Checkpoints that the job was asked for."""
        return self.folder.checkpoints_requested()

    def says(self, step: int) -> None:
        with EventWriter(self.folder) as sink:
            sink(Progress(step, 9, "sft", 10 * step, 0.0))

    def passes(self, seconds: float) -> None:
        """Time, with a look every quarter of an hour."""
        for _ in range(round(seconds / LOOK)):
            self.bench.clock.sleep(LOOK)
            while self.bench.reconciler.step(self.run).changed:
                pass

    def killed(self) -> bool:
        return bool(self.bench.executor.cancelled)


@pytest.fixture
def hung(bench: Bench) -> Watched:
    return Watched(bench)


def test_a_silent_job_is_asked_and_then_killed_and_tried_again(hung: Watched) -> None:
    hung.passes(STALL_AFTER - LOOK)
    assert (hung.asked, hung.bench.stage(hung.run, "sft").reason) == (0, "Running")
    hung.passes(2 * LOOK)
    found = hung.bench.stage(hung.run, "sft")
    assert (hung.asked, found.reason, hung.attempt.reason) == (1, "Stalled", "Stalled")
    assert found.message == (
        "no progress for 2 h at step 3 of 9; asked to checkpoint; killed in 30 min unless it makes progress"
    )
    assert not hung.killed()
    hung.bench.scripts["sft"] = [train()]
    hung.passes(STALL_AFTER / 4 + LOOK)
    assert hung.bench.executor.cancelled == [f"{hung.run}-sft-1"]
    first, second = hung.bench.ledger.attempts(hung.run)
    assert (first.state, first.reason, second.state) == ("lost", "Stalled", "succeeded")
    assert first.message == (
        "no progress for 2 h (runtime.stall_after) at step 3 of 9: asked to checkpoint, then killed"
    )
    assert first.failure_signature == "no progress at step 3 of 9"


def test_a_job_that_hangs_at_the_same_place_again_is_not_tried_a_third_time(hung: Watched) -> None:
    hung.passes(4 * STALL_AFTER)
    assert hung.bench.ledger.run(hung.run).state == "failed"
    assert hung.bench.stage(hung.run, "sft").reason == "CircuitOpen"
    assert len(hung.bench.ledger.attempts(hung.run)) == 2


def test_a_slow_job_that_moves_is_left_alone(bench: Bench) -> None:
    slow = Watched(bench)
    for step in range(3):
        slow.passes(STALL_AFTER * 0.75)
        slow.says(step)
    assert (slow.asked, slow.killed(), slow.attempt.number) == (0, False, 1)


def test_within_a_long_step_the_end_of_a_phase_is_progress(hung: Watched) -> None:
    with EventWriter(hung.folder, phases=0.0) as sink:
        sink(Progress(1, 9, "grpo", 10, 0.0))
        for name in ("rollout", "reward", "update"):
            hung.passes(STALL_AFTER * 0.75)
            sink(Span(name, 1, 0.0, 1.0))
    assert (hung.asked, hung.killed()) == (0, False)


def test_notes_of_a_job_that_spins_are_no_progress(hung: Watched) -> None:
    with EventWriter(hung.folder, seconds=0) as sink:
        for _ in range(12):
            hung.passes(HOUR / 4)
            sink(Note("still here", 0.0))
    assert hung.killed()


def test_an_answer_to_the_request_keeps_the_job_and_a_late_one_too(hung: Watched) -> None:
    hung.passes(STALL_AFTER)
    assert (hung.asked, hung.attempt.reason) == (1, "Stalled")
    hung.passes(LOOK)
    hung.says(4)
    hung.passes(STALL_AFTER / 2)
    assert (hung.killed(), hung.attempt.reason) == (False, "Launched")
    assert hung.bench.stage(hung.run, "sft").reason == "Running"
    hung.passes(STALL_AFTER)
    assert [control.kind for control in hung.folder.mailbox.controls()] == [ControlKind.CHECKPOINT] * 2


def test_a_job_that_moves_after_it_was_asked_is_believed_at_the_next_look(hung: Watched) -> None:
    hung.passes(STALL_AFTER)
    hung.says(4)
    hung.bench.clock.sleep(60.0)
    hung.bench.reconciler.step(hung.run)
    found = hung.bench.stage(hung.run, "sft")
    assert (found.reason, found.message, hung.attempt.reason) == ("Running", "attempt 1", "Launched")
    hung.passes(STALL_AFTER - LOOK)
    assert (hung.asked, hung.killed()) == (1, False), "its silence is counted anew"


@pytest.mark.parametrize("step", [None, 5])
@pytest.mark.parametrize(("end", "reason"), [("stopped", "Preempted"), ("mute", "Lost")])
def test_only_a_job_that_was_killed_for_its_silence_is_booked_as_hung(
    hung: Watched, step: int | None, end: str, reason: str
) -> None:
    hung.passes(STALL_AFTER)
    first = hung.attempt
    assert first.reason == "Stalled"
    if step is not None:
        hung.says(step)
    if end == "stopped":  # by SIGTERM from outside
        hung.folder.write_result(JobResult("stopped", tokens=30))
    hung.bench.executor.finish(first.name, -9)
    hung.bench.clock.sleep(1.0)
    hung.bench.reconciler.step(hung.run)
    ended = hung.bench.ledger.attempts(hung.run)[0]
    assert (ended.reason, ended.failure_signature) == (reason, None)
    assert "no progress" not in ended.message


def test_a_job_that_answers_its_kill_with_a_checkpoint_was_hung_all_the_same(hung: Watched) -> None:
    kill, first = hung.bench.executor.kill, hung.attempt

    def heard(job: Any) -> None:
        hung.says(4)
        hung.bench.jobs.folders.of(first).write_result(JobResult("stopped", tokens=40))
        kill(job)

    hung.bench.executor.kill = heard  # type: ignore[method-assign]
    hung.bench.scripts["sft"] = [train()]
    hung.passes(1.5 * STALL_AFTER)
    ended = hung.bench.ledger.attempts(hung.run)[0]
    assert (ended.reason, ended.failure_signature) == ("Stalled", "no progress at step 3 of 9")


def test_a_job_with_little_patience_tells_its_phases_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(bench).folder.read_order().phase_seconds == 30.0
    short = Watched(bench, **stage("12s"), seed=2)
    within = short.folder.read_order().phase_seconds
    assert within == 3.0
    monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=bench.clock.now))
    with EventWriter(short.folder, phases=within) as sink:
        sink(Progress(3, 9, "grpo", 30, 0.0))
        for _ in range(30):
            bench.clock.sleep(2.0)
            sink(Span("rollout", 3, 0.0, 2.0))
            bench.reconciler.step(short.run)
    assert (short.asked, short.killed()) == (0, False)


def test_a_clock_that_jumps_and_hours_without_a_driver_prove_nothing(hung: Watched) -> None:
    for _ in range(9):
        hung.bench.clock.sleep(10 * STALL_AFTER)  # nobody looked, or the machine slept
        hung.passes(LOOK)
    assert hung.asked == 0
    hung.bench.clock.sleep(-20 * STALL_AFTER)
    hung.passes(LOOK)
    assert hung.asked == 0
    hung.says(4)
    hung.passes(STALL_AFTER * 0.75)
    assert (hung.asked, hung.killed()) == (0, False)


def test_the_next_driver_goes_on_where_the_last_one_died(hung: Watched) -> None:
    hung.passes(STALL_AFTER + LOOK)
    assert hung.asked == 1
    hung.bench.reconciler.release(hung.run)
    hung.bench.reconciler = Reconciler(hung.bench.stores, hung.bench.jobs, "another")
    hung.bench.scripts["sft"] = [train()]
    hung.passes(STALL_AFTER / 4 + LOOK)
    assert (hung.asked, hung.killed(), hung.bench.ledger.run(hung.run).state) == (0, True, "succeeded")
    first = hung.bench.jobs.folders.of(hung.bench.ledger.attempts(hung.run)[0])
    assert first.checkpoints_requested() == 1, "it is not asked anew"


def test_a_job_that_cannot_be_killed_yet_is_killed_again(hung: Watched) -> None:
    hung.bench.executor.hostility.deaf = 3
    hung.passes(2 * STALL_AFTER)
    assert hung.killed()


def test_time_in_a_queue_is_no_silence(hung: Watched) -> None:
    [job] = hung.bench.executor._jobs[f"{hung.run}-sft-1"]
    job.visible = hung.bench.clock.now() + 2 * STALL_AFTER
    hung.passes(2.5 * STALL_AFTER)
    assert (hung.asked, hung.killed()) == (0, False)


def test_a_person_who_stops_a_hung_run_waits_no_longer_than_otherwise(hung: Watched) -> None:
    hung.passes(STALL_AFTER + LOOK)
    actions.stop(hung.bench.stores, hung.run)
    hung.passes(4 * LOOK)
    assert hung.bench.ledger.run(hung.run).state == "stopped"


def test_what_is_written_of_a_run_is_gone_with_its_end(hung: Watched) -> None:
    hung.passes(STALL_AFTER / 2)
    with hung.bench.ledger.snapshot() as now:
        assert [watch.attempt for watch in now.watches(hung.run)] == [hung.attempt.name]
    actions.stop(hung.bench.stores, hung.run)
    hung.passes(4 * LOOK)
    with hung.bench.ledger.snapshot() as now:
        assert now.watches(hung.run) == []


def test_a_stage_says_it_for_itself_and_a_run_for_the_others() -> None:
    def manifest(**changes: Any) -> Any:
        raw = {**RUN, **changes}
        return plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, {"native": NativeTrainer()}).manifest

    plain, named = manifest(), manifest(runtime={"stall_after": "30m"})
    own = manifest(runtime={"stall_after": "30m"}, stages={**RUN["stages"], **stage("3h")["stages"]})
    assert [stall_after(one, "sft") for one in (plain, named, own)] == [STALL_AFTER, 1800.0, 3 * HOUR]
    assert stall_after(own, "evaluate") == 1800.0
    assert "runtime" not in plain.to_json()
    assert "stall_after" not in plain.stage("sft").params["runtime"]
    assert len({one.digest for one in (plain, named, own)}) == 3
    assert deciding(own.stage("sft").params) == deciding(plain.stage("sft").params), "it decides no result"


@pytest.mark.parametrize("limit", ["9s", 0, "1x", -1, "9999d"])
def test_a_limit_that_cannot_be_is_refused_in_one_line(bench: Bench, limit: object) -> None:
    for changes in (stage(limit), {**TRAIN_ONLY, "runtime": {"stall_after": limit}}):
        with pytest.raises(InputError, match="stall_after") as caught:
            bench.submit(**changes)
        assert "\n" not in str(caught.value)


def test_a_job_that_never_came_to_a_step_is_found_too(bench: Bench) -> None:
    loads = Watched(bench, begins=None)
    loads.passes(STALL_AFTER + 2 * LOOK)
    assert "at its start; asked" in bench.stage(loads.run, "sft").message
    loads.passes(STALL_AFTER / 2)
    assert loads.killed()


def test_audit_24_looks_more_than_two_planned_intervals_apart_prove_nothing(hung: Watched) -> None:
    def looks(count: int, apart: float) -> None:
        for _ in range(count):
            hung.bench.clock.sleep(apart)
            while hung.bench.reconciler.step(hung.run).changed:
                pass

    planned = STALL_AFTER / 4
    looks(12, 2 * planned + 1)
    assert (hung.asked, hung.killed()) == (0, False)
    looks(3, 2 * planned)
    assert hung.asked == 0, "each look counts one planned interval"
    looks(1, 2 * planned)
    assert hung.asked == 1
