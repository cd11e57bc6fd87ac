"""The learning tables choose rates on other seeds, pair differences by seed, and hold questions out."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from benchmarks.learning import (
    ALGORITHMS,
    TINY,
    Algorithm,
    Run,
    Scale,
    chosen,
    compared,
    difference,
    measure,
    parameters,
    questions,
    samples,
    shown,
    spend,
)
from scipy import stats

from posttrain.engine.config.stages import training_config
from posttrain.engine.trace import StepReport, Trace
from posttrain.engine.weights.stream import PolicyVersion

SCALE = Scale()


def rows_of(held_out: bool, seed: int = 0) -> set[str]:
    return {row["question"] for row in itertools.islice(questions(random.Random(seed), held_out=held_out), 2000)}


def test_the_difference_is_the_paired_t_interval() -> None:
    rng = np.random.default_rng(0)
    ours, others = rng.uniform(0.3, 0.9, 6), rng.uniform(0.3, 0.9, 6)
    found = difference(ours.tolist(), others.tolist())
    gains = ours - others
    half = 2.5705818366147395 * gains.std(ddof=1) / math.sqrt(6)  # Student's 97.5 % quantile, 5 degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx(
        (gains.mean(), gains.mean() - half, gains.mean() + half)
    )
    theirs = stats.ttest_rel(ours, others).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


def test_pairing_takes_away_what_a_seed_does_to_both() -> None:
    others = [0.1, 0.9, 0.3, 0.7, 0.2, 0.6]
    found = difference([score + 0.05 + 0.001 * (-1) ** at for at, score in enumerate(others)], others)
    assert 0.04 < found.low < 0.05 < found.high < 0.06


def test_one_seed_says_nothing() -> None:
    found = difference([0.9], [0.1])
    assert (found.low, found.high) == (-1, 1)
    assert found.mean == pytest.approx(0.8)


def test_the_rate_with_the_best_mean_is_chosen_and_the_smallest_of_equals() -> None:
    assert chosen({1e-4: [0.9, 0.1], 3e-4: [0.6, 0.6], 1e-3: [0.0, 1.0]}) == 3e-4
    assert chosen({1e-3: [0.5], 1e-4: [0.5], 3e-4: [0.4]}) == 1e-4


def test_rates_are_chosen_on_the_tuning_seeds_alone() -> None:
    """On the other seeds every smaller rate would be better, and only the chosen one is ever tried there."""
    tried = list[tuple[str, float, int]]()

    def train(algorithm: Algorithm, rate: float, seed: int) -> Run:
        tried.append((algorithm.name, rate, seed))
        score = rate if seed in SCALE.tuning_seeds else 1 - rate
        return Run(score, 1000, 10)

    found = measure(SCALE, train)
    for algorithm in ALGORITHMS:
        own = [(rate, seed) for name, rate, seed in tried if name == algorithm.name]
        best = max(algorithm.rates)
        assert sorted(own) == sorted(
            [(rate, seed) for rate in algorithm.rates for seed in SCALE.tuning_seeds]
            + [(best, seed) for seed in SCALE.seeds]
        )
        assert found[algorithm.name].rate == best
        assert [run.score for run in found[algorithm.name].runs] == [1 - best] * 6
        assert str(found[algorithm.name]) == f"{best:g}*", "a rate at the end of its grid is marked"


def test_what_is_compared_with_what() -> None:
    scores = {one.name: 0.3 + 0.05 * at for at, one in enumerate(ALGORITHMS)}
    found = measure(SCALE, lambda one, rate, seed: Run(scores[one.name] + 0.01 * seed * (seed < 7), 1_500_000, 10))
    gains = compared(found)
    pairs = {"vapo": "ppo", "pf_ppo": "ppo", "gspo": "grpo", "cispo": "grpo", "kto": "dpo", "orpo": "dpo"}
    pairs |= {"simpo": "dpo", "sft-lora": "sft", "grpo-lora": "grpo", "dpo-lora": "dpo", "orpo-lora": "orpo"}
    for kind, baseline in pairs.items():
        assert gains[kind].mean == pytest.approx(scores[kind] - scores[baseline])
        assert found[kind].algorithm.baseline == baseline
    assert list(gains) == list(pairs)
    lines = shown(found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {kind}" for kind in pairs]
    assert "| pf_ppo | ppo | 0.0001*, 0.0001* | 0.435, 0.335 | +0.100 [+0.100, +0.100] | 1.500, 1.500 |" in lines[3]


def test_the_seeds_of_the_table_are_six_others_than_those_of_tuning() -> None:
    assert len(set(SCALE.seeds)) == 6
    assert len(set(SCALE.tuning_seeds)) == 2
    for scale in (SCALE, TINY):
        assert not set(scale.seeds) & set(scale.tuning_seeds)
    assert all(len(set(one.rates)) == 3 for one in ALGORITHMS)


class Steps:
    """A recipe whose steps spend these tokens, one after the other."""

    def __init__(self, *tokens: int) -> None:
        self.left, self.published = list(tokens), list[int]()

    def publish_weights(self, version: PolicyVersion) -> None:
        self.published.append(version.step)

    def step(self, step: int, trace: Trace) -> StepReport:
        assert self.published[-1] == step, "a step samples with the weights of the step before it"
        return StepReport(self.left.pop(0), {})


def test_a_run_ends_after_the_step_that_spends_its_last_token() -> None:
    for tokens, spent, steps in ((100, 110, 3), (110, 110, 3), (111, 150, 4), (1, 30, 1)):
        assert spend(Steps(30, 40, 40, 40, 40), tokens) == (spent, steps)  # type: ignore[arg-type]


def test_held_out_questions_are_never_trained_on() -> None:
    assert not rows_of(held_out=True) & (rows_of(held_out=False) | rows_of(held_out=False, seed=1))


def test_every_algorithm_of_a_family_has_steps_of_the_same_samples_or_responses() -> None:
    for algorithm in ALGORITHMS:
        config = training_config(algorithm.kind, parameters(algorithm, 3e-4))
        assert config.optimizer.learning_rate == 3e-4
        if samples(algorithm):
            assert config.group_size * config.prompts_per_step == 256  # type: ignore[attr-defined]
        else:
            assert config.batch_size * (1 if algorithm.kind == "kto" else 2) == 64  # type: ignore[attr-defined]
