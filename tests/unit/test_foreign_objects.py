"""Every operation of the interface, asked from inside another project for objects that exist and hold data.

A foreign and an absent object get the same status, body, headers, number of statements and files, on both of two
servers over one ledger and store, the second of which sends requests about runs on to the first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from console_bench import POLICY, ConsoleWorld, console_world
from outside_runs import trl_output
from server_bench import KEY, Answer, ServerBench, serving
from sqlalchemy import event, update

from posttrain.api.control import OPERATIONS
from posttrain.app.workspace import Workspace
from posttrain.domain.ids import Role
from posttrain.execution.processes import process_name
from posttrain.server.limits import IN_PATHS
from posttrain.server.openapi import document
from posttrain.store.ledger import Host
from posttrain.store.schema import attempts

NO_OBJECT: Mapping[str, str] = {  # operation → why no word of it can name another project's object
    **dict.fromkeys(("healthy", "ready", "version", "interface"), "says nothing of projects and needs no token"),
    **dict.fromkeys(("token", "whoami"), "describes the token that is shown"),
    **dict.fromkeys(("channels", "live", "members", "queue", "asset_status", "assets", "sinks", "tokens", "images"),
                    "lists the asker's project; its cursors are tested in test_server.py"),
    **dict.fromkeys(("allow_image", "remove_image"), "changes the list of the asker's project; images are no objects"),
    "add_external": "registers a new name for an address outside, which it reads",
    "gc": "needs an admin of the first project",
    "add_project": "needs an admin of the first project",
}  # fmt: skip
GLOBAL = ("set_member", "issue_token")  # they make what they name, and write a row more for a person who is new
EMPTY = {"dead": "nothing was set aside", "driver": "the run has ended", "channel_trackers": "no registry is chosen"}
HOST = "f" * 32
_TRIES = 4  # of a pair that differs: what a cache forgets by the clock is asked anew at any moment
_ID = re.compile(r"[a-z]+-[0-9a-z]{8}\b|\b[0-9a-f]{16,64}\b|posttrain_[\w-]+")  # ids and secrets that are drawn
_TIME = re.compile(r'"(at|since|created_at|expires_at|seconds)": [0-9.]+')


@dataclass
class Words:
    """What one project has, or nobody: for each parameter the words that are tried one after the other."""

    run: str
    stage: str
    sample: str
    channel: str
    guarded: str
    asset: str
    digest: str
    token: str
    operation: str
    sink: str
    history: str
    request: str
    person: str

    def of(self, parameter: str) -> list[Any]:
        """Words for a parameter; none: it names no object."""
        whole = [self.run, f"channel:{self.channel}", self.asset, self.digest, f"{self.run}/{self.stage}", self.history]
        whole = [*whole, self.request, self.person]
        known = {
            ("run_id", "before"): [self.run],
            ("words", "first", "second"): [self.run, self.run[:-2]],
            ("target", "what", "within", "ref", "model", "to", "request"): whole,
            ("name", "channel"): [self.channel, self.guarded, self.sink, _name(self.asset)],
            ("digest", "checksum", "digests"): [self.digest],
            ("stage",): [self.stage, f"{self.run}/{self.stage}"],
            ("sample",): [self.sample],
            ("token_id",): [self.token],
            ("operation_id",): [self.operation],
            ("principal",): [self.person],
            ("suites",): [self.asset],
        }
        return next((words for names, words in known.items() if parameter in names), [])


@dataclass
class Seen:
    """What an asker can see of one request."""

    status: int
    body: str
    headers: dict[str, str]
    statements: int
    files: frozenset[str]


@dataclass
class Walk:
    """Asks as an admin of a project that has none of it.

    Args:
        servers: of one ledger and store.
    """

    root: Path
    servers: list[ServerBench]
    token: str
    counted: list[int] = field(default_factory=lambda: [0])

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the statements of every server."""
        engines = [one.workspace.ledger.database._engine for one in self.servers]

        def count(*_: Any) -> None:
            self.counted[0] += 1

        for engine in engines:
            event.listen(engine, "before_cursor_execute", count)
        yield
        for engine in engines:
            event.remove(engine, "before_cursor_execute", count)

    def ask(self, server: ServerBench, method: str, path: str, body: Any, words: Words) -> Seen:
        """One request, and what it shows."""
        before, self.counted[0] = self._files(), 0
        headers = {"upload-offset": "0", "upload-length": "3"} if method == "PATCH" else {}
        answer = server.ask(method, path, self.token, b"xyz" if method == "PATCH" else body, headers)
        statements, left = self.counted[0], self._files() - before
        return Seen(answer.status, _plain(answer.body.decode(), words), _headers(answer), statements, left)

    def _files(self) -> frozenset[str]:
        """Everything below the workspace but the database's own files, and what is put by content."""
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*"))
        return frozenset(one for one in found if not one.startswith(("ledger.db", "blobs/")))


def _name(ref: str) -> str:
    return ref.partition(":")[2].partition("@")[0]


def _headers(answer: Answer) -> dict[str, str]:
    drawn = ("date", "posttrain-request", "etag", "content-length")
    return {name: value for name, value in answer.headers.items() if name not in drawn}


def _plain(text: str, words: Words) -> str:
    """A body without the words that were asked for, and without ids and times that are drawn."""
    each = [*vars(words).values(), _name(words.asset), _name(words.history), words.run[:-2], words.digest[:24]]
    for one in sorted(each, key=len, reverse=True):
        text = text.replace(quote(one, safe=""), "WORD").replace(one, "WORD")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if isinstance(found, dict):
        found.pop("request", None)
    return _TIME.sub("TIME", _ID.sub("ID", json.dumps(found)))


def requests(words: Words) -> Iterator[tuple[str, str, str, dict[str, Any] | None, int]]:
    """Each operation of the description with these words: name, method, path, body, which of the words."""
    for path, methods in document()["paths"].items():
        for method, described in methods.items():
            name = described["operationId"]
            if name in NO_OBJECT:
                continue
            for turn in range(1 + max(0, *(len(words.of(one)) for one in named(described)))):  # 0: no optional words
                yield name, method.upper(), *_request(described, path, words, turn), turn


def named(described: Mapping[str, Any]) -> list[str]:
    """The parameters of an operation, by path, query and body."""
    body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    found = [one["name"] for one in described["parameters"] if one["in"] in ("path", "query")]
    return [one for one in (*found, *body.get("properties", ())) if one != "project"]


def _request(described: Mapping[str, Any], path: str, words: Words, turn: int) -> tuple[str, dict[str, Any] | None]:
    def word(name: str) -> Any:
        known = words.of(name)
        return known[(turn - 1) % len(known)] if known and turn else known[0] if known else None

    places = {one["name"]: one["in"] for one in described["parameters"]}
    for name in places:
        path = path.replace(
            f"{{{name}}}", quote("b" if name == "project" else str(word(name) or "channel.promote"), safe="")
        )
    query: dict[str, Any] = {
        one["name"]: word(one["name"])
        for one in described["parameters"]
        if one["in"] == "query" and (turn or one["required"])
    }
    operation = OPERATIONS.get(described["operationId"])
    needed = operation.parameters if operation else {}
    for name in query:
        if query[name] is None and name in needed and needed[name].default is needed[name].empty:
            query[name] = _other(name, str(needed[name].annotation), words, turn)
    path += f"?{urlencode({name: value for name, value in query.items() if value is not None})}" if query else ""
    if operation is None or operation.method in ("GET", "DELETE"):
        return path, None
    inside = [name for name in needed if name not in operation.in_path]
    body = {}
    for name in inside:
        kind, known = str(needed[name].annotation), word(name)
        found = _other(name, kind, words, turn) if known is None else known
        if found is not None:
            body[name] = [found] if known is not None and kind.startswith(("list", "collections.abc.Seq")) else found
    return path, body


def _other(name: str, kind: str, words: Words, turn: int) -> Any:
    """A value for a parameter that is no word: files and models that name the objects."""
    models = [f"channel:{words.channel}", f"run:{words.run}", words.asset]
    text = (
        f"name: mine\nowner: eve\nseed: 1\nmodel: {models[turn % 3]}\ndata: {{train: {words.asset}}}\n"
        "stages: {sft: {kind: sft, data: train, steps: 1}}\n"
    )
    fixed: dict[str, Any] = {
        **{"settings": {}, "runtime": {}, "chosen": {}, "rule": {}, "files": {}, "again": False, "page": False},
        **{"reason": "a reason", "why": "a reason", "role": "viewer", "days": 1, "status": "approved"},
        **{"prompts": ["hello"], "samples": 1, "max_new_tokens": 1, "temperature": 0.0, "seed": 1, "timeout": 60.0},
        **{"more": [], "overrides": [], "runs": [], "seeds": 2, "place": 0, "rollbacks": False, "protected": False},
        **{"skip": False, "from_start": False, "dialect": "auto", "entry": None, "version": "1", "kind": "webhook"},
        **{"dry_run": True, "older_than": 1.0, "image": "x", "setting": [], "chat": "auto", "stop": []},
    }
    if "RunFile" in kind:
        return {"name": "run.yaml", "text": text, "files": {}}
    if "FileRef" in kind and name not in fixed:
        return {"name": "x.jsonl", "digest": words.digest, "form": "file"}
    return fixed.get(name)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    address = server.create() if server else ""
    with console_world(tmp_path_factory.mktemp("foreign"), address) as made:
        made.world.ok("track", made.run, "--tracker", "csv")
        yield made
    if server:
        server.drop(address)


@pytest.fixture(scope="module")
def theirs(world: ConsoleWorld, tmp_path_factory: pytest.TempPathFactory) -> Words:
    """What the first project has; every object holds data."""
    world.ask_approval()
    bench, workspace, run = world.bench, world.bench.workspace, world.run
    person = bench.person("benedict", Role.ADMIN)
    ben = bench.control(person)
    imported = ben.import_trl_output(trl_output(tmp_path_factory.mktemp("trl")), "zebrahistory").assets
    history = next(one.ref for one in imported if one.kind == "history")
    control = bench.control(KEY)
    kept = {"path": str(workspace.root.parent / "told.jsonl")}
    control.add_sink("pager", "jsonl", kept, {"on": ["all"]})
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text('{"prompt": "of benedict", "completion": "x"}\n' * 50)
    asset = ben.add_dataset(rows, "zebrarows")
    ben.mark(asset.ref, "approved", "looks right")
    body = {"path": {"name": "rows.jsonl", "digest": asset.digest, "form": "file"}, "name": "again"}
    headers = {"prefer": "respond-async, wait=0", "idempotency-key": "an-operation-of-ben"}
    begun = bench.ask("POST", "/v1/projects/default/assets/datasets", person, body, headers).json["id"]
    while bench.ask("GET", f"/v1/projects/default/operations/{begun}", person).json["state"] == "running":
        pass
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    ben.set_policy("prod", policy)
    sample = ben.samples(run, None, None, lambda _: None)[0].sample.id
    waits = ben.approval_requests("guarded")[0].request.digest
    token = ben.issue_token("user:benedict", "viewer", 1.0).token.id
    return Words(run, "grpo", sample, "prod", "guarded", asset.ref, asset.digest, token, begun, "pager", history, waits,
                 "user:benedict")  # fmt: skip


def absent(like: Words, salt: str) -> Words:
    """Words of the same form that nobody has."""

    def other(word: str) -> str:
        drawn = iter(hashlib.sha256(f"{salt}{word}".encode()).hexdigest())
        head, colon, rest = word.rpartition(":")
        name, at, version = rest.partition("@")
        return head + colon + re.sub(r"[a-z0-9]", lambda _: next(drawn), name) + at + version

    found = {name: other(word) for name, word in vars(like).items()}
    return Words(**{**found, "stage": like.stage, "sample": "9.9.9"})


@pytest.fixture(scope="module")
def walk(world: ConsoleWorld, theirs: Words) -> Iterator[Walk]:
    """Two servers; the second knows that the first has the jobs of the run."""
    eve = world.bench.person("eve", Role.ADMIN, "b")
    root = world.bench.workspace.root
    with serving(Workspace(root)) as second:
        with second.workspace.ledger.database.write(across="a test") as connection:
            connection.execute(update(attempts).where(attempts.c.run_id == theirs.run).values(host=HOST))
        peers = second.app.state.server.peers
        peers._known = {HOST: Host(HOST, "a:/posttrain", world.bench.url, process_name(), "0.2.0", 1.0)}
        yield Walk(root, [world.bench, second], eve)


@pytest.mark.slow
def test_every_operation_is_asked_or_has_a_reason_not_to_be(theirs: Words) -> None:
    described = {one["operationId"]: one for methods in document()["paths"].values() for one in methods.values()}
    assert NO_OBJECT.keys() <= described.keys()
    for name, one in described.items():
        words = [parameter for parameter in named(one) if theirs.of(parameter)]
        files = [kind for kind in map(str, _annotations(name)) if "RunFile" in kind or "FileRef" in kind]
        assert (name in NO_OBJECT) or words or files, name
    assert {part["name"] for one in described.values() for part in one["parameters"] if part["in"] == "path"} <= (
        IN_PATHS.keys()
    )


def _annotations(name: str) -> list[Any]:
    return [one.annotation for one in OPERATIONS[name].parameters.values()] if name in OPERATIONS else []


@pytest.mark.slow
def test_the_objects_exist_and_hold_data(world: ConsoleWorld, theirs: Words) -> None:
    ben = world.bench.tokens["benedict"]
    told: dict[str, list[bytes]] = {}
    for name, method, path, body, _ in requests(theirs):
        if method == "GET":
            answer = world.bench.ask(method, path.replace("/projects/b/", "/projects/default/"), ben, body)
            told.setdefault(name, []).extend([answer.body] if answer.status == 200 else [])
    assert {name for name, found in told.items() if not found} == set(), "there is nothing that they could not see"
    bodies = {name: max(found, key=len) for name, found in told.items()}
    empty = (b"[]", b"{}", b"null", b'{"items":[],"next":null}', b'{"files":{}}')
    assert {name for name, body in bodies.items() if body in empty} <= EMPTY.keys()


@pytest.mark.slow
def test_audit_1_2_6_a_foreign_object_is_an_absent_one_in_every_operation_of_both_servers(
    walk: Walk, theirs: Words
) -> None:
    nobodys = absent(theirs, "one")
    pairs = list(zip(requests(theirs), requests(nobodys), requests(absent(theirs, "another")), strict=True))
    assert len({name for (name, *_), *_ in pairs}) + len(NO_OBJECT) == len(
        {one["operationId"] for methods in document()["paths"].values() for one in methods.values()}
    )
    different: dict[str, Any] = {}
    with walk.counting():
        for number, server in enumerate(walk.servers):
            for (name, method, path, body, turn), (_, _, other, none, _), (_, _, warm, first, _) in pairs:
                for _ in range(_TRIES):
                    walk.ask(server, method, warm, first, nobodys)  # caches: who is who, which projects there are
                    seen = walk.ask(server, method, path, body, theirs)
                    expected = walk.ask(server, method, other, none, nobodys)
                    if name in GLOBAL:
                        seen.statements, seen.body = expected.statements, expected.body
                    if seen == expected:
                        break
                if seen != expected:
                    different[f"{number} {name} {turn} {path}"] = (seen, expected)
                if seen.status >= 500:
                    different[f"{number} {name} {turn} {path}"] = seen
    for name, what in different.items():
        print(name, *(what if isinstance(what, tuple) else [what]), sep="\n    ")
    assert not different
