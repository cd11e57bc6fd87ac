"""A balancer that keeps nobody at one server: uploads and operations go on at whichever server is asked next."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from teams import Team, balanced
from workbench import Reference

from postgres_server import Server
from s3_server import s3_server
from serving import Served

pytestmark = pytest.mark.postgres
_PROJECT = "/v1/projects/default"
_ROWS, _ROW = 36, 1 << 20  # several parts


@pytest.fixture
def team(tmp_path: Path, postgres: Server) -> Iterator[Team]:
    with s3_server("store") as s3:
        made = Team(tmp_path, postgres, s3)
        yield made
        made.close()
        postgres.drop(made.address)


def rows() -> str:
    drawn = random.Random(3)
    words = ("".join(drawn.choices("abcdefghij", k=_ROW)) for _ in range(_ROWS))
    return "".join(json.dumps({"prompt": f"{number}", "completion": one}) + "\n" for number, one in enumerate(words))


def test_a_server_is_killed_in_the_middle_of_an_upload_and_everything_ends_well(
    team: Team, reference: Reference
) -> None:
    with balanced([one.port for one in team.servers]) as balancer:
        ann = team.asker("ann", 0, team.token("ann"))
        ann.environment["POSTTRAIN_SERVER"] = balancer.url
        data = rows()
        ann.write("big.jsonl", data)
        killed = list[int]()

        def before(method: str, path: str, place: int) -> int | None:
            pieces = [one for one in balancer.asked if one[0] == "PATCH" and one[1] == path]
            if method != "PATCH" or len(pieces) != 3 or killed:
                return None
            team.servers[place].kill()  # with a part that has half come
            killed.append(place)
            return 1 << 20

        balancer.before = before
        ann.run("asset", "add", "dataset:big", "big.jsonl")
        added = ann.run("asset", "get", "dataset:big", "-o", "json").json
        assert added["digest"] == "sha256:" + hashlib.sha256(data.encode()).hexdigest()
        assert killed, "it came in parts"
        pieces = [place for method, _, place in balancer.asked if method == "PATCH"]
        assert len(set(pieces)) == 2, "both servers were sent some of it"
        assert len(pieces) <= len(data) // (8 << 20) + 2, "nothing that had come was sent again"
        assert team.postgres.sql("SELECT count(*) FROM parts", team.address) == [(0,)]
        ann.write("model.yaml", (team.benches[0].folder / "model.yaml").read_text())
        ann.run("asset", "create", "model:other", "model.yaml", "--seed", "4")
        team.servers[killed[0]].start()
        ended = ann.run("run", "run.yaml")
        assert "succeeded" in ended.out
        run_id = ann.run("ls", "-o", "json").json["runs"][0]["id"]
        stages = ann.run("get", run_id, "-o", "json").json["stages"]
        made = {one["name"]: one["outputs"]["model"]["digest"] for one in stages if one["name"] in reference.outputs}
        assert made == reference.outputs
        assert "everything matches" in ann.run("verify").out


# --- operations -------------------------------------------------------------------------------------------------------


class Asker:
    """Asks one server or the other, as they are."""

    def __init__(self, team: Team, secret: str) -> None:
        self._team, self._secret = team, secret

    def __call__(self, place: int, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        asked = http.client.HTTPConnection("127.0.0.1", self._team.servers[place].port, timeout=600)
        headers = {"authorization": f"Bearer {self._secret}", "content-type": "application/json"}
        headers |= {"idempotency-key": key, "prefer": "respond-async, wait=0"} if key else {}
        try:
            asked.request(method, _PROJECT + path, json.dumps(body) if body is not None else None, headers)
            answer = asked.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            asked.close()


@pytest.fixture
def suspend() -> Iterator[Callable[[Served], None]]:
    """Let a server's worker, which is asked next, take for ever."""
    held = []

    def one(served: Served) -> None:
        every = psutil.Process(served.process.pid).children(recursive=True)
        (found,) = [one for one in every if "posttrain.server.worker" in one.cmdline()]
        found.suspend()
        held.append(found)

    yield one
    for found in held:
        with suppress(psutil.NoSuchProcess):
            found.kill()


def sent(team: Team, place: int, secret: str) -> dict[str, Any]:
    """A data set's file, which the project holds."""
    somebody = team.asker(f"somebody{place}", place, secret)
    somebody.write("rows.jsonl", '{"prompt": "a", "completion": "b"}\n')
    somebody.run("asset", "add", "dataset:first", "rows.jsonl")  # now there is a worker, and it is free
    digest = "sha256:" + hashlib.sha256(b'{"prompt": "a", "completion": "b"}\n').hexdigest()
    return {"path": {"name": "rows.jsonl", "digest": digest, "form": "file"}}


def test_an_operation_is_told_of_and_cancelled_at_any_server(team: Team, suspend: Callable[[Served], None]) -> None:
    secret = team.token("ann")
    ask, body = Asker(team, secret), {**sent(team, 0, secret), "name": "mine"}
    suspend(team.servers[0])
    status, said = ask(0, "POST", "/assets/datasets", body, "the-first-key")
    assert (status, said["state"]) == (202, "running")
    place = f"/operations/{said['id']}"
    assert [ask(one, "GET", place)[1]["state"] for one in (0, 1)] == ["running", "running"]
    status, again = ask(1, "POST", "/assets/datasets", body, "the-first-key")
    assert (status, again["id"], again["state"]) == (202, said["id"], "running"), "the same one, and not another"
    stranger = Asker(team, team.token("eve"))
    assert [stranger(one, method, place)[0] for one in (0, 1) for method in ("GET", "DELETE")] == [404] * 4
    status, ended = ask(1, "DELETE", place)
    assert (status, ended["state"], ended["problem"]["type"]) == (200, "cancelled", "urn:posttrain:problem:stopped")
    assert ask(0, "GET", place)[1]["state"] == "cancelled"
    assert ask(1, "POST", "/assets/datasets", {**body, "name": "other"}, "the-second-key")[0] in (200, 202)


def test_an_operation_whose_server_was_killed_says_so_and_is_carried_out_once_elsewhere(
    team: Team, suspend: Callable[[Served], None]
) -> None:
    secret = team.token("ann")
    ask, body = Asker(team, secret), {**sent(team, 0, secret), "name": "mine"}
    suspend(team.servers[0])
    said = ask(0, "POST", "/assets/datasets", body, "the-first-key")[1]
    team.servers[0].kill()
    status, problem = ask(1, "GET", f"/operations/{said['id']}")
    assert (status, problem["type"]) == (404, "urn:posttrain:problem:lost-operation")
    assert "send the request again with the same Idempotency-Key" in problem["detail"]

    def done() -> Any:
        status, found = ask(1, "POST", "/assets/datasets", body, "the-first-key")
        return found if status == 200 else None

    made = team.benches[1].wait("the same, done by the server that lives", done)
    assert (made["name"], made["version"]) == ("mine", 1)
    assert team.benches[1].wait("its answer again", done) == made


def test_a_client_whose_operations_server_is_killed_hears_nothing_of_it(
    team: Team, suspend: Callable[[Served], None]
) -> None:
    secret = team.token("ann")
    sent(team, 0, secret)
    suspend(team.servers[0])
    ports = [team.servers[0].port]

    def before(_method: str, path: str, _place: int) -> int | None:
        if "/operations/" in path and team.servers[0].process.poll() is None:
            team.servers[0].kill()
        ports[:] = [one.port for one in team.servers]
        return None

    with balanced(ports, before) as balancer:
        ann = team.asker("ann", 0, secret)
        ann.environment["POSTTRAIN_SERVER"] = balancer.url
        ann.write("more.jsonl", '{"prompt": "c", "completion": "d"}\n')
        ann.run("asset", "add", "dataset:more", "more.jsonl")
        assert team.servers[0].process.poll() is not None, "it had become an operation"
        assert ann.run("asset", "get", "dataset:more", "-o", "json").json["version"] == 1
