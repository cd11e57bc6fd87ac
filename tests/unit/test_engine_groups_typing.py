"""A type checker finds the mistakes that dispatch by name would find on the cluster, after the models are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEADER = """\
from __future__ import annotations
from collections.abc import Sequence
from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.groups.port import Stored, StoredShard
from posttrain.engine.groups.worker_group import Future, WorkerGroup

class Worker:
    def __init__(self, context: RankContext, width: int) -> None: ...
    def logprobs(self, batch: TokenBatch, temperature: float = 1.0) -> TokenBatch: return batch
    def step(self, rate: float) -> dict[str, float]: return {}
    def prompts(self, texts: list[str]) -> list[str]: return texts

class Other:
    def __init__(self, context: RankContext) -> None: ...
    def step(self, rate: float) -> dict[str, float]: return {}

def check(group: WorkerGroup[Worker], pool: ResourcePool, batch: TokenBatch, texts: list[str]) -> None:
"""

# what it is, wrong, right
CASES = [
    ("misspelt method", "group.each(Worker.stepp, 0.1)", "group.each(Worker.step, 0.1)"),
    ("wrong argument type", "group.each(Worker.step, 'fast')", "group.each(Worker.step, 0.1)"),
    ("missing argument", "group.each(Worker.step)", "group.each(Worker.step, rate=0.1)"),
    ("argument too many", "group.one(Worker.step, 0.1, 0.2)", "group.one(Worker.step, 0.1)"),
    (
        "wrong keyword",
        "group.map(Worker.logprobs, batch, heat=1.0)",
        "group.map(Worker.logprobs, batch, temperature=1)",
    ),
    ("wrong batch type", "group.map(Worker.logprobs, texts)", "group.map(Worker.logprobs, batch)"),
    ("batch that cannot be split", "group.map(Worker.prompts, texts)", "group.one(Worker.prompts, texts)"),
    (
        "wrong result type",
        "a1: float = group.one(Worker.step, 0.1)",
        "a: dict[str, float] = group.one(Worker.step, 0.1)",
    ),
    (
        "a result of every rank taken for one",
        "b1: dict[str, float] = group.each(Worker.step, 0.1)",
        "b: list[dict[str, float]] = group.each(Worker.step, 0.1)",
    ),
    (
        "a future taken for its result",
        "c1: TokenBatch = group.nonblocking.map(Worker.logprobs, batch)",
        "c: Future[TokenBatch] = group.nonblocking.map(Worker.logprobs, batch)",
    ),
    (
        "a stored value taken for the value",
        "d1: list[dict[str, float]] = group.each_stored(Worker.step, 0.1)",
        "d: list[Stored[dict[str, float]]] = group.each_stored(Worker.step, 0.1)",
    ),
    (
        "a stored shard taken for its value",
        "f1: list[TokenBatch] = group.nonblocking.map_stored(Worker.logprobs, batch).result()",
        "f: list[StoredShard[TokenBatch]] = group.nonblocking.map_stored(Worker.logprobs, batch).result()",
    ),
    ("method of another class", "group.each(Other.step, 0.1)", "group.each(Worker.step, 0.1)"),
    ("method by name", "group.each('step', 0.1)", "group.within(3).each(Worker.step, 0.1)"),
    (
        "constructor's arguments",
        "pool.start('policy', Worker, 'wide')",
        "e: WorkerGroup[Worker] = pool.start('policy', Worker, 3)",
    ),
]


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> set[int]:
    """The numbers of the lines that mypy complains about, in one run with the project's settings."""
    folder = tmp_path_factory.mktemp("typing")
    lines = [line for _, wrong, right in CASES for line in (f"    {wrong}", f"    {right}")]
    snippet = folder / "snippet.py"
    snippet.write_text(HEADER + "\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]  # that of `make types`: torch is long to read
    told = subprocess.run([*command, str(snippet)], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert not told.stderr, told.stderr
    found = [line.split(":") for line in told.stdout.splitlines() if "snippet.py:" in line and ": error:" in line]
    return {int(parts[1]) for parts in found}


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[name for name, _, _ in CASES])
def test_a_mistake_is_found_and_its_correction_passes(complaints: set[int], index: int) -> None:
    wrong = HEADER.count("\n") + 1 + 2 * index
    assert wrong in complaints
    assert wrong + 1 not in complaints


def test_the_header_itself_is_right(complaints: set[int]) -> None:
    assert min(complaints) > HEADER.count("\n")
