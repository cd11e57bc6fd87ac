"""A served workspace on S3 and a client elsewhere: the same models as without either, and jobs that hold no key."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_served import Served
from tiny_run import make_template
from workbench import Live, Reference, Workbench

from hostile_proxy import GONE, HostileProxy, hostile_proxy
from posttrain.domain.canonical import digest_bytes
from posttrain.store.retries import read_access
from posttrain.store.trees import tree_listing
from s3_server import KEYS, s3_server, use_s3

pytestmark = pytest.mark.slow
OF_THE_SERVER = {
    "AWS_SECRET_ACCESS_KEY": KEYS["SECRET_ACCESS_KEY"],
    "PGPASSWORD": "the-ledgers-password",
    "HF_TOKEN": "the-servers-hub-token",
    "SMTP_PASSWORD": "the-servers-mail-password",
    "SOMETHING_ELSE": "of-the-servers-account",
}
GIVEN = {"LICENSE_SERVER": "given-to-jobs"}


@pytest.fixture
def proxy() -> Iterator[HostileProxy]:
    """In front of the store."""
    with s3_server("artifacts") as address, hostile_proxy(address) as made:
        yield made


@pytest.fixture(params=[()])
def host(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: HostileProxy
) -> Iterator[Workbench]:
    made = Workbench(tmp_path / "host")
    made.folder.mkdir()
    use_s3(monkeypatch, proxy.url)
    made.environment = {**OF_THE_SERVER, **GIVEN, "POSTTRAIN_STORE": "s3://artifacts/team"}
    made.run("init", *request.param)
    make_template(made)
    made.run("init", "--job-variable", "LICENSE_SERVER")
    yield made
    made.clean()


@pytest.fixture
def served(host: Workbench) -> Iterator[Served]:
    made = Served(host)
    yield made
    if made.process.poll() is None:
        made.end()
    host.wait("the end of the driver", lambda: made.driver() is None)


@pytest.mark.journey
def test_a_run_over_a_server_on_s3_makes_what_it_makes_here(
    served: Served, reference: Reference, tmp_path: Path
) -> None:
    host, ann = served.host, served.client(tmp_path / "ann", "ann", "submitter")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL"):
        ann.environment[f"AWS_{name}"] = ""
    running = ann.start("run", "run.yaml")
    job = host.wait_job()
    holds_no_key(host, job)
    token = reaches_its_inputs_alone(served, job)
    ended = ann.finish(running)
    assert ended.code == 0, ended.err
    run_id = host.run_id()
    assert host.outputs(run_id) == reference.outputs
    assert asked(served, token, f"/v1/attempt/blobs/{reference.outputs['sft']}") == 401  # its attempt is over
    ann.run("export", "prod", "model")
    assert (ann.folder / "model" / "model.safetensors").stat().st_size > 0
    assert run_id in ann.run("verify", run_id).out
    for folder in host.root.glob(f"runs/{run_id}/*/*"):
        nothing_is_written(folder)
    said = (host.folder / "serve.log").read_text()
    assert not [word for word in OF_THE_SERVER.values() if word in said]
    assert token not in said
    assert "X-Amz-Signature" not in said
    host.check(run_id)


def holds_no_key(host: Workbench, job: Live) -> None:
    """Neither the job nor whoever it descends from, as far as that is its server's doing."""
    seen = host.live()
    assert {one.kind for one in seen} >= {"job", "supervisor"}
    for one in seen:
        try:
            found = dict(
                word.partition("=")[::2] for word in Path(f"/proc/{one.pid}/environ").read_text().split("\0") if word
            )
        except (FileNotFoundError, ProcessLookupError):
            assert one.pid != job.pid
            continue
        assert not found.keys() & OF_THE_SERVER.keys(), one
        assert not [name for name in found if name.startswith(("AWS_", "PG", "POSTTRAIN_"))], one
        assert not set(found.values()) & set(OF_THE_SERVER.values()), one
        assert GIVEN.items() <= found.items(), one
    order = json.loads((job.attempt / "job.json").read_text())
    assert (order["store_url"], order["served"]) == ("", True)
    nothing_is_written(job.attempt)


def nothing_is_written(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [word for word in OF_THE_SERVER.values() if word.encode() in data], path
            assert b"s3://" not in data, path
            assert b"X-Amz-Signature" not in data, path


def reaches_its_inputs_alone(served: Served, job: Live) -> str:
    """What the job's token opens; the token."""
    access = read_access(job.attempt)
    assert access is not None
    assert (job.attempt / "access.json").stat().st_mode & 0o077 == 0
    assert access.token not in repr(access)
    order = json.loads((job.attempt / "job.json").read_text())
    with served.host.open() as workspace:
        other = workspace.blobs.put(b"of somebody else")
        heldout = digest_bytes((served.host.folder / "heldout.jsonl").read_bytes())
        model = order["inputs"]["model"]["digest"]
        files = [file.digest for file in tree_listing(workspace.blobs, model).values()]
        assert workspace.blobs.has(heldout)
    reached = {model, *files, *(blob["digest"] for blob in order["inputs"].values())}
    assert {asked(served, access.token, f"/v1/attempt/blobs/{digest}") for digest in reached} == {200}
    for digest in (other, heldout, "sha256:" + "0" * 64, "..%2f..%2fledger.db"):
        assert asked(served, access.token, f"/v1/attempt/blobs/{digest}") == 404
    for path in ("/v1/projects/default/whoami", "/v1/projects/default/runs", f"/v1/projects/default/blobs/{model}"):
        assert asked(served, access.token, path) == 401
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        assert asked(served, access.token, f"/v1/attempt/blobs/{model}", method) in (405, 422)
    assert asked(served, "posttrain_job_" + "x" * 43, f"/v1/attempt/blobs/{model}") == 401
    assert asked(served, "", f"/v1/attempt/blobs/{model}") == 401
    key = json.loads((served.host.root / "server.json").read_text())["key"]
    assert asked(served, key, f"/v1/attempt/blobs/{model}") == 401  # no person's token is taken either
    return access.token


def asked(served: Served, token: str, path: str, method: str = "GET") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    try:
        connection.request(method, path, headers={"authorization": f"Bearer {token}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_job_waits_for_a_server_that_was_killed(served: Served, reference: Reference, tmp_path: Path) -> None:
    """Its next inputs come from the server that follows, at another address, by the token that it has."""
    ann = served.client(tmp_path / "ann", "ann", "submitter")
    running = ann.start("run", "run.yaml")
    job = served.host.wait_job()
    before = read_access(job.attempt)
    served.kill()
    served.host.wait("the end of the driver", lambda: served.driver() is None)
    served.start()
    ended = ann.finish(running)
    assert ended.code == 0, ended.err
    assert before is not None
    assert served.host.outputs(served.host.run_id()) == reference.outputs
    assert os.environ.get("POSTTRAIN_TOKEN") is None


def test_a_store_that_is_away_when_a_job_has_ended_is_waited_for(
    served: Served, proxy: HostileProxy, reference: Reference, tmp_path: Path
) -> None:
    """What the job left is published when the store is back: nothing is computed again."""
    host, ann = served.host, served.client(tmp_path / "ann", "ann", "submitter")
    running = ann.start("run", "run.yaml", "--detach")
    job = host.wait_job()
    assert ann.finish(running).code == 0
    host.wait("its inputs", (job.attempt / "summary.json").exists)
    proxy.ill(GONE)
    host.wait("the end of the job", (job.attempt / "result.json").exists)
    proxy.seen.clear()
    host.wait("tries to publish", lambda: len(proxy.seen) > 20)
    assert asked(served, ann.environment["POSTTRAIN_TOKEN"], "/v1/projects/default/whoami") == 200
    proxy.heal()
    run_id = host.run_id()
    assert ann.run("attach", run_id).code == 0
    assert host.outputs(run_id) == reference.outputs
    assert [one.state for one in host.attempts(run_id, "sft")] == ["succeeded"]
    host.check(run_id)


@pytest.mark.parametrize("host", [("--mailboxes", "s3://artifacts/talk")], indirect=True)
def test_jobs_talk_to_a_channel_in_the_store_through_the_server(
    served: Served, proxy: HostileProxy, reference: Reference, tmp_path: Path
) -> None:
    ann = served.client(tmp_path / "ann", "ann", "submitter")
    running = ann.start("run", "run.yaml")
    job = served.host.wait_job()
    assert not {path.name for path in job.attempt.iterdir()} & {"start.json", "summary.json"}
    ended = ann.finish(running)
    assert ended.code == 0, ended.err
    run_id = served.host.run_id()
    assert served.host.outputs(run_id) == reference.outputs
    assert not (job.attempt / "result.json").exists()
    assert [path for _, path, _ in proxy.seen if "/talk/" in path and path.endswith("result.json")]
    served.host.check(run_id)
