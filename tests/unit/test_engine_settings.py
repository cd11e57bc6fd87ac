"""Settings of a stage reach the functions they are for, with the values that were written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine_recipes import EvenTokens, ppo, weights
from test_engine_training import DOCUMENTS, grpo, mean_loss, quiet, sft, tiny, worker

from posttrain.domain.errors import BudgetExceededError
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective, ValueObjective
from posttrain.engine.batch import TokenBatch
from posttrain.engine.config import AdvantageConfig, CriticConfig, KLConfig, PPOKLConfig
from posttrain.engine.loop import pipeline as collecting_module, updates as learning_module
from posttrain.engine.loop.controller import Controller, Limits
from posttrain.engine.loop.updates import mini_batches
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.recipes import grpo as grpo_module, policy_gradient as policy_gradient_module, ppo as ppo_module
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import OptimizerConfig, PolicyGradientOptimizerConfig

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def watched(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> Calls:
    """The arguments of every call of `place.name`, which goes on to work."""
    calls: Calls = []
    real = getattr(place, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append((arguments, named))
        return real(*arguments, **named)

    monkeypatch.setattr(place, name, call)
    return calls


@pytest.mark.parametrize(("schedule", "after"), [("linear", 0.5), ("constant", 1.0), ("cosine", 0.5)])
def test_an_optimiser_step_is_adamw_with_every_setting(schedule: Any, after: float) -> None:
    """Against torch's own AdamW and clipping, on a copy of the model, with a rate that is reckoned by hand."""
    given = OptimizerConfig(
        learning_rate=1e-2, betas=(0.5, 0.6), weight_decay=0.3, warmup_steps=2, schedule=schedule, final_ratio=0.5,
        max_grad_norm=0.05,
    )  # fmt: skip
    recipe = sft(steps=4, optimizer=given)
    policy, mirror, batch = worker(recipe), tiny(), TokenBatch.pack(DOCUMENTS)
    parameters = dict(mirror.module.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.5, 0.6))
    halfway = (1.0 + after) / 2  # of linear and cosine decay alike
    for step, rate in enumerate([0.5e-2, 1e-2, 1e-2, halfway * 1e-2]):
        report = policy.update(batch, mean_loss(batch), step=step).metrics
        assert report["learning_rate"] == pytest.approx(rate)
        logprobs = token_logprobs(mirror, batch, temperature=1.0, response_only=True)
        mean_loss(batch).function(batch, logprobs).loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.05)
        assert report["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert norm > 0.05, "the clip must bind"
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        reference.zero_grad()
    trained = dict(policy.engine.model.module.named_parameters())
    for name, expected in parameters.items():
        assert torch.allclose(trained[name], expected, atol=2e-6), name


def test_micro_batches_are_as_large_as_the_stage_says() -> None:
    small, large = worker(sft(runtime={"micro_batch_tokens": 9})), worker(sft(runtime={"micro_batch_tokens": 900}))
    batch = TokenBatch.pack(DOCUMENTS)
    assert len(large.engine.learner.split(batch)[1]) == 1
    assert len(small.engine.learner.split(batch)[1]) > 3


def minimised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The objectives of every update from now on."""
    found: list[Any] = []
    real = TrainWorker.update

    def update(self: TrainWorker, batch: Any, objective: Any, **named: Any) -> Any:
        found.append(objective)
        return real(self, batch, objective, **named)

    monkeypatch.setattr(TrainWorker, "update", update)
    return found


def test_grpo_minimises_what_its_stage_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = minimised(monkeypatch)
    sampled = watched(monkeypatch, collecting_module, "SamplingParams")
    recipe = grpo(
        kl=KLConfig(coefficient=0.3, estimator="k2"), clip_low=0.11, clip_high=0.37, max_new_tokens=5, temperature=0.7,
        aggregation="seq-mean-token-sum-norm",
    )  # fmt: skip
    recipe.step(0, quiet(0))
    recipe.step(1, quiet(1))
    assert calls
    for objective in calls:
        assert (objective.clip_low, objective.clip_high) == (0.11, 0.37)
        assert (objective.aggregation, objective.norm) == ("seq-mean-token-sum-norm", 5)
        assert objective.kl == KLTerm(0.3, "k2")
    assert {(named["max_new_tokens"], named["temperature"]) for _, named in sampled} == {(5, 0.7)}
    assert len({named["seed"] for _, named in sampled}) == 1, "a prompt's place in the stream names its random numbers"


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_grpo_takes_the_advantage_that_its_stage_names(monkeypatch: pytest.MonkeyPatch, estimator: Any) -> None:
    asked: list[str] = []
    for name, real in grpo_module.ESTIMATORS.items():
        monkeypatch.setitem(
            grpo_module.ESTIMATORS, name, lambda rewards, name=name, real=real: asked.append(name) or real(rewards)
        )
    grpo(advantage=estimator).step(0, quiet(0))
    assert asked == [estimator]


@pytest.mark.parametrize("parts", [1, 3])
def test_grpo_takes_as_many_steps_as_mini_batches(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    calls = minimised(monkeypatch)
    grpo(mini_batches=parts, scorer=lambda prompts, answers: [float(i % 2) for i in range(len(answers))]).step(
        0, quiet(0)
    )
    assert len(calls) == parts


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("place", ["reward", "loss"])
def test_ppo_estimates_what_its_stage_says(monkeypatch: pytest.MonkeyPatch, whiten: bool, place: Any) -> None:
    objectives = minimised(monkeypatch)
    calls = {name: watched(monkeypatch, ppo_module, name) for name in ("generalized_advantages", "whiten")}
    calls["kl_rewards"] = watched(monkeypatch, policy_gradient_module, "kl_rewards")
    calls["SamplingParams"] = watched(monkeypatch, collecting_module, "SamplingParams")
    recipe = ppo(
        gae=AdvantageConfig(gamma=0.9, lam=0.7, whiten=whiten),
        kl=PPOKLConfig(coefficient=0.3, estimator="k2", place=place),
        critic=CriticConfig(clip=0.15),
        clip_low=0.11,
        clip_high=0.37,
        temperature=0.7,
        ppo_epochs=3,
        mini_batches=2,
    )
    for step in range(2):
        recipe.step(step, quiet(step))
    assert {arguments[4:] for arguments, _ in calls["generalized_advantages"]} == {(0.9, 0.7)}
    assert len(calls["whiten"]) == (2 if whiten else 0)
    in_reward = [(named["coefficient"], named["estimator"]) for _, named in calls["kl_rewards"]]
    assert in_reward == ([(0.3, "k2")] * 2 if place == "reward" else [])
    policy = [one for one in objectives if isinstance(one, PolicyObjective)]
    critic = [one for one in objectives if isinstance(one, ValueObjective)]
    assert len(policy) == len(critic) == 2 * 3 * 2
    for objective in policy:
        assert (objective.clip_low, objective.clip_high) == (0.11, 0.37)
        assert objective.kl == (KLTerm(0.3, "k2") if place == "loss" else None), "in reward or loss, never both"
    assert {objective.clip for objective in critic} == {0.15}
    assert {named["temperature"] for _, named in calls["SamplingParams"]} == {0.7}


def test_each_epoch_of_ppo_is_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch, learning_module, "mini_batches")
    ppo(ppo_epochs=2).step(1, quiet(1))
    assert len({arguments[2] for arguments, _ in calls}) == 2


def test_a_critic_learns_at_its_own_rate() -> None:
    """Nothing of the critic moves where its rate is tiny, whatever the policy's is."""
    still = CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-12, warmup_steps=0))
    recipe = ppo(critic=still)
    before = {name: p.clone() for name, p in weights(recipe).items()}
    recipe.step(3, quiet(3))
    moved = {name: float((p - before[name]).abs().max()) for name, p in weights(recipe).items()}
    assert max(change for name, change in moved.items() if name.startswith("critic/")) < 1e-8
    assert max(change for name, change in moved.items() if name.startswith("policy/")) > 1e-4


def test_ppo_counts_what_policy_and_critic_train_on() -> None:
    recipe = ppo(ppo_epochs=3, mini_batches=1)
    sampled: list[int] = []

    class Counting(EvenTokens):
        def scores(self, trajectories: Any) -> Any:
            sampled.extend(t.generated for t in trajectories)
            return super().scores(trajectories)

    recipe._ahead.scorer = Counting()
    spent = recipe.step(2, quiet(2)).tokens
    read, generated = 3 * 3, sum(sampled)
    assert spent == read + generated + 2 * 3 * (2 * read + generated)


def test_grpo_does_not_compute_who_has_no_score() -> None:
    sampled: list[int] = []

    def scorer(prompts: Any, trajectories: Any) -> list[float | None]:
        sampled.extend(t.generated for t in trajectories)
        return [None if i % 4 == 3 else float(i % 2) for i in range(len(trajectories))]

    spent = grpo(scorer=scorer, kl=None, mini_batches=1).step(0, quiet(0)).tokens
    scored = [length for i, length in enumerate(sampled) if i % 4 != 3]
    assert spent == 3 * 3 + sum(sampled) + len(scored) * 3 + sum(scored)


def test_mini_batches_are_shuffled_by_a_seed() -> None:
    one, two = (mini_batches(30, 3, seed) for seed in (1, 2))
    assert sorted(number for part in one for number in part) == list(range(30))
    assert one != two
    assert one != [list(range(part, 30, 3)) for part in range(3)]


def test_the_last_step_is_not_begun_without_the_means_to_measure_it(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(
        steps=2, max_tokens=lambda step: 10, probe_max_tokens=lambda step: 7 if step == 2 else 0, journal=None
    )
    controller = Controller(recipe, tmp_path, "sha256:x", 1, lambda fact: None, limits=Limits(tokens=16))
    controller._step = controller._saved = 1
    with pytest.raises(BudgetExceededError, match="at most 17 tokens"):
        controller._afford()
