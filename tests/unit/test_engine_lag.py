"""Sampling ahead of training: the same bits whatever comes late, a stop in between, and what a lag is refused for."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from admission_policies import Few
from late_calls import Late, LateScorer
from safetensors.numpy import load_file
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk, FixedScorer, even_tokens, stop_after
from torch import Tensor

from posttrain.domain.errors import BudgetExceededError, InputError, IntegrityError
from posttrain.domain.jobs import Metric, Note, Sample, Span
from posttrain.domain.kinds import OWN, WRITTEN
from posttrain.engine.algorithms.objectives import KLTerm, PolicyObjective, Totals
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.config import GRPOConfig, OnPolicyConfig, TraceConfig, named
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import Limits, open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.pipeline import Collector
from posttrain.engine.models.files import ModelSource, ScalarSource, initial_model
from posttrain.engine.recipes.algorithm import PROXIMAL
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import Completion
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.pacing.admission import AdmissionPolicy, Buffer, InOrder, Pace

TOGETHER = {"policy": {"cpus": 1}}
APART = {"policy": {"cpus": 1}, "rollout": {"cpus": 1}}
THREE = {**APART, "reference": {"cpus": 1}}
FOUR = {**THREE, "critic": {"cpus": 1}}
LATE: list[Late] = []  # of the recipes that were made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelSource(folder, "float32")


def rarely_right(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float | None]:
    """So most groups are dropped."""
    return [float(trajectory.response[0] % 16 == 1) for trajectory in trajectories]


def recipe(
    model: ModelSource,
    kind: str = "grpo",
    seed: int | None = None,
    scores: Any = even_tokens,
    admission: AdmissionPolicy | None = None,
    **changes: Any,
) -> OnPolicy:
    """Of a stage whose calls are late where there is a seed."""
    options: dict[str, Any] = {
        "data": "d", "reward": "r", "steps": 5, "prompts_per_step": 3, "group_size": 4, "max_new_tokens": 4,
        "mini_batches": 2, "placement": APART, "trace": TraceConfig(groups="all"),
        "optimizer": PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=2), **changes,
    }  # fmt: skip
    spec = OWN[kind].algorithm
    assert spec
    config = named(spec.config)(**options)
    pools: dict[str, ResourcePool] = {}
    for at, name in enumerate(options["placement"]):
        backend = InlineBackend(pool=name)
        pools[name] = ResourcePool(backend)
        if seed is not None:
            LATE.append(Late(backend, seed + at))
    critic = ScalarSource(model.folder, "float32") if "critic" in {role.name for role in config.roles()} else None
    roles = open_roles(config, model, 11, lambda role: pools.get(role, pools["policy"]), sources={"critic": critic})
    algorithm = named(spec.algorithm)(config)
    return OnPolicy(config, algorithm, roles, PROMPTS, LateScorer(scores, seed), 11, phase=kind, admission=admission)


def weights(desk: Desk) -> dict[str, Tensor]:
    return desk.weights()


def told(desk: Desk) -> list[dict[str, float]]:
    """Metrics of every step, without times and memory."""
    unsure = ("tokens_per_second", "memory/")
    facts = [fact for fact in desk.facts if isinstance(fact, Metric)]
    return [{k: v for k, v in fact.values.items() if not k.startswith(unsure)} for fact in facts]


STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "dapo": ("dapo", {}),
    "grpo with a penalty": ("grpo", {"placement": THREE, "kl": {"coefficient": 0.1}}),
    "grpo, gradients as they come": ("grpo", {"stream_gradients": True, "mini_batches": 1}),
    "ppo, corrected": (
        "ppo",
        {"placement": FOUR, "critic": {"warmup": 1}, "lag": {"steps": 0, "correction": "decoupled"}},
    ),
    "ppo": ("ppo", {"placement": FOUR, "kl": {"coefficient": 0.1}, "critic": {"warmup": 1}}),
    "ppo, penalty in the loss": (
        "ppo",
        {"placement": FOUR, "kl": {"coefficient": 0.1, "place": "loss", "estimator": "k3"}, "ppo_epochs": 2},
    ),
}


AT_0 = {"stream_gradients", "lag"}  # a stage that says these is one of lag 0


FAST = {"dapo", "grpo, gradients as they come", "ppo"}  # each a way of its own; the others vary them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "lag"),
    [
        pytest.param(stage, lag, marks=pytest.mark.slow if lag == 1 or stage not in FAST else ())
        for stage, (_, said) in STAGES.items()
        for lag in (0, 1, 2)
        if not (lag and AT_0 & said.keys())
    ],
)
def test_late_calls_change_no_bit(model: ModelSource, tmp_path: Path, stage: str, lag: int) -> None:
    """Calls, stored answers, streams and scores, of every role, at moments drawn at random."""
    kind, changes = STAGES[stage]
    options = {**changes, **({"lag": {"steps": lag}} if lag else {})}
    desk = Desk(tmp_path / "at once", recipe(model, kind, **options))
    outcome = desk.run()
    LATE.clear()
    for seed in range(3):
        other = Desk(tmp_path / f"{seed}", recipe(model, kind, seed=seed, **options))
        assert other.run().tokens == outcome.tokens
        assert all(torch.equal(value, weights(other)[name]) for name, value in weights(desk).items())
        assert told(other) == told(desk)
    counts = Counter[str]()
    for one in LATE:
        counts.update(one.counts)
    assert counts["calls"] > 20
    assert counts["streams"] >= 15
    assert counts["nothing"] > 10


@pytest.mark.parametrize("kind", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_another_admission_policy_drives_the_same_loop(model: ModelSource, tmp_path: Path, kind: str, lag: int) -> None:
    """Two prompts at once: several calls for a batch, the same samples; over a stop and with late calls as well."""
    options: dict[str, Any] = {"lag": {"steps": lag}} if lag else {}
    few = {"admission": Few(lag, 2), **options}
    desk = Desk(tmp_path / "few", recipe(model, kind, **few))
    desk.run()
    calls = [fact for fact in desk.facts if isinstance(fact, Span) and fact.name == "rollout"]
    assert len(calls) > 5, "a batch of three prompts takes two calls at least"
    all_at_once = Desk(tmp_path / "all", recipe(model, kind, **options))
    all_at_once.run()
    assert all(torch.equal(value, weights(desk)[name]) for name, value in weights(all_at_once).items())
    Desk(tmp_path / "cut", recipe(model, kind, **few), orders=stop_after(2)).run()
    rest = Desk(tmp_path / "cut", recipe(model, kind, seed=3, **few))
    rest.controller.resume(rest.latest())
    rest.run()
    assert all(torch.equal(value, weights(rest)[name]) for name, value in weights(desk).items())


def test_an_admission_policy_keeps_the_lag_of_its_stage(model: ModelSource) -> None:
    with pytest.raises(InputError, match=r"Few must keep the lag of its stage \(1\), got 2"):
        recipe(model, lag={"steps": 1}, admission=Few(2, 2))


def test_an_admission_policy_that_starts_nothing_ends_the_stage(model: ModelSource, tmp_path: Path) -> None:
    class Idle(Few):
        def admit(self, pace: Pace) -> tuple[int, int]:
            return pace.step, 0

    with pytest.raises(InputError, match="policy version 0 is too old to sample batch 0; publish newer weights"):
        Desk(tmp_path, recipe(model, admission=Idle(0, 2))).run()


def test_an_admission_policy_without_room_for_a_batch_is_refused_before_anything_is_sampled(model: ModelSource) -> None:
    class Narrow(Few):
        def capacity(self, prompts: int) -> int:
            return 2

    with pytest.raises(InputError, match=r"Narrow must have room for a whole batch \(3 groups\), got a capacity of 2"):
        recipe(model, admission=Narrow(0, 2))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_batch_is_of_one_version(model: ModelSource, tmp_path: Path, lag: int) -> None:
    desk = Desk(tmp_path, recipe(model, lag={"steps": lag} if lag else None))
    desk.run()
    seen: dict[int, set[str]] = {}
    for fact in desk.facts:
        if isinstance(fact, Sample):
            seen.setdefault(fact.step, set()).update(fact.versions)
    assert seen == {step: {f"0.{max(0, step - lag)}"} for step in range(5)}


@pytest.mark.parametrize("kind", [pytest.param("grpo", marks=pytest.mark.slow), "dapo"])
@pytest.mark.parametrize("cut", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_stopped_and_resumed_equals_undisturbed(model: ModelSource, tmp_path: Path, kind: str, cut: int) -> None:
    """What waits is in the checkpoint: weights that are gone could not sample it again."""
    whole = Desk(tmp_path / "whole", recipe(model, kind, lag={"steps": 2}))
    expected = whole.run()
    first = Desk(tmp_path / "cut", recipe(model, kind, lag={"steps": 2}), orders=stop_after(cut))
    assert first.run().status == "stopped"
    second = Desk(tmp_path / "cut", recipe(model, kind, lag={"steps": 2}))
    second.controller.resume(first.latest())
    outcome = second.run()
    assert (outcome.tokens, outcome.steps) == (expected.tokens, expected.steps)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(whole).items())
    assert [*told(first), *told(second)] == told(whole)


def test_the_corrections_say_how_far_the_policies_are_apart(model: ModelSource, tmp_path: Path) -> None:
    found = {}
    for correction in ("tis", "decoupled", "bypass"):
        cap = {"cap": 1.0001} if correction == "tis" else {}
        desk = Desk(tmp_path / correction, recipe(model, lag={"steps": 2, "correction": correction, **cap}))
        desk.run()
        found[correction] = (told(desk), weights(desk))
    ess = [metrics["lag/ess"] for metrics in found["tis"][0]]
    assert ess[0] == pytest.approx(1.0, abs=1e-6), "nothing was trained yet"
    assert all(0 < value < 1 - 1e-6 for value in ess[1:])
    assert found["tis"][0][0]["lag/kl"] == pytest.approx(0.0, abs=1e-9)
    assert "lag/ess" not in found["bypass"][0][0], "nobody asks the policy of the step's beginning"
    ends = [torch.cat([value.flatten() for value in end.values()]) for _, end in found.values()]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


def test_a_rollout_that_reads_the_policys_memory_cannot_be_behind(model: ModelSource) -> None:
    with pytest.raises(ValueError, match="lag needs separate pools for the policy and the rollout"):
        recipe(model, lag={"steps": 1}, placement="collocated")
    config = GRPOConfig(data="d", reward="r", steps=2, placement=APART, lag={"steps": 1})
    pool = ResourcePool(InlineBackend())
    roles = open_roles(config, model, 11, lambda role: pool)
    with pytest.raises(InputError, match="lag 1 needs a rollout with its own weights"):
        OnPolicy(config, GRPO(config), roles, PROMPTS, FixedScorer(even_tokens), 11)


def test_the_price_covers_what_every_step_spends(model: ModelSource, tmp_path: Path) -> None:
    made = recipe(model, lag={"steps": 2})
    prices = []
    real = made.step

    def step(number: int, *rest: Any) -> Any:
        price = made.max_tokens(number)
        report = real(number, *rest)
        prices.append((price, report.tokens))
        return report

    made.step = step  # type: ignore[method-assign]
    Desk(tmp_path, made).run()
    assert len(prices) == 5
    assert all(price >= spent for price, spent in prices)
    assert prices[0][1] > 2 * prices[2][1] > 0, "the first step samples three batches"
    assert prices[3][1] < prices[2][1] / 2 + prices[2][1], "the last ones sample nothing"


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, *(pytest.param(lag, marks=pytest.mark.slow) for lag in (1, 2))])
def test_no_budget_is_passed_and_what_it_ended_goes_on(model: ModelSource, tmp_path: Path, lag: int) -> None:
    """Wherever it ends: in what the step samples for itself, or in what it samples ahead."""
    options: dict[str, Any] = {"scores": rarely_right, **({"lag": {"steps": lag}} if lag else {})}
    whole = Desk(tmp_path / "whole", recipe(model, "dapo", **options))
    needed, ended = whole.run().tokens, set[str]()
    first = recipe(model, "dapo", **options).max_tokens(0)  # which leaves nothing for replacements
    for limit in (first, *range(needed // 5 + 7, needed + 400, needed // 5)):
        desk = Desk(tmp_path / f"{limit}", recipe(model, "dapo", **options), limits=Limits(tokens=limit))
        try:
            desk.run()
            ended.add("well")
        except BudgetExceededError as error:
            ended.add("replacing" if "replacing" in str(error) else "the next step")
        assert desk.controller.tokens <= limit
        again = Desk(tmp_path / f"{limit}", recipe(model, "dapo", **options))
        again.controller.resume(again.latest())
        assert again.run().steps == 5
        exact = [*told(desk), *told(again)] == told(whole)
        assert exact or lag, "nothing was sampled ahead"
        places = sampled_in(desk), sampled_in(again)
        for step in places[0].keys() & places[1].keys():
            assert places[0][step] == places[1][step], "a step that is done again samples no prompt twice"
        found = [place for each in ({**places[0], **places[1]}).values() for place in each]
        assert len(found) == len(set(found)), "no prompt is sampled for two steps"
    assert {"replacing", "the next step"} <= ended


def sampled_in(desk: Desk) -> dict[int, set[int]]:
    """Step → the positions in the data stream that were sampled for it, trained or dropped."""
    found: dict[int, set[int]] = {}
    for fact in desk.facts:
        if isinstance(fact, Sample):
            found.setdefault(fact.step, set()).add(int(fact.id.split(".")[1]))
    return found


SAMPLED = [
    kind
    for kind in WRITTEN
    if kind != "gspo" and (spec := OWN[kind].algorithm) and issubclass(named(spec.config), OnPolicyConfig)
]  # gspo has no weights of tokens: test_engine_surrogates.py


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize(
    ("correction", "cap", "asks"), [("tis", 1.5, True), ("decoupled", math.inf, True), ("bypass", None, False)]
)
def test_every_kind_that_samples_corrects(kind: str, correction: str, cap: float | None, asks: bool) -> None:
    spec = OWN[kind].algorithm
    assert spec
    options = {"data": "d", "reward": "r", "steps": 99, "placement": APART, "group_size": 4}
    lag = {"lag": {"steps": 1, "correction": correction, **({"cap": 1.5} if correction == "tis" else {})}}
    made = named(spec.config)
    config = made(**{name: value for name, value in {**options, **lag}.items() if name in made.model_fields})
    algorithm = named(spec.algorithm)(config)
    assert algorithm.objective(Totals(1, 1, 1, 1)).importance == cap
    assert (PROXIMAL in algorithm.requires(0)) == asks


@pytest.mark.parametrize("correction", ["tis", "decoupled"])
def test_with_lag_0_there_is_next_to_nothing_to_correct(model: ModelSource, tmp_path: Path, correction: str) -> None:
    """In one pool or in two, in float32, rollout and training say the same of the same weights."""
    plain = Desk(tmp_path / "plain", recipe(model))
    plain.run()
    for name, placement in (("apart", APART), ("together", TOGETHER)):
        lag = {"steps": 0, "correction": correction}
        desk = Desk(tmp_path / name, recipe(model, lag=lag, placement=placement))
        desk.run()
        for metrics in (each for each in told(desk) if "lag/ess" in each):
            assert metrics["lag/ess"] == pytest.approx(1, abs=1e-6)
            assert metrics["lag/kl"] < 1e-9
        assert sum("lag/ess" in each for each in told(desk)) == 5
        for key, value in weights(plain).items():
            torch.testing.assert_close(weights(desk)[key], value, atol=2e-3, rtol=0)


def test_in_half_precision_there_is_something_to_correct(model: ModelSource, tmp_path: Path) -> None:
    """Training and rollout round their hidden states differently: the same weights, other log-probabilities."""
    half = ModelSource(model.folder, "bfloat16")
    lag = {"steps": 0, "cap": 1.5}
    desk = Desk(tmp_path, recipe(half, lag=lag, placement=TOGETHER, runtime={"dtype": "bfloat16"}))
    desk.run()
    found = [each for each in told(desk) if "lag/ess" in each]
    assert len(found) == 5
    for metrics in found:
        assert 0 < metrics["lag/kl"] < 5e-3
        assert 0.95 < metrics["lag/ess"] < 1
        assert math.isfinite(metrics["loss"])


def test_what_an_engine_reports_wrongly_is_corrected_with_lag_0(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is twice as likely as the engine says: each weighs more, none is clipped."""

    desks = dict[str, Desk]()

    def first(name: str, **changes: Any) -> dict[str, float]:
        desks[name] = desk = Desk(tmp_path / name, recipe(model, mini_batches=1, placement=TOGETHER, **changes))
        desk.run()
        return next(told(desk)[at] for at in range(5) if "loss" in told(desk)[at])

    right, real = first("right"), NativeRollout.completed

    def halved(engine: NativeRollout, timeout: float) -> list[Completion]:
        def less(answer: Trajectory) -> Trajectory:
            *before, said = answer.segments
            assert said.logprobs is not None
            return replace(answer, segments=(*before, replace(said, logprobs=said.logprobs - np.float32(math.log(2)))))

        return [replace(one, trajectory=less(one.trajectory)) for one in real(engine, timeout)]

    monkeypatch.setattr(NativeRollout, "completed", halved)
    uncorrected = first("uncorrected")
    capped = first("capped", lag={"steps": 0, "cap": 1.5})
    whole = first("whole", lag={"steps": 0, "correction": "decoupled"})
    assert (
        right["clip_fraction"] == capped["clip_fraction"] == whole["clip_fraction"] == 0 < uncorrected["clip_fraction"]
    )
    assert right["loss"] != 0
    assert capped["loss"] == pytest.approx(1.5 * right["loss"], rel=1e-4)
    assert whole["loss"] == pytest.approx(2 * right["loss"], rel=1e-4)
    assert whole["lag/kl"] == pytest.approx(1 - math.log(2), rel=1e-4)
    assert whole["lag/ess"] == pytest.approx(1, abs=1e-6)
    for name, says in (("right", False), ("uncorrected", True), ("capped", True), ("whole", True)):
        notes = [fact.message for fact in desks[name].facts if isinstance(fact, Note)]
        assert any("must be those of the rollout that sampled" in note for note in notes) is says, name


def test_a_trace_divides_by_what_the_loss_divides_by(model: ModelSource, tmp_path: Path) -> None:
    """The first mini-batch finds the policy of the step's beginning: nothing moved, so nothing is clipped."""
    desk = Desk(tmp_path, recipe(model, lag={"steps": 2}, clip_low=0.01, clip_high=0.01))
    desk.run()
    first = [fact for fact in desk.facts if isinstance(fact, Sample) and fact.fate.endswith("mini-batch 0")]
    assert {sample.step for sample in first} >= {3, 4}
    for sample in first:
        assert sample.ratios == pytest.approx([1.0] * len(sample.ratios), abs=1e-5)
        assert not any(sample.clipped)
    assert any(abs(a - b) > 1e-3 for s in first for a, b in zip(s.logprobs, s.behaviour_logprobs, strict=True))


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-corrected"])
def test_a_penalty_is_weighed_as_what_was_sampled(estimator: str) -> None:
    """Over the whole vocabulary of one token: weighed, its mean is that of the policy which the step began with."""
    generator = torch.Generator().manual_seed(3)
    sampled, began, anchor, now = (torch.randn(6, generator=generator).double().log_softmax(0) for _ in range(4))
    token = torch.arange(6)
    mask = torch.ones(6, dtype=torch.bool)
    term = KLTerm(1.0, estimator)  # type: ignore[arg-type]
    weights = (began - sampled).exp()
    found = (sampled.exp() * weights * term.penalty(now, began, anchor, mask)).sum()
    direct = (began.exp() * term.penalty(now, began, anchor, mask)).sum()
    assert float(found) == pytest.approx(float(direct), rel=1e-9)
    columns = {"behaviour_logprobs": sampled, "proximal_logprobs": began, "reference_logprobs": anchor}
    batch = TokenBatch.pack([Document((0,), (int(t),), np.zeros(1, dtype=np.float32)) for t in token])
    spread = {name: torch.stack([torch.zeros(6).double(), value], 1).flatten() for name, value in columns.items()}
    batch = batch.with_columns(**spread, advantages=torch.zeros(12).double())
    given = torch.stack([torch.zeros(6).double(), now], 1).flatten()
    for cap in (None, math.inf, 0.5):
        objective = PolicyObjective(Totals.of(batch), 0.2, 0.2, kl=term, importance=cap)
        weight = torch.ones(6).double() if cap is None else weights.clamp(max=cap)
        expected = (weight * term.penalty(now, began, anchor, mask)).sum() / 6
        assert float(objective(batch, Predictions(logprobs=given)).loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "placed", "role"),
    [
        ("grpo", {"reference": {"with": "rollout"}}, "reference"),
        ("grpo", {"reward_model": {"with": "rollout"}}, "reward_model"),
    ],
)
def test_who_works_beside_the_rollout_works_elsewhere(kind: str, placed: dict[str, Any], role: str) -> None:
    judge = {"reward_model": "judge"} if role == "reward_model" else {"reward": "r", "kl": {"coefficient": 0.1}}
    with pytest.raises(ValueError, match=rf"whose pool has no other roles, got {role} in the rollout's pool rollout"):
        GRPOConfig(data="d", steps=2, placement={**APART, **placed}, lag={"steps": 1}, **judge)


def test_an_algorithm_that_asks_for_no_proximal_policy_cannot_correct(model: ModelSource) -> None:
    made = recipe(model, lag={"steps": 1})
    config = GRPOConfig(data="d", reward="r", steps=2, placement=APART, lag={"steps": 1})

    class Forgetful(GRPO):  # type: ignore[misc]
        def requires(self, step: int) -> Sequence[Any]:
            return ()

    with pytest.raises(InputError, match="Forgetful must require proximal_logprobs for the correction tis"):
        OnPolicy(config, Forgetful(config), made.roles, PROMPTS, FixedScorer(even_tokens), 11)


def test_a_prompt_waits_once_for_all_its_samples(model: ModelSource, tmp_path: Path) -> None:
    desk = Desk(tmp_path, recipe(model, lag={"steps": 1}), orders=stop_after(2))
    desk.run()
    held = json.loads((desk.latest() / "buffer.json").read_text())["groups"]
    places = [segment for group in held for sample in group["samples"] for one in sample for segment in one["segments"]]
    prompts = [segment for segment in places if segment is None or segment[0] == "prompt"]
    assert len(prompts) > len(held) > 0
    assert sum(segment is not None for segment in prompts) == len(held)
    kept = load_file(desk.latest() / "buffer.safetensors")["tokens"]
    assert len(kept) == sum(size for segment in places if segment for size in [segment[1]])


@pytest.mark.parametrize("name", ["buffer.json", "buffer.safetensors"])
def test_a_checkpoint_says_what_waited(model: ModelSource, tmp_path: Path, name: str) -> None:
    desk = Desk(tmp_path, recipe(model, lag={"steps": 1}), orders=stop_after(2))
    desk.run()
    commit = desk.latest() / "COMMIT"
    listed = json.loads(commit.read_text())
    (desk.latest() / name).unlink()
    with pytest.raises(IntegrityError, match=name):
        Desk(tmp_path, recipe(model, lag={"steps": 1})).controller.resume(desk.latest())
    shards = next(value for value in listed.values() if isinstance(value, dict) and name in value)
    del shards[name]
    commit.write_text(json.dumps(listed))
    with pytest.raises(IntegrityError, match=r"COMMIT|lacks"):
        Desk(tmp_path, recipe(model, lag={"steps": 1})).controller.resume(desk.latest())


@pytest.mark.parametrize(
    ("lag", "words"),
    [
        (
            {"steps": 0, "correction": "bypass"},
            r"lag\.correction must be tis or decoupled with lag\.steps: 0, got bypass",
        ),
        ({"steps": 5}, r"lag\.steps must be less than steps \(5\), got 5"),
        ({"correction": "decoupled", "cap": 3}, "cap requires correction: tis, got cap 3 with decoupled; remove cap"),
        ({"correction": "bypass", "cap": 2.5}, r"cap requires correction: tis, got cap 2\.5 with bypass; remove cap"),
    ],
)
def test_what_a_lag_cannot_be(lag: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GRPOConfig(data="d", reward="r", steps=5, placement=APART, lag=lag)


def test_what_is_missing_is_neither_running_nor_there_nor_given_up() -> None:
    buffer: Buffer[Any] = Buffer(InOrder(1), prompts=3, steps=3)
    nothing: Any = None
    ahead = Collector(nothing, nothing, (), None, 0, nothing, buffer)
    assert ahead.missing(0) == 6, "of this batch and the one that may be sampled ahead"
    buffer.start((0, 1, 2), 0, 0)
    assert ahead.missing(0) == 3
    buffer.complete(0, "a group")
    buffer.drop(1)
    assert ahead.missing(0) == 3, "its place stays empty"
    buffer.start((3, 4), 1, 0)
    assert ahead.missing(0) == 1
    assert ahead.missing(1) == 1
    ahead.version = 1
    assert ahead.missing(1) == 4, "the weights let one more batch begin"
