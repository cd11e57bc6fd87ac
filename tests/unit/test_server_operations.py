"""What takes longer than a request is an operation: polled, cancelled, carried out once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_bench import KEY, Answer, ServerBench, served
from sqlalchemy import update

from posttrain.api.values import Answer as Said, Asked
from posttrain.client.blobs import Sender
from posttrain.client.transport import Transport
from posttrain.domain.errors import BusyError, InputError, StoppedError
from posttrain.domain.ids import Role
from posttrain.server import operations as server_operations
from posttrain.server.operations import KEPT_SECONDS, Once, Running, RunningOperations, asked_of, request_id
from posttrain.server.workers import Asking, Workers
from posttrain.store.ledger import Hosts
from posttrain.store.operations import BEAT_SECONDS, SILENT_SECONDS, IdempotencyKeys, Operations
from posttrain.store.schema import operations

P = "/v1/projects/default"
LIVES = "elsewhere:1:1.00"  # a server of another machine
ROWS = "".join(json.dumps({"prompt": f"{n}", "completion": "x"}) + "\n" for n in range(20))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("ann", Role.ADMIN)
        made.person("ben", Role.ADMIN)
        yield made


class Held:
    """A worker that answers when it is let, or is ended."""

    def __init__(self, bench: ServerBench) -> None:
        self.begun, self.go, self.asked = threading.Semaphore(0), threading.Event(), list[Asking]()
        self._real = bench.workers.ask
        bench.workers.ask = self.ask  # type: ignore[method-assign]

    def ask(
        self, asker: Mapping[str, Any], verb: str, sent: Mapping[str, Any], request: str, asking: Asking | None = None
    ) -> bytes:
        assert asking is not None
        self.asked.append(asking)
        asking.told(b'{"kind": "progress", "value": "row 7"}')
        self.begun.release()
        while not self.go.is_set():
            if asking.over:
                raise StoppedError("cancelled")
        return self._real(asker, verb, sent, request, asking)


def adding(bench: ServerBench, name: str = "rows") -> dict[str, Any]:
    digest = Sender(Transport(bench.url, KEY), "default").put(ROWS.encode())
    return {"path": {"name": "rows.jsonl", "digest": digest, "form": "file"}, "name": name}


def begin(bench: ServerBench, body: Any, token: str = KEY, key: str = "key-of-a-long-one", wait: int = 0) -> Answer:
    headers = {"prefer": f"respond-async, wait={wait}", "idempotency-key": key}
    return bench.ask("POST", f"{P}/assets/datasets", token, body, headers)


def until(bench: ServerBench, place: str, state: str, token: str = KEY) -> Any:
    while True:
        found = bench.ask("GET", place, token).json
        if found["state"] == state:
            return found
        assert found["state"] == "running", found


def test_what_takes_long_is_polled(bench: ServerBench) -> None:
    held = Held(bench)
    first = begin(bench, adding(bench))
    assert first.status == 202
    place = first.headers["location"]
    assert place.startswith(f"{P}/operations/")
    held.begun.acquire()
    found = bench.ask("GET", place).json
    assert (found["verb"], found["state"], found["progress"]) == ("add_dataset", "running", "row 7")
    assert "answer" not in found
    held.go.set()
    done = until(bench, place, "succeeded")
    assert (done["answer"]["name"], done["answer"]["meta"]["rows"]) == ("rows", 20)
    assert done["answer"]["digest"] == bench.control(KEY).asset("dataset:rows").digest


def test_what_is_short_is_answered_at_once(bench: ServerBench) -> None:
    found = begin(bench, adding(bench), wait=30)
    assert (found.status, found.json["name"]) == (200, "rows")
    server = bench.app.state.server
    assert not server.running._all
    refused = begin(bench, {**adding(bench), "name": "../x"}, key="another-key", wait=30)
    assert (refused.status, refused.json["type"]) == (422, "urn:posttrain:problem:input")


def test_an_error_is_a_problem_of_the_operation(bench: ServerBench) -> None:
    held = Held(bench)
    place = begin(bench, {**adding(bench), "name": "../x"}).headers["location"]
    held.go.set()
    found = until(bench, place, "failed")
    assert (found["problem"]["status"], found["problem"]["type"]) == (422, "urn:posttrain:problem:input")


def test_asked_again_with_its_key_it_is_the_same_operation(bench: ServerBench) -> None:
    held, body = Held(bench), adding(bench)
    first, again = begin(bench, body), begin(bench, body)
    assert (again.status, again.headers["location"]) == (202, first.headers["location"])
    held.go.set()
    until(bench, first.headers["location"], "succeeded")
    assert len(held.asked) == 1
    bench.app.state.server.running._all.clear()  # as a server that was started again
    third = begin(bench, body, wait=30)
    assert (third.status, third.json["version"]) == (200, 1)
    assert len(held.asked) == 1


def test_cancelled_it_has_done_nothing(bench: ServerBench) -> None:
    held = Held(bench)
    place = begin(bench, adding(bench)).headers["location"]
    held.begun.acquire()
    ended = bench.ask("DELETE", place).json
    assert (ended["state"], ended["problem"]["type"]) == ("cancelled", "urn:posttrain:problem:stopped")
    assert bench.ask("DELETE", place).json["state"] == "cancelled"
    assert bench.control(KEY).assets("dataset") == []


@pytest.mark.slow
def test_nobody_looks_any_more_so_it_ends(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.operations.LEFT_SECONDS", -1.0)
    held = Held(bench)
    begin(bench, adding(bench))
    held.begun.acquire()
    while not held.asked[0].over:
        time.sleep(0.01)
    assert bench.control(KEY).assets("dataset") == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_operation_of_others_is_absent(bench: ServerBench, method: str) -> None:
    held = Held(bench)
    place = begin(bench, adding(bench)).headers["location"]
    held.begun.acquire()
    number = place.rpartition("/")[2]
    bench.person("eve", Role.ADMIN, "b")
    for token, path in ((bench.tokens["ben"], P), (bench.tokens["eve"], "/v1/projects/b")):
        found = [bench.ask(method, f"{path}/operations/{one}", token) for one in (number, "0" * len(number))]
        assert [one.status for one in found] == [404, 404]
        assert len({one.json["detail"].replace(number, "0" * len(number)) for one in found}) == 1
    assert not held.asked[0].over
    held.go.set()


class Other:
    """Another server of the ledger, on another machine, that carries something out for ann."""

    def __init__(self, bench: ServerBench) -> None:
        ledger = bench.workspace.ledger
        self.known = Operations(ledger.database, ledger.clock, LIVES, lambda _: True)
        with ledger.snapshot() as now:
            self.mine = ("default", str(now.principal_of("user:ann")))
        self._hosts = Hosts(ledger.database, ledger.clock, "h" * 32, "elsewhere:/x")
        self._hosts.announce("", LIVES)
        self.number, self.database = "f" * 26, ledger.database
        self.known.begin(self.number, *self.mine, "add_dataset", "sha256:x", '{"state": "running"}')

    def restart(self) -> None:
        self._hosts.announce("", "elsewhere:2:2.00")

    def be_silent(self, seconds: float = 61.0) -> None:
        with self.database.write(across="a test") as connection:
            connection.execute(update(operations).values(told_at=operations.c.told_at - seconds))


@pytest.fixture
def ann(bench: ServerBench) -> Callable[..., Answer]:
    def ask(method: str, number: str) -> Answer:
        return bench.ask(method, f"{P}/operations/{number}", bench.tokens["ann"])

    return ask


def test_how_one_stands_elsewhere_and_that_somebody_looks(bench: ServerBench, ann: Callable[..., Answer]) -> None:
    other = Other(bench)
    with other.database.write(across="a test") as connection:
        connection.execute(update(operations).values(looked_at=operations.c.looked_at - 1000))
    other.known.tell(other.number, '{"state": "running", "progress": "row 8"}', over=False)
    assert other.known.heard(other.number)[0] >= 1000
    assert ann("GET", other.number).json["progress"] == "row 8"
    ago, ending = other.known.heard(other.number)
    assert (ago < 1000, ending) == (True, False)
    other.known.tell(other.number, '{"state": "succeeded", "answer": 1}', over=True)
    other.be_silent()
    other.restart()
    assert ann("GET", other.number).json["answer"] == 1, "what came of it is told though its server is gone"
    assert ann("DELETE", other.number).json["answer"] == 1


def test_how_long_one_takes_elsewhere_is_told_though_nothing_new_is(
    bench: ServerBench, ann: Callable[..., Answer]
) -> None:
    other = Other(bench)
    other.known.tell(other.number, '{"state": "running", "seconds": 100.0}', over=False)
    other.be_silent(40)
    assert ann("GET", other.number).json["seconds"] >= 140
    other.known.tell(other.number, '{"state": "succeeded", "seconds": 150.0}', over=True)
    other.be_silent(40)
    assert ann("GET", other.number).json["seconds"] == 150


class Counted:
    """What a server writes and reads of its operations."""

    def __init__(self, known: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told, self.heard, self._real = list[bool](), 0, (known.tell, known.heard)
        monkeypatch.setattr(known, "tell", self.tell)
        monkeypatch.setattr(known, "heard", self.hear)

    def tell(self, number: str, document: str, *, over: bool) -> None:
        self.told.append(over)
        self._real[0](number, document, over=over)

    def hear(self, number: str) -> tuple[float, bool]:
        self.heard += 1
        return self._real[1](number)

    def looked(self, times: int) -> None:
        until = self.heard + times
        while self.heard < until:
            time.sleep(0.01)


def test_what_changes_is_written_and_nothing_else(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.operations._LOOK", 0.01)
    monkeypatch.setattr("posttrain.server.operations.BEAT_SECONDS", 1e9)
    held, server = Held(bench), bench.app.state.server
    counted = Counted(server.operations, monkeypatch)
    place = begin(bench, adding(bench)).headers["location"]
    held.begun.acquire()
    counted.looked(5)
    before = len(counted.told)
    assert before <= 1, "what its worker said when it began"
    counted.looked(5)
    assert len(counted.told) == before
    held.asked[0].told(b'{"kind": "progress", "value": "row 9"}')
    counted.looked(5)
    assert len(counted.told) == before + 1
    held.go.set()
    until(bench, place, "succeeded")
    while not counted.told[-1]:
        time.sleep(0.01)
    assert len(counted.told) == before + 2


def test_that_a_server_lives_is_written_often_enough(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 3 * BEAT_SECONDS < SILENT_SECONDS, "a beat may be late, or fail, and nobody takes it for gone"
    monkeypatch.setattr("posttrain.server.operations._LOOK", 0.01)
    monkeypatch.setattr("posttrain.server.operations.BEAT_SECONDS", 0.0)
    held, server = Held(bench), bench.app.state.server
    counted = Counted(server.operations, monkeypatch)
    begin(bench, adding(bench))
    counted.looked(5)
    assert len(counted.told) >= 4
    held.go.set()


USED = "must be new for a different request"


def test_a_key_is_no_other_requests_while_it_is_carried_out(bench: ServerBench) -> None:
    held, body = Held(bench), adding(bench)
    first = begin(bench, body)
    held.begun.acquire()
    other = begin(bench, {**body, "name": "others"})
    assert (other.status, other.json["type"]) == (422, "urn:posttrain:problem:input")
    assert USED in other.json["detail"]
    held.go.set()
    assert until(bench, first.headers["location"], "succeeded")["answer"]["name"] == "rows"
    assert [one.name for one in bench.control(KEY).assets("dataset")] == ["rows"]


def test_a_key_is_no_other_requests_while_another_server_carries_it_out(
    bench: ServerBench, ann: Callable[..., Answer]
) -> None:
    other = Other(bench)
    number = request_id("key-of-a-long-one", "default", "user:ann", os.urandom)
    document = '{"state": "running", "progress": "row 8"}'
    assert other.known.begin(number, *other.mine, "add_dataset", "sha256:x", document) is None
    refused = begin(bench, adding(bench), bench.tokens["ann"])
    assert (refused.status, refused.json["type"]) == (422, "urn:posttrain:problem:input")
    assert USED in refused.json["detail"]
    assert ann("GET", number).json["progress"] == "row 8"


@pytest.mark.parametrize("body", ["sha256:x", "sha256:y"])
def test_nobody_takes_the_place_of_a_server_that_lives(
    bench: ServerBench, ann: Callable[..., Answer], body: str
) -> None:
    """Two servers are asked at the same moment, and neither knows of the other yet."""
    other, known = Other(bench), bench.app.state.server.operations
    again = (other.number, *other.mine, "add_dataset", body, '{"state": "running", "progress": "mine"}')
    found = known.begin(*again)
    assert found is not None
    assert (found.server, found.body) == (LIVES, "sha256:x")
    assert "progress" not in ann("GET", other.number).json
    other.be_silent()
    assert known.begin(*again) is None, "a minute without a word: it is gone"


def test_another_request_with_the_key_that_comes_too_late_to_be_seen_is_ended(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server says of its operation after this one has looked, and before it says of its own."""
    other, held, body = Other(bench), Held(bench), adding(bench)
    number = request_id("key-of-a-long-one", "default", "user:ann", os.urandom)
    real = RunningOperations.share

    async def later(self: RunningOperations, one: Running, principal: str) -> None:
        other.known.begin(number, *other.mine, "add_dataset", "sha256:x", '{"state": "running"}')
        await real(self, one, principal)

    monkeypatch.setattr(RunningOperations, "share", later)
    refused = begin(bench, body, bench.tokens["ann"])
    assert (refused.status, USED in refused.json["detail"]) == (422, True)
    held.begun.acquire()
    while not held.asked[0].over:
        time.sleep(0.01)
    assert bench.control(KEY).assets("dataset") == []


def test_of_two_servers_that_are_asked_the_same_the_one_that_does_it_tells(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one finds that another one answers it: nobody is told that it failed, and whoever asks again may wait."""
    other, body, go = Other(bench), adding(bench), threading.Event()
    ledger = bench.workspace.ledger
    IdempotencyKeys(ledger, other.mine[1]).begin(
        "key-of-a-long-one", "add_dataset", asked_of("add_dataset", body), LIVES
    )
    real = Once.answer

    def later(self: Once, *words: Any) -> tuple[int, bytes]:
        go.wait()
        return real(self, *words)

    monkeypatch.setattr(Once, "answer", later)
    place = begin(bench, body, bench.tokens["ann"]).headers["location"]
    go.set()
    while (found := bench.ask("GET", place, bench.tokens["ann"])).status == 200:
        assert found.json["state"] == "running"
    assert (found.status, found.json["type"]) == (404, "urn:posttrain:problem:not-found")
    assert "repeat the request with its Idempotency-Key" in found.json["detail"]
    again = begin(bench, body, bench.tokens["ann"], wait=30)
    assert (again.status, again.json["type"]) == (503, "urn:posttrain:problem:later")


@pytest.mark.parametrize("how", [Other.be_silent, Other.restart])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_that_a_server_is_gone_is_one_problem(
    bench: ServerBench, ann: Callable[..., Answer], method: str, how: Callable[[Other], None]
) -> None:
    other = Other(bench)
    assert ann("GET", other.number).json["state"] == "running"
    how(other)
    answer = ann(method, other.number)
    assert (answer.status, answer.json["type"]) == (404, "urn:posttrain:problem:lost-operation")
    assert "send the request again with the same Idempotency-Key" in answer.json["detail"]
    stranger = bench.ask(method, f"{P}/operations/{other.number}", bench.tokens["ben"])
    assert stranger.json["type"] == "urn:posttrain:problem:not-found"


@pytest.mark.parametrize("number", ["%00", "x" * 300, "%ff", "F" * 26])
def test_what_is_no_id_is_refused_and_what_nobody_has_is_absent(ann: Callable[..., Answer], number: str) -> None:
    assert {ann(method, number).status for method in ("GET", "DELETE")} == {404 if number == "F" * 26 else 422}


@pytest.mark.slow
def test_one_that_is_cancelled_elsewhere_ends(bench: ServerBench) -> None:
    held = Held(bench)
    place = begin(bench, adding(bench), bench.tokens["ann"]).headers["location"]
    held.begun.acquire()
    other = Other(bench)
    other.known.cancel(place.rpartition("/")[2], *other.mine)
    found = until(bench, place, "cancelled", bench.tokens["ann"])
    assert found["problem"]["type"] == "urn:posttrain:problem:stopped"
    assert bench.control(KEY).assets("dataset") == []


@pytest.mark.slow
def test_a_look_elsewhere_is_a_look(bench: ServerBench) -> None:
    held = Held(bench)
    number = begin(bench, adding(bench), bench.tokens["ann"]).headers["location"].rpartition("/")[2]
    held.begun.acquire()
    running = bench.app.state.server.running._all[number]
    running.looked -= 50.0
    before = running.looked
    other = Other(bench)
    other.known.find(number, *other.mine)
    while running.looked == before:
        time.sleep(0.01)
    held.go.set()


def test_what_came_of_one_is_not_kept_for_ever(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.operations.KEPT_SECONDS", -1.0)
    known: RunningOperations = bench.app.state.server.running
    held = Held(bench)
    begin(bench, adding(bench))
    held.go.set()
    while known._all:
        time.sleep(0.01)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that moves when told; a server keeps three operations, and looks at them all the time."""
    monkeypatch.setattr(server_operations, "MOST", 3)
    monkeypatch.setattr(server_operations, "_LOOK", 0.0)
    now = SimpleNamespace(at=1000.0)
    monkeypatch.setattr(server_operations, "time", SimpleNamespace(monotonic=lambda: now.at))
    return now


WHO: Any = SimpleNamespace(project="default", identity=SimpleNamespace(principal="user:ann"))


def test_the_operation_that_ended_first_makes_room(alone: Any) -> None:
    async def goes(known: RunningOperations) -> list[str]:
        seen = []
        ends = {name: asyncio.Event() for name in "abcde"}

        def begin(name: str) -> Running:
            async def carry(asking: Asking) -> bytes:
                await ends[name].wait()
                return b"1"

            found = known.begin(WHO, name, "add_dataset", name, carry)
            seen.append("".join(sorted(known._all)))
            return found

        async def end(one: Running) -> None:
            alone.at += 1.0
            ends[one.id].set()
            while one.ended is None:
                await asyncio.sleep(0)

        first, second, _ = begin("a"), begin("b"), begin("c")
        with pytest.raises(BusyError, match="carries out 3 operations"):
            begin("d")
        await end(second)
        await end(first)
        begin("d")
        begin("e")
        for task in (*known._watches, *(one.task for one in known._all.values())):
            task.cancel()
        return seen

    known = RunningOperations(None)  # type: ignore[arg-type]
    assert asyncio.run(goes(known)) == ["a", "ab", "abc", "acd", "cde"]


def test_what_came_of_one_is_kept_from_the_last_look_on(alone: Any) -> None:
    async def goes(known: RunningOperations) -> list[bool]:
        async def carry(asking: Asking) -> bytes:
            return b"1"

        async def kept() -> bool:
            for _ in range(20):
                await asyncio.sleep(0)
            return known.carries_out("a")

        known.begin(WHO, "a", "add_dataset", "a", carry)
        found = [await kept()]
        alone.at += KEPT_SECONDS - 1.0
        assert known.find("a", "user:ann", "default") is not None
        alone.at += KEPT_SECONDS - 1.0
        found.append(await kept())
        alone.at += 1.0
        return [*found, await kept()]

    assert asyncio.run(goes(RunningOperations(None))) == [True, True, False]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("respond-async", 10.0),
        ("respond-async, wait=0", 0.0),
        ("wait=29, respond-async", 29.0),
        ("respond-async, wait=9999", 30.0),
        ("wait=5", None),
        ("", None),
    ],
)
def test_a_request_waits_as_it_says_and_not_for_ever(said: str, seconds: float | None) -> None:
    asked: Any = SimpleNamespace(headers={"prefer": said})
    assert server_operations.wait_of(asked) == seconds


def test_a_client_waits_and_a_server_may_be_another_one_meanwhile(
    bench: ServerBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.client.remote._PREFER", "respond-async, wait=0")
    monkeypatch.setattr("posttrain.client.remote._TELL", 0.0)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    held, done = Held(bench), list[Any]()
    path = tmp_path / "rows.jsonl"
    thread = threading.Thread(target=lambda: done.append(bench.control(KEY).add_dataset(path, "mine")))
    thread.start()
    held.begun.acquire()
    bench.app.state.server.running._all.clear()  # the client finds none, and asks again with its key
    held.go.set()
    thread.join()
    assert (done[0].ref, len(held.asked)) == ("dataset:mine@1", 1)
    assert bench.control(KEY).add_dataset(path, "mine") == done[0]
    with pytest.raises(InputError):
        bench.control(KEY).add_dataset(path, "No Name")


@pytest.mark.slow
def test_a_worker_that_is_ended_is_gone_and_another_one_answers(tmp_path: Path) -> None:
    from posttrain.app.workspace import init_workspace

    workspace = init_workspace(tmp_path)
    workers, asking = Workers(workspace.root), Asking()
    asker = {"principal": workspace.actor, "auth": "os", "scopes": None, "in": "default"}
    found = list[BaseException]()

    def ask() -> None:
        try:
            workers.ask(asker, "dead", {}, "r" * 26, asking)
        except StoppedError as error:
            found.append(error)

    try:
        body = json.loads(workers.ask(asker, "dead", {}, "r" * 26))
        assert body["items"] == []
        (process,) = workers.ids()["worker"]
        os.kill(process, signal.SIGSTOP)  # it takes for ever
        thread = threading.Thread(target=ask)
        thread.start()
        while asking._kill is None:
            time.sleep(0.01)
        asking.end()
        thread.join()
        assert "was cancelled" in str(found[0])
        assert json.loads(workers.ask(asker, "dead", {}, "r" * 26)) == body
        assert process not in workers.ids()["worker"]
        with pytest.raises(StoppedError):
            workers.ask(asker, "dead", {}, "r" * 26, asking)
    finally:
        workers.close()
        workspace.close()


# --- answers of a model -----------------------------------------------------------------------------------------------


def said(number: int) -> Said:
    return Said(0, number, f"text {number}", 2, False, -0.5)


def asked(monkeypatch: pytest.MonkeyPatch, answers: Callable[[], Iterator[Said | str]]) -> None:
    def ask(workspace: object, *_: Any, **__: Any) -> Asked:
        return Asked("model:x@1", "sha256:x", "text", "as it was", answers())

    monkeypatch.setattr("posttrain.app.models.ask", ask)


HOW: dict[str, Any] = {
    **{"samples": 2, "max_new_tokens": None, "temperature": 1.0, "seed": 1, "runtime": {}, "timeout": None},
    **{"chat": None, "system": None},
}


def test_answers_come_as_they_are_said(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def answers() -> Iterator[Said | str]:
        yield "a warning"
        yield said(1)
        go.wait()
        yield said(2)

    asked(monkeypatch, answers)
    found = bench.control(KEY).ask("x", ["hello"], **HOW)
    assert (found.name, found.form, found.why) == ("model:x@1", "text", "as it was")
    assert next(found.answers) == "a warning"
    assert next(found.answers) == said(1)
    assert not go.is_set()
    go.set()
    assert list(found.answers) == [said(2)]
    whole = bench.ask("POST", f"{P}/answers", KEY, {"model": "x", "prompts": ["hello"], **HOW}).json
    assert [one if isinstance(one, str) else one["text"] for one in whole["answers"]] == [
        "a warning",
        "text 1",
        "text 2",
    ]


def test_an_error_among_answers_is_that_error(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> Iterator[Said | str]:
        yield said(1)
        raise InputError("prompt 2: does not fit")

    asked(monkeypatch, answers)
    found = bench.control(KEY).ask("x", ["hello"], **HOW)
    assert next(found.answers) == said(1)
    with pytest.raises(InputError, match="does not fit"):
        next(found.answers)
    monkeypatch.undo()
    with pytest.raises(InputError):  # before the first: no such model
        bench.control(KEY).ask("nosuch", ["hello"], **HOW)


def test_whoever_leaves_ends_the_model(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(bench)
    held.go.set()
    go = threading.Event()

    def answers() -> Iterator[Said | str]:
        yield said(1)
        go.wait()
        yield from (said(number) for number in range(1000))

    asked(monkeypatch, answers)
    found = bench.control(KEY).ask("x", ["hello"], **HOW)
    assert next(found.answers) == said(1)
    found.answers.close()  # type: ignore[attr-defined]  # it is a generator
    began = time.monotonic()
    while not held.asked[-1].over:
        assert time.monotonic() - began < 300
        if not go.is_set():
            go.set()
