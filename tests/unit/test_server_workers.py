"""Threads and workers of a server: how many wait for one, how long, and whose place stays when one ends."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from posttrain.domain.errors import BusyError, InfrastructureError, StoppedError
from posttrain.server import blobs, limits, workers
from posttrain.server.limits import HEAVY, MOST, READ, UPLOAD, in_thread
from posttrain.server.workers import IDLE_SECONDS, Asking, Workers, _Process

STARTING = 10.0  # seconds that a worker takes to start


class Processes:
    """Workers that answer at once, on a clock that moves when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.all, self.fails = 1000.0, list[Made](), list[Exception]()
        monkeypatch.setattr(workers, "_Process", self.started)
        monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: self.now))

    def started(self, root: Path, words: Any) -> Any:
        self.now += STARTING
        self.all.append(Made(self, len(self.all), self.now))
        return self.all[-1]


@dataclass(eq=False)
class Made:
    """One of them."""

    of: Processes
    id: int
    used: float
    alive: bool = True
    asked: list[float] = field(default_factory=list)

    def ask(self, line: bytes, seconds: float, told: Callable[[bytes], None]) -> tuple[bool, bytes]:
        self.asked.append(seconds)
        self.used = self.of.now
        if self.of.fails:
            raise self.of.fails.pop()
        return True, b"%d" % self.id

    def kill(self) -> None:
        self.alive = False

    def end(self) -> None:
        self.alive = False


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def asked(all_of: Workers, asking: Asking | None = None) -> bytes:
    return all_of.ask({}, "dead", {}, "r", asking or Asking(deadline=100.0))


def test_who_finds_no_worker_in_time_is_told_so(processes: Processes, tmp_path: Path) -> None:
    busy = Workers(tmp_path, most=0)
    looks = iter(range(2))

    def taken(timeout: float) -> Any:
        next(looks)  # raises when it is looked for on and on
        processes.now += 60.0
        raise queue.Empty

    busy._free.get = taken  # type: ignore[method-assign,assignment]
    with pytest.raises(BusyError):
        asked(busy)
    assert list(looks) == [], "it had 100 seconds, and was looked for until they were over"


def test_what_it_waited_for_a_worker_is_taken_off_a_requests_time(processes: Processes, tmp_path: Path) -> None:
    all_of = Workers(tmp_path, most=1)
    asked(all_of)
    asked(all_of)
    assert processes.all[0].asked == [100.0 - STARTING, 100.0]


def test_another_worker_takes_the_place_of_one_that_died(processes: Processes, tmp_path: Path) -> None:
    all_of = Workers(tmp_path, most=1)
    processes.fails.append(InfrastructureError("a worker of the server died"))
    with pytest.raises(InfrastructureError):
        asked(all_of)
    assert not processes.all[0].alive
    assert all_of._free.qsize() == 1
    assert asked(all_of) == b"1"


def test_workers_without_work_end_and_others_may_be_started(processes: Processes, tmp_path: Path) -> None:
    all_of = Workers(tmp_path, most=2)
    asked(all_of)
    processes.now += IDLE_SECONDS
    all_of.tidy()
    assert processes.all[0].alive
    processes.now += 1.0
    all_of.tidy()
    assert not processes.all[0].alive
    assert (all_of.ids()["worker"], all_of._free.qsize()) == ([], 2)
    assert asked(all_of) == b"1"


def test_the_worker_that_was_used_last_is_used_next(processes: Processes, tmp_path: Path) -> None:
    """So the others end when there is little to do."""
    all_of = Workers(tmp_path, most=2)
    one, other = processes.started(tmp_path, ()), processes.started(tmp_path, ())
    for _ in range(2):
        all_of._free.get_nowait()
    all_of._free.put(other)
    all_of._free.put(one)
    all_of.tidy()
    assert asked(all_of) == b"1"
    assert (len(one.asked), len(other.asked)) == (0, 1)


def test_a_request_that_was_cancelled_before_takes_no_worker(processes: Processes, tmp_path: Path) -> None:
    all_of, asking = Workers(tmp_path, most=1), Asking(deadline=100.0)
    asked(all_of)
    asking.end()
    with pytest.raises(StoppedError):
        asked(all_of, asking)
    assert processes.all[0].alive
    assert asked(all_of) == b"0"


@pytest.mark.parametrize("said", [b"", b"1 10\nshort", b"1 10\n"])
def test_an_answer_that_breaks_off_is_none(said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    process = SimpleNamespace(pid=1, poll=lambda: 0, wait=lambda: 0)
    monkeypatch.setattr(workers, "start", lambda *_: (process, ours))
    one = _Process(tmp_path, ())
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(InfrastructureError, match="a worker of the server died; try again"):
        one.ask(b"{}\n", 60.0, lambda _: None)
    one.end()
    theirs.close()


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """One thread of each kind, for which two of those who read may wait; set: they go on."""
    go = threading.Event()
    monkeypatch.setattr(limits, "_limits", {})
    monkeypatch.setattr(limits, "_THREADS", {READ: 1, UPLOAD: 1})
    monkeypatch.setattr(limits, "_WAITING", {READ: 2, UPLOAD: 0})
    yield go
    go.set()


def test_as_many_wait_for_a_thread_as_may_and_no_more(few: threading.Event) -> None:
    async def asks() -> list[bool]:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow() -> bool:
            loop.call_soon_threadsafe(begun.set)
            return few.wait()

        first = asyncio.ensure_future(in_thread(READ, slow))
        await begun.wait()
        waiting = [asyncio.ensure_future(in_thread(READ, few.wait)) for _ in range(2)]
        while limits._limits[READ].statistics().tasks_waiting < 2:
            await asyncio.sleep(0)
        more = asyncio.ensure_future(in_thread(READ, few.wait))
        while not more.done() and limits._limits[READ].statistics().tasks_waiting < 3:
            await asyncio.sleep(0)
        assert isinstance(more.exception() if more.done() else None, BusyError)
        few.set()
        return [await one for one in (first, *waiting)]

    assert asyncio.run(asks()) == [True] * 3


def test_who_waits_for_a_worker_is_told_that_the_server_ends(tmp_path: Path) -> None:
    busy, told = Workers(tmp_path, most=0), list[str]()

    def ask() -> None:
        with pytest.raises(InfrastructureError) as refused:
            asked(busy, Asking(deadline=1e6))
        told.append(str(refused.value))

    waiting = threading.Thread(target=ask)
    waiting.start()
    busy.close()
    waiting.join(100.0)
    assert told == ["the server is shutting down; try again"]


def test_a_worker_that_another_thread_has_collected_costs_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_START", "import sys; sys.stdin.read() #{} {}")
    own = Workers(tmp_path, most=1)
    with pytest.raises(InfrastructureError, match="died"):
        asked(own)
    process = _Process(tmp_path, ())
    os.kill(process.id, signal.SIGKILL)
    os.waitpid(process.id, 0)
    monkeypatch.setattr(_Process, "alive", True)  # as long as the thread that collects it holds Popen's lock
    process.end()
    assert own._free.get_nowait() is None


def test_a_child_that_does_not_read_its_environment_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", "import time; time.sleep(1000) #{} {}")
    monkeypatch.setattr(workers, "_HANDOVER", 0.2)
    for number in range(8):  # together more than a socket holds
        monkeypatch.setenv(f"BIG{number}", 100_000 * "x")
    with pytest.raises(InfrastructureError, match="cannot be started"):
        asked(Workers(tmp_path, most=1))


class Sent:
    """The request of an upload of 40 MiB."""

    path_params: ClassVar = {"digest": "sha256:" + 64 * "0"}

    async def stream(self) -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(1 << 20)


def test_an_upload_that_finds_no_thread_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any) -> None:
        raise BusyError("the server is overloaded (upload); try again later")

    monkeypatch.setattr(blobs, "in_thread", refused)
    added: Any = blobs._added(Sent(), None, 0, 40 << 20)  # type: ignore[arg-type]
    with pytest.raises(BusyError):
        asyncio.run(asyncio.wait_for(added, 300.0))


def test_who_uploads_takes_no_thread_of_who_reads(few: threading.Event) -> None:
    async def asks() -> dict[str, int]:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow() -> bool:
            loop.call_soon_threadsafe(begun.set)
            return few.wait()

        await in_thread(READ, int)
        await in_thread(UPLOAD, int)
        upload = asyncio.ensure_future(in_thread(UPLOAD, slow))
        await begun.wait()
        found = {lane: int(limit.borrowed_tokens) for lane, limit in limits._limits.items()}
        few.set()
        assert await upload
        return found

    assert asyncio.run(asks()) == {READ: 0, UPLOAD: 1}


def test_one_principal_never_has_all_threads_or_workers() -> None:
    for lane in MOST.keys() & limits._THREADS.keys():
        assert MOST[lane].running < limits._THREADS[lane], lane
    assert MOST[HEAVY].running < inspect.signature(Workers).parameters["most"].default
