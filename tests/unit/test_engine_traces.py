"""What the samples of a stage take in its trace, and that what is left out is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.domain.errors import IntegrityError
from posttrain.domain.jobs import Note, Sample, fact_from_json, fact_to_json
from posttrain.engine.config import TraceConfig
from posttrain.engine.config.sampling import TRACE_BYTES
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Group, Prompt, Sample as Row, Trajectory
from posttrain.engine.trace import SampleTracer, Trace, TraceBudget
from posttrain.sandbox.port import Score
from posttrain.store.attempts import AttemptFolder, EventWriter

STEPS = 20


def group(step: int, samples: int, tokens: int) -> ScoredGroup:
    answers = [
        Trajectory.answer((1, 5), [7] * tokens, [-0.5 - i] * tokens, truncated=True, version=f"0.{step}")
        for i in range(samples)
    ]
    rows = tuple(Row(i, (answer,)) for i, answer in enumerate(answers))
    return ScoredGroup(Prompt((1, 5), "p"), Group(step, rows), (Score(1.0),) * samples, step)


def trace(folder: Path, budget: TraceBudget, steps: range, samples: int, tokens: int) -> tuple[list[Any], int]:
    """Everything that was said in these steps, and the bytes of samples on the disk."""
    facts: list[Any] = []
    with EventWriter(AttemptFolder(folder)) as writer:
        for step in steps:
            tracer = SampleTracer([group(step, samples, tokens)], step, budget, "not chosen")
            said: list[Any] = []
            left = tracer.report(Trace(said.append, step), lambda answer: "7" * len(answer.response))
            assert left == samples - sum(isinstance(fact, Sample) for fact in said)
            facts += said
            for fact in said:
                writer(fact)
    return facts, sum(path.stat().st_size for path in (folder / "samples").glob("*"))


def test_audit_18_traces_of_long_responses_stay_within_the_bytes_of_the_stage(tmp_path: Path) -> None:
    """Of 20 steps with a group of 8 x 10,000 tokens 10 MB are written, evenly; what is left out is counted."""
    budget = TraceBudget(TRACE_BYTES, STEPS)
    facts, written = trace(tmp_path, budget, range(STEPS), 8, 10_000)
    samples = [fact for fact in facts if isinstance(fact, Sample)]
    assert 0.9 * TRACE_BYTES < written <= TRACE_BYTES
    assert {one.step for one in samples} >= {0, STEPS // 2, STEPS - 1}
    assert budget.dropped == STEPS * 8 - len(samples) > 0
    first, last = [fact.message for fact in facts if isinstance(fact, Note)]
    cause = f"because trace.bytes ({TRACE_BYTES}) is too small for all samples that the stage traces"
    assert f"samples of step 0 were not traced, {cause}" in first
    assert last == f"{budget.dropped} samples were not traced, because trace.bytes is {TRACE_BYTES}"


def test_audit_18_attempts_that_resume_stay_within_the_bytes_together(tmp_path: Path) -> None:
    written = 0
    for at, steps in enumerate((range(7), range(7, 13), range(13, STEPS))):
        written += trace(tmp_path / str(at), TraceBudget(1_000_000, STEPS), steps, 8, 1000)[1]
    assert 700_000 < written <= 1_000_000


def test_audit_18_short_samples_leave_their_trace_whole(tmp_path: Path) -> None:
    facts, written = trace(tmp_path, TraceBudget(TRACE_BYTES, STEPS), range(STEPS), 8, 20)
    assert sum(isinstance(fact, Sample) for fact in facts) == len(facts) == 8 * STEPS
    assert written < 200_000
    assert TraceConfig().model_dump() == {"groups": 1}, "stages that do not set bytes keep their digest"
    assert TraceConfig(bytes=5).model_dump() == {"groups": 1, "bytes": 5}


def test_audit_18_numbers_of_a_sample_are_read_as_they_were_written_by_this_and_older_releases() -> None:
    sample = Sample(
        "0.1.2", 0, "p", "r", [1, 5], [7, 9], [-0.1, -12.34567], False, ["0.1"], 1.0, "update 0",
        advantages=[0.3, float("inf")], clipped=[True, False], temperature=0.7,
    )  # fmt: skip
    said = fact_to_json(sample)
    assert isinstance(said["behaviour_logprobs"], dict)
    assert fact_from_json(said) == sample
    older = {name: getattr(sample, name) for name in said if name not in ("type", "temperature")}
    assert fact_from_json({"type": "sample", **older}) == replace(sample, temperature=None)
    for odd in ({"f": "%%%%"}, {"f": "AAA="}, {"q": "AAAA"}, {}):
        with pytest.raises(IntegrityError, match="cannot be read"):
            fact_from_json({**said, "tokens": odd})
