"""Real jobs and drivers that talk through an object store: nothing of what they say is in the attempt's folder."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import MODEL, training_row
from workbench import Workbench

pytestmark = pytest.mark.slow
SAID = {"start.json", "summary.json", "result.json", "controls"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A folder whose commands know an S3 server on loopback."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    made = Workbench(tmp_path)
    known = {"ENDPOINT_URL": address, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}
    for name, value in {**known, "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield made
    made.clean()
    server.stop()


def test_a_run_in_a_workspace_with_a_channel_in_a_store(bench: Workbench) -> None:
    dice = random.Random(3)
    bench.write("train.jsonl", "".join(f"{_line(dice)}\n" for _ in range(16)))
    bench.write("model.yaml", MODEL)
    stage = {"kind": "sft", "data": "train", "steps": 4, "batch_size": 4, "runtime": {"checkpoint_every": 2}}
    run = {"name": "far", "owner": "e2e", "seed": 5, "model": "model:tiny", "data": {"train": "./train.jsonl"}}
    bench.write("run.yaml", run | {"stages": {"sft": stage}})
    assert "attempt channels s3://bucket/talk" in bench.run("init", "--attempt-channels", "s3://bucket/talk").out
    bench.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
    bench.run("run", "run.yaml")
    run_id = bench.run_id()
    [attempt] = bench.attempts(run_id, "sft")
    assert attempt.state == "succeeded"
    assert not {path.name for path in (bench.root / attempt.folder).iterdir()} & SAID
    assert bench.steps(attempt)[-1] == 4
    bench.check(run_id)


def _line(dice: random.Random) -> str:
    return json.dumps(training_row(dice))
