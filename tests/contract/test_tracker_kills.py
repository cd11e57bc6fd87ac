"""A run's trackers, written by real processes that are killed wherever that could double or lose a point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import GOOD_REWARD, RUN, World, make_world
from tracker_targets import BENCHES, Bench, Point, each

pytestmark = pytest.mark.slow
# where the writer dies: before anything, inside its first writes, inside later ones, between them, around the end
DEATHS = [
    ("track.after_begin", 1),
    *(("track.inside_log", nth) for nth in (1, 2, 3)),
    ("track.after_log", 1),
    ("track.before_end", 1),
    ("track.after_end", 1),
]
PLACED = {"experiment": "sorting", "registered_model": "sorter"}
CHOICES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "csv": lambda folder: {"csv": {"dir": str(folder)}},
    "parquet": lambda folder: {"parquet": {"dir": str(folder)}},
    "tensorboard": lambda folder: {"tensorboard": {"logdir": str(folder)}},
    "mlflow": lambda folder: {"mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db", **PLACED}},
    "mlflow-folder": lambda folder: {"mlflow": {"tracking_uri": f"{folder}/mlruns", **PLACED}},
    "wandb": lambda folder: {"wandb": {"dir": str(folder), "project": "sorting"}},
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has ended, which no tracker was told of."""
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.ok("run", "run.yaml")
    return made


def command(world: World, *words: str, **environment: str) -> int:
    """The exit code of a real process, negative for a signal."""
    given = {**os.environ, "POSTTRAIN_WORKSPACE": str(world.root / ".posttrain"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "posttrain", *words], check=False, cwd=world.root, env=given, capture_output=True
    ).returncode


def choose(world: World, kind: str, run: str) -> Bench:
    """Record the tracker without writing anything to it."""
    folder = world.root / "target"
    record = world.root / ".posttrain" / "runs" / run / "trackers.json"
    record.write_text(json.dumps(CHOICES[kind](folder)))
    made: Bench = BENCHES[kind](folder)
    return made


def steps(points: list[Point]) -> list[tuple[str, str, int]]:
    return sorted(point[:3] for point in points)


WANTED = sorted(
    [
        *(("sft", "loss", step) for step in range(1, 5)),
        *(("grpo", name, step) for step in range(1, 7) for name in ("loss", "reward/mean", "probe/accuracy")),
        ("evaluate", "heldout/accuracy", 0),
        *(("gate", f"accuracy/{name}", 0) for name in ("passed", "estimate", "limit", "threshold")),
        *(("gate", f"no-regression/{name}", 0) for name in ("passed", "estimate", "threshold")),
    ]
)


@pytest.mark.parametrize("kind", each("fake"))
def test_a_writer_killed_anywhere_doubles_and_loses_nothing(kind: str, world: World) -> None:
    run = world.newest()
    bench = choose(world, kind, run)
    died = 0
    for name, nth in DEATHS:
        ended = {"WANDB_SERVICE": "3-1-unix-/nowhere"}  # of a program that started this one, and is gone
        code = command(world, "track", run, POSTTRAIN_CRASHPOINT=f"{name}@{nth}", **ended)
        died += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
    assert died >= 3
    assert command(world, "track", run) == 0
    assert steps(bench.points(run)) == WANTED
    assert bench.state(run) in ("succeeded", "")
    (one,) = world.json("get", run)["trackers"]
    assert one["state"] == "written"


@pytest.mark.ecosystem
@pytest.mark.parametrize("kind", ["mlflow", "mlflow-folder"])
def test_a_channels_versions_are_made_once_whatever_is_killed(kind: str, world: World) -> None:
    good = world.newest()
    bench: Any = choose(world, kind, good)
    world.ok("asset", "add", "reward:sort", world.write("other.py", GOOD_REWARD.replace("1.0", "0.97")))
    lenient = "".join(line for line in RUN.splitlines(keepends=True) if "no-regression" not in line)
    world.write("second.yaml", lenient.replace("name: sort", "name: second"))
    world.ok("run", "second.yaml")
    choose(world, kind, world.newest())
    for nth in (1, 2, 1, 2):
        assert command(world, "track", "prod", POSTTRAIN_CRASHPOINT=f"track.inside_log@{nth}") in (0, -signal.SIGKILL)
    assert command(world, "track", "prod") == 0
    assert alias(world, bench) == world.json("get", "prod")["live"]
    world.ok("rollback", "prod")  # tells MLflow by a process of its own
    assert command(world, "track", "prod") == 0
    assert alias(world, bench) == world.json("get", "prod")["live"]
    digests = [v.tags["posttrain.digest"] for v in bench.client().search_model_versions("name='sorter'")]
    assert len(digests) == len(set(digests)) == len({e["model_digest"] for e in world.json("get", "prod")["history"]})
    assert "warning" not in world.ok("get", "prod")


def alias(world: World, bench: Any) -> str:
    return str(bench.client().get_model_version_by_alias("sorter", "prod").tags["posttrain.digest"])
