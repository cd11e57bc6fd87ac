"""A server answers what its asker may ask, of their project, and everything else with a problem document."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest
from anyio import CapacityLimiter
from server_bench import KEY, Answer, ServerBench, served
from sqlalchemy import event

from posttrain.api.codec import MEDIA_TYPE, TYPE
from posttrain.api.control import OPERATIONS, VERBS
from posttrain.api.verbs import PREFIX, Verb, cursor
from posttrain.client.blobs import Sender
from posttrain.client.remote import remote_control
from posttrain.client.transport import Transport, in_path
from posttrain.domain.canonical import canonical_json, digest_bytes, digest_json
from posttrain.domain.errors import (
    AccessError,
    ConflictError,
    InfrastructureError,
    InputError,
    NotFoundError,
    PosttrainError,
)
from posttrain.domain.ids import Role
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.records import Asset, RunRecord, StageRecord
from posttrain.domain.runspec import Budget
from posttrain.execution.processes import process_name
from posttrain.server import limits
from posttrain.server.authentication import Looking, Watchers
from posttrain.server.operations import Once, request_id
from posttrain.server.uploads import Uploads
from posttrain.store.operations import IdempotencyKeys
from posttrain.store.trees import FORMAT

ROWS = "".join(json.dumps({"prompt": f"{n}", "completion": f"{n % 10}"}) + "\n" for n in range(50))
ABSENT = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerBench]:
    with served(tmp_path_factory.mktemp("served")) as made:
        made.person("root", Role.ADMIN)
        yield made


def problem_of(answer: Answer) -> tuple[int, str]:
    assert answer.headers["content-type"] == MEDIA_TYPE, answer.body
    found = answer.json
    assert found["status"] == answer.status
    assert found["request"] == answer.headers["posttrain-request"]
    assert "\n" not in found["detail"]
    return answer.status, found["type"].removeprefix(TYPE)


def path_of(operation: Verb[..., Any], project: str, **named: str) -> str:
    values = {name: named.get(name, "nothing") for name in operation.in_path}
    return in_path(operation.whole_path, {"project": project, **values})


def filled(operation: Verb[..., Any], word: str) -> tuple[str, dict[str, Any] | None]:
    """Query and body with this word wherever a word is wanted."""
    rest = {name: one for name, one in operation.parameters.items() if name not in (*operation.in_path, "cursor")}
    values: dict[str, Any] = {}
    for name, one in rest.items():
        kind = str(one.annotation)
        if "RunFile" in kind:
            values[name] = {"name": "run.yaml", "text": f"model: run:{word}", "files": {}}
        elif "FileRef" in kind and "list" not in kind:
            values[name] = {"name": "x.jsonl", "digest": word if word.startswith("sha256:") else ABSENT, "form": "file"}
        elif "str" in kind and not any(many in kind for many in ("Mapping", "Sequence", "tuple", "list")):
            values[name] = word
        elif "int" in kind or "float" in kind:
            values[name] = 1
        elif "bool" in kind:
            values[name] = False
        elif "Mapping" in kind:
            values[name] = {}
        else:
            values[name] = [word] if "FileRef" not in kind and "tuple" not in kind else []
    if operation.method in ("GET", "DELETE"):
        query = urlencode(values, doseq=True)
        return ("?" + query if query else ""), None
    return "", values


def everywhere(bench: ServerBench, token: str, project: str, word: str) -> Iterator[tuple[str, Answer]]:
    """Every verb, with one word for every id and name."""
    for operation in OPERATIONS.values():
        named = dict.fromkeys(operation.in_path, word)
        query, body = filled(operation, word)
        yield operation.name, bench.ask(operation.method, path_of(operation, project, **named) + query, token, body)


# --- who asks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [None, "", "nonsense", "posttrain_" + "x" * 43, KEY[:-1] + "j"])
def test_nobody_is_let_in_without_a_good_token(bench: ServerBench, shown: str | None) -> None:
    found = bench.ask("GET", "/v1/projects/default/whoami", shown)
    assert problem_of(found) == (401, "authentication")
    assert found.headers["www-authenticate"] == "Bearer"
    assert not shown or shown not in found.body.decode()


def test_a_revoked_and_a_rotated_token_are_worthless_at_once(bench: ServerBench) -> None:
    admin = bench.control(KEY)
    admin.set_member("user:eve", "submitter")
    first = admin.issue_token("user:eve", "submitter", 1)
    assert bench.control(first.secret).whoami().role == "submitter"
    second = admin.rotate_token(first.token.id, 1)
    with pytest.raises(AccessError, match="revoked"):
        bench.control(first.secret).whoami()
    assert bench.control(second.secret).whoami().principal == "user:eve"
    admin.revoke_token(second.token.id)
    with pytest.raises(AccessError, match="revoked"):
        bench.control(second.secret).ls(10)


def test_a_token_has_no_more_than_its_scope_and_no_more_than_the_role(bench: ServerBench) -> None:
    token = bench.person("lee", Role.ADMIN, most=Role.VIEWER)
    lee = bench.control(token)
    assert lee.whoami().role == "viewer"
    with pytest.raises(AccessError, match="needs the role admin"):
        lee.set_member("user:lee", "admin")
    strong = bench.person("may", Role.VIEWER, most=Role.ADMIN)
    with pytest.raises(AccessError, match="needs the role submitter"):
        bench.control(strong).stop("x")


@pytest.mark.parametrize("role", [None, *Role])
def test_each_verb_is_refused_to_whoever_has_less_than_its_role(bench: ServerBench, role: Role | None) -> None:
    token = bench.person(f"some-{role}", role)
    for verb, found in everywhere(bench, token, "default", "nothing-of-that-name"):
        needed = VERBS[verb].needs
        assert needed is not None
        allowed = role is not None and role.covers(needed)
        assert (found.status == 403) == (not allowed), (verb, found.body)
        assert found.status < 500, (verb, found.body)
        if found.status >= 400:
            problem_of(found)


def without(said: str, word: str) -> str:
    """What was said, whichever word was asked for."""
    for part in (word, word.partition("@")[0], word[:24], word[:19]):
        said = said.replace(part, "WORD")
    return said


# --- whose it is ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(bench: ServerBench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What project B has: a data set, a channel, a token."""
    path = tmp_path_factory.mktemp("theirs") / "secret.jsonl"
    path.write_text(ROWS)
    token = bench.person("ben", Role.ADMIN, "b")
    ben = bench.control(token, "b")
    asset = ben.add_dataset(path, "secret")
    known = ben.issue_token("user:ben", "viewer", 1)
    return {"digest": asset.digest, "ref": asset.ref, "name": "secret", "token": known.token.id, "proof": token}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["digest", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ref", "name", "token"))]
)
def test_what_another_project_has_is_absent_in_status_body_and_statements(
    bench: ServerBench, theirs: dict[str, str], what: str
) -> None:
    bench.person("ann", Role.ADMIN, "a")
    mine, word = bench.tokens["ann"], theirs[what]
    absent = {"digest": ABSENT, "ref": "dataset:sorbet@1", "name": "sorbet", "token": "0123456789abcdef"}[what]
    counted: list[int] = [0]
    engine = bench.workspace.ledger.database._engine

    def count(*_: Any) -> None:
        counted[0] += 1

    def walked(with_word: str) -> dict[str, tuple[int, str, int]]:
        found = {}
        for operation in OPERATIONS.values():
            named = dict.fromkeys(operation.in_path, with_word)
            query, body = filled(operation, with_word)
            counted[0] = 0
            answer = bench.ask(operation.method, path_of(operation, "a", **named) + query, mine, body)
            said = answer.json if answer.body else {}
            said = {**said, "request": ""} if isinstance(said, dict) else said
            found[operation.name] = answer.status, without(json.dumps(said), with_word), counted[0]
        return found

    walked(absent)  # caches are warm: who is who, which projects there are
    event.listen(engine, "before_cursor_execute", count)
    try:
        one, other = walked(absent), walked(word)
    finally:
        event.remove(engine, "before_cursor_execute", count)
    for verb in OPERATIONS.keys() - {"add_project", "set_member", "issue_token"}:  # which make what they name
        assert one[verb] == other[verb], verb


def test_operations_and_cursors_of_another_project_are_absent_in_status_body_and_statements(
    bench: ServerBench, theirs: dict[str, str]
) -> None:
    mine, ben, engine = bench.person("ann", Role.ADMIN, "a"), theirs["proof"], bench.workspace.ledger.database._engine
    body = {"path": {"name": "rows.jsonl", "digest": theirs["digest"], "form": "file"}, "name": "again"}
    headers = {"prefer": "respond-async, wait=0", "idempotency-key": "an-operation-of-ben"}
    begun = bench.ask("POST", "/v1/projects/b/assets/datasets", ben, body, headers)
    number, running = begun.json["id"], bench.app.state.server.running._all[begun.json["id"]]
    while not running.told:  # by the server, in the ledger: it tells no more
        pass
    assert bench.ask("GET", f"/v1/projects/b/operations/{number}", ben).json["state"] == "succeeded"
    place = bench.ask("GET", "/v1/projects/b/tokens?limit=1", ben).json["next"]
    nowhere = cursor("a-project-that-is-not", OPERATIONS["tokens"], {}, ["0" * 32])
    counted: list[int] = [0]

    def count(*_: Any) -> None:
        counted[0] += 1

    def asked(method: str, path: str, word: str) -> tuple[int, str, int]:
        counted[0] = 0
        answer = bench.ask(method, f"/v1/projects/a/{path}{word}", mine)
        return answer.status, without(json.dumps({**answer.json, "request": ""}), word), counted[0]

    event.listen(engine, "before_cursor_execute", count)
    try:
        for method, path, theirs_, absent, status in (
            ("GET", "operations/", number, "f" * 26, 404),
            ("DELETE", "operations/", number, "f" * 26, 404),
            ("GET", "tokens?cursor=", place, nowhere, 422),
        ):
            asked(method, path, absent)  # caches are warm
            found = asked(method, path, theirs_)
            assert found == asked(method, path, absent), (method, path)
            assert found[0] == status
    finally:
        event.remove(engine, "before_cursor_execute", count)


@pytest.mark.slow
def test_a_project_that_is_not_theirs_and_one_that_is_not_answer_alike(
    bench: ServerBench, theirs: dict[str, str]
) -> None:
    bench.person("ann", Role.ADMIN, "a")
    for operation in OPERATIONS.values():
        query, body = filled(operation, "x")
        found = []
        for project in ("b", "q"):
            path = path_of(operation, project, **dict.fromkeys(operation.in_path, "x"))
            answer = bench.ask(operation.method, path + query, bench.tokens["ann"], body)
            found.append((problem_of(answer), answer.json["detail"].replace(f"'{project}'", "")))
        assert found[0] == found[1] == ((404, "not-found"), found[0][1]), operation.name


def test_bytes_of_another_project_can_be_neither_used_nor_fetched(bench: ServerBench, theirs: dict[str, str]) -> None:
    bench.person("ann", Role.ADMIN, "a")
    mine, digest = bench.tokens["ann"], theirs["digest"]
    path = f"/v1/projects/a/blobs/{digest}"
    assert bench.ask("GET", path + "/state", mine).json == {"held": False, "offset": 0}
    assert problem_of(bench.ask("GET", path, mine)) == (404, "not-found")
    assert bench.ask("GET", f"/v1/projects/b/blobs/{digest}", theirs["proof"]).body == ROWS.encode()
    sent = {"path": {"name": "x.jsonl", "digest": digest, "form": "file"}, "name": "mine"}
    assert problem_of(bench.ask("POST", "/v1/projects/a/assets/datasets", mine, sent)) == (404, "not-found")
    listing = {"format": FORMAT, "files": {"x.jsonl": {"digest": digest, "size": len(ROWS)}}}
    body = json.dumps(listing, separators=(",", ":"), sort_keys=True).encode()
    tree = "sha256:" + hashlib.sha256(body).hexdigest()
    headers = {"upload-offset": "0", "upload-length": str(len(body))}
    assert bench.ask("PATCH", f"/v1/projects/a/blobs/{tree}", mine, body, headers).status == 200
    sent = {"path": {"name": "x", "digest": tree, "form": "tree"}, "name": "mine"}
    assert problem_of(bench.ask("POST", "/v1/projects/a/assets/datasets", mine, sent)) == (404, "not-found")
    assert bench.control(mine, "a").assets("dataset") == []


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v2/projects/default/runs", None, 404, "api-version"),
        ("GET", "/v0/projects/default/runs", None, 404, "api-version"),
        ("GET", "/v" + "9" * 5000, None, 404, "not-found"),
        ("GET", "/v1/nothing", None, 404, "not-found"),
        ("DELETE", "/v1/projects/default/runs", None, 405, "input"),
        ("GET", "/v1/projects/default/asset", None, 422, "input"),
        ("GET", "/v1/projects/default/runs?limit=many", None, 422, "input"),
        ("GET", "/v1/projects/default/runs?limit=1&limit=2", None, 422, "input"),
        ("GET", "/v1/projects/default/runs?limit=1&page=2", None, 422, "input"),
        ("GET", "/v1/projects/..%2Fdefault/runs?limit=1", None, 404, "not-found"),
        ("POST", "/v1/projects/default/tokens", b"{", 422, "input"),
        ("POST", "/v1/projects/default/tokens", b"[]", 422, "input"),
        ("POST", "/v1/projects/default/tokens", b"\xff\xfe", 422, "input"),
        ("POST", "/v1/projects/default/tokens", b"[" * 100_000, 422, "input"),
        ("POST", "/v1/projects/default/tokens", b" " * (9 << 20), 422, "input"),
        ("POST", "/v1/projects/default/tokens", {"principal": "user:x", "role": "king", "days": 1}, 422, "input"),
        ("POST", "/v1/projects/default/tokens", {"principal": "user:x", "role": "viewer", "days": 1e9}, 422, "input"),
        ("POST", "/v1/projects/default/tokens", {"principal": "user:x", "role": "viewer"}, 422, "input"),
        ("POST", "/v1/projects/default/projects", {"name": "../up"}, 422, "input"),
        ("PUT", "/v1/projects/default/members/user:x", {"principal": "user:y", "role": "viewer"}, 422, "input"),
    ],
)
def test_bad_input_is_a_problem_and_changes_nothing(
    bench: ServerBench, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    before = bench.control(KEY).members(), len(bench.control(KEY).tokens())
    found = bench.ask(method, path, KEY, body)
    assert problem_of(found) == (status, kind), found.body
    assert (bench.control(KEY).members(), len(bench.control(KEY).tokens())) == before


@pytest.mark.parametrize("name", ["../x.yaml", "/etc/passwd", "a/b.yaml", "", "..", "x\x00.yaml", "x" * 300])
def test_names_of_files_lead_nowhere_else(bench: ServerBench, name: str) -> None:
    sent = {"path": {"name": name, "text": "name: x", "files": {}}, "seed": None, "setting": []}
    assert problem_of(bench.ask("POST", "/v1/projects/default/plans", KEY, sent)) == (422, "input")


@pytest.mark.parametrize("inner", ["../x", "/x", "a/../../x", "a//../x", "..", "a/\x00"])
def test_names_of_files_beside_a_run_file_lead_nowhere_else(bench: ServerBench, inner: str, tmp_path: Path) -> None:
    ref = {"name": "x", "digest": "sha256:" + hashlib.sha256(b"").hexdigest(), "form": "file"}
    sent = {"path": {"name": "run.yaml", "text": "name: x", "files": {inner: ref}}, "seed": None, "setting": []}
    assert problem_of(bench.ask("POST", "/v1/projects/default/plans", KEY, sent))[1] in ("input", "not-found")


def test_errors_of_a_run_file_name_it_as_its_author_does(bench: ServerBench, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nowner: me\nseed: 1\nmodle: model:x\nstages: {sft: {kind: sft}}\n")
    with pytest.raises(InputError) as caught:
        bench.control(KEY).plan(path)
    assert str(caught.value).startswith("run.yaml: modle: unknown key")
    assert str(bench.workspace.root) not in str(caught.value)


# --- uploads ----------------------------------------------------------------------------------------------------------


def blob(data: bytes) -> str:
    return "/v1/projects/default/blobs/sha256:" + hashlib.sha256(data).hexdigest()


def put(bench: ServerBench, path: str, piece: bytes, start: object, total: object) -> Answer:
    return bench.ask("PATCH", path, KEY, piece, {"upload-offset": str(start), "upload-length": str(total)})


def test_an_upload_goes_on_where_it_stopped(bench: ServerBench) -> None:
    data = b"0123456789" * 100_000
    path, half = blob(data), 400_000
    assert put(bench, path, data[:half], 0, len(data)).json == {"held": False, "offset": half}
    assert bench.ask("GET", path + "/state").json == {"held": False, "offset": half}
    assert problem_of(put(bench, path, data[:half], 0, len(data))) == (409, "conflict")
    assert put(bench, path, data[half:], half, len(data)).json == {"held": True, "offset": len(data)}
    assert bench.ask("GET", path).body == data


def test_other_bytes_than_the_digest_says_are_refused_and_may_be_sent_again(bench: ServerBench) -> None:
    data = b"right" * 100
    path = blob(data)
    assert problem_of(put(bench, path, b"wrong" * 100, 0, len(data))) == (422, "upload")
    assert problem_of(bench.ask("GET", path)) == (404, "not-found")
    assert put(bench, path, data, 0, len(data)).json["held"]


@pytest.mark.parametrize(("start", "total"), [("", 5), (0, ""), (-1, 5), (0, 3), (9, 5), (0, 10**15), ("x", 5)])
def test_sizes_of_an_upload_must_be_possible(bench: ServerBench, start: object, total: object) -> None:
    assert problem_of(put(bench, blob(b"hello"), b"hello", start, total)) == (422, "input")


def test_parallel_uploads_of_one_file_make_one(bench: ServerBench) -> None:
    data, found = b"parallel" * 200_000, list[str]()
    senders = [Sender(Transport(bench.url, KEY), "default") for _ in range(4)]
    threads = [threading.Thread(target=lambda one=one: found.append(one.put(data))) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["sha256:" + hashlib.sha256(data).hexdigest()] * 4
    assert bench.ask("GET", blob(data)).body == data


def test_a_whole_folder_is_sent_once(bench: ServerBench, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(ROWS + json.dumps({"prompt": name, "completion": "x"}) + "\n")
    (tmp_path / ".hidden").write_text("not this")
    first = bench.control(KEY).add_dataset(tmp_path / "train.jsonl", "two", tmp_path / "test.jsonl")
    assert (first.version, first.form, first.meta["rows"]) == (1, "tree", 102)
    assert bench.control(KEY).add_dataset(tmp_path / "train.jsonl", "two", tmp_path / "test.jsonl") == first


# --- answers ----------------------------------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_sent_again(bench: ServerBench) -> None:
    path = PREFIX.format(project="default") + "/members"
    first = bench.ask("GET", path)
    again = bench.ask("GET", path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", first.headers["etag"])
    bench.control(KEY).set_member("user:new", "viewer")
    other = bench.ask("GET", path, headers={"if-none-match": first.headers["etag"]})
    assert (other.status, other.json["items"]["user:new"]) == (200, "viewer")


def test_errors_are_the_same_on_both_sides(bench: ServerBench) -> None:
    from posttrain.app.control import control_of

    here, there = control_of(bench.workspace), bench.control(KEY)

    def said(control: Any, verb: str, *words: Any) -> tuple[type[PosttrainError], str]:
        with pytest.raises(PosttrainError) as caught:
            getattr(control, verb)(*words)
        return type(caught.value), str(caught.value)

    for verb, word in {"run": "nosuch", "asset": "dataset:nosuch", "lineage": "nosuch", "stop": "nosuch"}.items():
        assert said(here, verb, word) == said(there, verb, word)
        assert said(there, verb, word)[0] is NotFoundError


def test_what_a_worker_does_the_server_does_not(bench: ServerBench, tmp_path: Path) -> None:
    bench.workers.asked.clear()
    control = bench.control(KEY)
    control.ls(5)
    control.channels()
    control.members()
    assert bench.workers.asked == []
    with pytest.raises(NotFoundError):
        control.lineage("nosuch")
    assert bench.workers.asked == ["lineage"]


def test_conflicts_of_an_upload_are_conflicts(bench: ServerBench) -> None:
    data = b"conflict" * 100_000
    put(bench, blob(data), data[:400_000], 0, len(data))
    answer = put(bench, blob(data), data[16:], 16, len(data))
    assert problem_of(answer) == (409, "conflict")
    assert "continue at 400000" in answer.json["detail"]
    assert issubclass(ConflictError, PosttrainError)


# --- asked twice ------------------------------------------------------------------------------------------------------


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


PROJECT = "/v1/projects/default"


def test_what_is_asked_again_with_its_key_is_answered_again_and_done_once(bench: ServerBench) -> None:
    body = {"principal": "user:twice", "role": "viewer"}
    first = bench.ask("PUT", PROJECT + "/members/user:twice", KEY, {"role": "viewer"}, keyed("key-number-1"))
    bench.control(KEY).set_member("user:twice", "submitter")  # somebody else, in between
    again = bench.ask("PUT", PROJECT + "/members/user:twice", KEY, {"role": "viewer"}, keyed("key-number-1"))
    assert (again.status, again.body) == (first.status, first.body) == (200, first.body)
    assert bench.control(KEY).members()["user:twice"] == "submitter", body
    other = bench.ask("PUT", PROJECT + "/members/user:twice", KEY, {"role": "admin"}, keyed("key-number-1"))
    assert problem_of(other) == (422, "input")
    fresh = bench.ask("PUT", PROJECT + "/members/user:twice", KEY, {"role": "viewer"}, keyed("key-number-2"))
    assert (fresh.status, fresh.json["user:twice"]) == (200, "viewer")


def test_a_refusal_is_given_again_too(bench: ServerBench) -> None:
    path = PROJECT + "/channels/nosuch/freeze"
    first, again = (bench.ask("PUT", path, KEY, {"rollbacks": False, "why": ""}, keyed("a-refusal")) for _ in range(2))
    assert problem_of(first) == problem_of(again) == (404, "not-found")
    assert first.json == again.json


def test_a_secret_is_not_kept_to_be_given_again(bench: ServerBench) -> None:
    body = {"principal": "user:root", "role": "viewer", "days": 1}
    first = bench.ask("POST", PROJECT + "/tokens", KEY, body, keyed("a-secret-key"))
    before = len(bench.control(KEY).tokens())
    assert problem_of(bench.ask("POST", PROJECT + "/tokens", KEY, body, keyed("a-secret-key"))) == (409, "conflict")
    assert len(bench.control(KEY).tokens()) == before
    secret = first.json["secret"].encode()
    for path in bench.workspace.root.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path


def test_keys_of_others_are_others(bench: ServerBench) -> None:
    tokens = [bench.person(name, Role.ADMIN) for name in ("kay", "kim")]
    for number, token in enumerate(tokens):
        made = bench.ask(
            "PUT", f"{PROJECT}/members/user:of-{number}", token, {"role": "viewer"}, keyed("same-key-of-two")
        )
        assert made.status == 200
    assert {"user:of-0", "user:of-1"} <= set(bench.control(KEY).members())


@pytest.mark.parametrize("key", ["short", "x" * 65, "with spaces in it", "ünïcödë-key", "../../../etc"])
def test_a_key_must_be_one(bench: ServerBench, key: str) -> None:
    found = bench.ask(
        "PUT", PROJECT + "/members/user:k", KEY, {"role": "viewer"}, keyed(key.encode().decode("latin-1"))
    )
    assert problem_of(found) == (422, "input")


def begun(bench: ServerBench, key: str, verb: str, sent: dict[str, Any], owner: str) -> tuple[str, IdempotencyKeys]:
    """A request that a server began and did not answer."""
    ledger = bench.workspace.ledger
    with ledger.snapshot() as now:
        principal = now.principal_of(bench.workspace.actor) or "os"
    repeats = IdempotencyKeys(ledger, principal)
    body = digest_bytes(json.dumps([verb, sent], sort_keys=True).encode())
    assert repeats.begin(key, verb, body, owner) is None
    return request_id(key, "default", bench.workspace.actor, ledger.entropy), repeats


def test_what_a_server_that_lives_is_at_is_asked_for_later(bench: ServerBench) -> None:
    sent = {"principal": "user:later", "role": "viewer"}
    begun(bench, "key-of-the-living", "set_member", sent, process_name())
    found = bench.ask("PUT", PROJECT + "/members/user:later", KEY, {"role": "viewer"}, keyed("key-of-the-living"))
    assert problem_of(found) == (503, "later")
    assert found.headers["retry-after"] == "1"
    assert "user:later" not in bench.control(KEY).members()


def test_what_a_server_died_at_is_done_unless_it_was(bench: ServerBench) -> None:
    host = socket.gethostname()
    sent = {"principal": "user:undone", "role": "viewer"}
    begun(bench, "key-of-the-dead-1", "set_member", sent, f"{host}:999999:1")
    found = bench.ask("PUT", PROJECT + "/members/user:undone", KEY, {"role": "viewer"}, keyed("key-of-the-dead-1"))
    assert (found.status, found.json["user:undone"]) == (200, "viewer")
    sent = {"principal": "user:done", "role": "viewer"}
    request, _ = begun(bench, "key-of-the-dead-2", "set_member", sent, f"{host}:999999:1")
    seen = bench.workspace.seen_by(bench.workspace.actor, "default", "os", request)
    with seen.ledger.transaction(seen.actor) as transaction:  # and then it died
        transaction.set_role("user:done", Role.VIEWER)
    bench.control(KEY).set_member("user:done", "admin")
    found = bench.ask("PUT", PROJECT + "/members/user:done", KEY, {"role": "viewer"}, keyed("key-of-the-dead-2"))
    assert problem_of(found) == (409, "conflict")
    assert bench.control(KEY).members()["user:done"] == "admin"


def test_events_name_the_request_that_the_answer_names(bench: ServerBench) -> None:
    found = bench.ask("PUT", PROJECT + "/members/user:told", KEY, {"role": "viewer"})
    with bench.workspace.ledger.snapshot() as now:
        told = [*now.pending_events(limit=100_000), *now.events(limit=100_000)]
    mine = [event for event in told if event.request.startswith(found.headers["posttrain-request"])]
    assert "role.granted" in {event.kind for event in mine}


def test_a_viewer_gets_pages_and_no_weights(bench: ServerBench, tmp_path: Path) -> None:
    token = bench.person("vic", Role.VIEWER)
    weights, page = tmp_path / "weights", tmp_path / "page"
    weights.write_bytes(b"weights" * 100)
    page.write_bytes(b"page" * 100)
    mine = Uploads(bench.workspace)
    kept = {path.name: mine.keep(path, to_viewers=path is page) for path in (weights, page)}
    assert bench.ask("GET", f"{PROJECT}/blobs/{kept['page']}", token).body == page.read_bytes()
    assert problem_of(bench.ask("GET", f"{PROJECT}/blobs/{kept['weights']}", token)) == (403, "access")
    assert bench.ask("GET", f"{PROJECT}/blobs/{kept['weights']}", bench.person("sam", Role.SUBMITTER)).status == 200
    sizes = {"upload-offset": "0", "upload-length": "1"}
    assert problem_of(bench.ask("PATCH", f"{PROJECT}/blobs/{ABSENT}", token, b"x", sizes)) == (403, "access")


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_the_interface_names_every_verb_and_every_name_in_it_is_there(bench: ServerBench) -> None:
    found = bench.ask("GET", "/openapi.json", None).json
    assert found["openapi"] == "3.1.0"
    told = [one for methods in found["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in told]
    assert len(set(names)) == len(names)
    assert set(OPERATIONS) <= set(names)

    def refs(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for one in value.values():
                yield from refs(one)
        elif isinstance(value, list):
            for one in value:
                yield from refs(one)

    wanted = {ref.removeprefix("#/components/schemas/") for ref in refs(found)}
    assert wanted <= set(found["components"]["schemas"])
    assert "RunStatus" in found["components"]["schemas"]
    for path, methods in found["paths"].items():
        for one in methods.values():
            in_path = {parameter["name"] for parameter in one["parameters"] if parameter["in"] == "path"}
            assert in_path == set(re.findall(r"{(\w+)}", path)), path


def test_answers_are_what_the_interface_says(bench: ServerBench) -> None:
    found = bench.ask("GET", "/openapi.json", None).json
    bench.person("ann", Role.ADMIN)
    for verb in ("members", "tokens", "whoami", "channels", "assets", "ls", "asset_status"):
        operation = OPERATIONS[verb]
        path = path_of(operation, "default")
        answer = bench.ask("GET", path, KEY).json
        told = found["paths"][operation.whole_path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**told, "components": found["components"]})
    problem = bench.ask("GET", "/v1/nothing", KEY).json
    jsonschema.validate(problem, found["components"]["schemas"]["Problem"])


def test_the_server_itself_loads_nothing_large() -> None:
    """What reads files or computes is a worker's: numpy alone is 40 MB."""
    code = """
import sys
import posttrain.server.service
from posttrain.api.codec import adapter
from posttrain.api.control import OPERATIONS
from posttrain.api.control import Control
from posttrain.app.control import Local
from posttrain.app.workspace import init_workspace
from pathlib import Path

with __import__("tempfile").TemporaryDirectory() as folder:
    control = Control(Local(init_workspace(Path(folder))))
    for operation in OPERATIONS.values():
        for one in operation.parameters.values():
            adapter(one.annotation)
        if not operation.heavy and operation.method == "GET":
            words = {name: 1 if "int" in str(one.annotation) else "x" for name, one in operation.parameters.items()}
            try:
                getattr(control, operation.name)(*words.values())
            except Exception:
                pass
large = {"numpy", "scipy", "pyarrow", "matplotlib", "tokenizers", "torch", "transformers", "pandas"}
print(sorted(large & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=500)
    assert shown.stdout.strip() == "[]", shown.stdout


def test_only_an_admin_of_the_first_project_sweeps_the_store(bench: ServerBench) -> None:
    token = bench.person("ben", Role.ADMIN, "b")
    with pytest.raises(InputError, match="can be swept only in the project default, by an admin, but the project is b"):
        bench.control(token, "b").gc(0.0, dry_run=True)


def waiting(bench: ServerBench, run_id: str) -> str:
    """A run that waits."""
    run = RunRecord(run_id, "stream", digest_json(run_id), "pending", "ann", 0.0)
    with bench.workspace.ledger.transaction("user:ann") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    return run_id


def test_a_stream_ends_when_whoever_follows_it_may_not_any_more(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.server.streams._AGAIN", 0.0)
    run_id = waiting(bench, "stream-22222222")
    token = bench.person("fay", Role.VIEWER)
    stream = Transport(bench.url, token).stream(f"{PROJECT}/runs/{run_id}/watch")
    kind, data = next(stream)
    assert (kind, json.loads(data)["run"]["id"]) == ("status", run_id)
    bench.control(KEY).set_member("user:fay", None)
    with pytest.raises(AccessError, match="has no role"):
        next(stream)


def test_many_who_watch_a_run_read_it_once(bench: ServerBench) -> None:
    watchers, run_id = Watchers(), waiting(bench, "watched-22222222")
    looking = [Looking(watchers, bench.workspace, run_id) for _ in range(50)]
    first = looking[0].read()
    assert all(one.read() is first for one in looking)
    assert watchers.read(bench.workspace, run_id) is not first
    with pytest.raises(NotFoundError):
        watchers.read(bench.workspace.seen_by("user:ben", "b", "os"), run_id)


def test_those_who_wait_keep_nobody_from_an_answer(bench: ServerBench) -> None:
    """Forty heavy requests and forty uploads that do not come on; whoever only looks is answered."""
    held, release = threading.Semaphore(0), threading.Event()
    real = bench.workers.ask

    def slow(*words: Any) -> bytes:
        held.release()
        release.wait()
        return real(*words)

    bench.workers.ask = slow  # type: ignore[method-assign]
    stuck: list[socket.socket] = []
    try:
        threads = [threading.Thread(target=bench.ask, args=("GET", f"{PROJECT}/lineage?target=x")) for _ in range(40)]
        for thread in threads:
            thread.start()
        held.acquire()
        for number in range(40):
            one = socket.create_connection(("127.0.0.1", bench.port))
            head = f"PATCH {blob(str(number).encode() * 9)} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            one.sendall(f"{head}upload-offset: 0\r\nupload-length: 9\r\ncontent-length: 9\r\n\r\n1".encode())
            stuck.append(one)
        assert bench.ask("GET", f"{PROJECT}/runs?limit=1").status == 200
        assert bench.ask("GET", "/healthz", None).status == 200
    finally:
        release.set()
        for one in stuck:
            one.close()
        for thread in threads:
            thread.join()
        bench.workers.ask = real  # type: ignore[method-assign]


# --- what a hostile reviewer did --------------------------------------------------------------------------------------


def planned(bench: ServerBench, token: str, text: str, project: str = "default", name: str = "run.yaml") -> Answer:
    sent = {"path": {"name": name, "text": text, "files": {}}, "seed": None, "setting": []}
    return bench.ask("POST", f"/v1/projects/{project}/plans", token, sent)


@pytest.mark.parametrize(
    "word",
    ["/proc/self/environ", "/etc/shadow", "~/.ssh/id_rsa", "../../server.json", "./x/../../y.jsonl", "/tmp/*.jsonl"],
)
@pytest.mark.parametrize("where", ["data", "model", "reward", "file"])
def test_words_of_a_run_file_name_no_file_of_the_server(bench: ServerBench, word: str, where: str) -> None:
    parts = {"data": "./here.jsonl", "model": "model:x", "reward": "reward:x", where: word}
    reward: Any = {"ref": parts["reward"], **({"files": [word]} if where == "file" else {})}
    run = {
        "name": "spy",
        "owner": "eve",
        "seed": 1,
        "model": parts["model"],
        "data": {"train": parts["data"]},
        "rewards": {"exact": reward},
        "stages": {"grpo": {"kind": "grpo", "model": "base", "data": "train", "reward": "exact", "steps": 1}},
    }
    found = planned(bench, bench.person("eve", Role.SUBMITTER), json.dumps(run))
    assert found.status in (404, 422)
    said = found.json["detail"]
    assert "a server reads only files" in said or "no model of that name" in said or "no such file" in said, said
    assert "root:" not in said
    assert "PATH=" not in said


def test_a_file_of_the_server_is_not_told_from_one_that_is_not(bench: ServerBench) -> None:
    token = bench.person("eve", Role.SUBMITTER)
    said = []
    for word in ("/etc/passwd.jsonl", "/etc/hostname"):
        run = f"name: s\nowner: e\nseed: 1\nmodel: {word}\ndata: {{t: {word}}}\nstages: {{s: {{kind: sft, data: t}}}}\n"
        found = planned(bench, token, run)
        said.append((found.status, found.json["detail"].replace(word, "WORD")))
    assert said[0] == said[1]


def test_a_dataflow_of_ones_own_and_trackers_of_the_server_are_refused(bench: ServerBench) -> None:
    token = bench.person("eve", Role.SUBMITTER)
    head = "name: s\nowner: e\nseed: 1\n"
    own = planned(bench, token, head + "stages: {s: {kind: recipe, recipe: 'mine:flow', data: t, model: base}}\n")
    assert own.status == 422
    places = planned(bench, token, head + "trackers: {csv: {dir: /etc}}\nstages: {s: {kind: sft, data: t}}\n")
    assert places.status == 422


def test_a_file_that_looks_like_a_tree_is_none(bench: ServerBench, theirs: dict[str, str], tmp_path: Path) -> None:
    bench.person("ann", Role.ADMIN, "a")
    mine = bench.tokens["ann"]
    listing = {"format": FORMAT, "files": {"x.jsonl": {"digest": theirs["digest"], "size": len(ROWS)}}}
    lying = tmp_path / "lying.py"
    lying.write_bytes(canonical_json(listing))
    digest = Sender(Transport(bench.url, mine), "a").put(lying.read_bytes())
    seen = bench.workspace.seen_by("user:ann", "a", "os")
    with seen.ledger.transaction("user:ann") as transaction:
        asset = Asset("reward", "lying", 0, digest, "file", 0.0, "user:ann")
        transaction.insert_asset(asset, {digest: lying.stat().st_size})
    sent = {"path": {"name": "x", "digest": digest, "form": "tree"}, "name": "stolen"}
    found = bench.ask("POST", "/v1/projects/a/assets/datasets", mine, sent)
    assert problem_of(found) == (404, "not-found"), found.body
    assert [asset.name for asset in bench.control(mine, "a").assets("dataset")] == []


def test_a_lock_names_no_bytes_of_another_project(bench: ServerBench, theirs: dict[str, str]) -> None:
    bench.person("ann", Role.ADMIN, "a")
    ref = InputRef(source="asset", name="dataset:secret@1", digest=theirs["digest"], form="file")
    made: dict[str, Any] = {"params": {}, "outputs": {"model": "tree"}}
    stage = StageManifest(name="s", kind="sft", trainer="native", inputs={"data": ref}, **made)
    lock = Manifest(name="s", owner="e", seed=1, stages=(stage,), gates=(), budget=Budget(), release=None, code={})
    text = canonical_json(lock.to_json()).decode()
    sent = {"path": {"name": "run.lock.json", "text": text, "files": {}}, "again": False, "seed": None, "setting": []}
    found = bench.ask("POST", "/v1/projects/a/runs", bench.tokens["ann"], sent)
    assert problem_of(found) == (404, "not-found"), found.body
    assert "is not in this workspace" in found.json["detail"]


@pytest.mark.parametrize("files", [{"a": 1, "a/b": 1}, {"": 1}, {"\ud800": 1}])
def test_names_that_cannot_be_beside_each_other_are_refused(bench: ServerBench, files: dict[str, int]) -> None:
    ref = {"name": "x", "digest": Sender(Transport(bench.url, KEY), "default").put(b"x"), "form": "file"}
    run = {"name": "run.yaml", "text": "name: x", "files": dict.fromkeys(files, ref)}
    sent = {"path": run, "seed": None, "setting": []}
    assert bench.ask("POST", "/v1/projects/default/plans", KEY, json.dumps(sent).encode()).status == 422


def test_logs_of_an_unknown_run_are_no_stream(bench: ServerBench) -> None:
    assert problem_of(bench.ask("GET", f"{PROJECT}/runs/nosuch/logs")) == (404, "not-found")


def test_what_was_written_before_a_worker_died_is_not_done_again(bench: ServerBench) -> None:
    ledger, done = bench.workspace.ledger, list[int]()
    request = request_id("key-of-a-worker", "default", bench.workspace.actor, ledger.entropy)
    once = Once(ledger, "os", request)

    def dies(number: str) -> bytes:
        seen = bench.workspace.seen_by(bench.workspace.actor, "default", "os", number)
        with seen.ledger.transaction(seen.actor) as transaction:
            transaction.append_event("test.done", "x", {})
        done.append(1)
        raise InfrastructureError("a worker of the server died")

    with pytest.raises(InfrastructureError):
        once.answer("key-of-a-worker", "submit", {}, dies)
    with pytest.raises(ConflictError, match="was begun and possibly completed"):
        once.answer("key-of-a-worker", "submit", {}, dies)
    assert done == [1]
    with pytest.raises(ConflictError, match="was carried out already"):
        dies(request)  # a worker that woke up late


def test_a_model_that_was_half_made_goes_on_under_its_key(bench: ServerBench) -> None:
    """Workers die between the run that makes a model and its registration; the third try finds the run, and ends."""
    ledger, actor = bench.workspace.ledger, bench.workspace.actor
    request = request_id("key-of-a-model", "default", actor, ledger.entropy)
    once, tries = Once(ledger, "os", request), list[str]()

    def makes(number: str) -> bytes:
        tries.append(number)
        seen = bench.workspace.seen_by(actor, "default", "os", number)
        with seen.ledger.transaction(actor) as transaction:
            if len(tries) == 1:
                transaction.insert_run(
                    RunRecord("model-x-11111111", "model-x", "sha256:" + "1" * 64, "pending", "ann", 1.0), []
                )
            else:
                transaction.append_event("test.done", f"try {len(tries)}", {})
        if len(tries) < 3:
            raise InfrastructureError("a worker of the server died")
        return b'{"made": true}'

    for _ in range(2):
        with pytest.raises(InfrastructureError):
            once.answer("key-of-a-model", "create_model", {}, makes)
        with pytest.raises(InputError, match="must be new for a different request"):
            once.answer("key-of-a-model", "create_model", {"seed": 4}, makes)
    assert once.answer("key-of-a-model", "create_model", {}, makes) == (200, b'{"made": true}')
    assert once.answer("key-of-a-model", "create_model", {}, makes) == (200, b'{"made": true}')
    assert len(set(tries)) == len(tries) == 3
    assert all(one.startswith(request) for one in tries), "the log tells of which request the events are"


@pytest.mark.parametrize("writes", [False, True])
def test_a_server_that_was_suspended_gives_away_nothing_that_another_one_carries_out(
    bench: ServerBench, writes: bool
) -> None:
    """It was taken for gone; then it wakes, and fails."""
    ledger, actor, key = bench.workspace.ledger, bench.workspace.actor, "key-of-the-suspended"
    request = request_id(key, "default", actor, ledger.entropy)
    repeats, another = IdempotencyKeys(ledger, "os"), "elsewhere:7:1"

    def suspended(number: str) -> bytes:
        seen = bench.workspace.seen_by(actor, "default", "os", number)
        if writes:
            with seen.ledger.transaction(actor) as transaction:
                transaction.append_event("test.done", "x", {})
        assert repeats.take_over(key, process_name(), another)
        raise InfrastructureError("a worker of the server died")

    with pytest.raises(InfrastructureError):
        Once(ledger, "os", request).answer(key, "create_model", {}, suspended)
    known = repeats.begin(key, "create_model", digest_bytes(b"whatever"), process_name())
    assert known is not None
    assert (known.state, known.owner) == ("begun", another)


def test_a_token_reaches_no_file_and_no_secret_of_others_by_a_sink(bench: ServerBench) -> None:
    token = bench.person("ben", Role.ADMIN, "b")
    ben = bench.control(token, "b")
    url = "https://example.org/x"
    for kind, settings in (
        ("jsonl", {"path": str(bench.workspace.root / "x.jsonl")}),
        ("webhook", {"url": url, "secret_file": "/etc/shadow"}),
        ("webhook", {"url": url, "secret_env": "POSTTRAIN_SINK_HMAC"}),
        ("webhook", {"url_env": "POSTTRAIN_SINK_PRODHOOK", "secret_env": "POSTTRAIN_SINK_B_HMAC"}),
    ):
        with pytest.raises(InputError, match=r"be added only on the server's machine|must be a secret of project b"):
            ben.add_sink("hook", kind, settings, {"on": ["run-ended"]}, from_start=False)
    assert ben.sinks() == []


def test_an_erasure_reaches_answers_that_are_kept(bench: ServerBench) -> None:
    path = f"{PROJECT}/members/user:zoe-private"
    assert bench.ask("PUT", path, KEY, {"role": "viewer"}, keyed("zoe-was-here")).status == 200
    bench.control(KEY).erase("user:zoe-private", "she left")
    again = bench.ask("PUT", path, KEY, {"role": "viewer"}, keyed("zoe-was-here"))
    assert problem_of(again) == (409, "conflict")
    data = (bench.workspace.root / "ledger.db").read_bytes()
    assert data.count(b"zoe-private") == 0


def ended(bench: ServerBench, run_id: str) -> str:
    """A run that has failed."""
    waiting(bench, run_id)
    with bench.workspace.ledger.transaction("user:ann") as transaction:
        transaction.update_run(transaction.snapshot.run(run_id), state="failed", reason="Lost")
    return run_id


def test_following_ends_with_the_run(bench: ServerBench) -> None:
    run_id = ended(bench, "over-22222222")
    transport = Transport(bench.url, KEY)
    assert list(transport.stream(f"{PROJECT}/runs/{run_id}/logs", {"follow": True})) == [("end", b"{}")]
    assert [kind for kind, _ in transport.stream(f"{PROJECT}/runs/{run_id}/watch")] == ["status", "end"]


@pytest.mark.parametrize("of", ["logs?follow=true", "watch"])
def test_who_follows_a_silent_run_hears_that_somebody_is_there(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Whoever hears nothing for a minute takes the server for gone, and a job may print nothing for hours."""
    monkeypatch.setattr("posttrain.server.streams._SILENT", 0.0)
    run_id = waiting(bench, f"silent-{of[0] * 8}")
    head = f"GET {PROJECT}/runs/{run_id}/{of} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", bench.port)) as follower:
        follower.sendall(head.encode())
        heard = b""
        while b": still here" not in heard:
            heard += (piece := follower.recv(4096))
            assert piece, heard


def test_a_status_is_told_when_it_is_another_one(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.streams._SILENT", 0.0)
    monkeypatch.setattr("posttrain.server.streams._EVERY", 0.0)
    run_id = waiting(bench, "same-22222222")
    head = f"GET {PROJECT}/runs/{run_id}/watch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", bench.port)) as follower:
        follower.sendall(head.encode())
        heard = b""
        while heard.count(b": still here") < 3:
            heard += (piece := follower.recv(4096))
            assert piece, heard
    assert heard.count(b"event: status") == 1


def test_a_run_with_its_stage_in_one_word_is_nothing_that_there_is(bench: ServerBench) -> None:
    said = "'tiny/sft' contains a slash, so no object has this name; give the run and the stage as two arguments"
    with pytest.raises(NotFoundError, match=said):
        remote_control(bench.url, KEY, "default").run("tiny/sft")


def test_a_stream_that_breaks_off_is_one_line(bench: ServerBench) -> None:
    run_id = waiting(bench, "broken-22222222")
    stream = Transport(bench.url, KEY).stream(f"{PROJECT}/runs/{run_id}/watch")
    next(stream)
    bench.app.state.ending = True
    with pytest.raises(InfrastructureError, match="ended early"):
        list(stream)


def test_more_followers_than_threads_are_refused_and_those_who_leave_make_room(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(limits._limits, limits.FOLLOW, CapacityLimiter(2))
    run_id = waiting(bench, "silent-22222222")
    head = f"GET {PROJECT}/runs/{run_id}/logs?follow=true HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
    followers = [socket.create_connection(("127.0.0.1", bench.port)) for _ in range(2)]
    for one in followers:
        one.sendall(head.encode())
        assert b"200" in one.recv(4096)
    with pytest.raises(PosttrainError, match="overloaded"):
        list(Transport(bench.url, KEY).stream(f"{PROJECT}/runs/{run_id}/logs", {"follow": True}))
    for one in followers:
        one.close()
    assert bench.ask("GET", f"{PROJECT}/runs?limit=1").status == 200
    over = ended(bench, "overtoo-22222222")
    while True:  # until the threads of those who left are free
        try:
            found = list(Transport(bench.url, KEY).stream(f"{PROJECT}/runs/{over}/logs", {"follow": True}))
        except PosttrainError:
            continue
        break
    assert found == [("end", b"{}")]


def test_a_run_that_ended_is_given_to_no_driver(bench: ServerBench) -> None:
    over = ended(bench, "driven-22222222")
    with pytest.raises(InputError, match=rf"run {over}: has ended \(\w+\), so there is nothing to drive"):
        bench.control(KEY).detach(over)
