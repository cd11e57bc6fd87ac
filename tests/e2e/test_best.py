"""A stage that stops by its probe and keeps its best model, with real processes that die around that model: what is
released, judged and taken out is what an undisturbed run leaves.
"""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
from test_recovery import BEST, armed
from tiny_run import RUN
from workbench import Workbench

from posttrain.domain.jobs import Note

pytestmark = pytest.mark.slow


def stopping(**sft: Any) -> dict[str, Any]:
    """The tiny run with a probe that decides; too fast a learner, so that it gets worse again."""
    raw = copy.deepcopy(RUN)
    stage = raw["stages"]["sft"] | {
        "steps": 40, "keep_best": True, "probe": {"data": "tune", "every": 2, "items": 16},
        "early_stopping": {"patience": 2}, "optimizer": {"learning_rate": 8e-2, "warmup_steps": 0},
    }  # fmt: skip
    suite = {"heldout": {"data": "heldout", "max_new_tokens": 24}}
    raw["stages"] = {"sft": stage | sft, "evaluate": {"kind": "evaluate", "model": "sft/best", "suites": suite}}
    raw["data"]["tune"] = "./tune.jsonl"
    raw["gates"] = [{"name": "room", "metric": "heldout/response_tokens", "at_most": 24}]
    raw["gates"] = [{"name": "not-worse", "metric": "heldout/accuracy", "not_worse_than": "sft", "margin": 0.9}]
    return raw | {"release": {"channel": "prod", "model": "sft/best"}}


MORE = (("train.step", 7), ("checkpoint.before_commit", 1))  # where jobs of other tests die too


def prepared(bench: Workbench) -> Workbench:
    held = (bench.folder / "heldout.jsonl").read_text().splitlines()
    bench.write("tune.jsonl", "\n".join(held[:16]) + "\n")
    bench.write("run.yaml", stopping())
    return bench


def left(bench: Workbench, run_id: str) -> dict[str, Any]:
    """Digests of both models and of the evaluation of the best one, what the stage says, and what is released."""
    with bench.open() as workspace:
        rows = {row.name: row for row in workspace.ledger.stages(run_id)}
        live = workspace.ledger.history("prod")[-1].model_digest
    sft = rows["sft"]
    said = {name: value for name, value in sft.metrics.items() if name != "tokens_per_second"}
    return {
        "outputs": sft.outputs,
        "said": said,
        "message": sft.message,
        "live": live,
        "kind": rows["evaluate"].inputs["model"],
    }


@pytest.fixture(scope="module")
def undisturbed(template: Workbench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    bench = prepared(template.copy(tmp_path_factory.mktemp("best") / "undisturbed"))
    bench.run("run", "run.yaml")
    run_id = bench.run_id()
    bench.check(run_id)
    found = left(bench, run_id)
    assert found["live"] == found["outputs"]["best"]["digest"] != found["outputs"]["model"]["digest"]
    assert found["message"].startswith("stopped early at step ")
    exported = bench.run("export", f"{run_id}/sft/best", str(bench.folder / "out"), "-o", "json").json
    assert exported["digest"] == found["live"]
    assert (bench.folder / "out" / "model.safetensors").exists()
    bench.clean()
    return found


@pytest.mark.parametrize(
    "point",
    [*BEST, *(pytest.param(point, marks=pytest.mark.deep) for point in MORE)],
    ids=lambda point: point[0],
)
def test_a_job_that_dies_leaves_the_same_two_models(
    point: tuple[str, int], template: Workbench, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    bench = prepared(template.copy(tmp_path / "bench"))
    try:
        env, mark = armed(bench, point)
        bench.run("run", "run.yaml", env=env)
        assert mark.exists()
        run_id = bench.run_id()
        bench.check(run_id)
        found = left(bench, run_id)
        attempts = bench.attempts(run_id, "sft")
        assert [attempt.state for attempt in attempts] == ["lost", "succeeded"]
        notes = [fact.message for fact in bench.facts(attempts[-1]) if isinstance(fact, Note)]
        assert found["message"] in notes
        assert {k: v for k, v in found.items() if k != "kind"} == {k: v for k, v in undisturbed.items() if k != "kind"}
        assert found["kind"]["digest"] == undisturbed["kind"]["digest"]
        folders = [bench.root / attempt.folder for attempt in attempts]
        assert all(len(list(folder.glob("best/*"))) <= 2 for folder in folders), "one, and one in the making"
    finally:
        bench.clean()


def test_the_whole_command_killed_goes_on(template: Workbench, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    bench = prepared(template.copy(tmp_path / "bench"))
    try:
        env, mark = armed(bench, ("checkpoint.after_commit", 1))
        process = bench.start("run", "run.yaml", env=env)
        bench.wait_job()
        process.kill()
        assert bench.finish(process).code == -signal.SIGKILL
        bench.wait("the job's death", mark.exists)
        bench.wait_quiet()
        bench.run("run", "run.yaml")
        run_id = bench.run_id()
        bench.check(run_id)
        found = left(bench, run_id)
        assert found["outputs"] == undisturbed["outputs"]
        assert found["live"] == undisturbed["live"]
    finally:
        bench.clean()
