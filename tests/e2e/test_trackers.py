"""A run's tracker while job, driver and writer are killed: every point once."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest
from test_recovery import STEPS, armed, slow, variant
from workbench import Workbench

pytestmark = pytest.mark.slow


def writers(bench: Workbench) -> list[int]:
    """Processes that write this workspace's trackers."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            mine = f"POSTTRAIN_WORKSPACE={bench.root}\0".encode() in (place / "environ").read_bytes()
        except OSError:
            continue
        if mine and b"track" in words and b"--follow" in words:
            found.append(int(place.name))
    return found


def points(bench: Workbench, run_id: str) -> list[tuple[str, str, int]]:
    path = bench.folder / "curves" / f"{run_id}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [(row["stage"], row["metric"], int(row["step"])) for row in csv.DictReader(file) if row["step"]]


def test_no_kill_doubles_or_loses_a_point(bench: Workbench) -> None:
    variant(bench, grpo_every=4, reward=slow(0.3), trackers={"csv": "curves"})
    env, mark = armed(bench, STEPS)  # the job dies in its eighth step
    driver = bench.start("run", "run.yaml", env=env)
    (first,) = bench.wait("a writer", lambda: writers(bench))
    run_id = bench.run_id()
    bench.wait("its first points", lambda: points(bench, run_id))
    os.kill(first, signal.SIGKILL)
    (second,) = bench.wait("another writer", lambda: [pid for pid in writers(bench) if pid != first])
    bench.wait("steps that will be lost", mark.exists)
    os.kill(driver.pid, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)
    bench.finish(driver)
    said = bench.run("run", "run.yaml")
    assert "tracker: csv written" in said.out
    found = points(bench, run_id)
    assert len(found) == len(set(found))
    for stage, steps in (("sft", 12), ("grpo", 8)):  # sft's come from the run that computed it
        assert [p[2] for p in found if p[:2] == (stage, "loss")] == list(range(1, steps + 1))
    assert ("evaluate", "heldout/response_tokens", 0) in found
    assert ("gate", "room/passed", 0) in found
    bench.check(run_id)
