"""Several servers on one PostgreSQL and one S3: hosts, each with its folder and its jobs, of which one may be gone."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from teams import Team
from tiny_run import RUN
from workbench import Reference, Workbench

from postgres_server import Server
from s3_server import s3_server
from serving import Served

pytestmark = pytest.mark.postgres
_LONG = {**RUN, "stages": {**RUN["stages"], "sft": {**RUN["stages"]["sft"], "steps": 4000}}}


@pytest.fixture
def team(tmp_path: Path, postgres: Server) -> Iterator[Team]:
    with s3_server("store") as s3:
        made = Team(tmp_path, postgres, s3)
        yield made
        made.close()
        postgres.drop(made.address)


def submitted(somebody: Workbench) -> str:
    """A run that goes on without who asked for it."""
    somebody.run("run", "run.yaml", "--detach")
    return str(somebody.run("ls", "-o", "json").json["runs"][0]["id"])


def steps(somebody: Workbench, run_id: str) -> int:
    """How far its first stage says it is."""
    said: dict[str, Any] = somebody.run("get", run_id, "-o", "json").json
    return int(next(stage for stage in said["stages"] if stage["name"] == "sft")["step"])


def test_whichever_server_is_asked_a_run_says_how_far_it_is(team: Team) -> None:
    secret = team.token("ann")
    people = [team.asker(f"ann{number}", number, secret) for number in (0, 1)]
    people[0].write("run.yaml", _LONG)
    run_id = submitted(people[0])
    place, _ = team.job(run_id)
    far, near = people[1 - place], people[place]
    far.wait("progress that only its host can read", lambda: steps(far, run_id) > 0)
    watching = far.start("get", run_id, "--watch")
    team.servers[place].kill()
    shown = far.run("get", run_id, "-o", "json").json
    assert shown["state"] == "running", "from the ledger, where its host does not answer"
    assert "is on host" in far.run("logs", run_id).out
    team.servers[place].start()
    far.wait("progress again", lambda: steps(far, run_id) > 0)
    far.run("stop", run_id)
    near.wait("its end", lambda: near.run("get", run_id, "-o", "json").json["state"] == "stopped")
    assert far.finish(watching).code in (0, 8), "who watched saw the end, whoever was away meanwhile"
    team.benches[place].wait_quiet()


def test_a_server_is_killed_and_the_database_restarted_in_the_middle(team: Team, reference: Reference) -> None:
    """Two people, two projects, two servers; each waits for a run."""
    ann = team.asker("ann", 0, team.token("ann"))
    team.benches[1].run("project", "add", "other")
    ben = team.asker("ben", 1, team.token("ben", "submitter", "other"))
    ben.environment["POSTTRAIN_PROJECT"] = "other"
    for name in ("train.jsonl", "heldout.jsonl", "model.yaml", "reward.py"):
        ben.write(name, (team.benches[0].folder / name).read_text())
    ben.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
    ben.run("asset", "add", "dataset:train", "train.jsonl")
    ben.run("asset", "add", "dataset:heldout", "heldout.jsonl")
    ben.run("asset", "add", "reward:length", "reward.py")
    waiting = [one.start("run", "run.yaml") for one in (ann, ben)]
    found = ann.wait("two runs", lambda: len(runs := team_runs(team)) == 2 and runs)
    place, _ = team.job(found["default"])
    team.servers[place].kill()
    team.postgres.stop(signal.SIGQUIT)  # as a power cut
    assert readiness(team.servers[1 - place]) == 503
    team.postgres.start()
    team.servers[place].start()
    ended = [one.finish(process) for one, process in zip((ann, ben), waiting, strict=True)]
    assert [one.code for one in ended] == [0, 0], ended
    for person, project in ((ann, "default"), (ben, "other")):
        rows = person.run("get", found[project], "-o", "json").json["stages"]
        assert models(rows, reference) == reference.outputs, project
        assert reference.outputs["grpo"] in person.run("get", "prod", "-o", "json").out
        assert "everything matches" in person.run("verify").out
    for bench in team.benches:
        bench.wait_quiet()


def models(rows: list[dict[str, Any]], reference: Reference) -> dict[str, str]:
    """Digest of each stage's model."""
    return {one["name"]: one["outputs"]["model"]["digest"] for one in rows if one["name"] in reference.outputs}


def team_runs(team: Team) -> dict[str, str]:
    rows = team.postgres.sql("SELECT project, id FROM runs WHERE name = 'tiny'", team.address)
    return {str(project): str(run_id) for project, run_id in rows}


def readiness(served: Served) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    asked.request("GET", "/readyz")
    found = asked.getresponse().status
    asked.close()
    return found


def test_what_a_host_that_is_gone_had_goes_on_elsewhere_by_a_persons_word(team: Team, reference: Reference) -> None:
    secret = team.token("ann")
    people = [team.asker(f"ann{number}", number, secret) for number in (0, 1)]
    run_id = submitted(people[0])
    place, _ = team.job(run_id)
    far, lost = people[1 - place], team.benches[place]
    team.servers[place].kill()
    lost.wait("the end of its driver", lambda: team.servers[place].driver() is None)
    for process in lost.live():  # the machine is gone
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    stage = next(
        one["name"] for one in far.run("get", run_id, "-o", "json").json["stages"] if one["state"] == "running"
    )
    refused = far.run("dead", "--assume-dead", f"{run_id}/{stage}", code=2).error
    assert "s ago; posttrain stop" in refused
    team.postgres.sql("UPDATE hosts SET seen_at = seen_at - 61", team.address)
    far.wait("a word of the host that lives", lambda: alive(team, 1 - place))
    why = far.run("why", run_id).out
    assert "last reported" in why
    assert f"posttrain dead {run_id}/{stage} --assume-dead" in why
    far.run("dead", "--assume-dead", f"{run_id}/{stage}")
    ended = far.run("attach", run_id)
    assert f"run {run_id}: succeeded" in ended.out
    rows = far.run("get", run_id, "-o", "json").json["stages"]
    assert models(rows, reference) == reference.outputs
    team.servers[place].start()  # it comes back, and finds that nothing is its own any more
    assert "everything matches" in far.run("verify").out
    lost.wait_quiet()


def alive(team: Team, place: int) -> bool:
    query = "SELECT id FROM hosts WHERE seen_at > extract(epoch from now()) - 30"
    return team.ids()[place] in [row[0] for row in team.postgres.sql(query, team.address)]


def test_a_database_that_is_away_is_a_problem_document_and_everything_goes_on(team: Team) -> None:
    served, secret = team.servers[0], team.token("ann")
    ann = team.asker("ann", 0, secret)
    team.postgres.stop()
    for method, path in (("GET", "/runs"), ("GET", "/whoami"), ("POST", "/projects"), ("GET", "/runs/x/watch")):
        asked = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        asked.request(method, f"/v1/projects/default{path}", "{}" if method == "POST" else None, headers)
        answer = asked.getresponse()
        document = json.loads(answer.read())
        assert (answer.status, answer.getheader("content-type")) == (503, "application/problem+json"), path
        assert document["type"] == "urn:posttrain:problem:ledger-unavailable"
        assert secret not in json.dumps(document)
        asked.close()
    waiting = ann.start("ls", "-o", "json")
    assert waiting.poll() is None  # it waits for the server, whose database is away
    team.postgres.start()
    found = ann.finish(waiting)
    assert found.code == 0, found.err
    assert [row["state"] for row in found.json["runs"]] == ["succeeded"]
    assert ann.run("ls").code == 0
    served.host.wait("a driver that drives", served.answers)
