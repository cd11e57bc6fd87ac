"""Whoever keeps connections open, or sends half of something, keeps nobody else from an answer, and fills nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from console_bench import Browser
from server_bench import Answer, ServerBench, served
from starlette.types import Message

from posttrain.access.ports import Identity
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, SlowError
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.server import limits
from posttrain.server.connections import HEADER_SECONDS, MOST, Connection, Peers, Room, _ask, most_of, quiet
from posttrain.server.console import visits
from posttrain.server.limits import ADOPT, BODY, LOGIN, PASS_ON, UPLOAD, Most, timely, whole
from posttrain.store.grants import MOST as MOST_SESSIONS

P = "/v1/projects/default"
DIGEST = "sha256:" + "ab" * 32
PATIENCE = 300  # seconds that a test waits for what must come


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path) as made:
        made.person("ann", Role.ADMIN)
        made.person("ben", Role.ADMIN)
        yield made


def connect(bench: ServerBench) -> socket.socket:
    return socket.create_connection(("127.0.0.1", bench.port), timeout=PATIENCE)


def head(bench: ServerBench, method: str, path: str, name: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {bench.tokens[name]}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def rest_of(one: socket.socket) -> bytes:
    """All until the server ends the connection."""
    found = b""
    try:
        while piece := one.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def following(bench: ServerBench, name: str) -> socket.socket:
    """The connection of somebody who follows a run."""
    run = RunRecord("r-00000001", "r", digest_json(1), "pending", "ann", 1.0)
    with bench.workspace.ledger.transaction("user:ann") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    one = connect(bench)
    one.sendall(head(bench, "GET", f"{P}/runs/{run.id}/watch", name))
    assert b" 200 " in one.recv(4096)
    return one


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: 1\r\n"])
def test_a_connection_without_whole_headers_ends(
    bench: ServerBench, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.server.connections.HEADER_SECONDS", 0.2)
    with connect(bench) as one:
        one.sendall(sent)
        assert rest_of(one) == b""


def test_a_connection_has_time_for_an_answer_and_not_for_half_a_request_after_it(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, real = threading.Semaphore(0), threading.Event(), bench.workers.ask
    monkeypatch.setattr(bench.workers, "ask", lambda *words: (begun.release(), go.wait(), real(*words))[2])
    with connect(bench) as one:
        one.sendall(head(bench, "GET", f"{P}/lineage?target=x", "ann") + b"GET /hea")
        begun.acquire()
        assert [known._late for known in bench.room._known.values()] == [None], "it may take as long as it takes"
        monkeypatch.setattr("posttrain.server.connections.HEADER_SECONDS", 0.2)
        go.set()
        assert rest_of(one).startswith(b"HTTP/1.1 404")


def test_connections_of_nobody_make_room_for_others(bench: ServerBench) -> None:
    bench.room.most = 4
    follower = following(bench, "ann")
    silent = [connect(bench) for _ in range(3)]
    half = [*silent, connect(bench), connect(bench)]
    assert [rest_of(one) for one in half[:2]] == [b"", b""], "the oldest of nobody"
    assert bench.ask("GET", f"{P}/whoami", bench.tokens["ben"]).status == 200
    follower.setblocking(False)
    said = b"x"
    with suppress(BlockingIOError):  # the end of what was said; of what is closed it would be nothing
        while said:
            said = follower.recv(1 << 16)
    assert said
    for one in (follower, *half):
        one.close()


def test_who_is_known_is_not_put_out_by_who_is_not(bench: ServerBench) -> None:
    bench.room.most = 1
    follower = following(bench, "ann")
    with connect(bench) as one:
        assert rest_of(one) == b"", "there is no room, and nobody to make it"
    follower.close()
    while True:  # until it is known to have left
        try:
            if bench.ask("GET", "/healthz", None).status == 200:
                break
        except (ConnectionError, OSError):
            continue


def test_no_more_connections_than_files() -> None:
    assert [most_of(files) for files in (64, 512, 1024, 1 << 16)] == [32, 256, 768, MOST]
    words = (
        "import resource as r; from posttrain.server.connections import raise_files; "
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (300, min(hard, 900))); "
        "print(raise_files(), *r.getrlimit(r.RLIMIT_NOFILE))"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    wanted = str(900 if hard == resource.RLIM_INFINITY else min(hard, 900))
    assert said == [wanted] * 3


def test_a_lack_of_files_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    others: list[dict[str, Any]] = []
    handle, loop = quiet(lambda _, context: others.append(context)), asyncio.new_event_loop()
    loop.close()
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            handle(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    assert [one.getMessage() for one in caplog.records] == [
        "no connection can be accepted: Too many open files; see `ulimit -n` of the server"
    ]
    handle(loop, {"message": "another", "exception": ValueError()})
    assert [one["message"] for one in others] == ["another"]


# --- bodies -----------------------------------------------------------------------------------------------------------


def late(found: bytes) -> None:
    assert found.startswith(b"HTTP/1.1 408"), found[:200]
    told = json.loads(found.partition(b"\r\n\r\n")[2])
    assert (told["type"], told["retryable"]) == ("urn:posttrain:problem:slow", True)


def test_a_body_that_stops_ends_its_request(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.limits.PIECE_SECONDS", 0.2)
    with connect(bench) as one:
        one.sendall(head(bench, "PUT", f"{P}/members/user:x", "ann", "content-length: 20") + b'{"ro')
        late(rest_of(one))
    with connect(bench) as one:
        sizes = ("upload-offset: 0", "upload-length: 900000", "content-length: 900000")
        one.sendall(head(bench, "PATCH", f"{P}/blobs/{DIGEST}", "ann", *sizes) + b"12345" * 60_000)
        late(rest_of(one))
    kept = bench.ask("GET", f"{P}/blobs/{DIGEST}/state", bench.tokens["ann"]).json
    assert kept == {"held": False, "offset": 300_000}, "what had come is kept"
    assert not bench.limits._held


def test_a_body_that_never_ends_ends_its_request(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.limits.BODY_SECONDS", 0.2)
    with connect(bench) as one:
        one.sendall(head(bench, "PUT", f"{P}/members/user:x", "ann", "content-length: 20") + b'{"ro')
        late(rest_of(one))


@pytest.mark.parametrize("size", ["content-length: 1000000", "transfer-encoding: chunked"])
def test_bodies_of_one_are_counted_before_they_are_read(bench: ServerBench, size: str) -> None:
    bench.limits.most_bodies = 1_500_000
    small, large = b'{"role": "viewer"}', b'{"role": "viewer"}' + b" " * 1_000_000
    with connect(bench) as one:
        one.sendall(head(bench, "PUT", f"{P}/members/user:x", "ann", size))
        while ("user:ann", BODY) not in bench.limits._held:
            time.sleep(0.01)
        with connect(bench) as other:  # refused though nothing of it has come
            other.sendall(head(bench, "PUT", f"{P}/members/user:x", "ann", "content-length: 1000000"))
            assert other.recv(4096).startswith(b"HTTP/1.1 429")
        assert bench.ask("PUT", f"{P}/members/user:y", bench.tokens["ben"], large).status == 200
        assert (bench.ask("PUT", f"{P}/members/user:z", bench.tokens["ann"], small).status == 200) is ("length" in size)
    while bench.limits._held:
        time.sleep(0.01)
    assert bench.ask("PUT", f"{P}/members/user:x", bench.tokens["ann"], large).status == 200


# --- direct uploads ---------------------------------------------------------------------------------------------------


class Store:
    """One that adopts what it is let."""

    def __init__(self) -> None:
        self.begun, self.go, self.adopted = threading.Semaphore(0), threading.Event(), list[str]()

    def adopt(self, project: str, digest: str, size: int) -> None:
        self.begun.release()
        self.go.wait()
        self.adopted.append(digest)

    def upload(self, project: str, digest: str, size: int) -> Any:
        return SimpleNamespace(url="https://store.example/x", headers={})


def test_looking_at_direct_uploads_is_limited_and_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr("posttrain.server.blobs.open_direct", lambda url: store)
    with served(tmp_path) as bench:
        bench.person("ann", Role.ADMIN)
        monkeypatch.setattr(bench.workspace.blobs, "has", lambda digest: digest in store.adopted)
        bench.limits.most[ADOPT] = Most(2, 3)
        found: list[Answer] = []
        ann = bench.tokens["ann"]

        def arrived(digest: str) -> None:
            found.append(bench.ask("POST", f"{P}/blobs/{digest}/arrived", ann, {"size": 10}))

        threads = [threading.Thread(target=arrived, args=(DIGEST,)) for _ in range(5)]
        try:
            for thread in threads:
                thread.start()
            store.begun.acquire()
            while len(found) < 2:  # beyond what may wait
                pass
            assert not store.begun.acquire(blocking=False), "one look at a digest at a time"
            assert [one.status for one in found] == [429, 429]
            assert limits._limits[UPLOAD].borrowed_tokens == 0, "no thread that inputs of jobs need"
        finally:
            store.go.set()
            for thread in threads:
                thread.join()
        assert sorted(one.status for one in found) == [200, 200, 200, 429, 429]
        assert store.adopted == [DIGEST]
        bench.limits.most[UPLOAD] = Most(1, 0)
        refused = bench.ask("POST", f"{P}/blobs/{DIGEST}/direct", ann, {"size": 10})
        assert refused.status == 429


# --- the console's door -----------------------------------------------------------------------------------------------


def test_sessions_of_one_token_are_few(bench: ServerBench) -> None:
    ann, first = bench.tokens["ann"], Browser(bench)
    first.log_in(ann)
    second = Browser(bench)
    second.log_in(ann)
    for _ in range(MOST_SESSIONS - 1):
        latest = Browser(bench)
        latest.log_in(ann)
    ben = Browser(bench)
    ben.log_in(bench.tokens["ben"])
    page = "/projects/default/runs"
    assert [one.get(page).status for one in (first, second, latest, ben)] == [303, 200, 200, 200]


def test_who_guesses_tokens_has_few_threads(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.limits.most[LOGIN] = Most(1, 1)
    begun, go, real = threading.Semaphore(0), threading.Event(), visits.log_in

    def slow(*words: Any) -> dict[str, str]:
        begun.release()
        go.wait()
        return real(*words)

    monkeypatch.setattr(visits, "log_in", slow)
    browser = Browser(bench)
    first = threading.Thread(target=browser.log_in, args=("posttrain_" + "x" * 43,))
    first.start()
    begun.acquire()
    try:
        assert Browser(bench).log_in("posttrain_" + "y" * 43).status == 429
    finally:
        go.set()
        first.join()
    assert Browser(bench).log_in(bench.tokens["ann"]).status == 303


def test_a_busy_server_says_so(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits._WAITING, limits.HEAVY, -1)
    monkeypatch.setattr("posttrain.server.limits._limits", {limits.HEAVY: SimpleNamespace(**Full)})
    found = bench.ask("GET", f"{P}/lineage?target=x", bench.tokens["ann"])
    assert (found.status, found.json["type"]) == (503, "urn:posttrain:problem:busy")
    assert found.json["title"] == "The server is overloaded; it did not run the request."
    assert "retry-after" in found.headers


Full = {"available_tokens": 0, "statistics": lambda: SimpleNamespace(tasks_waiting=0)}


# --- one by one -------------------------------------------------------------------------------------------------------


class Opened:
    """A socket of a descriptor."""

    def __init__(self, number: int) -> None:
        self.number, self.ended = number, False

    def fileno(self) -> int:
        return self.number

    def shutdown(self, how: int) -> None:
        self.ended = True


class Known:
    """A connection whose request was somebody's."""

    known = True


def test_who_has_the_descriptor_of_one_that_left_is_another() -> None:
    room: Any = Room(2)
    first, second, third, fourth, fifth = (Opened(number) for number in (5, 6, 5, 7, 8))
    before = Known()
    room.enter(first)
    room.begun(5, before)
    for one in (second, third, fourth):
        room.enter(one)
    assert [one.ended for one in (second, third, fourth)] == [True, False, False], "the oldest that is there"
    room.enter(fifth)
    assert [one.ended for one in (third, fourth, fifth)] == [True, False, False], "nobody's, whoever had it before"


def test_no_byte_puts_the_deadline_of_a_request_off() -> None:
    begun: list[float] = []

    def call_later(seconds: float, does: Any) -> Any:
        begun.append(seconds)
        return SimpleNamespace(cancel=does)

    loop = SimpleNamespace(call_later=call_later)
    transport = SimpleNamespace(is_closing=lambda: False, abort=lambda: None)
    one: Any = SimpleNamespace(transport=transport, cycle=None, _late=None, loop=loop)
    one._unset = lambda: Connection._unset(one)
    for _ in range(3):
        Connection._look(one)
    assert begun == [HEADER_SECONDS]
    one.cycle = SimpleNamespace(response_complete=False)
    Connection._look(one)
    assert one._late is None, "while it is answered there is none"
    one.cycle.response_complete = True
    Connection._look(one)
    assert begun == [HEADER_SECONDS] * 2


def sending(pieces: Iterable[bytes]) -> Any:
    """A request whose body comes in these pieces."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0)

    return SimpleNamespace(stream=stream)


def test_a_body_has_a_most_to_the_byte() -> None:
    assert asyncio.run(whole(sending([b"a" * 9, b"b"]), 10, "it")) == b"a" * 9 + b"b"
    with pytest.raises(InputError, match="it must have at most 10 bytes"):
        asyncio.run(whole(sending([b"a" * 9, b"bc"]), 10, "it"))


def test_a_body_must_come_whole_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something of it comes."""
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.0)
    with pytest.raises(SlowError, match="it must arrive within 0 s"):
        asyncio.run(whole(sending(b"" for _ in range(1000)), 10, "it"))


def test_who_has_sent_everything_may_wait_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PIECE_SECONDS", 0.0)

    async def receive() -> Message:
        if said:
            return said.pop()
        for _ in range(100):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def both() -> list[str]:
        received = timely(receive)
        return [(await received())["type"] for _ in range(2)]

    said: list[Message] = [{"type": "http.request", "more_body": False}]
    assert asyncio.run(both()) == ["http.request", "http.disconnect"]
    said = [{"type": "http.request", "more_body": True}]
    with pytest.raises(SlowError, match="no bytes of the request's body have arrived for 0 s"):
        asyncio.run(both())


HANGS = """
import signal, threading
from posttrain.server import service
service._END = 0.5
app = type("App", (), {"state": type("State", (), {})()})()
server = service.HttpServer(service.configured(app, service.Bind("127.0.0.1", 0), drain=0), service.Systemd({}))
signal.signal(signal.SIGTERM, server.handle_exit)
signal.raise_signal(signal.SIGTERM)
def held(lock):
    with lock:
        pass
lock = threading.Lock()
lock.acquire()
held(lock)
"""


def test_a_server_that_hangs_after_the_signal_to_end_prints_where_and_exits() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "in held" in done.stderr) == (1, True)


@pytest.mark.parametrize("kept", ["keep-alive", "close"])
def test_a_stream_of_a_lost_host_does_not_hold_up_the_end_of_a_server(kept: str) -> None:
    """The end cancels the request while a thread waits for the next piece."""
    begun = f"HTTP/1.1 200 OK\r\nconnection: {kept}\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n".encode()
    request: Any = SimpleNamespace(method="GET", headers={}, url=SimpleNamespace(query=""), scope={"raw_path": b"/"})
    over = threading.Event()

    def lost(listening: socket.socket) -> None:
        with listening.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(begun)
            over.wait(500.0)

    async def ends(url: str) -> list[bytes]:
        peers, who = Peers(None), Identity("user:ann", "token")
        peers._held[who.principal] += 1
        connection, answer = await asyncio.to_thread(_ask, url, request, b"", False)
        found = list[bytes]()

        async def passed_on() -> None:
            async for piece in peers._pieces(connection, answer, who):
                found.append(piece)

        task = asyncio.ensure_future(passed_on())
        while not found:
            await asyncio.sleep(0)
        while not limits._limits[PASS_ON].borrowed_tokens:  # a thread waits for the second piece, or soon will
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert not peers._held
        return found

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lost, args=(listening,), daemon=True).start()
        assert asyncio.run(ends(f"http://127.0.0.1:{listening.getsockname()[1]}")) == [b"one"]
        assert not over.is_set()
        over.set()
