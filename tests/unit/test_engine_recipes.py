"""PPO, reward-model training and a user's dataflow: resumed equals undisturbed, prices cover, each learns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Fact, Sample, Span
from posttrain.domain.placement import Placement
from posttrain.engine.algorithms.objectives import PolicyObjective, SupervisedObjective, ValueObjective
from posttrain.engine.config import (
    CriticConfig,
    DataflowConfig,
    GRPOConfig,
    InitModelConfig,
    KLConfig,
    PPOConfig,
    PPOKLConfig,
    RewardModelConfig,
    TraceConfig,
)
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Recorder
from posttrain.engine.groups.worker_group import Future, ResourcePool
from posttrain.engine.loop.controller import Controller, FromRows, Order, Outcome, open_learner, open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.files import ModelSource, PreferencePair, character_tokenizer, initial_model
from posttrain.engine.models.language_model import ScalarModel, adopt_classifier, adopt_module, put_scalar_head
from posttrain.engine.recipes.algorithm import VALUES, Column, Update
from posttrain.engine.recipes.dataflow import Dataflow, load_dataflow
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.recipes.reward_model import RewardModel
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import ModelScorer, Scorer
from posttrain.engine.settings import OptimizerConfig, PolicyGradientOptimizerConfig, RuntimeConfig
from posttrain.engine.trace import Trace
from posttrain.sandbox.port import RewardCall, Score, ScriptedReward
from posttrain.sandbox.process import ParallelReward

TINY = InitModelConfig(
    hidden_size=16, intermediate_size=16, layers=1, characters="0123456789Q:sort A", context_length=64
)
TOKENIZER = character_tokenizer(TINY.characters)
PROMPTS = [Prompt((1, 5, 8 + i), row={"answer": "1"}) for i in range(7)]
PAIRS = [PreferencePair(i, (1, 5, 8 + i % 5), (7, 8, 2), (9, 6 + i % 3, 2)) for i in range(9)]
BEST_OF_N = Path(__file__).resolve().parents[2] / "examples" / "04-best-of-n" / "best_of_n.py"


class EvenTokens:
    """Scores by the share of even tokens; every ninth response has no score."""

    def groups(self, prompts: int, tokens: int) -> int:
        return prompts

    early, errors_max = True, 1.0

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Any) -> Future[Any]:
        scores = self.scores(trajectories)
        return Future(lambda: scores, lambda: True)

    def scores(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        shares = [float((trajectory.response % 2 == 0).mean()) for trajectory in trajectories]
        return [Score(None if i % 9 == 8 else share) for i, share in enumerate(shares)]

    def text(self, trajectory: Trajectory) -> str:
        return " ".join(map(str, trajectory.response.tolist()))


class NoScores(EvenTokens):
    """Has no opinion of any response."""

    def scores(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(None, status="none") for _ in trajectories]


def inline(recorder: Recorder | None = None) -> Callable[[str], ResourcePool]:
    pool = ResourcePool(InlineBackend(), recorder)
    return lambda role: pool


def scalar(seed: int = 1) -> ScalarModel:
    return adopt_classifier(put_scalar_head(initial_model(TINY, TOKENIZER, seed)))


def ppo(
    recorder: Recorder | None = None, judge: ScalarModel | None = None, scorer: Scorer | None = None, **changes: Any
) -> OnPolicy:
    options: dict[str, Any] = {
        "data": "d", "steps": 4, "prompts_per_step": 3, "group_size": 2, "max_new_tokens": 4, "mini_batches": 2,
        "ppo_epochs": 2, "critic": CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2), warmup=1),
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2),
        **({"reward_model": "m"} if judge else {"reward": "r"}), **changes,
    }  # fmt: skip
    config = PPOConfig(**options)
    model = adopt_module(initial_model(TINY, TOKENIZER, 0))
    roles = open_roles(config, model, 11, inline(recorder), sources={"critic": scalar(), "reward_model": judge})
    if judge:
        scorer = ModelScorer(roles.frozen["reward_model"], TOKENIZER)
    return OnPolicy(config, PPO(config), roles, PROMPTS, scorer or EvenTokens(), 11)


def reward_model(**changes: Any) -> FromRows[PreferencePair]:
    options: dict[str, Any] = {
        "data": "d", "steps": 5, "batch_size": 4, "optimizer": OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
        **changes,
    }  # fmt: skip
    config = RewardModelConfig(**options)
    roles = open_learner(config, scalar(), 11, inline())
    return FromRows(config, RewardModel(config), roles, PAIRS, 11)


def best_of_n(algorithm: Any = None, **changes: Any) -> OnPolicy:
    options: dict[str, Any] = {
        "recipe": "best_of_n:BestOfN", "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 4,
        "max_new_tokens": 4, "settings": {"accept": 0.5},
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=1), **changes,
    }  # fmt: skip
    config = DataflowConfig(**options)
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    return OnPolicy(config, (algorithm or _module().BestOfN)(config), roles, PROMPTS, EvenTokens(), 11)


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("best_of_n_example", BEST_OF_N)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPES: dict[str, Callable[[], Recipe]] = {
    "ppo": ppo,
    "ppo with a reward model and KL in the loss": lambda: ppo(
        judge=scalar(5), kl=PPOKLConfig(place="loss", estimator="k3"), mini_batches=1, ppo_epochs=1
    ),
    "reward model": reward_model,
    "best of n": best_of_n,
}


def run(recipe: Recipe, folder: Path, *, resume: Path | None = None, stop_after: int | None = None) -> Outcome:
    asked = iter([Order.GO_ON] * (10**6 if stop_after is None else stop_after))
    controller = Controller(recipe, folder, "sha256:x", 100, lambda fact: None, orders=lambda: next(asked, Order.STOP))
    if resume:
        controller.resume(resume)
    return controller.run()


def weights(recipe: Any) -> dict[str, Tensor]:
    """Of every learner."""
    found = {role: group.one(_worker).engine.learner.parameters() for role, group in recipe.roles.learners.items()}
    return {f"{role}/{name}": p.clone() for role, parameters in found.items() for name, p in parameters.items()}


def _worker(worker: TrainWorker) -> TrainWorker:
    return worker


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", RECIPES)
def test_resumed_equals_undisturbed(name: str, tmp_path: Path) -> None:
    whole = RECIPES[name]()
    expected = run(whole, tmp_path / "whole")
    assert run(RECIPES[name](), tmp_path, stop_after=2).status == "stopped"
    again = RECIPES[name]()
    assert run(again, tmp_path / "again", resume=tmp_path / "step-00000002") == expected
    assert same(weights(again), weights(whole))


@pytest.mark.parametrize("name", RECIPES)
def test_the_price_covers_what_is_spent(name: str) -> None:
    recipe = RECIPES[name]()
    for step in range(3):
        most = recipe.max_tokens(step)
        assert 0 < recipe.step(step, quiet(step)).tokens <= most


def quiet(step: int) -> Trace:
    return Trace(lambda fact: None, step)


class TestPPO:
    def test_a_step_says_what_its_roles_did(self) -> None:
        facts: list[Fact] = []
        recipe = ppo(Recorder(facts.append), judge=scalar(5), trace=TraceConfig(groups="all"), critic=CriticConfig())
        facts.clear()  # of being opened
        recipe.step(0, Trace(facts.append, 0))
        spans = [fact for fact in facts if isinstance(fact, Span)]
        phases = {span.name for span in spans if "kind" not in span.attributes}
        assert phases == {"rollout", "reward", "form", "columns", "advantage", "update"}
        calls = {span.name for span in spans if span.attributes.get("kind") == "call"}
        assert calls == {
            "rollout.feed", "reward_model.fill", "critic.fill", "reference.fill", "critic.update", "policy.update",
        }  # fmt: skip
        samples = [fact for fact in facts if isinstance(fact, Sample)]
        assert len(samples) == 6
        for sample in samples:
            assert sample.fate.startswith("update 0, mini-batch")
            assert len(sample.values) == len(sample.returns) == len(sample.advantages) == len(sample.tokens)

    def test_samples_that_no_update_used_say_why(self) -> None:
        for scorer, fate in ((EvenTokens(), "dropped: critic warm-up"), (NoScores(), "dropped: no score")):
            facts: list[Fact] = []
            recipe = ppo(scorer=scorer, trace=TraceConfig(groups="all"), critic=CriticConfig(warmup=2))
            recipe.step(0, Trace(facts.append, 0))
            assert [fact.fate for fact in facts if isinstance(fact, Sample)] == [fate] * 6

    def test_while_the_critic_warms_up_the_policy_stays(self) -> None:
        recipe = ppo(critic=CriticConfig(warmup=2))
        before = weights(recipe)
        recipe.step(1, quiet(1))
        after = weights(recipe)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved
        assert all(name.startswith("critic/") for name in moved)

    @pytest.mark.slow
    def test_learns_to_prefer_what_is_rewarded(self) -> None:
        recipe = ppo(steps=30, prompts_per_step=8, group_size=4, kl=None, mini_batches=1, ppo_epochs=1)
        means = [recipe.step(step, quiet(step)).metrics["reward/mean"] for step in range(30)]
        assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15

    @pytest.mark.slow
    def test_the_critic_learns_what_to_expect(self) -> None:
        recipe = ppo(
            steps=40, critic=CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-2), warmup=39)
        )
        losses = [recipe.step(step, quiet(step)).metrics["critic/loss"] for step in range(39)]
        assert sum(losses[-5:]) < 0.5 * sum(losses[:3]) * 5 / 3

    def test_the_policys_schedule_begins_after_the_critics_warm_up(self) -> None:
        """Warm-up and decay take the policy's own steps: from a third of the peak, over the peak, down to the end."""
        optimizer = PolicyGradientOptimizerConfig(learning_rate=3e-2, warmup_steps=3, final_ratio=0.0)
        recipe = ppo(steps=9, critic=CriticConfig(warmup=3), optimizer=optimizer, kl=None, mini_batches=1, ppo_epochs=1)
        rates = [recipe.step(step, quiet(step)).metrics.get("learning_rate") for step in range(9)]
        assert rates[:3] == [None] * 3, "it has none while it does not learn"
        assert rates[3:] == pytest.approx([1e-2, 2e-2, 3e-2, 3e-2, 2e-2, 1e-2])

    @pytest.mark.parametrize("kl", [PPOKLConfig(estimator=e) for e in ("k1", "k2", "k3")] + [
        PPOKLConfig(place="loss", estimator=e) for e in ("k2", "k3", "k3-corrected")
    ])  # fmt: skip
    def test_the_distance_to_the_reference_is_reported(self, kl: PPOKLConfig) -> None:
        recipe = ppo(kl=kl, critic=CriticConfig(), mini_batches=1, ppo_epochs=1)
        found = [recipe.step(step, quiet(step)).metrics["kl"] for step in range(3)]
        assert abs(found[0]) < 1e-5
        assert abs(found[2]) > 1e-4

    def test_a_penalty_without_a_reference_is_refused(self) -> None:
        """It used to go on without the penalty."""
        roles = ppo(kl=None).roles
        assert "reference" not in roles.frozen
        for kl in (PPOKLConfig(), PPOKLConfig(place="loss", estimator="k3")):
            config = PPOConfig(data="d", reward="r", steps=1, kl=kl)
            needed = "PPO needs the role reference for reference_logprobs, but the open roles are critic"
            with pytest.raises(InputError, match=needed):
                OnPolicy(config, PPO(config), roles, PROMPTS, EvenTokens(), 0)
        grpo = GRPOConfig(data="d", reward="r", steps=1, kl=KLConfig(coefficient=0.1))
        with pytest.raises(InputError, match="GRPO needs the role reference"):
            OnPolicy(grpo, GRPO(grpo), roles, PROMPTS, EvenTokens(), 0)

    def test_needs_a_critic(self) -> None:
        recipe = best_of_n()
        config = PPOConfig(data="d", reward="r", steps=1)
        with pytest.raises(
            InputError, match="PPO needs the role critic for values, but the open roles are policy; decl"
        ):
            OnPolicy(config, PPO(config), recipe.roles, PROMPTS, EvenTokens(), 0)

    @pytest.mark.parametrize(
        ("column", "told"),
        [
            (Column("x", "reference", "values"), "whose model predicts candidates and entropy and logprobs and topk"),
            (Column("x", "policy", "scores"), "whose model predicts candidates and entropy and logprobs;"),
            (Column("x", "critic", "logprobs"), "whose model predicts scores and values;"),
        ],
    )
    def test_a_column_that_its_role_does_not_predict_is_refused_before_anything_is_sampled(
        self, column: Column, told: str
    ) -> None:
        recipe, made = ppo(), PPOConfig(data="d", reward="r", steps=1)
        algorithm = PPO(made)
        algorithm.requires = lambda step: (VALUES, column)  # type: ignore[method-assign]
        with pytest.raises(InputError, match=rf"PPO needs {column.need} for x, got the role {column.role}, {told}"):
            OnPolicy(made, algorithm, recipe.roles, PROMPTS, EvenTokens(), 0)

    def test_an_objective_of_what_its_role_does_not_predict_is_refused(self) -> None:
        class Valued(Dataflow):
            def updates(self, step: int) -> Sequence[Update]:
                return (Update("policy", partial(ValueObjective, clip=0.2)),)

        with pytest.raises(InputError, match="the objective of Valued needs values, got the role policy, whose model"):
            best_of_n(Valued)

    def test_a_column_that_an_objective_reads_and_nobody_fills_is_one_line_of_its_role(self) -> None:
        class Unfilled(Dataflow):
            def updates(self, step: int) -> Sequence[Update]:
                return (Update("policy", lambda totals: PolicyObjective(totals, 0.2, 0.2)),)

        recipe = best_of_n(Unfilled)
        with pytest.raises(InputError, match="must have a column advantages, got") as refused:
            recipe.step(0, quiet(0))
        assert any(note.startswith("worker: policy rank 0, in update") for note in refused.value.__notes__)

    def test_needs_who_learns(self) -> None:
        class Nobody(Dataflow):
            def updates(self, step: int) -> Sequence[Update]:
                return (Update("teacher", SupervisedObjective),)

        with pytest.raises(InputError, match="Nobody trains the role teacher, but the roles that learn are policy"):
            best_of_n(Nobody)


class TestSleep:
    @pytest.mark.parametrize("sleep", [True, False])
    def test_a_sleeping_reference_frees_its_memory_and_changes_nothing(self, sleep: bool, tmp_path: Path) -> None:
        initial_model(TINY, TOKENIZER, 0).save_pretrained(tmp_path)
        found = []
        for nap in (sleep, False):
            options: dict[str, Any] = {"placement": Placement.model_validate({"sleep": nap}), "trace": TraceConfig()}
            config = PPOConfig(data="d", reward="r", steps=3, prompts_per_step=3, max_new_tokens=4, **options)
            roles = open_roles(config, ModelSource(tmp_path), 11, inline(), sources={"critic": scalar()})
            recipe = OnPolicy(config, PPO(config), roles, PROMPTS, EvenTokens(), 11)
            assert (roles.frozen["reference"].one(FrozenWorker.resident_bytes) == 0) is nap, "the rollout comes first"
            found.append([recipe.step(step, quiet(step)).metrics for step in range(3)])
            assert (roles.frozen["reference"].one(FrozenWorker.resident_bytes) == 0) is nap
        assert found[0] == found[1]


class TestParallelReward:
    @settings(deadline=None, max_examples=30)
    @given(groups=st.lists(st.integers(1, 4), min_size=1, max_size=7), processes=st.integers(1, 4))
    def test_scores_are_those_of_one_process(self, groups: list[int], processes: int) -> None:
        prompts = [f"p{g}" for g, size in enumerate(groups) for _ in range(size)]
        completions = [f"c{i}" * (i + 1) for i in range(len(prompts))]
        call = RewardCall(prompts, completions, [{"answer": p} for p in prompts])

        def compare(call: RewardCall) -> list[float]:  # with the others of its prompt
            return [
                float(call.prompts.count(p) * 100 + len(c)) for p, c in zip(call.prompts, call.completions, strict=True)
            ]

        several = ParallelReward([ScriptedReward(compare) for _ in range(processes)])
        assert several.score(call) == ScriptedReward(compare).score(call)
        several.close()


class TestRewardModel:
    def test_ranks_the_chosen_above_the_rejected(self) -> None:
        recipe = reward_model(steps=40)
        reports = [recipe.step(step, quiet(step)).metrics for step in range(40)]
        assert reports[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
        assert reports[-1]["accuracy"] == 1.0
        assert reports[-1]["loss"] < 0.1

    def test_pairs_stay_together_in_micro_batches(self) -> None:
        """One optimiser step from one or from many micro-batches."""
        norms = [
            reward_model(runtime=RuntimeConfig(micro_batch_tokens=budget)).step(0, quiet(0)).metrics["grad_norm"]
            for budget in (10_000, 1)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class TestDataflow:
    def test_the_example_is_short(self) -> None:
        assert len(BEST_OF_N.read_text(encoding="utf-8").splitlines()) <= 80

    @pytest.mark.slow
    def test_the_example_learns_from_the_best(self) -> None:
        recipe = best_of_n(steps=40, prompts_per_step=8, group_size=8)
        means = [recipe.step(step, quiet(step)).metrics["reward/mean"] for step in range(40)]
        assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15

    def test_nothing_good_enough_changes_nothing(self) -> None:
        recipe = best_of_n(settings={"accept": 2.0})
        before = weights(recipe)
        assert recipe.step(0, quiet(0)).metrics["accepted"] == 0
        assert same(before, weights(recipe))

    def test_more_tokens_than_declared_end_it(self) -> None:
        recipe = best_of_n(tokens_per_step=1)
        with pytest.raises(InputError, match="but declared at most 1; raise tokens_per_step"):
            recipe.step(0, quiet(0))

    def test_one_that_minimises_nothing_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"Dataflow must define its objective; add the method updates\(step\)"):
            best_of_n(Dataflow)

    def test_loading(self, tmp_path: Path) -> None:
        (tmp_path / "my_dataflow_module.py").write_text("def flow(config):\n    return 1\n")
        assert callable(load_dataflow(tmp_path / "my_dataflow_module.py", "flow"))
        with pytest.raises(InputError, match="must define other, got no such class"):
            load_dataflow(tmp_path / "my_dataflow_module.py", "other")
        (tmp_path / "my_older_module.py").write_text("def flow(flow, step, trace):\n    return 1\n")
        with pytest.raises(InputError, match=r"configuration alone, got flow\(flow, step, trace\); derive a class"):
            load_dataflow(tmp_path / "my_older_module.py", "flow")
        (tmp_path / "my_broken_module.py").write_text("import nothing_of_this_name\n")
        with pytest.raises(InputError, match="cannot be imported: ModuleNotFoundError"):
            load_dataflow(tmp_path / "my_broken_module.py", "flow")
