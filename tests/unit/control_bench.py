"""A control plane over scripted jobs and a clock that only sleepers move."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from driving import drive
from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.plan import plan_run, submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain.canonical import canonical_json, digest_json
from posttrain.domain.errors import FailureClass
from posttrain.domain.jobs import Failure, JobResult, Output, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.manifest import InputRef
from posttrain.domain.records import outcome_error
from posttrain.domain.runspec import parse_run_spec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger, Stores

Script = Callable[[AttemptFolder], int | None]


class ManualClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def metrics_table(values: dict[str, list[float]]) -> bytes:
    rows = [(metric, f"i{i}", float(v)) for metric, column in values.items() for i, v in enumerate(column)]
    table = pa.table(
        {
            "metric": [r[0] for r in rows],
            "item_id": [r[1] for r in rows],
            "value": [r[2] for r in rows],
            "binary": [r[2] in (0.0, 1.0) for r in rows],
            "low": [0.0] * len(rows),
            "high": [1.0] * len(rows),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def train(words: str = "weights", tokens: int = 100) -> Script:
    """A training job that leaves a model of one file."""

    def job(folder: AttemptFolder) -> int:
        (folder.outputs / "model").mkdir(parents=True)
        (folder.outputs / "model" / "model.safetensors").write_text(words)
        folder.write_result(JobResult("succeeded", {"model": Output("outputs/model", "tree")}, {"loss": 0.5}, tokens))
        return 0

    return job


def evaluate(right: int, items: int = 200) -> Script:
    """An evaluation that leaves per-item accuracy."""

    def job(folder: AttemptFolder) -> int:
        folder.outputs.mkdir()
        data = metrics_table({"heldout/accuracy": [1.0] * right + [0.0] * (items - right)})
        (folder.outputs / "metrics.parquet").write_bytes(data)
        (folder.outputs / "items.parquet").write_bytes(b"items")
        outputs = {name: Output(f"outputs/{name}.parquet", "file") for name in ("metrics", "items")}
        folder.write_result(JobResult("succeeded", outputs, {"heldout/accuracy": right / items}, 10))
        return 0

    return job


def fail(kind: FailureClass, message: str = "it broke", tokens: int = 0) -> Script:
    def job(folder: AttemptFolder) -> int:
        folder.write_result(JobResult("failed", tokens=tokens, failure=Failure(kind, message, message)))
        return 0

    return job


def vanish(exit_code: int = -9, tokens: int = 0) -> Script:
    """A job that is killed; `tokens` is what it had said it spent."""

    def job(folder: AttemptFolder) -> int:
        if tokens:
            with EventWriter(folder) as sink:
                sink(Progress(1, 2, "sft", tokens, 0.0))
        return exit_code

    return job


def ledger_place(root: Path) -> str | Path:
    """Where the ledger of a bench below `root` is; `pytest --ledger postgresql` puts another in this one's place."""
    return root / "ledger.db"


@dataclass
class Bench:
    """A control plane whose jobs are scripted by stage: the first script for the first attempt, and so on."""

    root: Path
    scripts: dict[str, list[Script | None]] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.ledger = Ledger(Database(ledger_place(self.root)), self.clock)
        self.executor = FakeExecutor(self._on_launch, self.clock.now)
        self.stores = Stores(self.ledger, open_blobs(str(self.root / "blobs")), self.clock, "test")
        self.jobs = Jobs(self.executor, {"native": NativeTrainer()}, AttemptFolders(self.root), slots=2)
        self.reconciler = Reconciler(self.stores, self.jobs, "here")

    def _on_launch(self, spec: JobSpec) -> int | None:
        folder = spec.folder_below(self.root / "runs")
        stage = folder.parent.name
        self.launched.append(stage)
        queue = self.scripts[stage]
        script = queue.pop(0) if len(queue) > 1 else queue[0]
        return script(AttemptFolder(folder)) if script else None

    def submit(self, again: bool = False, **changes: Any) -> str:
        raw = {**RUN, **changes}
        for text in ("model:tiny", "dataset:train", "dataset:heldout"):
            self.stores.blobs.put(canonical_json(text))
        planned = plan_run(parse_run_spec(raw, "run.yaml"), "run.yaml", resolve, self.jobs.trainers)
        return submit(self.stores, planned.manifest, again=again).run.id

    def drive(self, run_id: str) -> Any:
        return drive(self.reconciler, run_id, interval=1.0, timeout=3600)

    def stage(self, run_id: str, name: str) -> Any:
        return next(s for s in self.ledger.stages(run_id) if s.name == name)

    def error(self, run_id: str) -> Any:
        return outcome_error(self.ledger.run(run_id), tuple(self.ledger.stages(run_id)))


RUN: dict[str, Any] = {
    "name": "r",
    "owner": "ada",
    "seed": 1,
    "model": "model:tiny",
    "data": {"train": "dataset:train", "heldout": "dataset:heldout"},
    "stages": {
        "sft": {"kind": "sft", "data": "train", "steps": 3},
        "evaluate": {"kind": "evaluate", "model": "sft", "suites": {"heldout": {"data": "heldout"}}},
    },
    "gates": [
        {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.8},
        {"name": "steady", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.05,
         "if_channel_empty": "pass"},
    ],
    "release": {"channel": "prod", "model": "sft"},
}  # fmt: skip
TRAIN_ONLY = {"stages": {"sft": RUN["stages"]["sft"]}, "gates": [], "release": None}


def resolve(kind: str, text: str) -> InputRef:
    return InputRef(source="asset", name=f"{text}@1", digest=digest_json(text), form="file")
