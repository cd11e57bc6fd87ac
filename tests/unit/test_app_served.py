"""What `doctor` says of a server and of what it needs."""

from __future__ import annotations

import fcntl
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from posttrain._version import __version__
from posttrain.app import doctor as module
from posttrain.app.doctor import server_checks, standing_checks
from posttrain.app.workspace import Workspace, init_workspace
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.workspace.served import LOCK, PLACE


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = init_workspace(tmp_path)
    yield made
    made.close()


def states(checks: Iterator[module.Check]) -> dict[str, tuple[str, str]]:
    return {check.name: (check.state, check.finding) for check in checks}


@contextmanager
def held(root: Path, port: int) -> Iterator[None]:
    """A server that holds the workspace and says that it listens at a port."""
    with (root / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / PLACE).write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "key": "k"}))
        yield


@contextmanager
def answering(status: int, version: str, why: str) -> Iterator[int]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # as the library wants it
            body = json.dumps({"status": why}).encode()
            self.send_response(status)
            self.send_header("posttrain-version", version)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_workspace_that_is_not_served_has_no_server_to_say_anything_of(workspace: Workspace) -> None:
    assert list(server_checks(workspace.root)) == []


def test_a_server_that_answers_is_fit(workspace: Workspace) -> None:
    with answering(200, __version__, "ok") as port, held(workspace.root, port):
        found = states(server_checks(workspace.root))
    assert found["server"] == ("ok", f"http://127.0.0.1:{port} answers, Posttrain {__version__}")
    assert found["driver"][0] == "ok"


def test_another_release_and_a_driver_that_died_are_told(workspace: Workspace) -> None:
    with answering(503, "98.0", "the driver ended with 1; it is started again") as port, held(workspace.root, port):
        checks = list(server_checks(workspace.root))
    found = states(iter(checks))
    assert found["server"] == ("warn", f"http://127.0.0.1:{port} answers, Posttrain 98.0")
    assert __version__ in checks[0].remedy
    assert found["driver"] == ("fail", "the driver ended with 1; it is started again")


def test_a_server_that_does_not_answer_is_told(workspace: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with held(workspace.root, port):
        found = states(server_checks(workspace.root))
    assert found["server"][0] == "fail"
    assert f"http://127.0.0.1:{port} does not answer" in found["server"][1]


def test_queue_and_store_are_looked_at(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunRecord("a-22222222", "a", digest_json("a"), "pending", "ann", 0.0)
    with workspace.ledger.transaction("user:ann") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    workspace.seal()
    found = states(standing_checks(workspace))
    assert found["queue"][0] == "ok"
    assert found["queue"][1].startswith("objects that wait for a driver: 1; in progress: 0; unsealed events: 0")
    assert found["store"][0] == "ok"

    def away(*_: object) -> bool:
        raise WorkspaceError("the store is away; look at it")

    monkeypatch.setattr(type(workspace.blobs), "has", away)
    monkeypatch.setattr(module, "ledger_counts", away)
    found = states(standing_checks(workspace))
    assert found["queue"] == found["store"] == ("fail", "the store is away; look at it")
