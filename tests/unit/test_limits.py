"""Whoever asks much keeps themselves waiting, and nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from server_bench import Answer, ServerBench, served

from posttrain.client.transport import Transport
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import BusyError, LimitError
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.server import limits
from posttrain.server.limits import BODY, FOLLOW, HEAVY, LOOK, MOST, UPLOAD, Limits, Most
from posttrain.views import status

P = "/v1/projects/default"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path) as made:
        made.person("ann", Role.ADMIN)
        made.person("ben", Role.ADMIN)
        yield made


def refused(answer: Answer) -> bool:
    if answer.status != 429:
        return False
    assert answer.json["type"] == "urn:posttrain:problem:limit"
    assert (answer.headers["retry-after"], answer.json["retryable"]) == ("1", True)
    assert "posttrain_" not in answer.body.decode()
    return True


class Slow:
    """Workers that answer one of them when they are let."""

    def __init__(self, bench: ServerBench, name: str) -> None:
        self.name, self.begun, self.go = name, threading.Semaphore(0), threading.Event()
        self._real = bench.workers.ask
        bench.workers.ask = self.ask  # type: ignore[method-assign]

    def ask(self, asker: Mapping[str, Any], *words: Any) -> bytes:
        if asker["principal"] == self.name:
            self.begun.release()
            self.go.wait()
        return self._real(asker, *words)


def test_one_who_asks_for_much_takes_no_worker_from_others(bench: ServerBench) -> None:
    slow, found = Slow(bench, "user:ann"), list[Answer]()
    ann, ben = bench.tokens["ann"], bench.tokens["ben"]
    asked = MOST[HEAVY].known + 8  # more than the lane has threads

    def ask() -> None:
        found.append(bench.ask("GET", f"{P}/lineage?target=x", ann))

    threads = [threading.Thread(target=ask) for _ in range(asked)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(MOST[HEAVY].running):
            slow.begun.acquire()
        while len(found) < 8:  # those beyond what may wait are refused at once
            pass
        assert all(refused(one) for one in found)
        assert not slow.begun.acquire(blocking=False), "no more of them than may run"
        assert bench.ask("GET", f"{P}/lineage?target=x", ben).status == 404
        assert bench.ask("GET", f"{P}/whoami", ann).status == 200
    finally:
        slow.go.set()
        for thread in threads:
            thread.join()
    assert sorted(one.status for one in found) == [404] * MOST[HEAVY].known + [429] * 8
    assert not bench.limits._held


def test_a_client_waits_as_it_is_told(bench: ServerBench) -> None:
    bench.limits.most[HEAVY] = Most(1, 1)
    slow = Slow(bench, "user:ann")
    ann, done = bench.tokens["ann"], list[Any]()
    first = threading.Thread(target=bench.ask, args=("GET", f"{P}/lineage?target=x", ann))
    first.start()
    slow.begun.acquire()
    second = threading.Thread(target=lambda: done.append(bench.control(ann).dead(None)))
    second.start()
    assert refused(bench.ask("GET", f"{P}/lineage?target=x", ann))
    assert not done
    slow.go.set()
    first.join()
    second.join()
    assert done == [[]]


def test_followers_of_one_are_counted_until_they_leave(bench: ServerBench) -> None:
    bench.limits.most[FOLLOW] = Most(2, 2)
    run = RunRecord("r-00000001", "r", digest_json(1), "pending", "ann", 1.0)
    with bench.workspace.ledger.transaction("user:ann") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    path = f"{P}/runs/{run.id}/watch"
    head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bench.tokens['ann']}\r\n\r\n"
    followers = [socket.create_connection(("127.0.0.1", bench.port)) for _ in range(2)]
    for one in followers:
        one.sendall(head.encode())
        assert b"200" in one.recv(4096)
    assert refused(bench.ask("GET", path, bench.tokens["ann"]))
    with pytest.raises(LimitError):
        next(Transport(bench.url, bench.tokens["ann"]).stream(path))
    assert next(Transport(bench.url, bench.tokens["ben"]).stream(path))[0] == "status"
    for one in followers:
        one.close()
    while True:  # until they are known to have left
        try:
            assert next(Transport(bench.url, bench.tokens["ann"]).stream(path))[0] == "status"
        except LimitError:
            continue
        break


def test_bytes_of_uploads_of_one_are_counted(bench: ServerBench) -> None:
    bench.limits.most_bytes = 1_000_000
    digest = "sha256:" + "ab" * 32
    head = f"PATCH {P}/blobs/{digest} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bench.tokens['ann']}\r\n"
    sizes = {"upload-offset": "0", "upload-length": "900000"}
    with socket.create_connection(("127.0.0.1", bench.port)) as one:
        one.sendall(f"{head}upload-offset: 0\r\nupload-length: 900000\r\ncontent-length: 900000\r\n\r\n1".encode())
        while ("user:ann", UPLOAD) not in bench.limits._held:
            time.sleep(0.01)
        other = "sha256:" + "cd" * 32
        assert refused(bench.ask("PATCH", f"{P}/blobs/{other}", bench.tokens["ann"], b"x" * 300_000, sizes))
        sent = bench.ask("PATCH", f"{P}/blobs/{other}", bench.tokens["ben"], b"x" * 300_000, sizes)
        assert sent.json == {"held": False, "offset": 300_000}
    while bench.limits._held:
        time.sleep(0.01)
    large = {"upload-offset": "0", "upload-length": "5000000"}
    sent = bench.ask("PATCH", f"{P}/blobs/{'sha256:' + 'ef' * 32}", bench.tokens["ann"], b"x" * 4_000_000, large)
    assert sent.json == {"held": False, "offset": 4_000_000}, "one alone may be as large as it likes"


def test_audit_24_requests_that_ended_give_their_bytes_and_places_back() -> None:
    """While another request of the principal goes on; the last one closes the account anyway."""
    limits = Limits({UPLOAD: Most(4, 3), BODY: Most(4, 3)}, most_bytes=100, most_bodies=50)

    async def begin(lane: str, size: int, name: str = "ann") -> Callable[[], Awaitable[None]]:
        """A request under way, in a task of its own; how it ends."""
        begun, over = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def go_on() -> None:
            try:
                async with limits.taken(name, lane, size):
                    begun.set_result(None)
                    await over.wait()
            except LimitError as error:
                begun.set_exception(error)

        async def end() -> None:
            over.set()
            await task

        task = asyncio.ensure_future(go_on())
        await begun
        return end

    async def uploads() -> None:
        first = await begin(UPLOAD, 10)
        for _ in range(3):
            await (await begin(UPLOAD, 90))()  # together exactly as many as may be
        with pytest.raises(LimitError, match="at most 100 bytes of uploads at the same time, got 91 more"):
            await begin(UPLOAD, 91)
        await (await begin(UPLOAD, 91, "ben"))()
        await (await begin(BODY, 50))()
        for _ in range(3):
            second, third = await begin(UPLOAD, 1), await begin(UPLOAD, 1)
            with pytest.raises(LimitError, match="may have at most 3 uploads at the same time; wait"):
                await begin(UPLOAD, 1)
            await second()
            await third()
        await first()
        first = await begin(BODY, 1)
        with pytest.raises(LimitError, match="at most 50 bytes of requests with a body at the same time, got 50 more"):
            await begin(BODY, 50)
        await first()
        await (await begin(UPLOAD, 1000))()  # one alone may be as large as it likes

    asyncio.run(uploads())
    assert not limits._held


def test_an_upload_that_does_not_say_its_size_weighs_what_may_wait_of_it(bench: ServerBench) -> None:
    digest = "sha256:" + "ab" * 32
    said = f"host: x\r\nauthorization: Bearer {bench.tokens['ann']}\r\nupload-offset: 0\r\nupload-length: 900000"
    with socket.create_connection(("127.0.0.1", bench.port)) as one:
        one.sendall(f"PATCH {P}/blobs/{digest} HTTP/1.1\r\n{said}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        while ("user:ann", UPLOAD) not in bench.limits._held:
            time.sleep(0.01)
        assert bench.limits._held["user:ann", UPLOAD].bytes == 16 << 20


@pytest.fixture
def held_up(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A database that answers no list until it is let."""
    go = threading.Event()
    real = status.read_newest

    def slow(*words: Any, **named: Any) -> Any:
        go.wait()
        return real(*words, **named)

    monkeypatch.setattr(status, "read_newest", slow)
    yield go
    go.set()


def lists(bench: ServerBench, count: int, answers: list[Answer], said: threading.Semaphore) -> list[threading.Thread]:
    def ask() -> None:
        answers.append(bench.ask("GET", f"{P}/runs?limit=100", bench.tokens["ann"]))
        said.release()

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_audit_33_looks_are_turned_away_and_a_stop_is_not(
    bench: ServerBench, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 lists at once those that neither run nor may wait are answered while nothing else is."""
    waiting, total = 5, 60
    monkeypatch.setitem(limits._WAITING, LOOK, waiting)
    monkeypatch.setitem(limits._PATIENCE, LOOK, 600.0)
    ledger = bench.workspace.ledger
    with ledger.transaction("user:ann") as transaction:
        run = RunRecord("r-00000001", "r", digest_json("r"), "running", "ann", 1.0)
        transaction.insert_run(run, [StageRecord(run.id, "sft", 0, "sft", "pending")])
    most = MOST[LOOK].running + waiting
    answers, said = list[Answer](), threading.Semaphore(0)
    threads = lists(bench, total, answers, said)
    for _ in range(total - most):
        assert said.acquire(timeout=300), "whoever is turned away hears so at once"
    for answer in list(answers):
        assert (answer.status, answer.json["type"]) == (503, "urn:posttrain:problem:busy")
        assert (answer.headers["retry-after"], answer.json["retryable"]) == ("1", True)
    assert bench.ask("GET", "/healthz", None).status == 200
    stopped = bench.ask("POST", f"{P}/runs/{run.id}/stop", bench.tokens["ann"])
    assert (stopped.status, ledger.run(run.id).desired) == (200, "stopped")
    held_up.set()
    for thread in threads:
        thread.join()
    statuses = [answer.status for answer in answers]
    assert len(statuses) == total
    assert set(statuses) == {200, 503}
    assert statuses.count(200) <= most
    assert 503 not in statuses[total - statuses.count(200) :], "first those that were turned away"


def test_audit_33_who_looks_waits_for_so_long_and_no_longer(
    bench: ServerBench, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits._PATIENCE[LOOK] <= 5.0
    monkeypatch.setitem(limits._PATIENCE, LOOK, 0.2)
    running = MOST[LOOK].running
    answers, said = list[Answer](), threading.Semaphore(0)
    threads = lists(bench, running + 10, answers, said)
    for _ in range(10):
        assert said.acquire(timeout=300), "nobody waits for the database longer than that"
    assert {(answer.status, answer.headers["retry-after"]) for answer in answers} == {(503, "1")}
    held_up.set()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers[10:]] == [200] * running


def test_audit_33_a_client_comes_again_when_it_was_told_to_and_not_for_ever(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, tries = list[float](), iter([True, True, False])
    real = status.read_newest

    def busy(*words: Any, **named: Any) -> Any:
        if next(tries, True):
            raise BusyError("the server is overloaded")
        return real(*words, **named)

    monkeypatch.setattr(status, "read_newest", busy)
    asking = threading.current_thread()  # the server's threads sleep too

    def sleep(seconds: float) -> None:
        if threading.current_thread() is asking:
            pauses.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    control = bench.control(bench.tokens["ann"])
    assert control.ls(5) == []
    assert pauses == [1.0, 1.0]
    monkeypatch.setattr("posttrain.client.transport.PATIENCE", 0.0)
    with pytest.raises(BusyError):
        control.ls(5)
