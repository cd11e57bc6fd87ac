"""A Ray cluster of our own: a head that runs no jobs, and two nodes of one machine, which only a token opens.

`with Cluster() as cluster:` starts them in a temporary folder; the end stops them all.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from slurm_cluster import free_ports

_PATIENCE = 300.0  # seconds: a start takes fifteen


class Cluster:
    """One cluster."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ptr-", dir="/tmp"))  # the paths of Ray's sockets are limited
        self._port, dashboard, self._client = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        self._dashboard = dashboard
        # several nodes listen on all addresses of the machine, so a token is needed to reach them
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            head = ("--head", f"--port={self._port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1")
            ports = (f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={self._client}")
            self._start("head", *head, *ports, "--num-cpus=0")
            self._wait_for(1)
            for count, node in enumerate(("ada", "bob"), 2):  # two that start at once disturb each other
                self.start(node)
                self._wait_for(count)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, node: str) -> None:
        """Start a node with two CPUs and two fake GPUs."""
        gpus = ("--num-gpus=2", '--resources={"accelerator_type:H100": 2}')
        self._start(node, f"--address=127.0.0.1:{self._port}", "--num-cpus=2", *gpus)

    def lose(self, node: str) -> None:
        """Let a node fail: everything that it runs is killed."""
        process = self._nodes.pop(node)
        mark = f"POSTTRAIN_TEST_NODE={self.folder.name}-{node}".encode()
        for _ in range(5):  # what one of them starts meanwhile
            for pid in _pids():
                with suppress(OSError):
                    if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
        process.wait(_PATIENCE)

    def node_of(self, word: str) -> str:
        """Return the node on which a process has this word in its command line."""
        for pid in _pids():
            with suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found = Path(f"/proc/{pid}/environ").read_bytes().split(b"POSTTRAIN_TEST_NODE=")[1]
                    return found.partition(b"\0")[0].decode().rpartition("-")[2]
        raise LookupError(f"no process has the word {word}")

    def close(self) -> None:
        """Stop everything and remove the folder."""
        for node in [*self._nodes]:
            self.lose(node)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, *words: str) -> None:
        settings = {
            **self.environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            "POSTTRAIN_TEST_NODE": f"{self.folder.name}-{name}",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
        own = [f"--temp-dir={self.folder}"] if name == "head" else []
        # by default, all nodes of a machine would use the same ports
        own += [f"--dashboard-agent-listen-port={free_ports(1)[0]}", "--min-worker-port=0", "--max-worker-port=0"]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "POSTTRAIN_", "RAY_"))}
        with (self.folder / f"{name}.out").open("ab") as out:
            self._nodes[name] = subprocess.Popen(
                [*command, "--object-store-memory=100000000", *own, *words], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, cwd="/", env={**kept, **settings}, start_new_session=True,
            )  # fmt: skip

    def _wait_for(self, nodes: int) -> None:
        """Wait until the Jobs API answers and as many nodes are alive."""
        until = time.monotonic() + _PATIENCE
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        asked = urllib.request.Request(f"{self.address}/nodes?view=summary", headers=token)
        while True:
            with suppress(OSError, KeyError, TypeError), urllib.request.urlopen(asked, timeout=10) as answer:
                known = json.loads(answer.read())["data"]["summary"]
                if sum(one["raylet"].get("state") == "ALIVE" for one in known) >= nodes:
                    return
            if time.monotonic() > until or self._nodes["head"].poll() is not None:
                said = "\n".join(path.read_text()[-1000:] for path in self.folder.glob("*.out"))
                raise RuntimeError(f"Ray did not start: {said}")
            time.sleep(1.0)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
