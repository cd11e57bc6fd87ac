"""Attacks on a server's edges: words in paths, NUL, errors that tell too much, expired tokens, packed bodies."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world
from server_bench import KEY, ServerBench, served
from sqlalchemy import event, update
from starlette.routing import Route

from posttrain.api.control import OPERATIONS, VERBS
from posttrain.app.control import control_of
from posttrain.app.workspace import init_workspace
from posttrain.domain.errors import InputError, IntegrityError, PosttrainError, UnavailableError, WorkspaceError
from posttrain.domain.ids import TYPES, Role
from posttrain.server.limits import IN_PATHS
from posttrain.store.schema import tokens

P = "/v1/projects/default"
CONTROL = ("%00", "a%00b", "%0A", "a%0d%0ax", "%1b", "%7f", "%c2%85")
ODD = ("..", "%2e%2e", ".", "a%5Cb", "x" * 300, "%ff")
SECRETS = ("postgresql://pat:word@db.inside/ledger", "s3://bucket/blobs/sha256/ab", "https://store.inside:9000")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerBench]:
    with served(tmp_path_factory.mktemp("served")) as made:
        made.person("root", Role.ADMIN)
        made.person("vera", Role.VIEWER)
        yield made


def files(root: Path) -> set[str]:
    found = (path.relative_to(root).as_posix() for path in root.rglob("*"))
    return {one for one in found if "ledger.db" not in one}


def test_audit_2_every_word_of_a_path_is_checked_before_anything_is_asked_or_written(bench: ServerBench) -> None:
    sent: list[str] = []
    engine, root = bench.workspace.ledger.database._engine, bench.workspace.root
    before = files(root)

    def note(*words: Any) -> None:
        sent.append(words[2])

    event.listen(engine, "before_cursor_execute", note)
    try:
        for route in bench.app.routes:
            assert isinstance(route, Route)
            if not route.path.startswith("/v1/projects/") or "jobs" in route.path:
                continue
            for name in route.param_convertors:
                for word in (CONTROL[0], CONTROL[-1], *ODD) if name == "run_id" else (CONTROL[0], ODD[0], ODD[-2]):
                    path = route.path.replace(f"{{{name}}}", word)
                    path = path.replace("{project}", "default").replace("{digest}", "sha256:" + "ab" * 32)
                    path = path.replace("{", "").replace("}", "")
                    sent.clear()
                    answer = bench.ask(min(route.methods or ()), path, KEY, headers={"content-length": "0"})
                    wanted = (200, 422) if name == "principal" and word == "a%5Cb" else (422,)
                    assert answer.status in wanted, (path, answer.body)
                    assert sent == [] or answer.status == 200, path
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert files(root) == before


def test_audit_2_every_parameter_of_a_path_has_a_type(bench: ServerBench) -> None:
    named = {name for one in OPERATIONS.values() for name in one.in_path}
    assert named <= IN_PATHS.keys()
    for kind in TYPES.values():
        for word in ("a\0b", "\n", "x" * 5000, "a\x7f", "\ud800"):
            with pytest.raises(InputError):
                kind.check(word, "a test")


def test_audit_2_a_viewer_of_an_absent_run_leaves_no_folder(bench: ServerBench) -> None:
    vera, before = bench.tokens["vera"], files(bench.workspace.root)
    for verb, operation in OPERATIONS.items():
        if operation.method == "GET" and "run_id" in operation.in_path and VERBS[verb].needs is Role.VIEWER:
            path = operation.path.replace("{run_id}", "absent-aaaaaaaa").replace("{sample}", "1.0.0")
            assert bench.ask("GET", P + path, vera).status == 404, verb
    assert files(bench.workspace.root) == before


@pytest.mark.parametrize("word", ["..", "../..", "a/b", "a\0b", "", "x" * 300, "."])
def test_audit_2_the_python_interface_checks_the_same_words(tmp_path: Path, word: str) -> None:
    workspace = init_workspace(tmp_path)
    before, control = files(tmp_path), control_of(workspace)
    for verb, *more in (("status",), ("write_report",), ("trackers",), ("retry",), ("samples", None, None, print)):
        with pytest.raises(InputError, match="must be"):
            getattr(control, verb)(word, *more)
    with pytest.raises(InputError, match="must be"):
        control.track(run_id=word, chosen={})
    assert files(tmp_path) == before
    workspace.close()


def test_audit_2_a_command_refuses_such_a_word_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = make_world(tmp_path, monkeypatch)
    world.ok("init")
    before = files(tmp_path)
    for words in (("get", ".."), ("trace", "../x"), ("stop", "a/../b"), ("track", ".."), ("get", "x" * 300)):
        found = world(*words)
        assert found.exit_code == 2, (words, found.stderr)
        assert len(found.stderr.strip().splitlines()) == 1
    assert files(tmp_path) == before


@pytest.mark.parametrize("path", ["/runs/a%00b/status", "/runs?before=a%00b", "/lineage?target=%00", "/asset?ref=%0a"])
def test_audit_6_control_characters_are_refused_before_any_statement(bench: ServerBench, path: str) -> None:
    sent: list[str] = []
    engine = bench.workspace.ledger.database._engine

    def note(*words: Any) -> None:
        sent.append(words[2])

    event.listen(engine, "before_cursor_execute", note)
    answer = bench.ask("GET", P + path, bench.tokens["vera"])
    event.remove(engine, "before_cursor_execute", note)
    assert (answer.status, answer.json["type"], sent) == (422, "urn:posttrain:problem:input", [])


def test_audit_6_nul_in_a_body_is_refused(bench: ServerBench) -> None:
    for body in ({"name": "a\0b"}, {"name": "a", "more": {"x": ["\0"]}}, {"a\0": 1}):
        answer = bench.ask("POST", f"{P}/projects", KEY, body)
        assert (answer.status, answer.json["exit_code"]) == (422, 2), answer.body
    assert bench.ask("POST", f"{P}/projects", KEY, {"name": "\\u0000"}).json["detail"].count("NUL") == 0


@pytest.mark.parametrize("kind", [WorkspaceError, UnavailableError, IntegrityError, OSError])
@pytest.mark.parametrize(("verb", "path"), [("whoami", "/whoami"), ("why", "/runs/a-b/why")])
def test_audit_6_an_error_of_the_server_tells_its_request_and_nothing_else(
    bench: ServerBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Exception],
    verb: str,
    path: str,
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise kind(f"cannot use {' or '.join(SECRETS)}")

    monkeypatch.setattr(f"posttrain.server.{'app' if verb == 'whoami' else 'worker'}.call", away)
    with caplog.at_level(logging.WARNING):
        answer = bench.ask("GET", P + path, KEY)
    assert answer.status in (500, 503)
    told = f"{answer.body.decode()} {answer.headers}"
    assert not [word for word in (*SECRETS, "pat", "inside", "bucket", "Traceback") if word in told], told
    assert answer.json["request"] == answer.headers["posttrain-request"]
    told = "The server's log contains the reason, in the lines with the id of this request."
    assert answer.json["detail"].endswith(told)
    if issubclass(kind, PosttrainError):
        assert any(SECRETS[1] in record.getMessage() for record in caplog.records), "the log has the reason"


def test_an_expired_token_opens_nothing(bench: ServerBench) -> None:
    secret = bench.person("otto", Role.ADMIN)
    assert bench.ask("GET", f"{P}/whoami", secret).status == 200
    with bench.workspace.ledger.database.write(across="a test") as connection:
        past = bench.workspace.ledger.clock.now() - 1.0
        mine = (
            tokens.c.created_at
            == connection.execute(tokens.select().order_by(tokens.c.created_at.desc()).limit(1)).one().created_at
        )
        connection.execute(update(tokens).where(mine).values(expires_at=past))
    for operation in OPERATIONS.values():
        path = operation.whole_path.replace("{project}", "default").replace("{digest}", "sha256:" + "ab" * 32)
        answer = bench.ask(operation.method, re.sub(r"[{}_]", "", path), secret)
        assert (answer.status, answer.json["type"]) == (401, "urn:posttrain:problem:authentication"), operation.name
    for path in ("/v1/token", "/metrics", f"{P}/runs/a/watch", f"{P}/operations/a", f"{P}/blobs/sha256:{'ab' * 32}"):
        assert bench.ask("GET", path, secret).status == 401, path


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_a_body_is_never_unpacked(bench: ServerBench, encoding: str) -> None:
    bomb = gzip.compress(b'{"name": "' + b"x" * (64 << 20) + b'"}')
    assert len(bomb) < 1 << 20
    answer = bench.ask("POST", f"{P}/projects", KEY, bomb, {"content-encoding": encoding})
    assert (answer.status, answer.json["type"]) == (422, "urn:posttrain:problem:input")
    plain = json.dumps({"name": "a b"}).encode()
    assert bench.ask("POST", f"{P}/projects", KEY, plain, {"content-encoding": encoding}).status == 422
