"""The time from the launch of a job to its first step: cold, and in a fork of the driver's fork server.

    python -m benchmarks.starting [--json FILE] [--rounds N] [--tiny] [--encoding]

The command line creates a run of a 0.1 M parameter model. Its jobs (SFT, GRPO with a confined reward, evaluation) are
then launched repeatedly from their orders, by two executors alternately. The "first job of a driver" waits for the fork
server to import the engine. Files are in the page cache and their digests are cached, as after any first job. Wall time
is until the end of the first step, according to its first progress fact. Processor time, which other work on the
machine hardly changes, is the job's until its first step begins, according to its log; its part `before` is the
interpreter, the comparison of the environment and reading the order. The bound of a cold start is a Python that only
imports torch and the transformers classes that a job of this model needs. With `--encoding` no job is launched: the
time that an SFT job spends on encoding the same number of chat rows is measured in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.judging import at_most, judge
from posttrain.domain.jobs import JobState, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.store.attempts import AttemptFolder

PRELOAD = "posttrain.jobs.preload"
ROWS = 4000
TARGET = 2.0  # maximum processor seconds of a forked job until its first step begins
PATIENCE = 600.0
STAGES = ("sft", "grpo", "evaluate")
BARE = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM"
SAID = re.compile(r"^start: ([\d.]+) s of processor time, ([\d.]+) s of it before", re.MULTILINE)  # in a job's log
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
    """Medians in seconds: wall time, and processor time until the first step begins."""

    job: str
    cold: float
    forked: float
    ratio: float
    cold_cpu: float
    forked_cpu: float
    forked_before: float  # of `forked_cpu`
    bound_cpu: float  # of `cold_cpu`
    rounds: int


@dataclass(frozen=True)
class Start:
    """One launch, in seconds."""

    wall: float
    cpu: float
    before: float


def main() -> None:
    """Measure, print a table; exit 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="one round of one job: that it runs, no figures")
    parser.add_argument("--encoding", action="store_true", help="only the encoding of 4,000 rows")
    options = parser.parse_args()
    if options.encoding:
        print(f"encode_examples of {ROWS} chat rows: {encoding(options.rounds):.2f} s of processor time")
        return
    with tempfile.TemporaryDirectory() as folder:
        orders = prepare(Path(folder), STAGES[:1] if options.tiny else STAGES)
        rows = measure(Path(folder), orders, 1 if options.tiny else options.rounds)
    print(f"{'':24s} {'wall time':>29s} {'processor time':>29s}")
    walls, cpus = (
        f"{'cold':>8s} {'forked':>8s} {'ratio':>11s}",
        f"{'cold':>8s} {'bound':>8s} {'forked':>8s} {'before':>8s}",
    )
    print(f"{'job':24s} {walls} {cpus}")
    for row in rows:
        wall = f"{row.cold:6.2f} s {row.forked:6.2f} s {row.ratio:11.2f}"
        cpu = f"{row.cold_cpu:6.2f} s {row.bound_cpu:6.2f} s {row.forked_cpu:6.2f} s {row.forked_before:6.2f} s"
        print(f"{row.job:24s} {wall} {cpu}")
    print(f"medians of {rows[-1].rounds} rounds, the first row of one; target: {TARGET:g} s of processor time, forked")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    medians = rows[1:]  # the first row is one launch
    judge([at_most(f"{row.job}, forked,", row.forked_cpu, TARGET, " s") for row in medians], full=not options.tiny)


def encoding(rounds: int) -> float:
    """Return the median processor seconds of encoding the rows of an SFT stage, after a warm-up."""
    # imported here, because a process that launches jobs has no torch
    from posttrain.engine.config import InitModelConfig
    from posttrain.engine.models.files import character_tokenizer, encode_examples

    tokenizer = character_tokenizer(InitModelConfig().characters)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Q: sort {at * 7919 % 100000}"}],
            "completion": [{"role": "assistant", "content": f"A: {at}"}],
        }
        for at in range(ROWS)
    ]
    taken = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        encode_examples(tokenizer, rows, name="rows", limit=99)
        taken.append(time.process_time() - begun)
    return statistics.median(taken[1:])


def prepare(folder: Path, stages: tuple[str, ...]) -> dict[str, bytes]:
    """Return stage → the order of its job, for a run that has ended."""
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
    """Run one command; its output goes to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "POSTTRAIN_WORKSPACE"}
    subprocess.run([sys.executable, "-m", "posttrain", *words], cwd=folder, check=True, stdout=2, env=environment)


def measure(folder: Path, orders: dict[str, bytes], rounds: int) -> list[Row]:
    """Measure cold and forked launches alternately, after a warm-up of each."""
    forked = LocalExecutor(PRELOAD)
    count = iter(range(10**9))

    def launch(executor: LocalExecutor, stage: str) -> Start:
        attempt = folder / f"again-{next(count)}"
        attempt.mkdir()
        (attempt / "job.json").write_bytes(orders[stage])
        spec = JobSpec(attempt.name, attempt.absolute().as_uri(), "posttrain.jobs.stage")
        began = time.time()
        executor.submit(spec)
        wait_until(lambda: executor.observe([spec])[0].state is JobState.EXITED)
        said, _ = AttemptFolder(attempt).facts()
        done = [fact.at for fact in said if isinstance(fact, Progress)]
        if not done:
            raise SystemExit(f"{stage}: the job made no step: {(attempt / 'log.txt').read_text()[-500:]}")
        told = SAID.search((attempt / "log.txt").read_text())
        if told is None:
            raise SystemExit(f"{stage}: the job's log must say what its start cost, in {attempt / 'log.txt'}")
        return Start(done[0] - began, float(told[1]), float(told[2]))

    first = next(iter(orders))
    rows = [_row(f"{first}, first of a driver", [launch(LocalExecutor(), first)], [launch(forked, first)], [bare()])]
    for stage in orders:
        starts: dict[str, list[Start]] = {"cold": [], "forked": []}
        bound = []
        for _ in range(rounds):
            bound.append(bare())
            starts["cold"].append(launch(LocalExecutor(), stage))
            starts["forked"].append(launch(forked, stage))
        rows.append(_row(stage, starts["cold"], starts["forked"], bound))
    return rows


def bare() -> float:
    """Return the processor seconds of a Python that only imports the modules that a job of this model needs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-s", "-P", "-c", BARE], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _row(job: str, cold: list[Start], forked: list[Start], bound: list[float]) -> Row:
    middle = statistics.median
    return Row(
        job,
        middle(start.wall for start in cold),
        middle(start.wall for start in forked),
        middle(f.wall / c.wall for f, c in zip(forked, cold, strict=True)),
        middle(start.cpu for start in cold),
        middle(start.cpu for start in forked),
        middle(start.before for start in forked),
        middle(bound),
        len(cold),
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll, up to a deadline."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a job did not end within {PATIENCE:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
