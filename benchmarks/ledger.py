"""The cost of commands on a large ledger: CPU seconds per command, by the number of runs and events.

    python -m benchmarks.ledger [--json FILE] [--runs N] [--events N] [--rounds N] [--keep DIR] [--tiny]

It uses a workspace of N runs as the reconciler leaves them (created by `benchmarks.real_runs`) or, with `--events`, of
bare runs with this number of events each, written by the ledger's transactions (10,000 runs of 100: a million events).
It measures the CPU time of `ls`, `get`, `why`, `verify`, `lineage`, `doctor` and `gc` as a user would type them: the
median of three. `beyond` is the difference to a workspace of two runs, round by round: the cost of the size, without
the start of a process. The bound of `verify` is the necessary work: reading every event once and hashing its bytes
once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.real_runs import RUNS, built
from posttrain.app.control import control_of
from posttrain.app.workspace import Workspace, init_workspace
from posttrain.domain.canonical import canonical_json
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.runspec import Budget
from posttrain.server.authentication import to_json

ROUNDS, PER_TRANSACTION = 3, 200
STAGES = ("sft", "grpo", "evaluate", "baseline", "gate")
ROWS = 3 + 3 * len(STAGES)  # events of a run's rows: three for the run, three for each stage
COMMANDS = ("ls", "get", "why", "verify", "lineage", "doctor", "gc")
OF_A_RUN = ("get", "why", "verify", "lineage")
LIMITS, _LISTS = (20, 100), 15  # runs of a list; number of requests
MORE = {"gc": ("--dry-run",)}


@dataclass(frozen=True)
class Row:
    """One command; `bound` in seconds if there is one."""

    command: str
    seconds: float
    fastest: float
    slowest: float
    beyond: float  # more than in a workspace of two runs
    bound: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--events", type=int, metavar="N", help="of one bare run, instead of real ones")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the workspace here, or use the one that is here")
    parser.add_argument("--tiny", action="store_true", help="two runs, one round: that it runs, no figures")
    arguments = parser.parse_args()
    runs, rounds = (2, 1) if arguments.tiny else (arguments.runs, arguments.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        places = {folder: runs, Path(scratch) / "small": 2}
        for place, count in places.items():
            if not (place / ".posttrain").exists() and arguments.events:
                fill(place, count, arguments.events)
        newest = {place: built(place, count)[-1] for place, count in places.items()}
        rows = measure(newest, rounds, ("ls", "verify") if arguments.tiny else COMMANDS)
        events, lists = least(folder)[1], {limit: listed(folder, limit) for limit in LIMITS}
    print(f"{runs} runs, {events} events")
    print(f"{'command':8s} {'seconds':>8s} {'(min-max)':>14s} {'beyond':>7s} {'bound':>7s}  reached")
    for row in rows:
        span = f"({row.fastest:.2f}-{row.slowest:.2f})"
        bound = f"{row.bound:7.2f}  {row.bound / row.seconds:6.0%}" if row.bound else ""
        print(f"{row.command:8s} {row.seconds:8.2f} {span:>14s} {row.beyond:7.2f} {bound}")
    for limit, (cpu, size) in lists.items():
        print(f"a list of {limit}: {cpu:.1f} ms of CPU in the server, {size} bytes a run")
    if arguments.json:
        found = {"rows": [asdict(row) for row in rows], "lists": lists}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def fill(folder: Path, runs: int, events: int) -> None:
    """Create a workspace with ended runs, each with the given number of events."""
    folder.mkdir(parents=True, exist_ok=True)
    workspace = init_workspace(folder)
    manifest = Manifest(
        name="bench", owner="bench", seed=1, stages=(), gates=(), budget=Budget(), release=None, code={}
    )
    digest = workspace.blobs.put(canonical_json(manifest.to_json()))
    for start in range(0, runs, PER_TRANSACTION):
        with workspace.ledger.transaction("user:bench") as transaction:
            for number in range(start, min(runs, start + PER_TRANSACTION)):
                name, at = f"bench-{number:08d}", float(number)
                run = RunRecord(name, "bench", digest, "pending", "bench", at, repeat=number + 1)
                stages = [StageRecord(run.id, name, i, "sft", "pending") for i, name in enumerate(STAGES)]
                transaction.insert_run(run, stages)
                for stage in stages:
                    ready = transaction.update_stage(stage, state="ready", reason="Ready", message="inputs are there")
                    transaction.update_stage(ready, state="skipped", reason="ChannelEmpty", finished_at=time.time())
                run = transaction.update_run(run, state="running", reason="Running", message="stages are under way")
                transaction.update_run(run, state="succeeded", reason="Succeeded", finished_at=time.time())
                for attempt in range(events - ROWS):
                    told = {"name": f"{run.id}-sft-{attempt}", "executor": "local", "resume": None}
                    transaction.append_event("attempt.planned", f"{run.id}/sft/{attempt}", told)
    workspace.seal()
    workspace.close()


def measure(newest: Mapping[Path, str], rounds: int, names: Sequence[str]) -> list[Row]:
    """Measure every command in both workspaces, round by round.

    Args:
        newest: the large and the small workspace, with the run to read.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    beyond: dict[str, list[float]] = {name: [] for name in names}
    bounds: list[float] = []
    for _ in range(rounds):
        for name in names:
            taken, base = (
                _seconds([name, *([run] if name in OF_A_RUN else MORE.get(name, ()))], place)
                for place, run in newest.items()
            )
            times[name].append(taken)
            beyond[name].append(taken - base)
        bounds.append(least(next(iter(newest)))[0])
    return [
        Row(
            name,
            statistics.median(taken),
            min(taken),
            max(taken),
            statistics.median(beyond[name]),
            statistics.median(bounds) if name == "verify" else None,
        )
        for name, taken in times.items()
    ]


def listed(folder: Path, limit: int) -> tuple[float, int]:
    """Return CPU milliseconds of a server's list of runs, and its bytes per run."""
    workspace = Workspace(folder / ".posttrain")
    control, times, body = control_of(workspace), list[float](), b""
    for _ in range(_LISTS):
        started = time.process_time()
        body = to_json(control.ls(limit))
        times.append(time.process_time() - started)
    shown = len(control.ls(limit))
    workspace.close()
    return statistics.median(times) * 1e3, len(body) // shown


def _seconds(words: list[str], folder: Path) -> float:
    """Return the CPU seconds of one command."""
    started = _children()
    command = [sys.executable, "-m", "posttrain", *words]
    subprocess.run(command, cwd=folder, check=words[0] != "doctor", stdout=subprocess.DEVNULL)
    return _children() - started


def least(folder: Path) -> tuple[float, int]:
    """Return seconds to read every event and hash its bytes with only SQLite and SHA-256, and the number of events."""
    started, count = time.process_time(), 0
    with closing(sqlite3.connect(folder / ".posttrain" / "ledger.db")) as connection:
        for row in connection.execute("SELECT * FROM events LEFT JOIN payloads ON event = id ORDER BY id"):
            hashlib.sha256(repr(row).encode()).digest()
            count += 1
    return time.process_time() - started, count


def _children() -> float:
    """Return the CPU seconds of all child processes that were waited for."""
    spent = os.times()
    return spent.children_user + spent.children_system


if __name__ == "__main__":
    main()
