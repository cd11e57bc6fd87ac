"""Several servers on one PostgreSQL and one store, people who ask them, and a balancer before them."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tiny_run import RUN, make_template
from workbench import Live, Workbench

from postgres_server import Server
from serving import Served

_HOP = ("connection", "transfer-encoding", "keep-alive", "date", "server")


class Team:
    """Two hosts with a server each, and people who ask either.

    Args:
        options: of `posttrain init`.
        executors: what each host declares before its server starts.
        environment: further variables of the hosts.
    """

    def __init__(
        self,
        folder: Path,
        postgres: Server,
        s3: str,
        options: Sequence[str] = (),
        executors: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.postgres, self.folder, self.address = postgres, folder, postgres.create()
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        places = {"POSTTRAIN_STORE": "s3://store/blobs", "POSTTRAIN_LEDGER": self.address, "AWS_ENDPOINT_URL": s3}
        self.benches = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            bench = Workbench(folder / name)
            bench.environment = {**keys, **places, "AWS_ALLOW_HTTP": "true", **(environment or {})}
            self.benches.append(bench)
        make_template(self.benches[0], *options)
        self.benches[1].run("init", *options)
        for bench in self.benches if executors else ():
            bench.write("executors.yaml", executors)
            bench.run("executor", "add", "executors.yaml")
        self.servers = [Served(bench) for bench in self.benches]

    def ids(self) -> list[str]:
        """Of the hosts, as the ledger knows them."""
        return [json.loads((bench.root / "workspace.json").read_text())["id"] for bench in self.benches]

    def asker(self, name: str, of: int, secret: str) -> Workbench:
        """Somebody's folder with the run file and nothing else, who asks one of the servers."""
        (self.folder / name).mkdir()
        made = Workbench(self.folder / name)
        url = self.servers[of].url
        made.environment = {"POSTTRAIN_SERVER": url, "POSTTRAIN_TOKEN": secret, "HOME": str(made.folder)}
        made.write("run.yaml", RUN)
        return made

    def token(self, name: str, role: str = "admin", project: str = "default") -> str:
        inside = {"POSTTRAIN_PROJECT": project}
        self.benches[0].run("member", "set", f"user:{name}", role, env=inside)
        return str(self.benches[0].run("token", "issue", f"user:{name}", "-o", "json", env=inside).json["secret"])

    def at(self, run_id: str) -> int | None:
        """Which host has the jobs of a run."""
        rows = self.postgres.sql(f"SELECT host FROM attempts WHERE run_id = '{run_id}'", self.address)
        return self.ids().index(rows[0][0]) if rows else None

    def job(self, run_id: str) -> tuple[int, Live]:
        """The host that has begun a run, and its job."""
        bench = self.benches[0]
        place: int = bench.wait(
            "a host that begins the run", lambda: (found := self.at(run_id)) is not None and found + 1
        )
        return place - 1, self.benches[place - 1].wait_job()

    def close(self) -> None:
        for served in self.servers:
            if served.process.poll() is None:
                served.end()
        for bench in self.benches:
            bench.clean()


class Balancer:
    """Sends every request to the next of some servers, whoever sent the one before; one that is gone is left out.

    Args:
        before: is called with method, path and the number of the server that a request goes to; what it returns is
            how many bytes of the body that server gets before it goes on (None: all of them).
    """

    def __init__(self, ports: list[int], before: Callable[[str, str, int], int | None] = lambda *_: None) -> None:
        self.before, self._ports, self._turns = before, ports, itertools.count()
        self.asked: list[tuple[str, str, int]] = []
        balancer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                balancer.pass_on(self)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = handle_one  # noqa: N815  # as the base class calls them

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        if asked.path.endswith("/direct"):  # as where the servers have their keys from a role: through the server
            return _answer(asked, 200, b'{"url": "", "headers": {}}')
        for _ in self._ports:
            place = next(self._turns) % len(self._ports)
            connection = http.client.HTTPConnection("127.0.0.1", self._ports[place], timeout=600)
            try:
                connection.connect()
            except OSError:
                continue
            self.asked.append((asked.command, asked.path, place))
            try:
                return self._sent(asked, connection, body, place)
            except (OSError, http.client.HTTPException):
                return _answer(asked, 502, b"")
            finally:
                connection.close()
        return _answer(asked, 502, b"")

    def _sent(
        self, asked: BaseHTTPRequestHandler, connection: http.client.HTTPConnection, body: bytes, place: int
    ) -> None:
        connection.putrequest(asked.command, asked.path, skip_host=True, skip_accept_encoding=True)
        for name, value in asked.headers.items():
            if name.lower() not in _HOP:
                connection.putheader(name, value)
        connection.endheaders()
        first = self.before(asked.command, asked.path, place)
        connection.send(body if first is None else body[:first])
        found = connection.getresponse()
        asked.send_response(found.status)
        for name, value in found.getheaders():
            if name.lower() not in _HOP:
                asked.send_header(name, value)
        asked.send_header("connection", "close")
        asked.end_headers()
        while piece := found.read1(1 << 16):
            asked.wfile.write(piece)
            asked.wfile.flush()
        asked.close_connection = True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _answer(asked: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    asked.send_response(status)
    asked.send_header("content-length", str(len(body)))
    asked.end_headers()
    asked.wfile.write(body)


@contextmanager
def balanced(ports: list[int], before: Callable[[str, str, int], int | None] = lambda *_: None) -> Iterator[Balancer]:
    """A balancer before some servers."""
    made = Balancer(ports, before)
    try:
        yield made
    finally:
        made.close()
