"""Data sets that stay where they are: registered by URI and checksum, read over S3's protocol and from files."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from cli_world import World, make_world

import posttrain
from posttrain.app.workspace import open_workspace
from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.domain.jobs import JobOrder
from posttrain.domain.jobspec import JobSpec
from posttrain.jobs.entry import Job
from posttrain.store import external as external_store
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.external import External, external
from s3_server import s3_server

SECRET = "sixteen-letters-and-more"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 server of this process, on loopback, with a bucket and one that keeps versions."""
    with s3_server("bucket", "kept") as address:
        yield address


class Elsewhere:
    """An object that lies elsewhere."""

    def __init__(self, uri: str, file: Path | None = None) -> None:
        self.uri, self._file = uri, file

    def put(self, data: bytes) -> str:
        """Its checksum."""
        if self._file is not None:
            self._file.write_bytes(data)
        else:
            bucket, _, key = self.uri.removeprefix("s3://").partition("/")
            boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=data)
        return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()

    def remove(self) -> None:
        if self._file is not None:
            self._file.unlink()
        else:
            bucket, _, key = self.uri.removeprefix("s3://").partition("/")
            boto3.client("s3").delete_object(Bucket=bucket, Key=key)


@pytest.fixture
def keys(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in (("ALLOW_HTTP", "true"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", SECRET)):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: None) -> World:
    folder = tmp_path / "work"
    folder.mkdir()
    made = make_world(folder, monkeypatch)
    made.prepare()
    return made


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, keys: None) -> Elsewhere:
    if request.param == "s3":
        return Elsewhere(f"s3://bucket/{tmp_path.name}/my rows.jsonl")
    return Elsewhere((tmp_path / "my rows.jsonl").as_uri(), tmp_path / "my rows.jsonl")


def rows(first: int = 0, count: int = 40) -> bytes:
    made = [{"prompt": f"Q: far {i}", "completion": f"A: {i}", "answer": str(i)} for i in range(first, first + count)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


def add(world: World, place: Elsewhere, checksum: str) -> str:
    return world.ok("asset", "add", "dataset:far", "--external", place.uri, "--checksum", checksum)


def use(world: World) -> None:
    world.write("run.yaml", (world.root / "run.yaml").read_text().replace("train: dataset:train", "train: dataset:far"))


def everything(world: World) -> bytes:
    """All that the workspace wrote down, but what it may forget."""
    kept = [path for path in (world.root / ".posttrain").rglob("*") if path.is_file() and "cache" not in path.parts]
    return b"".join(path.read_bytes() for path in kept)


def test_it_is_registered_and_not_copied(world: World, place: Elsewhere) -> None:
    data = rows()
    checksum = place.put(data)
    blobs = sum(path.is_file() for path in (world.root / ".posttrain" / "artifacts").rglob("*"))
    assert "rows 40" in add(world, place, checksum)
    asset = world.json("asset", "get", "dataset:far")
    assert (asset["form"], asset["digest"], asset["meta"]["uri"]) == ("external", checksum, place.uri)
    assert (asset["meta"]["prompts"], asset["meta"]["answers"]) == (40, 40)
    assert add(world, place, checksum).startswith("dataset:far@1 "), "the same again is the same version"
    assert sum(path.is_file() for path in (world.root / ".posttrain" / "artifacts").rglob("*")) == blobs
    assert b"Q: far 7" not in b"".join(p.read_bytes() for p in (world.root / ".posttrain").rglob("*") if p.is_file())


def test_a_run_reads_it_and_its_jobs_need_no_key(
    world: World, place: Elsewhere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checksum = place.put(rows())
    add(world, place, checksum)
    use(world)
    seen: list[bytes] = []
    usual = world.executor._on_launch

    def job(request: JobSpec) -> int | None:
        folder = AttemptFolder(request.folder)
        order = folder.read_order()
        if order.kind == "sft":
            seen.append(read_input(folder, order))
        return usual(request)

    def read_input(folder: AttemptFolder, order: JobOrder) -> bytes:
        """As a job reads it whose store holds nothing, so that what it gets was put there for it."""
        nothing = open_blobs(tmp_path / "nothing")
        body: Any = Job(folder, order, lambda fact: None, lambda: None, nothing, lambda: False, tmp_path)
        return bytes(body.input("data").read_bytes())

    monkeypatch.setattr(world.executor, "_on_launch", job)
    world.ok("attach", submit(world))
    assert seen == [rows()]
    assert SECRET.encode() not in everything(world)
    tree = world.ok("lineage", "prod")
    assert place.uri in json.dumps(world.json("lineage", "prod"))
    assert "uri" in tree
    assert "everything matches" in world.ok("verify", "prod")


def test_a_changed_object_is_refused_with_both_checksums(world: World, place: Elsewhere) -> None:
    checksum = place.put(rows())
    add(world, place, checksum)
    use(world)
    other = place.put(rows(100))
    for command in (("plan", "run.yaml"), ("run", "run.yaml")):
        refused = world(*command)
        assert refused.exit_code == 8, refused.stdout
        (line,) = refused.stderr.strip().splitlines()
        assert f"checksum must be {checksum}, got {other}" in line
        assert f"posttrain asset add dataset:far --external {place.uri} --checksum {other}" in line
    assert world.json("ls")["runs"] == []
    assert world("verify", "dataset:far").exit_code == 8
    world.ok("asset", "add", "dataset:far", "--external", place.uri, "--checksum", other)
    assert world.json("asset", "get", "dataset:far")["version"] == 2
    world.ok("run", "run.yaml")


def test_one_that_changes_after_the_plan_fails_its_stage_for_a_person(world: World, place: Elsewhere) -> None:
    checksum = place.put(rows())
    add(world, place, checksum)
    use(world)
    run = submit(world)
    other = place.put(rows(100))
    assert world("attach", run).exit_code == 2
    status = world.json("get", run)
    sft = next(stage for stage in status["stages"] if stage["name"] == "sft")
    assert (sft["state"], len(sft["attempts"])) == ("failed", 1)
    assert checksum in sft["message"]
    assert other in sft["message"]
    place.put(rows())
    world.ok("retry", run)


def test_a_store_that_is_away_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Elsewhere("s3://bucket/away.jsonl")
    add(world, place, place.put(rows()))
    use(world)
    run = submit(world)
    usual, away = external_store._stream, ["twice", "in a row"]

    def stream(found: External) -> Iterator[bytes]:
        if away:
            raise InfrastructureError(f"{found} cannot be read: the store is away {away.pop()}")
        return usual(found)

    monkeypatch.setattr(external_store, "_stream", stream)
    away.pop()
    world.ok("attach", run)
    sft = next(stage for stage in world.json("get", run)["stages"] if stage["name"] == "sft")
    assert [attempt["state"] for attempt in sft["attempts"]] == ["lost", "succeeded"]


def test_verify_tells_of_a_store_that_does_not_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Elsewhere("s3://bucket/silent.jsonl")
    add(world, place, place.put(rows()))
    with socket.socket() as held:  # nobody listens on it
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{held.getsockname()[1]}")
        said = world.ok("verify", "dataset:far")
    assert "not verified here: dataset:far@1: s3://bucket/silent.jsonl cannot be read" in said
    assert SECRET not in said


def submit(world: World) -> str:
    """A run that nobody drives, and whose data are not here any more; its id."""
    run = posttrain.submit(world.root / "run.yaml", workspace=open_workspace(world.root))
    forget(world)
    return run.id


def forget(world: World) -> None:
    """What was fetched may be forgotten at any time."""
    for path in (world.root / ".posttrain" / "cache" / "files").glob("*"):
        path.unlink()


def test_verify_says_what_it_cannot_see_from_here(world: World, tmp_path: Path) -> None:
    place = Elsewhere((tmp_path / "rows.jsonl").as_uri(), tmp_path / "rows.jsonl")
    add(world, place, place.put(rows()))
    place.remove()
    said = world.ok("verify", "dataset:far")
    assert "not verified here: dataset:far@1: there is no object file:///" in said
    assert "everything else matches" in said
    assert world.json("verify", "dataset:far")["checked"] == 0


def test_an_object_that_is_gone_from_its_store_is_a_problem(world: World) -> None:
    place = Elsewhere("s3://bucket/gone.jsonl")
    add(world, place, place.put(rows()))
    place.remove()
    refused = world("verify", "dataset:far")
    assert (refused.exit_code, "there is no object s3://bucket/gone.jsonl; restore it" in refused.stderr) == (8, True)
    use(world)
    assert "there is no object s3://bucket/gone.jsonl; restore it" in world("plan", "run.yaml").stderr


def test_a_version_of_the_store_is_what_is_read(world: World) -> None:
    client = boto3.client("s3")
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    place = Elsewhere("s3://kept/rows.jsonl")
    checksum = place.put(rows())
    version = client.list_object_versions(Bucket="kept")["Versions"][0]["VersionId"]
    place.put(rows(100))
    words = ("asset", "add", "dataset:far", "--external", place.uri, "--checksum", checksum)
    assert world(*words).exit_code == 2, "the latest version has other bytes"
    world.ok(*words, "--version", version)
    assert world.json("asset", "get", "dataset:far")["meta"]["version"] == version
    use(world)
    world.ok("run", "run.yaml")
    assert version in json.dumps(world.json("lineage", "prod"))
    assert "everything matches" in world.ok("verify", "prod")


def test_where_it_lies_decides_no_result(world: World, place: Elsewhere) -> None:
    """The same bytes of the artifact store are the same input: nothing is computed again."""
    data = rows()
    (world.root / "near.jsonl").write_bytes(data)
    world.ok("asset", "add", "dataset:near", "near.jsonl")
    text = (world.root / "run.yaml").read_text()
    world.write("near.yaml", text.replace("train: dataset:train", "train: dataset:near"))
    world.ok("run", "near.yaml")
    add(world, place, place.put(data))
    use(world)
    world.ok("run", "run.yaml")
    assert {stage["cached_from"] is not None for stage in world.json("get", world.newest())["stages"][:2]} == {True}


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        (f"s3://key:{SECRET}@bucket/rows.jsonl", "external URI s3://bucket/rows.jsonl must contain no credentials"),
        (f"https://host/rows.jsonl?X-Amz-Signature={SECRET}", "external URI https://host/rows.jsonl must contain no"),
        ("ftp://host/rows.jsonl", "must begin with s3://, gs://, az://, file://, got 'ftp://host"),
        ("rows.jsonl", "must begin with s3://"),
        ("s3://bucket", "must name one object"),
        ("s3://bucket/rows/", "must name one object"),
        ("s3:///rows.jsonl", "must name one object"),
        ("file://host/rows.jsonl", "must name one object"),
    ],
)
def test_a_uri_that_cannot_be_kept_is_refused(world: World, uri: str, told: str) -> None:
    refused = world("asset", "add", "dataset:far", "--external", uri, "--checksum", "sha256:" + "0" * 64)
    assert (refused.exit_code, told in refused.stderr) == (2, True), refused.stderr
    assert SECRET not in refused.stderr + refused.stdout
    assert SECRET.encode() not in everything(world)
    assert world.json("asset", "ls", "dataset") == [a for a in world.json("asset", "ls") if a["kind"] == "dataset"]


def test_what_is_asked_wrongly_is_refused(world: World, place: Elsewhere) -> None:
    checksum = place.put(rows())
    far = ("--external", place.uri)
    for words, told in (
        (("dataset:far", *far), "--external needs --checksum sha256:…"),
        (("dataset:far", *far, "--checksum", checksum[7:]), "checksum must be `sha256:` followed by 64 hex digits"),
        (("dataset:far", *far, "--checksum", "sha256:" + "0" * 64), f"check the URI, or write --checksum {checksum}"),
        (("dataset:far", "train.jsonl", *far, "--checksum", checksum), "give --external URI or PATH, got both"),
        (("dataset:far", "train.jsonl", "--checksum", checksum), "need --external URI, got none"),
        (("dataset:far",), "needs a PATH or --external URI"),
        (("model:far", *far, "--checksum", checksum), "--external is for data sets only, got a model"),
        (("dataset:far", "--external", "s3://bucket/no.jsonl", "--checksum", checksum), "there is no object s3://bu"),
    ):
        refused = world("asset", "add", *words)
        assert (refused.exit_code, told in refused.stderr) == (2, True), (words, refused.stderr)
    bad = Elsewhere("s3://bucket/bad.jsonl")
    refused = world("asset", "add", "dataset:far", "--external", bad.uri, "--checksum", bad.put(b"{broken\n"))
    assert (refused.exit_code, "bad.jsonl:1" in refused.stderr) == (2, True), refused.stderr
    assert world("asset", "get", "dataset:far").exit_code == 2, "nothing of all that was registered"


def test_a_files_version_is_refused() -> None:
    with pytest.raises(InputError, match="a version can be given only for an object in s3, gs, az, got '3'"):
        external("file:///rows.jsonl", "3")
    assert str(external("gs://bucket/rows.jsonl", "3")) == "gs://bucket/rows.jsonl (version 3)"
    assert External("s3://bucket/my%20rows.jsonl").name == "my rows.jsonl"


def test_its_words_can_be_erased_and_it_is_used_all_the_same(world: World, place: Elsewhere) -> None:
    add(world, place, place.put(rows()))
    world.ok("erase", "dataset:far@1", "--reason", "asked for")
    assert world.json("asset", "get", "dataset:far@1")["meta"]["uri"] == place.uri
    use(world)
    world.ok("run", "run.yaml")
    assert "everything matches" in world.ok("verify", "prod")


def test_a_damaged_copy_is_fetched_again(world: World, place: Elsewhere) -> None:
    checksum = place.put(rows())
    add(world, place, checksum)
    use(world)
    copy = world.root / ".posttrain" / "cache" / "files" / checksum.removeprefix(DIGEST_PREFIX)
    world.ok("plan", "run.yaml")
    assert copy.read_bytes() == rows()
    copy.chmod(0o600)
    copy.write_bytes(rows(100))
    world.ok("run", "run.yaml")
    assert copy.read_bytes() == rows()
