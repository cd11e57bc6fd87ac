"""A workspace that is served: real servers, real clients in folders of their own, and each of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_run import RUN
from workbench import Reference, Workbench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from console_bench import Browser
from server_bench import ServerBench

from serving import Served

pytestmark = pytest.mark.slow


@pytest.fixture
def served(empty: Workbench) -> Iterator[Served]:
    made = Served(empty)
    yield made
    if made.process.poll() is None:
        made.end()
    made.host.wait("the end of the driver", lambda: made.driver() is None)


@pytest.mark.journey
def test_a_run_over_a_server_makes_what_it_makes_here(served: Served, reference: Reference, tmp_path: Path) -> None:
    ann = served.client(tmp_path / "ann", "ann", "submitter")
    ran = ann.run("run", "run.yaml")
    run_id = served.host.run_id()
    assert served.host.outputs(run_id) == reference.outputs
    assert f"run {run_id}: succeeded" in ran.out
    assert (ann.folder / ".cache/posttrain/reports" / run_id / "report.html").stat().st_size > 10_000
    assert not (ann.folder / ".posttrain").exists()
    assert ann.run("ls", "-o", "json").json["runs"][0]["id"] == run_id
    assert ann.run("run", "run.yaml").out.startswith(f"attached to run {run_id}")
    for verb in ("get", "why", "lineage", "verify"):
        assert run_id in ann.run(verb, run_id).out, verb
    assert "micro_batch_tokens: " in ann.run("logs", run_id, "-f").out
    assert reference.outputs["grpo"] in ann.run("get", "prod", "-o", "json").out
    assert "needs the role approver" in ann.run("rollback", "prod", code=13).error
    taken_out_and_asked(ann, served.host)
    served.host.check(run_id)


def taken_out_and_asked(ann: Workbench, host: Workbench) -> None:
    """What the release is used for gives the same from afar as where the workspace is."""
    ann.run("export", "prod", "model")
    host.run("export", "prod", str(host.folder.parent / "model"))
    here, there = (folder / "model" for folder in (host.folder.parent, ann.folder))
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in names if name != "README.md")
    assert "must be a new or empty folder" in ann.run("export", "prod", "model", code=2).error
    asked = ("sample", "prod", "Q: sort 31", "-n", "2", "-o", "json")
    assert ann.run(*asked).json == host.run(*asked).json
    ann.write("mine.jsonl", (host.folder / "heldout.jsonl").read_text())
    measured = ann.run("eval", "prod", "./mine.jsonl", "--max-new-tokens", "24", "-o", "json").json
    assert measured["state"] == "succeeded"
    assert any(name.startswith("mine/") or "/mine/" in name for name in measured["scores"])
    assert (
        ann.run("sweep", "run.yaml", "--set", "grpo.steps=2,3", "--dry-run", "-o", "json").json["runs"][1]["seed"] == 5
    )
    traced = ann.run("trace", "tiny", "--out", "traced", "-o", "json").json
    assert (ann.folder / traced["page"]).stat().st_size > 1000


@pytest.mark.journey
def test_whoever_is_killed_the_run_goes_on(served: Served, reference: Reference, tmp_path: Path) -> None:
    ann = served.client(tmp_path / "ann", "ann", "submitter")
    waiting = ann.start("run", "run.yaml")
    served.host.wait_job()
    served.kill()  # with the driver, which sees that it has no server any more
    served.host.wait("the end of the driver", lambda: served.driver() is None)
    served.start()
    driver = served.host.wait("another driver", served.driver)
    driver.kill()
    served.host.wait("a third driver", lambda: (one := served.driver()) is not None and one.pid != driver.pid)
    ended = ann.finish(waiting)
    assert ended.code == 0, ended.err
    run_id = served.host.run_id()
    assert served.host.outputs(run_id) == reference.outputs
    served.host.check(run_id)


@pytest.mark.journey
def test_two_who_submit_the_same_at_once_get_one_run(served: Served, tmp_path: Path) -> None:
    people = [served.client(tmp_path / name, name, "submitter") for name in ("ann", "ben")]
    both = [one.start("run", "run.yaml", "--detach") for one in people]
    ended = [one.finish(process) for one, process in zip(people, both, strict=True)]
    assert [one.code for one in ended] == [0, 0], ended
    rows = people[0].run("ls", "-o", "json").json["runs"]
    assert len([row for row in rows if row["name"] == "tiny"]) == 1
    run_id = rows[0]["id"]
    assert people[1].run("attach", run_id).code == 0
    served.host.check(run_id)


@pytest.mark.journey
def test_commands_in_a_served_folder_go_through_its_server(served: Served) -> None:
    host = served.host
    assert host.run("whoami", "-o", "json").json["role"] == "admin"
    refused = host.run("serve", "--port", "0", code=9).error
    assert f"is served already, by process {served.process.pid} at {served.url}; end that server first" in refused
    place = host.root / "server.json"
    assert place.stat().st_mode & 0o077 == 0
    known = json.loads(place.read_text())
    place.write_text(json.dumps({**known, "key": "0" * 64}))  # so that a command which asks it is refused
    assert "token" in host.run("ls", code=13).error
    place.write_text(json.dumps(known))
    served.end()
    assert not place.exists()
    assert host.run("ls").code == 0
    served.start()
    served.kill()
    assert place.exists()
    assert host.run("ls").code == 0  # nobody holds the lock
    served.start()


def test_no_token_is_written_down(served: Served, tmp_path: Path) -> None:
    ann = served.client(tmp_path / "ann", "ann", "viewer")
    secret = ann.environment.pop("POSTTRAIN_TOKEN")
    assert "you are not logged in" in ann.run("ls", code=2).error
    shown = subprocess.run(
        [ann.python, "-P", "-m", "posttrain", "login", served.url], input=secret + "\n", text=True, check=True,
        cwd=ann.folder, env=ann.variables(), capture_output=True,
    )  # fmt: skip
    assert "viewer of default" in shown.stdout
    kept = ann.folder / ".config/posttrain/servers.json"
    assert kept.stat().st_mode & 0o077 == 0
    ann.run("ls")
    ann.run("logout", served.url)
    assert secret not in kept.read_text()
    said = (served.host.folder / "serve.log").read_text().split()
    first = next(word for word in said if word.startswith("posttrain_"))
    for path in served.host.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data, path
            assert first.encode() not in data, path
    assert os.environ.get("POSTTRAIN_TOKEN") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_a_server_that_others_can_reach_needs_tls(empty: Workbench, host: str) -> None:
    assert "--tls-certificate" in empty.run("serve", "--host", host, "--port", "0", code=2).error


@pytest.mark.journey
def test_a_browser_sees_what_real_jobs_do(served: Served) -> None:
    host = served.host
    host.write("run.yaml", RUN)
    host.run("run", "run.yaml")
    run_id = host.run_id()
    secret = host.run("token", "issue", "user:root", "--role", "viewer", "-o", "json").json["secret"]
    ann = Browser(ServerBench(None, served.url, None, None, None))  # type: ignore[arg-type]  # which is asked over HTTP alone
    assert ann.log_in(secret).status == 303
    status = ann.get(f"/projects/default/runs/{run_id}").body.decode()
    report = ann.get(f"/projects/default/runs/{run_id}/report").body.decode()  # drawn by a worker's process
    assert "succeeded" in status
    for words in ("grpo: curves", "responses during training", "Gates", "Lineage", "<svg"):
        assert words in report, words
    assert ann.get(f"/projects/default/runs/{run_id}/log").status == 200
    server = psutil.Process(served.process.pid)
    assert server.memory_info().rss < 150 << 20
