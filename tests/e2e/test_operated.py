"""A real server as whoever operates it sees it: what it logs, what it tells systemd, what it measures."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_run import RUN
from workbench import PATIENCE, Workbench

pytestmark = pytest.mark.slow
TOKEN = re.compile(r"posttrain_[A-Za-z0-9_-]{43}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass
class Operated:
    """A server with its stdout and stderr in files, and a service manager that listens."""

    host: Workbench
    process: subprocess.Popen[str]
    manager: socket.socket
    url: str

    def err(self) -> str:
        return (self.host.folder / "err").read_text()

    def out(self) -> str:
        return (self.host.folder / "out").read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err().splitlines()]

    def heard(self, word: str) -> None:
        """Wait until systemd is told."""
        while self.manager.recv(100).decode() != word:  # which reads nothing meanwhile, and must hold up nobody
            continue

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@pytest.fixture
def operated(empty: Workbench, tmp_path: Path) -> Iterator[Operated]:
    place, port = str(tmp_path / "notify"), free_port()
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(place)
    variables = empty.variables() | {"NOTIFY_SOCKET": place, "WATCHDOG_USEC": "200000"}
    with (empty.folder / "out").open("w") as out, (empty.folder / "err").open("w") as err:
        process = subprocess.Popen(
            [empty.python, "-P", "-m", "posttrain", "serve", "--port", str(port)],
            cwd=empty.folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
            start_new_session=True,
        )  # fmt: skip
    empty.started.append(process)
    made = Operated(empty, process, manager, f"http://127.0.0.1:{port}")
    made.heard("READY=1")
    yield made
    if process.poll() is None:
        made.end()
    manager.close()


@pytest.mark.journey
def test_a_run_is_seen_in_logs_and_metrics_and_no_secret_is(operated: Operated) -> None:
    host = operated.host
    operated.heard("WATCHDOG=1")
    host.write("run.yaml", RUN)
    host.run("run", "run.yaml")
    run_id = host.run_id()
    measured = metrics(operated)
    assert measured['posttrain_runs{"state": "succeeded"}'] >= 1
    assert measured["posttrain_driver_up{}"] == measured['posttrain_up{"of": "store"}'] == 1
    assert measured["posttrain_driver_passes_total{}"] > 0
    for kind in ("server", "driver", "worker"):
        assert measured[f'posttrain_resident_memory_bytes{{"process": "{kind}"}}'] > 0
    assert measured["posttrain_received_bytes_total{}"] > 0
    assert operated.end() in (0, -signal.SIGTERM)
    lines = operated.lines()
    assert {line["logger"] for line in lines} >= {"posttrain.server", "posttrain.server.access", "posttrain.driver"}
    assert any(line["logger"] == "posttrain.driver" and line.get("run") == run_id for line in lines)
    assert any(line.get("verb") == "submit" and line["status"] < 300 for line in lines)
    assert len(TOKEN.findall(operated.out())) == 1  # said once
    key = re.escape(str(host.root))
    assert not TOKEN.search(operated.err()), key
    assert "owner: " not in operated.err()  # of the run file that was sent


def metrics(operated: Operated) -> dict[str, float]:
    """As Prometheus reads it, with the token of whoever started the server."""
    import urllib.request

    token = TOKEN.findall(operated.out())[0]
    asked = urllib.request.Request(f"{operated.url}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    return {
        f"{one.name}{json.dumps(dict(sorted(one.labels.items())))}": one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_service_shows_no_token_and_its_owner_issues_one(empty: Workbench) -> None:
    """As in a container: it listens everywhere, and commands beside it reach it by the loopback address."""
    words = ("serve", "--port", str(free_port()), "--no-token", "--host", "0.0.0.0", "--behind-proxy")
    with (empty.folder / "out").open("w") as out, (empty.folder / "err").open("w") as err:
        process = subprocess.Popen(
            [empty.python, "-P", "-m", "posttrain", *words],
            cwd=empty.folder, env=empty.variables(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
            start_new_session=True,
        )  # fmt: skip
    empty.started.append(process)
    empty.wait("a server", (empty.root / "server.json").exists)
    who = f"user:{os.environ.get('USER', 'ann')}"
    empty.run("member", "set", who, "admin")
    assert TOKEN.search(empty.run("token", "issue", who).out)
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE)
    assert not TOKEN.search((empty.folder / "out").read_text() + (empty.folder / "err").read_text())


def test_doctor_says_how_a_served_workspace_stands(operated: Operated) -> None:
    found = operated.host.run("doctor", "-o", "json", code=None).json
    states = {check["name"]: check["state"] for check in found}
    assert {states[name] for name in ("server", "driver", "queue", "store", "ledger", "disk")} == {"ok"}
    assert f"{operated.url} answers" in next(check["finding"] for check in found if check["name"] == "server")
