"""From the launch of a job to the end of its first step: cold, and in a fork of the driver's fork server.

    python -m benchmarks.starting [--json FILE] [--rounds N] [--tiny]

A run of a 0.1 M parameter model is made by the command line; then its jobs (SFT, GRPO with a confined reward,
evaluation) are launched again and again from their own orders, by two executors in turn. "first job of a driver" is one
that waits for its fork server to import the engine. Files are in the page cache and their digests are remembered, as
they are behind any first job. A job's first step is told by its first progress fact.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.domain.facts import Progress
from posttrain.domain.jobs import JobState
from posttrain.domain.requests import JobRequest
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.store.attempts import AttemptFolder

PRELOAD = "posttrain.jobs.preload"
TARGET = 2.0  # seconds, forked
PATIENCE = 600.0
MODULES = {"sft": "posttrain.jobs.train", "grpo": "posttrain.jobs.train", "evaluate": "posttrain.jobs.evaluate"}
RUN = """
name: start
owner: benchmark
seed: 1
model: model:tiny
data: {train: dataset:train, heldout: dataset:heldout}
rewards: {exact: reward:sort}
stages:
  sft: {kind: sft, data: train, steps: 1}
  grpo: {kind: grpo, data: train, reward: exact, steps: 1, max_new_tokens: 32}
  evaluate: {kind: evaluate, model: base, suites: {heldout: {data: heldout, max_new_tokens: 32}}}
"""


@dataclass(frozen=True)
class Row:
    """Medians in seconds."""

    job: str
    cold: float
    forked: float
    ratio: float
    rounds: int


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="one round of one job: that it runs, no figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        orders = prepare(Path(folder), ("sft",) if options.tiny else tuple(MODULES))
        rows = measure(Path(folder), orders, 1 if options.tiny else options.rounds)
    print(f"{'job':24s} {'cold':>8s} {'forked':>8s} {'forked/cold':>12s}")
    for row in rows:
        print(f"{row.job:24s} {row.cold:6.2f} s {row.forked:6.2f} s {row.ratio:12.2f}")
    print(f"target: at most {TARGET:g} s forked; medians of {rows[-1].rounds} rounds, the first row of one")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def prepare(folder: Path, stages: tuple[str, ...]) -> dict[str, bytes]:
    """Stage → the order of its job, of a run that has ended."""
    posttrain(folder, "init")
    posttrain(folder, "examples", "01-sort")
    subprocess.run([sys.executable, "01-sort/make_data.py", "--out", "data"], cwd=folder, check=True, stdout=2)
    for name in ("train", "heldout"):
        posttrain(folder, "asset", "add", f"dataset:{name}", f"data/{name}.jsonl")
    posttrain(folder, "asset", "add", "reward:sort", "01-sort/reward.py")
    posttrain(folder, "asset", "create", "model:tiny", "01-sort/model.yaml")
    (folder / "run.yaml").write_text(RUN)
    posttrain(folder, "run", "run.yaml")
    runs = folder / ".posttrain" / "runs"
    return {stage: next(runs.glob(f"start-*/{stage}/*/job.json")).read_bytes() for stage in stages}


def posttrain(folder: Path, *words: str) -> None:
    """One command; what it says goes to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "POSTTRAIN_WORKSPACE"}
    subprocess.run([sys.executable, "-m", "posttrain", *words], cwd=folder, check=True, stdout=2, env=environment)


def measure(folder: Path, orders: dict[str, bytes], rounds: int) -> list[Row]:
    """Cold and forked in turn, after a first of each."""
    forked = LocalExecutor(PRELOAD)
    count = iter(range(10**9))

    def first_step(executor: LocalExecutor, stage: str) -> float:
        attempt = folder / f"again-{next(count)}"
        attempt.mkdir()
        (attempt / "job.json").write_bytes(orders[stage])
        spec = JobRequest(attempt.name, MODULES[stage], str(attempt))
        began = time.time()
        executor.submit(spec)
        wait_until(lambda: executor.observe([spec])[0].state is JobState.EXITED)
        said, _ = AttemptFolder(attempt).facts()
        done = [fact.at for fact in said if isinstance(fact, Progress)]
        if not done:
            raise SystemExit(f"{stage}: the job made no step: {(attempt / 'log.txt').read_text()[-500:]}")
        return done[0] - began

    cold_first = first_step(LocalExecutor(), "sft")
    rows = [_row("sft, first of a driver", [cold_first], [first_step(forked, "sft")])]
    for stage in orders:
        seconds: dict[str, list[float]] = {"cold": [], "forked": []}
        for _ in range(rounds):
            seconds["cold"].append(first_step(LocalExecutor(), stage))
            seconds["forked"].append(first_step(forked, stage))
        rows.append(_row(stage, seconds["cold"], seconds["forked"]))
    return rows


def _row(job: str, cold: list[float], forked: list[float]) -> Row:
    ratio = statistics.median(f / c for f, c in zip(forked, cold, strict=True))
    return Row(job, statistics.median(cold), statistics.median(forked), ratio, len(cold))


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll, up to a deadline."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a job did not end within {PATIENCE:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
