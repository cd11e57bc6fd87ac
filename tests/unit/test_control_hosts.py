"""Two hosts share a ledger and a store: each has its own folder, executor and drivers, and a job belongs to one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import control_bench
import pytest
from control_bench import TRAIN_ONLY, Bench, evaluate, fail, train
from sqlalchemy import update

from posttrain.control.attempts import assume_dead
from posttrain.control.jobs import AttemptFolders
from posttrain.control.reconciler import LEASE_SECONDS, Reconciler
from posttrain.domain.errors import FailureClass, InputError, IntegrityError
from posttrain.domain.jobs import Capacity
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.journal import RUN
from posttrain.store.ledger import GONE_SECONDS, Hosts, Ledger, host_of, server_lives
from posttrain.store.schema import hosts, work
from posttrain.store.sealer import seal
from posttrain.store.work import WorkQueue, open_runs


@dataclass
class Two:
    """The bench as host `a`, and another one."""

    a: Bench
    b: Bench

    def silent(self, host: Bench, seconds: float = GONE_SECONDS + 1) -> None:
        """Nothing was heard of a host for so long."""
        with self.a.ledger.database.write(across="a test") as connection:
            mine = hosts.c.id == host.jobs.host
            connection.execute(update(hosts).where(mine).values(seen_at=hosts.c.seen_at - seconds))

    def forget_leases(self) -> None:
        """They ran out."""
        self.a.clock.sleep(LEASE_SECONDS + 1)

    def pass_over(self, run_id: str, host: Bench, passes: int = 8) -> None:
        for _ in range(passes):
            host.reconciler.step(run_id)
            host.clock.sleep(1.0)


def hosts_of(host: Bench) -> Hosts:
    """As a driver that begins sees them, which says at once that it is there."""
    assert host.jobs.hosts is not None
    return Hosts(host.ledger.database, host.clock, host.jobs.hosts.id, host.jobs.hosts.name)


@pytest.fixture
def two(bench: Bench, tmp_path: Path) -> Two:
    other = tmp_path / "b"
    other.mkdir()
    second = object.__new__(Bench)
    second.root, second.launched, second.clock = other, [], bench.clock
    second.scripts = {"sft": [train()], "evaluate": [evaluate(190)], "baseline-evaluate": [evaluate(190)]}
    second.ledger = Ledger(Database(control_bench.ledger_place(bench.root)), bench.clock)
    second.executor = FakeExecutor(second._on_launch, bench.clock.now)
    second.stores = replace(bench.stores, ledger=second.ledger)
    second.jobs = replace(bench.jobs, executor=second.executor, folders=AttemptFolders(other))
    for one, name in ((bench, "a"), (second, "b")):
        one.jobs = replace(one.jobs, hosts=Hosts(one.ledger.database, one.clock, name * 32, f"{name}:/posttrain"))
        one.reconciler = Reconciler(one.stores, one.jobs, f"{name}:1:0")
        one.jobs.hosts.announce(f"http://{name}", f"{name}:1:0")
    return Two(bench, second)


def test_a_job_is_looked_at_by_its_host_alone(two: Two) -> None:
    two.a.scripts["sft"] = [None]
    run_id = two.a.submit(**TRAIN_ONLY)
    two.pass_over(run_id, two.a)
    two.forget_leases()
    two.pass_over(run_id, two.b)
    assert (two.a.launched, two.b.launched) == (["sft"], [])
    assert host_of(two.a.ledger.database, "default", run_id) == "a" * 32
    assert open_runs(two.b.ledger.database, "b" * 32, "b:1:0") == {}
    assert [run_id] in open_runs(two.a.ledger.database, "a" * 32, "a:1:0").values()
    (attempt,) = two.b.ledger.attempts(run_id)
    assert (attempt.host, two.b.jobs.elsewhere(attempt), two.a.jobs.elsewhere(attempt)) == ("a" * 32, True, False)


def test_a_row_that_was_lost_knows_its_host_again(two: Two) -> None:
    two.a.scripts["sft"] = [None]
    run_id = two.a.submit(**TRAIN_ONLY)
    two.pass_over(run_id, two.a)
    with two.a.ledger.database.write(across="a test") as connection:
        connection.execute(update(work).values(affinity=None, lease_owner=None, lease_token=None, lease_until=None))
    two.pass_over(run_id, two.b)
    assert two.b.launched == []
    (row,) = WorkQueue(two.b.ledger, "b:1:0").rows("run")
    assert (row.affinity, row.lease_owner) == ("a" * 32, None)
    (attempt,) = two.a.ledger.attempts(run_id)
    two.a.executor.finish(attempt.name, train()(two.a.jobs.folders.of(attempt)) or 0)
    assert two.a.drive(run_id).state == "succeeded"


def test_what_nobody_has_begun_is_for_the_first_that_has_room(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeTrainer, "devices", lambda self, kind, params: 1)
    monkeypatch.setattr(two.a.executor, "capacity", lambda: Capacity(1, {"0": "another"}))
    monkeypatch.setattr(two.b.executor, "capacity", lambda: Capacity(1, {}))
    run_id = two.a.submit(**TRAIN_ONLY)
    two.pass_over(run_id, two.a)
    assert two.a.launched == []
    two.pass_over(run_id, two.b)
    assert two.b.launched == ["sft"], "nobody held it while it waited"
    assert two.b.drive(run_id).state == "succeeded"


def test_a_run_goes_on_elsewhere_once_its_host_is_gone_and_nothing_of_it_lives(two: Two) -> None:
    two.a.scripts["sft"] = [fail(FailureClass.INFRASTRUCTURE)]
    run_id = two.a.submit(**TRAIN_ONLY)
    for _ in range(6):
        two.a.reconciler.step(run_id)
    assert [one.state for one in two.a.ledger.attempts(run_id)] == ["failed"]
    two.forget_leases()
    hosts_of(two.b).beat()
    two.pass_over(run_id, two.b)
    assert two.b.launched == [], "its host was heard of"
    two.silent(two.a)
    hosts_of(two.b).beat()
    assert two.b.drive(run_id).state == "succeeded"
    assert (two.a.launched, two.b.launched) == (["sft"], ["sft"])


def test_a_job_on_a_host_that_is_gone_waits_for_a_persons_word(two: Two) -> None:
    two.a.scripts["sft"] = [None]
    run_id = two.a.submit()
    two.pass_over(run_id, two.a)
    two.forget_leases()
    with pytest.raises(InputError, match=r"its host a:/posttrain reported \d+ s ago; posttrain stop"):
        assume_dead(two.b.stores, two.b.jobs, run_id, "sft")
    two.silent(two.a)
    hosts_of(two.b).beat()
    assert WorkQueue(two.b.ledger, "b:1:0").rows("run")[0].affinity == "a" * 32, "let go on, though its job may live"
    two.pass_over(run_id, two.b)
    assert two.b.launched == [], "its job may live"
    assert WorkQueue(two.b.ledger, "b:1:0").rows("run")[0].affinity == "a" * 32
    word = assume_dead(two.b.stores, two.b.jobs, run_id, "sft")
    assert (word.reason, word.host) == ("AssumedDead", "b" * 32)
    assert two.b.drive(run_id).state == "succeeded"
    assert two.b.launched == ["sft", "evaluate"]
    first, second = two.b.ledger.attempts(run_id, "sft")
    assert (first.state, second.state, second.host) == ("lost", "succeeded", "b" * 32)
    train("late")(two.a.jobs.folders.of(first))  # what its job leaves there later counts nothing
    two.pass_over(run_id, two.a)
    assert two.a.launched == ["sft"]
    seal(two.b.ledger)
    verify_rows(two.b.ledger)


def test_a_host_says_where_it_is_and_how_long_it_was_silent(two: Two) -> None:
    two.silent(two.a, 7.0)
    one, other = hosts_of(two.b).all()
    assert (one.name, one.url, round(one.silent), one.gone) == ("a:/posttrain", "http://a", 7, False)
    assert (other.url, round(other.silent)) == ("http://b", 0)
    two.silent(two.a)
    assert hosts_of(two.b).all()[0].gone
    lives = [server_lives(two.b.ledger.database, two.b.clock, name) for name in ("a:1:0", "b:1:0", "b:2:0")]
    assert lives == [False, True, False], "one that is silent is gone, and so is one that another came after"
    hosts_of(two.a).beat()
    again = hosts_of(two.b).all()[0]
    assert (again.url, again.gone) == ("http://a", False), "a driver's word does not forget where its server is"


def test_a_host_that_cannot_read_a_manifest_leaves_the_run_to_the_host_that_has_its_job(
    two: Two,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two.a.scripts["sft"] = [None]
    run_id = two.a.submit(**TRAIN_ONLY)
    two.pass_over(run_id, two.a)
    two.forget_leases()
    with two.a.ledger.database.write(across="a test") as connection:  # the queue's row was lost, say
        connection.execute(update(work).values(affinity=None))

    def raises(self: Any, run: Any) -> Any:
        raise IntegrityError("another release wrote it")

    monkeypatch.setattr(type(two.b.stores), "manifest", raises)
    two.pass_over(run_id, two.b, 1)
    (row,) = two.a.reconciler.queue.rows(RUN)
    assert (row.affinity, row.failures) == (two.a.jobs.host, 0), row.error
