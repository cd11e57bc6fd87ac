"""Clients and servers of neighbouring releases understand each other, and those that do not say what to install."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_bench import KEY, ServerBench, served

from posttrain._version import __version__
from posttrain.api.control import OPERATIONS
from posttrain.api.verbs import API_VERSION, API_VERSIONS
from posttrain.client.remote import remote_control
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import ApiVersionError, PosttrainError
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord

DAY = 86400.0
P = "/v1/projects/default"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerBench]:
    with served(tmp_path_factory.mktemp("served")) as made:
        made.person("root", Role.ADMIN)
        run = RunRecord("r-00000001", "r", digest_json(1), "pending", "ann", 1.0)
        with made.workspace.ledger.transaction("user:ann") as transaction:
            transaction.insert_run(run, [StageRecord(run.id, "sft", 0, "sft", "pending")])
        yield made


def test_a_server_says_which_versions_it_speaks(bench: ServerBench) -> None:
    assert API_VERSION in API_VERSIONS
    assert bench.ask("GET", "/v1/version", None).json == {"version": __version__, "api": list(API_VERSIONS)}
    assert bench.ask("GET", f"{P}/whoami").headers["posttrain-api"] == "1"


@pytest.mark.parametrize(("version", "which"), [(0, "too old"), (2, "too new"), (999999999, "too new")])
def test_another_version_is_refused_and_told_what_to_install(bench: ServerBench, version: int, which: str) -> None:
    for path in ("/projects/default/runs", "/projects/default/whoami", "/version", ""):
        found = bench.ask("GET", f"/v{version}{path}")
        assert (found.status, found.json["type"]) == (404, "urn:posttrain:problem:api-version")
        assert which in found.json["detail"]
        assert f"install Posttrain {__version__}" in found.json["detail"]


def more(value: Any) -> Any:
    """As the next release would answer: a field more in every object."""
    if isinstance(value, dict):
        return {**{name: more(one) for name, one in value.items()}, "of_tomorrow": {"x": [1]}}
    return [more(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", ["/runs/r-00000001/status", "/runs", "/tokens", "/whoami", "/assets", "/channels"])
def test_fields_of_the_next_release_are_ignored(bench: ServerBench, path: str) -> None:
    (verb,) = (
        one.name
        for one in OPERATIONS.values()
        if one.method == "GET" and one.path == path.replace("r-00000001", "{run_id}")
    )
    body = bench.ask("GET", P + path).json
    said = body["items"] if OPERATIONS[verb].paged else body
    grown = more(said)
    if verb == "whoami":
        grown["projects"].pop("of_tomorrow")  # its keys are data
    if isinstance(said, list):
        for one in grown:
            for kept in ("scopes", "stages", "score"):
                if kept in one:
                    one[kept].pop("of_tomorrow")
    elif verb == "status":
        for stage in grown["stages"]:
            for data in ("inputs", "outputs", "metrics"):
                stage["record"][data].pop("of_tomorrow", None)
            stage["progress"]["latest"].pop("of_tomorrow", None)
    kinds = OPERATIONS[verb].answer
    assert kinds.validate_json(json.dumps(grown)) == kinds.validate_json(json.dumps(said))


def test_a_field_that_the_server_does_not_know_is_refused(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench.ask("PUT", f"{P}/members/user:x", KEY, {"role": "viewer", "of_tomorrow": 1})
    assert (found.status, found.json["type"]) == (422, "urn:posttrain:problem:input")
    monkeypatch.setattr("posttrain.server.app.__version__", "0.0.9")
    control: Any = bench.control(KEY)
    with pytest.raises(ApiVersionError, match=r"is Posttrain 0.0.9, this client is .*; install Posttrain 0.0.9"):
        control.asks._body(OPERATIONS["set_member"], {"principal": "user:x", "role": "viewer", "of_tomorrow": 1})


class Other(http.server.BaseHTTPRequestHandler):
    """A server of another release."""

    asked: list[tuple[str, bytes]]
    spoken, body = "1", b"{}"

    def do_GET(self) -> None:
        self.asked.append((self.path, self.rfile.read(int(self.headers.get("content-length") or 0))))
        self.send_response(200)
        self.send_header("posttrain-api", self.spoken)
        self.send_header("posttrain-version", "9.9.9")
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815  # http.server names it

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def other() -> Iterator[tuple[type[Other], str]]:
    kind = type("Kind", (Other,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("spoken", ["2", "2, 3"])
def test_a_client_says_that_the_server_speaks_otherwise(other: tuple[type[Other], str], spoken: str) -> None:
    kind, url = other
    kind.spoken = spoken
    with pytest.raises(ApiVersionError, match=f"has version {spoken} of the API.*install Posttrain 9.9.9") as caught:
        remote_control(url, "posttrain_x", "default").whoami()
    assert "\n" not in str(caught.value)


def test_an_answer_that_means_nothing_here_is_one_line(other: tuple[type[Other], str]) -> None:
    kind, url = other
    kind.body = b'{"principal": 5}'
    with pytest.raises(ApiVersionError, match=r"whoami.*cannot be read.*install Posttrain 9.9.9") as caught:
        remote_control(url, "posttrain_x", "default").whoami()
    assert "\n" not in str(caught.value)


def test_what_is_the_default_is_not_sent(other: tuple[type[Other], str], tmp_path: Path) -> None:
    kind, url = other
    control = remote_control(url, "posttrain_x", "default")
    path = tmp_path / "run.lock.json"
    path.write_text('{"format": "posttrain.lock/1"}')
    for ask in (
        lambda: control.promote("r", "prod"), lambda: control.promote("r", "prod", "a reason"), lambda: control.ids(5),
    ):  # fmt: skip
        with pytest.raises(PosttrainError):
            ask()
    sent = [json.loads(body) if body else path for path, body in kind.asked]
    assert sent == [
        {"run_id": "r"}, {"run_id": "r", "lift_quarantine": "a reason"}, "/v1/projects/default/run-ids?limit=5",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("days", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_the_clock_of_a_client_decides_nothing(bench: ServerBench, tmp_path: Path, days: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {days * DAY}\n"
        f"real_ns = time.time_ns\ntime.time_ns = lambda: real_ns() + {int(days * DAY)} * 10**9\n"
    )
    token = bench.person(f"late{days}", Role.ADMIN)
    variables = {
        **os.environ, "PYTHONPATH": str(tmp_path), "POSTTRAIN_SERVER": bench.url, "POSTTRAIN_TOKEN": token,
        "HOME": str(tmp_path),
    }  # fmt: skip

    issue = ["token", "issue", f"user:late{days}", "--role", "viewer", "--days", "0.5", "-o", "json"]
    program = (
        "import sys\nfrom posttrain.cli.main import main\n"
        f"for words in {[['whoami'], issue, ['token', 'ls'], ['ls']]}:\n"
        "    sys.argv[1:] = words\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code\n"
        "    print('---')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    me, issuing, shown, runs, _ = done.stdout.split("---\n")
    assert me.startswith(f"user:late{days}, admin")
    issued = json.loads(issuing)
    assert abs(issued["expires_at"] - issued["created_at"] - DAY / 2) < 1.0
    assert bench.control(issued["secret"]).whoami().role == "viewer"
    assert "expired" not in shown
    assert issued["id"] in shown
    assert "r-00000001" in runs
