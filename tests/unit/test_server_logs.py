"""What a server says of requests: one line of JSON each, with nothing in it that was sent."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from server_bench import KEY, ServerBench, served
from test_server import everywhere

from posttrain.api.control import OPERATIONS
from posttrain.api.verbs import Verb
from posttrain.domain.errors import InputError, WorkspaceError
from posttrain.domain.ids import Role
from posttrain.server import logs
from posttrain.server.logs import Logging, Printed, begin, say_of_driver

WORD, ACCESS = "canary", "posttrain.server.access"
SIGNED = f"https://store.example/bucket/key?X-Amz-Signature={WORD}-signature&X-Amz-Credential={WORD}-id"


class Said:
    """Everything that was written to stderr through logging. A request's line comes after its answer."""

    def __init__(self) -> None:
        self.text = ""
        self._more = threading.Condition()

    def write(self, line: str) -> None:
        with self._more:
            self.text += line + "\n"
            self._more.notify_all()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def access(self, number: int) -> list[dict[str, Any]]:
        """The lines of so many requests."""
        return self._awaited(lambda line: line["logger"] == ACCESS, number)

    def of(self, request: str, number: int = 1) -> list[dict[str, Any]]:
        """What was said of a request that was sent so often."""
        self._awaited(lambda line: line["logger"] == ACCESS and line.get("request") == request, number)
        return [line for line in self.lines() if line.get("request") == request]

    def _awaited(self, which: Callable[[dict[str, Any]], bool], number: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def come() -> bool:
            found[:] = [line for line in self.lines() if which(line)]
            return len(found) >= number

        with self._more:
            assert self._more.wait_for(come, timeout=300), f"{len(found)} of {number} lines came"
        return found


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Logging is one thing of the whole process."""
    root, ours = logging.getLogger(), logging.getLogger("posttrain")
    before = root.handlers[:], root.level, ours.level, sys.excepthook, threading.excepthook, sys.stdout, sys.stderr
    yield
    root.handlers[:], root.level, ours.level, sys.excepthook, threading.excepthook, sys.stdout, sys.stderr = before
    logging.captureWarnings(False)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    found = Said()
    monkeypatch.setattr(logs, "_write", found.write)
    begin(Logging("json", "debug"))
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("root", Role.ADMIN)
        yield made


def asked(operation: Verb[..., Any], number: int) -> tuple[str, dict[str, Any] | None]:
    """A request with the word wherever somebody may write something."""
    word = f"{WORD}-{number}"
    path = operation.whole_path.replace("{project}", "default")
    for name in operation.in_path:
        path = path.replace("{" + name + "}", f"{word}-path")
    query = urlencode({name: f"{word}-query" for name in operation.parameters if name not in operation.in_path})
    if operation.method in ("GET", "DELETE"):
        return f"{path}?{query}&more={quote(SIGNED)}", None
    body = {name: f"{word}-body {SIGNED}" for name in operation.parameters if name not in operation.in_path}
    return f"{path}?{query}", body


@pytest.mark.slow
def test_nothing_that_was_sent_is_in_any_line(
    said: Said, bench: ServerBench, capfd: pytest.CaptureFixture[str]
) -> None:
    named = ("user-agent", "referer", "cookie", "x-forwarded-for", "forwarded", "etag")
    headers = dict.fromkeys(named, f"{WORD}-header")
    headers |= {"posttrain-request": f"{WORD}-request", "x-request-id": f"{WORD}-request"}
    requests = []
    for number, operation in enumerate(OPERATIONS.values()):
        path, body = asked(operation, number)
        for token in (KEY, f"{WORD}-token", f"posttrain_{WORD * 7}x"):
            known = headers | {"idempotency-key": f"{WORD}-key-{number}"}
            found = bench.ask(operation.method, path, token, body, known)
            requests.append((operation.name, found.status, found.headers["posttrain-request"]))
    for verb, found in everywhere(bench, KEY, "default", WORD):  # in the form that each verb wants
        requests.append((verb, found.status, found.headers["posttrain-request"]))
    for path in (
        f"/{WORD}",
        f"/v1/projects/{WORD}-no/runs",
        f"/v1/projects/default/blobs/{WORD}?{WORD}",
        f"/v9/{WORD}",
    ):
        found = bench.ask("GET", path, KEY, None, headers)
        requests.append(("", found.status, found.headers["posttrain-request"]))
    for path in (f"/{WORD}?{WORD}", f"/projects/default/runs/{WORD}?x={WORD}", f"/login?next=/{WORD}"):
        found = bench.ask("GET", path, KEY, None, headers)
        requests.append(("", found.status, found.headers["posttrain-request"]))
    bench.ask(WORD.upper(), "/healthz", KEY)
    bench.ask("GET", "/healthz", KEY, None, {"upgrade": "websocket", "connection": "upgrade", "x-a": WORD})
    bench.ask("POST", "/v1/projects/default/plans", KEY, f"{{{WORD}".encode())
    assert len(said.access(len(requests) + 3)) == len(requests) + 3  # one line each
    written = capfd.readouterr()
    for place in (said.text, written.out, written.err):
        assert WORD not in place.lower(), [line for line in place.splitlines() if WORD in line.lower()]
        assert KEY not in place
        assert "X-Amz" not in place
    for verb, status, request in requests:
        line = next(line for line in said.of(request) if line["logger"] == "posttrain.server.access")
        assert line["status"] == status
        assert line["verb"] == verb or not verb
        assert line["milliseconds"] >= 0


def test_a_line_says_who_asked_what_where_and_of_which_run(said: Said, bench: ServerBench) -> None:
    ann = bench.person("ann", Role.VIEWER)
    found = bench.ask("GET", "/v1/projects/default/runs?limit=1", ann)
    line = said.of(found.headers["posttrain-request"])[-1]
    with bench.workspace.ledger.snapshot() as now:
        assert line["principal"] == now.principal_of("user:ann")
    known = {name: line[name] for name in ("project", "verb", "method", "status", "client", "level")}
    assert known == {
        **{"project": "default", "verb": "ls", "method": "GET", "status": 200},
        **{"client": "127.0.0.1", "level": "info"},
    }
    assert "ann" not in said.text


def test_the_id_of_a_request_follows_from_the_clients_key_and_is_in_events_and_lines(
    said: Said, bench: ServerBench
) -> None:
    asked = {"principal": "user:bob", "role": "viewer"}
    path = "/v1/projects/default/members"
    operation = OPERATIONS["set_member"]
    path = operation.whole_path.replace("{project}", "default").replace("{principal}", "user:bob")
    body = {name: value for name, value in asked.items() if name not in operation.in_path}
    found = [
        bench.ask(operation.method, path, KEY, body, {"idempotency-key": "once-only-1"}).headers["posttrain-request"]
        for _ in range(2)
    ]
    assert found[0] == found[1]
    with bench.workspace.ledger.snapshot() as now:
        assert any(event.request.startswith(found[0]) for event in now.events(limit=1000))
    assert [line["verb"] for line in said.of(found[0], 2)] == ["set_member"] * 2


def test_an_error_that_nobody_meant_is_told_without_its_words(
    said: Said, bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        try:
            raise OSError(errno.ENOSPC, f"{WORD} said the disk", f"/{WORD}")
        except OSError as error:
            raise RuntimeError(f"of what was sent: {WORD}") from error

    monkeypatch.setattr("posttrain.server.app.call", broken)
    found = bench.ask("GET", "/v1/projects/default/whoami", KEY)
    assert found.status == 500
    assert WORD not in found.body.decode()
    assert "Traceback" not in found.body.decode()
    line = next(line for line in said.of(found.headers["posttrain-request"]) if line["level"] == "error")
    assert line["verb"] == "whoami"
    assert any(one.startswith("builtins.RuntimeError") for one in line["traceback"])
    assert f"builtins.OSError: {os.strerror(errno.ENOSPC)}" in line["traceback"]
    assert any("test_server_logs.py" in one and one.endswith("broken") for one in line["traceback"])
    assert WORD not in said.text


def test_what_is_wrong_with_the_server_itself_is_told(
    said: Said, bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise WorkspaceError(f"cannot use the ledger at postgresql://ann:pass@db/x, nor {SIGNED}")

    monkeypatch.setattr("posttrain.server.app.call", away)
    found = bench.ask("GET", "/v1/projects/default/whoami", KEY)
    assert found.status == 503
    line = next(line for line in said.of(found.headers["posttrain-request"]) if line["level"] == "warning")
    assert "cannot use the ledger at postgresql://…@db/x" in line["message"]
    assert "https://store.example/bucket/key?…" in line["message"]


def test_secrets_of_the_environment_and_tokens_are_hidden_in_what_anybody_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{WORD}/of/aws")
    said = Said()
    monkeypatch.setattr(logs, "_write", said.write)
    begin(Logging("text"))
    say_of_driver(f"run sort-abcd.2: failed with {WORD}/of/aws and posttrain_{WORD * 7} at {SIGNED}")
    Printed().write(f"Authorization: Bearer {WORD}\nand no end")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task ... %s>", WORD)
    logging.getLogger("other").info("debug of a library")
    assert WORD not in said.text
    driver, printed, task = said.text.splitlines()
    assert driver.endswith("https://store.example/bucket/key?… run=sort-abcd.2")
    assert "info    posttrain.driver: run sort-abcd.2: failed with …" in driver
    assert printed.endswith("posttrain.printed: Authorization: Bearer …")
    assert task.endswith("asyncio: Task exception was never retrieved")


@pytest.mark.parametrize(
    ("behind_proxy", "sent", "client"),
    [
        (False, "203.0.113.9", "127.0.0.1"),
        (True, "203.0.113.9", "203.0.113.9"),
        (True, "198.51.100.1, 203.0.113.9", "203.0.113.9"),  # the first is what the client says of itself
        (True, "2001:db8::1", "2001:db8::1"),
        (True, f"{WORD}, {WORD}", "127.0.0.1"),
    ],
)
def test_a_proxys_word_for_the_client_counts_behind_a_proxy_only(
    said: Said, tmp_path: Path, behind_proxy: bool, sent: str, client: str
) -> None:
    with served(tmp_path, behind_proxy=behind_proxy) as bench:
        bench.ask("GET", "/healthz", None, None, {"x-forwarded-for": sent})
    assert [line["client"] for line in said.access(1)] == [client]


def test_lines_that_nobody_reads_in_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, said = threading.Event(), Said()

    def slow(line: str) -> None:
        reads.wait()
        said.write(line)

    monkeypatch.setattr(logs, "_write", slow)
    monkeypatch.setattr(logs, "_WAITING", 5)
    begin(Logging("json"), held=True)
    for number in range(50):
        logging.getLogger("posttrain.test").info("line %d", number)
    assert said.text == ""
    reads.set()
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logs._Held)
    handler.close()
    assert any("lines were lost" in line["message"] for line in said.lines())


COLLECTED = """
import logging, queue, sys, threading
from pathlib import Path
from posttrain.server import logs
from posttrain.workspace import background
logs.begin(logs.Logging("json"), held=True)
printed, driver = logs.Printed(), background.DriverLog(Path("/no/such/folder"), background.Veil({}))
say = {
    "logged": logging.getLogger("posttrain.test").info,
    "printed": lambda line: printed.write(line + chr(10)),
    "of a driver": driver.say,
}[sys.argv[1]]
files = {one.__file__ for one in (logs, background, queue, threading)}
def collect(frame, event, _):
    if frame.f_code.co_filename in files:
        say("collected")
        return collect
sys.settrace(collect)
say("a line")
sys.settrace(None)
"""


@pytest.mark.parametrize("how", ["logged", "printed", "of a driver"])
def test_garbage_that_prints_while_a_line_is_printed_does_not_stop_the_process(how: str) -> None:
    """As a task of asyncio does whose exception nobody retrieved. Garbage may be collected at every line."""
    command = [sys.executable, "-c", COLLECTED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (done.stderr.count("a line"), done.stderr.count("collected") > 3) == (1, True)


@pytest.mark.parametrize(("given", "says"), [(("yaml", "info"), "json or text"), (("json", "loud"), "debug, info")])
def test_a_form_that_there_is_not_is_refused(given: tuple[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Logging(*given)
