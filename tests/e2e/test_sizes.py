"""What a plan says of a stage's sizes, against the jobs of a run: the same choices, and the memory that they took."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from tiny_run import RUN
from workbench import Workbench

from posttrain.domain.jobs import Metric

FACTOR = 1.5  # that the estimate of resident memory is held to, both ways
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "layers": 8, "heads": 8, "kv_heads": 4, "context_length": 1024}
NARROW = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "context_length": 1024}


def told(bench: Workbench, run_id: str, stage: str) -> dict[str, float]:
    """The last value of every metric that the stage's job told."""
    [attempt] = bench.attempts(run_id, stage)
    metrics = [fact.values for fact in bench.facts(attempt) if isinstance(fact, Metric)]
    return {name: value for values in metrics for name, value in values.items()}


def planned(bench: Workbench, file: str) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in bench.run("plan", file, "-o", "json").json["stages"]}


@pytest.mark.slow
def test_the_job_takes_what_the_plan_said(empty: Workbench) -> None:
    raw = copy.deepcopy(RUN)
    raw["stages"]["grpo"].pop("reward_timeout")
    raw["stages"]["grpo"]["runtime"]["kv_cache"] = "2MiB"
    empty.write("run.yaml", raw)
    plan = planned(empty, "run.yaml")
    empty.run("run", "run.yaml")
    run_id = empty.run_id()
    for name, sizes in (
        ("sft", {"micro_batch_tokens", "activation_checkpointing", "call_timeout"}),
        ("grpo", {"micro_batch_tokens", "activation_checkpointing", "kv_cache", "reward_timeout", "call_timeout"}),
        ("evaluate", {"kv_cache"}),
    ):
        said = {f"sizes/{size['name']}": size["value"] for size in plan[name]["sizes"]}
        metrics = told(empty, run_id, name)
        assert {metric: value for metric, value in metrics.items() if metric.startswith("sizes/")} == said
        assert said.keys() == {f"sizes/{size}" for size in sizes}
    assert "kv_cache: 2 MiB, as written" in empty.run("logs", run_id, "grpo").out
    with empty.open() as workspace:
        rows = {row.name: row for row in workspace.ledger.stages(run_id)}
    assert rows["grpo"].metrics["sizes/kv_cache"] == 2 * 2**20
    assert rows["sft"].metrics["sizes/micro_batch_tokens"] == 4096.0
    assert rows["sft"].tokens == pytest.approx(plan["sft"]["estimate"]["tokens"], rel=0.03)
    assert "counted by its tokenizer" in plan["sft"]["estimate"]["basis"]
    page = (empty.root / "runs" / run_id / "report.html").read_text()
    curves, settings = page.split("Hyperparameters")
    assert "sizes/" not in curves  # they do not change by step
    assert re.search(r"sizes/kv_cache</td><td><code>2097152 \(used by the job\)", settings)


@pytest.mark.slow
@pytest.mark.first
def test_resident_memory_is_what_the_plan_says_within_a_factor(empty: Workbench) -> None:
    """Against a job of a model that is next to nothing, which has all that Python and torch take themselves."""
    few = {"kind": "sft", "data": "train", "steps": 2, "batch_size": 16}  # one micro-batch of some 4,000 tokens
    stages: dict[str, Any] = {
        name: {**few, "runtime": {"activation_checkpointing": again}}
        for name, again in (("whole", False), ("again", True))
    }
    digits = "0123456789" * 13
    rows = [{"prompt": f"Q: sort {at:03d}{digits}", "completion": digits, "answer": "1"} for at in range(64)]
    empty.write("long.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    hold_to_plan(empty, {"train": "./long.jsonl"}, stages)


@pytest.mark.slow
def test_an_evaluation_is_resident_as_the_plan_says_within_a_factor(empty: Workbench) -> None:
    """Long prompts with short answers, and short ones with longer answers: what is read, and what is decoded."""
    for name, prompt in (("long", "0123456789" * 20), ("short", "Q: ")):
        rows = [{"prompt": f"{prompt}{at:03d}", "answer": "1"} for at in range(256)]  # as many as are decoded together
        empty.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    stages: dict[str, Any] = {
        name: {"kind": "evaluate", "model": "base", "suites": {"held": {"data": name, "max_new_tokens": limit}}}
        for name, limit in (("long", 8), ("short", 140))
    }
    hold_to_plan(empty, {"long": "./long.jsonl", "short": "./short.jsonl"}, stages)


def hold_to_plan(bench: Workbench, data: dict[str, str], stages: dict[str, Any]) -> None:
    """Run the stages on a wide model and on one that is next to nothing; what both differ by is the plan's."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, model in (("narrow", NARROW), ("wide", WIDE)):
        bench.write(f"{name}.yaml", model)
        bench.run("asset", "create", f"model:{name}", f"{name}.yaml")
        raw = {"name": name, "owner": "e2e", "seed": 1, "model": f"model:{name}", "data": data, "stages": stages}
        bench.write(f"{name}-run.yaml", raw)
        plan = planned(bench, f"{name}-run.yaml")
        bench.run("run", f"{name}-run.yaml")
        found[name] = {}
        for stage in stages:
            [peak] = plan[stage]["residency"]["peaks"]
            measured = told(bench, bench.run_id(), stage)["memory/peak_resident_mib"]
            found[name][stage] = peak["bytes"] / 2**20, measured
    for stage in stages:
        (small, base), (large, measured) = found["narrow"][stage], found["wide"][stage]
        ratio = (measured - base) / (large - small)
        print(stage, found["narrow"][stage], found["wide"][stage], round(ratio, 2))
        assert 1 / FACTOR < ratio < FACTOR, (stage, ratio)
