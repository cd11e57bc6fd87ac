"""Real jobs and drivers that talk through an object store: nothing of what they say is in the attempt's folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import MODEL, training_row
from workbench import Workbench

from s3_server import s3_server

pytestmark = pytest.mark.slow
SAID = {"start.json", "summary.json", "result.json", "controls"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A folder whose commands know an S3 server on loopback."""
    made = Workbench(tmp_path)
    with s3_server("bucket") as address:
        known = {"ENDPOINT_URL": address, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}
        for name, value in {**known, "REGION": "r"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield made
        made.clean()


def test_a_run_in_a_workspace_with_a_channel_in_a_store(bench: Workbench) -> None:
    dice = random.Random(3)
    bench.write("train.jsonl", "".join(f"{_line(dice)}\n" for _ in range(16)))
    bench.write("model.yaml", MODEL)
    stage = {"kind": "sft", "data": "train", "steps": 4, "batch_size": 4, "runtime": {"checkpoint_every": 2}}
    run = {"name": "far", "owner": "e2e", "seed": 5, "model": "model:tiny", "data": {"train": "./train.jsonl"}}
    bench.write("run.yaml", run | {"stages": {"sft": stage}})
    assert "mailboxes s3://bucket/talk" in bench.run("init", "--mailboxes", "s3://bucket/talk").out
    bench.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
    bench.run("run", "run.yaml")
    run_id = bench.run_id()
    [attempt] = bench.attempts(run_id, "sft")
    assert attempt.state == "succeeded"
    assert not {path.name for path in (bench.root / attempt.folder).iterdir()} & SAID
    assert bench.steps(attempt)[-1] == 4
    bench.check(run_id)


def test_a_real_job_trains_on_rows_that_stay_in_their_store(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)
    rows = "".join(f"{_line(dice)}\n" for _ in range(16)).encode()
    checksum = "sha256:" + hashlib.sha256(rows).hexdigest()
    place = "{}/bucket/rows/train.jsonl".format(os.environ["AWS_ENDPOINT_URL"])
    put = urllib.request.Request(place, rows, {"Content-Type": "application/octet-stream"}, method="PUT")
    urllib.request.urlopen(put).close()
    bench.write("model.yaml", MODEL)
    stage = {"kind": "sft", "data": "train", "steps": 2, "batch_size": 4}
    run = {"name": "far", "owner": "e2e", "seed": 5, "model": "model:tiny", "data": {"train": "dataset:rows"}}
    bench.write("run.yaml", run | {"stages": {"sft": stage}})
    bench.run("init")
    bench.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
    words = ("--external", "s3://bucket/rows/train.jsonl", "--checksum", checksum)
    bench.run("asset", "add", "dataset:rows", *words)
    bench.run("run", "run.yaml")
    run_id = bench.run_id()
    [attempt] = bench.attempts(run_id, "sft")
    assert (attempt.state, bench.steps(attempt)[-1]) == ("succeeded", 2)
    blobs = [path for path in (bench.root / "blobs").rglob("*") if path.is_file()]
    assert rows not in [path.read_bytes() for path in blobs], "the rows are nobody's copy"
    bench.check(run_id)


def _line(dice: random.Random) -> str:
    return json.dumps(training_row(dice))
