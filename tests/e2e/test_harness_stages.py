"""Stages of kind evaluate with a harness, over a real cell and a real server: what is measured, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
from harness_folder import DOCUMENTS, harness_folder
from own_models import TINY, with_models
from served_model import serving
from workbench import Finished, Workbench

from posttrain.domain.harnesses import FACTS
from posttrain.domain.jobs import Note

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workspace with a model and a harness."""
    folder = tmp_path_factory.mktemp("harness")
    bench = with_models(folder, {"tiny": TINY})
    harness_folder(folder / "fetched", bench.root)
    bench.run("asset", "add", "harness:lm-eval", "fetched")
    yield bench
    bench.clean()


def run_file(home: Workbench, task: str, stage: dict[str, Any] | None = None, **more: Any) -> str:
    """The name of a run file with one stage, of its own name."""
    about = {"kind": "evaluate", "model": "base", "harness": "lm-eval", "tasks": [task], **(stage or {})}
    spec = {"name": task, "owner": "e2e", "seed": 5, "model": "model:tiny", "stages": {"bench": about}, **more}
    home.write(f"{task}.yaml", spec)
    return f"{task}.yaml"


def failed(home: Workbench, task: str, stage: dict[str, Any] | None = None, **more: Any) -> str:
    """Why the stage of a run with this task failed."""
    ended: Finished = home.run("run", run_file(home, task, stage, **more), code=None)
    assert ended.code != 0
    [row] = home.run("get", home.run_id(), "-o", "json").json["stages"]
    assert row["state"] == "failed"
    return f"{row['reason']}: {row['message']}"


def log(home: Workbench) -> str:
    """The log of the newest run's stage."""
    return (home.root / "runs" / home.run_id() / "bench" / "001" / "log.txt").read_text()


@pytest.mark.journey
def test_a_harness_measures_a_served_model(home: Workbench) -> None:
    home.run("run", run_file(home, "plain"))
    run = home.run_id()
    found = home.run("get", run, "-o", "json").json
    [score] = [row for row in found["scores"]["rows"] if row["metric"] == "plain/acc"]
    assert (score["items"], score["value"]) == (DOCUMENTS, pytest.approx(2 / 3))
    outputs = home.root / "runs" / run / "bench" / "001" / "outputs"
    rows = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    asked = ["Q: 1", "Q: 2", "Q: 3"]
    assert [row["prompt"] for row in rows] == asked
    greedy = ("--text", "--max-new-tokens", "8", "--temperature", "0", "-o", "json")
    own = home.run("sample", "model:tiny", *asked, *greedy).json["answers"]
    assert [row["response"] for row in rows] == [one["text"] for one in own]
    assert [row["correct"] for row in rows] == [False, True, True]
    assert found["stages"][0]["tokens"] == sum(map(len, asked)) + sum(one["tokens"] for one in own)
    assert "Q: 2" in (home.root / "runs" / run / "report.html").read_text()
    assert "serving model model:tiny@1: native engine, float32 on cpu, context 64" in log(home)
    with serving(home, "model:tiny") as served:
        assert served.ask("/health")[2]["compared"] < 1e-4, "with the log-probabilities that the stage recorded"
    (attempt,) = home.attempts(run, "bench")
    notes = [fact.message for fact in home.facts(attempt) if isinstance(fact, Note)]
    assert any(
        line.startswith("lm-eval cut the beginning of prompts") and "log.txt 1 times" in line for line in notes
    ), notes


def test_a_harness_in_half_precision(home: Workbench) -> None:
    home.run("run", run_file(home, "plain", {"runtime": {"dtype": "bfloat16"}}))
    assert "native engine, bfloat16 on cpu, context 64" in log(home)
    outputs = home.root / "runs" / home.run_id() / "bench" / "001" / "outputs"
    rows = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    greedy = ("--text", "--max-new-tokens", "8", "--temperature", "0", "--dtype", "bfloat16", "-o", "json")
    own = home.run("sample", "model:tiny", *(row["prompt"] for row in rows), *greedy).json["answers"]
    assert [row["response"] for row in rows] == [one["text"] for one in own]


def test_a_harness_that_crashes_is_one_line(home: Workbench) -> None:
    said = failed(home, "crash")
    assert "lm-eval ended with exit code 1: ValueError: the task has no rows; key [OPENAI_API_KEY]" in said


def test_results_of_another_task_are_refused(home: Workbench) -> None:
    assert "results of other/acc belong to no task of the stage" in failed(home, "foreign")
    assert not list((home.root / "runs" / home.run_id() / "bench" / "001" / "outputs").glob("*.parquet"))


def test_a_harness_reaches_nothing_else(home: Workbench) -> None:
    home.run("run", run_file(home, "elsewhere"), env={"WANDB_API_KEY": "not-for-harnesses"})
    said = next(line for line in log(home).splitlines() if line.startswith("WROTE"))
    assert "SAW False" in said
    assert "WANDB" not in said
    assert not (home.root / "made").exists()


def test_a_harness_without_requests_is_ended(home: Workbench) -> None:
    assert "lm-eval sent no request for 2 s" in failed(home, "hang", {"timeout": 2})
    assert not running(home, "lm_eval")


def test_a_harness_spends_at_most_the_budget(home: Workbench) -> None:
    said = failed(home, "greedy", budget={"tokens": 1500})
    assert said.startswith("BudgetExceeded: ")
    assert "token budget must cover the next answer" in said
    [row] = home.run("get", home.run_id(), "-o", "json").json["stages"]
    assert 1300 < row["tokens"] <= 1500


def test_a_harness_fills_no_disk(home: Workbench) -> None:
    assert "lm-eval ended with exit code 1: OSError" in failed(home, "large")


def test_a_killed_job_measures_again(home: Workbench) -> None:
    """After `kill -9` of the job, nothing of it stays, and the next attempt has the same results."""
    process = home.start("run", run_file(home, "hang", {"timeout": 60}))
    live = home.wait("a server", lambda: running(home, "posttrain.serving"))
    [job] = {one.ppid() for one in live}
    os.kill(job, signal.SIGKILL)
    home.wait("their end", lambda: not any(one.is_running() for one in live))
    home.run("stop", home.run_id())
    home.finish(process)
    assert not running(home, "lm_eval")


def running(home: Workbench, word: str) -> list[psutil.Process]:
    """The processes of a workspace's jobs with this word in their command lines."""
    found = [one for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or ())]
    return [one for one in found if any(str(home.root) in " ".join(of.cmdline()) for of in one.parents())]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ({"tasks": ["plane"]}, "stages.bench.tasks: 'plane' was not fetched (did you mean 'plain'?)"),
        ({"ranges": {"plain/f1": [0, 1]}}, "stages.bench.ranges: 'plain/f1' is no metric of these tasks"),
        ({"ranges": {"plain/acc": [1, 0]}}, "must be two numbers, the smaller one first"),
        ({"harness": "lm_eval"}, "harness:lm_eval: no harness of that name is registered"),
        ({"suites": {}}, "evaluate: suites: unknown key"),
    ],
)
def test_mistakes_in_a_stage_are_found_by_its_plan(home: Workbench, stage: dict[str, Any], told: str) -> None:
    assert told in home.run("plan", run_file(home, "plain", stage), code=None).error


def test_a_gate_on_a_metric_that_no_harness_measures(home: Workbench) -> None:
    made = {"kind": "init_model", "hidden_size": 16, "intermediate_size": 16, "layers": 1, "context_length": 64}
    stages = {"made": made, "bench": {"kind": "evaluate", "model": "made", "harness": "lm-eval", "tasks": ["plain"]}}
    release = {"channel": "prod", "model": "made"}
    spec = {"name": "gated", "owner": "e2e", "seed": 5, "model": "model:tiny", "stages": stages, "release": release}
    home.write("gated.yaml", {**spec, "gates": [{"name": "a", "metric": "plain/f1", "at_least": 0.1}]})
    assert "no evaluate stage of the released model measures 'plain/f1'" in home.run("plan", "gated.yaml", code=2).error
    rule = {"name": "a", "metric": "plain/acc", "at_least": 0.05}
    home.write("gated.yaml", {**spec, "gates": [rule]})
    assert (
        "requires min_items: 20 to be judged, but its suite has 3 items" in home.run("run", "gated.yaml", code=2).error
    )
    home.write("gated.yaml", {**spec, "gates": [{**rule, "min_items": 3}]})
    assert "plain/acc" in home.run("plan", "gated.yaml").out  # its power
    home.run("run", "gated.yaml")
    assert home.run("get", home.run_id(), "-o", "json").json["state"] == "succeeded"


def test_a_harness_of_another_python(home: Workbench, tmp_path: Path) -> None:
    folder = harness_folder(tmp_path / "other", home.root)
    facts = json.loads((folder / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps({**facts, "python": "3.9 linux-riscv64"}))
    home.run("asset", "add", "harness:other", str(folder))
    assert "its packages are for Python 3.9 linux-riscv64" in failed(home, "plain", {"harness": "other"})
    (folder / FACTS).write_text("{}")
    assert "must have the facts of a harness" in home.run("asset", "add", "harness:x", str(folder), code=2).error
