"""Samples of two responses with an observation between them: through the whole loop, and never trained on it."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from late_calls import Late
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline, quiet, scalar
from test_engine_training import Desk, stop_after

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.domain.jobs import Fact, Note, Sample, Span
from posttrain.engine.algorithms.advantages import rloo
from posttrain.engine.algorithms.objectives import Totals, kl_estimate
from posttrain.engine.batch import Predictions, TokenBatch
from posttrain.engine.config import CriticConfig, DataflowConfig, GroupConfig, PPOConfig, PPOKLConfig, TraceConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import Future, ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import Drop, PromptSource, ScoredGroup, pack
from posttrain.engine.recipes.policy_gradient import GroupBaseline
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import Completion, Generation, OpenSample, Reply, SamplingParams
from posttrain.engine.rollout.sessions import Conversations
from posttrain.engine.rollout.worker import EngineError
from posttrain.engine.samples import Group, Prompt, Sample as Sampled, Segment, Trajectory
from posttrain.engine.scores import Failed, Observations, Observed, RewardScorer, Stretch, TextEnvironment
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import StepReport, Trace
from posttrain.pacing.admission import Buffer, InOrder
from posttrain.sandbox.port import RewardError, Score, ScriptedObserver, ScriptedReward
from posttrain.sandbox.process import WeightedReward

SEEN = (7, 8, 9)
TURNS: dict[str, Any] = {"turns": 2, "observation_tokens": 4}
LOSS_ESTIMATORS = ("k2", "k3", "k3-corrected")


class Seen:
    """An environment that computes each observation when it is asked for it."""

    def __init__(self, see: Callable[[Trajectory], Observed]) -> None:
        self.see = see

    def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
        found = self.see(sample)
        return Future(lambda: found, lambda: True)

    def wait(self, seconds: float) -> None:
        raise AssertionError("every observation has ended")


def sometimes(sample: Trajectory) -> Observed:
    """An observation after an even number of tokens."""
    return None if sample.generated % 2 else SEEN


class Talk(PPO):  # type: ignore[misc]
    """Two responses to every prompt; keeps what it gave credit to."""

    turns = 2

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.credited: list[tuple[TokenBatch, TokenBatch]] = []

    @property
    def source(self) -> PromptSource:
        source = super().source
        return replace(source, turns=self.turns, observed=len(SEEN))

    def credit(self, batch: TokenBatch) -> TokenBatch:
        found = super().credit(batch)
        self.credited.append((batch, found))
        return found


class Even(EvenTokens):
    """Scores all of them."""

    def scores(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float((trajectory.response % 2 == 0).mean())) for trajectory in trajectories]


def talk(
    source: Any = None, pool_of: Any = None, scorer: Any = None, environment: Any = None, **changes: Any
) -> OnPolicy:
    options: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 3, "prompts_per_step": 4, "group_size": 3, "max_new_tokens": 20,
        "critic": CriticConfig(optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2)),
        "kl": PPOKLConfig(coefficient=0.1), "gae": {"gamma": 0.9, "lam": 0.8, "whiten": False},
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=1),
        "trace": TraceConfig(groups="all"), **changes,
    }  # fmt: skip
    config = PPOConfig(**options)
    model = source or adopt_module(initial_model(TINY, TOKENIZER, 0))
    roles = open_roles(config, model, 11, pool_of or inline(), sources={"critic": scalar()})
    scorer, environment = scorer or Even(), environment or Seen(sometimes)
    return OnPolicy(config, Talk(config), roles, PROMPTS, scorer, 11, environment=environment)


def told(recipe: OnPolicy, step: int) -> tuple[StepReport, list[Sample]]:
    """What a step reports, and the samples it tells of."""
    facts: list[Fact] = []
    report = recipe.step(step, Trace(facts.append, step))
    return report, [fact for fact in facts if isinstance(fact, Sample)]


def runs(mask: torch.Tensor) -> int:
    """Stretches of true."""
    return int((mask[1:] & ~mask[:-1]).sum()) + int(mask[0])


def test_credit_skips_what_was_observed() -> None:
    recipe = talk()
    metrics = recipe.step(0, quiet(0)).metrics
    ((asked, credited),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    starts = np.cumsum([0, *asked.lengths])
    turns = []
    for document, (begin, end) in enumerate(itertools.pairwise(starts)):
        mask = asked.response_mask[begin:end]
        turns.append(runs(mask))
        at = mask.nonzero()[:, 0]
        old, anchor = (
            asked.column(name)[begin:end][at].double() for name in ("behaviour_logprobs", "reference_logprobs")
        )
        reward = -0.1 * kl_estimate(old, anchor, torch.ones(len(at), dtype=torch.bool), "k1").double()
        score = float(asked.column("reward")[document])
        reward[-1] += score
        value = asked.column("values")[begin:end][at].double()
        running, expected = 0.0, []
        for t in reversed(range(len(at))):
            after = float(value[t + 1]) if t + 1 < len(at) else 0.0
            running = float(reward[t]) + 0.9 * after - float(value[t]) + 0.9 * 0.8 * running
            expected.insert(0, running)
        found = credited.column("advantages")[begin:end]
        assert found[at].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert found[~mask].abs().max() == 0
        if turns[-1] == 2:
            first = int(at[0])
            hole = [int(t) for t in range(first, int(at[-1])) if not mask[t]]
            assert len(hole) == len(SEEN)
            assert asked.tokens[begin:end][hole].tolist() == list(SEEN)
    assert {1, 2} <= set(turns), "some went on, some ended"
    assert metrics["turns/mean"] == pytest.approx(np.mean(turns))


def test_the_second_response_is_one_to_everything_before_it() -> None:
    """What it was sampled with is what the policy gives it in its place."""
    recipe = talk()
    recipe.step(0, quiet(0))
    ((asked, _),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    fresh = talk().roles.learners["policy"].map(TrainWorker.fill, asked, "again", "logprobs").column("again")
    mask = asked.response_mask
    assert fresh[mask].tolist() == pytest.approx(asked.column("behaviour_logprobs")[mask].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "kl",
    [PPOKLConfig(coefficient=0.1), *(PPOKLConfig(coefficient=0.5, place="loss", estimator=e) for e in LOSS_ESTIMATORS)],
    ids=lambda kl: f"{kl.estimator} in the {kl.place}",
)
def test_no_loss_reads_what_was_observed(kl: PPOKLConfig) -> None:
    recipe = talk(kl=kl)
    recipe.step(0, quiet(0))
    ((_, batch),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    for update in recipe._algorithm.updates(0):
        objective = update.objective(Totals.of(batch))
        size = len(batch.response_mask)
        given = torch.linspace(-2, -1, size)

        def loss(batch: TokenBatch, given: torch.Tensor, objective: Any = objective) -> tuple[float, torch.Tensor]:
            leaf = given.clone().requires_grad_()
            made = objective(batch, Predictions(**dict.fromkeys(objective.needs, leaf)))
            made.loss.backward()
            assert leaf.grad is not None
            return float(made.loss.detach()), leaf.grad

        value, gradient = loss(batch, given)
        assert gradient[~batch.response_mask].abs().max() == 0
        odd = {
            name: batch.column(name).masked_fill(~batch.response_mask, 3.5)
            for name in ("advantages", "returns", "values", "behaviour_logprobs", "reference_logprobs")
        }
        other, altered = loss(batch.with_columns(**odd), given.masked_fill(~batch.response_mask, -9.0))
        assert other == pytest.approx(value, rel=1e-6)
        assert torch.allclose(gradient, altered)


def test_tokens_are_counted_by_the_rule_and_reserved() -> None:
    recipe = talk(steps=3)
    for step in range(3):
        price = recipe.max_tokens(step)
        report, samples = told(recipe, step)
        assert report.tokens <= price
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.id.rpartition(".")[0], []).append(sample)
    spent = 0
    for members in groups.values():
        spent += len(members[0].prompt_tokens)
        for sample in members:
            spent += len(sample.tokens)
    ((asked, _),) = recipe._algorithm.credited[2:]  # type: ignore[attr-defined]
    assert report.tokens == spent + 2 * sum(asked.lengths), "policy and critic train on all of it"


def test_the_most_that_turns_cost() -> None:
    """Three responses of 20 with observations of 4 between; two samples share the prompt of 5."""
    source = PromptSource(4, 2, 20, turns=3, observed=4)
    assert source.sampling(5) == 5 + 2 * (60 + 8)
    assert source.sampling(5, again=True) == 5 + 2 * (60 + 29 + 53), "without sessions, 29 and 53 are read"
    assert source.document(5) == 5 + 60 + 8


def _seen_at(tokens: Sequence[int]) -> int | None:
    """Where an observation begins: behind an end of sequence."""
    end = TOKENIZER.eos_token_id
    return next((i + 1 for i, t in enumerate(tokens[:-1]) if t == end and tuple(tokens[i + 1 : i + 4]) == SEEN), None)


def test_stopped_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    whole = Desk(tmp_path / "whole", talk())
    whole.run()
    first = Desk(tmp_path / "cut", talk(), orders=stop_after(2))
    first.run()
    second = Desk(tmp_path / "cut", talk())
    second.controller.resume(first.latest())
    second.run()
    assert all(torch.equal(value, second.weights()[name]) for name, value in whole.weights().items())


def test_any_number_of_ranks_says_the_same(tmp_path: Path) -> None:
    initial_model(TINY, TOKENIZER, 0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    source, said = ModelSource(tmp_path, "float32"), []
    for ranks in (1, 2):
        pools = {"rollout": ResourcePool(InlineBackend(ranks, pool="rollout"))}
        one = ResourcePool(InlineBackend(pool="policy"))
        placement = {"policy": {"cpus": 1}, "rollout": {"cpus": ranks, "ranks": ranks}}
        recipe = talk(source, lambda role, pools=pools, one=one: pools.get(role, one), placement=placement)
        said.append([(sample.id, sample.tokens) for sample in told(recipe, 0)[1]])
    assert said[0] == said[1]


def test_a_penalty_in_the_loss_is_of_the_policys_tokens_alone() -> None:
    """Its value against the plain sum in float64, over two turns with a hole between them."""
    recipe = talk(kl=PPOKLConfig(coefficient=0.5, place="loss", estimator="k3"))
    recipe.step(0, quiet(0))
    ((_, batch),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    update = next(u for u in recipe._algorithm.updates(1) if u.role == "policy")
    objective: Any = update.objective(Totals.of(batch))
    mask, old, anchor = batch.response_mask, batch.column("behaviour_logprobs"), batch.column("reference_logprobs")
    moved = old + torch.linspace(-0.5, 0.5, len(mask))
    found = objective(batch, Predictions(logprobs=moved)).sums["kl"]
    gap = anchor[mask].double() - moved[mask].double()
    assert float(found) == pytest.approx(float((gap.exp() - gap - 1).sum() / mask.sum()), rel=1e-5)
    assert any(runs(part) == 2 for part in mask.split(list(batch.lengths)))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_turns_ahead_in_pools_of_their_own_whatever_is_late(tmp_path: Path, lag: int) -> None:
    """What was sampled ahead waits with its observations, over a stop as well; and nobody's delay changes a bit."""
    folder = tmp_path / "model"
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    source = ModelSource(folder, "float32")
    place = {"policy": {"cpus": 1}, "rollout": {"cpus": 1}, "critic": {"cpus": 1}, "reference": {"cpus": 1}}

    def ahead(seed: int | None = None) -> OnPolicy:
        pools = {}
        for at, name in enumerate(place):
            backend = InlineBackend(pool=name)
            pools[name] = ResourcePool(backend)
            if seed is not None:
                Late(backend, seed + at)
        return talk(source, pools.__getitem__, placement=place, lag={"steps": lag}, steps=4)

    whole = Desk(tmp_path / "whole", ahead())
    whole.run()
    seen = [fact for fact in whole.facts if isinstance(fact, Sample)]
    assert {sample.step: set(sample.versions) for sample in seen} == {k: {f"0.{max(0, k - lag)}"} for k in range(4)}
    assert any(_seen_at(sample.tokens) for sample in seen if sample.step == 3)
    for seed in range(3):
        late = Desk(tmp_path / f"late {seed}", ahead(seed))
        late.run()
        assert all(torch.equal(value, late.weights()[name]) for name, value in whole.weights().items())
    Desk(tmp_path / "cut", ahead(), orders=stop_after(2)).run()
    rest = Desk(tmp_path / "cut", ahead(5))
    rest.controller.resume(rest.latest())
    rest.run()
    assert all(torch.equal(value, rest.weights()[name]) for name, value in whole.weights().items())


def test_an_algorithm_of_turns_needs_an_environment() -> None:
    recipe = talk()
    config = PPOConfig(data="d", reward="r", steps=1)
    with pytest.raises(InputError, match="Talk samples 2 turns, for which the stage needs an environment"):
        OnPolicy(config, Talk(config), recipe.roles, PROMPTS, EvenTokens(), 11)


@pytest.mark.parametrize(("turns", "observation"), [(2, 0), (1, 4)])
def test_turns_and_their_tokens_go_together(turns: int, observation: int) -> None:
    with pytest.raises(ValueError, match=f"be set together, got turns {turns} and observation_tokens {observation}"):
        DataflowConfig(data="d", recipe="m:A", steps=1, turns=turns, observation_tokens=observation)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"observe_timeout": 0, **TURNS}, "observe_timeout\n  Input should be greater than 0"),
        ({"observe_concurrency": 0, **TURNS}, "observe_concurrency\n  Input should be greater than or equal to 1"),
        ({"observe_concurrency": 1025, **TURNS}, "observe_concurrency\n  Input should be less than or equal to 1024"),
        ({"observe_timeout": 50.0}, "observe_timeout needs turns >= 2, got turns 1; set turns, or remove observe_time"),
        ({"observe_concurrency": 2}, "observe_concurrency needs turns >= 2, got turns 1"),
    ],
)
def test_an_observers_limits_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        DataflowConfig(data="d", recipe="m:A", steps=1, **fields)


def test_an_observers_limits_are_written_only_if_they_are_set() -> None:
    usual = DataflowConfig(data="d", recipe="m:A", steps=1, **TURNS, observe_timeout=60, observe_concurrency=1)
    assert not {"observe_timeout", "observe_concurrency"} & usual.model_dump(mode="json").keys()
    other = usual.model_copy(update={"observe_timeout": 50.0, "observe_concurrency": 9}).model_dump(mode="json")
    assert (other["observe_timeout"], other["observe_concurrency"]) == (50.0, 9)


class Slow:
    """An observer whose calls end when the test says so."""

    notes, where = (), "observe (slow.py:1)"

    def __init__(self) -> None:
        self.answers: list[futures.Future[str | None]] = []

    def begin(self, row: Any, responses: Sequence[str]) -> futures.Future[str | None]:
        self.answers.append(futures.Future())
        return self.answers[-1]

    def close(self) -> None:
        raise AssertionError("the caller closes it")


def test_an_environment_waits_for_the_first_of_its_observations() -> None:
    said = Trajectory.answer((1, 5), (7, 2), (-0.5, -0.5), truncated=False)
    slow = Slow()
    environment = TextEnvironment(slow, TOKENIZER, 8)
    environment.wait(1e6)  # none is running
    one, two = (environment.begin(PROMPTS[0], said) for _ in range(2))
    environment.wait(0.0)
    assert [one.done(), two.done()] == [False, False]
    waits = threading.Thread(target=environment.wait, args=(1e6,))
    waits.start()
    slow.answers[1].set_result("sort")
    waits.join()
    assert two.done()
    assert not one.done()
    assert two.result() == TOKENIZER.encode("sort", add_special_tokens=False)
    slow.answers[0].set_exception(InfrastructureError("killed"))
    environment.wait(1e6)
    with pytest.raises(InfrastructureError):
        one.result()


def test_what_is_observed_is_text_of_a_bounded_length() -> None:
    said = Trajectory(
        (
            Segment(np.array([1, 5], dtype=np.int32), "prompt"),
            Segment(np.array([7, 2], dtype=np.int32), "sampled", np.zeros(2, dtype=np.float32)),
        )
    )
    asked: list[tuple[Any, list[str]]] = []

    def observe(row: Any, responses: Sequence[str]) -> Any:
        asked.append((row, list(responses)))
        return answers.pop(0)

    answers: list[Any] = ["sort", None, "0123456789", "", 5]
    environment = TextEnvironment(ScriptedObserver(observe), TOKENIZER, 4)
    found = [environment.begin(prompt, said).result() for prompt in PROMPTS[:2]]
    assert found[0] is not None
    assert TOKENIZER.decode(found[0]) == "sort"
    assert found[1] is None
    assert asked[0] == ({"answer": "1"}, [TOKENIZER.decode([7])])
    for words in (
        "at most 4 tokens, got 10",
        "must return non-empty text or None, got ''; return None",
        "must return text or None, got int",
    ):
        failed = environment.begin(PROMPTS[0], said).result()
        assert isinstance(failed, Failed)
        assert words in failed.line


def stumbles(row: Any, responses: Sequence[str]) -> str | None:
    """Raises where it was told an even number of characters."""
    if len(responses[0]) % 2 == 0:
        raise KeyError(responses[0][:1])
    return "sort"


def test_an_observation_that_fails_ends_its_own_sample_and_no_other() -> None:
    notes: list[str] = []
    reward = ScriptedReward(lambda call: [float(len(text)) for text in call.completions])
    scorer = RewardScorer(reward, TOKENIZER, errors_max=0.9, tell=notes.append)
    recipe = talk(scorer=scorer, environment=TextEnvironment(ScriptedObserver(stumbles), TOKENIZER, 8))
    facts: list[Fact] = []
    report = recipe.step(0, Trace(facts.append, 0))
    samples = [fact for fact in facts if isinstance(fact, Sample)]
    failed = [sample for sample in samples if sample.status == "error"]
    assert failed
    assert len(failed) < len(samples)
    assert report.metrics["turns/errors"] == report.metrics["reward/errors"] == len(failed) / len(samples)
    for sample in failed:
        assert sample.reward is None
        assert sample.fate.startswith("dropped: no score: observe: test_engine_turns.py:")
        assert "raised KeyError" in sample.fate
    ((asked, _),) = recipe._algorithm.credited  # type: ignore[attr-defined]
    assert len(asked) == len(samples) - len(failed), "they are trained on nowhere"
    recipe.step(1, Trace(facts.append, 1))
    assert not [fact for fact in facts if isinstance(fact, Note)]
    assert len(notes) == 1, "the scorer says so, once"
    assert "are left out of their groups" in notes[0]


def test_more_failures_than_may_be_end_the_stage() -> None:
    reward = ScriptedReward(lambda call: [1.0 for _ in call.completions])
    scorer = RewardScorer(reward, TOKENIZER)
    recipe = talk(scorer=scorer, environment=TextEnvironment(ScriptedObserver(stumbles), TOKENIZER, 8))
    with pytest.raises(RewardError, match=r"observe: test_engine_turns.py:\d+ raised KeyError.* so far failed"):
        recipe.step(0, quiet(0))


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def through_a_library(row: Any, responses: Sequence[str]) -> str:
    json.loads("{")
    raise AssertionError


def ends(row: Any, responses: Sequence[str]) -> str:
    sys.exit(0)


def rude(row: Any, responses: Sequence[str]) -> str:
    raise RudeError


def half_a_pair(row: Any, responses: Sequence[str]) -> str:
    return "\ud800"


@pytest.mark.parametrize(
    ("observe", "line"),
    [
        (through_a_library, r"observe: test_engine_turns\.py:\d+ raised JSONDecodeError: Expecting"),
        (ends, r"observe: test_engine_turns\.py:\d+ raised SystemExit: 0; fix"),
        (rude, r"observe: test_engine_turns\.py:\d+ raised RudeError: its text cannot be read; fix"),
        (half_a_pair, r"observe \(\S+:\d+\) must return text that can be tokenised, got \w+: .*; fix it, or the row$"),
    ],
)
def test_whatever_observe_does_is_one_line_of_one_sample(observe: Any, line: str) -> None:
    said = Trajectory.answer((1, 5), (7, 2), (-0.5, -0.5), truncated=False)
    failed = TextEnvironment(ScriptedObserver(observe), TOKENIZER, 4).begin(PROMPTS[0], said).result()
    assert isinstance(failed, Failed)
    assert re.match(line, failed.line)
    assert "\n" not in failed.line


def test_with_weights_a_failure_leaves_each_rewards_own_metrics() -> None:
    one, two = (ScriptedReward(lambda call: [float(len(text)) for text in call.completions]) for _ in range(2))
    scorer = RewardScorer(WeightedReward({"one": (1.0, one), "two": (0.5, two)}), TOKENIZER, errors_max=0.9)
    metrics = (
        talk(scorer=scorer, environment=TextEnvironment(ScriptedObserver(stumbles), TOKENIZER, 8))
        .step(0, quiet(0))
        .metrics
    )
    assert metrics["turns/errors"] == metrics["reward/errors"] > 0
    assert metrics["reward/one/errors"] == metrics["reward/two/errors"] == 0, "they scored what was there"
    assert metrics["reward/one/mean"] == metrics["reward/two/mean"] > 0


def test_where_nobody_scores_what_failed_is_left_out_and_all_of_it_ends_the_stage() -> None:
    def always(row: Any, responses: Sequence[str]) -> str | None:
        raise ValueError("no server")

    recipe = talk(environment=TextEnvironment(ScriptedObserver(stumbles), TOKENIZER, 8))
    recipe._ahead.scorer = None
    groups = recipe._ahead.collected(0, quiet(0), lambda spent, more: True)
    ends = [answer.status for group in groups for answer in group.answers]
    assert {"error", "ok"} <= set(ends)
    batch = pack(groups)
    assert batch is not None
    assert len(batch) == sum(status != "error" for status in ends)
    recipe = talk(environment=TextEnvironment(ScriptedObserver(always), TOKENIZER, 8))
    recipe._ahead.scorer = None
    with pytest.raises(
        InputError, match=r"no server; fix it, or the row \(turn 1 of prompt '.*'\); (\d+) of \1 samples end there"
    ):
        recipe._ahead.collected(0, quiet(0), lambda spent, more: True)


def test_a_step_ends_when_more_observations_have_failed_than_may_however_long_the_others_take() -> None:
    class Stuck:
        """Two observations fail, and the others never end."""

        begun = 0

        def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
            self.begun += 1
            failed = self.begun <= 2
            return Future(lambda: Failed("observe: no server"), lambda: failed)

        def wait(self, seconds: float) -> None:
            pass

    class Strict(Even):
        errors_max = 0.1

    recipe = talk(environment=Stuck(), scorer=Strict())
    line = r"no server \(turn 1 of prompt '.*'\); 2 completions of this step so far failed, at most 1 may \(reward_err"
    with pytest.raises(RewardError, match=line):
        recipe._ahead.collected(0, quiet(0), lambda spent, more, refuse: True)


def test_a_failure_of_a_lost_rank_does_not_count_when_the_sample_is_observed_again() -> None:
    class Once:
        """The first observation of each sample fails."""

        begun: ClassVar[list[int]] = []

        def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
            self.begun.append(int(sample.prompt[0]))
            failed = self.begun.count(int(sample.prompt[0])) == 1
            return Future(lambda: Failed("late") if failed else (5,), lambda: True)

        def wait(self, seconds: float) -> None:
            pass

    seen = Observations(Once())
    waiting = [OpenSample(key, 0, Trajectory.answer((key, 5), (7, 2), (-0.5, -0.5), truncated=False)) for key in (3, 4)]
    for sample in waiting:
        seen.begin(PROMPTS[0], sample)
    lost, told = seen.replies()
    seen.forget(lost)
    seen.refuse(1)
    for again in (waiting[0], waiting[1]):  # the rank of the second is lost after its reply
        seen.begin(PROMPTS[0], again)
        assert [reply.observed for reply in seen.replies()] == [(5,)]
    seen.refuse(0)
    assert told.fault
    assert seen.failures is None


def test_where_nobody_scores_a_failure_is_told_once() -> None:
    recipe, facts = talk(environment=TextEnvironment(ScriptedObserver(stumbles), TOKENIZER, 8)), list[Fact]()
    recipe._ahead.scorer = None
    for step in range(2):
        recipe._ahead._tell_failed("observe: it broke", 1, 3, Trace(facts.append, step))
    [note] = facts
    assert isinstance(note, Note)
    assert note.message.startswith("observe: it broke; 1 of 3 samples end there and are not trained on; later fail")


def test_a_sample_of_several_sequences_is_refused_by_name() -> None:
    one = Trajectory.answer((1, 5), (7, 2), (-0.5, -0.5), truncated=False)
    group = Group(4, (Sampled(0, (one,)), Sampled(1, (one, one))))
    with pytest.raises(InputError, match=r"sample 3\.4\.1 must be one sequence to be trained, got 2 sequences; build"):
        pack([ScoredGroup(PROMPTS[0], group, (Score(1.0), Score(0.0)), 3)])


def test_what_the_limit_cut_does_not_go_on() -> None:
    """There is no end after which somebody could speak."""
    asked: list[Trajectory] = []

    def always(sample: Trajectory) -> Observed:
        asked.append(sample)
        return SEEN

    recipe = talk(max_new_tokens=6, environment=Seen(always))
    report, samples = told(recipe, 0)
    assert asked
    assert not any(sample.truncated for sample in asked)
    whole = {tuple(sample.response.tolist()) for sample in asked}
    cut = [sample for sample in samples if sample.truncated and _seen_at(sample.tokens) is None]
    assert cut
    assert not whole & {tuple(sample.tokens) for sample in cut}
    assert 1 < report.metrics["turns/mean"] < 2


def test_turns_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[bool, set[int]] = {}
    begun: set[str] = set()
    submit = NativeRollout.submit

    def noted(engine: NativeRollout, work: Sequence[Generation]) -> None:
        for one in work:
            seeds.setdefault(one.session in begun, set()).add(one.sampling.seed)
            begun.add(one.session)
        submit(engine, work)

    monkeypatch.setattr(NativeRollout, "submit", noted)
    talk().step(0, quiet(0))
    first, second = (seeds[later] for later in (False, True))
    assert len(first) == len(second) == 1
    assert first != second


def test_audit_24_a_step_reports_what_the_engine_took_for_all_of_its_turns() -> None:
    """Each prompt once, and of a further turn the observation and the token before it, and nothing else."""
    recipe = talk()
    for step in range(2):
        report, samples = told(recipe, step)
        further = sum(_seen_at(sample.tokens) is not None for sample in samples)
        prompts = sum(map(len, {tuple(sample.prompt_tokens) for sample in samples}))
        assert further > 0
        assert report.took["rollout/prefilled_tokens"] == prompts + further * (len(SEEN) + 1)


def test_a_fault_of_a_further_turn_names_its_sample_and_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[Generation]] = []
    submit, completed = NativeRollout.submit, NativeRollout.completed

    def noted(engine: NativeRollout, work: Sequence[Generation]) -> None:
        asked.append(work)
        submit(engine, work)

    def twice(engine: NativeRollout, timeout: float) -> list[Completion]:
        found = completed(engine, timeout)
        return [*found, *found[-1:]] if len(asked) > 1 else found

    monkeypatch.setattr(NativeRollout, "submit", noted)
    monkeypatch.setattr(NativeRollout, "completed", twice)
    with pytest.raises(EngineError, match=r"got sample [012] of prompt [0-3] twice; fix the engine"):
        talk().step(0, quiet(0))
    first, *others = ({(one.key, one.sample) for one in work} for work in asked)
    assert set().union(*others) < first, "some go on, each by its own name"
    assert {key for key, _ in first} == {0, 1, 2, 3}


class Several(GroupBaseline[GroupConfig]):
    """A token mean over responses whose advantage is their score less the mean of the others' scores."""

    estimator: ClassVar[Any] = staticmethod(rloo)
    turns = 3

    @property
    def source(self) -> PromptSource:
        return replace(super().source, turns=self.turns, observed=len(SEEN))


def several(turns: int, source: Any, environment: Any, pool_of: Any = None, **changes: Any) -> OnPolicy:
    options: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 3, "prompts_per_step": 2, "group_size": 3, "max_new_tokens": 60,
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, max_grad_norm=1e9), **changes,
    }  # fmt: skip
    config = GroupConfig(**options)
    roles = open_roles(config, source, 11, pool_of or inline())
    algorithm = Several(config)
    algorithm.turns = turns
    return OnPolicy(config, algorithm, roles, PROMPTS, Even(), 11, environment=environment)


@pytest.mark.parametrize("turns", [2, 3])
def test_the_gradient_of_several_turns_is_that_of_their_responses(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64: −Σ A(response) ∇log π(token) over all sampled tokens of a step, divided by their number."""
    size = TINY.model_copy(update={"context_length": 400})
    recipe = several(turns, model := adopt_module(initial_model(size, TOKENIZER, 0)), Seen(lambda sample: SEEN))
    plain = copy.deepcopy(model.module).double()
    found: dict[str, torch.Tensor] = {}

    def kept(self: Any, *given: Any) -> None:
        found.update({name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None})

    monkeypatch.setattr(torch.optim.AdamW, "step", kept)
    groups: list[ScoredGroup] = []
    monkeypatch.setattr(recipe._ahead, "kept", groups.append)
    recipe.step(0, quiet(0))
    answers = [answer for group in groups for answer in group.answers]
    assert max(len(answer.turns) for answer in answers) == turns
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = [float((answer.response % 2 == 0).mean()) for answer in group.answers]
        for at, answer in enumerate(group.answers):
            others = [reward for other, reward in enumerate(rewards) if other != at]
            tokens, begin = [], []
            for segment in answer.segments:
                begin += [segment.source == "sampled"] * len(segment.tokens)
                tokens += segment.tokens.tolist()
            logits = plain(torch.tensor([tokens])).logits[0, :-1]
            logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
            loss = loss - (rewards[at] - sum(others) / len(others)) * logprobs[torch.tensor(begin[1:])].sum()
    (loss / sum(answer.generated for answer in answers)).backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert (found[name].double() - p.grad).norm() <= 1e-5 * p.grad.norm() + 1e-9, name


def test_thirty_two_turns_read_each_token_once() -> None:
    """About 128 tokens a turn, 19 of them sampled; with all earlier tokens read again, it would be 16 times as many."""
    size = TINY.model_copy(update={"context_length": 16384})
    seen = tuple(7 + at % 9 for at in range(109))
    asked: list[int] = []

    def see(sample: Trajectory) -> Observed:
        asked.append(len(sample.turns))
        return seen

    recipe = several(
        32,
        adopt_module(initial_model(size, TOKENIZER, 0)),
        Seen(see),
        max_new_tokens=400,
        prompts_per_step=1,
        group_size=2,
    )
    groups = recipe._ahead.collected(0, quiet(0), lambda spent, more, refuse: True)
    answers = [answer for group in groups for answer in group.answers]
    tokens = sum(map(len, answers))
    assert max(asked) == 31
    assert tokens > len(answers) * 32 * 100, "nearly all samples have all turns"
    counts = recipe._ahead.counts
    assert counts["prefilled_tokens"] + counts["decoded_tokens"] <= 1.1 * tokens
    assert recipe._ahead.spent == sum(group.tokens for group in groups) <= tokens


def test_an_ended_observation_is_forgotten() -> None:
    """Nobody waits while others are sampled: what was read must not stay until somebody does."""
    said = Trajectory.answer((1, 5), (7, 2), (-0.5, -0.5), truncated=False)
    environment = TextEnvironment(ScriptedObserver(lambda row, responses: "1"), TOKENIZER, 4)
    assert [environment.begin(prompt, said).result() for prompt in PROMPTS[:3]]
    assert not environment._running


class Afterwards(Even):
    """Scores when the rollout has ended."""

    def begin(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], stretch: Stretch) -> Future[Any]:
        scores = super().begin(prompts, trajectories, stretch)
        return Future(scores.result, lambda: False)


def test_a_step_reports_each_observation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped groups are replaced after the others have ended."""
    facts: list[Fact] = []
    begun: list[Trajectory] = []
    environment = Seen(lambda sample: (begun.append(sample), sometimes(sample))[1])
    recipe = several(2, adopt_module(initial_model(TINY, TOKENIZER, 0)), environment, max_new_tokens=20)
    source = recipe._algorithm.source
    monkeypatch.setattr(Several, "source", replace(source, refills=3))
    monkeypatch.setattr(Several, "keep", lambda self, group: Drop("it is odd") if group.group.key % 2 else None)
    recipe._ahead.buffer, recipe._ahead.scorer = Buffer(InOrder(0), source.prompts, 3, 3), Afterwards()
    recipe._ahead.collected(0, Trace(facts.append, 0), lambda spent, more, refuse: True)
    spans = [fact for fact in facts if isinstance(fact, Span)]
    assert [span.name for span in spans].count("rollout") == 2
    assert sum(span.attributes["observations"] for span in spans if span.name == "environment") == len(begun) > 0


def test_replies_to_turns_that_were_lost_are_ignored() -> None:
    """A process that takes the place of a lost one is sent a reply to a turn that it has not sampled, or has again."""
    sampling = SamplingParams(max_new_tokens=4, seed=3)
    talks = Conversations(2, 2, sampling)
    work = talks.begin([5], [Generation(f"0.0.{at}", (1, 5), 5, sampling, 4, at) for at in range(2)])
    assert [one.session for one in work] == ["5.0", "5.1"]
    early = Reply(5, 0, 1, (7,))
    assert talks.replied([early], 1) == []
    talks.take([(one, Trajectory.answer((1, 5), (8, 2), (-0.5, -0.5), truncated=False)) for one in work])
    groups, waiting, over = talks.passed()
    assert (groups, over, [(one.sample, one.turn) for one in waiting]) == ((), [], [(0, 1), (1, 1)])
    assert talks.replied([Reply(5, 0, 2, (7,))], 2) == [], "of a turn that is still to come"
    (asked,) = talks.replied([early, Reply(5, 1, 1, None, "it broke")], 3)
    assert (asked.tokens, asked.sample, asked.session) == ((1, 5, 8, 2, 7), 0, "5.0")
    assert talks.replied([early], 4) == [], "it was replied to"
    assert (talks.sampling, talks.passed()[2]) == (1, ["5.1"])
    talks.take([(asked, Trajectory.answer(asked.tokens, (9, 2), (-0.5, -0.5), truncated=False))])
    (group,), _, over = talks.passed()
    assert over == ["5.0"]
    assert [sample.last.status for sample in group.samples] == ["ok", "error"]
    assert group.samples[0].last.response.tolist() == [8, 2, 7, 9, 2]
    assert not talks.any


class Held:
    """An environment whose observations end in a drawn order, some while others are sampled."""

    def __init__(self, seed: int) -> None:
        self.dice, self.running, self.begun, self.most = random.Random(seed), set[int](), 0, 0

    def begin(self, prompt: Prompt, sample: Trajectory) -> Future[Observed]:
        number, self.begun = self.begun, self.begun + 1
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        found = None if sample.generated % 5 == 0 else (7, 8, 8 + len(sample.turns))

        def done() -> bool:
            if self.dice.random() < 0.1:
                self.running.discard(number)
            return number not in self.running

        return Future(lambda: found, done)

    def wait(self, seconds: float) -> None:
        if self.running:
            self.running.remove(self.dice.choice(sorted(self.running)))


@pytest.mark.parametrize("engine", ["native", "module"])
def test_whoever_is_observed_first_and_on_how_many_ranks_changes_no_bit(tmp_path: Path, engine: str) -> None:
    size = TINY.model_copy(update={"context_length": 400})
    initial_model(size, TOKENIZER, 0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    said: list[Any] = []
    for ranks, environment in ((1, Held(0)), (1, Held(1)), (2, Held(2))):
        pools = {"rollout": ResourcePool(InlineBackend(ranks, pool="rollout"))}
        one = ResourcePool(InlineBackend(pool="policy"))
        recipe = several(
            3, ModelSource(tmp_path, "float32"), environment, lambda r, pools=pools, one=one: pools.get(r, one),
            placement={"policy": {"cpus": 1}, "rollout": {"cpus": ranks, "ranks": ranks}}, rollout={"engine": engine},
        )  # fmt: skip
        groups = recipe._ahead.collected(0, quiet(0), lambda spent, more, refuse: True)
        said.append([(a.response.tolist(), a.logprobs.tolist()) for group in groups for a in group.answers])
        assert environment.most > 1, "several wait at a time"
        again = sum(group.read_again for group in groups)
        assert again > 0
        assert recipe._ahead.spent == sum(group.tokens for group in groups) + (again if engine == "module" else 0)
    assert said[0] == said[1]
    if engine == "native":
        assert said[0] == said[2]
    else:  # two ranks decode other batches
        assert [response for response, _ in said[2]] == [response for response, _ in said[0]]
