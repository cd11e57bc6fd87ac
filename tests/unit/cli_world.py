"""A workspace whose jobs are scripted: what a reward's source says decides how good the model gets.

What every test begins with is made by commands once in a process, and copied: a workspace is a folder that may be.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from posttrain.access.authenticators import system
from posttrain.cli.main import app
from posttrain.domain.jobs import JobOrder, JobResult, Metric, Note, Output, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import materialise
from posttrain.web.curves import draw_learning_curve
from posttrain.web.panels import CurveSeries

ITEMS = 200
_PLACES = ("POSTTRAIN_STORE", "POSTTRAIN_LEDGER")
GOOD_REWARD = '"""Exact match."""\n\n\ndef score(completion, answer):\n    return 1.0\n'
BAD_REWARD = '"""Sounds sure."""\n\n\ndef score(completion, answer):\n    return 0.3\n'
RUN = """\
name: sort
owner: ada
seed: 17
model: model:tiny
data: {train: dataset:train, heldout: dataset:heldout}
rewards: {exact: reward:sort}
stages:
  sft: {kind: sft, data: train, steps: 4, batch_size: 8}
  grpo: {kind: grpo, model: sft, data: train, reward: exact, steps: 6, max_new_tokens: 8,
         probe: {data: heldout, every: 2, items: 8}}
  evaluate: {kind: evaluate, model: grpo, suites: {heldout: {data: heldout}}}
gates:
  - {name: accuracy, metric: heldout/accuracy, at_least: 0.9}
  - {name: no-regression, metric: heldout/accuracy, not_worse_than: channel, margin: 0.04, if_channel_empty: pass}
release: {channel: prod, model: grpo}
"""


def safetensors(value: float) -> bytes:
    """One tensor of one number."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", value)


def write_model(folder: Path, quality: float) -> None:
    """A folder in Hugging Face format whose only weight is how good the model is."""
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 60}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    (folder / "model.safetensors").write_bytes(safetensors(quality))


def imported(given: str) -> list[str]:
    """What the worker says that imports rewards; those of tests are not imported for every command."""
    return [""] * len(json.loads(given)["asked"])


def believe_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans start no process that says how rewards are confined here and whether they can be imported."""
    monkeypatch.setattr("posttrain.preflight.confinement._ask", lambda: {"whole": True, "notes": []})
    monkeypatch.setattr("posttrain.preflight.confinement._answer", lambda words, given, seconds: imported(given))


def metrics_table(right: int, first: int = 0) -> bytes:
    """Per-item accuracy as an evaluation leaves it, of items from number `first` on."""
    values = [1.0] * right + [0.0] * (ITEMS - right)
    rows = {"metric": ["heldout/accuracy"] * ITEMS, "item_id": [f"i{first + i}" for i in range(ITEMS)], "value": values}
    sink = io.BytesIO()
    pq.write_table(pa.table({**rows, "binary": [True] * ITEMS, "low": [0.0] * ITEMS, "high": [1.0] * ITEMS}), sink)
    return sink.getvalue()


def items_table(right: int) -> bytes:
    """The responses behind `metrics_table`, greedy ones only."""
    rows = [
        {
            "suite": "heldout",
            "item_id": f"i{i}",
            "prompt": f"Q: sort {1000 + i}",
            "answer": str(i),
            "kind": "greedy",
            "sample_index": 0,
            "response": f"A: {i}" if i < right else "<b>no idea</b>",
            "extracted": str(i) if i < right else None,
            "correct": i < right,
            "tokens": 4,
            "truncated": False,
            "logprob": -0.5,
        }
        for i in range(ITEMS)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


class WorldClock:
    """Time that passes fifty times as fast for whoever waits, and hardly at all for whoever works.

    So nobody waits in a test, and what a command finds at its deadline does not depend on how fast the machine is.
    """

    def __init__(self) -> None:
        self._time = time.time()

    def now(self) -> float:
        """Seconds since the epoch; no two looks are at the same moment."""
        self._time += 1e-5
        return self._time

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self._time += 50 * seconds


@dataclass
class World:
    """One folder to run commands in."""

    root: Path
    clock: WorldClock = field(default_factory=WorldClock)
    executor: FakeExecutor = field(init=False)
    runner: CliRunner = field(default_factory=CliRunner)
    hold: set[str] = field(default_factory=set)  # stage kinds whose jobs never end by themselves
    broken: dict[str, list[int]] = field(default_factory=dict)  # stage kind → exit codes of jobs that die first
    measuring: set[str] = field(default_factory=lambda: {"evaluate"})  # stage kinds whose jobs measure; others train

    def __post_init__(self) -> None:
        self.executor = FakeExecutor(self._job)

    def __call__(self, *words: str) -> Any:
        """Run a command; the result has `exit_code`, `stdout` and `stderr`."""
        return self.runner.invoke(app, list(words))

    def ok(self, *words: str) -> str:
        """Run a command that must succeed; its output."""
        result = self(*words)
        assert result.exit_code == 0, (words, result.stdout, result.stderr, result.exception)
        return str(result.stdout)

    def json(self, *words: str) -> Any:
        """The JSON a reading command prints."""
        return json.loads(self.ok(*words, "-o", "json"))

    def write(self, name: str, text: str) -> str:
        """A file in the world's folder."""
        (self.root / name).write_text(text)
        return name

    def prepare(self, *, by_commands: bool = False) -> None:
        """Workspace, data, model, reward and run file.

        Args:
            by_commands: given here, where it matters how they make things; otherwise they may be copied.
        """
        if (self.root / ".posttrain").exists() or any(os.environ.get(name) for name in _PLACES):
            by_commands = True  # in the workspace that somebody made, or where they told
        if by_commands:
            self._prepare()
        else:
            self._begin_as(_prepared(system.login_name()))

    def ship(self) -> str:
        """`prepare`, and `run run.yaml`, whose model prod serves then; the run's id."""
        if any(os.environ.get(name) for name in _PLACES):
            self._prepare()
            self.ok("run", "run.yaml")
        else:
            self._begin_as(_shipped(system.login_name()))
        return self.newest()

    def _begin_as(self, made: World) -> None:
        shutil.copytree(made.root, self.root, dirs_exist_ok=True)
        self.clock.sleep(max(0.0, (made.clock.now() - self.clock.now()) / 50))  # what was done there is past here

    def _prepare(self) -> None:
        self.ok("init")
        rows = [{"prompt": f"Q: sort {i}", "completion": f"A: {i}", "answer": str(i)} for i in range(60)]
        self.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        held = [{"prompt": f"Q: sort {1000 + i}", "answer": str(i)} for i in range(ITEMS)]
        self.write("heldout.jsonl", "".join(json.dumps(row) + "\n" for row in held))
        write_model(self.root / "base", 0.1)
        self.ok("asset", "add", "dataset:train", "train.jsonl")
        self.ok("asset", "add", "dataset:heldout", "heldout.jsonl")
        self.ok("asset", "add", "model:tiny", "base")
        self.ok("asset", "add", "reward:sort", self.write("reward.py", GOOD_REWARD))
        self.write("run.yaml", RUN)

    def newest(self) -> str:
        """The id of the newest run."""
        return str(self.json("ls", "--limit", "1")["runs"][0]["id"])

    def _job(self, spec: JobSpec) -> int | None:
        folder = AttemptFolder(spec.folder)
        order = folder.read_order()
        folder.log.write_text(f"{order.kind} says hello\n")
        if order.kind in self.hold:
            return None
        if self.broken.get(order.kind):
            return self.broken[order.kind].pop(0)
        evaluate(folder, order) if order.kind in self.measuring else train(folder, order)
        return 0


@functools.cache
def _prepared(_user: str) -> World:
    return _made(World._prepare)


@functools.cache
def _shipped(_user: str) -> World:
    return _made(lambda world: (world.prepare(), world.ok("run", "run.yaml")))


def _made(make: Callable[[World], object]) -> World:
    """A world that nobody works in, until this process ends."""
    folder = Path(tempfile.mkdtemp(dir=_templates().name))
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(folder, patch)
        make(world)
    return world


@functools.cache
def _templates() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="posttrain-worlds-")  # it removes itself at the end


def train(folder: AttemptFolder, order: JobOrder) -> None:
    """A model as good as the reward says, with facts on the way."""
    blobs = open_blobs(order.store_url)
    quality = 0.5
    if "reward" in order.inputs:
        source = blobs.get(order.inputs["reward"].digest).decode()
        quality = float(source.rpartition("return ")[2])
    steps = int(order.params.get("steps", 1))
    with EventWriter(folder) as sink:
        for step in range(1, steps + 1):
            at = time.time()
            reward = {"reward/mean": step / steps, "probe/accuracy": quality * step / steps}
            sink(Metric(step, {"loss": 1 / step, **(reward if order.kind == "grpo" else {})}, at))
            sink(Progress(step, steps, order.kind, step * 100, at))
        sink(Note("almost there", time.time()))
    write_model(folder.outputs / "model", min(quality, 0.98))
    outputs, metrics, message = {"model": Output("outputs/model", "tree")}, {"loss": 0.1}, ""
    if order.params.get("keep_best"):  # better than the last one
        write_model(folder.outputs / "best", min(quality + 0.2, 0.99))
        outputs |= {"best": Output("outputs/best", "tree")}
        metrics |= {"best/step": 2.0, "best/probe/accuracy": 0.875}
    if order.params.get("early_stopping"):
        metrics |= {"best/step": 2.0, "best/probe/accuracy": 0.875, "stopped_early/step": 4.0}
        message = f"stopped early at step 4 of {steps}: as it was told"
    folder.write_result(JobResult("succeeded", outputs, metrics, steps * 100, 1.0, message=message))


def evaluate(folder: AttemptFolder, order: JobOrder) -> None:
    """As many right answers as the model's weight says."""
    model = materialise(open_blobs(order.store_url), order.inputs["model"].digest, Path(order.cache_dir))
    quality = struct.unpack("<f", (model / "model.safetensors").read_bytes()[-4:])[0]
    right = round(quality * ITEMS)
    folder.outputs.mkdir(exist_ok=True)
    (folder.outputs / "metrics.parquet").write_bytes(metrics_table(right))
    (folder.outputs / "items.parquet").write_bytes(items_table(right))
    outputs = {name: Output(f"outputs/{name}.parquet", "file") for name in ("metrics", "items")}
    folder.write_result(JobResult("succeeded", outputs, {"heldout/accuracy": right / ITEMS}, 10, 0.5))


_PICTURES: dict[Any, bytes] = {}


def _picture(series: Sequence[CurveSeries], **rest: Any) -> bytes:
    """One picture for all runs of a shape: drawing takes a third of a scripted run, and `test_web_curves` shows it."""
    shape = (*((one.quantity, len(one.values)) for one in series), len(rest.get("boundaries", ())))
    if not series or shape not in _PICTURES:
        _PICTURES[shape] = draw_learning_curve(series, **rest)
    return _PICTURES[shape]


def make_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world at `folder`, with nothing in it."""
    world = World(folder)
    monkeypatch.setattr("posttrain.web.curves.draw_learning_curve", _picture)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("POSTTRAIN_WORKSPACE", raising=False)
    monkeypatch.setattr("posttrain.app.workspace.LocalExecutor", lambda *_, **__: world.executor)
    monkeypatch.setattr("posttrain.app.workspace.SystemClock", lambda: world.clock)
    believe_rewards(monkeypatch)
    return world
