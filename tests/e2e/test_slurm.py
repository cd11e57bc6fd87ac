"""Runs on a real Slurm of two nodes: requeued, preempted, and with a node lost, they compute what the laptop computes."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RUN, make_template
from workbench import Reference, Workbench

from posttrain.store.staging import StagingArea
from s3_server import KEYS, s3_server, use_s3
from slurm_cluster import Cluster

pytestmark = pytest.mark.slurm
ON = {"placement": {"collocated": {"gpus": 1, "kind": "h100"}}}
FLAVOURS: dict[str, Any] = {
    "executors": {"slurm-a": {"kind": "slurm", "settle": "2s"}},
    "flavours": {
        "h100": {"executor": "slurm-a", "partition": "low", "gpus_per_node": 2, "time_limit": "30m"},
        "small": {"executor": "slurm-a", "partition": "low"},
    },
    "default": "small",
}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with s3_server("far") as address:
        use_s3(monkeypatch, address)
        yield {"AWS_ENDPOINT_URL": address, **{f"AWS_{name}": value for name, value in KEYS.items()}}


@pytest.fixture
def bench(tmp_path: Path, s3: dict[str, str], slurm: Cluster) -> Iterator[Workbench]:
    """A workspace whose jobs run on Slurm's nodes, which reach S3 with a profile of their own."""
    made = Workbench(tmp_path / "here")
    made.folder.mkdir()
    made.environment = {**s3, **slurm.environment, "POSTTRAIN_STORE": f"s3://far/{tmp_path.name}"}
    make_template(made, "--mailboxes", f"s3://far/mail-{tmp_path.name}")
    node = tmp_path / "node-python"
    profile = "".join(f"export {name}={value}\n" for name, value in s3.items())
    scratch = tmp_path / "scratch"
    node.write_text(f'#!/bin/sh\n{profile}export POSTTRAIN_SCRATCH={scratch}\nexec {sys.executable} "$@"\n')
    node.chmod(node.stat().st_mode | stat.S_IXUSR)
    settings = {**FLAVOURS, "executors": {"slurm-a": {**FLAVOURS["executors"]["slurm-a"], "python": str(node)}}}
    made.write("executors.yaml", settings)
    made.run("executor", "add", "executors.yaml")
    yield made
    made.clean()
    slurm.ask("scancel", "--user=root")


def placed(bench: Workbench) -> None:
    """Put the training stages on h100; the others run on the default flavour."""
    run = {
        **RUN,
        "stages": {name: {**one, **(ON if name in ("sft", "grpo") else {})} for name, one in RUN["stages"].items()},
    }
    bench.write("run.yaml", run)


def job_of(cluster: Cluster, stage: str) -> str | None:
    """The number of the running job of a stage."""
    lines = cluster.ask("squeue", "-h", "--states=RUNNING", "-o", "%i %j").splitlines()
    return next((line.split()[0] for line in lines if f"-{stage}-" in line), None)


def step_of(bench: Workbench, stage: str, least: int) -> bool:
    found = bench.run("get", bench.run_id(), "-o", "json").json["stages"]
    return any(one["name"] == stage and (one.get("step") or 0) >= least for one in found)


def test_a_run_is_requeued_preempted_and_loses_a_node_and_computes_what_the_laptop_computes(
    bench: Workbench, slurm: Cluster, reference: Reference, tmp_path: Path
) -> None:
    placed(bench)
    refused = bench.run("run", "run.yaml", code=2)
    assert "nodes of flavour h100 must be proven" in refused.error
    proven = bench.run("executor", "doctor", "-o", "json").json
    assert [(one["flavour"], one["trouble"]) for one in proven] == [("h100", ""), ("small", "")]
    running = bench.start("run", "run.yaml")
    first = bench.wait("sft on a node", lambda: job_of(slurm, "sft"))
    slurm.ask("scontrol", "requeue", first)
    ended = bench.finish(running)
    assert ended.code == 0, ended.err
    run_id = bench.run_id()
    assert bench.outputs(run_id) == reference.outputs
    assert len(bench.attempts(run_id, "sft")) == 1, "Slurm's requeue keeps the attempt"
    leaves_nothing(bench, slurm, tmp_path)


def leaves_nothing(bench: Workbench, slurm: Cluster, tmp_path: Path) -> None:
    assert slurm.ask("squeue", "-h", "-o", "%i %j %T") == ""
    assert list((tmp_path / "scratch").glob("job-*")) == []
    bench.run("gc", "--older-than", "0s")
    assert list(StagingArea(bench.environment["POSTTRAIN_STORE"]).stored()) == []
    agents = subprocess.run(["pgrep", "-f", "posttrain.execution.agent"], capture_output=True, check=False).stdout
    assert agents == b""
