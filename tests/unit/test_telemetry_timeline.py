"""Where time went: sums that must add up, and a trace that a viewer accepts, for any spans at all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from posttrain.domain.jobs import Span
from posttrain.telemetry.timeline import AttemptSpans, chrome_trace, summarise

EPOCH = 1_700_000_000.0
_OFFSETS = st.floats(0, 100)
_SECONDS = st.floats(0, 30)


def call(
    step: int,
    started: float,
    seconds: float,
    ranks: Sequence[tuple[int, float, float]],
    role: str = "policy",
    **more: Any,
) -> Span:
    attributes = {"kind": "call", "role": role, "method": "update", "pool": "main", "ranks": [list(r) for r in ranks]}
    costs = {"bytes_out": 100, "bytes_in": 10, "imbalance": 1.0}
    return Span(f"{role}.update", step, started, seconds, {**attributes, **costs, **more})


@st.composite
def calls(draw: st.DrawFn) -> Span:
    busy = [(rank, EPOCH + draw(_OFFSETS), draw(_SECONDS)) for rank in range(draw(st.integers(0, 3)))]
    role = draw(st.sampled_from(["policy", "rollout"]))
    return call(draw(st.integers(0, 3)), EPOCH + draw(_OFFSETS), draw(_SECONDS), busy, role)


_PHASES = st.builds(
    Span, st.sampled_from(["rollout", "reward", "update"]), st.integers(0, 3), _OFFSETS.map(EPOCH.__add__), _SECONDS
)
_ATTEMPTS = st.lists(
    st.builds(
        AttemptSpans, st.sampled_from(["sft", "grpo"]), st.integers(1, 2), st.lists(_PHASES | calls(), max_size=8)
    ),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(_ATTEMPTS)
def test_busy_and_idle_of_every_rank_make_up_the_window(attempts: list[AttemptSpans]) -> None:
    for stage in summarise(attempts):
        assert stage.seconds >= 0
        for role in stage.roles:
            for rank in role.ranks:
                assert rank.busy >= 0
                assert rank.idle >= 0
                assert math.isclose(rank.busy + rank.idle, stage.seconds, abs_tol=1e-4)
            assert 0 <= role.idle_share <= 1
        json.dumps(stage.to_json(), allow_nan=False)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(_ATTEMPTS)
def test_a_trace_is_sorted_valid_json_with_nested_slices(attempts: list[AttemptSpans]) -> None:
    trace = json.loads(json.dumps(chrome_trace(attempts), allow_nan=False))
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    spans = [span for attempt in attempts for span in attempt.spans]
    work = sum(len(span.attributes.get("ranks", ())) for span in spans)
    assert len([event for event in slices if event["cat"] != "step"]) == len(spans) + work
    for track in {(event["pid"], event["tid"]) for event in slices}:
        own = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == track]
        assert not any(a < c < b < d for a, b in own for c, d in own)
    starts, ends = ([e["id"] for e in events if e["ph"] == kind] for kind in ("s", "f"))
    assert sorted(starts) == sorted(ends) == sorted(set(starts))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= named


def test_a_step_of_two_ranks_is_summed_up() -> None:
    spans = [
        call(0, EPOCH + 1, 4, [(0, EPOCH + 1, 4.0), (1, EPOCH + 1, 2.0)], "rollout", imbalance=1.5),
        Span("rollout", 0, EPOCH, 5.0),
        call(0, EPOCH + 6, 3, [(0, EPOCH + 6, 3.0), (1, EPOCH + 7, 2.0)], imbalance=1.1),
        Span("update", 0, EPOCH + 5, 5.0),
    ]
    (stage,) = summarise([AttemptSpans("grpo", 1, spans)])
    assert (stage.seconds, stage.attempts, len(stage.steps)) == (10.0, 1, 1)
    controller, rollout, policy = stage.roles
    assert (controller.role, controller.busy, controller.idle) == ("controller", 3.0, 7.0)
    assert (controller.calls, controller.bytes_out, controller.bytes_in) == (2, 200, 20)
    assert [rank.busy for rank in rollout.ranks] == [4.0, 2.0]
    assert (rollout.busy, rollout.idle, rollout.imbalance_mean, rollout.imbalance_max) == (3.0, 7.0, 1.5, 1.5)
    assert [rank.idle for rank in policy.ranks] == [7.0, 8.0]
    assert dict(stage.phases) == {"rollout": 0.5, "update": 0.5}
    assert stage.typical() == stage.slowest()[0] == stage.steps[0]


def test_calls_that_overlap_count_once_and_what_lies_outside_the_window_not_at_all() -> None:
    ranks = [(0, EPOCH - 5, 7.0), (0, EPOCH + 1, 3.0), (0, EPOCH + 9, 50.0)]
    (stage,) = summarise([AttemptSpans("grpo", 1, [Span("update", 0, EPOCH, 10.0), call(0, EPOCH, 10, ranks)])])
    assert stage.roles[1].ranks[0].busy == 5.0


def test_spans_without_calls_have_a_controller_and_no_role() -> None:
    spans = [Span("update", step, EPOCH + step, 0.5, {"tokens": 5}) for step in range(5)]
    (stage,) = summarise([AttemptSpans("sft", 1, spans)])
    assert [role.role for role in stage.roles] == ["controller"]
    assert stage.roles[0].busy == pytest.approx(2.5)
    assert [step.step for step in stage.steps] == [0, 1, 2, 3, 4]


def test_a_hand_off_inside_another_is_not_counted_twice() -> None:
    spans = [Span("pack", 0, EPOCH + 1, 1.0), Span("update", 0, EPOCH, 4.0), Span("weights", 0, EPOCH + 4, 1.0)]
    (stage,) = summarise([AttemptSpans("grpo", 1, spans)])
    assert dict(stage.steps[0].phases) == {"update": 3.0, "pack": 1.0, "weights": 1.0}


def test_a_moment_of_several_hand_offs_is_that_of_the_one_begun_last() -> None:
    """With lag an update runs while a rollout does; with streams a reward outlasts it."""
    for spans, expected in (
        ([("rollout", 0, 10), ("update", 1, 6), ("reward", 10, 0.5)], {"rollout": 4.0, "update": 6.0, "reward": 0.5}),
        ([("rollout", 0, 10), ("reward", 9, 2), ("update", 11, 4)], {"rollout": 9.0, "reward": 2.0, "update": 4.0}),
    ):
        told = [Span(name, 0, EPOCH + start, seconds) for name, start, seconds in spans]
        (stage,) = summarise([AttemptSpans("grpo", 1, told)])
        assert dict(stage.steps[0].phases) == pytest.approx(expected)
        assert sum(stage.steps[0].shares().values()) == pytest.approx(1.0)
        drawn = [event for event in chrome_trace([AttemptSpans("grpo", 1, told)])["traceEvents"] if event["ph"] == "X"]
        lengths = {event["name"]: event["dur"] / 1e6 for event in drawn}
        assert {name: lengths[name] for name, _, _ in spans} == pytest.approx({n: s for n, _, s in spans}), "uncut"


def test_what_comes_behind_the_last_step_is_no_step_but_is_shown() -> None:
    spans = [
        Span("weights", 0, EPOCH, 0.1),
        Span("update", 0, EPOCH + 1, 1.0),
        Span("probe", 1, EPOCH + 2, 1.0),
        Span("checkpoint", 1, EPOCH + 3, 1.0),
    ]
    attempt = AttemptSpans("grpo", 1, spans)
    (stage,) = summarise([attempt])
    assert [(step.step, step.seconds) for step in stage.steps] == [(0, 2.0)]
    assert stage.seconds == 4.0
    names = [event["name"] for event in chrome_trace([attempt])["traceEvents"] if event["ph"] == "X"]
    assert names == ["step 0", "weights", "update", "probe", "checkpoint"]


def test_attempts_follow_each_other_and_stages_lie_side_by_side() -> None:
    attempts = [
        AttemptSpans("sft", 1, [Span("update", 0, EPOCH, 1.0), Span("update", 1, EPOCH + 1, 1.0)]),
        AttemptSpans("sft", 2, [Span("update", 1, EPOCH + 60, 1.0)]),
        AttemptSpans(
            "grpo", 1, [Span("update", 0, EPOCH + 70, 1.0), call(0, EPOCH + 70, 1.0, [(0, EPOCH + 70.2, 0.5)])]
        ),
        AttemptSpans("evaluate", 1, []),
    ]
    events = chrome_trace(attempts)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["sft · controller", "grpo · controller", "grpo · policy (pool main)"]
    marks = [(event["ts"], event["pid"], event["name"]) for event in events if event["ph"] == "i"]
    assert marks == [(0, 1, "attempt 1"), (60_000_000, 1, "attempt 2"), (70_000_000, 2, "attempt 1")]
    sft, grpo = summarise(attempts)
    assert (sft.seconds, sft.attempts, [step.step for step in sft.steps]) == (3.0, 2, [0, 1, 1])
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert counter["args"] == {"bytes": 110}
    assert grpo.stage == "grpo"


def test_nothing_said_is_an_empty_trace() -> None:
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}
    assert summarise([AttemptSpans("sft", 1, [])]) == []


def test_steps_that_were_lost_and_taken_again_count_once() -> None:
    first = [Span("update", step, EPOCH + step, 1.0) for step in range(5)]
    second = [Span("update", step, EPOCH + 100 + step, 1.0) for step in range(3, 8)]
    (stage,) = summarise([AttemptSpans("grpo", 1, first), AttemptSpans("grpo", 2, second)])
    assert (len(stage.steps), stage.redone) == (10, 2)
    assert (stage.to_json()["steps"], stage.to_json()["redone_steps"]) == (8, 2)


def test_what_is_asked_while_pools_start_is_no_part_of_the_time() -> None:
    spans = [call(0, EPOCH - 6, 1.0, [(0, EPOCH - 6, 1.0)]), Span("update", 0, EPOCH, 2.0)]
    (stage,) = summarise([AttemptSpans("distill", 1, spans)])
    assert stage.seconds == 2.0
    assert [role.busy for role in stage.roles] == [2.0, 0.0]
