"""The README's demo over servers, as new users play it: two people, two projects, two servers, one PostgreSQL, one S3;
a server is killed in the middle, and the database ended as by a power cut.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_served_hosts import Team
from workbench import Workbench

from postgres_server import Server
from s3_server import s3_server

pytestmark = pytest.mark.postgres
_TASK = os.environ.get("TASK") or "01"
_PLAYED = Path(__file__).resolve().parents[2] / ".demo" / ".posttrain"  # where `make demo` played it


@pytest.fixture
def team(tmp_path: Path, postgres: Server) -> Iterator[Team]:
    with s3_server("store") as s3:
        made = Team(tmp_path, postgres, s3)
        yield made
        made.close()


def released(asked: Workbench) -> list[str]:
    """What a demo released, in its order."""
    told = asked.run("get", "prod", "-o", "json").json
    return [str(one["model_digest"]) for one in told["history"]]


def playing(team: Team, name: str, of: int, project: str) -> tuple[Workbench, subprocess.Popen[str]]:
    who = team.asker(name, of, team.token(name, "approver", project))
    who.environment["POSTTRAIN_PROJECT"] = project
    return who, who.start("demo", "--task", _TASK)


@pytest.mark.timeout(3000)
@pytest.mark.deep
def test_the_demo_over_two_servers_releases_what_it_releases_here(team: Team) -> None:
    for project in ("blue", "green"):
        team.benches[0].run("project", "add", project)
    ann, played = playing(team, "ann", 0, "blue")
    ben, also = playing(team, "ben", 1, "green")
    begun = "a training run of each"
    ann.wait(begun, lambda: len(found := trained(team)) == 2 and found)
    place = team.at(trained(team)["blue"])
    assert place is not None
    team.servers[place].kill()
    team.postgres.stop(signal.SIGQUIT)
    team.postgres.start()
    team.servers[place].start()
    for who, process in ((ann, played), (ben, also)):
        out, err = process.communicate(timeout=2400)
        assert process.returncode == 0, (who.folder.name, out[-2000:], err)
        assert "everything matches" in out
    mine = released(ann)
    assert mine == released(ben)
    assert len(mine) == 3, "two releases and a rollback"
    assert released(played_here(team)) == mine
    for bench in team.benches:
        bench.wait_quiet()


def played_here(team: Team) -> Workbench:
    """The same without a server: as `make demo` left it, where it was played by this version, or played now."""
    here = Workbench(team.folder / "here")
    here.folder.mkdir()
    here.environment = {"POSTTRAIN_WORKSPACE": str(_PLAYED)}
    if _TASK != "01" or not _PLAYED.exists() or here.run("get", "prod", code=None).code:
        here.environment = {}
        here.run("demo", "--task", _TASK)
        here.environment = {"POSTTRAIN_WORKSPACE": str(here.folder / ".demo" / ".posttrain")}
    return here


def trained(team: Team) -> dict[str, str]:
    """Project → a run of which a training stage runs."""
    query = (
        "SELECT runs.project, runs.id FROM runs JOIN attempts ON attempts.run_id = runs.id "
        "WHERE attempts.stage = 'grpo' AND attempts.state = 'launched'"
    )
    return {str(project): str(run_id) for project, run_id in team.postgres.sql(query, team.address)}


def test_who_may_not_roll_back_is_told_before_anything_is_made(team: Team) -> None:
    ann = team.asker("ann", 0, team.token("ann", "submitter"))
    assert "needs the role approver in default" in ann.run("demo", code=13).error
    assert not (ann.folder / ".demo").exists()
    assert json.loads(ann.run("ls", "-o", "json").out)["runs"][0]["name"] == "model-tiny"
