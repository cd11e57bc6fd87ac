"""Processes die at every marked place and at random moments; the same command again ends with the same weights.

The undisturbed run is in the workspace each test starts from, so a stage whose parameters a test leaves alone comes
from the stage cache, and a stage it wants to compute (and kill) gets a parameter that counts as deciding and yet
changes no weight here: a length that no row reaches, another time-out, another reward source with the same scores.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import random
import signal
import sys
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RUN, SHORT
from workbench import Reference, Workbench

from posttrain.domain.jobs import Metric
from posttrain.domain.ports import CRASHPOINTS
from posttrain.store.atomic import read_json

pytestmark = [pytest.mark.slow, pytest.mark.journey]
Point = tuple[str, int]  # a crashpoint, and which time it is reached in one process

# The reconciler dies at each in turn, in one run.
CONTROL: list[Point] = [
    ("submit.before_commit", 1),
    ("submit.after_commit", 1),
    ("attempt.after_intent", 1),
    ("attempt.after_launch", 1),
    ("attempt.after_handle", 1),
    ("collect.before_publish", 1),
    ("collect.after_publish", 1),
    ("collect.after_commit", 1),
    ("gate.before_commit", 1),
    ("gate.after_commit", 1),
    ("promote.before_commit", 1),
    ("promote.after_commit", 1),
    ("sealer.before_commit", 1),
]
# In one sft stage of 12 steps with a checkpoint every 4: first the job dies while nobody watches it (its reconciler is
# killed before), then a second point is met by a reconciler that has to cope by itself. Last: where the attempt after
# the first death resumes.
TRAINING: dict[str, tuple[Point, Point, int]] = {
    "half a shard": (("checkpoint.inside_shard", 2), ("supervisor.after_spawn", 1), 4),
    "no commit": (("checkpoint.before_commit", 2), ("supervisor.before_spawn", 1), 4),
    "committed": (("checkpoint.after_commit", 1), ("job.start", 1), 4),
    "no shard": (("checkpoint.before_shards", 2), ("outputs.before_result", 1), 4),
}
# The job has said its last word; its end must be neither missed nor repeated.
LAUNCHING: Point = ("supervisor.before_claim", 1)
ENDING: list[Point] = [("outputs.after_result", 1), ("supervisor.before_exit_record", 1)]
STEPS: Point = ("train.step", 8)
BEST: list[Point] = [("best.before_rename", 2), ("best.after_rename", 2)]  # in test_best.py
SEEDS = (2, 4)  # of random kills
HELD_AFTER = 4 + 3 * 16  # completions: the rehearsal's and those of three steps


def test_every_crashpoint_is_visited() -> None:
    pairs = [point for first, second, _ in TRAINING.values() for point in (first, second)]
    visited = [name for name, _ in (*CONTROL, *pairs, LAUNCHING, *ENDING, STEPS, *BEST)]
    # a tracker's are visited by tests/contract/test_tracker_kills.py, a background driver's by
    # tests/e2e/test_background.py, an erasure's by tests/unit/test_cli_erase.py, a hung job's by
    # tests/e2e/test_stalls.py, a garbage collection's by tests/unit/test_cli_gc.py, a backup's by
    # tests/unit/test_cli_backup.py, a delivery's by the tests of the event bus
    elsewhere = ("track.", "detach.", "driver.", "erase.", "stall.", "gc.", "backup.", "restore.", "sink.")
    assert sorted(visited) == sorted(name for name in CRASHPOINTS if not name.startswith(elsewhere))


def armed(bench: Workbench, point: Point) -> tuple[dict[str, str], Path]:
    """The environment in which the first process to reach `point` dies, and the file it leaves just before."""
    name, nth = point
    mark = bench.folder / f"died-at-{name}"
    return {"POSTTRAIN_CRASHPOINT": f"{name}@{nth}", "POSTTRAIN_CRASHPOINT_ONCE": str(mark)}, mark


def variant(bench: Workbench, *, sft_every: int = 5, grpo_every: int = 3, reward: str = SHORT, **top: Any) -> None:
    """Write a run.yaml that must give the reference's weights, with the stages that a test wants computed again."""
    raw = copy.deepcopy(RUN)
    for name, every, word, value in (
        ("sft", sft_every, "max_length", 95),
        ("grpo", grpo_every, "reward_timeout", 61.0),
    ):
        stage = raw["stages"][name]
        if every != stage["runtime"]["checkpoint_every"]:
            stage["runtime"]["checkpoint_every"] = every
            stage[word] = value  # or the stage cache would answer: the interval decides nothing
    bench.write("again.py", reward)
    raw["rewards"]["length"] = "again.py" if reward != SHORT else "reward:length"
    bench.write("run.yaml", raw | top)


def slow(seconds: float) -> str:
    """A reward with the usual scores that takes its time for each step of 16 completions."""
    return f"import time\n\n{SHORT}".replace("    return", f"    time.sleep({seconds} / 16)\n    return")


class Go:
    """A file for which a held reward waits; in the environment, since nothing else is in a reward's sight."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.path = Path(sys.prefix).resolve() / f"go-{uuid.uuid4().hex}"
        atexit.register(self.path.unlink, missing_ok=True)

    def touch(self) -> None:
        """Let it go on, now and ever after."""
        self.path.touch()

    def held(self) -> bool:
        """Whether a reward waits."""
        logs = self.bench.root.glob("runs/*/*/*/log.txt")
        return any("the reward waits" in log.read_text(errors="replace") for log in logs)


def held(bench: Workbench) -> tuple[str, Go]:
    """A reward with the usual scores that waits in the fourth step until it may go on."""
    go = Go(bench)
    source = f'''
import time
from pathlib import Path

scored = 0


def score(completion: str) -> float:
    """Guideline: the shorter the better."""
    global scored
    scored += 1
    if scored == {HELD_AFTER} + 1:
        print("the reward waits", flush=True)
    while scored > {HELD_AFTER} and not Path({str(go.path)!r}).exists():
        time.sleep(0.02)
    return -len(completion) / 24
'''
    return source, go


def finish(bench: Workbench, reference: Reference) -> str:
    """Run to the end and check everything; the run's id."""
    bench.run("run", "run.yaml")
    return checked(bench, reference)


def checked(bench: Workbench, reference: Reference) -> str:
    run_id = bench.run_id()
    assert run_id != reference.run_id
    bench.check(run_id)
    assert bench.outputs(run_id) == reference.outputs
    return run_id


def die_unwatched(bench: Workbench, point: Point) -> None:
    """Start the run, kill the reconciler as soon as a job is there, and wait for the job to die at `point`."""
    env, mark = armed(bench, point)
    process = bench.start("run", "run.yaml", env=env)
    bench.wait_job()
    process.kill()
    assert bench.finish(process).code == -signal.SIGKILL
    bench.wait(f"death at {point}", mark.exists)
    bench.wait_quiet()


def test_the_reconciler_dies_at_every_point(bench: Workbench, reference: Reference) -> None:
    variant(bench, sft_every=6, release={"channel": "staging", "model": "grpo"})
    for point in CONTROL:
        env, mark = armed(bench, point)
        died = bench.run("run", "run.yaml", env=env, code=-signal.SIGKILL)
        assert mark.exists(), died
        bench.live()
    run_id = finish(bench, reference)
    assert [(a.stage, a.number, a.state) for a in bench.attempts(run_id)] == [("sft", 1, "succeeded")]
    with bench.open() as workspace:
        assert len(workspace.ledger.runs()) == len({reference.run_id, run_id}) + 1  # the model's own run
        staging = workspace.ledger.history("staging")
    assert [(entry.model_digest, entry.action) for entry in staging] == [(reference.outputs["grpo"], "promote")]


def assert_told_that_it_ended(bench: Workbench, how: str) -> None:
    """Nobody drives the run: whoever asks is told that its job ended, and who would take that in."""
    run_id = bench.run_id()
    told = bench.run("get", run_id, "-o", "json").json
    stage = next(one for one in told["stages"] if one["state"] == "running")
    ended = f"the job of attempt 1 {how}, and no process drives the run to record this"
    assert (stage["message"], stage["standing"]) == (ended, "running")
    assert stage["next_action"] == told["next_action"] == f"posttrain attach {run_id} records it and continues the run"
    assert ended in bench.run("why", run_id).out.replace("\n", " ")


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_job_dies_around_its_checkpoints(name: str, bench: Workbench, reference: Reference) -> None:
    unwatched, watched, resumed = TRAINING[name]
    variant(bench, sft_every=4)
    die_unwatched(bench, unwatched)
    assert_told_that_it_ended(bench, "was ended by SIGKILL")
    checkpoint = bench.root / bench.attempts(bench.run_id())[0].folder / "checkpoints" / "step-00000008"
    if name == "half a shard":
        assert not (checkpoint / "COMMIT").exists()
        whole = checkpoint.with_name("step-00000004")
        shards = [path / "policy-model-00001-of-00001.safetensors" for path in (checkpoint, whole)]
        assert 0 < shards[0].stat().st_size < shards[1].stat().st_size
    env, mark = armed(bench, watched)
    bench.run("run", "run.yaml", env=env)
    assert mark.exists()
    run_id = checked(bench, reference)
    attempts = bench.attempts(run_id, "sft")
    assert [attempt.state for attempt in attempts] == ["lost", "lost", "succeeded"]
    assert attempts[0].resume is None
    assert None not in {attempt.resume for attempt in attempts[1:]}
    went_on = next(attempt for attempt in attempts[1:] if bench.steps(attempt))
    assert bench.resumed_at(went_on) == resumed
    assert bench.steps(went_on)[0] == resumed + 1


def test_audit_10_a_run_goes_on_after_supervisors_were_killed_while_they_launched(
    bench: Workbench, reference: Reference
) -> None:
    """Every supervisor dies before its claim, until two attempts are lost; the repeated command goes on."""
    variant(bench, sft_every=4)
    process = bench.start("run", "run.yaml", env={"POSTTRAIN_CRASHPOINT": LAUNCHING[0]})

    def lost() -> int:
        return sum(attempt.state == "lost" for attempt in bench.attempts(bench.run_id()))

    bench.wait("two lost launches", lambda: bench.run_id() != reference.run_id and lost() >= 2)
    process.kill()
    bench.finish(process)
    run_id = finish(bench, reference)
    *before, last = [attempt for attempt in bench.attempts(run_id) if attempt.stage == "sft"]
    assert {(one.state, one.stop_cause) for one in before} == {("lost", "infrastructure")}
    assert (last.state, last.stop_cause) == ("succeeded", None)


def test_audit_34_a_lost_tail_of_the_ledger_is_reported_with_its_run(empty: Workbench) -> None:
    """Everything is killed and the write-ahead log removed: the ledger is whole, and the run folder tells."""
    process = empty.start("run", "run.yaml")
    empty.wait_job()
    run_id = empty.run_id()
    process.kill()
    empty.finish(process)
    for left in empty.live():
        os.kill(left.pid, signal.SIGKILL)
    empty.wait_quiet()
    empty.wait("nobody has the ledger open", lambda: not _holders(empty.root / "ledger.db"))
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (empty.root / name).unlink(missing_ok=True)
    checks = {row["name"]: row for row in json.loads(empty.run("doctor", "-o", "json", code=10).out)}
    assert (checks["ledger"]["state"], checks["log heads"]["state"]) == ("ok", "fail")
    assert run_id in checks["log heads"]["finding"]
    told = empty.run("verify", code=8)
    assert run_id in told.out + told.err
    assert empty.run("doctor", "--accept-loss", "an exercise", code=None).code in (0, 10)
    empty.run("verify")


def _holders(path: Path) -> list[str]:
    """Processes that have a file open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(entry) == str(path.resolve()):
                found.append(entry.parts[2])
    return found


def test_a_job_dies_after_its_last_word(bench: Workbench, reference: Reference) -> None:
    variant(bench, sft_every=4, grpo_every=4)
    die_unwatched(bench, ENDING[0])
    assert_told_that_it_ended(bench, "was ended by SIGKILL")
    env, mark = armed(bench, ENDING[1])
    bench.run("run", "run.yaml", env=env)
    bench.wait("the supervisor's death", mark.exists)  # the run need not wait for it: the job's word is enough
    attempts = bench.attempts(checked(bench, reference))
    assert [(a.stage, a.number, a.state) for a in attempts] == [("grpo", 1, "succeeded"), ("sft", 1, "succeeded")]


def test_steps_are_lost_and_done_again(bench: Workbench, reference: Reference) -> None:
    variant(bench, grpo_every=4, reward=slow(0.3))
    env, mark = armed(bench, STEPS)
    bench.run("run", "run.yaml", env=env)
    assert mark.exists()
    run_id = checked(bench, reference)
    first, second = bench.attempts(run_id, "grpo")
    assert (first.state, first.resume, second.state, bench.resumed_at(second)) == ("lost", None, "succeeded", 4)
    assert second.resume is not None
    redone = set(bench.steps(first)) & set(bench.steps(second))
    assert redone >= {5}, "the facts must show that a step was done twice"
    assert (bench.steps(first)[-1], bench.steps(second)[-1]) == (max(redone), 8)
    rewards = [
        {
            fact.step: fact.values["reward/mean"]
            for fact in bench.facts(attempt)
            if isinstance(fact, Metric) and "reward/mean" in fact.values
        }
        for attempt in (first, second)
    ]
    assert all(rewards[0][step] == rewards[1][step] for step in redone)


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.deep) for seed in SEEDS[1:])])
def test_kills_at_random_moments(seed: int, bench: Workbench, reference: Reference) -> None:
    rng = random.Random(seed)
    reward, go = held(bench)
    variant(bench, grpo_every=2, reward=reward)  # each job is held in its fourth step: it cannot end before the kills
    victims = ["job", "supervisor", "command"]
    rng.shuffle(victims)
    process = bench.start("run", "run.yaml")
    trained = []  # lost attempts that had done steps
    for victim in victims:
        if process.poll() is not None:
            process = bench.start("run", "run.yaml")
        job = bench.wait_job()
        attempt = next(a for a in bench.attempts(bench.run_id()) if bench.root / a.folder == job.attempt)
        in_training = rng.random() < 0.7  # else while the job still imports its libraries
        if in_training:
            bench.wait("a step", partial(bench.steps, attempt))
        pause(bench, rng.uniform(0.0, 0.7))
        if victim == "command":
            process.kill()
            assert bench.finish(process).code == -signal.SIGKILL
            continue
        target = next(process for process in bench.live(victim) if process.attempt == job.attempt)
        os.kill(target.pid, signal.SIGKILL)
        bench.wait_end(job)
        trained += [attempt.number] if in_training else []
    go.touch()
    if process.poll() is None:
        assert bench.finish(process).code == 0
    attempts = bench.attempts(finish(bench, reference))
    assert [attempt.state for attempt in attempts] == ["lost", "lost", "succeeded"]
    assert trained, "choose seeds that kill a job while it trains"
    for number in trained:
        assert bench.steps(attempts[number - 1])
        assert attempts[-1].resume is not None or bench.steps(attempts[number - 1])[-1] <= 2
    assert bench.steps(attempts[-1])[-1] == 8


def pause(bench: Workbench, seconds: float) -> None:
    """Let time pass, watching: what happens at a random moment, at any of which all must be well."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        bench.live()
        time.sleep(0.02)


def test_ctrl_c_detaches(bench: Workbench, reference: Reference) -> None:
    reward, go = held(bench)
    variant(bench, reward=reward)
    process = bench.start("run", "run.yaml")
    job = bench.wait_job()
    process.send_signal(signal.SIGINT)
    ended = bench.finish(process)
    run_id = bench.run_id()
    assert (ended.code, ended.err) == (130, "")
    assert "detached; running jobs continue" in ended.out
    assert f"posttrain stop {run_id}" in ended.out
    assert job in bench.live("job")
    go.touch()
    bench.wait("the job's own end", (job.attempt / "exit.json").exists)
    assert read_json(job.attempt / "result.json")["status"] == "succeeded"
    again = bench.run("run", "run.yaml")
    assert f"attached to run {run_id}" in again.out
    assert [attempt.number for attempt in bench.attempts(checked(bench, reference))] == [1]


def test_stop_writes_a_checkpoint_and_the_same_command_goes_on(bench: Workbench, reference: Reference) -> None:
    reward, go = held(bench)
    variant(bench, grpo_every=100, reward=reward)
    driver = bench.start("run", "run.yaml")
    job = bench.wait_job()
    run_id = bench.run_id()
    bench.wait("the fourth step", go.held)
    stopper = bench.start("stop", run_id)
    bench.wait("the request", (job.attempt / "controls" / "000001.json").exists)
    go.touch()
    stopped, driven = bench.finish(stopper), bench.finish(driver)
    assert (stopped.code, driven.code) == (0, 11), (stopped, driven)
    assert f"retry {run_id}" in stopped.out
    assert "stopped by a person" in driven.error
    bench.check(run_id, "stopped")
    assert bench.attempts(run_id)[0].state == "stopped"
    bench.run("run", "run.yaml")
    first, second = bench.attempts(checked(bench, reference))
    assert second.resume is not None
    assert bench.resumed_at(second) == bench.steps(first)[-1]
    assert bench.steps(first)[-1] == 4
    assert bench.steps(second)[0] == bench.steps(first)[-1] + 1


def test_a_second_command_watches_and_takes_over(bench: Workbench, reference: Reference) -> None:
    def owner() -> int | None:
        with bench.open() as workspace:
            lease = workspace.ledger.run(bench.run_id()).lease_owner
        return int(lease.split(":")[1]) if lease else None

    reward, go = held(bench)
    variant(bench, reward=reward)
    first = bench.start("run", "run.yaml")
    job = bench.wait_job()
    second = bench.start("run", "run.yaml")
    assert second.stdout is not None
    assert "attached to run" in second.stdout.readline()
    assert second.stdout.readline()  # it draws
    for _ in range(10):
        assert owner() == first.pid
        pause(bench, 0.1)
    first.kill()
    assert bench.finish(first).code == -signal.SIGKILL
    bench.wait("the second to take over", lambda: owner() == second.pid)
    assert bench.live("job") == [job]
    go.touch()
    assert bench.finish(second).code == 0
    assert [attempt.number for attempt in bench.attempts(checked(bench, reference))] == [1]
