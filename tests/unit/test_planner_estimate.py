"""Cost estimates: proportional to work, honest without history."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from posttrain.planner.prospects import Experience, Workload, estimate

WORK = {"steps": 10, "prompts": 10, "documents": 80, "trained": 80, "max_new_tokens": 32}
GRPO = Workload("grpo", WORK, length=20.0)


def test_without_history_there_are_no_seconds() -> None:
    found = estimate(GRPO, [])
    assert found.tokens == 10 * 20 + 80 * 32 + 80 * (20 + 32)  # read, generated, trained on
    assert found.seconds is None
    assert "no history yet" in found.basis
    assert "responses of 32" in found.basis


def test_what_is_only_trained_on_or_only_answered_is_counted_once() -> None:
    assert estimate(Workload("sft", {"documents": 80}, length=20.0), []).tokens == 80 * 20
    answered = Workload("evaluate", {"documents": 80, "max_new_tokens": 32}, length=20.0)
    assert estimate(answered, []).tokens == 80 * (20 + 32)


def test_without_history_and_work_nothing_is_guessed() -> None:
    assert estimate(Workload("init_model", {"steps": 1}), []).tokens is None
    assert estimate(Workload("sft", {"documents": 5}), []).tokens is None


def test_another_kind_says_nothing() -> None:
    other = Experience(Workload("sft", {"documents": 80}), 1000, 5.0)
    assert estimate(GRPO, [other]).seconds is None


def test_a_stage_of_which_nobody_knows_how_much_it_did_says_nothing() -> None:
    """As an evaluation of a file that is not registered: a unit of it would be the whole."""
    earlier = [Experience(Workload("evaluate", {"max_new_tokens": 8}), 993, 1.3)]
    now = Workload("evaluate", {"documents": 200, "max_new_tokens": 8}, length=3.0)
    assert estimate(now, earlier).history == 0
    assert estimate(now, earlier).tokens == 200 * 11


def test_the_median_of_earlier_stages_is_taken() -> None:
    half = {name: value / 2 if name != "max_new_tokens" else value for name, value in WORK.items()}
    earlier = [Experience(Workload("grpo", half), tokens, seconds) for tokens, seconds in
               ((400, 1.0), (800, 2.0), (99999, 900.0))]  # fmt: skip
    found = estimate(GRPO, earlier)
    assert found.tokens == 1600
    assert found.seconds == pytest.approx(4.0)
    assert found.history == 3
    assert found.most == estimate(GRPO, []).tokens


@pytest.mark.parametrize("change", [{"max_new_tokens": 8}, {"trained": 160}, {"prompts": 80}])
def test_what_cost_otherwise_for_every_unit_says_nothing(change: dict[str, int]) -> None:
    assert estimate(GRPO, [Experience(Workload("grpo", {**WORK, **change}), 1000, 5.0)]).history == 0
    assert estimate(GRPO, [Experience(Workload("grpo", WORK), 1000, 5.0)]).history == 1


def test_a_stage_whose_jobs_were_not_all_its_own_says_nothing_of_time() -> None:
    found = estimate(GRPO, [Experience(GRPO, 1000, None)])
    assert (found.tokens, found.seconds) == (1000, None)
    assert estimate(GRPO, [Experience(GRPO, 1000, None), Experience(GRPO, 1000, 4.0)]).seconds == 4.0


@given(units=st.integers(1, 10**6), factor=st.integers(1, 50), tokens=st.integers(0, 10**9), seconds=st.floats(0, 1e6))
def test_cost_is_proportional_to_work(units: int, factor: int, tokens: int, seconds: float) -> None:
    earlier = [Experience(Workload("sft", {"documents": units}), tokens, seconds)]
    found = estimate(Workload("sft", {"documents": units * factor}), earlier)
    assert found.tokens == pytest.approx(tokens * factor, rel=1e-9, abs=1)
    assert found.seconds == pytest.approx(seconds * factor)
