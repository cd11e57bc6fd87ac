"""Creates a workspace of runs as the reconciler leaves them, with realistic data for commands and servers.

    python -m benchmarks.real_runs FOLDER [--runs N] [--steps N] [--tiny]

It plans, submits and drives N runs of eleven stages with the product's planner, reconciler and store. Only the jobs are
scripted: they immediately write the files of real jobs, with facts of every step, a summary, a result, models and
measurements of 200 items. Every stage has inputs, attempts, outputs and metrics, and every run has a gate report, a
release and about a hundred events. Every fourth run passes its gates and moves the channel; every twentieth fails once,
every fiftieth three times and permanently. Prints the seconds and bytes of a run. An existing workspace is not changed,
so several benchmarks can use the same one (their `--keep`).
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.app.workspace import Workspace, init_workspace
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure, JobOrder, JobResult, Metric, Output, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import is_final
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.ledger import Ledger, Stores

RUNS, STEPS, ITEMS, TRIES, HELDOUTS = 2_000, 40, 200, 3, 20
_APART = 300.0  # minimum seconds between two runs
_SUITES: dict[str, Any] = {"heldout": {"data": "heldout"}}
RUN: dict[str, Any] = {
    "name": "bench",
    "owner": "bench",
    "model": "model:tiny",
    "rewards": {"exact": "reward:exact"},
    "stages": {
        "sft": {"kind": "sft", "data": "train", "steps": STEPS},
        "more": {"kind": "sft", "model": "sft", "data": "train", "steps": STEPS},
        "grpo": {"kind": "grpo", "model": "more", "data": "train", "reward": "exact", "steps": STEPS},
        "polish": {"kind": "grpo", "model": "grpo", "data": "train", "reward": "exact", "steps": STEPS},
        "evaluate-sft": {"kind": "evaluate", "model": "sft", "suites": _SUITES},
        "evaluate-grpo": {"kind": "evaluate", "model": "grpo", "suites": _SUITES},
        "evaluate": {"kind": "evaluate", "model": "polish", "suites": _SUITES},
    },
    "gates": [
        {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.7},
        {"name": "learned", "metric": "heldout/accuracy", "better_than": "base"},
        {"name": "steady", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.05,
         "if_channel_empty": "pass"},
    ],
    "budget": {"tokens": 1_000_000, "wall_clock": "2h"},
    "release": {"channel": "prod", "model": "polish"},
}  # fmt: skip


class Clock:
    """A clock on which a sleep takes no real time.

    Args:
        behind: seconds by which the clock begins in the past.
    """

    def __init__(self, behind: float) -> None:
        self._ahead = -behind

    def now(self) -> float:
        """See `Clock.now`."""
        return time.time() + self._ahead

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self._ahead += seconds


class Builder:
    """A reconciler with scripted jobs, in a separate workspace."""

    def __init__(self, workspace: Workspace, runs: int, steps: int = STEPS) -> None:
        self._workspace, self._steps = workspace, steps
        self.clock = Clock(_APART * runs)
        self._executor = FakeExecutor(self._job, self.clock.now)
        ledger = Ledger(workspace.ledger.database, self.clock)
        self.stores = Stores(ledger, workspace.blobs, self.clock, workspace.actor)
        self.jobs = Jobs(
            self._executor,
            {"native": NativeTrainer()},
            AttemptFolders(workspace.root),
            slots=4,
            workspace=workspace.place,
        )
        self.reconciler = Reconciler(self.stores, self.jobs, "here")
        self._number = self._models = 0
        self._resolve = workspace.catalog.resolver(workspace.root)

    def assets(self, scratch: Path) -> None:
        """Register the data, the model and the reward that the runs name."""
        catalog = self._workspace.catalog
        heldouts = [(f"heldout-{number}", ITEMS) for number in range(HELDOUTS)]
        for name, count in (("train", 400), *heldouts):
            rows = [
                {"prompt": f"{name} {n}: sort 31{n}", "completion": f"13{n}", "answer": f"{n}"} for n in range(count)
            ]
            path = scratch / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            catalog.add_dataset(path, name)
        _write_model(scratch / "base", 0)
        catalog.add_model(scratch / "base", "tiny")
        (scratch / "reward.py").write_text('"""Exact."""\n\n\ndef score(completion, answer):\n    return 1.0\n')
        catalog.add_reward(scratch / "reward.py", "exact")

    def run(self, number: int) -> str:
        """Submit run `number` and drive it to its end; return its id."""
        self._number = number
        raw = {
            **RUN,
            "seed": number,
            "data": {"train": "dataset:train", "heldout": f"dataset:heldout-{number % HELDOUTS}"},
        }
        planned = plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", self._resolve, self.jobs.trainers)
        run_id = submit(self.stores, planned.manifest).run.id
        while not is_final("run", (tick := self.reconciler.step(run_id)).run.state):
            if not tick.changed:
                self.reconciler.rest(1.0)
        return run_id

    def _job(self, request: JobSpec) -> int:
        """Write a job's files; in every twentieth run the first GRPO fails once, in every fiftieth always."""
        folder = AttemptFolder(request.folder_below(Path()))
        order, tried = folder.read_order(), int(folder.path.name)
        folder.log.write_text(f"{order.kind}: {self._steps} steps\n")
        self.clock.sleep(15.0)
        broken = TRIES if self._number % 50 == 49 else 1 if self._number % 20 == 19 else 0
        if folder.path.parent.name == "grpo" and tried <= broken:
            self._train(folder, order, self._steps // 2)
            failure = Failure(FailureClass.INFRASTRUCTURE, "a worker was lost", "a worker was lost")
            folder.write_result(JobResult("failed", tokens=500, failure=failure))
            return 1
        self._evaluate(folder, order) if order.kind == "evaluate" else self._finish(folder, order)
        return 0

    def _train(self, folder: AttemptFolder, order: JobOrder, steps: int) -> dict[str, float]:
        values: dict[str, float] = {}
        with EventWriter(folder) as tell:
            for step in range(1, steps + 1):
                values = {"loss": 1 / step, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 9e3}
                if order.kind == "grpo":
                    values |= {f"reward/{name}": step / (steps + 1) for name in ("mean", "std", "min", "max")}
                    values |= {f"rollout/{name}": 1.0 for name in ("rows", "preemptions", "tokens", "seconds")}
                tell(Metric(step, values, self.clock.now()))
                tell(Progress(step, self._steps, order.kind, 100 * step, self.clock.now()))
        return values

    def _finish(self, folder: AttemptFolder, order: JobOrder) -> None:
        values = self._train(folder, order, self._steps)
        self._models += 1
        _write_model(folder.outputs / "model", self._models)
        folder.write_result(
            JobResult("succeeded", {"model": Output("outputs/model", "tree")}, values, 100 * self._steps, 30.0)
        )

    def _evaluate(self, folder: AttemptFolder, order: JobOrder) -> None:
        right = 170 if self._number % 4 == 0 else 120
        right = 20 if folder.path.parent.name == "baseline-base.evaluate" else right
        folder.outputs.mkdir(exist_ok=True)
        (folder.outputs / "metrics.parquet").write_bytes(_measured(right))
        (folder.outputs / "items.parquet").write_bytes(_items(right))
        outputs = {name: Output(f"outputs/{name}.parquet", "file") for name in ("metrics", "items")}
        values = {"heldout/accuracy": right / ITEMS, "heldout/length": 12.0, "heldout/truncated": 0.0}
        folder.write_result(JobResult("succeeded", outputs, values, 2_000, 5.0))


def build(folder: Path, runs: int, steps: int = STEPS) -> list[str]:
    """Create a workspace of `runs` runs in a folder; return the runs' ids, oldest first."""
    folder.mkdir(parents=True, exist_ok=True)
    workspace = init_workspace(folder)
    try:
        builder = Builder(workspace, runs, steps)
        with tempfile.TemporaryDirectory() as scratch:
            builder.assets(Path(scratch))
        ids = []
        for number in range(runs):
            ids.append(builder.run(number))
            if number % 50 == 49:
                workspace.seal()
        workspace.seal()
        return ids
    finally:
        workspace.close()


def built(folder: Path, runs: int) -> list[str]:
    """Return the ids of the runs of the workspace here, oldest first; `build` it if it does not exist."""
    if not (folder / ".posttrain").exists():
        return build(folder, runs)
    workspace = Workspace(folder / ".posttrain")
    try:
        return [run.id for run in reversed(workspace.ledger.runs())]
    finally:
        workspace.close()


def _write_model(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 60}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    words = struct.pack("<Q", len(header)) + header + struct.pack("<f", float(number))
    (folder / "model.safetensors").write_bytes(words)


def _table(columns: Mapping[str, list[Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _measured(right: int) -> bytes:
    return _table(
        {
            "metric": ["heldout/accuracy"] * ITEMS,
            "item_id": [f"i{number}" for number in range(ITEMS)],
            "value": [1.0] * right + [0.0] * (ITEMS - right),
            "binary": [True] * ITEMS,
            "low": [0.0] * ITEMS,
            "high": [1.0] * ITEMS,
        }
    )


def _items(right: int) -> bytes:
    items = range(ITEMS)
    return _table(
        {
            "suite": ["heldout"] * ITEMS,
            "item_id": [f"i{number}" for number in items],
            "prompt": [f"heldout {number}: sort 31{number}" for number in items],
            "answer": [f"{number}" for number in items],
            "kind": ["greedy"] * ITEMS,
            "sample_index": [0] * ITEMS,
            "response": [f"13{number}" for number in items],
            "extracted": [f"{number}" for number in items],
            "correct": [number < right for number in items],
            "tokens": [12] * ITEMS,
            "truncated": [False] * ITEMS,
            "logprob": [-0.5] * ITEMS,
        }
    )


def main() -> None:
    """Build, and print the cost of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_runs", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where; by default a folder that is removed again")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training job")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="two runs: that it runs, no figures")
    given = parser.parse_args()
    runs = 2 if given.tiny else given.runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        began, spent = time.perf_counter(), time.process_time()
        build(folder, runs, given.steps)
        seconds, cpu = time.perf_counter() - began, time.process_time() - spent
        ledger = sum(path.stat().st_size for path in (folder / ".posttrain").glob("ledger.db*"))
    print(f"{runs} runs: {seconds:.1f} s, {cpu:.1f} s of processor time; a run: {1e3 * cpu / runs:.0f} ms, ", end="")
    print(f"{ledger / runs / 1024:.0f} KiB of ledger")
    if given.json:
        given.json.write_text(json.dumps({"runs": runs, "seconds": seconds, "cpu": cpu, "ledger": ledger}) + "\n")


if __name__ == "__main__":
    main()
