"""What every observer honours, over the worker process and the in-process fake; then what only a process can."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_bench import PATIENCE

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.sandbox.observer import ProcessObserver
from posttrain.sandbox.port import MAX_OBSERVED, ObserveError, Observer, RewardError, ScriptedObserver

SOURCE = textwrap.dedent('''
    """One observe that does what the row asks for."""
    import asyncio, gc, json, os, random, re, socket, sys, threading
    from pathlib import Path
    from unittest.mock import Mock

    MEETING = {}  # number of calls → the barrier at which so many calls meet
    marked, armed = threading.Event(), False
    running, most, lock = 0, 0, threading.Lock()

    def built(folder):
        return observe

    def observe(row, responses):
        return globals()[row["do"]](row, responses)

    def echo(row, responses):
        return f"{row['n']}: {' '.join(responses)}"

    async def waits(row, responses):
        await asyncio.sleep(0)
        return f"waited {row['n']}"

    def ends(row, responses):
        return None

    def raises(row, responses):
        raise ValueError("no\\nway")

    def through_a_library(row, responses):
        json.loads("{")

    def leaves(row, responses):
        sys.exit(0)

    def number(row, responses):
        return 5

    def mock(row, responses):
        return Mock(spec=str)

    def rude(row, responses):
        class Rude(Exception):
            def __str__(self):
                sys.exit(3)
        raise Rude

    def long(row, responses):
        return "\\x00" * row["n"]

    def meets(row, responses):
        with lock:
            barrier = MEETING.setdefault(row["n"], threading.Barrier(row["n"]))
        barrier.wait()
        return f"met {row['n']}"

    async def meets_async(row, responses):
        await asyncio.to_thread(meets, row, responses)
        return f"met {row['n']}"

    def counts(row, responses):
        global running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier = MEETING.setdefault(row["n"], threading.Barrier(row["n"]))
        barrier.wait()
        with lock:
            running -= 1
        return str(most)

    def mark(row, responses):
        marked.set()
        return "marked"

    def held(row, responses):  # never returns in a process in which `mark` was called
        if marked.is_set():
            threading.Event().wait()
        return f"free {row['n']}"

    def hangs(row, responses):
        threading.Event().wait()

    def holds_the_lock(row, responses):
        return re.match("(a+)+$", "a" * 60 + "b")

    def dies(row, responses):
        os._exit(3)

    def kills_itself(row, responses):
        os.kill(os.getpid(), 9)

    def dies_after_its_answer(row, responses):
        global armed
        armed = True
        threading.Thread(target=lambda: (marked.wait(), os._exit(7))).start()
        return "answered"

    def innocent(row, responses):  # runs while a call that has answered ends the process
        if armed:
            marked.set()
            threading.Event().wait()
        return "innocent"

    def begins_an_answer(row, responses):
        next(s for s in gc.get_objects() if isinstance(s, socket.socket) and s.fileno() >= 0).sendall(b"\\0")
        threading.Event().wait()

    def draws(row, responses):
        return str(random.random())

    def draws_with_torch(row, responses):
        import torch
        return str(float(torch.rand(1)))

    def names_its_thread(row, responses):
        return str(threading.current_thread() is threading.main_thread())

    def sends(row, responses):
        channel = next(s for s in gc.get_objects() if isinstance(s, socket.socket) and s.fileno() >= 0)
        data = json.dumps(row["message"]).encode()
        channel.sendall(row.get("length", len(data)).to_bytes(8, "big") + data)
        threading.Event().wait()

    def forks(row, responses):
        os.fork()
        return "forked"

    def reads(row, responses):
        return Path(row["path"]).read_text()

    def shows_its_environment(row, responses):
        found = json.dumps(dict(os.environ))
        for path in ("/proc/self/environ", "/proc/1/environ"):
            try:
                found += Path(path).read_text()
            except OSError:
                continue
        return found

    def connects(row, responses):
        socket.create_connection(("127.0.0.1", row["port"]), 10).close()
        return "connected"
''')
Opener = Callable[..., ProcessObserver]


def line_of(text: str) -> int:
    return SOURCE.split("\n").index(text) + 1


def ask(observer: Observer, do: str, n: Any = 0, *responses: str, **row: Any) -> Future[str | None]:
    return observer.begin({"do": do, "n": n, **row}, responses)


def seen(observer: Observer, do: str, n: Any = 0, *responses: str, **row: Any) -> str | None:
    return ask(observer, do, n, *responses, **row).result(PATIENCE)


def fault(answer: Future[str | None]) -> str:
    error = answer.exception(PATIENCE)
    assert isinstance(error, ObserveError), error
    return str(error)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    (tmp_path / "guess.py").write_text(SOURCE)
    made: list[ProcessObserver] = []

    def open_(concurrency: int = 1, timeout: float = PATIENCE, **options: Any) -> ProcessObserver:
        source = tmp_path / "guess.py"
        made.append(
            ProcessObserver("guess:built", {}, timeout=timeout, concurrency=concurrency, source=source, **options)
        )
        return made[-1]

    yield open_
    for one in made:
        one.close()


@pytest.fixture(params=["fake", "process", "8 at a time"])
def observer(
    request: pytest.FixtureRequest, tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> Observer:
    if request.param != "fake":
        return opened(8 if request.param == "8 at a time" else 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    return ScriptedObserver(importlib.import_module("guess").observe)


class TestEvery:
    def test_a_call_returns_its_own_text_in_any_order(self, observer: Observer) -> None:
        calls = [("echo", n, ["a"] * n) for n in range(20)]
        for order in (calls, calls[::-1]):
            found = [(n, said, ask(observer, do, n, *said)) for do, n, said in order]
            for n, said, answer in found[::-1]:
                assert answer.result(PATIENCE) == f"{n}: {' '.join(said)}"
        assert seen(observer, "ends") is None
        assert seen(observer, "waits", 3) == "waited 3"

    def test_a_failure_is_one_line_of_its_own_call(self, observer: Observer) -> None:
        answers = {do: ask(observer, do) for do in ("raises", "through_a_library", "leaves", "number", "mock", "rude")}
        answers |= {"long": ask(observer, "long", MAX_OBSERVED), "echo": ask(observer, "echo", 1, "x")}
        assert answers.pop("echo").result(PATIENCE) == "1: x"
        lines = {do: fault(answer) for do, answer in answers.items()}
        place = line_of('    raise ValueError("no\\nway")')
        where = f"observe (guess.py:{line_of('def observe(row, responses):')})"
        assert observer.where == where
        assert lines["raises"] == f"observe: guess.py:{place} raised ValueError: no way; fix it, or the row"
        place = line_of('    json.loads("{")')
        assert lines["through_a_library"].startswith(f"observe: guess.py:{place} raised JSONDecodeError: Expecting")
        assert "raised SystemExit: 0; fix it" in lines["leaves"]
        assert lines["number"] == f"{where} must return text or None, got int; fix it"
        assert lines["mock"] == f"{where} must return text or None, got Mock; fix it"
        assert "raised Rude: its text cannot be read; fix it" in lines["rude"]
        assert lines["long"].startswith(f"{where} must return at most {MAX_OBSERVED} bytes as JSON, got ")

    def test_a_text_of_the_longest_length_arrives(self, observer: Observer) -> None:
        longest = (MAX_OBSERVED - 2) // len("\\u0000")
        assert seen(observer, "long", longest) == "\x00" * longest

    def test_closed_it_takes_no_call(self, observer: Observer) -> None:
        for _ in range(2):
            observer.close()
        with pytest.raises(InputError, match="closed; open it again"):
            ask(observer, "echo")


class TestConcurrency:
    @pytest.mark.parametrize("do", ["meets", "meets_async"])
    def test_256_calls_run_at_the_same_time(self, opened: Opener, do: str) -> None:
        observer = opened(256)
        answers = [ask(observer, do, 256) for _ in range(256)]
        assert {answer.result(PATIENCE) for answer in answers} == {"met 256"}, "each waits for the 255 others"

    def test_no_more_calls_run_than_may(self, opened: Opener) -> None:
        observer = opened(3)
        answers = [ask(observer, "counts", 3) for _ in range(24)]
        assert {answer.result(PATIENCE) for answer in answers} == {"3"}

    def test_the_only_call_runs_in_the_main_thread_with_seeded_generators(self, opened: Opener) -> None:
        observer = opened(1)
        assert seen(observer, "names_its_thread") == "True"
        first = [seen(observer, "draws", n, "x") for n in (1, 2)]
        assert first[0] != first[1]
        assert [seen(observer, "draws", n, "x") for n in (2, 1)] == first[::-1]
        assert seen(observer, "draws", 1, "y") not in first
        seen(observer, "draws_with_torch", 1)  # imports it
        first = [seen(observer, "draws_with_torch", n) for n in (1, 2)]
        assert first[0] != first[1]
        assert [seen(observer, "draws_with_torch", n) for n in (2, 1)] == first[::-1]


def expire(observer: ProcessObserver, do: str, answer: Future[str | None]) -> None:
    """Let the deadline of a call pass, as often as it is called, until the call has ended."""
    until, last = threading.Event(), time.monotonic() + PATIENCE
    answer.add_done_callback(lambda _: until.set())
    while not until.is_set():
        assert time.monotonic() < last
        for call in list(observer._running.values()):
            if call.request["row"]["do"] == do:
                call.due = 0.0
                observer._notify()
        until.wait(0.05)


def running(observer: ProcessObserver, count: int) -> None:
    until = time.monotonic() + PATIENCE
    while len(observer._running) < count:
        assert time.monotonic() < until
        threading.Event().wait(0.02)


def worker_of(observer: ProcessObserver) -> psutil.Process | None:
    """The process that runs the user's code: the youngest of the cell's."""
    with suppress(psutil.NoSuchProcess):
        session = observer._session
        below = psutil.Process(session._process.pid).children(recursive=True) if session else []
        return below[-1] if below else None
    return None


class TestDeadline:
    def test_only_the_late_call_fails(self, opened: Opener) -> None:
        observer = opened(8)
        late = ask(observer, "hangs")
        assert seen(observer, "mark") == "marked"
        others = [ask(observer, "held", n) for n in range(4)]
        running(observer, 5)
        expire(observer, "hangs", late)
        assert fault(late) == (
            f"{observer.where} took longer than observe_timeout (300 s) and was killed; make it faster, or raise "
            "observe_timeout of the stage"
        )
        assert [answer.result(PATIENCE) for answer in others] == [f"free {n}" for n in range(4)]

    def test_the_time_of_a_call_begins_when_it_runs(self, opened: Opener) -> None:
        observer, before = opened(1), time.monotonic()
        late, waiting = ask(observer, "hangs"), ask(observer, "echo", 1)
        running(observer, 1)
        [call] = observer._running.values()
        assert before + PATIENCE <= call.due <= time.monotonic() + PATIENCE
        assert [queued.due for queued in observer._queue] == [math.inf]
        expire(observer, "hangs", late)
        assert waiting.result(PATIENCE) == "1: "

    @pytest.mark.parametrize("concurrency", [1, 2])
    def test_the_stages_time_ends_a_call(self, opened: Opener, concurrency: int) -> None:
        observer = opened(concurrency, timeout=0.5)
        answers = [ask(observer, "hangs") for _ in range(concurrency)]
        assert all("took longer than observe_timeout (0.5 s)" in fault(answer) for answer in answers)

    @pytest.mark.slow
    def test_a_call_that_holds_pythons_lock_fails_and_no_other(
        self, opened: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("posttrain.sandbox.observer.PING_TIMEOUT", 1.0)
        observer = opened(8)
        hog = ask(observer, "holds_the_lock")
        running(observer, 1)
        threading.Event().wait(0.5)
        others = [ask(observer, "echo", n) for n in range(4)]
        running(observer, 5)
        for call in observer._running.values():
            call.due = 0.0
        expire(observer, "holds_the_lock", hog)
        assert "took longer than observe_timeout" in fault(hog)
        assert [answer.result(PATIENCE) for answer in others] == [f"{n}: " for n in range(4)]


class TestEnded:
    def test_a_worker_killed_from_outside_is_started_again(self, opened: Opener) -> None:
        observer = opened(4)
        assert seen(observer, "mark") == "marked"
        answers = [ask(observer, "held", n) for n in range(6)]
        running(observer, 4)
        victim = worker_of(observer)
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        assert [answer.result(PATIENCE) for answer in answers] == [f"free {n}" for n in range(6)]

    def test_one_that_is_killed_again_and_again_is_no_fault_of_the_code(self, opened: Opener) -> None:
        observer = opened(2)
        answers = [ask(observer, "hangs") for _ in range(4)]
        killed = set[int]()
        while not all(answer.done() for answer in answers) and len(killed) < 19:
            victim = worker_of(observer)
            if victim and observer._running and victim.pid not in killed:
                killed.add(victim.pid)
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGKILL)
            threading.Event().wait(0.02)
        for answer in answers:
            assert isinstance(answer.exception(PATIENCE), InfrastructureError)
            assert "signal 9) instead of answering, 10 times in a row" in str(answer.exception())
        assert len(killed) >= 10, "another process of the dying cell may be hit too"
        with pytest.raises(InfrastructureError):
            ask(observer, "echo")

    def test_a_call_that_kills_its_process_fails_and_no_other(self, opened: Opener) -> None:
        observer = opened(8)
        assert seen(observer, "mark") == "marked"
        others = [ask(observer, "held", n) for n in range(3)]
        running(observer, 3)
        faults = [fault(ask(observer, "kills_itself")) for _ in range(2)]
        line = "3 times, each time alone; fix it or the row, or give the machine more memory"
        assert [one.rpartition(" instead of answering, ")[2] for one in faults] == [line] * 2
        assert [answer.result(PATIENCE) for answer in others] == [f"free {n}" for n in range(3)]

    @pytest.mark.parametrize("concurrency", [1, 8])
    def test_several_calls_that_kill_their_process_hold_up_nobody(self, opened: Opener, concurrency: int) -> None:
        """The samples of one bad row follow each other."""
        observer = opened(concurrency)
        bad = [ask(observer, "kills_itself") for _ in range(3)]
        good = [ask(observer, "echo", n) for n in range(3)]
        assert [answer.result(2 * PATIENCE) for answer in good] == [f"{n}: " for n in range(3)]
        assert all("each time alone" in fault(answer) for answer in bad)

    def test_the_call_that_ends_its_process_fails_and_no_other(self, opened: Opener) -> None:
        observer = opened(8)
        assert seen(observer, "mark") == "marked"
        others = [ask(observer, "held", n) for n in range(3)]
        running(observer, 3)
        faults = [fault(ask(observer, "dies")) for _ in range(2)]
        line = f"{observer.where} ended its process (exit code 3) instead of answering; fix it, or the row"
        assert faults == [line, line]
        assert [answer.result(PATIENCE) for answer in others] == [f"free {n}" for n in range(3)]

    def test_a_call_that_runs_alone_is_not_blamed_before_it_is_repeated(self, opened: Opener) -> None:
        observer = opened(2)
        assert seen(observer, "dies_after_its_answer") == "answered"
        assert seen(observer, "innocent") == "innocent"

    @pytest.mark.parametrize("others", [0, 2])
    def test_an_answer_that_does_not_end_holds_up_nobody(
        self, opened: Opener, monkeypatch: pytest.MonkeyPatch, others: int
    ) -> None:
        monkeypatch.setattr("posttrain.sandbox.observer.PING_TIMEOUT", 1.0)
        observer = opened(4)
        assert seen(observer, "mark") == "marked"
        waiting = [ask(observer, "held", n) for n in range(others)]  # no answer of theirs follows the one that begins
        running(observer, others)
        begun = ask(observer, "begins_an_answer")
        assert "did not end its answer within 1 s and was killed; fix it" in fault(begun)
        assert [answer.result(PATIENCE) for answer in waiting] == [f"free {n}" for n in range(others)]
        assert seen(observer, "echo", 7) == "7: "

    def test_closing_it_does_not_wait_for_the_rest_of_a_message(
        self, opened: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("posttrain.sandbox.observer.PING_TIMEOUT", 10 * PATIENCE)
        observer = opened(2)
        begun, closing = ask(observer, "begins_an_answer"), threading.Thread(target=observer.close)
        running(observer, 1)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert isinstance(begun.exception(PATIENCE), InputError)

    def test_closing_it_fails_the_running_calls_and_leaves_no_process(self, opened: Opener) -> None:
        observer = opened(2)
        answers = [ask(observer, "hangs") for _ in range(4)]
        running(observer, 2)
        victim, folder = worker_of(observer), observer._scratch.path
        assert victim is not None
        observer.close()
        for answer in answers:
            with pytest.raises(InputError, match="closed"):
                answer.result(PATIENCE)
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        assert not folder.exists()


class TestHostile:
    @pytest.mark.parametrize(
        ("message", "complaint"),
        [
            ({"id": 99, "seen": "x"}, "request 99 while request 2 was open"),
            ({"id": True, "seen": "x"}, "request True"),
            ({"id": 2, "seen": 5}, "an object of unknown shape"),
            ({"id": 2, "unseen": 5}, "a int where text is expected"),
            ({"id": 2, "end": True}, "with a message that is not an observation"),
            ({"id": 2, "answers": []}, "with a message that is not an observation"),
            ([2], "a list, expected a JSON object"),
        ],
    )
    def test_no_message_of_the_worker_is_trusted(self, opened: Opener, message: Any, complaint: str) -> None:
        observer = opened(2, name="observe of Guess")
        error = ask(observer, "sends", message=message).exception(PATIENCE)
        assert isinstance(error, RewardError)
        assert str(error).startswith("observe of Guess answered ")
        assert complaint in str(error)
        assert "must not write to its worker's socket" in str(error)
        with pytest.raises(RewardError):
            ask(observer, "echo")

    def test_no_message_is_too_long(self, opened: Opener) -> None:
        observer = opened(1)
        with pytest.raises(RewardError, match="message of 1152921504606846976 bytes is longer than"):
            seen(observer, "sends", message="", length=2**60)

    def test_a_fork_does_not_answer(self, opened: Opener) -> None:
        observer = opened(2)
        assert {seen(observer, "forks") for _ in range(4)} == {"forked"}
        assert seen(observer, "echo", 1) == "1: "

    def test_it_reaches_nothing_of_its_job(
        self, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        (tmp_path / "workspace").mkdir()
        (tmp_path / "workspace" / "ledger.db").write_text("hush-hush")
        observer = opened(1, hidden=[tmp_path / "workspace"], confined=True)
        for path in (tmp_path / "workspace" / "ledger.db", tmp_path / "guess.py"):
            assert "Error" in fault(ask(observer, "reads", path=str(path)))
        shown = seen(observer, "shows_its_environment")
        assert shown is not None
        assert json.loads(shown.partition("}")[0] + "}")["HOME"] != os.environ["HOME"]
        assert "hush-hush" not in shown
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert "Error" in fault(ask(observer, "connects", port=server.getsockname()[1]))
        assert observer.notes == () or "empty /proc" in observer.notes[0]

    def test_one_that_cannot_be_confined_is_refused(self, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = type("Bare", (), {"confined": False, "notes": ("no namespaces",), "close": lambda self: None})
        monkeypatch.setattr("posttrain.sandbox.observer.Session", lambda plan, log: bare())
        with pytest.raises(InputError, match="observe must be confined: no namespaces; allow user namespaces"):
            opened(confined=True)


class TestOpening:
    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("raise ValueError('not today')", "ValueError: not today while it was constructed"),
            ("def built(folder):\n    open('/nowhere')\n", "FileNotFoundError: .* while it was constructed"),
            ("", "AttributeError"),
        ],
    )
    def test_code_that_cannot_be_built_is_bad_input(self, tmp_path: Path, source: str, words: str) -> None:
        (tmp_path / "guess.py").write_text(source)
        with pytest.raises(InputError, match=f"observe of Guess: {words}"):
            ProcessObserver("guess:built", {}, timeout=PATIENCE, source=tmp_path / "guess.py", name="observe of Guess")

    def test_code_that_ends_its_process_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "guess.py").write_text("import os\nos._exit(4)\n")
        with pytest.raises(RewardError, match=r"ended its process \(exit code 4\).* while it was imported"):
            ProcessObserver("guess:built", {}, timeout=PATIENCE, source=tmp_path / "guess.py")
