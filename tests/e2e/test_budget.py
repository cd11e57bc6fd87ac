"""Budgets as a person meets them: exit code 7, a larger number in run.yaml, the same command again."""

from __future__ import annotations

import copy
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from tiny_run import RUN
from workbench import Reference, Workbench

from posttrain.domain.jobs import Progress

pytestmark = pytest.mark.slow


def tokens(bench: Workbench, run_id: str) -> dict[str, int]:
    return {stage["name"]: stage["tokens"] for stage in bench.run("get", run_id, "-o", "json").json["stages"]}


def limited(bench: Workbench, **changes: Any) -> None:
    raw = copy.deepcopy(RUN)
    raw["budget"] = {**raw["budget"], **changes.pop("budget")}
    raw["stages"]["grpo"]["runtime"] |= changes
    bench.write("run.yaml", raw)


@pytest.mark.journey
def test_a_raised_budget_goes_on_at_the_step_it_stopped_at(empty: Workbench, reference: Reference) -> None:
    """A checkpoint interval that is changed on the way does not matter either."""
    spent = tokens(reference.bench, reference.run_id)
    whole = spent["sft"] + spent["grpo"]
    limited(empty, budget={"tokens": spent["sft"] + round(0.8 * spent["grpo"])})
    stopped = empty.run("run", "run.yaml", code=7)
    assert "raise budget.tokens" in stopped.error
    declared = spent["sft"] + round(0.8 * spent["grpo"])
    assert f"are spent (budget.tokens: {declared})" in stopped.error
    first = empty.run_id()
    (attempt,) = empty.attempts(first, "grpo")
    done = empty.steps(attempt)[-1]
    assert 1 <= done < RUN["stages"]["grpo"]["steps"]
    assert sum(tokens(empty, first).values()) == spent["sft"] + attempt.tokens <= spent["sft"] + 0.8 * spent["grpo"]

    limited(empty, budget={"tokens": 2 * whole}, checkpoint_every=2)
    empty.run("run", "run.yaml")
    second = empty.run_id()
    assert second != first
    (attempt,) = empty.attempts(second, "grpo")
    assert empty.resumed_at(attempt) == done
    assert empty.steps(attempt)[0] == done + 1
    empty.check(second)
    assert empty.outputs(second) == reference.outputs
    assert attempt.tokens + empty.attempts(first, "grpo")[0].tokens == spent["grpo"], "nothing was done twice"


@pytest.mark.journey
def test_what_killed_attempts_spent_is_billed_and_bounded(empty: Workbench, reference: Reference) -> None:
    spent = tokens(reference.bench, reference.run_id)
    budget = spent["sft"] + round(1.5 * spent["grpo"])
    limited(empty, budget={"tokens": budget}, checkpoint_every=100)
    process = empty.start("run", "run.yaml")
    kills = 0
    while process.poll() is None and kills < 6:
        time.sleep(0.01)
        job = next((j for j in empty.live("job") if j.attempt.parent.name == "grpo"), None)
        if job is None:
            continue
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGSTOP)  # it must not end while the test looks, however slow the machine is
            attempt = next(
                (a for a in empty.attempts(empty.run_id(), "grpo") if empty.root / a.folder == job.attempt), None
            )
            if attempt is None or not empty.steps(attempt):
                os.kill(job.pid, signal.SIGCONT)
                continue
            kills += 1
            os.kill(job.pid, signal.SIGKILL)
            empty.wait_end(job)
    code = empty.finish(process).code
    attempts = empty.attempts(empty.run_id())
    lost = [a for a in attempts if a.state == "lost"]
    assert lost
    assert all(a.seconds > 0 for a in lost), "every attempt that ran is billed its time"
    for attempt in attempts:
        said = [fact.tokens for fact in empty.facts(attempt) if isinstance(fact, Progress)]
        assert attempt.tokens >= (said[-1] if said else 0)
    assert sum(a.tokens for a in attempts) <= budget
    assert code in (0, 7)
