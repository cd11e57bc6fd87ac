"""Training: resumed equals undisturbed bit for bit, budgets hold, orders are followed, divergence is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from posttrain.domain.errors import BudgetExceededError, FailureClass, InputError, IntegrityError
from posttrain.domain.jobs import Fact, Metric, Note, Progress, Sample, Span
from posttrain.engine.algorithms.objectives import LossParts, Need, Predictions, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import GRPOConfig, InitModelConfig, KLConfig, SFTConfig, TraceConfig
from posttrain.engine.evaluation.evaluate import AccuracyProbe
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import RankContext
from posttrain.engine.groups.worker_group import Future, ResourcePool
from posttrain.engine.loop.controller import (
    CONTROLLER_METRICS,
    Controller,
    FromRows,
    Limits,
    Order,
    Outcome,
    open_learner,
    open_roles,
)
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Recipe
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.sft import SFT
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker, generate
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.scores import RewardScorer, Stretch
from posttrain.engine.settings import OptimizerConfig, PolicyGradientOptimizerConfig, ProbeConfig, RuntimeConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.checkpoint import read_state
from posttrain.sandbox.port import Score, ScriptedReward

TINY = InitModelConfig(
    hidden_size=16, intermediate_size=16, layers=1, characters="0123456789Q:sort A", context_length=64
)
TOKENIZER = character_tokenizer(TINY.characters)
FAST = OptimizerConfig(learning_rate=2e-2, warmup_steps=2, weight_decay=0.01)
DOCUMENTS = [Document([1, 5, 8 + i], [7 + (i * j) % 9 for j in range(1, 3 + i % 4)] + [2]) for i in range(7)]
PROMPTS = [Prompt(d.prompt, row={"answer": "1"}) for d in DOCUMENTS]


def tiny(seed: int = 0) -> LanguageModel:
    return adopt_module(initial_model(TINY, TOKENIZER, seed))


def gpt2() -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = GPT2Config(vocab_size=25, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=2)
        return adopt_module(GPT2LMHeadModel(config))


def even_tokens(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The share of even tokens; every fifth member is unscored."""
    shares = [float((trajectory.response % 2 == 0).mean()) for trajectory in trajectories]
    return [None if i % 5 == 4 else share for i, share in enumerate(shares)]


class FixedScorer:
    """A scorer made of a function over trajectories."""

    def __init__(self, values: Callable[..., Sequence[float | None]]) -> None:
        self._values = values

    def groups(self, prompts: int, tokens: int) -> int:
        return prompts  # at once, since a function may look at the place

    early, errors_max = True, 1.0

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Any) -> Future[Any]:
        scores = [Score(value) for value in self._values(prompts, trajectories)]
        return Future(lambda: scores, lambda: True)

    def text(self, trajectory: Trajectory) -> str:
        return " ".join(map(str, trajectory.response.tolist()))


def inline() -> Callable[[str], ResourcePool]:
    pool = ResourcePool(InlineBackend())
    return lambda role: pool


def worker(recipe: Any) -> TrainWorker:
    """The policy's only worker, which an inline group runs methods on in this process."""
    found: TrainWorker = recipe.roles.made.one(lambda worker: worker)
    return found


def sft(model: LanguageModel | None = None, **changes: Any) -> Recipe:
    options: dict[str, Any] = {"data": "d", "steps": 6, "batch_size": 3, "optimizer": FAST, **changes}
    config = SFTConfig(**options)
    return FromRows(config, SFT(config), open_learner(config, model or tiny(), 11, inline()), DOCUMENTS, 11)


def grpo(
    model: LanguageModel | None = None,
    scorer: Any = even_tokens,
    probe: Any = None,
    config_probe: ProbeConfig | None = None,
    **changes: Any,
) -> Recipe:
    options: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 4, "max_new_tokens": 4,
        "mini_batches": 2, "kl": KLConfig(coefficient=0.1),
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2), "probe": config_probe,
        **changes,
    }  # fmt: skip
    config = GRPOConfig(**options)
    roles = open_roles(config, model or tiny(), 11, inline())
    return OnPolicy(config, GRPO(config), roles, PROMPTS, FixedScorer(scorer), 11, probe, phase="grpo")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "sft": sft,
    "sft with dropout": lambda: sft(gpt2()),
    "sft in micro-batches": lambda: sft(gpt2(), runtime=RuntimeConfig(micro_batch_tokens=9)),
    "grpo": grpo,
    "grpo with a probe": lambda: grpo(
        probe=AccuracyProbe(PROMPTS[:2], TOKENIZER, extract=r"(\d)", max_new_tokens=3),
        config_probe=ProbeConfig(data="p", every=2),
        mini_batches=1,
        kl=None,
        advantage="dr_grpo",
        aggregation="seq-mean-token-sum-norm",
    ),
    "grpo on the fallback decoder": lambda: grpo(gpt2(), steps=2, aggregation="seq-mean-token-mean", advantage="rloo"),
}


class Desk:
    """Runs a recipe in a folder and hands out orders."""

    def __init__(self, folder: Path, recipe: Recipe, *, every: int = 100, **options: Any) -> None:
        self.facts: list[Fact] = []
        self.folder, self.recipe = folder, recipe
        self.controller = Controller(recipe, folder, "sha256:x", every, self.facts.append, **options)

    def run(self) -> Outcome:
        return self.controller.run()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.clone() for name, p in worker(self.recipe).engine.learner.parameters().items()}

    def latest(self) -> Path:
        return max(self.folder.glob("step-*"))


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def stop_after(steps: int) -> Callable[[], Order]:
    asked = iter([Order.GO_ON] * steps)
    return lambda: next(asked, Order.STOP)


UNDISTURBED: dict[str, tuple[Outcome, dict[str, Tensor]]] = {}


def undisturbed(name: str, folder: Path) -> tuple[Outcome, dict[str, Tensor]]:
    if name not in UNDISTURBED:
        desk = Desk(folder / "undisturbed", RECIPES[name]())
        UNDISTURBED[name] = (desk.run(), desk.weights())
    return UNDISTURBED[name]


@pytest.mark.parametrize("name", RECIPES)
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 5), every=st.integers(1, 4))
def test_resumed_equals_undisturbed(name: str, tmp_path_factory: pytest.TempPathFactory, cut: int, every: int) -> None:
    """Stopped after any step, taken up by fresh objects, checkpoints at any rhythm: the same bits, the same bill."""
    folder = tmp_path_factory.mktemp("run")
    expected, weights = undisturbed(name, folder)
    first = Desk(folder, RECIPES[name](), every=every, orders=stop_after(min(cut, expected.steps - 1)))
    assert first.run().status == "stopped"
    second = Desk(folder, RECIPES[name](), every=every)
    second.controller.resume(first.latest())
    assert second.run() == expected
    assert equal(second.weights(), weights)


def test_going_back_to_an_older_checkpoint_redoes_the_steps(tmp_path: Path) -> None:
    """A lost process: what it did after its last commit is done again, to the same end."""
    expected, weights = undisturbed("grpo", tmp_path)
    lost = Desk(tmp_path, grpo(), every=2, orders=stop_after(3))
    lost.run()
    again = Desk(tmp_path / "again", grpo())
    again.controller.resume(tmp_path / "step-00000002")
    assert again.run() == expected
    assert equal(again.weights(), weights)
    assert [f.step for f in again.facts if isinstance(f, Progress)] == [3, 4]


def test_each_resume_is_an_incarnation_of_its_own(tmp_path: Path) -> None:
    """Samples name the version that made them; one that was rolled back is not taken for its successor."""
    named = []
    for _ in range(3):
        desk = Desk(tmp_path, grpo(), orders=stop_after(1))
        if named:
            desk.controller.resume(desk.latest())
        desk.run()
        named.append({version for fact in desk.facts if isinstance(fact, Sample) for version in fact.versions})
    assert named == [{"0.0"}, {"1.1"}, {"2.2"}]


def test_a_checkpoint_covers_no_step_that_nobody_heard_of(tmp_path: Path) -> None:
    durable: list[int] = []  # the newest step whose progress was flushed, at each commit

    def flush() -> None:
        steps = [fact.step for fact in desk.facts if isinstance(fact, Progress)]
        durable.append(max(steps, default=0))
        assert not (desk.folder / f"step-{durable[-1]:08d}" / "COMMIT").exists(), "facts first, then the commit"

    desk = Desk(tmp_path, sft(), every=1, flush=flush)
    outcome = desk.run()
    assert durable == list(range(1, outcome.steps + 1))


def test_resuming_keeps_the_decoder_on_the_live_weights(tmp_path: Path) -> None:
    """The decoder reads parameters in place; a restore that re-pointed them would be caught as an IntegrityError."""
    first = Desk(tmp_path, grpo(), orders=stop_after(2))
    first.run()
    model = tiny()
    recipe = grpo(model)
    pointers = {name: p.data_ptr() for name, p in model.module.named_parameters()}
    again = Desk(tmp_path, recipe)
    again.controller.resume(first.latest())
    again.run()
    assert pointers == {name: p.data_ptr() for name, p in model.module.named_parameters()}


def test_a_parameter_that_is_never_used_does_not_stop_a_resume(tmp_path: Path) -> None:
    """It has no gradient, so AdamW keeps no state for it."""

    def recipe() -> Recipe:
        model = tiny()
        model.module.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        return sft(model)

    whole = Desk(tmp_path / "whole", recipe())
    expected = whole.run()
    first = Desk(tmp_path, recipe(), orders=stop_after(3))
    first.run()
    second = Desk(tmp_path, recipe())
    second.controller.resume(first.latest())
    assert second.run() == expected
    assert equal(second.weights(), whole.weights())


@pytest.mark.parametrize("key", ["model.norm.weight/step", "nobody/step"])
def test_incomplete_moments_are_refused(key: str) -> None:
    policy = worker(sft())
    batch = TokenBatch.pack(DOCUMENTS)
    policy.update(batch, mean_loss(batch), step=0)
    learner = policy.engine.learner
    odd = {name: value for name, value in learner.moments().items() if name != key}
    odd |= {key: torch.zeros(())} if key not in learner.moments() else {}
    with pytest.raises(IntegrityError, match=f"moment {key} differs"):
        worker(sft()).engine.learner.restore(learner.parameters(), odd)


def test_a_checkpoint_of_another_stage_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path, sft(), orders=stop_after(1))
    desk.run()
    desk.controller.fingerprint = "sha256:y"
    with pytest.raises(IntegrityError, match="is from a different stage"):
        desk.controller.resume(desk.latest())
    with pytest.raises(IntegrityError, match="does not fit the model"):
        Desk(tmp_path, sft(gpt2())).controller.resume(desk.latest())


class TestBudget:
    @pytest.mark.parametrize("name", ["sft", "grpo"])
    @settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(limit=st.integers(0, 250))
    def test_is_never_passed(self, name: str, limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("budget")
        desk = Desk(folder, RECIPES[name](), limits=Limits(tokens=limit))
        with suppress(BudgetExceededError):
            assert desk.run().status == "succeeded"
            assert desk.controller.tokens <= limit
            return
        assert read_state(desk.latest()).tokens == desk.controller.tokens
        assert desk.controller.tokens <= limit

    def test_raised_budget_finishes_with_the_same_weights(self, tmp_path: Path) -> None:
        expected, weights = undisturbed("sft", tmp_path)
        poor = Desk(tmp_path, sft(), limits=Limits(tokens=expected.tokens - 1))
        with pytest.raises(BudgetExceededError, match=r"raise budget\.tokens"):
            poor.run()
        rich = Desk(tmp_path, sft(), limits=Limits(tokens=expected.tokens))
        rich.controller.resume(poor.latest())
        assert rich.run() == expected
        assert equal(rich.weights(), weights)

    def test_the_price_covers_what_is_spent(self) -> None:
        for make in (sft, grpo):
            recipe = make()
            for step in range(3):
                price = recipe.max_tokens(step)
                assert recipe.step(step, Trace(lambda fact: None, step)).tokens <= price

    @pytest.mark.parametrize(("signal", "mini_batches"), [(False, 1), (True, 1), (True, 3)])
    def test_grpo_counts_what_it_reads_generates_and_trains_on(self, signal: bool, mini_batches: int) -> None:
        """Three prompts of three tokens, four responses each."""
        generated: list[int] = []

        def scorer(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float]:
            generated.extend(t.generated for t in trajectories)
            return [float(signal and index % 2) for index in range(len(trajectories))]

        spent = grpo(scorer=scorer, mini_batches=mini_batches, kl=None).step(0, quiet(0)).tokens
        assert len(generated) == 12
        assert spent == 3 * 3 + sum(generated) + signal * (12 * 3 + sum(generated))

    def test_deadline(self, tmp_path: Path) -> None:
        desk = Desk(tmp_path, sft(), limits=Limits(deadline=1.0))
        with pytest.raises(BudgetExceededError, match="deadline passed at step 0"):
            desk.run()


class TestOrders:
    def test_stop_leaves_a_checkpoint_and_no_more_steps(self, tmp_path: Path) -> None:
        desk = Desk(tmp_path, sft(), orders=stop_after(2))
        assert (desk.run().status, desk.latest().name) == ("stopped", "step-00000002")

    def test_checkpoint_goes_on(self, tmp_path: Path) -> None:
        orders = iter([Order.GO_ON, Order.CHECKPOINT])
        desk = Desk(tmp_path, sft(), orders=lambda: next(orders, Order.GO_ON))
        assert desk.run().status == "succeeded"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000006"]


class TestSeveralEndsOfSequence:
    """The rollout stops on every id of the model's generation config, the tokenizer knows one: text has none."""

    END = TOKENIZER.pad_token_id

    def rollout(self) -> ScriptedRollout:
        return ScriptedRollout(lambda prompt, sample: [*TOKENIZER.encode("1"), self.END], eos_token_id=self.END)

    def test_the_reward_does_not_see_it(self) -> None:
        reward = ScriptedReward(lambda call: [0.0] * len(call))
        found = generate(self.rollout(), [[1]], samples=2, sampling=SamplingParams(max_new_tokens=4))
        RewardScorer(reward, TOKENIZER).begin([PROMPTS[0]] * 2, found, Stretch(0, 2)).result()
        assert list(reward.calls[0].completions) == ["1", "1"]

    def test_the_probe_does_not_see_it(self) -> None:
        probe = AccuracyProbe(PROMPTS[:1], TOKENIZER, extract=r"(?s)(.*)", max_new_tokens=4)
        pool = ResourcePool(InlineBackend())
        pool.start("policy", TrainWorker, tiny(), FAST, RuntimeConfig(), steps=1, seed=0)
        group = pool.start("rollout", RolloutWorker, None, self.rollout())
        assert probe(group).metrics == {"probe/accuracy": 1.0}


class TestProbe:
    @pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ["1"]}])
    def test_a_row_without_a_usable_answer_is_refused(self, row: dict[str, Any]) -> None:
        items = [PROMPTS[0], replace(PROMPTS[1], row=row)]
        with pytest.raises(InputError, match="dataset:p@1 row 2 needs an `answer`"):
            AccuracyProbe(items, TOKENIZER, extract=r"(\d)", max_new_tokens=3, name="dataset:p@1")


class TestGRPO:
    def test_facts(self, tmp_path: Path) -> None:
        probe = AccuracyProbe(PROMPTS[:2], TOKENIZER, extract=r"(\d)", max_new_tokens=3)
        desk = Desk(tmp_path, grpo(probe=probe, config_probe=ProbeConfig(data="p", every=3)), every=5)
        outcome = desk.run()
        metrics = [f for f in desk.facts if isinstance(f, Metric)]
        assert [m.step for m in metrics if "probe/accuracy" in m.values] == [0, 3, 4]
        assert {f.name for f in desk.facts if isinstance(f, Span)} == {
            "rollout", "reward", "form", "columns", "advantage", "update", "weights", "probe", "checkpoint",
        }  # fmt: skip
        assert all(torch.isfinite(torch.tensor(list(m.values.values()))).all() for m in metrics)
        progress = [f for f in desk.facts if isinstance(f, Progress)]
        assert [(p.step, p.total, p.phase) for p in progress] == [(i, 4, "grpo") for i in range(1, 5)]
        assert [p.tokens for p in progress] == sorted(p.tokens for p in progress)
        assert not set(CONTROLLER_METRICS) & set(outcome.metrics), "a result is the same on any machine"
        peaks = [m.values["memory/peak_resident_mib"] for m in metrics if "loss" in m.values]
        assert len(peaks) == 4
        assert peaks == sorted(peaks)

    def test_only_groups_with_signal_are_trained_on(self) -> None:
        """And every sample can tell what became of it."""

        def first_group_only(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
            return [float(at == 0) for at in range(len(trajectories) - 1)] + [None]

        facts: list[Fact] = []
        recipe = grpo(scorer=first_group_only, mini_batches=1, kl=None, trace=TraceConfig(groups="all"))
        report = recipe.step(0, Trace(facts.append, 0))
        samples = [fact for fact in facts if isinstance(fact, Sample)]
        assert [s.id for s in samples] == [f"0.{prompt}.{sample}" for prompt in range(3) for sample in range(4)]
        assert [s.fate for s in samples] == [
            *["update 0, mini-batch 0"] * 4, *["dropped: group without signal"] * 7, "dropped: no score",
        ]  # fmt: skip
        for sample in samples[:4]:
            assert len(sample.ratios) == len(sample.tokens) == len(sample.advantages)
            assert sample.ratios == pytest.approx([1.0] * len(sample.tokens), abs=1e-5)
            assert sample.logprobs == pytest.approx(sample.behaviour_logprobs, abs=1e-5)
            assert not any(sample.clipped)
        assert samples[0].advantages[0] > 0 > samples[1].advantages[0]
        assert report.metrics["groups/zero_std"] == pytest.approx(2 / 3)
        assert report.metrics["reward/unscored"] == pytest.approx(1 / 12)
        assert report.metrics["reward/stderr"] == pytest.approx(0.25 / 3)  # group means .25, 0, 0

    @pytest.mark.parametrize(("groups", "followed"), [(0, 0), (1, 4), (2, 8)])
    def test_follows_as_many_groups_as_it_is_told(self, groups: int, followed: int) -> None:
        facts: list[Fact] = []
        grpo(trace=TraceConfig(groups=groups)).step(0, Trace(facts.append, 0))
        assert sum(isinstance(fact, Sample) for fact in facts) == followed

    def test_no_signal_changes_nothing(self) -> None:
        recipe = grpo(scorer=lambda prompts, trajectories: [1.0] * len(trajectories), kl=None)
        learner = worker(recipe).engine.learner
        before = {name: p.clone() for name, p in learner.parameters().items()}
        assert recipe.step(0, quiet(0)).metrics["groups/zero_std"] == 1.0
        assert equal(before, learner.parameters())

    def test_nobody_scored_is_no_reward_of_zero(self) -> None:
        """Trap 12."""
        recipe = grpo(scorer=lambda prompts, trajectories: [None] * len(trajectories))
        metrics = recipe.step(0, quiet(0)).metrics
        assert metrics["reward/unscored"] == 1.0
        assert "reward/mean" not in metrics

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
    def test_sampler_and_trainer_agree_at_the_sampling_temperature(self, temperature: float) -> None:
        """Trap 7: before the first update the ratio is 1, so nothing is clipped and the mismatch vanishes."""
        metrics = grpo(temperature=temperature, mini_batches=1).step(0, quiet(0)).metrics
        assert abs(metrics["mismatch_kl"]) < 1e-7
        assert metrics["clip_fraction"] == 0
        assert abs(metrics["kl"]) < 1e-7

    def test_the_reference_stays_where_training_began(self) -> None:
        recipe = grpo()
        kls = [recipe.step(step, quiet(step)).metrics["kl"] for step in range(4)]
        assert kls[-1] > max(kls[0], 1e-6)

    def test_learns_to_prefer_what_is_rewarded(self) -> None:
        recipe = grpo(steps=30, kl=None, prompts_per_step=4, mini_batches=1)
        means = [recipe.step(step, quiet(step)).metrics["reward/mean"] for step in range(30)]
        assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15


def quiet(step: int) -> Trace:
    return Trace(lambda fact: None, step)


class TestPolicy:
    def policy(self, model: LanguageModel | None = None, **options: Any) -> TrainWorker:
        return TrainWorker(RankContext(), model or tiny(), FAST, RuntimeConfig(**options), steps=10, seed=0)

    @pytest.mark.parametrize("budget", [1, 12, 30])
    def test_micro_batches_change_nothing_but_rounding(self, budget: int) -> None:
        """Trap 1, through the model: one optimiser step from one, two or seven micro-batches."""
        batch = TokenBatch.pack(DOCUMENTS)
        norms = []
        for tokens in (10_000, budget):
            report = self.policy(micro_batch_tokens=tokens).update(batch, mean_loss(batch), step=0).metrics
            norms.append((report["loss"], report["grad_norm"]))
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_divergence_is_named_and_updates_nothing(self, poison: float) -> None:
        policy = self.policy()
        before = {name: p.clone() for name, p in policy.engine.learner.parameters().items()}
        with pytest.raises(DivergedError, match="diverged at step 4: loss") as caught:
            policy.update(TokenBatch.pack(DOCUMENTS), LossOf(lambda m, lp: LossParts((lp * poison).sum(), {})), step=3)
        assert caught.value.failure_class is FailureClass.DIVERGED
        assert equal(before, policy.engine.learner.parameters())
        assert policy.engine.learner.moments() == {}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_bad_gradient_under_a_finite_loss_leaves_no_trace(self, dtype: torch.dtype) -> None:
        """Weights and moments are those from before, and the next mini-batch is as if it had not been."""
        batch = TokenBatch.pack(DOCUMENTS)
        good = mean_loss(batch)
        policies = []
        for disturbed in (False, True):
            model = tiny()
            model.module.to(dtype)
            policy = self.policy(model, micro_batch_tokens=12)
            policy.update(batch, good, step=0)
            if disturbed:
                before = policy.engine.learner.parameters() | policy.engine.learner.moments()
                before = {name: value.clone() for name, value in before.items()}
                live = {name: p.clone() for name, p in policy.engine.model.module.named_parameters()}
                for poison in (float("nan"), float("inf")):
                    bad = LossOf(partial(poisoned, good, poison))
                    with pytest.raises(DivergedError, match=r"loss 3\.\d+, gradient norm (nan|inf) must be finite"):
                        policy.update(batch, bad, step=0, part=1)
                    assert equal(before, {**policy.engine.learner.parameters(), **policy.engine.learner.moments()})
                    assert equal(live, dict(policy.engine.model.module.named_parameters()))
                    assert all(p.grad is None for p in policy.engine.model.module.parameters())
            policy.update(batch, good, step=1)
            policies.append(policy)
        one, two = (policy.engine.learner for policy in policies)
        assert equal(one.parameters(), two.parameters())
        assert equal(one.moments(), two.moments())

    def test_no_weight_decay_on_norms_and_biases(self) -> None:
        """Without a gradient all that moves a weight is its decay; a resumed learner goes on so."""
        batch = TokenBatch.pack(DOCUMENTS)
        options = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5, warmup_steps=0, schedule="constant")
        nothing = LossOf(lambda m, lp: LossParts((lp * 0.0).sum(), {}))

        def moved(policy: TrainWorker, step: int) -> set[str]:
            before = {name: p.clone() for name, p in policy.engine.learner.parameters().items()}
            policy.update(batch, nothing, step=step)
            after = policy.engine.learner.parameters()
            return {name for name in before if not torch.equal(before[name], after[name])}

        one, two = (TrainWorker(RankContext(), gpt2(), options, RuntimeConfig(), steps=10, seed=0) for _ in range(2))
        names = set(one.engine.learner.parameters())
        vectors = {name for name in names if name.endswith(".bias") or ".ln_" in name}
        assert len(vectors) == 10
        assert moved(one, 0) == names - vectors
        two.engine.learner.restore(one.engine.learner.parameters(), one.engine.learner.moments())
        assert moved(two, 1) == names - vectors

    def test_low_precision_weights_learn_through_masters(self) -> None:
        """Updates far below bfloat16's resolution add up, and a restored policy goes on exactly."""
        batch = TokenBatch.pack(DOCUMENTS)
        policies = []
        for _ in range(2):
            model = tiny()
            model.module.to(torch.bfloat16)
            slow = OptimizerConfig(learning_rate=1e-5, warmup_steps=0, schedule="constant")
            policies.append(TrainWorker(RankContext(), model, slow, RuntimeConfig(), steps=10, seed=0))
        one, two = policies
        start = {name: p.clone() for name, p in one.engine.learner.parameters().items()}
        for step in range(3):
            one.update(batch, mean_loss(batch), step=step)
        moved = [(one.engine.learner.parameters()[name] - p).abs().max().item() for name, p in start.items()]
        assert 0 < max(moved) < 1e-4
        assert all(p.dtype == torch.float32 for p in one.engine.learner.parameters().values())
        live = dict(one.engine.model.module.named_parameters())
        assert all(torch.equal(live[name], p.bfloat16()) for name, p in one.engine.learner.parameters().items())
        two.engine.learner.restore(one.engine.learner.parameters(), one.engine.learner.moments())
        for policy in policies:
            policy.update(batch, mean_loss(batch), step=3)
        assert equal(one.engine.learner.parameters(), two.engine.learner.parameters())

    def test_dropout_leaves_the_global_generator_alone(self) -> None:
        policy = TrainWorker(RankContext(), gpt2(), FAST, RuntimeConfig(), steps=10, seed=0, dropout=True)
        before = torch.get_rng_state()
        policy.update(TokenBatch.pack(DOCUMENTS), mean_loss(TokenBatch.pack(DOCUMENTS)), step=0)
        assert torch.equal(before, torch.get_rng_state())

    def test_reference_is_a_copy(self) -> None:
        model = tiny()
        reference = FrozenWorker(RankContext(), model, temperature=1.0, micro_batch_tokens=16)
        policy = self.policy(model)
        batch = TokenBatch.pack(DOCUMENTS)
        before = reference.fill(batch, "reference_logprobs", "logprobs").column("reference_logprobs")
        policy.update(batch, mean_loss(batch), step=0)
        after = reference.fill(batch, "reference_logprobs", "logprobs")
        assert before is not None
        assert torch.equal(after.column("reference_logprobs"), before)
        assert after.provenance.role == "reference"


class BadGradient(torch.autograd.Function):
    """The value as it is, and this gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.gradient, None


@dataclass(frozen=True)
class LossOf:
    """An objective by a function of log-probabilities."""

    function: Callable[[TokenBatch, Tensor], LossParts]
    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
        return self.function(micro, predicted.of("logprobs"))


def poisoned(good: LossOf, by: float, micro: TokenBatch, logprobs: Tensor) -> LossParts:
    return LossParts(BadGradient.apply(good.function(micro, logprobs).loss, by), {})


def mean_loss(batch: TokenBatch) -> LossOf:
    tokens = Totals.of(batch).tokens
    return LossOf(lambda micro, logprobs: LossParts(-logprobs[micro.response_mask].sum() / tokens, {}))


def test_a_stage_that_never_updated_weights_says_so(tmp_path: Path) -> None:
    def warned(desk: Desk) -> list[str]:
        return [fact.message for fact in desk.facts if isinstance(fact, Note) and fact.level == "warning"]

    alike = {"scorer": lambda prompts, answers: [1.0] * len(answers), "kl": None}
    idle = Desk(tmp_path / "idle", grpo(**alike))
    before = idle.weights()
    assert idle.run().metrics["unchanged"] == 1.0
    assert equal(before, idle.weights())
    assert [line.partition(":")[0] for line in warned(idle)] == ["none of 4 steps updated weights"]
    cut = Desk(tmp_path / "cut", grpo(), orders=stop_after(2))
    cut.run()
    rest = Desk(tmp_path / "cut", grpo(**alike))
    rest.controller.resume(cut.latest())
    rest.run()
    Desk(tmp_path / "never", grpo(**alike), orders=stop_after(2)).run()
    never = Desk(tmp_path / "never", grpo(**alike))
    never.controller.resume(never.latest())
    never.run()
    assert len(warned(never)) == 1
    busy = Desk(tmp_path / "busy", grpo())
    assert "unchanged" not in busy.run().metrics
    rows = Desk(tmp_path / "rows", sft())
    rows.run()
    assert [warned(desk) for desk in (rest, busy, rows)] == [[], [], []]
