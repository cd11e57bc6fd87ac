"""A user's reward that prefers long responses: the run succeeds, and `why` and the report name what went wrong."""

from __future__ import annotations

import copy

import pytest
from tiny_run import RUN
from workbench import Workbench

pytestmark = [pytest.mark.slow, pytest.mark.journey]
SLOW = {"learning_rate": 5e-3, "warmup_steps": 10}  # the responses are still short in the first window


def test_a_reward_that_prefers_long_responses_is_named_a_length_explosion(empty: Workbench) -> None:
    raw = copy.deepcopy({name: value for name, value in RUN.items() if name not in ("gates", "release")})
    sft, grpo = (
        raw["stages"]["sft"] | {"steps": 40},
        raw["stages"]["grpo"] | {"steps": 30, "max_new_tokens": 48, "optimizer": SLOW},
    )
    empty.write("run.yaml", raw | {"stages": {"sft": sft, "grpo": grpo}})
    empty.write("longer.py", "def score(completion: str) -> float:\n    return len(completion) / 24\n")
    empty.run("asset", "add", "reward:length", "longer.py")
    empty.run("run", "run.yaml")
    run_id = empty.run_id()
    told = {one["symptom"]: one for one in empty.run("why", run_id, "-o", "json").json["findings"]}
    explosion = told["length-explosion"]
    assert explosion["stage"] == "grpo"
    assert explosion["evidence"].startswith("response_tokens/mean grew from ")
    assert explosion["page"] in empty.run("why", run_id).out
    empty.run("get", run_id, "--report")
    page = (empty.root / "runs" / run_id / "report.html").read_text()
    assert "grpo: length-explosion" in page
    assert explosion["evidence"] in page
