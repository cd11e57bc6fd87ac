"""What a step sampled, in numbers, each worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from posttrain.engine.loop.on_policy import engine_metrics, rollout_metrics, turn_metrics
from posttrain.engine.recipes.algorithm import ScoredGroup
from posttrain.engine.samples import Prompt, Trajectory, groups_of
from posttrain.sandbox.port import Score

PROMPT = Prompt((1, 5))


def said(*logprobs: float, truncated: bool = False) -> Trajectory:
    return Trajectory.answer((1, 5), range(7, 7 + len(logprobs)), logprobs, truncated=truncated)


def scored(key: int, answers: Sequence[Trajectory], *scores: Score) -> ScoredGroup:
    [group] = groups_of(answers, [key], len(answers))
    return ScoredGroup(PROMPT, group, scores)


def failed(status: str) -> Score:
    return Score.failure("timeout" if status == "timeout" else "error", "it did")


THREE = scored(0, [said(-0.5, -1.5), said(-1.0, truncated=True), said(-2.0)], Score(1.0), Score(0.5), Score(None))
TWO = scored(1, [said(-1.0, -1.0), said(-0.25, -0.25, -0.5)], Score(0.0), failed("timeout"))
NONE = scored(2, [said(-1.0)], failed("error"))


def test_rewards_are_means_over_what_has_a_score() -> None:
    found = rollout_metrics([THREE, TWO, NONE])
    assert found["reward/mean"] == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found["reward/std"] == pytest.approx(math.sqrt(((0.5**2) * 2) / 3)), "of these, not of what they stand for"
    deviation = math.sqrt((0.75 - 0.375) ** 2 + (0.0 - 0.375) ** 2)  # of two groups of which any score is known
    assert found["reward/stderr"] == pytest.approx(deviation / math.sqrt(2))
    assert found["reward/unscored"] == pytest.approx(3 / 6)
    assert rollout_metrics([THREE, TWO])["reward/unscored"] == pytest.approx(2 / 5)
    assert found["reward/errors"] == pytest.approx(1 / 6)
    assert found["reward/timeouts"] == pytest.approx(1 / 6)
    assert rollout_metrics([THREE, TWO])["reward/errors"] == 0.0
    assert rollout_metrics([THREE, TWO])["reward/timeouts"] == pytest.approx(1 / 5)
    assert "reward/mean" not in rollout_metrics([NONE])
    assert "reward/stderr" not in rollout_metrics([THREE, NONE]), "one group has no spread"


def test_responses_are_means_over_responses_and_tokens() -> None:
    found = rollout_metrics([THREE, TWO])
    assert found["response_tokens/mean"] == pytest.approx(9 / 5)
    assert found["truncated"] == pytest.approx(1 / 5)
    assert found["entropy"] == pytest.approx((2.0 + 1.0 + 2.0 + 2.0 + 1.0) / 9)
    nobody = rollout_metrics([THREE, TWO], judged=False)
    assert nobody == {name: value for name, value in found.items() if not name.startswith("reward/")}


def test_components_are_means_over_who_has_them_and_failures_shares_of_who_was_asked() -> None:
    parts = {"right": Score(1.0), "brief": failed("timeout")}
    scores = (
        Score(0.5, {"right": 1.0}, parts=parts),
        Score(0.25, {"right": 0.0, "brief": 0.5}, parts={"right": failed("error"), "brief": Score(0.5)}),
        Score(None),
    )
    found = rollout_metrics([scored(0, [said(-1.0)] * 3, *scores)])
    named = {name: value for name, value in found.items() if name.count("/") == 2}
    half, none = 0.5, 0.0
    assert named == {
        "reward/right/mean": half, "reward/right/std": half, "reward/brief/mean": half, "reward/brief/std": none,
        "reward/right/errors": half, "reward/right/timeouts": none,
        "reward/brief/errors": none, "reward/brief/timeouts": half,
    }  # fmt: skip


def test_turns_are_means_over_samples() -> None:
    first = said(-1.0)
    twice = first.went_on((3,), Trajectory.answer((1, 5, 7, 3), (8,), (-1.0,), truncated=False))
    groups = [scored(0, [first, twice, first.ended("error", "observe")], *[Score(1.0)] * 3)]
    assert turn_metrics(groups) == {"turns/mean": pytest.approx(4 / 3), "turns/errors": pytest.approx(1 / 3)}
    assert rollout_metrics(groups)["response_tokens/mean"] == pytest.approx(4 / 3), "what was observed was not said"


def test_an_engine_tells_what_it_counted() -> None:
    counts = {"steps": 4, "decoded_tokens": 10, "preemptions": 2, "prefilled_tokens": 7}
    assert engine_metrics(counts) == {
        "rollout/rows": 2.5, "rollout/preemptions": 2.0, "rollout/prefilled_tokens": 7.0,
    }  # fmt: skip
