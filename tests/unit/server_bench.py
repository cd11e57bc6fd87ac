"""A server in a thread of the test's process, and people who ask it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from posttrain.access.authenticators.token import issue
from posttrain.api.control import Control
from posttrain.app.workspace import Workspace, init_workspace
from posttrain.client.remote import remote_control
from posttrain.domain.roles import Role
from posttrain.server.app import Server, build
from posttrain.server.asking import Asking
from posttrain.server.calling import to_json
from posttrain.server.entrance import Entrance
from posttrain.server.forwarding import Peers
from posttrain.server.metering import Meters
from posttrain.server.serving import Bind, configured
from posttrain.server.worker import Worker
from posttrain.server.workers import Refused

KEY = "k" * 64
DAY = 86400.0
_PIECE = ("kind", "value")


class InProcess:
    """What a worker process answers, answered here."""

    def __init__(self, workspace: Workspace) -> None:
        self._worker, self._lock = Worker(workspace), threading.Lock()
        self.asked: list[str] = []

    def ask(
        self, asker: Mapping[str, Any], verb: str, sent: Mapping[str, Any], request: str, asking: Asking | None = None
    ) -> bytes:
        self.asked.append(verb)
        with self._lock:
            given = json.loads(json.dumps({"asker": asker, "verb": verb, "sent": sent, "request": request}))
            asking = asking or Asking()
            done, body = self._worker.answer(
                given, lambda *piece: asking.told(to_json(dict(zip(_PIECE, piece, strict=True))))
            )
        if not done:
            raise Refused(json.loads(body))
        return body


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ServerBench:
    """A served workspace."""

    workspace: Workspace
    url: str
    workers: InProcess
    app: FastAPI
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def person(self, name: str, role: Role | None, project: str = "default", most: Role = Role.ADMIN) -> str:
        """The token of somebody with a role in a project."""
        seen = self.workspace.seen_by(self.workspace.actor, project, "os")
        with seen.ledger.transaction(seen.actor) as transaction:
            if project not in transaction.snapshot.projects():
                transaction.add_project()
            if role is not None:
                transaction.set_role(f"user:{name}", role)
        secret, _ = issue(seen.ledger, seen.actor, f"user:{name}", {project: most}, DAY)
        self.tokens[name] = secret
        return secret

    def control(self, token: str, project: str = "default") -> Control:
        return remote_control(self.url, token, project)

    def ask(
        self, method: str, path: str, token: str | None = KEY, body: Any = None, headers: Mapping[str, str] = {}
    ) -> Answer:
        """One request, as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        known = {"authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, sent, {**known, **headers})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()


@contextmanager
def served(root: Path, behind_proxy: bool = False) -> Iterator[ServerBench]:
    """A server over a new workspace; everything is answered in this process."""
    with serving(init_workspace(root), behind_proxy) as bench:
        yield bench


@contextmanager
def serving(workspace: Workspace, behind_proxy: bool = False) -> Iterator[ServerBench]:
    """A server over a workspace, which is closed with it."""
    workers = InProcess(workspace)
    app = build(
        Server(
            *(workspace, Entrance(workspace, KEY), workers, lambda: "", Peers(workspace.hosts)),
            behind_proxy=behind_proxy, meters=Meters(workspace),
        )
    )  # fmt: skip
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # as `serving` makes it
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    server = uvicorn.Server(configured(app, Bind()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield ServerBench(workspace, f"http://127.0.0.1:{listening.getsockname()[1]}", workers, app)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        workspace.close()
