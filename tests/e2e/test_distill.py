"""Distillation as a user runs it: the page's example, and a teacher in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import RUN
from torch import Tensor
from workbench import Workbench

from posttrain.domain.jobs import Metric, Note, Span
from posttrain.store.trees import materialise

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "distill.md"
APART = {"policy": {"ranks": 1}, "rollout": {"ranks": 1}, "teacher": {"ranks": 1}}
TWICE = {"policy": {"ranks": 2}, "rollout": {"ranks": 1}, "teacher": {"ranks": 2}}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_the_page_says_happens(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")}
    bench = Workbench(tmp_path)
    try:
        done = subprocess.run(
            ["bash", "-ec", block], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
            env={**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (run,) = (one["id"] for one in bench.run("ls", "-o", "json").json["runs"] if one["name"] == "count")
        (attempt,) = bench.attempts(run, "distill")
        steps = [f.values for f in bench.facts(attempt) if isinstance(f, Metric) and "agreement" in f.values]
        first, last = (sum(values["agreement"] for values in part) / 5 for part in (steps[:5], steps[-5:]))
        assert last > first + 0.1, "it comes to say what its teacher says"
        assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
        rows = bench.run("get", run, "-o", "json").json["scores"]["rows"]
        found = {row["stage"]: row for row in rows if row["metric"] == "heldout/accuracy"}
        assert found["after"]["value"] > 0.6, found
        assert found["after"]["before"][0]["difference"]["value"] > 0.2, found
    finally:
        bench.clean()


def one_stage(bench: Workbench, placement: dict[str, Any] | None) -> None:
    """A model learns from what another run of the same file made of it."""
    raw = {key: value for key, value in RUN.items() if key not in ("gates", "release", "rewards")}
    stage = {
        "kind": "distill", "data": "train", "teacher": "sft", "steps": 4, "prompts_per_step": 6, "group_size": 2,
        "max_new_tokens": 16, "top_k": 8, "mini_batches": 2, "trace": {"groups": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "runtime": {"micro_batch_tokens": 96, "checkpoint_every": 2}, **({"placement": placement} if placement else {}),
    }  # fmt: skip
    bench.write("run.yaml", {**raw, "stages": {"sft": RUN["stages"]["sft"], "distill": stage}})


def weights(bench: Workbench) -> dict[str, Tensor]:
    with bench.open() as workspace:
        folder = materialise(workspace.blobs, bench.outputs(bench.run_id())["distill"], bench.folder / "looked-at")
    return load_file(folder / "model.safetensors")


@pytest.mark.ray
@pytest.mark.timeout(3000)
def test_a_teacher_in_a_process_of_its_own_teaches_the_same(template: Workbench, tmp_path: Path) -> None:
    """Bit for bit with as many ranks, up to rounding with more; and its tokens pass the controller by."""
    together, apart, twice = (template.copy(tmp_path / name) for name in ("together", "apart", "twice"))
    for bench, placement in ((together, None), (apart, APART), (twice, TWICE)):
        one_stage(bench, placement)
        bench.run("run", "run.yaml")
    assert apart.outputs(apart.run_id())["distill"] == together.outputs(together.run_id())["distill"]
    whole, cut = weights(together), weights(twice)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, atol=1e-4, rtol=0)
    (attempt,) = apart.attempts(apart.run_id(), "distill")
    told = [fact.message for fact in apart.facts(attempt) if isinstance(fact, Note)]
    assert any("starting Ray on this machine for the ranks of " in line for line in told), told
    spans = [fact for fact in apart.facts(attempt) if isinstance(fact, Span) and fact.attributes.get("kind") == "call"]
    held = [span for span in spans if span.attributes["method"] == "hold"]
    assert len(held) > 4, "in stretches, while others are sampled"
    assert {span.attributes["pool"] for span in held} == {"teacher"}
    assert all(span.attributes["bytes_in"] == 0 for span in held), "what it says stays in the object store"
