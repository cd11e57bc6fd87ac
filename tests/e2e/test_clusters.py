"""Runs on a real Slurm and a real Ray, of two nodes each, compute what the laptop computes, whatever happens there."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import RUN, SHORT, make_template
from workbench import PATIENCE, Workbench

from posttrain.app.examples import load_demo
from posttrain.store.attempts import mailbox_at
from posttrain.store.mailbox import Mailbox
from posttrain.store.staging import StagingArea
from posttrain.store.trees import scratch
from ray_cluster import Cluster as Ray
from slurm_cluster import Cluster as Slurm

ON = {"placement": {"collocated": {"gpus": 1, "kind": "h100"}}}
SLURM: dict[str, Any] = {
    "executors": {"slurm-a": {"kind": "slurm", "settle": "2s"}},
    "flavours": {
        "h100": {"executor": "slurm-a", "partition": "low", "gpus_per_node": 2, "time_limit": "30m"},
        "small": {"executor": "slurm-a", "partition": "low"},
    },
    "default": "small",
}


@pytest.fixture
def bench(tmp_path: Path, s3: dict[str, str]) -> Iterator[Workbench]:
    """A workspace in S3, without executors."""
    made = Workbench(tmp_path / "here")
    made.folder.mkdir()
    made.environment = {**s3, "POSTTRAIN_STORE": f"s3://far/{tmp_path.name}"}
    make_template(made, "--mailboxes", f"s3://far/mail-{tmp_path.name}")
    yield made
    made.clean()


def node_python(folder: Path, s3: dict[str, str]) -> str:
    """Python on a node, where a profile of the node's own reaches S3."""
    node = folder / "node-python"
    profile = "".join(f"export {name}={value}\n" for name, value in s3.items())
    scratch = folder / "scratch"
    node.write_text(f'#!/bin/sh\n{profile}export POSTTRAIN_SCRATCH={scratch}\nexec {sys.executable} "$@"\n')
    node.chmod(node.stat().st_mode | stat.S_IXUSR)
    return str(node)


def declare(bench: Workbench, cluster: dict[str, Any], python: str) -> None:
    """Declare the executors with this Python, and prove their flavours."""
    executors = {name: {**one, "python": python} for name, one in cluster["executors"].items()}
    bench.write("executors.yaml", {**cluster, "executors": executors})
    bench.run("executor", "add", "executors.yaml")
    placed(bench)
    assert (
        "a probe must show that the nodes of flavour h100 reach the store" in bench.run("run", "run.yaml", code=2).error
    )
    proven = bench.run("executor", "doctor", "-o", "json").json
    assert [(one["flavour"], one["trouble"]) for one in proven] == [("h100", ""), ("small", "")]


def sorting(bench: Workbench) -> dict[str, Any]:
    """Copy the sorting example into a workspace, and register its assets; return its run file."""
    bench.run("examples", "01", "--to", "sort")
    shown = load_demo(bench.folder / "sort")
    words = [bench.python, f"sort/{shown.make_data}", "--seed", str(shown.seed), "--out", "data"]
    subprocess.run(words, cwd=bench.folder, check=True, timeout=PATIENCE)
    for name, file in shown.datasets.items():
        bench.run("asset", "add", f"dataset:{name}", f"data/{file}")
    for name, file in shown.rewards.items():
        bench.run("asset", "add", f"reward:{name}", f"sort/{file.file}")
    bench.run("asset", "create", f"model:{shown.model.name}", f"sort/{shown.model.file}", "--seed", str(shown.seed))
    found: dict[str, Any] = yaml.safe_load((bench.folder / "sort" / "run.yaml").read_text())
    found["stages"]["grpo"]["runtime"] = {"micro_batch_tokens": 4096}  # else as the flavour's GPUs hold
    return found


def grpo_of(bench: Workbench, run: dict[str, Any]) -> tuple[subprocess.Popen[str], Mailbox]:
    """Start the sorting example with its training on h100; wait for a checkpoint of GRPO and return its mailbox."""
    stages = {name: {**one, **(ON if name in ("sft", "grpo") else {})} for name, one in run["stages"].items()}
    stages["grpo"]["runtime"] = {**stages["grpo"]["runtime"], "checkpoint_every": 20}
    bench.write("run.yaml", {**run, "stages": stages})
    running = bench.start("run", "run.yaml")
    mailbox = bench.wait("grpo", lambda: mailbox_of(bench, "grpo"))
    bench.wait("a checkpoint of grpo", mailbox.checkpoints)
    return running, mailbox


def ships_what_the_laptop_ships(bench: Workbench, laptop: Workbench) -> str:
    """Run the sorting example without a cluster, and compare all outputs; return the run's id."""
    run_id = bench.run_id()
    laptop.write("run.yaml", sorting(laptop))
    laptop.run("run", "run.yaml")
    assert bench.outputs(run_id) == laptop.outputs(laptop.run_id())
    assert bench.outputs(run_id)["grpo"] in bench.run("get", "prod", "-o", "json").out
    return run_id


def placed(bench: Workbench) -> None:
    """Put the training stages on h100, with a reward that takes its time; the others run on the default flavour."""
    bench.write("slow.py", "import time\n" + SHORT.replace("    return", "    time.sleep(0.4)\n    return"))
    bench.run("asset", "add", "reward:slow", "slow.py")
    stages = {name: {**one, **(ON if name in ("sft", "grpo") else {})} for name, one in RUN["stages"].items()}
    bench.write("run.yaml", {**RUN, "stages": stages, "rewards": {"length": "reward:slow"}})


def mailbox_of(bench: Workbench, stage: str) -> Mailbox | None:
    """The mailbox of the stage's newest attempt, once it was launched."""
    with bench.open() as workspace:
        runs = workspace.ledger.runs(limit=1)
        attempts = workspace.ledger.attempts(runs[0].id, stage) if runs else []
    return mailbox_at(str(attempts[-1].channel)) if attempts and attempts[-1].state == "launched" else None


def told(bench: Workbench, stage: str) -> str:
    """Why the stage waits, as `why` shows it."""
    with bench.open() as workspace:
        [run] = workspace.ledger.runs(limit=1)
        return next(one.message for one in workspace.ledger.stages(run.id) if one.name == stage)


def begun(mailbox: Mailbox, incarnation: int) -> bool:
    held = mailbox.started()
    return held is not None and held.incarnation >= incarnation


@pytest.mark.slurm
def test_the_sorting_example_on_slurm_is_requeued_preempted_and_loses_a_node_and_ships_what_the_laptop_ships(
    bench: Workbench, empty: Workbench, slurm: Slurm, tmp_path: Path, s3: dict[str, str]
) -> None:
    bench.environment |= slurm.environment
    run = sorting(bench)
    declare(bench, SLURM, node_python(tmp_path, s3))
    running, mailbox = grpo_of(bench, run)
    job = slurm.ask("squeue", "-h", "--states=RUNNING", "-o", "%i")
    slurm.ask("scontrol", "requeue", job)
    bench.wait("the queue's reason", lambda: "queued by slurm-a: BeginTime" in told(bench, "grpo"))
    slurm.stop("slurmctld")
    bench.wait("a controller that does not answer", lambda: "slurm-a" in told(bench, "grpo"))
    slurm.start("slurmctld")
    bench.wait("the requeued job", lambda: begun(mailbox, 1))
    urgent = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    slurm.ask("sbatch", *urgent)
    bench.wait("the preempted job", lambda: begun(mailbox, 2))
    node = slurm.ask("squeue", "-h", f"--jobs={job}", "-o", "%B")
    slurm.lose(node)
    bench.wait("the job on another node", lambda: begun(mailbox, 3))
    slurm.start(node)
    ended = bench.finish(running)
    assert ended.code == 0, ended.err
    run_id = ships_what_the_laptop_ships(bench, empty)
    [grpo] = bench.attempts(run_id, "grpo")
    assert grpo.handle == job, "every restart was Slurm's, under one attempt"
    assert 0 < (grpo.seconds or 0) < sum(one.seconds or 0 for one in bench.attempts(run_id)) < PATIENCE
    bench.wait("an empty queue", lambda: slurm.ask("squeue", "-h", "-o", "%i %j %T") == "")
    leaves_nothing(bench, tmp_path)


@pytest.mark.ray
def test_the_sorting_example_on_ray_loses_a_node_and_ships_what_the_laptop_ships(
    bench: Workbench, empty: Workbench, ray_cluster: Ray, tmp_path: Path, s3: dict[str, str]
) -> None:
    bench.environment |= ray_cluster.environment
    settings = {"kind": "ray", "address": ray_cluster.address, "settle": "2s"}
    flavours = {"h100": {"executor": "ray-b", "gpus_per_node": 2, "type": "H100"}, "small": {"executor": "ray-b"}}
    cluster = {"executors": {"ray-b": settings}, "flavours": flavours, "default": "small"}
    run = sorting(bench)
    declare(bench, cluster, node_python(tmp_path, s3))
    running, mailbox = grpo_of(bench, run)
    node = ray_cluster.node_of(mailbox.place)
    ray_cluster.lose(node)
    ended = bench.finish(running)
    ray_cluster.start(node)
    assert ended.code == 0, ended.err
    run_id = ships_what_the_laptop_ships(bench, empty)
    lost, again = bench.attempts(run_id, "grpo")
    assert (lost.state, again.state) == ("lost", "succeeded")
    assert (again.resumed_step or 0) >= 20, "it continues from what the lost node staged"
    leaves_nothing(bench, tmp_path)


def working_below(folder: Path) -> list[int]:
    """Processes whose working folder is below a folder, which may be deleted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                found.append(int(path.parent.name))
    return found


def leaves_nothing(bench: Workbench, tmp_path: Path) -> None:
    bench.run("gc", "--older-than", "0s")
    assert list(StagingArea(bench.environment["POSTTRAIN_STORE"]).stored()) == []
    assert working_below(tmp_path / "scratch") == []
    for folder in (tmp_path / "scratch").glob("job-*"):  # of an agent that was killed with its node, a minute later
        os.utime(folder, (0, 0))
    with scratch(tmp_path / "scratch", "job-") as own:  # as the next job of the node does
        assert list((tmp_path / "scratch").glob("job-*")) == [own]


def gang_of(bench: Workbench) -> str | None:
    """The address of the Ray cluster over the nodes of the running job."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes()
            found = re.search(rb"POSTTRAIN_GANG=([^\0]+:\d+)\0", variables)
            if found and str(bench.folder.parent).encode() in path.with_name("cmdline").read_bytes():
                return found[1].decode()
    return None


_STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('inside')"


@pytest.mark.slurm
def test_a_job_of_two_nodes_has_a_ray_cluster_that_only_its_token_opens(
    bench: Workbench, empty: Workbench, slurm: Slurm, tmp_path: Path, s3: dict[str, str]
) -> None:
    bench.environment |= slurm.environment
    wide = {"executor": "slurm-a", "partition": "low", "nodes": 2, "cpus": 2}
    executors = {"slurm-a": {"kind": "slurm", "settle": "2s", "python": node_python(tmp_path, s3)}}
    bench.write("executors.yaml", {"executors": executors, "flavours": {"wide": wide}})
    bench.run("executor", "add", "executors.yaml")
    bench.run("executor", "doctor")
    sft = {**RUN["stages"]["sft"], "steps": 300}
    run = {key: value for key, value in RUN.items() if key not in ("gates", "release", "rewards")}
    placed = {"placement": {"collocated": {"cpus": 4, "ranks": 2, "kind": "wide"}}}
    bench.write("run.yaml", {**run, "stages": {"sft": {**sft, **placed}}})
    running = bench.start("run", "run.yaml")
    address = bench.wait("the cluster of the gang", lambda: gang_of(bench))
    assert slurm.ask("squeue", "-h", "--states=RUNNING", "-o", "%D") == "2"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}

    def refused() -> bool:
        words = [sys.executable, "-c", _STRANGER, address]
        done = subprocess.run(words, env=kept, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert "inside" not in done.stdout
        return "token" in done.stderr.lower()

    bench.wait("the refusal of who has no token", refused)
    ended = bench.finish(running)
    assert ended.code == 0, ended.err
    empty.write("run.yaml", {**run, "stages": {"sft": {**sft, "placement": {"collocated": {"ranks": 2}}}}})
    empty.run("run", "run.yaml")
    assert bench.outputs(bench.run_id()) == empty.outputs(empty.run_id())
