"""Lists come in pages: nothing twice, nothing left out, whatever is added between two of them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from server_bench import KEY, Answer, ServerBench, served

from posttrain.api.control import OPERATIONS
from posttrain.api.verbs import MOST, cursor, place
from posttrain.app.control import control_of
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import CursorError, InputError
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord
from posttrain.server.authentication import page

P = "/v1/projects/default"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path) as made:
        made.person("root", Role.ADMIN)
        yield made


def add_runs(bench: ServerBench, numbers: range, at: float | None = None) -> None:
    with bench.workspace.ledger.transaction("user:ann") as transaction:
        for number in numbers:
            moment = float(number) if at is None else at
            digest = digest_json(number)
            transaction.insert_run(RunRecord(f"r-{number:08x}", "r", digest, "pending", "ann", moment), [])


def pages(bench: ServerBench, path: str, limit: int) -> Iterator[dict[str, Any]]:
    joined, behind = "&" if "?" in path else "?", ""
    while True:
        found = bench.ask("GET", f"{P}{path}{joined}limit={limit}{behind}").json
        yield found
        if found["next"] is None:
            return
        behind = f"&cursor={found['next']}"


@pytest.mark.parametrize("limit", [1, 3, 7, 20, 21, 100])
def test_pages_of_runs_are_the_list(bench: ServerBench, limit: int) -> None:
    add_runs(bench, range(10))
    add_runs(bench, range(10, 20), at=5.0)  # many at one moment
    found = [one for page in pages(bench, "/run-ids", limit) for one in page["items"]]
    assert found == control_of(bench.workspace).ids(100)
    assert len(set(found)) == 20
    assert [one["id"] for page in pages(bench, "/runs", limit) for one in page["items"]] == found


def test_what_is_added_between_pages_moves_nothing(bench: ServerBench) -> None:
    add_runs(bench, range(10))
    before, found = control_of(bench.workspace).ids(100), []
    for number, some in enumerate(pages(bench, "/run-ids", 3)):
        found += some["items"]
        add_runs(bench, range(100 + 10 * number, 105 + 10 * number))  # newer ones
    assert found == before
    members, seen = bench.control(KEY), dict[str, str]()
    for number in range(8):
        members.set_member(f"user:m{number}", "viewer")
    for number, some in enumerate(pages(bench, "/members", 2)):
        assert not some["items"].keys() & seen.keys()
        seen |= some["items"]
        members.set_member(f"user:a{number}", "viewer")  # before the place where the next page begins
    assert {f"user:m{number}" for number in range(8)} <= seen.keys()


def test_a_client_follows_pages(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.client.remote._PAGE", 3)
    add_runs(bench, range(11))
    here, there = control_of(bench.workspace), bench.control(KEY)
    for number in range(7):
        there.set_member(f"user:m{number}", "viewer")
        there.issue_token(f"user:m{number}", "viewer", 1.0)
    assert there.ids(100) == here.ids(100)
    assert there.ids(5) == here.ids(5)
    assert there.ids(4, "r-00000005") == here.ids(4, "r-00000005") == [f"r-0000000{n}" for n in (4, 3, 2, 1)]
    assert there.members() == here.members()
    assert list(there.members()) == list(here.members())
    assert there.tokens() == here.tokens()
    assert there.ls(100) == here.ls(100)
    assert len(here.tokens()) == 8


@pytest.mark.parametrize("path", ["/run-ids", "/members"])
def test_a_page_that_ends_with_its_list_has_none_behind_it(bench: ServerBench, path: str) -> None:
    add_runs(bench, range(6))
    for number in range(5):
        bench.person(f"m{number}", Role.VIEWER)
    whole = bench.ask("GET", f"{P}{path}").json["items"]
    assert len(whole) == 6
    assert [len(page["items"]) for page in pages(bench, path, 3)] == [3, 3]
    assert [len(page["items"]) for page in pages(bench, path, 4)] == [4, 2]


def test_lists_come_in_their_own_order_whatever_answers_them() -> None:
    """The tenth sample of a group behind the second; and what a verb says in another order."""
    ids = ["0.0.2", "0.0.10", "0.1.0", "10.0.0", "2.0.0"]
    said = [SimpleNamespace(stage="sft", sample=SimpleNamespace(id=one)) for one in ids]
    found, named = list[str](), dict[str, Any](limit=2)
    while named.get("cursor", "") is not None:
        one = page(OPERATIONS["samples"], named, "default", lambda _: said)
        found += [each.sample.id for each in one["items"]]
        named["cursor"] = one["next"]
    assert found == ["0.0.2", "0.0.10", "0.1.0", "2.0.0", "10.0.0"]


@pytest.mark.parametrize("verb", sorted(name for name, one in OPERATIONS.items() if one.paged))
def test_every_list_comes_in_pages(bench: ServerBench, verb: str) -> None:
    operation = OPERATIONS[verb]
    assert operation.method == "GET"
    assert {"limit", "cursor"} <= operation.parameters.keys()


def problem(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["type"].rpartition(":")[2]


def test_a_cursor_is_of_one_list_of_one_project(bench: ServerBench) -> None:
    add_runs(bench, range(5))
    bench.person("ann", Role.ADMIN, "a")
    mine = bench.ask("GET", f"{P}/run-ids?limit=2").json["next"]
    assert bench.ask("GET", f"{P}/run-ids?limit=3&cursor={mine}").status == 200
    elsewhere = (
        (f"{P}/runs", KEY), (f"{P}/members", KEY), (f"{P}/assets?kind=model", KEY), (f"{P}/run-ids?before=x", KEY),
        ("/v1/projects/a/run-ids", bench.tokens["ann"]),
    )  # fmt: skip
    for path, token in elsewhere:
        joined = "&" if "?" in path else "?"
        assert problem(bench.ask("GET", f"{path}{joined}cursor={mine}", token)) == (422, "cursor"), path
    ids = OPERATIONS["ids"]
    forged = cursor("a", ids, {"before": None}, ("r-00000002",))  # a run of another project, in a cursor of one's own
    absent = cursor("a", ids, {"before": None}, ("r-99999999",))
    found = [bench.ask("GET", f"/v1/projects/a/run-ids?cursor={one}", bench.tokens["ann"]) for one in (forged, absent)]
    assert [problem(one) for one in found] == [(404, "not-found")] * 2
    assert len({one.json["detail"].replace("r-00000002", "").replace("r-99999999", "") for one in found}) == 1


@pytest.mark.parametrize("text", ["x", "0", "=", "ünï", "A" * 5000, "../../etc", "e30", "%00", "null"])
def test_a_cursor_must_be_one(bench: ServerBench, text: str) -> None:
    assert problem(bench.ask("GET", f"{P}/runs?cursor={quote(text)}")) == (422, "cursor")
    whole = cursor("default", OPERATIONS["ls"], {"before": None}, ("r",))
    assert place(whole, "default", OPERATIONS["ls"], {"before": None}) == ("r",)
    for cut in (whole[:-1], whole[1:], whole[:5] + "x" + whole[6:]):
        with pytest.raises(CursorError):
            place(cut, "default", OPERATIONS["ls"], {"before": None})


def forged(body: str) -> str:
    whole = hashlib.sha256(body.encode()).digest()[:6] + body.encode()
    return base64.urlsafe_b64encode(whole).decode().rstrip("=")


@pytest.mark.parametrize("body", ["5", "null", "[1,2]", "[" * 5000, '{"a":1,"b":2,"c":3,"d":4}', "[[[1]],{},[],5]"])
def test_a_cursor_that_somebody_made_is_refused(bench: ServerBench, body: str) -> None:
    for path in ("/runs", "/members"):
        assert problem(bench.ask("GET", f"{P}{path}?cursor={forged(body)}")) == (422, "cursor")


@pytest.mark.parametrize(
    "key", [[None, None], 5, [5], [{"a": 1}], [[]], [True], ["a", "b"], ["\ud800"], ["a\0"], [], "r-00000001"], ids=repr
)
def test_a_cursor_names_what_its_list_has(bench: ServerBench, key: Any) -> None:
    made = cursor("default", OPERATIONS["ids"], {"before": None}, key)
    assert problem(bench.ask("GET", f"{P}/run-ids?cursor={made}")) == (422, "cursor")


@pytest.mark.parametrize("key", [[None], [5], [{"a": 1}], 5])
def test_a_cursor_of_other_values_than_a_list_has_is_refused(bench: ServerBench, key: Any) -> None:
    made = cursor("default", OPERATIONS["members"], {}, key)
    assert problem(bench.ask("GET", f"{P}/members?cursor={made}")) == (422, "cursor")


@pytest.mark.parametrize("limit", ["0", "-1", str(MOST + 1), "1e99", "9" * 40, "x", ""])
def test_a_page_has_a_size(bench: ServerBench, limit: str) -> None:
    assert problem(bench.ask("GET", f"{P}/runs?limit={limit}")) == (422, "input")


def test_numbers_that_no_database_counts_to_are_refused(bench: ServerBench) -> None:
    body = {"config": {"name": "c", "digest": "sha256:" + "0" * 64, "form": "file"}, "name": "m", "seed": 10**30}
    assert problem(bench.ask("POST", f"{P}/assets/made-models", KEY, json.dumps(body).encode())) == (422, "input")
    with pytest.raises(InputError):
        bench.control(KEY).create_model("m", Path(__file__), 10**30)
