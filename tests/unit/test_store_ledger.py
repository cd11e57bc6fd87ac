"""The ledger: state and events together or not at all, compare-and-set, leases, versions, release history."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import Connection, update

from posttrain.domain.errors import (
    ChannelClosedError,
    ConflictError,
    InfrastructureError,
    InputError,
    NotFoundError,
    PolicyError,
    QuarantinedError,
    StaleWriteError,
)
from posttrain.domain.records import Asset, AttemptRecord, Event, RunRecord, StageRecord
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database, LostAnswerError
from posttrain.store.journal import RUN, STAGE
from posttrain.store.ledger import Ledger
from posttrain.store.schema import work
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.work import WorkQueue, open_runs

MANIFEST = "sha256:" + "a" * 64
MODEL = "sha256:" + "b" * 64
OTHER = "sha256:" + "c" * 64


class HeldClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: HeldClock) -> Iterator[Ledger]:
    ledger = Ledger(Database(tmp_path / "ledger.db"), clock)
    yield ledger
    ledger.close()


def a_run(run_id: str = "run1", name: str = "sort", created_at: float = 1.0, repeat: int = 1) -> RunRecord:
    return RunRecord(run_id, name, MANIFEST, "pending", "ann", created_at, repeat=repeat)


def a_stage(name: str = "train", run_id: str = "run1", position: int = 0) -> StageRecord:
    return StageRecord(run_id, name, position, "grpo", "pending")


def an_asset(version: int = 0, digest: str = MODEL, **meta: Any) -> Asset:
    return Asset("dataset", "train", version, digest, "file", 1.0, "ann", meta)


def submit(ledger: Ledger, run: RunRecord | None = None) -> RunRecord:
    run = run or a_run()
    with ledger.transaction("ann") as transaction:
        transaction.insert_run(run, [a_stage(run_id=run.id)])
    return run


def kinds(ledger: Ledger, subject: str | None = None) -> list[str]:
    return [event.kind for event in told(ledger, subject)]


def told(ledger: Ledger, subject: str | None = None) -> list[Event]:
    """What was told since the ledger was made, but for who was named for the first time."""
    events = ledger.pending_events(subject)
    return [event for event in events if not event.kind.startswith(("ledger.", "principal."))]


def test_a_submitted_run_is_there_with_its_stages_and_events(ledger: Ledger) -> None:
    stages = [a_stage("evaluate", position=1), a_stage("train", position=0)]
    with ledger.transaction("ann") as transaction:
        transaction.insert_run(a_run(), stages)
    assert ledger.run("run1") == a_run()
    assert [stage.name for stage in ledger.stages("run1")] == ["train", "evaluate"]
    assert kinds(ledger) == ["run.pending", "stage.pending", "stage.pending"]
    assert {event.actor for event in told(ledger)} == {"ann"}
    assert len({event.request for event in told(ledger)}) == 1  # of the transaction


def test_a_second_run_of_the_same_id_is_a_conflict_and_leaves_nothing(ledger: Ledger) -> None:
    submit(ledger)
    for twin in (a_run(), a_run("run2")):  # of its id, or of its repetition of one manifest
        with pytest.raises(ConflictError, match=f"run {twin.id}"), ledger.transaction("bob") as transaction:
            transaction.insert_run(twin, [])
    assert kinds(ledger) == ["run.pending", "stage.pending"]


def test_a_block_that_raises_leaves_neither_rows_nor_events(ledger: Ledger) -> None:
    run = submit(ledger)

    def update_and_fail() -> None:
        with ledger.transaction("ann") as transaction:
            transaction.update_run(run, state="running")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        update_and_fail()
    assert ledger.run("run1").state == "pending"
    assert "run.running" not in kinds(ledger)


def test_an_update_is_one_generation_further_and_tells_what_changed(ledger: Ledger) -> None:
    run = submit(ledger)
    with ledger.transaction("reconciler") as transaction:
        after = transaction.update_run(run, state="running", reason="Started", event_payload={"by": "test"})
    assert ledger.run("run1") == after
    assert (after.state, after.generation, after.reason) == ("running", 1, "Started")
    event = ledger.pending_events()[-1]
    assert (event.kind, event.subject, event.actor, event.at) == ("run.running", "run1", "reconciler", 1000.0)
    assert event.payload == {
        "from": "pending",
        "to": "running",
        "generation": 1,
        "changes": {"reason": "Started"},
        "by": "test",
    }


def test_who_decided_on_an_old_row_must_read_again(ledger: Ledger) -> None:
    run = submit(ledger)
    with ledger.transaction("first") as transaction:
        transaction.update_run(run, message="mine")
    with pytest.raises(StaleWriteError, match="generation 0"), ledger.transaction("second") as transaction:
        transaction.update_run(run, state="running")
    assert (ledger.run("run1").message, ledger.run("run1").state) == ("mine", "pending")


def test_a_transition_that_is_not_drawn_is_refused(ledger: Ledger) -> None:
    run = submit(ledger)
    with pytest.raises(ConflictError, match="pending to succeeded"), ledger.transaction("ann") as transaction:
        transaction.update_run(run, state="succeeded")


@pytest.mark.parametrize("column", ["colour", "generation", "lease_owner", "id", "created_at"])
def test_only_columns_that_may_be_set_can_be_set(ledger: Ledger, column: str) -> None:
    run = submit(ledger)
    with pytest.raises(InputError, match=column), ledger.transaction("ann") as transaction:
        transaction.update_run(run, **cast(Any, {column: "x"}))


def test_what_does_not_change_is_not_written(ledger: Ledger) -> None:
    run = submit(ledger)
    before = len(told(ledger))
    with ledger.transaction("ann") as transaction:
        assert transaction.update_run(run, reason="", desired="running") == run
        transaction.update_run(run, message="tick")
    assert kinds(ledger)[before:] == ["run.updated"]
    assert ledger.run("run1").generation == 1


def test_stages_and_attempts_move_like_runs(ledger: Ledger) -> None:
    submit(ledger)
    stage = ledger.stages("run1")[0]
    attempt = AttemptRecord("run1", "train", 1, "run1-train-1", "runs/run1/train/001", "planned", created_at=1.0)
    with ledger.transaction("reconciler") as transaction:
        stage = transaction.update_stage(stage, state="ready", inputs={"model": {"digest": MODEL, "form": "tree"}})
        transaction.insert_attempt(attempt)
        stage = transaction.update_stage(stage, state="running", cache_key=OTHER)
        launched = transaction.update_attempt(attempt, state="launched", handle="123")
    assert ledger.stages("run1") == [stage]
    assert ledger.attempts("run1") == ledger.attempts("run1", "train") == [launched]
    assert ledger.attempts("run1", "evaluate") == []
    assert kinds(ledger, "run1/train/1") == ["attempt.planned", "attempt.launched"]
    with pytest.raises(StaleWriteError), ledger.transaction("other") as transaction:
        transaction.update_attempt(attempt, state="lost")
    with pytest.raises(ConflictError), ledger.transaction("other") as transaction:
        transaction.insert_attempt(dataclasses.replace(attempt, number=2))  # the external name is taken


def test_a_metric_that_is_not_a_number_is_kept_and_can_be_audited(ledger: Ledger) -> None:
    submit(ledger)
    with ledger.transaction("reconciler") as transaction:
        transaction.update_stage(ledger.stages("run1")[0], state="ready", metrics={"loss": math.nan}, tokens=2**60)
    assert math.isnan(ledger.stages("run1")[0].metrics["loss"])
    assert ledger.pending_events()[-1].payload["changes"] == {"metrics": {"loss": "nan"}, "tokens": str(2**60)}
    seal(ledger)
    assert verify_chain(ledger).pending == 0
    assert verify_rows(ledger) > 0


def test_a_lease_is_held_by_one_renewed_by_it_and_free_when_it_runs_out(ledger: Ledger, clock: HeldClock) -> None:
    submit(ledger)
    a, b = WorkQueue(ledger, "a", lease=10), WorkQueue(ledger, "b", lease=10)
    assert len(a.claim()) == 1
    run = ledger.run("run1")
    assert (run.lease_owner, run.lease_expires, run.generation) == ("a", 1010.0, 0)
    assert b.claim() == []
    clock.time = 1009.0
    a.renew()
    assert ledger.run("run1").lease_expires == 1019.0
    clock.time = 1019.0
    assert len(b.claim()) == 1
    a.release()  # not a's any more
    assert ledger.run("run1").lease_owner == "b"
    b.release(["run1"])
    assert ledger.run("run1").lease_owner is None


def test_audit_24_work_is_claimed_by_priority_before_due_time(ledger: Ledger, clock: HeldClock) -> None:
    orders = (("run1", 0, 1.0), ("run2", 5, 900.0), ("run3", 5, 800.0), ("run4", 0, 1.0))
    for number, (name, priority, due) in enumerate(orders):
        submit(ledger, a_run(name, repeat=number + 1))
        with ledger.database.write(across="a test") as connection:
            mine = update(work).where(work.c.object == name)
            connection.execute(mine.values(priority=priority, due_at=due))
    queue = WorkQueue(ledger, "a")
    assert [one.object for one in queue.claim(limit=1)] == ["run3"]
    assert [one.object for one in queue.claim(limit=3)] == ["run3", "run2", "run1"]
    assert [one.object for one in queue.claim(limit=9)] == ["run3", "run2", "run1", "run4"]
    assert open_runs(ledger.database) == {ledger.project: ["run2", "run3", "run1", "run4"]}


def test_audit_24_work_is_due_at_its_very_moment_and_woken_never_later(ledger: Ledger, clock: HeldClock) -> None:
    submit(ledger)
    queue = WorkQueue(ledger, "a")
    for after, woken in ((10.0, 20.0), (20.0, 10.0)):
        (one,) = queue.claim()
        assert queue.give_back(one, after)
        queue.wake(RUN, ["run1"], woken)
        clock.time += 9.0
        assert queue.due() == set()
        clock.time += 1.0
        assert queue.due() == {"run1"}


def test_audit_24_a_look_that_failed_at_a_run_that_had_ended_leaves_no_row(ledger: Ledger) -> None:
    run, queue = submit(ledger), WorkQueue(ledger, "a")
    with ledger.transaction("b") as transaction:
        transaction.update_run(run, state="failed")
    queue.failed(STAGE, "run1/train", "it broke", "", 3.0)
    assert queue.rows() == []


def test_leases_are_renewed_and_let_go_of_those_that_are_meant(ledger: Ledger, clock: HeldClock) -> None:
    for number in range(1, 4):
        submit(ledger, a_run(f"run{number}", repeat=number))
    a, b = WorkQueue(ledger, "a", lease=10.0), WorkQueue(ledger, "b", lease=10.0)
    assert [one.object for one in (*a.claim(limit=2), *b.claim())] == ["run1", "run2", "run3"]
    clock.time += 5.0
    a.renew()
    assert [row.lease_until for row in a.rows(RUN)] == [1015.0, 1015.0, 1010.0]
    b.release(["run1", "run2"])
    a.release(["run1"])
    assert [row.lease_owner for row in a.rows(RUN)] == [None, "a", "b"]


def test_failures_in_a_row_are_counted_from_the_first_until_a_look_goes_well(ledger: Ledger, clock: HeldClock) -> None:
    submit(ledger)
    queue = WorkQueue(ledger, "a")
    for count in (1, 2, 3):
        (held,) = queue.claim(early=True)
        failed = queue.failed(RUN, "run1", "it broke", "where", 3.0, held=held)
        assert (failed.failures, failed.failed_since) == (count, 1000.0)
        clock.time += 1.0
    (held,) = queue.claim(early=True)
    assert queue.give_back(held, 5.0)
    (row,) = queue.rows(RUN)
    assert (row.failures, row.failed_since, row.error, row.traceback) == (0, None, "", "")


def test_what_was_set_aside_is_looked_at_at_once_when_somebody_asks(ledger: Ledger) -> None:
    submit(ledger)
    queue = WorkQueue(ledger, "a")
    for ask in ("of the queue", "of the run"):
        assert queue.give_back(queue.claim(early=True)[0])
        queue.failed(STAGE, "run1/train", "it broke", "", None)
        assert queue.due() == set()
        if ask == "of the run":
            with ledger.transaction("ann") as transaction:
                transaction.look_again("run1")
        else:
            queue.revive(STAGE, "run1/train")
        assert queue.due() == {"run1"}, "its stages are looked at with it"
        (stage,) = queue.rows(STAGE)
        assert (stage.dead_at, stage.failures, stage.due_in <= 0.0) == (None, 0, True)


def test_what_is_set_aside_is_claimed_by_nobody_however_early(ledger: Ledger) -> None:
    submit(ledger)
    queue = WorkQueue(ledger, "a")
    (held,) = queue.claim()
    queue.failed(RUN, "run1", "its manifest is corrupt", "", None, held=held)
    assert (queue.claim(early=True), queue.claim(["run1"], early=True), open_runs(ledger.database)) == ([], [], {})
    queue.revive(RUN, "run1")
    assert [one.object for one in queue.claim()] == ["run1"]


def test_renewing_a_lease_makes_nobodys_copy_stale_but_a_successors_write_does(
    ledger: Ledger, clock: HeldClock
) -> None:
    held = submit(ledger)
    WorkQueue(ledger, "a", lease=10).claim()
    clock.time = 1011.0
    assert WorkQueue(ledger, "b", lease=10).claim()
    with ledger.transaction("b") as transaction:
        transaction.update_run(ledger.run("run1"), state="running")
    with pytest.raises(StaleWriteError), ledger.transaction("a") as transaction:
        transaction.update_run(held, state="failed")


def test_runs_are_found_as_a_person_names_them(ledger: Ledger) -> None:
    for number, (run_id, name) in enumerate([("abc1", "sort"), ("abd2", "sort"), ("x%y", "dc")]):
        submit(ledger, a_run(run_id, name, created_at=float(number), repeat=number + 1))
    assert ledger.find_run("abc1").id == "abc1"
    assert ledger.find_run("abc").id == "abc1"
    assert ledger.find_run("sort").id == "abd2"  # the newest of that name
    assert ledger.find_run("x%").id == "x%y"
    for unknown in ("nope", "", "%", "ABC", "x_"):
        with pytest.raises(NotFoundError):
            ledger.find_run(unknown)
    with pytest.raises(InputError, match=r"ambiguous: abd2 \(sort\), abc1 \(sort\)"):
        ledger.find_run("ab")
    assert [run.id for run in ledger.runs()] == ["x%y", "abd2", "abc1"]
    assert [run.id for run in ledger.runs(limit=1)] == ["x%y"]
    assert ledger.runs(state="running") == []
    assert len(ledger.runs(manifest_digest=MANIFEST)) == 3
    with pytest.raises(NotFoundError):
        ledger.run("abc")


def test_runs_of_one_moment_have_an_order_and_pages_follow_it(ledger: Ledger) -> None:
    """Whatever order they came in: by repetition, then by id."""
    for number, (run_id, repeat) in enumerate([("b", 2), ("c", 1), ("a", 1), ("d", 3), ("e", 1)]):
        manifest = "sha256:" + f"{number:x}" * 64
        submit(ledger, dataclasses.replace(a_run(run_id, repeat=repeat), manifest_digest=manifest))
    order = ["d", "b", "e", "c", "a"]
    assert [run.id for run in ledger.runs()] == order
    for at, run_id in enumerate(order):
        assert [run.id for run in ledger.runs(limit=2, before=run_id)] == order[at + 1 : at + 3]


def test_asset_versions_are_counted_immutable_and_idempotent(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        first = transaction.insert_asset(an_asset(rows=3))
        assert (first.version, first.ref) == (1, "dataset:train@1")
        assert transaction.insert_asset(an_asset(rows=3)) == first  # the same content as the latest
        second = transaction.insert_asset(an_asset(rows=4))
        assert transaction.insert_asset(an_asset(version=1, rows=3)) == first  # that very version
        third = transaction.insert_asset(an_asset(rows=3))  # an older content is a new version
        assert (second.version, third.version) == (2, 3)
        for wrong, rule in ((2, "immutable"), (7, "next version is 4")):
            with pytest.raises(ConflictError, match=rule):
                transaction.insert_asset(an_asset(version=wrong, rows=9))
        transaction.insert_asset(an_asset(version=4, digest=OTHER))
    assert kinds(ledger) == ["asset.registered"] * 4
    assert ledger.asset("dataset", "train").version == 4
    assert ledger.asset("dataset", "train", 2) == second
    assert [asset.version for asset in ledger.assets_by_digest(MODEL)] == [1, 2, 3]
    assert ledger.assets("model") == []


def test_a_missing_asset_says_which_there_are(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.insert_asset(an_asset())
    with pytest.raises(NotFoundError, match="versions are 1 to 1"):
        ledger.asset("dataset", "train", 2)
    with pytest.raises(NotFoundError, match="known: train"):
        ledger.asset("dataset", "trian")
    with pytest.raises(NotFoundError, match="there is no reward yet"):
        ledger.asset("reward", "exact")


def test_a_model_is_promoted_under_the_policy_that_it_was_judged_under(ledger: Ledger) -> None:
    mine, others = "sha256:" + "e" * 64, "sha256:" + "f" * 64
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=0, policy=mine)
        record = transaction.snapshot.channel_record("prod")
        transaction.set_channel(record, "channel.policy_set", policy=mine, size=1)
    for policy in (None, others):
        with pytest.raises(PolicyError, match="the policy is sha256:e"), ledger.transaction("bob") as transaction:
            transaction.append_release("prod", OTHER, "run2", "promote", expected=1, policy=policy)
    with ledger.transaction("bob") as transaction:
        transaction.append_release("prod", OTHER, "run2", "promote", expected=1, policy=mine)
        transaction.append_release("prod", MODEL, None, "rollback", expected=2)
    assert [entry.action for entry in ledger.history("prod")] == ["promote", "promote", "rollback"]


def test_a_channel_moves_only_from_where_one_saw_it(ledger: Ledger, clock: HeldClock) -> None:
    assert ledger.channel("prod") is None
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=0, report_digest=OTHER)
    with pytest.raises(ConflictError, match="channel prod moved"), ledger.transaction("bob") as transaction:
        transaction.append_release("prod", OTHER, "run2", "promote", expected=0)
    clock.time += 1
    with ledger.transaction("bob") as transaction:
        transaction.append_release("prod", OTHER, "run2", "promote", expected=1)
        transaction.append_release("prod", MODEL, None, "rollback", expected=2)
        transaction.append_release("canary", OTHER, None, "promote", expected=0)
    history = ledger.history("prod")
    assert [(entry.sequence, entry.model_digest, entry.action) for entry in history] == [
        (1, MODEL, "promote"),
        (2, OTHER, "promote"),
        (3, MODEL, "rollback"),
    ]
    assert ledger.channel("prod") == history[-1]
    assert (history[-1].actor, history[-1].at) == ("bob", 1001.0)
    assert ledger.channels() == ["canary", "prod"]
    moves = ["channel.promote", "channel.promote", "channel.quarantined", "channel.rollback"]
    assert kinds(ledger, "prod") == moves


def test_what_was_rolled_back_is_quarantined_until_somebody_says_why(ledger: Ledger, clock: HeldClock) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=0)
        transaction.append_release("prod", OTHER, "run2", "promote", expected=1)
        transaction.append_release("prod", MODEL, "run1", "rollback", expected=2)
    (barred,) = ledger.quarantine("prod")
    assert (barred.model_digest, barred.release, barred.since, barred.actor) == (OTHER, 3, clock.time, "ann")
    assert ledger.quarantine("canary") == []
    with (
        pytest.raises(QuarantinedError, match="release 3 and is q"),
        ledger.transaction("bob") as transaction,
    ):
        transaction.append_release("prod", OTHER, "run2", "promote", expected=3)
    with ledger.transaction("bob") as transaction:
        transaction.append_release("canary", OTHER, "run2", "promote", expected=0)
        transaction.append_release("prod", OTHER, "run2", "promote", expected=3, lift="the prompt was wrong")
    assert ledger.quarantine("prod") == []
    with ledger.transaction("bob") as transaction:
        transaction.append_release("prod", MODEL, "run1", "rollback", expected=4)  # again: quarantined again
        with pytest.raises(QuarantinedError):
            transaction.append_release("prod", OTHER, "run2", "rollback", expected=5)
        transaction.append_release("prod", OTHER, "run2", "rollback", expected=5, lift="so was the answer")
    assert [one.model_digest for one in ledger.quarantine("prod")] == [MODEL]
    said = [event.payload["changes"]["reason"] for event in told(ledger, "prod") if event.kind.endswith("_lifted")]
    assert said == ["the prompt was wrong", "so was the answer"]
    verify_rows(ledger)


def test_a_quarantine_of_a_protected_channel_is_lifted_by_approval_only(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, "run1", "promote", expected=0)
        transaction.append_release("prod", OTHER, "run2", "promote", expected=1)
        transaction.append_release("prod", MODEL, "run1", "rollback", expected=2)
        record = transaction.snapshot.channel_record("prod")
        transaction.set_channel(record, "channel.protected", protected=True)
        with pytest.raises(ChannelClosedError, match="lifting the quarantine of sha256:"):
            transaction.append_release("prod", OTHER, "run2", "rollback", expected=3, lift="hush")
        transaction.append_release("prod", OTHER, "run2", "rollback", expected=3, lift="a slip", approved=MANIFEST)
    assert [one.model_digest for one in ledger.quarantine("prod")] == [MODEL]


def test_a_cache_key_is_answered_by_the_stage_put_last(ledger: Ledger) -> None:
    for number, run_id in enumerate(("run1", "run2")):
        submit(ledger, a_run(run_id, repeat=number + 1))
        with ledger.transaction("reconciler") as transaction:
            transaction.update_stage(ledger.stages(run_id)[0], cache_key=OTHER)
            transaction.put_cache(OTHER, run_id, "train")
    found = ledger.cached_stage(OTHER)
    assert found is not None
    assert (found.run_id, found.name) == ("run2", "train")
    assert ledger.computed(OTHER) == (found, []), "of a key that is answered nobody needs the others"
    assert ledger.cached_stage(MODEL) is None
    assert ledger.computed(MODEL) == (None, [])


def test_a_transaction_reads_its_own_writes_and_others_do_not(ledger: Ledger) -> None:
    run = submit(ledger)
    with ledger.transaction("ann") as transaction:
        transaction.update_run(run, state="running")
        assert transaction.snapshot.run("run1").state == "running"
        assert ledger.run("run1").state == "pending"


@pytest.mark.parametrize("happened", [True, False])
def test_a_lost_answer_to_a_commit_is_resolved_by_what_is_there(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    run, write = submit(ledger), ledger.database.write

    @contextmanager
    def lossy() -> Iterator[Connection]:
        with suppress(LostAnswerError), write() as connection:
            yield connection
            if not happened:
                raise LostAnswerError("the server was gone before")
        raise LostAnswerError("the server was gone after")

    monkeypatch.setattr(ledger.database, "write", lossy)
    told = nullcontext() if happened else pytest.raises(InfrastructureError, match="nothing was written, run the com")
    with told, ledger.transaction("ann") as transaction:
        transaction.update_run(run, state="running")
    monkeypatch.undo()
    assert ledger.run("run1").state == ("running" if happened else "pending")


def test_subjects_are_matched_with_what_is_below_them(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        for subject in ("run1", "run1/train", "run10", "run_"):
            transaction.append_event("note", subject, {})
    seal(ledger)
    assert [event.subject for event in ledger.events(subject_prefix="run1")] == ["run1", "run1/train"]
    assert [event.subject for event in ledger.events(subject_prefix="run_")] == ["run_"]
    (fourth,) = ledger.events(subject_prefix="run10")
    assert [event.subject for event in ledger.events(after=(fourth.sequence or 0) - 1, limit=1)] == ["run10"]


_WORDS = st.text(max_size=20).filter(lambda text: "\0" not in text and text.isprintable())
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=6,
)
_MAPPINGS = st.dictionaries(_WORDS, _JSON, max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reason=_WORDS,
    inputs=_MAPPINGS,
    metrics=st.dictionaries(_WORDS, st.floats(allow_nan=False)),
    tokens=st.integers(0, 2**62),
    at=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_written_is_what_is_read(
    ledger: Ledger, reason: str, inputs: dict[str, Any], metrics: dict[str, float], tokens: int, at: float | None
) -> None:
    number = len(ledger.runs())
    run = a_run(f"run{number}", repeat=number + 1)
    stage = a_stage(run_id=run.id)
    full = dataclasses.replace(stage, name="full", reason=reason, inputs=inputs, metrics=metrics, not_before=at)
    with ledger.transaction("ann") as transaction:
        transaction.insert_run(run, [stage, full])
        updated = transaction.update_stage(
            stage, reason=reason, inputs=inputs, metrics=metrics, tokens=tokens, not_before=at
        )
    assert sorted(ledger.stages(run.id), key=lambda s: s.name) == [full, updated]
    seal(ledger)
    verify_chain(ledger)
    verify_rows(ledger)


_WRITER = """
import sys
from posttrain.domain.errors import StaleWriteError
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database, LostAnswerError
from posttrain.store.ledger import Ledger
from posttrain.store.work import WorkQueue

ledger = Ledger(Database(sys.argv[1]))
stale = 0
for number in range(25):
    while True:
        run = ledger.run("run1")
        try:
            with ledger.transaction(sys.argv[2]) as transaction:
                transaction.update_run(run, message=f"{sys.argv[2]} {number}")
            break
        except StaleWriteError:
            stale += 1
print(stale)
"""


@pytest.mark.slow
def test_two_processes_lose_no_write(tmp_path: Path, ledger: Ledger) -> None:
    submit(ledger)
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "ledger.db")]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in ("a", "b")]
    while any(writer.poll() is None for writer in writers):
        seal(ledger)  # the sealer runs beside them
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    seal(ledger)
    assert ledger.run("run1").generation == 50
    updates = [event for event in ledger.events() if event.kind == "run.updated"]
    assert [event.payload["generation"] for event in updates] == list(range(1, 51))
    assert verify_chain(ledger).pending == 0
    assert verify_rows(ledger) == 9  # project, four principals, run, stage; the manifest and that the run uses it
