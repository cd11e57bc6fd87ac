"""What GRPO's loss is divided by: all that a step sampled, as the paper and TRL do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_engine_training import grpo, quiet, tiny, worker
from torch import Tensor

from posttrain.engine.algorithms.advantages import ESTIMATORS
from posttrain.engine.algorithms.objectives import MODES
from posttrain.engine.config import KLConfig
from posttrain.engine.recipes import policy_gradient
from posttrain.engine.samples import Prompt, Trajectory

LIMIT = 4  # max_new_tokens
PLAIN: dict[str, Any] = {"kl": None, "mini_batches": 1, "max_new_tokens": LIMIT}


class Remembering:
    """Only the first groups have a signal, the others are all equal; one response has no score."""

    def __init__(self, live: int = 1) -> None:
        self.live = live
        self.seen: list[Trajectory] = []
        self.group = 0  # members
        self.scores: list[float | None] = []
        self.moves: dict[str, Tensor] = {}  # weights that change between sampling and update

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
        for weight in self.moves.values():
            weight.mul_(1.1)
        self.seen, self.group = list(trajectories), len(trajectories) // len({id(prompt) for prompt in prompts})
        self.scores = [None if i == 6 else self.score(i, t) for i, t in enumerate(trajectories)]
        return self.scores

    def score(self, place: int, trajectory: Trajectory) -> float:
        group, sample = divmod(place, self.group)
        return sample + int(trajectory.response.sum()) % 3 if group < self.live else 0.5


def gradients(learner: Any) -> dict[str, Tensor]:
    """Of the next step, before clipping: caught on their way to the optimiser."""
    caught: dict[str, Tensor] = {}
    clip = learner.sharding.clip_gradients

    def catch(limit: float) -> float:
        caught.update({name: p.grad.clone() for name, p in learner.sharding.parameters().items()})
        norm: float = clip(limit)
        return norm

    learner.sharding.clip_gradients = catch
    return caught


def by_hand(seen: Sequence[Trajectory], scores: Sequence[float | None], mode: str, advantage: str) -> dict[str, Tensor]:
    """The gradient by loops over responses in float64: every sampled response is in the denominator."""
    rewards = torch.tensor([float("nan") if s is None else s for s in scores], dtype=torch.float64).view(-1, 4)
    advantages = ESTIMATORS[advantage](rewards).flatten().double()
    module = tiny().module.double()
    module.set_attn_implementation("eager")
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory, weight in zip(seen, advantages, strict=True):
        tokens = torch.tensor([*trajectory.prompt.tolist(), *trajectory.response.tolist()])
        logits = module(tokens[None]).logits[0, len(trajectory.prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, tokens[len(trajectory.prompt) :, None])[:, 0]
        surrogate = -weight * (logprobs - logprobs.detach()).exp()
        if mode == "token-mean":
            loss = loss + surrogate.sum() / sum(t.generated for t in seen)
        elif mode == "seq-mean-token-mean":
            loss = loss + surrogate.mean() / len(seen)
        else:
            loss = loss + surrogate.sum() / (len(seen) * LIMIT)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("advantage", ESTIMATORS)
@pytest.mark.parametrize("aggregation", MODES)
def test_the_gradient_is_that_of_everything_sampled(aggregation: str, advantage: str) -> None:
    scorer = Remembering()
    recipe = grpo(scorer=scorer, aggregation=aggregation, advantage=advantage, **PLAIN)
    found = gradients(worker(recipe).engine.learner)
    recipe.step(0, quiet(0))
    expected = by_hand(scorer.seen, scorer.scores, aggregation, advantage)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(found[name].double() / scale, gradient / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("aggregation", MODES)
def test_dropping_groups_without_signal_changes_nothing(
    aggregation: str, mini_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps with and without the responses that have no advantage: gradients and weights agree."""

    def train(keep_all: bool) -> tuple[list[float], int, dict[str, Tensor]]:
        scorer = Remembering(live=mini_batches)  # so that every mini-batch has something to learn
        recipe = grpo(scorer=scorer, aggregation=aggregation, **PLAIN | {"mini_batches": mini_batches})
        if keep_all:
            monkeypatch.setattr(policy_gradient, "with_advantage", lambda batch: range(len(batch)))
        reports = [recipe.step(step, quiet(step)) for step in range(3)]
        weights = {name: p.clone() for name, p in worker(recipe).engine.learner.parameters().items()}
        return [r.metrics["grad_norm"] for r in reports], sum(r.tokens for r in reports), weights

    dropped, whole = train(False), train(True)
    assert dropped[1] < whole[1]  # tokens: less is computed
    assert dropped[0] == pytest.approx(whole[0], rel=1e-4)
    for name, weight in whole[2].items():
        torch.testing.assert_close(dropped[2][name], weight, rtol=0, atol=2e-5)


def test_the_other_denominator_counts_groups_with_signal_only() -> None:
    norms, scorer = {}, Remembering()
    for denominator in ("sampled", "signal"):
        recipe = grpo(scorer=scorer, denominator=denominator, **PLAIN)
        norms[denominator] = recipe.step(0, quiet(0)).metrics["grad_norm"]
    sampled = sum(t.generated for t in scorer.seen)
    signal = sum(t.generated for t in scorer.seen[: scorer.group])
    assert norms["signal"] == pytest.approx(norms["sampled"] * sampled / signal, rel=1e-4)
    assert sampled > 2 * signal


@pytest.mark.parametrize(("denominator", "trained"), [("sampled", 12), ("signal", 4)])
def test_a_kl_term_reads_no_reward(denominator: str, trained: int) -> None:
    """So under the default every sampled response is computed: one without advantage is still held to the reference."""
    recipe = grpo(scorer=Remembering(), denominator=denominator, **PLAIN | {"kl": KLConfig(coefficient=0.1)})
    learner, batches = worker(recipe).engine.learner, []
    split = learner.split

    def counting(batch: Any) -> Any:
        batches.append(len(batch))
        return split(batch)

    learner.split = counting  # type: ignore[method-assign]
    recipe.step(0, quiet(0))
    assert batches == [trained]


def test_metrics_are_means_over_what_was_computed() -> None:
    """Not over tokens that nobody looked at, which would hide how far the policy has moved."""
    found = []
    for denominator in ("sampled", "signal"):
        scorer = Remembering()
        recipe = grpo(scorer=scorer, denominator=denominator, **PLAIN)
        scorer.moves = worker(recipe).engine.learner.parameters()
        found.append(recipe.step(0, quiet(0)).metrics["mismatch_kl"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] > 1e-6
