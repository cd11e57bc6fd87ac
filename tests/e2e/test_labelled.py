"""KTO as a user runs it, from an empty folder: rejected rows, a run over labels and pairs, its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import MODEL
from workbench import Workbench

from posttrain.domain.jobs import Metric

RUN: dict[str, Any] = {
    "name": "labelled",
    "owner": "e2e",
    "seed": 5,
    "model": "model:tiny",
    "data": {"labels": "./labels.jsonl", "held": "./held.jsonl"},
    "stages": {
        "kto": {
            "kind": "kto",
            "data": "labels",
            "epochs": 6,
            "batch_size": 8,
            "probe": {"data": "held", "every": 5},
            "keep_best": True,
            "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2},
        }
    },
}


def labelled(number: int) -> dict[str, Any]:
    """A completion that ends in "a" is desirable; every third row is a pair."""
    prompt, good, bad = f"{number} ", f"{number % 7}a", f"{number % 5}b"
    if number % 3 == 0:
        return {"prompt": prompt, "chosen": good, "rejected": bad}
    return {"prompt": prompt, "completion": good if number % 3 == 1 else bad, "label": number % 3 == 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_learns_from_labels(tmp_path: Path) -> None:
    bench = Workbench(tmp_path)
    try:
        bench.run("init")
        bench.write("model.yaml", MODEL)
        bench.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
        rows = [labelled(number) for number in range(48)]
        bench.write("held.jsonl", "".join(json.dumps(labelled(number)) + "\n" for number in range(48, 60)))
        bench.write("run.yaml", RUN)
        bench.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, {**rows[1], "label": "yes"}]))
        assert "row 49: label must be true or false, got 'yes'" in bench.run("run", "run.yaml", code=2).error
        bench.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        assert "epochs 6 = 48 steps (64 documents, 8 a step)" in bench.run("plan", "run.yaml").out
        bench.run("run", "run.yaml")
        (run,) = (one["id"] for one in bench.run("ls", "-o", "json").json["runs"] if one["name"] == "labelled")
        bench.check(run)
        (attempt,) = bench.attempts(run, "kto")
        probes = [f.values for f in bench.facts(attempt) if isinstance(f, Metric) and "probe/loss" in f.values]
        assert probes[0]["probe/loss"] == pytest.approx(0.5, abs=1e-3), "the policy is its reference yet"
        assert probes[-1]["probe/loss"] < 0.45
        assert probes[-1]["probe/margin"] > 0.4
        bench.run("get", run, "--report")
        report = (bench.folder / ".posttrain" / "runs" / run / "report.html").read_text(encoding="utf-8")
        assert "KTO: reference point, nats per response" in report
    finally:
        bench.clean()
