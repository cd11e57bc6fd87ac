"""A workspace with a server, as a test starts, kills and asks it."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
from pathlib import Path

import psutil
from tiny_run import RUN
from workbench import PATIENCE, Workbench


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Served:
    """A workspace with a server, which may be killed and started again at the same address."""

    def __init__(self, host: Workbench) -> None:
        self.host, self.port = host, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said = ""
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start it, and wait until it answers."""
        with (self.host.folder / "serve.log").open("a") as log:
            self.process = subprocess.Popen(
                [self.host.python, "-P", "-m", "posttrain", "serve", "--port", str(self.port)],
                cwd=self.host.folder, env=self.host.variables(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        self.host.started.append(self.process)
        self.host.wait("a server that answers", self.answers)
        return self.process

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.host.folder / "serve.log").read_text()
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            asked.request("GET", "/readyz")
            return asked.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            asked.close()

    def kill(self) -> None:
        """Kill the server alone, as a machine that runs out of memory does."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> None:
        """As an administrator does. A server that hangs prints where its threads are and exits with 1."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        assert code in (0, -signal.SIGTERM), (self.host.folder / "serve.log").read_text()[-20_000:]

    def driver(self) -> psutil.Process | None:
        """Its child that drives runs."""
        for one in psutil.process_iter(["cmdline", "status"]):
            words = one.info["cmdline"] or []
            mine = "posttrain.server.driver" in words and str(self.host.root) in words
            if mine and one.info["status"] != psutil.STATUS_ZOMBIE:
                return one
        return None

    def client(self, folder: Path, name: str, role: str) -> Workbench:
        """Somebody's folder with the run file and nothing else, and a token."""
        folder.mkdir()
        self.host.run("member", "set", f"user:{name}", role)
        issued = self.host.run("token", "issue", f"user:{name}", "--role", role, "-o", "json").json
        made = Workbench(folder)
        made.environment = {"POSTTRAIN_SERVER": self.url, "POSTTRAIN_TOKEN": issued["secret"], "HOME": str(folder)}
        made.write("run.yaml", RUN)
        return made
