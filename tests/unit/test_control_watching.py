"""Many runs: one look at all jobs, slots of the whole host, one wake for what becomes free, no stop behind a hash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.watching import Idle, scripted
from control_bench import TRAIN_ONLY, Bench, train
from sqlalchemy import update

from posttrain.control import actions, wakeups
from posttrain.control.reconciler import LEASE_SECONDS, POLL_SECONDS, SLOT_SECONDS, Reconciler
from posttrain.control.wakeups import Beside, Turns
from posttrain.domain.errors import DeadlineError, InfrastructureError
from posttrain.domain.jobs import Capacity, Observation
from posttrain.domain.jobspec import JobRef
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store import attempts as store_attempts
from posttrain.store.journal import RUN
from posttrain.store.schema import work


def submitted(bench: Bench, runs: int) -> list[str]:
    return [bench.submit(seed=number, **TRAIN_ONLY) for number in range(runs)]


def passes(bench: Bench, ids: list[str], seconds: float) -> list[str]:
    """What a driver of many runs does; the runs that it looked at."""
    looked = []
    for _ in range(round(seconds * 10)):
        for run_id in bench.reconciler.worth(ids):
            looked.append(run_id)
            bench.reconciler.step(run_id)
        bench.clock.sleep(0.1)
    return looked


def states(bench: Bench, ids: list[str]) -> list[str]:
    return [bench.stage(run_id, "sft").state for run_id in ids]


def test_audit_8_all_jobs_are_looked_at_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.scripts["sft"], bench.reconciler = [None], Reconciler(bench.stores, replace(bench.jobs, slots=20), "here")
    ids = submitted(bench, 12)
    passes(bench, ids, 3)
    assert states(bench, ids) == ["running"] * 12
    observe, asked = bench.executor.observe, []

    def count(jobs: Sequence[JobRef]) -> list[Observation]:
        asked.append(len(jobs))
        return observe(jobs)

    monkeypatch.setattr(bench.executor, "observe", count)
    assert passes(bench, ids, 20) == [], "nothing moves"
    assert set(asked) == {12}


def test_audit_8_slots_count_for_the_whole_host_and_a_free_one_wakes_one_run(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    ids = submitted(bench, 6)
    passes(bench, ids, 3)
    assert states(bench, ids) == ["running"] * 2 + ["ready"] * 4, "slots are the host's, not each run's"
    assert {bench.stage(run_id, "sft").reason for run_id in ids[2:]} == {"WaitingForSlot"}
    train()(bench.jobs.folders.of(bench.ledger.attempts(ids[0])[0]))
    bench.executor.finish(bench.ledger.attempts(ids[0])[0].name)
    looked = passes(bench, ids, 20)
    assert states(bench, ids) == ["succeeded"] + ["running"] * 2 + ["ready"] * 3
    assert not set(looked) & set(ids[3:]), "the next in order, and no other"


def test_audit_8_a_slot_that_another_process_leaves_is_seen(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    ids = submitted(bench, 3)
    other = Reconciler(bench.stores, bench.jobs, "there")
    for _ in range(4):
        for run_id in ids[:2]:
            other.step(run_id)
    passes(bench, ids[2:], 3)
    assert states(bench, ids) == ["running", "running", "ready"]
    bench.executor.lose(bench.ledger.attempts(ids[0])[0].name)
    passes(bench, ids[2:], 30)  # nobody drives the others any more, and records no end
    assert states(bench, ids) == ["running", "running", "running"]


def test_audit_8_jobs_of_runs_that_nobody_drives_take_slots_of_a_run_that_is_new(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    ids = submitted(bench, 2)
    other = Reconciler(bench.stores, bench.jobs, "there")
    for _ in range(4):
        for run_id in ids:
            other.step(run_id)
    bench.clock.sleep(2 * LEASE_SECONDS)
    ids.append(bench.submit(seed=2, **TRAIN_ONLY))
    passes(bench, ids[2:], 3)
    assert states(bench, ids) == ["running", "running", "ready"]
    assert bench.stage(ids[2], "sft").reason == "WaitingForSlot"
    bench.executor.lose(bench.ledger.attempts(ids[0])[0].name)
    passes(bench, ids[2:], 30)
    assert states(bench, ids) == ["running", "running", "running"]


def test_audit_8_a_free_device_wakes_one_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeTrainer, "devices", lambda self, kind, params: 1)
    bench.scripts["sft"], bench.reconciler = [None], Reconciler(bench.stores, replace(bench.jobs, slots=20), "here")
    bench.executor.room = Capacity(1, {"0": "another"})
    ids = submitted(bench, 10)
    passes(bench, ids, 3)
    bench.executor.room = Capacity(1, {})
    looked: list[str] = []
    while not looked:
        looked = bench.reconciler.worth(ids)
        bench.clock.sleep(0.1)
    assert looked == ids[:1]
    bench.reconciler.step(ids[0])
    bench.executor.room = Capacity(1, {"0": "the first"})
    assert set(passes(bench, ids, 10 * POLL_SECONDS)) == set(ids[:1])
    assert states(bench, ids) == ["running"] + ["ready"] * 9


@pytest.mark.slow
def test_who_waits_is_served_by_priority_and_then_by_age(bench: Bench) -> None:
    """For a slot: whatever runs are called, and however many a place is free for."""
    bench.scripts["sft"] = [None]
    ids = submitted(bench, 6)
    by_name = sorted(ids[2:], reverse=True)
    passes(bench, ids, 3)
    with bench.ledger.database.write(across="a test") as connection:  # as if they had come in the other order
        for number, run_id in enumerate(by_name):
            connection.execute(update(work).where(work.c.object == run_id).values(id=1000 + number))
        connection.execute(update(work).where(work.c.object == by_name[3]).values(priority=1))
    for run_id in ids:  # each is looked at once more, and has its place in the queue
        bench.reconciler.queue.wake(RUN, [run_id])
    passes(bench, ids, 3)
    for first, wanted in ((ids[0], by_name[3]), (ids[1], by_name[0])):
        train()(bench.jobs.folders.of(bench.ledger.attempts(first)[0]))
        bench.executor.finish(bench.ledger.attempts(first)[0].name)
        before = {run_id for run_id in by_name if bench.stage(run_id, "sft").state == "running"}
        passes(bench, ids, 20)
        after = {run_id for run_id in by_name if bench.stage(run_id, "sft").state == "running"}
        assert after - before == {wanted}


def test_what_is_free_is_given_once_and_to_no_one_who_wants_more() -> None:
    turns = Turns()
    waiting = [("large", 3), ("first", 2), ("second", 1), ("third", 1)]
    assert turns.next(waiting, 2, set()) == {"first"}
    assert turns.next(waiting, 2, {"first"}) == set(), "nobody has looked yet, and it is theirs"
    assert turns.next(waiting, 2, set()) == {"second", "third"}, "they looked, and did not take it"
    assert turns.next(waiting, 2, set()) == set(), "nothing changed, and only who wants more was not asked"
    assert turns.next(waiting, 3, set()) == {"large"}
    assert turns.next(waiting[1:], 3, {"second"}) == {"first", "second"}, "which is all there is"


def test_a_slot_that_a_run_of_ones_own_leaves_is_given_at_once(bench: Bench) -> None:
    bench.scripts["sft"] = [None]
    ids = submitted(bench, 3)
    passes(bench, ids, 3)
    bench.reconciler._counted = bench.clock.now() + SLOT_SECONDS  # it was just looked for
    bench.executor.lose(bench.ledger.attempts(ids[0])[0].name)
    passes(bench, ids, 2)
    assert states(bench, ids) == ["ready", "running", "running"]


def test_audit_8_no_stop_waits_for_a_hash(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run's result is hashed without an end; another's job is told to stop, and killed."""
    hashing, go_on, put = threading.Event(), threading.Event(), store_attempts.put_tree
    decides, hashes = threading.get_ident(), set[int]()

    def slow(*words: Any) -> Any:
        hashing.set()
        hashes.add(threading.get_ident())
        assert decides in hashes or go_on.wait(60)
        return put(*words)

    monkeypatch.setattr(store_attempts, "put_tree", slow)
    first, second = submitted(bench, 2)
    bench.scripts["sft"] = [lambda folder: train()(folder) if first in str(folder.path) else None]
    driver = Reconciler(bench.stores, replace(bench.jobs, beside=2), "here")

    def until(condition: Callable[[], Any]) -> None:
        for _ in range(3000):
            for run_id in driver.worth([first, second]):
                driver.step(run_id)
            if condition():
                return
            bench.clock.sleep(0.5)
            driver.rest(0.01)
        raise AssertionError("never")

    until(hashing.is_set)
    assert decides not in hashes
    until(lambda: [one.state for one in bench.ledger.attempts(second)] == ["launched"])
    actions.stop(bench.stores, second)
    until(lambda: bench.executor.cancelled)
    assert bench.ledger.attempts(second)[0].stop_cause == "person"
    assert bench.stage(first, "sft").state == "running", "it is hashed still"
    go_on.set()
    until(lambda: [bench.ledger.run(one).state for one in (first, second)] == ["succeeded", "stopped"])


@pytest.mark.slow
def test_audit_8_many_idle_runs_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of `benchmarks/watching.py`, of fewer runs; so few are looked at more often."""
    monkeypatch.setattr("posttrain.control.wakeups._PACE", 10.0)
    found: Idle = scripted(tmp_path, running=40, waiting=200, seconds=30)
    assert found.observes_per_interval <= 2
    assert found.statements_per_second <= 2
    assert found.looks == 0


def test_work_that_ends_during_the_look_for_it_is_found_by_the_next_look() -> None:
    ends, ended = threading.Event(), threading.Event()

    class Late(Beside):
        def over(self, run_id: str) -> set[str]:
            found = super().over(run_id)
            ends.set()  # the work ends between the look and what the look leads to
            assert ended.wait(300.0)
            return found

    beside = Late(1)
    beside.begin("r", "before", lambda: None)
    while not beside.collect("r", "before"):
        pass
    beside.begin("r", "late", lambda: ends.wait() and None)
    beside._under["r", "late"].add_done_callback(lambda _: ended.set())
    assert not beside.is_over("r")
    assert beside.is_over("r")


class Observed:
    """An executor whose answer is this; the thread of an observation that never ends is the test's."""

    name, remote = "far", True

    def __init__(self, answer: Callable[[], list[Observation]]) -> None:
        self.observe = lambda jobs: answer()


def test_an_observation_that_panics_or_never_ends_is_followed_by_another_one(tmp_path: Path) -> None:
    go, begun = threading.Event(), list[str]()

    def answer() -> list[Observation]:
        begun.append("observation")
        if len(begun) == 1:
            raise SystemExit(1)  # as the panic of a library in Rust, no Exception
        go.wait()
        return []

    folders: Any = SimpleNamespace(job=lambda attempt: attempt)
    observer = wakeups._Observer(SimpleNamespace(folders=folders), Observed(answer))  # type: ignore[arg-type]
    job: Any = SimpleNamespace(attempt=None, answered=False)
    assert observer.turn([job], 1000.0) is None
    assert observer._work is not None
    observer._work.exception(300.0)
    with pytest.raises(InfrastructureError, match="SystemExit"):
        observer.turn([job], 1001.0)
    assert observer.turn([job], 2000.0) is None
    assert observer.turn([job], 2000.0 + wakeups._UNANSWERED - 1.0) is None
    with pytest.raises(DeadlineError, match="executor far: no answer within 600 s"):
        observer.turn([job], 2000.0 + wakeups._UNANSWERED)
    assert observer.turn([job], 2001.0 + wakeups._UNANSWERED) is None
    go.set()
    observer._work.exception(300.0)
    assert len(begun) == 3
