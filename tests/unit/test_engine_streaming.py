"""Groups come from the rollout as they end: what is scored and predicted meanwhile follows the stream, no clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_engine_lag import APART, told
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, quiet, same, weights
from test_engine_training import Desk
from torch import Tensor

from posttrain.domain.errors import DeadlineError, InputError
from posttrain.domain.jobs import Sample
from posttrain.engine.algorithms.advantages import whiten
from posttrain.engine.config import (
    CISPOConfig,
    CriticConfig,
    DAPOConfig,
    GroupConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    TraceConfig,
)
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Flow
from posttrain.engine.groups.worker_group import Feed, Future, ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.pipeline import Asked, Incoming
from posttrain.engine.models.files import ModelSource, ScalarSource, initial_model
from posttrain.engine.recipes.algorithm import ScoredGroup, pack
from posttrain.engine.recipes.cispo import CISPO
from posttrain.engine.recipes.dapo import DAPO
from posttrain.engine.recipes.dr_grpo import DrGRPO
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.gspo import GSPO
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.recipes.rloo import RLOO
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.port import Rollouts
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Group, Prompt, Trajectory, groups_of
from posttrain.engine.scores import RewardScorer, Stretch
from posttrain.engine.settings import PolicyGradientOptimizerConfig, RuntimeConfig
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.sandbox.port import RewardCall, RewardError, Score, ScriptedReward
from posttrain.sandbox.process import ParallelReward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelSource(folder, "float32")


class Shuffled(InlineBackend):  # type: ignore[misc]
    """What the rollout yields comes in another order, at moments of its own."""

    def __init__(self, seed: int, pool: str) -> None:
        super().__init__(pool=pool)
        self._dice, self._held = random.Random(seed), list[Any]()

    def take(self, flows: Sequence[Flow[Any]], timeout: float) -> list[Any]:
        given: list[Any] = []
        while found := super().take(flows, timeout):
            self._held += [one for one in found if one.groups]
            given += [one for one in found if not one.groups]  # which nobody waits for
        self._dice.shuffle(self._held)
        count = self._dice.randint(0, len(self._held))
        given, self._held = [*given, *self._held[:count]], self._held[count:]
        return given


class Even:
    """Scores by the share of even tokens, a few groups at a time."""

    def __init__(self, together: int = 1) -> None:
        self.asked: list[tuple[tuple[int, ...], Stretch]] = []
        self._together = together

    def groups(self, prompts: int, tokens: int) -> int:
        return self._together

    early, errors_max = True, 1.0

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Future[Any]:
        self.asked.append((tuple(int(t.response[0]) for t in trajectories), stretch))
        scores = [Score(float((trajectory.response % 2 == 0).mean())) for trajectory in trajectories]
        return Future(lambda: scores, lambda: True)

    def text(self, trajectory: Trajectory) -> str:
        return ""


def ppo(
    model: ModelSource, seed: int | None = None, scorer: Any = None, apart: bool = True, **changes: Any
) -> OnPolicy:
    """With a critic and a reference; stretches of a group or two."""
    options: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 5, "group_size": 2, "max_new_tokens": 6,
        "critic": CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2)),
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2),
        "runtime": RuntimeConfig(micro_batch_tokens=24), "placement": APART if apart else "collocated", **changes,
    }  # fmt: skip
    config = PPOConfig(**options)
    away = ResourcePool(InlineBackend(pool="rollout") if seed is None else Shuffled(seed, "rollout"))
    here = ResourcePool(InlineBackend(pool="policy"))
    critic = ScalarSource(model.folder, "float32")
    roles = open_roles(
        config, model, 11, lambda r: away if apart and r == "rollout" else here, sources={"critic": critic}
    )
    return OnPolicy(config, PPO(config), roles, PROMPTS, scorer or Even(), 11)


def by_place(scorer: Even) -> list[Any]:
    """What was asked for together, step by step, by its place in the step; five stretches each."""
    steps = [scorer.asked[at : at + 5] for at in range(0, len(scorer.asked), 5)]
    return [sorted(asked, key=lambda one: one[1].first) for asked in steps]


def ended(desk: Desk) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    desk.run()
    return desk.weights(), told(desk)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whoever_ends_first_changes_no_bit(model: ModelSource, tmp_path: Path, lag: int) -> None:
    ahead = {"lag": {"steps": lag}} if lag else {}
    plain = Even()
    weights, metrics = ended(Desk(tmp_path / "plain", ppo(model, scorer=plain, **ahead)))
    assert len(plain.asked) == 4 * 5, "a group at a time"
    for seed in range(4):
        scorer = Even()
        others, told_there = ended(Desk(tmp_path / f"{seed}", ppo(model, seed, scorer, **ahead)))
        assert by_place(scorer) == by_place(plain), "the same responses together"
        assert told_there == metrics
        assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.slow
def test_one_pool_computes_what_two_do(model: ModelSource, tmp_path: Path) -> None:
    weights, metrics = ended(Desk(tmp_path / "apart", ppo(model)))
    others, told_there = ended(Desk(tmp_path / "together", ppo(model, apart=False)))
    assert told_there == metrics
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which groups came, and what was filled, in order."""
    found: list[str] = []
    feed, frozen, learner = RolloutWorker.feed, FrozenWorker.fill, TrainWorker.fill

    def fed(self: RolloutWorker, *given: Any) -> Iterator[Rollouts]:
        for one in feed(self, *given):
            found.extend("group" for _ in one.groups)
            yield one
        if self._fed is None:
            found.append("ended")

    def fill(self: FrozenWorker, batch: Any, column: str, need: Any) -> Any:
        found.append(column)
        return frozen(self, batch, column, need)

    def values(self: TrainWorker, batch: Any, column: str, need: Any) -> Any:
        found.append(column)
        return learner(self, batch, column, need)

    monkeypatch.setattr(RolloutWorker, "feed", fed)
    monkeypatch.setattr(FrozenWorker, "fill", fill)
    monkeypatch.setattr(TrainWorker, "fill", values)
    return found


def test_reference_and_values_are_computed_while_others_are_sampled(model: ModelSource, events: list[str]) -> None:
    ppo(model).step(0, quiet(0))
    early = events[: events.index("ended")]
    assert early.count("group") == 5
    assert early.count("values") == early.count("reference_logprobs") >= 2
    assert events.count("values") == events.count("reference_logprobs") > early.count("values"), "the rest afterwards"


def test_with_lag_the_reference_is_asked_early_and_who_learns_is_not(model: ModelSource, events: list[str]) -> None:
    made = ppo(model, lag={"steps": 1})
    made.publish_weights(PolicyVersion(0, 0))
    made.step(0, quiet(0))
    early = events[: events.index("ended")]
    assert "reference_logprobs" in early
    assert "values" not in early


def test_roles_in_the_rollouts_pool_wait_until_it_has_ended(model: ModelSource, events: list[str]) -> None:
    ppo(model, apart=False).step(0, quiet(0))
    assert set(events[: events.index("ended")]) == {"group"}
    assert events.count("values") > 1


def test_documents_that_are_not_formed_by_group_are_refused(model: ModelSource) -> None:
    class Best(GRPO):  # type: ignore[misc]
        """Keeps what is best of all groups, and says that it does not."""

        def form(self, groups: Sequence[ScoredGroup], seed: int) -> Any:
            best = max(float(group.rewards.max()) for group in groups)
            return pack(groups, lambda group: [i for i, r in enumerate(group.rewards) if r == best])

    options = {"prompts_per_step": 5, "group_size": 2, "max_new_tokens": 6, "kl": {"coefficient": 0.1}}
    runtime = RuntimeConfig(micro_batch_tokens=16)
    config = GRPOConfig(data="d", reward="r", steps=2, placement=APART, runtime=runtime, **options)  # type: ignore[arg-type]
    away, here = ResourcePool(InlineBackend(pool="rollout")), ResourcePool(InlineBackend(pool="policy"))
    roles = open_roles(config, model, 11, lambda role: away if role == "rollout" else here)
    with pytest.raises(InputError, match=r"Best declares groupwise documents, .* set groupwise to False"):
        OnPolicy(config, Best(config), roles, PROMPTS, Even(), 11).step(0, quiet(0))
    Best.groupwise = False
    assert OnPolicy(config, Best(config), roles, PROMPTS, Even(), 11).step(0, quiet(0)).tokens > 0


class TestFailures:
    """Those of a step are judged together, though they are asked for in stretches."""

    ROWS = [Prompt((1, 5), row={"answer": "1"})] * 4

    def answers(self) -> list[Trajectory]:
        return [Trajectory.answer((1, 5), [7, 2], [-0.5, -0.5], truncated=False) for _ in range(4)]

    def scored(self, failing: set[int], errors_max: float, **more: Any) -> list[Score]:
        seen = iter(range(100))

        def score(call: Any) -> list[Any]:
            return [math.nan if next(seen) in failing else 1.0 for _ in call.rows]

        scorer, found = RewardScorer(ScriptedReward(score), TOKENIZER, errors_max=errors_max, **more), list[Score]()
        for first in range(0, 16, 4):
            found += scorer.begin(self.ROWS, self.answers(), Stretch(first, 16)).result()
        return found

    def test_as_many_as_may_of_all(self) -> None:
        lines: list[str] = []
        found = self.scored({1, 2, 9}, 0.2, tell=lines.append)
        assert [score.failed for score in found].count(True) == 3
        [line] = lines
        assert "got nan as score of completion 1" in line
        assert "; 3 of 16 completions of this step are left out of their groups" in line

    def test_one_more_ends_it(self) -> None:
        with pytest.raises(RewardError, match=r"4 completions of this step so far failed, at most 3 may"):
            self.scored({1, 2, 9, 10}, 0.2)

    def test_all_of_them_end_it_whatever_is_allowed(self) -> None:
        with pytest.raises(RewardError, match="16 of 16 completions failed"):
            self.scored(set(range(16)), 1.0)
        assert len(self.scored(set(range(15)), 1.0)) == 16

    def test_audit_37_a_step_whose_every_response_is_declined_ends_it(self) -> None:
        def heard(scores: list[float | None], *totals: int) -> None:
            given = iter(scores)
            reward = ScriptedReward(lambda call: [next(given) for _ in call.rows])
            scorer = RewardScorer(reward, TOKENIZER, name="reward exact")
            for total in totals:
                for first in range(0, total, 4):
                    scorer.begin(self.ROWS, self.answers(), Stretch(first, total)).result()

        line = "reward exact gave no number to any of the 16 responses of this step"
        with pytest.raises(RewardError, match=line):
            heard([None] * 16, 16)
        with pytest.raises(RewardError, match=line):
            heard([1.0] * 16 + [None] * 16, 16, 16)
        heard([None] * 15 + [0.0], 16)
        heard([1.0] * 16 + [None] * 4, 16, 4)  # one group in the place of another is no step

    @settings(max_examples=60, deadline=None)
    @given(
        failing=st.sets(st.integers(0, 15), max_size=8),
        raising=st.none() | st.integers(0, 15),
        order=st.permutations(range(4)),
        errors_max=st.sampled_from([0.0, 0.2, 1.0]),
        processes=st.integers(1, 2),
    )
    def test_they_are_the_same_whatever_came_first(
        self, failing: set[int], raising: int | None, order: list[int], errors_max: float, processes: int
    ) -> None:
        """Scores, or the error with its words: stretches are begun as they come, and heard in order."""
        told = [self.heard(failing, raising, begun, errors_max, processes) for begun in (range(4), order)]
        assert told[0] == told[1]

    def heard(
        self, failing: set[int], raising: int | None, order: Sequence[int], errors_max: float, processes: int
    ) -> list[Any]:
        def score(call: RewardCall) -> list[Any]:
            numbers = [int(row["number"]) for row in call.rows]
            if raising in numbers:
                raise ValueError(f"completion {raising} is odd")
            return [math.nan if number in failing else float(number) for number in numbers]

        rows = [Prompt((1, 5), f"{number // 2}", {"number": number}) for number in range(16)]
        functions = [ScriptedReward(score) for _ in range(processes)]
        scorer, lines = RewardScorer(ParallelReward(functions), TOKENIZER, errors_max=errors_max), list[str]()
        scorer._tell = lines.append
        begun = {at: scorer.begin(rows[4 * at : 4 * at + 4], self.answers(), Stretch(4 * at, 16)) for at in order}
        found: list[Any] = []
        try:
            for at in range(4):
                found += begun[at].result()
        except Exception as error:
            found += [type(error).__name__, str(error)]
        return [*map(str, found), *lines]


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOConfig, GRPO, {}),
    "grpo with kl": (GRPOConfig, GRPO, {"kl": {"coefficient": 0.1}, "aggregation": "seq-mean-token-mean"}),
    "dr_grpo": (GroupConfig, DrGRPO, {"kl": {"coefficient": 0.1}}),
    "gspo": (GSPOConfig, GSPO, {"kl": {"coefficient": 0.1}}),
    "cispo": (CISPOConfig, CISPO, {}),
    "rloo": (GroupConfig, RLOO, {}),
    "dapo": (DAPOConfig, DAPO, {"overlong": {"buffer": 2}}),
}


def group(model: ModelSource, kind: str, seed: int | None = None, **changes: Any) -> OnPolicy:
    """An algorithm whose credit is a group's own affair, in two pools; stretches of a group or two."""
    config_class, algorithm, options = KINDS[kind]
    given: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 5, "group_size": 3, "max_new_tokens": 6,
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2),
        "runtime": RuntimeConfig(micro_batch_tokens=40), "placement": APART, "trace": TraceConfig(groups="all"),
        **options, **changes,
    }  # fmt: skip
    config = config_class(**given)
    away = ResourcePool(InlineBackend(pool="rollout") if seed is None else Shuffled(seed, "rollout"))
    here = ResourcePool(InlineBackend(pool="policy"))
    roles = open_roles(config, model, 11, lambda role: away if role == "rollout" else here)
    return OnPolicy(config, algorithm(config), roles, PROMPTS, Even(), 11)


class TestGradients:
    """Summed while others are sampled, divided once."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_those_of_the_whole(self, model: ModelSource, tmp_path: Path, kind: str) -> None:
        plain, metrics = ended(Desk(tmp_path / "whole", group(model, kind)))
        desk = Desk(tmp_path / "streamed", group(model, kind, stream_gradients=True))
        streamed, told_there = ended(desk)
        for name, value in plain.items():
            torch.testing.assert_close(streamed[name], value, atol=2e-4, rtol=0)
        for one, two in zip(metrics, told_there, strict=True):
            assert one.keys() == two.keys()
            assert two == pytest.approx(one, abs=2e-3)
        traced = {sample.id: sample for sample in desk.facts if isinstance(sample, Sample)}
        assert traced, "samples are followed all the same"
        assert all(len(sample.ratios) == len(sample.tokens) for sample in traced.values() if "update" in sample.fate)
        assert any("mini-batch 1" in sample.fate for sample in traced.values()), "a step had several stretches"

    @pytest.mark.slow
    def test_whoever_ends_first_changes_no_bit(self, model: ModelSource, tmp_path: Path) -> None:
        weights, metrics = ended(Desk(tmp_path / "plain", group(model, "dapo", stream_gradients=True)))
        for seed in range(3):
            others, there = ended(Desk(tmp_path / f"{seed}", group(model, "dapo", seed, stream_gradients=True)))
            assert there == metrics
            assert all(torch.equal(value, others[name]) for name, value in weights.items())

    def test_they_begin_while_others_are_sampled(
        self, model: ModelSource, events: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        update = TrainWorker.update

        def watched(self: TrainWorker, *given: Any, **named: Any) -> Any:
            events.append("part" if named.get("more") else "update")
            return update(self, *given, **named)

        monkeypatch.setattr(TrainWorker, "update", watched)
        group(model, "grpo", stream_gradients=True).step(0, quiet(0))
        assert "part" in events[: events.index("ended")]
        assert events[-1] == "update", "weights change when all are there"
        assert events.count("update") == 1

    @pytest.mark.parametrize(
        ("kind", "options", "why"),
        [
            (PPOConfig, {}, "stream_gradients needs one update whose terms share a denominator, but this kind updates"),
            (ReinforcePlusPlusConfig, {}, "assigned to each group separately, but reinforce_plus_plus"),
            (GRPOConfig, {"mini_batches": 2}, "needs mini_batches: 1, got 2; set mini_batches to 1"),
            (GRPOConfig, {"lag": {"steps": 1}}, r"samples what the step trains, but lag is set \(lag\.steps: 1\)"),
            (GRPOConfig, {"lag": {"steps": 0}}, r"without a correction, but lag is set \(lag\.steps: 0\); remove"),
            (
                GRPOConfig,
                {"placement": {**APART, "reference": {"with": "rollout"}}, "kl": {"coefficient": 0.1}},
                "roles that compute while the rollout works, got reference in the rollout's pool rollout; "
                "write placement",
            ),
            (GRPOConfig, {"placement": "collocated"}, "but the rollout is in the policy's pool main; write"),
        ],
    )
    def test_where_they_cannot_the_plan_says_so(self, kind: Any, options: dict[str, Any], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            kind(**{"data": "d", "reward": "r", "steps": 4, "placement": APART, "stream_gradients": True, **options})

    def test_audit_24_streamed_metrics_are_means_over_what_is_computed(
        self, model: ModelSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two groups of five have no signal; tokens of the others are all as far from what sampled them."""
        feed, off = RolloutWorker.feed, 0.1

        class Some(Even):
            def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Any:
                share = super().begin(prompts, trajectories, stretch).result()
                scores = [
                    one if prompt.tokens[-1] % 2 else Score(1.0) for one, prompt in zip(share, prompts, strict=True)
                ]
                return Future(lambda: scores, lambda: True)

        def shifted(self: RolloutWorker, *given: Any, **named: Any) -> Iterator[Rollouts]:
            for found in feed(self, *given, **named):
                for answer in found.trajectories:
                    for segment in answer.segments:
                        if segment.logprobs is not None:
                            segment.logprobs[:] -= off
                yield found

        monkeypatch.setattr(RolloutWorker, "feed", shifted)
        reports = []
        for streams in (False, True):
            made = group(model, "grpo", stream_gradients=streams)
            made._ahead.scorer = Some()
            reports.append(made.step(0, quiet(0)))
        whole, streamed = reports
        assert streamed.metrics["mismatch_kl"] == pytest.approx(off * off / 2, rel=0.1)
        for name in ("mismatch_kl", "loss", "grad_norm", "clip_fraction"):
            assert streamed.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4, abs=1e-7), name
        assert streamed.tokens == whole.tokens, "only what is computed is billed"

    def test_stretches_are_parts_of_their_step_and_followed_from_its_beginning(
        self, model: ModelSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[int, bool, int]] = []
        update = TrainWorker.update

        def watched(self: TrainWorker, batch: Any, *given: Any, **named: Any) -> Any:
            if named.get("more"):
                asked.append((named["part"], named["record"], len(batch)))
            return update(self, batch, *given, **named)

        monkeypatch.setattr(TrainWorker, "update", watched)
        group(model, "grpo with kl", stream_gradients=True, trace=TraceConfig(groups=1)).step(0, quiet(0))
        assert [part for part, _, _ in asked] == list(range(len(asked)))
        assert len(asked) > 1
        assert [record for _, record, _ in asked] == [True] + [False] * (len(asked) - 1), "one group is followed"

    def test_a_step_without_a_signal_changes_no_weight(self, model: ModelSource) -> None:
        class Equal(Even):
            def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Any:
                return Future(lambda: [Score(1.0) for _ in trajectories], lambda: True)

        decays = PolicyGradientOptimizerConfig(learning_rate=2e-2, weight_decay=0.5)
        made = group(model, "grpo", stream_gradients=True, optimizer=decays)
        made._ahead.scorer = Equal()
        before = weights(made)
        report = made.step(0, quiet(0))
        assert (report.metrics["updates"], "loss" in report.metrics) == (0, False)
        assert same(weights(made), before), "decay is a part of an update"

    def test_a_stretch_whose_columns_are_not_there_is_not_waited_for(self, model: ModelSource) -> None:
        made = group(model, "grpo with kl", stream_gradients=True)
        gradients: Any = made._learning.gradients

        def never() -> Any:
            raise AssertionError("it was waited for")

        [column] = gradients._algorithm.requires(0)
        late = Asked(None, {column: Future(never, lambda: False)})  # type: ignore[arg-type]
        gradients._columns = SimpleNamespace(whole=lambda step: [late])
        assert gradients.offer(0)
        assert gradients._coming == {0: []}

    def test_what_was_begun_of_a_step_that_is_given_up_is_forgotten(self, model: ModelSource) -> None:
        gradients: Any = group(model, "grpo", stream_gradients=True)._learning.gradients
        gradients._coming = {3: ["begun"], 4: ["begun"]}
        gradients.forget(3)
        assert gradients._coming == {4: ["begun"]}
        gradients.forget()
        assert gradients._coming == {}

    def test_credit_that_looks_at_other_groups_is_refused(self, model: ModelSource) -> None:
        class Whitened(GRPO):  # type: ignore[misc]
            def credit(self, batch: Any) -> Any:
                credited = super().credit(batch)
                return credited.with_columns(advantages=whiten(credited.column("advantages"), credited.response_mask))

        class Twice(GRPO):  # type: ignore[misc]
            def updates(self, step: int) -> Any:
                return (*super().updates(step), *super().updates(step))

        class Across(GRPO):  # type: ignore[misc]
            groupwise = False

        for odd, why in (
            (Whitened, "the advantages of Whitened change by .* when all groups are"),
            (Twice, "needs one update whose terms share a denominator, in one mini-batch, got Twice"),
            (Across, "needs documents that are formed by group, but Across forms documents differently"),
        ):
            made = group(model, "grpo", stream_gradients=True)
            config = made._algorithm.config  # type: ignore[attr-defined]
            with pytest.raises(InputError, match=why):
                OnPolicy(config, odd(config), made.roles, PROMPTS, Even(), 11).step(0, quiet(0))


@dataclass
class Scripted:
    """A feed whose groups come when a schedule says so; and a scorer whose answers are there when it does."""

    keys: list[int]
    order: list[int]
    counts: list[int]  # of groups that come at each look
    slow: list[int]  # looks that each answer of the scorer takes
    together: int
    ended: bool = False
    asked: list[tuple[list[int], Stretch]] = field(default_factory=list)

    def take(self, timeout: float) -> list[Rollouts]:
        count = self.counts.pop(0) if self.counts else len(self.order)
        came, self.order = self.order[:count], self.order[count:]
        self.ended = not self.order
        return [Rollouts(tuple(made_group(key) for key in came), counts={"steps": 1})] if came else []

    def groups(self, prompts: int, tokens: int) -> int:
        return self.together

    early, errors_max = True, 1.0

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Future[Any]:
        firsts = [int(trajectory.response[0]) for trajectory in trajectories]
        self.asked.append((firsts, stretch))
        looks = iter(range(self.slow.pop(0) if self.slow else 0))
        return Future(lambda: [Score(float(first)) for first in firsts], lambda: next(looks, None) is None)


def made_group(key: int) -> Group:
    return groups_of([Trajectory.answer((1, 5), [key], [-0.5], truncated=False)], [key], 1)[0]


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    order=st.integers(1, 9).flatmap(lambda count: st.permutations(range(3, 3 + count))),
    counts=st.lists(st.integers(0, 3), max_size=20),
    slow=st.lists(st.integers(0, 3), max_size=9),
    together=st.integers(1, 4),
    early=st.booleans(),
    looks=st.lists(st.booleans(), max_size=30),
)
def test_whatever_comes_when_is_handed_on_once_in_the_order_of_the_stream(
    order: list[int], counts: list[int], slow: list[int], together: int, early: bool, looks: list[bool]
) -> None:
    keys = sorted(order)
    world: Any = Scripted(keys, order, counts, slow, together)
    facts: list[Any] = []
    trace = Trace(facts.append, 0)
    incoming = Incoming(2, keys, [PROMPTS[0]] * len(keys), world, 1, world, together, early)
    found: list[ScoredGroup] = []
    schedule = iter(looks)
    for _ in range(200):
        if incoming.over:
            break
        found += incoming.look(trace, 0.0)[0] if next(schedule, False) else incoming.take(trace)
    assert [group.group.key for group in found] == keys, "each once, in order"
    assert [group.rewards.tolist() for group in found] == [[float(key)] for key in keys], "with its own score"
    assert {group.step for group in found} == {2}
    cut = [(keys[at : at + together], at) for at in range(0, len(keys), together)]
    asked = [(firsts, stretch.first) for firsts, stretch in world.asked]
    assert sorted(asked) == cut, "the same are scored together whatever comes when, each once"
    assert sorted(span.name for span in facts) == ["reward", "rollout"]


def test_steps_without_documents_leave_nothing(model: ModelSource) -> None:
    """A group without a signal forms none where only signals count."""

    class Equal(Even):
        def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Future[Any]:
            return Future(lambda: [Score(1.0) for _ in trajectories], lambda: True)

    for options in ({"kl": {"coefficient": 0.1}}, {"stream_gradients": True}):
        made = group(model, "grpo", denominator="signal", **options)
        made._ahead.scorer = Equal()
        for step in range(3):
            assert made.step(step, quiet(step)).metrics["updates"] == 0
        assert not made._learning.columns._coming
        assert not (made._learning.gradients and made._learning.gradients._coming)


class Growing(Feed):  # type: ignore[misc]
    """A call that takes more prompts on; what it answers comes when a schedule says so, two tokens each."""

    def __init__(self, rounds: list[list[int]]) -> None:
        self.rounds, self.asked, self.over = rounds, list[tuple[list[int], Stretch]](), False

    @property
    def ended(self) -> bool:
        return self.over

    def add(self, batch: Any) -> None:
        self.rounds.append(list(batch.keys))

    def take(self, timeout: float) -> list[Rollouts]:
        keys = self.rounds.pop(0)
        self.over = not self.rounds
        answers = [Trajectory.answer((1, 5), [key, 2], [-0.5, -0.5], truncated=False) for key in keys for _ in "ab"]
        return [Rollouts(groups_of(answers, keys, 2), counts={"steps": len(keys)})]

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Future[Any]:
        self.asked.append(([int(one.response[0]) for one in trajectories[::2]], stretch))
        return Future(lambda: [Score(1.0) for _ in trajectories], lambda: True)


def test_what_took_a_dropped_groups_place_is_told_of_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count(1000)
    clock = SimpleNamespace(time=lambda: float(next(moments)), perf_counter=lambda: float(next(moments)))
    monkeypatch.setattr("posttrain.engine.loop.pipeline.time", clock)
    world: Any = Growing([[5], [4, 3]])
    incoming = Incoming(0, [3, 4, 5], [PROMPTS[0]] * 3, world, 2, world, 1, early=True, grows=True)
    facts: list[Any] = []
    trace = Trace(facts.append, 0)
    while not incoming.over:
        incoming.take(trace)
    incoming.add(9, PROMPTS[1])
    assert not incoming.over
    while not incoming.over:
        incoming.take(trace)
    assert incoming.counts == {"steps": 4}
    total = [(firsts, stretch.first, stretch.total) for firsts, stretch in world.asked]
    assert total == [([5], 4, 6), ([3], 0, 6), ([4], 2, 6), ([9], 6, 8)], "in the order of the stream, where it may"
    rollouts = [span for span in facts if span.name == "rollout"]
    counted = [(span.attributes["trajectories"], span.attributes["tokens"]) for span in rollouts]
    assert counted == [(6, 12), (2, 4)], "each once"
    assert rollouts[0].started < rollouts[1].started, "it began when it was added"
    assert sum(span.name == "reward" for span in facts) == 2


def test_one_long_response_holds_up_its_own_stretch_alone() -> None:
    world: Any = Scripted([3, 4, 5, 6, 7], [6, 7, 5, 4, 3], [1, 1, 1, 1, 1], [], 2)
    incoming = Incoming(0, [3, 4, 5, 6, 7], [PROMPTS[0]] * 5, world, 1, world, 2, early=True)
    trace = Trace(lambda fact: None, 0)
    scored = []
    for _ in range(5):
        given, _ = incoming.look(trace, 0.0)
        scored.append([firsts for firsts, _ in world.asked])
        assert [group.group.key for group in given] == ([3, 4, 5, 6, 7] if incoming.over else [])
    assert scored == [[], [[7]], [[7], [5, 6]], [[7], [5, 6]], [[7], [5, 6], [3, 4]]]


def test_a_score_that_failed_is_told_where_the_rollout_fails_before_its_turn() -> None:
    class Broken(Scripted):
        def take(self, timeout: float) -> list[Rollouts]:
            if not self.counts:
                raise DeadlineError("rollout said nothing")
            return super().take(timeout)

        def begin(self, *given: Any) -> Future[Any]:
            def fail() -> Any:
                raise RewardError("reward:r@1: reward.py:4 raised ValueError: odd")

            return Future(fail, lambda: True)

    world: Any = Broken([3, 4], [4, 3], [1], [], 1)
    incoming = Incoming(0, [3, 4], [PROMPTS[0]] * 2, world, 1, world, 1, early=True)
    facts: list[Any] = []
    trace = Trace(facts.append, 0)
    assert incoming.take(trace) == []
    with pytest.raises(DeadlineError):
        incoming.take(trace)
    [note] = facts
    assert note.message.endswith("scoring had failed: reward:r@1: reward.py:4 raised ValueError: odd")


def test_a_score_that_waits_for_its_turn_is_not_looked_for() -> None:
    waited: list[float] = []

    class Silent(Scripted):
        def take(self, timeout: float) -> list[Rollouts]:
            waited.append(timeout)
            return super().take(timeout)

    world: Any = Silent([3, 4], [4, 3], [1, 0, 0, 1], [], 1)
    incoming = Incoming(0, [3, 4], [PROMPTS[0]] * 2, world, 1, world, 1, early=True)
    trace = Trace(lambda fact: None, 0)
    while not incoming.over:
        incoming.take(trace)
    assert set(waited) == {60.0}


def test_scores_are_looked_at_while_nothing_comes() -> None:
    """A feed that is silent is waited for in short looks while a score is on its way, and in long ones else."""
    waited: list[float] = []

    class Silent(Scripted):
        def take(self, timeout: float) -> list[Rollouts]:
            waited.append(timeout)
            return super().take(timeout)

    world: Any = Silent([3, 4], [3, 4], [1, 0, 0, 1], [2], 1)
    incoming = Incoming(0, [3, 4], [PROMPTS[0]] * 2, world, 1, world, 1, early=True)
    found: list[list[int]] = []
    trace = Trace(lambda fact: None, 0)
    while not incoming.over:
        found.append([group.group.key for group in incoming.take(trace)])
    assert found[:3] == [[], [], [3]], "handed on when its score was there, before the last group came"
    assert waited[0] > 1 > waited[1] == waited[2]
    incoming = Incoming(0, [3], [PROMPTS[0]], Silent([3], [3], [0, 1], [], 1), 1, world, 1, early=True)  # type: ignore[arg-type]
    waited.clear()
    incoming.take(trace, busy=True)
    assert waited == [pytest.approx(0.02)]


def test_who_sleeps_is_asked_early_only_in_a_pool_of_its_own(model: ModelSource, events: list[str]) -> None:
    """Else it would be awake while others have the memory; and whoever is alone need not sleep."""
    naps: list[str] = []
    for apart in (False, True):
        events.clear()
        place = {**APART, "reference": {"cpus": 1} if apart else {"with": "policy"}, "sleep": True}
        config = GRPOConfig(
            data="d", reward="r", steps=2, prompts_per_step=5, group_size=2, max_new_tokens=6, placement=place,
            kl={"coefficient": 0.1}, runtime=RuntimeConfig(micro_batch_tokens=24),
        )  # fmt: skip
        pools = {name: ResourcePool(InlineBackend(pool=name)) for name in ("policy", "rollout", "reference")}
        own = lambda role, apart=apart, pools=pools: pools[role if role != "reference" or apart else "policy"]  # noqa: E731
        roles = open_roles(config, model, 11, own)
        assert roles.alone("reference") == apart == roles.early("reference")
        OnPolicy(config, GRPO(config), roles, PROMPTS, Even(), 11).step(0, quiet(0))
        early = events[: events.index("ended")]
        assert ("reference_logprobs" in early) == apart
        naps.append(str(roles.frozen["reference"].one(FrozenWorker.resident_bytes) > 0))
    assert naps == ["False", "True"]
    streamed = config.model_copy(update={"stream_gradients": True})
    roles = open_roles(streamed, model, 11, lambda role: pools["rollout" if role == "rollout" else "policy"])
    with pytest.raises(InputError, match="but reference shares the rollout's pool or sleeps in a shared"):
        OnPolicy(streamed, GRPO(streamed), roles, PROMPTS, Even(), 11)
