"""What attempts are billed and what a run goes on from: by the record, whatever became of the job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, train, vanish
from hypothesis import given, settings, strategies as st

from posttrain.control import budgets
from posttrain.control.launch import cache_key
from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.errors import BudgetExceededError, FailureClass
from posttrain.domain.jobs import CheckpointCommit, Failure, InputBlob, JobResult, JobState, Observation, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.manifest import Manifest, StageManifest, job_identity
from posttrain.domain.runspec import Budget
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder, EventWriter, SpendingMeter


def ticks(bench: Bench, run_id: str, count: int = 3) -> None:
    for _ in range(count):
        bench.reconciler.tick(run_id)


def test_a_lost_attempt_is_billed_the_time_it_ran_though_it_said_nothing(bench: Bench) -> None:
    bench.scripts["sft"] = [None, train()]
    run_id = bench.submit(budget={"wall_clock": 600}, **TRAIN_ONLY)
    ticks(bench, run_id)
    bench.clock.sleep(40)
    bench.executor.lose(bench.ledger.attempts(run_id)[0].name)
    bench.clock.sleep(3600)  # nobody looks
    assert bench.drive(run_id).state == "succeeded"
    first, second = bench.ledger.attempts(run_id)
    assert (first.state, first.seconds) == ("lost", 40.0)
    assert bench.jobs.folders.of(second).read_order().seconds_allowance == 560.0


def test_a_failed_and_retried_attempt_is_billed_its_tokens_and_the_seconds_that_were_measured(bench: Bench) -> None:
    def broken(folder: AttemptFolder) -> int:
        bench.clock.sleep(12.0)
        failure = Failure(FailureClass.INFRASTRUCTURE, "disk full", "disk")
        folder.write_result(JobResult("failed", tokens=70, seconds=1e300, failure=failure))
        return 0

    bench.scripts["sft"] = [broken, train(tokens=100)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY))
    assert [(a.tokens, a.seconds) for a in bench.ledger.attempts(run.id)] == [(70, 12.0), (100, 0.0)]
    assert bench.stage(run.id, "sft").tokens == 170


def test_a_step_that_was_cut_short_is_billed_what_it_may_have_cost(bench: Bench) -> None:
    def killed(folder: AttemptFolder) -> int:
        with SpendingMeter(folder) as meter, EventWriter(folder) as sink:
            sink(Progress(1, 3, "sft", 120, 0.0))
            meter(150, 0)
            meter(150, 80)
        return -9

    bench.scripts["sft"] = [killed, train(tokens=500)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY))
    assert [a.tokens for a in bench.ledger.attempts(run.id)] == [230, 500]
    assert [bench.jobs.folders.of(a).read_order().token_allowance for a in bench.ledger.attempts(run.id)] == [1000, 770]


def test_what_a_job_said_is_billed_though_its_summary_is_lost(bench: Bench) -> None:
    """Which need not survive a power cut."""

    def killed(folder: AttemptFolder) -> int:
        code = vanish(tokens=300)(folder)
        (folder.path / "summary.json").unlink()
        return code

    bench.scripts["sft"] = [killed, train(tokens=500)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY))
    assert [a.tokens for a in bench.ledger.attempts(run.id)] == [300, 500]


def warnings(bench: Bench) -> list[dict[str, Any]]:
    return [dict(one.payload) for one in bench.ledger.pending_events() if one.kind == "run.budget_warned"]


def test_that_most_of_a_budget_is_spent_is_told_once_in_a_run(bench: Bench) -> None:
    bench.scripts["sft"] = [vanish(tokens=500), vanish(tokens=290), vanish(tokens=50), train(tokens=100)]
    run = bench.drive(bench.submit(budget={"tokens": 1000, "attempts": 9}, **TRAIN_ONLY))
    assert [attempt.tokens for attempt in bench.ledger.attempts(run.id)] == [500, 290, 50, 100]
    (told,) = warnings(bench)
    assert told == {"share": 0.84, "tokens": 840, "of_tokens": 1000}


def test_a_job_that_passes_most_of_a_budget_by_its_end_is_told_with_its_bill(bench: Bench) -> None:
    bench.scripts["sft"] = [train(tokens=800)]
    run = bench.drive(bench.submit(budget={"tokens": 1000}, **TRAIN_ONLY))
    (told,) = warnings(bench)
    assert told["share"] == 0.8
    requests = {one.kind: one.request for one in bench.ledger.pending_events() if one.subject.startswith(run.id)}
    assert requests["run.budget_warned"] == requests["attempt.succeeded"]


@pytest.mark.parametrize("budget", [{"tokens": 1000}, {}])
def test_who_spends_less_or_has_no_budget_is_told_nothing(bench: Bench, budget: dict[str, Any]) -> None:
    bench.scripts["sft"] = [train(tokens=799)]
    bench.drive(bench.submit(budget=budget, **TRAIN_ONLY))
    assert warnings(bench) == []


def write_checkpoint(folder: AttemptFolder, step: int, tokens: int) -> None:
    """A committed checkpoint as a training job leaves one."""
    path = folder.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {"state.json": canonical_json({"step": step, "tokens": tokens}), "w.safetensors": b"%d" % step}
    for name, data in files.items():
        (path / name).write_bytes(data)
    commit = CheckpointCommit(step, {name: digest_bytes(data) for name, data in files.items()})
    (path / "COMMIT").write_bytes(canonical_json(commit.to_json()))


class Trainee:
    """A training job that keeps to its allowance as the real one does; it is killed in the middle of chosen steps."""

    def __init__(self, bench: Bench, deaths: list[int], steps: int, cost: int, worst: int, every: int = 2) -> None:
        self.bench, self.deaths, self.steps, self.cost, self.worst, self.every = (
            bench,
            deaths,
            steps,
            cost,
            worst,
            every,
        )
        self.spent = 0  # what was truly spent, by all attempts
        self.began: list[int] = []

    def __call__(self, folder: AttemptFolder) -> int:
        order = folder.read_order()
        step, tokens = self.resumed(order.resume)
        assert tokens == order.tokens_inherited
        self.began.append(step)
        dies = self.deaths.pop(0) if self.deaths else None
        with SpendingMeter(folder) as meter:
            while step < self.steps:
                meter(tokens, 0)
                if order.token_allowance is not None and tokens + self.worst > order.token_allowance:
                    write_checkpoint(folder, step, tokens) if not (
                        folder.checkpoints / f"step-{step:08d}"
                    ).exists() else None
                    failure = Failure(FailureClass.BUDGET, "token budget must cover the next step", "budget")
                    folder.write_result(JobResult("failed", tokens=tokens, failure=failure))
                    return 0
                meter(tokens, self.worst)
                self.spent += self.cost
                if dies is not None and step - self.began[-1] == dies:
                    return -9  # in the middle: nobody heard of this step
                step, tokens = step + 1, tokens + self.cost
                if step % self.every == 0:
                    write_checkpoint(folder, step, tokens)
            meter(tokens, 0)
        code = train(f"weights after {self.steps}", tokens)(folder)
        assert code is not None
        return code

    def resumed(self, digest: str | None) -> tuple[int, int]:
        if digest is None:
            return 0, 0
        listing = json.loads(self.bench.stores.blobs.get(digest))["files"]
        state = json.loads(self.bench.stores.blobs.get(listing["state.json"]["digest"]))
        return state["step"], state["tokens"]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    deaths=st.lists(st.integers(0, 5), max_size=12),
    budget=st.integers(1, 2000),
    cost=st.integers(1, 100),
    every=st.integers(1, 4),
)
def test_a_budget_is_never_overspent_whatever_is_killed(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int], budget: int, cost: int, every: int
) -> None:
    bench = Bench(tmp_path_factory.mktemp("billing"))
    job = Trainee(bench, list(deaths), steps=9, cost=cost, worst=100, every=every)
    bench.scripts["sft"] = [job]
    run = bench.drive(bench.submit(budget={"tokens": budget, "attempts": 20}, **TRAIN_ONLY))
    billed = bench.stage(run.id, "sft").tokens
    assert job.spent <= billed <= max(budget, 0)
    assert billed == sum(a.tokens for a in bench.ledger.attempts(run.id))
    if run.state != "succeeded":
        assert run.reason == "BudgetExceeded"
    bench.ledger.close()


def test_time_in_a_queue_is_not_billed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has the job for hours before it lets it run."""
    bench.scripts["sft"] = [None]
    run_id = bench.submit(budget={"wall_clock": 60}, **TRAIN_ONLY)
    waiting, observe = [True], bench.executor.observe
    since = [0.0]

    def queued(jobs: Sequence[JobSpec]) -> list[Observation]:
        if waiting:
            return [Observation(JobState.STARTING) for _ in jobs]
        return [replace(seen, seconds=(seen.seconds or 0.0) - since[0]) for seen in observe(jobs)]

    monkeypatch.setattr(bench.executor, "observe", queued)
    ticks(bench, run_id)
    since[0] = 7200.0
    bench.clock.sleep(7200)
    ticks(bench, run_id)
    attempt = bench.ledger.attempts(run_id)[0]
    assert (attempt.state, attempt.stop_requested_at) == ("launched", None), "hours in a queue end nothing"
    assert bench.jobs.folders.of(attempt).read_order().seconds_allowance == 60.0, "its own limit counts from its start"
    waiting.clear()
    bench.clock.sleep(20)
    train()(bench.jobs.folders.of(attempt))
    bench.executor.finish(attempt.name)
    run = bench.drive(run_id)
    billed = bench.ledger.attempts(run_id)[0].seconds
    assert (run.state, 20.0 <= billed <= 25.0) == ("succeeded", True), billed


# --- what decides the result decides the identity ---------------------------------------------------------------------


def test_a_raised_budget_goes_on_from_the_checkpoint_that_the_budget_stopped_at(bench: Bench) -> None:
    job = Trainee(bench, [], steps=9, cost=90, worst=100)
    bench.scripts["sft"] = [job]
    first = bench.drive(bench.submit(budget={"tokens": 500}, **TRAIN_ONLY))
    assert isinstance(bench.error(first.id), BudgetExceededError)
    assert job.spent == 450
    second = bench.drive(bench.submit(budget={"tokens": 700}, **TRAIN_ONLY))
    assert second.id != first.id
    assert (second.reason, job.began, job.spent) == ("BudgetExceeded", [0, 5], 630), "700 are for all of the work"
    third = bench.drive(bench.submit(budget={"tokens": 2000}, **TRAIN_ONLY))
    assert (third.state, job.began, job.spent) == ("succeeded", [0, 5, 7], 810)
    assert [bench.stage(run.id, "sft").tokens for run in (first, second, third)] == [450, 180, 180]
    message = next(
        e.payload for e in bench.ledger.pending_events() if e.subject == f"{third.id}/sft" and e.kind == "stage.running"
    )
    assert message["changes"]["message"] == f"attempt 1 resumes from the checkpoint at step 7 of {second.id}/sft"


def test_lost_work_of_a_run_that_took_over_is_still_within_its_budget(bench: Bench) -> None:
    job = Trainee(bench, [], steps=30, cost=100, worst=100)
    bench.scripts["sft"] = [job]
    bench.drive(bench.submit(budget={"tokens": 500}, **TRAIN_ONLY))
    job.deaths = [3, 3]
    run = bench.drive(bench.submit(budget={"tokens": 1500, "attempts": 9}, **TRAIN_ONLY))
    assert (run.reason, job.began) == ("BudgetExceeded", [0, 5, 8, 10])
    assert job.spent == 1500


def test_an_attempt_that_a_release_before_planned_has_what_is_left_of_all_the_work(bench: Bench) -> None:
    """It reserved nothing: its order holds the budget less what the checkpoint of another run had cost."""
    job = Trainee(bench, [], steps=9, cost=90, worst=100)
    bench.scripts["sft"] = [job]
    bench.drive(bench.submit(budget={"tokens": 500}, **TRAIN_ONLY))
    run_id = bench.submit(budget={"tokens": 700}, **TRAIN_ONLY)
    while not bench.ledger.attempts(run_id):
        bench.reconciler.tick(run_id)
    with bench.ledger.database.write(across="a test") as connection:
        connection.exec_driver_sql("UPDATE attempts SET reserved_tokens = NULL, reserved_seconds = NULL")
    bench.drive(run_id)
    order = bench.jobs.folders.of(bench.ledger.attempts(run_id)[0]).read_order()
    assert (order.tokens_inherited, order.token_allowance) == (450, 700)
    assert (job.began, job.spent) == ([0, 5], 630)


def test_inherited_tokens_are_counted_once(bench: Bench) -> None:
    """Killed twice, resumed twice: each attempt is billed its own steps, and the run the sum."""
    job = Trainee(bench, [3, 3], steps=9, cost=50, worst=50)
    bench.scripts["sft"] = [job]
    run = bench.drive(bench.submit(budget={"tokens": 5000}, **TRAIN_ONLY))
    attempts = bench.ledger.attempts(run.id)
    assert job.began == [0, 2, 4]
    assert [a.tokens for a in attempts] == [200, 200, 250]
    orders = [bench.jobs.folders.of(a).read_order() for a in attempts]
    assert [o.tokens_inherited for o in orders] == [0, 100, 200]
    assert [o.token_allowance for o in orders] == [5000, 4900, 4800]
    assert bench.stage(run.id, "sft").tokens == job.spent == 650


@pytest.mark.parametrize("damage", ["shard", "commit"])
def test_a_damaged_checkpoint_of_another_run_is_passed_over(bench: Bench, damage: str) -> None:
    job = Trainee(bench, [], steps=9, cost=90, worst=100)
    bench.scripts["sft"] = [job]
    first = bench.drive(bench.submit(budget={"tokens": 500}, **TRAIN_ONLY))
    folder = bench.jobs.folders.of(bench.ledger.attempts(first.id)[0])
    newest = folder.checkpoints / "step-00000005"
    (newest / ("COMMIT" if damage == "commit" else "w.safetensors")).write_bytes(b"{}")
    bench.drive(bench.submit(budget={"tokens": 5000}, **TRAIN_ONLY))
    assert job.began == [0, 4]


def test_other_work_does_not_take_a_checkpoint_over(bench: Bench) -> None:
    job = Trainee(bench, [], steps=9, cost=90, worst=100)
    bench.scripts["sft"] = [job]
    bench.drive(bench.submit(budget={"tokens": 500}, **TRAIN_ONLY))
    bench.drive(bench.submit(seed=2, budget={"tokens": 5000}, **TRAIN_ONLY))
    longer = {"sft": {**RUN["stages"]["sft"], "steps": 4}}
    bench.drive(bench.submit(stages=longer, budget={"tokens": 5000}, gates=[], release=None))
    assert job.began == [0, 0, 0]


GRPO: dict[str, Any] = {"data": "train", "reward": "length", "steps": 8}


def key(kind: str, params: dict[str, Any], **meta: Any) -> tuple[str, str]:
    """The cache key and the job's fingerprint of a stage written so."""
    contract = NativeTrainer().check(kind, params)
    inputs = {"model": InputBlob("sha256:" + "1" * 64, "tree"), "data": InputBlob("sha256:" + "2" * 64, "file")}
    reward = {"entry": "score", "dialect": "auto", "source": "reward.py", **meta}
    inputs["reward"] = InputBlob("sha256:" + "3" * 64, "file", "reward:r@1", reward)
    plan = StageManifest(name="s", kind=kind, trainer="native", inputs={}, params=dict(contract.params))
    manifest = Manifest(
        name="r", owner="a", seed=1, stages=(plan,), gates=(), budget=Budget(), release=None, code={"native": "c"}
    )
    return cache_key(manifest, plan, inputs), str(job_identity(kind, contract.params, 1, inputs))


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime": {"checkpoint_every": 7}},
        {"runtime": {"ray_address": "10.0.0.1:6379"}},
        {"placement": {"collocated": {"ranks": 2}}},
        {"placement": {"policy": {"gpus": 2}, "rollout": {"gpus": 1, "kind": "h100"}}},
    ],
)
def test_where_and_how_often_decide_nothing(changes: dict[str, Any]) -> None:
    assert key("grpo", GRPO | changes) == key("grpo", GRPO)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 9},
        {"max_new_tokens": 65},
        {"temperature": 0.9},
        {"group_size": 4},
        {"clip_low": 0.1},
        {"kl": {"coefficient": 0.1}},
        {"kl": {"coefficient": 0.1, "estimator": "k2"}},
        {"optimizer": {"learning_rate": 1e-4}},
        {"optimizer": {"weight_decay": 0.1}},
        {"optimizer": {"max_grad_norm": 0.5}},
        {"runtime": {"dtype": "float32"}},
        {"runtime": {"device": "cpu"}},
        {"runtime": {"threads": 2}},
        {"runtime": {"micro_batch_tokens": 64}},
        {"reward_timeout": 30.0},
    ],
)
def test_what_decides_the_result_decides_the_key(changes: dict[str, Any]) -> None:
    for one, other in zip(key("grpo", GRPO | changes), key("grpo", GRPO), strict=True):
        assert one != other


@pytest.mark.parametrize("meta", [{"dialect": "verl"}, {"entry": "other"}, {"files": ["words.txt"]}])
def test_how_a_reward_is_called_decides_the_key_and_what_its_file_is_called_does_not(meta: dict[str, Any]) -> None:
    for one, other in zip(key("grpo", GRPO, **meta), key("grpo", GRPO), strict=True):
        assert one != other
    assert key("grpo", GRPO, source="renamed.py") == key("grpo", GRPO)


def test_the_meter_survives_what_its_process_does_not(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "a")
    assert folder.metered() is None
    with SpendingMeter(folder) as meter:
        meter(10**15, 7)
        assert folder.metered() == 10**15 + 7, "at once, without a flush"
        meter(5, 0)
    assert folder.metered() == 5
    (folder.path / "meter").write_bytes(b"00000")
    assert folder.metered() is None, "cut short by a power cut"


def test_a_budget_of_seconds_hands_on_what_is_left(bench: Bench) -> None:
    spent = budgets.spending((), (), running=12.5, taken_over=30)
    assert (spent.tokens, spent.seconds) == (30, 12.5)
