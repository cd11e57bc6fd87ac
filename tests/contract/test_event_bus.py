"""The event bus over a ledger: at least once, in order, one process at a time, whatever dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ledger_workers as work
import pytest
from control_bench import ManualClock
from sqlalchemy import event as listening

from posttrain.domain.errors import ConflictError, IntegrityError, NotFoundError, SinkError
from posttrain.domain.sinks import ALL, Notice, Rule, SinkRecord
from posttrain.events.bus import BACKOFF, PATIENCE, Deliverer, Deliveries, RunFacts
from posttrain.events.ports import Sink
from posttrain.events.sinks.fake import FakeSink
from posttrain.store.audit import verify_rows
from posttrain.store.erasure import erase_principal
from posttrain.store.ledger import Ledger
from posttrain.store.schema import cursors, sinks
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.work import LEASE_SECONDS, Cursors
from sink_servers import SECRET, Receiver, receiver

EVERYTHING = (Rule(on=(ALL,)),)


@pytest.fixture
def ledger(ledger_at: str) -> Iterator[Ledger]:
    with work.opened(ledger_at) as ledger:
        ledger.clock = ManualClock()
        yield ledger


def add(ledger: Ledger, name: str, rules: tuple[Rule, ...] = EVERYTHING, kind: str = "fake", **settings: Any) -> None:
    seal(ledger)
    with ledger.snapshot() as now:
        after = now.sealed()
    with ledger.transaction("user:ann") as transaction:
        transaction.add_sink(SinkRecord(name, kind, settings, rules, 0.0, ""), after)
    seal(ledger)


def tell(ledger: Ledger, many: int, kind: str = "note.told", first: int = 0) -> None:
    for start in range(0, many, 1000):
        with ledger.transaction("user:ann") as transaction:
            for number in range(start, min(many, start + 1000)):
                transaction.append_event(kind, f"n{first + number}", {"number": first + number})
    seal(ledger)


def of(ledger: Ledger, name: str, opens: Callable[[SinkRecord], Sink], owner: str = "here:1:1.0") -> Deliveries:
    held = Cursors(ledger, owner, lambda _: True)
    with ledger.snapshot() as now:
        record = now.sink(name)
    return Deliveries(held, record, opens, RunFacts(ledger, lambda _: ""), "service:posttrain")


def cursor(ledger: Ledger, name: str) -> Any:
    with ledger.snapshot() as now:
        return now.cursors()[name]


def numbers(arrived: list[Notice]) -> list[int]:
    return [one.body["audited"]["number"] for one in arrived if one.body["type"] == "note.told"]


def test_every_event_arrives_once_in_the_logs_order(ledger: Ledger) -> None:
    tell(ledger, 3)
    add(ledger, "all")
    tell(ledger, 20, first=3)
    arrived: list[Notice] = []
    assert not of(ledger, "all", lambda _: FakeSink(arrived)).go_on()
    assert numbers(arrived) == list(range(3, 23)), "what was before it was added is not told"
    assert [one.sequence for one in arrived] == sorted({one.sequence for one in arrived})
    assert len({one.id for one in arrived}) == len(arrived)
    assert not of(ledger, "all", lambda _: FakeSink(arrived)).go_on()
    assert len(arrived) == 21, "20 and that it was added"
    assert cursor(ledger, "all").lease_owner is None


def test_what_no_rule_names_is_passed_without_a_word(ledger: Ledger) -> None:
    add(ledger, "quiet", (Rule(),))
    tell(ledger, 5)

    def never(_: SinkRecord) -> Sink:
        return FakeSink([], lambda: pytest.fail("it was told"))

    of(ledger, "quiet", never).go_on()
    with ledger.snapshot() as now:
        assert cursor(ledger, "quiet").sequence == now.sealed()
    assert cursor(ledger, "quiet").at is None


def test_a_failure_moves_nothing_and_backs_off(ledger: Ledger) -> None:
    add(ledger, "ill")
    tell(ledger, 12)
    clock: Any = ledger.clock
    arrived: list[Notice] = []
    left = [10]

    def trouble() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise SinkError("memory: is full")

    def opens(_: SinkRecord) -> Sink:
        return FakeSink(arrived, trouble)

    for tries, wait in enumerate(BACKOFF, 1):
        assert not of(ledger, "ill", opens).go_on()
        known = cursor(ledger, "ill")
        assert (known.failures, known.error, known.lease_owner) == (tries, "memory: is full", None)
        assert known.not_before == pytest.approx(clock.now() + wait)
        count = len(arrived)
        assert not of(ledger, "ill", opens).go_on(), "before its time nothing is tried"
        assert len(arrived) == count
        clock.sleep(wait)
    assert len(arrived) == 10
    left[0] = 100
    assert not of(ledger, "ill", opens).go_on()
    assert numbers(arrived) == [*range(8), *range(6, 12)], "the first batch of eight was whole: it is not sent again"
    known = cursor(ledger, "ill")
    assert (known.failures, known.error, known.failed_since, known.not_before) == (0, "", None, None)


def test_a_sink_that_fails_for_long_is_paused_and_others_are_told(ledger: Ledger) -> None:
    add(ledger, "ill")
    add(ledger, "well", (Rule(on=("sink-paused",)),))
    clock: Any = ledger.clock

    def opens(_: SinkRecord) -> Sink:
        return FakeSink([], lambda: (_ for _ in ()).throw(SinkError("memory: a secret place is full")))

    began = clock.now()
    while clock.now() - began < PATIENCE:
        of(ledger, "ill", opens).go_on()
        clock.sleep(BACKOFF[-1])
    of(ledger, "ill", opens).go_on()
    with ledger.snapshot() as now:
        assert now.sink("ill").paused == "failing"
    count = cursor(ledger, "ill").failures
    of(ledger, "ill", opens).go_on()
    assert cursor(ledger, "ill").failures == count, "nothing is tried any more"
    seal(ledger)
    arrived: list[Notice] = []
    of(ledger, "well", lambda _: FakeSink(arrived)).go_on()
    (said,) = arrived
    assert said.subject == "sink ill was paused"
    assert "secret place" not in json.dumps(said.body)
    with ledger.transaction("user:ann") as transaction:
        transaction.resume_sink("ill")
    found: list[Notice] = []
    of(ledger, "ill", lambda _: FakeSink(found)).go_on()
    assert found, "it goes on where it was"
    verify_rows(ledger)


def test_only_one_process_delivers_to_a_sink(ledger: Ledger) -> None:
    add(ledger, "one")
    tell(ledger, 1)
    first = Cursors(ledger, "here:1:1.0", lambda _: True)
    held = first.claim("one")
    assert held is not None
    assert Cursors(ledger, "there:2:1.0", lambda _: True).claim("one") is None
    assert Cursors(ledger, "here:2:1.0", lambda owner: owner != "here:1:1.0").claim("one") is not None, "it is dead"
    ledger.clock.sleep(LEASE_SECONDS + 1)
    taken = Cursors(ledger, "there:2:1.0", lambda _: True).claim("one")
    assert taken is not None
    with pytest.raises(ConflictError, match="another process"):
        first.move(held, 9, delivered=True, keep=False)
    assert cursor(ledger, "one").sequence == held.sequence


def test_a_sink_that_is_paused_removed_or_skipped_meanwhile_is_left_alone(ledger: Ledger) -> None:
    add(ledger, "one")
    tell(ledger, 3)
    arrived: list[Notice] = []
    known = of(ledger, "one", lambda _: FakeSink(arrived))
    with ledger.transaction("user:ann") as transaction:
        assert transaction.pause_sink("one", "person")
        assert not transaction.pause_sink("one", "person")
    assert not known.go_on()
    assert not arrived
    with ledger.snapshot() as now:
        end = now.sealed()
    with ledger.transaction("user:ann") as transaction:
        transaction.resume_sink("one", end)
    known.go_on()
    assert not arrived, "the backlog is skipped"
    with ledger.transaction("user:ann") as transaction:
        transaction.remove_sink("one")
    tell(ledger, 1)
    assert not known.go_on()
    assert not arrived
    with ledger.snapshot() as now, pytest.raises(NotFoundError, match="there is no sink 'one'"):
        now.sink("one")
    verify_rows(ledger)


def test_a_lost_cursor_doubles_and_loses_nothing(ledger: Ledger) -> None:
    tell(ledger, 4)
    add(ledger, "one")
    tell(ledger, 4, first=4)
    arrived: list[Notice] = []
    of(ledger, "one", lambda _: FakeSink(arrived)).go_on()
    with ledger.database.write(across="a test") as connection:
        connection.execute(cursors.delete())
    tell(ledger, 1, first=8)
    again: list[Notice] = []
    of(ledger, "one", lambda _: FakeSink(again)).go_on()
    assert numbers(again) == [4, 5, 6, 7, 8]
    assert [one.id for one in again][:4] == [one.id for one in arrived if one.body["type"] == "note.told"]


def test_an_edited_sink_is_found(ledger: Ledger) -> None:
    add(ledger, "chat", kind="webhook", url="https://example.org/a", secret_env="S")
    verify_rows(ledger)
    for values in ({"settings": {"url": "https://evil.example"}}, {"rules": {}}, {"paused": "person"}):
        with ledger.database.write(across="a test") as connection:
            before = connection.execute(sinks.select()).mappings().one()
            connection.execute(sinks.update().values(values))
        verify_chain(ledger)
        with pytest.raises(IntegrityError, match="sink chat: "):
            verify_rows(ledger)
        with ledger.database.write(across="a test") as connection:
            connection.execute(sinks.update().values({name: before[name] for name in values}))
    verify_rows(ledger)


def test_who_is_erased_is_not_in_a_sink_any_more(ledger: Ledger) -> None:
    both = (Rule(on=("run-failed",), owner="bob"), Rule(on=("run-ended",)))
    add(ledger, "mail", both, "email", to="bob@example.org", host="mail.example.org")
    with ledger.transaction("user:bob") as transaction:
        transaction.append_event("note.told", "x", {})
    erase_principal(ledger, "user:ann", "user:bob", "he left")
    seal(ledger)
    with ledger.snapshot() as now:
        found = now.sink("mail")
        said = json.dumps([[one.audited, one.words] for one in now.envelopes(0, 100, words=True)])
    assert found.settings == {"host": "mail.example.org"}
    assert found.rules == (Rule(on=("run-ended",)),), "a rule that named him is gone as a whole: it tells nothing more"
    assert "bob" not in said
    verify_chain(ledger)
    verify_rows(ledger)


def test_no_secret_and_no_setting_is_in_what_is_kept_for_ever(ledger: Ledger) -> None:
    add(ledger, "chat", (Rule(owner="ann"),), "webhook", url="https://example.org/path-of-ann", secret_env="S")
    with ledger.snapshot() as now:
        told = next(one for one in now.envelopes(0, 100, words=False) if one.kind == "sink.added")
    assert "path-of-ann" not in json.dumps(told.audited)
    assert '"ann"' not in json.dumps(told.audited)


@pytest.mark.slow
def test_a_long_backlog_is_delivered_in_bounded_memory(ledger: Ledger) -> None:
    many = 100_000 if "sqlite" in str(ledger.database.product()).lower() else 5_000
    add(ledger, "all")
    tell(ledger, many)
    read: list[int] = []
    count = [0]

    class Counting(FakeSink):
        most = 256

        def send(self, notices: Any) -> None:
            count[0] += sum(one.body["type"] == "note.told" for one in notices)
            read.append(len(notices))

    known = of(ledger, "all", lambda _: Counting([]))
    tracemalloc.start()
    while known.go_on():
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count[0] == many
    assert max(read) <= 256
    assert most < 32 << 20, f"{most} bytes for {many} events"


# --- beside other things ----------------------------------------------------------------------------------------------


def test_a_sink_that_hangs_holds_up_no_other_and_no_step(ledger_at: str) -> None:
    with work.opened(ledger_at) as ledger, receiver() as deaf:
        deaf.always = "hang"
        add(ledger, "deaf")
        add(ledger, "well")
        tell(ledger, 5)
        arrived: list[Notice] = []
        stuck, done = threading.Event(), threading.Event()

        class Hangs(FakeSink):
            def send(self, notices: Any) -> None:
                stuck.set()
                done.wait()

        class Tells(FakeSink):
            def send(self, notices: Any) -> None:
                stuck.wait()  # the other one hangs already
                super().send(notices)

        def opens(record: SinkRecord) -> Sink:
            return Hangs([]) if record.name == "deaf" else Tells(arrived)

        deliverer = Deliverer(ledger, opens, lambda _: "", "here:1:1.0", lambda _: True, "service:posttrain")
        while len(numbers(arrived)) < 5 or cursor(ledger, "well").lease_owner:
            assert deliverer.step() > 0
        assert cursor(ledger, "deaf").lease_owner.startswith("here:1:1.0")
        assert deliverer.behind
        with ledger.transaction("user:ann") as transaction:  # nothing of it is inside anybody's transaction
            transaction.append_event("note.told", "x", {"number": 5})
        done.set()
        deliverer.close()


class Stuck(FakeSink):
    """Hangs in its first sending until it is let go; takes one notice at a time."""

    most = 1
    began, goes_on = threading.Event(), threading.Event()

    def send(self, notices: Any) -> None:
        if not self.began.is_set():
            self.began.set()
            self.goes_on.wait()
        super().send(notices)


@pytest.mark.parametrize("again", ["resumed", "added again"])
def test_a_sink_that_is_changed_while_it_sends_is_told_everything_once_in_order(ledger: Ledger, again: str) -> None:
    """The delivery that hangs is another one's by then: it sends what it has begun, and moves nothing of the next."""
    add(ledger, "s")
    tell(ledger, 6)
    arrived: dict[str, list[Notice]] = {"/old": [], "/new": []}
    Stuck.began, Stuck.goes_on = threading.Event(), threading.Event()

    def opens(record: SinkRecord) -> Sink:
        return Stuck(arrived[str(record.settings.get("at", "/old"))])

    deliverer = Deliverer(ledger, opens, lambda _: "", "here:1:1.0", lambda _: True, "service:posttrain")
    deliverer.step()
    Stuck.began.wait()
    old = deliverer._loops["s"].thread
    assert old is not None
    with ledger.transaction("user:ann") as transaction:
        if again == "resumed":
            transaction.pause_sink("s", "person")
        else:
            transaction.remove_sink("s")
            transaction.add_sink(SinkRecord("s", "fake", {"at": "/new"}, EVERYTHING, 0.0, ""), 0)
    deliverer.step()
    if again == "resumed":
        with ledger.transaction("user:ann") as transaction:
            transaction.resume_sink("s")
    deliverer.step()
    Stuck.goes_on.set()
    old.join()
    while deliverer.step() and (deliverer.behind or cursor(ledger, "s").lease_owner):
        pass
    deliverer.close()
    if again == "resumed":
        assert numbers(arrived["/old"]) == list(range(6))
    else:
        assert len(arrived["/old"]) == 1, "what it had begun"
        assert numbers(arrived["/new"]) == list(range(6))


def test_a_delivery_that_ends_by_a_bug_is_begun_anew(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    add(ledger, "s")
    tell(ledger, 3)
    arrived: list[Notice] = []
    claim, left = Cursors.claim, [RuntimeError("a bug")]
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def once(self: Cursors, sink: str) -> Any:
        if left:
            raise left.pop()
        return claim(self, sink)

    monkeypatch.setattr(Cursors, "claim", once)
    deliverer = Deliverer(
        ledger, lambda _: FakeSink(arrived), lambda _: "", "here:1:1.0", lambda _: True, "service:posttrain"
    )
    while deliverer.step() and deliverer.behind:
        pass
    deliverer.close()
    assert numbers(arrived) == [0, 1, 2]


def test_a_look_is_one_statement_however_many_sinks_there_are(ledger: Ledger) -> None:
    for number in range(9):
        add(ledger, f"s{number}", (Rule(),))
    arrived: list[Notice] = []
    deliverer = Deliverer(
        ledger, lambda _: FakeSink(arrived), lambda _: "", "here:1:1.0", lambda _: True, "service:posttrain"
    )
    while deliverer.step() and deliverer.behind:
        pass
    said: list[str] = []
    engine = ledger.database._engine  # type: ignore[attr-defined]
    listening.listen(
        engine,
        "before_cursor_execute",
        lambda *a: said.append(a[2]) if threading.current_thread() is threading.main_thread() else None,
    )
    for _ in range(10):
        deliverer.step()
    deliverer.close()
    assert len([one for one in said if one.lstrip().upper().startswith("SELECT")]) == 10, said[:4]


DELIVER = """
import sys
from posttrain.events.bus import Deliveries, RunFacts
from posttrain.events.sinks.jsonl import JsonLinesSink
from posttrain.events.sinks.webhook import WebhookSink
from posttrain.execution.processes import process_alive, process_name
from posttrain.store.work import Cursors
from posttrain.store.database import Database
from posttrain.store.erasure import erase_principal
from posttrain.store.ledger import Ledger
import time

ledger = Ledger(Database(sys.argv[1]))
with ledger.snapshot() as now:
    record = now.sink(sys.argv[2])
opens = lambda one: JsonLinesSink(one.settings) if one.kind == "jsonl" else WebhookSink(one.settings, time.time)
known = Deliveries(Cursors(ledger, process_name(), process_alive), record, opens, RunFacts(ledger, str), "service:p")
while known.go_on():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webhook", "jsonl"])
def test_who_is_killed_between_sending_and_the_cursor_sends_again_and_loses_nothing(
    kind: str, ledger_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", SECRET)
    with work.opened(ledger_at) as ledger, receiver() as http:
        path = tmp_path / "events.jsonl"
        settings = (
            {"path": str(path)} if kind == "jsonl" else {"url": http.url, "secret_env": "POSTTRAIN_SINK_HOOK_SECRET"}
        )
        add(ledger, "out", kind=kind, **settings)
        tell(ledger, 6)

        def deliver(crash: str = "") -> int:
            environment = {**os.environ, **({"POSTTRAIN_CRASHPOINT": crash} if crash else {})}
            command = [sys.executable, "-c", DELIVER, ledger_at, "out"]
            return subprocess.run(command, check=False, env=environment).returncode

        kills = ("sink.after_send", "sink.after_send@3") if kind == "webhook" else ("sink.after_send",)
        for crash in kills:
            assert deliver(crash) == -9
        assert deliver() == 0
        found = arrived_at(http, path, kind)
        told = [ident for ident, number in found if number is not None]
        assert [number for ident, number in dict.fromkeys(found) if number is not None] == list(range(6))
        assert len(told) > len(set(told)) == 6, "what was sent before the kill came again, with the same id"


def arrived_at(http: Receiver, path: Path, kind: str) -> list[tuple[str, int | None]]:
    lines = path.read_bytes().splitlines() if kind == "jsonl" else [post.body for post in http.posts]
    bodies = [json.loads(line) for line in lines]
    return [(one["id"], one["audited"].get("number")) for one in bodies]
