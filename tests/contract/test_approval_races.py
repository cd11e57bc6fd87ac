"""Approvals where writers do not wait for one another: on PostgreSQL, which locks rows and not the ledger."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import control_bench
import pytest
from control_bench import Bench
from ledger_workers import PATIENCE
from test_approvals import made_bench, submitted

from postgres_server import Server
from posttrain.control import actions
from posttrain.domain.approvals import APPROVED
from posttrain.domain.errors import StaleWriteError
from posttrain.domain.lifecycle import Reason
from posttrain.store.transaction import Transaction

pytestmark = pytest.mark.postgres
CHANGES: dict[str, dict[str, Any]] = {"freeze": {"frozen": "releases"}, "policy": {"policy": None}}
ENDS = {"freeze": Reason.CHANNEL_FROZEN, "policy": Reason.SUCCEEDED}


@pytest.fixture
def bench(tmp_path: Path, postgres_ledger: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(control_bench, "ledger_place", lambda root: postgres_ledger)
    return made_bench(tmp_path)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Does one thing beside the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def judged(bench: Bench) -> str:
    """A run whose gates passed, and whose release was not looked at yet."""
    run_id, reached = submitted(bench), []

    def not_yet(*words: object) -> None:
        reached.append(words)
        raise StaleWriteError("not yet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.control.stages.release_stage", not_yet)
        while not reached:
            assert bench.reconciler.tick(run_id) is not None
    return run_id


def settled(bench: Bench, run_id: str) -> str:
    """Look at a run until nothing changes any more; the reason of its release."""
    while (tick := bench.reconciler.tick(run_id)) is not None and tick.changed:
        pass
    return str(bench.stage(run_id, "release").reason)


def until_one_waits(postgres: Server) -> None:
    """Come back when a connection waits for a lock that another holds."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    for _ in range(int(PATIENCE * 20)):  # each asks the server anew
        if postgres.sql(waiting):
            return
    raise AssertionError("nobody waits for a lock")


def test_somebody_approves_while_the_stage_asks_for_the_first_time(
    bench: Bench, postgres: Server, aside: ThreadPoolExecutor
) -> None:
    run_id = judged(bench)
    request = actions.find_release(bench.stores, run_id, None)
    with bench.ledger.transaction("user:bob") as said:
        said.lock_channel("prod")
        said.ask_approval(request)
        driver = aside.submit(settled, bench, run_id)
        until_one_waits(postgres)
        said.say_approval(request, APPROVED)
    driver.result(PATIENCE)
    assert bench.drive(run_id).state == "succeeded"
    assert len(bench.ledger.history("prod")) == 1


@pytest.mark.parametrize("how", CHANGES)
def test_a_channel_that_changes_before_the_stage_waits_is_seen(
    bench: Bench, postgres: Server, aside: ThreadPoolExecutor, how: str
) -> None:
    run_id = judged(bench)
    with bench.ledger.transaction("user:root") as changing:
        changing.set_channel(bench.ledger.channel_record("prod"), "channel.changed", **CHANGES[how])
        driver = aside.submit(bench.reconciler.tick, run_id)
        until_one_waits(postgres)
    driver.result(PATIENCE)
    assert bench.drive(run_id).reason == ENDS[how]
    with bench.ledger.snapshot() as now:
        assert now.approval_requests() == [], "nobody is asked for what approvals would not let happen"


@pytest.mark.parametrize("how", CHANGES)
def test_a_channel_that_changes_while_the_stage_begins_to_wait_wakes_it(
    bench: Bench, postgres: Server, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever changes the channel comes second, and commits after the stage has taken its last look."""
    run_id, record = judged(bench), bench.ledger.channel_record("prod")
    changed, commits, changes = threading.Event(), threading.Event(), []
    update = Transaction.update_stage

    def change() -> None:
        with bench.ledger.transaction("user:root") as changing:
            changing.set_channel(record, "channel.changed", **CHANGES[how])
            changed.set()
            assert commits.wait(PATIENCE)

    def waits(self: Transaction, stage: Any, **columns: Any) -> Any:
        if columns.get("reason") == Reason.WAITING_FOR_APPROVAL and not changes:
            changes.append(aside.submit(change))
            until_one_waits(postgres)
        return update(self, stage, **columns)

    monkeypatch.setattr(Transaction, "update_stage", waits)
    while not changes:
        assert bench.reconciler.tick(run_id) is not None
    assert changed.wait(PATIENCE)
    assert settled(bench, run_id) == Reason.WAITING_FOR_APPROVAL
    bench.clock.time += 1000
    assert bench.reconciler.queue.due() == set()
    commits.set()
    changes[0].result(PATIENCE)
    assert bench.reconciler.queue.due() == {run_id}
    assert bench.drive(run_id).reason == ENDS[how]
