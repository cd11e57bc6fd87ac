"""Trackers that hang or are away, written by the real process beside a driver: the run does not notice."""

from __future__ import annotations

import csv
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import RUN, World, make_world

from posttrain.cli import drive
from posttrain.trackers.writer import Scribe

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]
PATIENCE = 300.0


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that drivers started."""
    started: list[subprocess.Popen[bytes]] = []
    start = Scribe.start

    def watched(self: Scribe) -> None:
        start(self)
        if self._process is not None:
            started.append(self._process)

    monkeypatch.setattr(Scribe, "start", watched)
    yield started
    for process in started:
        process.kill()
        process.wait(PATIENCE)


def points(path: Path) -> list[tuple[str, ...]]:
    with open(path, newline="") as file:
        return [(row["stage"], row["metric"], row["step"]) for row in csv.DictReader(file)]


def standing(world: World, run: str) -> dict[str, str]:
    """Tracker → how it stands."""
    return {one["kind"]: one["state"] for one in world.json("get", run)["trackers"]}


def test_one_that_never_answers_holds_up_neither_run_nor_other_trackers(
    world: World, writers: list[subprocess.Popen[bytes]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        world.write("run.yaml", RUN + f"trackers: {{csv: here, mlflow: 'http://127.0.0.1:{port}'}}\n")
        said = world.ok("run", "run.yaml")
        run = world.newest()
        assert "tracker: mlflow writing" in said
        assert f"posttrain track {run} waits until its trackers are written" in said
        until = time.monotonic() + PATIENCE
        while (states := standing(world, run))["csv"] == "writing":  # `run` waited ten seconds for it, and went on
            assert time.monotonic() < until
        assert states == {"csv": "written", "mlflow": "writing"}
        found = points(world.root / "here" / f"{run}.csv")
        assert len(found) == len(set(found)) > 20
        assert writers[0].poll() is None


def test_one_that_is_away_is_a_warning_with_what_to_do(
    world: World, writers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    monkeypatch.setattr(drive, "_TRACKERS_SECONDS", PATIENCE)  # ten are enough, where nobody else is busy
    world.write("run.yaml", RUN + f"trackers: {{mlflow: 'http://127.0.0.1:{port}'}}\n")
    said = world.ok("run", "run.yaml").replace("\n", " ")
    run = world.newest()
    away = f"cannot reach http://127.0.0.1:{port}: connection refused; posttrain track {run}"
    assert away in said
    assert "mlflow writing" not in said
    writers[0].wait(PATIENCE)  # it has tried again, and left
    shown = world.ok("get", run)
    assert shown.count("warning: tracker mlflow") == 1
    assert f"posttrain track {run} writes the missing data" in shown
    failed = world("track", run)
    assert failed.exit_code == 6
    assert failed.stderr.count("\n") == 1
    assert world.json("get", run)["state"] == "succeeded"
    assert "mlflow written" in world.ok("track", run, "--tracker", f"mlflow={world.root}/mlruns")  # another place
    assert f"cannot reach http://127.0.0.1:{port}" in world.ok("get", run), "its own is still to be written"
