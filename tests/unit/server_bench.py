"""A server in a thread of the test's process, and people who ask it."""

from __future__ import annotations

import http.client
import json
import os
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
from posttrain.domain.canonical import canonical_json
from posttrain.domain.ids import Role
from posttrain.domain.lifecycle import AttemptState
from posttrain.domain.records import AttemptRecord, RunRecord, StageRecord
from posttrain.server.app import build
from posttrain.server.authentication import Authentication, to_json
from posttrain.server.connections import Door, Peers, Room
from posttrain.server.limits import Limits
from posttrain.server.metrics import Meters
from posttrain.server.operations import Server
from posttrain.server.service import Bind, configured
from posttrain.server.worker import Worker
from posttrain.server.workers import Asking, Refused
from posttrain.store.atomic import write_json
from posttrain.store.grants import Granting, Grants
from posttrain.store.trees import put_tree
from posttrain.workspace.served import PLACE

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
    room: Room
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

    @property
    def limits(self) -> Limits:
        """What bounds each principal."""
        found: Limits = self.app.state.server.limits
        return found

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
def served(root: Path, behind_proxy: bool = False, channel: str | None = None) -> Iterator[ServerBench]:
    """A server over a new workspace; everything is answered in this process."""
    with serving(init_workspace(root, channel=channel), behind_proxy) as bench:
        yield bench


@contextmanager
def serving(workspace: Workspace, behind_proxy: bool = False) -> Iterator[ServerBench]:
    """A server over a workspace, which is closed with it."""
    workers = InProcess(workspace)
    app = build(
        Server(
            *(workspace, Authentication(workspace, KEY), workers, lambda: "", Peers(workspace.hosts)),
            behind_proxy=behind_proxy, meters=Meters(workspace),
        )
    )  # fmt: skip
    listening = Door(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # as `serving` makes it
    listening.room = Room()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    server = uvicorn.Server(configured(app, Bind(), listening.room))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield ServerBench(workspace, f"http://127.0.0.1:{listening.getsockname()[1]}", workers, app, listening.room)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        workspace.close()


@dataclass
class AttemptAtServer:
    """An attempt of a run, with its folder."""

    bench: ServerBench
    attempt: AttemptRecord
    inputs: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.bench.workspace.root / self.attempt.folder


def granting(bench: ServerBench) -> Granting:
    """As the driver of this server has it."""
    write_json(bench.workspace.root / "server.json", {"url": bench.url, "key": KEY, "pid": os.getpid()})
    ledger = bench.workspace.ledger
    return Granting(bench.workspace.root, bench.workspace.root / PLACE, Grants(ledger.database, ledger.clock), None)


def attempt_with_access(
    bench: ServerBench, name: str, project: str = "default", number: int = 1, resume: str | None = None
) -> AttemptAtServer:
    """An attempt that has a model, a file of rows, and access."""
    workspace = bench.workspace.seen_by(bench.workspace.actor, project, "os")
    tree = bench.workspace.root.parent / f"model-{name}"
    tree.mkdir(exist_ok=True)
    (tree / "model.safetensors").write_bytes(name.encode() * 100)
    (tree / "config.json").write_bytes(b"{}" + name.encode())
    model, data = put_tree(workspace.blobs, tree), workspace.blobs.put(f"rows of {name}".encode())
    inputs = {"model": {"digest": model, "form": "tree"}, "data": {"digest": data, "form": "file"}}
    run_id, folder = f"{name}-aaaaaaaa", f"runs/{name}/sft/{number:03d}"
    attempt = AttemptRecord(
        run_id=run_id, stage="sft", number=number, name=f"{name}-sft-{number}", folder=folder,
        state=AttemptState.PLANNED, executor="local", resume=resume,
        channel=workspace.jobs.folders.mailbox_of(run_id, "sft", number),
    )  # fmt: skip
    with workspace.ledger.transaction(workspace.actor) as transaction:
        if project not in transaction.snapshot.projects():
            transaction.add_project()
        if number == 1:
            manifest = workspace.blobs.put(canonical_json({"name": name}))
            stage = StageRecord(run_id=run_id, name="sft", position=0, kind="sft", state="pending", inputs=inputs)
            transaction.insert_run(RunRecord(run_id, name, manifest, "pending", "ann", 1.0), [stage])
        transaction.insert_attempt(attempt)
    (bench.workspace.root / folder).mkdir(parents=True)
    granting(bench).give(attempt, bench.workspace.root / folder)
    return AttemptAtServer(bench, attempt, {"model": model, "data": data})
