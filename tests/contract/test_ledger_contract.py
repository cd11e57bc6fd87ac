"""What every database of a ledger must do: SQLite in the fast suite, PostgreSQL by `make postgres`."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ledger_workers as work
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from posttrain.domain.approvals import Action, request_of
from posttrain.domain.errors import (
    ChannelClosedError,
    ConflictError,
    DeadlineError,
    IntegrityError,
    NotFoundError,
    PosttrainError,
    StaleWriteError,
)
from posttrain.domain.records import Asset
from posttrain.store.audit import verify_rows
from posttrain.store.database import Database
from posttrain.store.erasure import erase_principal, erase_subject
from posttrain.store.journal import RUN, STAGE
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.snapshot import Snapshot
from posttrain.store.work import WorkQueue

MODEL, OTHER, REPORT, THIRD = (f"sha256:{digit * 64}" for digit in "bcde")


@pytest.fixture
def ledger(ledger_at: str) -> Iterator[Ledger]:
    with work.opened(ledger_at) as ledger:
        yield ledger


@pytest.fixture
def some(ledger_at: str) -> list[str]:
    """Names of processes: as many as CI can bear in the fast suite, eight on PostgreSQL."""
    return [f"p{number}" for number in range(8 if "://" in ledger_at else 3)]


def test_what_was_submitted_is_read_back_updated_and_proved(ledger: Ledger) -> None:
    run = work.submit(ledger)
    assert ledger.run("run1") == run == ledger.find_run("sort") == ledger.find_run("run")
    with ledger.transaction("bob") as transaction:
        after = transaction.update_run(run, state="running", reason="Started", started_at=1234.000000123)
        stage = transaction.update_stage(
            transaction.snapshot.stages("run1")[0],
            state="ready",
            metrics={"loss": math.nan, "up": math.inf, "small": 5e-324, "third": 1 / 3},
            tokens=2**60,
        )
        assert transaction.snapshot.run("run1") == after
        assert ledger.run("run1") == run  # others see it when it is committed
    assert ledger.run("run1") == after
    found = ledger.stages("run1")[0]
    assert math.isnan(found.metrics["loss"])
    assert {**found.metrics, "loss": 0} == {**stage.metrics, "loss": 0}
    assert found.tokens == 2**60
    seal(ledger)
    assert verify_chain(ledger).pending == 0
    assert verify_rows(ledger)


def test_who_decided_on_an_old_row_must_read_again(ledger: Ledger) -> None:
    run = work.submit(ledger)
    with ledger.transaction("first") as transaction:
        transaction.update_run(run, message="mine")
    with pytest.raises(StaleWriteError, match="generation 0"), ledger.transaction("second") as transaction:
        transaction.update_run(run, state="running")
    assert (ledger.run("run1").message, ledger.run("run1").state) == ("mine", "pending")


def test_a_block_that_raises_leaves_nothing(ledger: Ledger) -> None:
    run = work.submit(ledger)
    seal(ledger)

    def write_and_fail() -> None:
        with ledger.transaction("ann") as transaction:
            transaction.update_run(run, message="half done")
            transaction.insert_run(work.a_run("half"), [work.a_stage("half")])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert ledger.run("run1") == run
    assert [known.id for known in ledger.runs()] == ["run1"]
    assert ledger.pending_events() == []


def test_a_refused_row_leaves_the_rest_of_its_transaction(ledger: Ledger) -> None:
    work.submit(ledger)
    with ledger.transaction("ann") as transaction:
        with pytest.raises(ConflictError, match="run run1 cannot be added"):
            transaction.insert_run(work.a_run(), [])
        transaction.insert_run(work.a_run("run2"), [work.a_stage("run2")])
    assert sorted(run.id for run in ledger.runs()) == ["run1", "run2"]


def test_a_snapshot_is_of_one_moment(ledger: Ledger) -> None:
    run = work.submit(ledger)
    with ledger.snapshot() as before:
        assert before.run("run1").state == "pending"
        with ledger.transaction("bob") as transaction:
            transaction.update_run(run, state="running")
            transaction.insert_run(work.a_run("run2"), [])
        assert ledger.run("run1").state == "running"
        assert before.run("run1").state == "pending"
        assert [known.id for known in before.runs()] == ["run1"]
        assert [event.kind for event in before.pending_events("run1")] == ["run.pending", "stage.pending"]


def test_a_job_may_say_anything(ledger: Ledger) -> None:
    run = work.submit(ledger)
    with ledger.transaction("bob") as transaction:
        transaction.update_run(run, message="half\0a word \ud800")
    assert ledger.run("run1").message == "half\ufffda word ?"
    seal(ledger)
    verify_chain(ledger)
    assert verify_rows(ledger)


def test_names_are_whatever_people_write(ledger: Ledger) -> None:
    name = "naïve 名前 🙂 %_'\"\\ e\u0301"
    with ledger.transaction("zoë") as transaction:
        transaction.insert_run(work.a_run("run1", name), [])
        transaction.append_release(name, MODEL, None, "promote", expected=0)
    seal(ledger)
    assert ledger.find_run(name).name == name
    assert ledger.channels() == [name]
    assert {event.subject for event in ledger.events(subject_prefix=name)} == {name}
    assert {event.actor for event in ledger.events(subject_prefix=name)} == {"zoë"}
    verify_chain(ledger)


_JSON = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    max_size=4,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(_JSON, max_size=3))
def test_whatever_an_event_says_is_sealed_and_proved(ledger: Ledger, payloads: list[dict[str, object]]) -> None:
    with ledger.transaction("ann") as transaction:
        for payload in payloads:
            transaction.append_event("note", "run1", payload)
    seal(ledger)
    assert verify_chain(ledger).pending == 0


@pytest.mark.parametrize("events", [1, 3])
def test_whose_name_was_erased_elsewhere_is_somebody_else_to_who_remembers_them(
    ledger_at: str, ledger: Ledger, events: int
) -> None:
    def act() -> None:
        with ledger.transaction("user:ann") as transaction:
            for number in range(events):
                transaction.append_event("note", "run1", {"number": number})

    act()
    act()
    with work.opened(ledger_at) as elsewhere:
        erase_principal(elsewhere, "user:bob", "user:ann", "they left")
    with pytest.raises(ConflictError, match="read it again"):
        act()
    act()
    act()
    with work.opened(ledger_at) as elsewhere:  # oneself, too
        erase_principal(elsewhere, "user:ann", "user:ann", "they left")
    seal(ledger)
    notes = [event.actor for event in ledger.events(subject_prefix="run1")]
    assert len(notes) == 4 * events, "what was refused left nothing"
    assert all(actor.startswith("erased:") for actor in notes)
    assert (len(set(notes[: 2 * events])), len(set(notes))) == (1, 2), "nothing was said under the erased id later"
    verify_chain(ledger)
    assert verify_rows(ledger)


def test_the_first_openers_make_one_schema_and_all_work(ledger_at: str, some: list[str]) -> None:
    assert sorted(work.together(work.open_first, ledger_at, some)) == some
    with work.opened(ledger_at) as ledger:
        assert sorted(run.id for run in ledger.runs()) == some
        seal(ledger)
        verify_chain(ledger)


def test_a_cursor_meets_no_gap_beside_writers_and_sealers(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    times = 12
    work.submit(ledger)
    seal(ledger)
    notes = 3 * times * (len(some) - 1)
    answers = work.together(_write_or_follow, ledger_at, some, times, notes)
    (seen,) = (answer for answer in answers if isinstance(answer, list))
    seal(ledger)
    report = verify_chain(ledger)
    assert report.pending == 0
    assert len({sequence for sequence, _, _ in seen}) == len(seen) == notes
    for writer in some[1:]:
        assert sorted(number for _, actor, number in seen if actor == writer) == list(range(3 * times))
    for writer in some[1:]:  # the three of a transaction stand in their order, whatever came between
        mine = [number for _, actor, number in seen if actor == writer]
        assert all(first < second for first, second in itertools.pairwise(mine))


def test_the_first_sealers_make_one_chain(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    for number in range(30):
        with ledger.transaction("ann") as transaction:
            transaction.append_event("note", f"run/{number}", {"number": number})
    sealed = work.together(work.seal_all, ledger_at, some)
    report = verify_chain(ledger)
    assert (report.pending, report.sealed) == (0, sum(sealed))
    assert report.sealed >= 30


def _write_or_follow(address: str, name: str, times: int, notes: int) -> object:
    return work.follow(address, name, notes) if name == "p0" else work.say_and_seal(address, name, times)


def test_no_update_is_lost_by_a_race(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    work.submit(ledger)
    work.together(work.count_up, ledger_at, some, 10)
    run = ledger.run("run1")
    assert (run.message, run.generation) == (str(10 * len(some)), 10 * len(some))
    seal(ledger)
    changed = [event.payload["changes"]["message"] for event in ledger.events() if event.kind == "run.updated"]
    assert changed == [str(number + 1) for number in range(10 * len(some))]


def test_versions_that_race_are_counted_without_gaps(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    answers = work.together(work.register, ledger_at, some, 5)
    versions = sorted(itertools.chain.from_iterable(answers))
    assert versions == list(range(1, 5 * len(some) + 1))
    assert [asset.version for asset in ledger.assets("dataset", "train")] == versions
    with ledger.snapshot() as now:  # all of the same bytes, noted by whoever came first
        assert [(one.digest, one.kind) for one in now.artifacts(MODEL)] == [(MODEL, "asset")]
        assert len(now.made(*(f"dataset:train@{version}" for version in versions))) == len(versions)
    seal(ledger)
    assert verify_rows(ledger) >= 2 * len(versions)


def test_models_are_registered_with_the_stage_that_made_them(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a model has are no version again, a race is retried, and every asset's rows are proved by its own."""
    work.submit(ledger)
    (stage,) = ledger.stages("run1")
    wanted = [
        Asset("model", "r/train", 0, digest, "tree", 1.0, "user:ann", {"run": "run1"}) for digest in (MODEL, OTHER)
    ]
    with ledger.transaction("ann") as transaction:
        transaction.insert_asset(replace(wanted[0], name="other", version=1, meta={}))
        transaction.insert_asset(replace(wanted[0], digest=THIRD, meta={}))
    look, looks = Snapshot.alike, list[int]()

    def late(self: Snapshot, *given: Asset) -> list[Asset]:
        looks.append(len(given))
        return look(self, *given) if len(looks) > 1 else look(self, wanted[0])[:1]

    monkeypatch.setattr(Snapshot, "alike", late)
    outputs = {"model": {"digest": OTHER, "form": "tree"}}
    with ledger.transaction("ann") as transaction:
        stage = transaction.update_stage(stage, outputs=outputs, models=wanted)
    assert [(one.ref, one.digest) for one in ledger.assets("model", "r/train")][1:] == [("model:r/train@2", OTHER)]
    assert looks == [2, 1]
    seal(ledger)
    refs = ("model:r/train@1", "model:r/train@2", "model:other@1")
    assert [verify_rows(ledger, [ref]) for ref in refs] == [2, 3, 2]
    assert verify_rows(ledger, ["run1"]) > 2


def test_of_several_who_count_a_hosts_slots_one_counts_at_a_time(ledger_at: str, ledger: Ledger) -> None:
    for run_id in ("run1", "run2"):
        work.submit(ledger, run_id)
    counted, order = threading.Event(), list[str]()

    def count_later() -> None:
        other = Ledger(Database(ledger_at))
        counted.wait(60)
        with other.transaction("bob") as transaction:
            assert transaction.lock_run("run2", slots_of="here") == "pending"
            order.append("run2")
        other.database.close()

    with ThreadPoolExecutor(1) as pool:
        with ledger.transaction("ann") as transaction:
            transaction.lock_run("run1", slots_of="here")
            late = pool.submit(count_later)
            counted.set()
            time.sleep(0.3)  # who does not wait is first
            order.append("run1")
        late.result(60)
    assert order == ["run1", "run2"]


def test_what_a_stage_used_is_told_anew_when_it_is_bound_again(ledger: Ledger) -> None:
    work.submit(ledger)
    stage = ledger.stages("run1")[0]
    for release, digest in ((1, OTHER), (2, MODEL)):
        blob = {"digest": digest, "form": "tree", "name": f"channel:prod@{release}"}
        with ledger.transaction("ann") as transaction:
            stage = transaction.update_stage(stage, inputs={"model": blob})
    with ledger.snapshot() as now:
        (edge,) = now.used("run:run1/train")
        assert (edge.producer, edge.slot, edge.digest) == ("channel:prod@2", "model", MODEL)
        assert now.uses_of_bytes(OTHER) == []
        assert now.uses("channel:prod@2") == [edge]
    seal(ledger)
    verify_rows(ledger)


def test_releases_that_race_are_one_history(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    answers = work.together(work.promote, ledger_at, some, 5)
    assert sorted(itertools.chain.from_iterable(answers)) == list(range(1, 5 * len(some) + 1))
    history = ledger.history("prod")
    assert [entry.sequence for entry in history] == list(range(1, 5 * len(some) + 1))
    seal(ledger)
    moves = [event.payload for event in ledger.events(subject_prefix="prod")]
    for entry, move, before in zip(history, moves, [None, *history], strict=False):
        assert (move["model_digest"], move["sequence"]) == (entry.model_digest, entry.sequence)
        assert move["previous"] == (before.model_digest if before else None)
    assert verify_rows(ledger) >= len(history)


def test_a_policy_and_the_releases_that_race_with_it_never_pass_each_other(
    ledger_at: str, ledger: Ledger, some: list[str]
) -> None:
    """What was judged under no policy is promoted while there is none, and never while there is one."""
    answers = work.together(work.govern, ledger_at, some, 5)
    released = sorted(itertools.chain.from_iterable(answers))
    assert released == list(range(1, 5 * (len(some) - 1) + 1))
    seal(ledger)
    policy, kinds = None, []
    for event in sorted(ledger.events(subject_prefix="prod"), key=lambda event: event.id):
        kinds.append(event.kind)
        policy = event.payload["set"]["policy"] if event.kind == "channel.policy_set" else policy
        assert event.kind != "channel.promote" or policy is None
    assert sorted(set(kinds)) == ["channel.policy_set", "channel.promote"]
    record = ledger.channel_record("prod")
    assert (record.policy, record.generation) == (None, len(kinds)), "every one of them is a generation"
    (served,) = ledger.deployments("prod")
    assert (served.role, served.release_sequence, served.weight) == ("live", len(released), 1.0)
    assert verify_rows(ledger) >= len(released)


def test_a_request_and_what_was_said_of_it_is_read_back_and_proved(ledger: Ledger) -> None:
    work.submit(ledger)
    request = request_of(Action.RELEASE, "prod", "ann", 2.0, "run1", live=0, policy=OTHER)
    for _ in range(2):
        with ledger.transaction("bob") as transaction:
            transaction.ask_approval(request)
    with ledger.transaction("user:bob") as transaction:
        transaction.say_approval(request, "rejected", "not\0yet")
        transaction.say_approval(request, "approved", "now")
    with ledger.transaction("user:cy") as transaction:
        transaction.say_approval(request, "approved")
    with ledger.snapshot() as now:
        assert now.approval_requests() == now.approval_requests("prod", "run1", request.digest[:20]) == [request]
        assert now.approval_requests("beta") == now.approval_requests(run_id="run2") == []
        said = [(one.actor, one.verdict, one.reason) for one in now.approvals(request.digest)]
        assert said == [("user:bob", "approved", "now"), ("user:cy", "approved", "")]
        assert now.submitter("run1") == "ann"
        with pytest.raises(IntegrityError, match="no event records who submitted it"):
            now.submitter("run2")
    queue = WorkQueue(ledger, "h:1:0")
    for one in queue.claim():
        queue.give_back(one, 1000.0)
    assert queue.due() == set()
    with ledger.transaction("user:cy") as transaction:
        transaction.say_approval(request, "rejected")
    assert queue.due() == {"run1"}, "in the same transaction"
    seal(ledger)
    verify_rows(ledger)
    run = ledger.run("run1")
    with ledger.transaction("ann") as transaction:
        transaction.update_run(run, state="failed")
    erase_subject(ledger, "ann", "run1", "asked to")
    with ledger.snapshot() as now:
        assert {one.reason for one in now.approvals(request.digest)} == {""}
    verify_rows(ledger)


def test_a_rejection_and_a_release_that_race_never_pass_each_other(
    ledger_at: str, ledger: Ledger, some: list[str]
) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.set_channel(ledger.channel_record("prod"), work.POLICY_SET, policy=OTHER)
        record = transaction.snapshot.channel_record("prod")
        transaction.set_channel(record, work.POLICY_SET, policy=None)
        request = request_of(Action.RELEASE, "prod", "ann", 2.0, live=0)
        transaction.ask_approval(request)
    shipped = sum(work.together(work.say_or_ship, ledger_at, some, request, 10))
    seal(ledger)
    rejected: set[str] = set()
    released = 0
    for event in sorted(ledger.events(subject_prefix="prod"), key=lambda event: event.id):
        if event.kind == "channel.promote":
            released += 1
            assert not rejected
        if event.kind.startswith("approval."):
            (rejected.add if event.kind == "approval.rejected" else rejected.discard)(event.actor)
    assert released == shipped
    verify_rows(ledger)


def test_who_changes_a_channel_that_moved_must_look_again(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, None, "promote", expected=0)
    seen = ledger.channel_record("prod")
    with ledger.transaction("ann") as transaction:
        transaction.append_release("prod", OTHER, None, "promote", expected=1)
    with (
        pytest.raises(ConflictError, match="another user moved or changed the channel"),
        ledger.transaction("bob") as transaction,
    ):
        transaction.set_channel(seen, "channel.frozen", "an incident", frozen="all")
    with ledger.transaction("bob") as transaction:
        frozen = transaction.set_channel(ledger.channel_record("prod"), "channel.frozen", "an incident", frozen="all")
    assert ledger.channel_record("prod") == frozen
    with pytest.raises(ChannelClosedError, match="is frozen"), ledger.transaction("ann") as transaction:
        transaction.append_release("prod", MODEL, None, "rollback", expected=2)
    assert ledger.channel("prod") == ledger.history("prod")[-1]
    assert [event.payload["why"] for event in ledger.events_about("prod", "channel.frozen")] == ["an incident"]


def test_a_channel_that_came_back_is_another_release(ledger: Ledger) -> None:
    with ledger.transaction("ann") as transaction:
        for model, action, expected in ((MODEL, "promote", 0), (OTHER, "promote", 1), (MODEL, "rollback", 2)):
            transaction.append_release("prod", model, None, action, expected=expected)
    moved = "expected release 1 live, found release 3"
    with pytest.raises(ConflictError, match=moved), ledger.transaction("bob") as transaction:
        transaction.append_release("prod", REPORT, None, "promote", expected=1)
    assert ledger.deployments("prod")[0].release_sequence == 3


def test_what_is_woken_while_somebody_looks_is_looked_at_again(ledger: Ledger) -> None:
    work.submit(ledger)
    mine, other = WorkQueue(ledger, "h:1:0"), WorkQueue(ledger, "h:2:0")
    assert mine.due() == {"run1"}
    (one,) = mine.claim()
    assert (one.object, other.claim(), other.due()) == ("run1", [], set())
    other.wake(RUN, ["run1"])
    assert not mine.give_back(one, 100.0)
    (again,) = other.claim()
    assert again.wanted_version == one.wanted_version + 1
    assert not mine.give_back(one, 100.0), "it is not ours any more"
    assert other.give_back(again, 100.0)
    assert not mine.due()
    assert other.claim() == other.claim(["run1"]) == []
    assert [taken.object for taken in other.claim(["run1"], early=True)] == ["run1"]


def test_a_change_of_a_run_wakes_it_in_the_same_transaction(ledger: Ledger) -> None:
    run, queue = work.submit(ledger), WorkQueue(ledger, "h:1:0")
    assert queue.give_back(queue.claim()[0])
    with pytest.raises(RuntimeError), ledger.transaction("bob") as transaction:  # noqa: PT012
        transaction.update_run(run, message="never written")
        raise RuntimeError
    assert not queue.due()
    with ledger.transaction("bob") as transaction:
        transaction.update_stage(transaction.snapshot.stages("run1")[0], state="ready")
    assert [one.object for one in queue.claim()] == ["run1"]


def test_an_object_is_backed_off_alone_set_aside_and_looked_at_again(ledger: Ledger) -> None:
    work.submit(ledger)
    queue = WorkQueue(ledger, "h:1:0")
    first = queue.failed(STAGE, "run1/train", "it broke", "Traceback: …", 3600.0)
    dead = queue.failed(STAGE, "run1/train", "it broke\0again", "x" * 50_000, None)
    assert (first.failures, first.dead_at, dead.failures, dead.failed_since) == (1, None, 2, first.failed_since)
    assert (dead.error, len(dead.traceback), dead.dead_at is not None) == ("it broke\ufffdagain", 20_000, True)
    assert queue.rows(STAGE, "run1") == queue.rows(dead=True) == [dead]
    assert [one.object for one in queue.claim(limit=9)] == ["run1"], "its run goes on"
    with pytest.raises(NotFoundError, match="posttrain dead"):
        queue.revive(STAGE, "run1/other")
    queue.revive(STAGE, "run1/train")
    (again,) = queue.rows(STAGE)
    assert (again.dead_at, again.failures, queue.rows(dead=True)) == (None, 0, [])
    queue.over(STAGE, "run1/train")
    assert queue.rows(STAGE) == []


def test_a_dead_owner_is_succeeded_at_once_a_living_one_when_its_lease_ends(ledger: Ledger) -> None:
    work.submit(ledger)
    WorkQueue(ledger, "h:1:0", lease=0.0).claim()
    assert WorkQueue(ledger, "h:2:0").claim(), "its lease has ended"
    third = WorkQueue(ledger, "h:3:0", alive=lambda owner: owner != "h:2:0")
    assert (third.claim(), third.succeed_the_dead()) == ([], 1)
    assert third.claim()
    assert third.succeed_the_dead() == 0
    third.release()
    assert ledger.run("run1").lease_owner is None


def test_a_run_that_ends_leaves_the_queue_with_its_stages_whoever_dies_then(ledger: Ledger) -> None:
    run, queue = work.submit(ledger), WorkQueue(ledger, "h:1:0")
    queue.failed(STAGE, "run1/train", "it broke", "", None)
    with ledger.transaction("test") as transaction:
        transaction.update_run(run, state="failed")
    assert queue.rows() == []
    queue.failed(STAGE, "run1/train", "it broke", "", 3.0)
    queue.wake(RUN, ["run1"])
    assert queue.rows() == [], "a driver that does not know that it ended leaves nothing either"


def test_a_run_that_ended_leaves_the_queue_unless_it_goes_on(ledger: Ledger) -> None:
    run, queue = work.submit(ledger), WorkQueue(ledger, "h:1:0")
    queue.failed(STAGE, "run1/train", "it broke", "", None)
    queue.finish("run1")
    assert len(queue.rows()) == 2, "it has not ended"
    with ledger.transaction("bob") as transaction:
        failed = transaction.update_run(run, state="failed")
    queue.finish("run1")
    assert queue.rows() == []
    with ledger.transaction("bob") as transaction:
        transaction.update_run(failed, state="running")
    assert [one.object for one in queue.claim()] == ["run1"]


def test_drivers_that_take_and_wake_at_once_lose_no_wake_up(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    runs = [f"r{number}" for number in range(6)]
    for run_id in runs:
        work.submit(ledger, run_id)
    taken = work.together(work.take_and_wake, ledger_at, some, runs, 40)
    queue = WorkQueue(ledger, "h:1:0")
    rows = {one.object: one for one in queue.rows(RUN)}
    assert set(rows) == set(runs)
    assert all(row.lease_owner is None for row in rows.values()), "each was given back"
    looked, woken = sum(sum(one.values()) for one in taken), sum(row.wanted_version for row in rows.values())
    assert woken == len(runs) + looked, "each look woke one"
    left = [one.object for one in queue.claim(limit=9)]
    assert len(left) <= len(runs)
    assert all(not queue.due([name]) for name in runs if name not in left)


def test_a_lease_is_taken_by_one(ledger_at: str, ledger: Ledger, some: list[str]) -> None:
    runs = [f"run{number}" for number in range(10)]
    for run_id in runs:
        work.submit(ledger, run_id)
    taken = work.together(work.claim, ledger_at, some, runs)
    assert sorted(itertools.chain.from_iterable(taken)) == sorted(runs)
    owners = {run.id: run.lease_owner for run in ledger.runs()}
    assert set(owners.values()) <= set(some)
    assert all(owners.values())


def test_a_killed_writer_leaves_nothing_and_stops_nobody(ledger_at: str, ledger: Ledger) -> None:
    run = work.submit(ledger)
    seal(ledger)
    told = work.PROCESSES.Event()
    writer = work.PROCESSES.Process(target=work.write_and_wait, args=(ledger_at, told), daemon=True)
    writer.start()
    assert told.wait(work.PATIENCE)
    assert ledger.run("run1") == run  # readers never wait
    writer.kill()
    writer.join(work.PATIENCE)
    with ledger.transaction("next") as transaction:
        transaction.update_run(run, message="whole")
    assert [known.id for known in ledger.runs()] == ["run1"]
    seal(ledger)
    told = [event.kind for event in ledger.events(subject_prefix="run1")]
    assert told == ["run.pending", "stage.pending", "run.updated"]
    verify_chain(ledger)


def test_who_waits_too_long_for_another_gives_up(ledger_at: str, ledger: Ledger) -> None:
    run = work.submit(ledger)
    with ledger.transaction("slow") as transaction:
        transaction.update_run(run, message="mine")
        with work.opened(ledger_at, busy_seconds=0.2) as hurried:
            assert hurried.run("run1") == run
            with pytest.raises(DeadlineError) as caught, hurried.transaction("hurried") as second:
                second.update_run(run, message="never")
    assert_one_line(caught.value)
    assert "was locked by another process for more than 0.2 s; run the command again" in str(caught.value)
    assert ledger.run("run1").message == "mine"


def test_an_opener_that_may_not_make_tables_says_so(ledger_at: str) -> None:
    with pytest.raises(PosttrainError) as caught:
        Database(ledger_at, create=False)
    assert_one_line(caught.value)
    Database(ledger_at).close()
    Database(ledger_at, create=False).close()


def assert_one_line(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert str(error)


def test_words_are_erased_and_the_log_still_holds(ledger: Ledger) -> None:
    run = work.submit(ledger)
    with ledger.transaction("bob") as transaction:
        run = transaction.update_run(run, state="running", message="ann said whisperings")
        transaction.update_run(run, state="failed", reason="JobFailed", next_action="ask ann")
        transaction.insert_run(work.a_run("run2"), [work.a_stage("run2")])
    seal(ledger)
    done = erase_subject(ledger, "bob", "run1", "asked for")
    assert (done.events, done.rows, done.overwritten) == (3, 1, True)
    now = ledger.run("run1")
    assert (now.message, now.next_action, now.owner, now.reason, now.state) == ("", "", "", "JobFailed", "failed")
    assert ledger.run("run2").owner == "ann"
    assert verify_chain(ledger).erased == 3  # the erasure itself waits to be sealed
    verify_rows(ledger)
    seal(ledger)
    assert (verify_chain(ledger).erased, verify_chain(ledger).pending) == (3, 0)
    verify_rows(ledger)


def test_a_signal_is_sent_once_whoever_sends_it(ledger: Ledger, ledger_at: str, some: list[str]) -> None:
    work.submit(ledger)
    queue = WorkQueue(ledger, "here:1:1")
    with ledger.transaction("ann") as transaction:
        transaction.update_run(transaction.snapshot.run("run1"), state="running")
    (claimed,) = queue.claim(["run1"])
    assert queue.give_back(claimed)
    assert queue.due() == set()
    together = threading.Barrier(len(some))

    def send(name: str) -> bool:
        with work.opened(ledger_at) as own:
            together.wait()
            try:
                with own.transaction(name) as transaction:
                    return transaction.send_signal("run1", "go", f"{name} says so\0")
            except ConflictError:
                return False

    with ThreadPoolExecutor(len(some)) as pool:
        assert sum(pool.map(send, some)) == 1
    (sent,) = ledger.signals("run1")
    assert (sent.name, sent.reason) == ("go", f"{sent.actor} says so\ufffd")
    assert queue.due() == {"run1"}, "in the same transaction"
    assert ledger.signals("run2") == []
    seal(ledger)
    assert verify_rows(ledger)
