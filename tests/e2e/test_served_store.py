"""A server whose store is away when it begins: it says so, is not ready, and is when the store comes back."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest
from workbench import Workbench

from hostile_proxy import GONE, hostile_proxy
from s3_server import s3_server, use_s3
from serving import Served


def readiness(port: int) -> tuple[int, str]:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        asked.request("GET", "/readyz")
        answer = asked.getresponse()
        return answer.status, json.loads(answer.read())["status"]
    except OSError:
        return 0, ""
    finally:
        asked.close()


class Early(Served):
    """It is enough that it listens."""

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.host.folder / "serve.log").read_text()
        return readiness(self.port)[0] != 0


@pytest.mark.slow
def test_a_server_that_begins_without_its_store_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("artifacts") as address, hostile_proxy(address) as proxy:
        use_s3(monkeypatch, proxy.url)
        host = Workbench(tmp_path / "host")
        host.folder.mkdir()
        host.environment = {"POSTTRAIN_STORE": "s3://artifacts/team"}
        host.run("init")
        proxy.ill(GONE)
        served = Early(host)
        log = host.folder / "serve.log"
        try:
            host.wait("a line in its log", lambda: "is not ready until" in log.read_text())
            assert readiness(served.port) == (
                503,
                "the artifact store does not answer; the server's log has the reason",
            )
            assert host.run("ls").code == 0  # what needs no artifact is answered
            proxy.heal()
            host.wait("a server that is ready", lambda: readiness(served.port)[0] == 200)
        finally:
            served.end()
            host.clean()
        assert "artifact store s3://artifacts/team does not answer" in log.read_text()
        assert "the artifact store answers" in log.read_text()
