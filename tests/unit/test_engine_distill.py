"""Distillation: its divergences against their definition in float64, and a student that learns from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batches import pieces
from guarded_pools import Guard, GuardedBackend
from hypothesis import given, settings, strategies as st
from sampled_batches import sampled
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, inline, quiet
from torch import Tensor

from posttrain.domain import roles as specs
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Fact, Sample, Span
from posttrain.engine.algorithms.objectives import DIVERGENCES, DistillationObjective, Totals, divergence, with_tail
from posttrain.engine.batch import Document, Predictions, TokenBatch
from posttrain.engine.config import DistillConfig, SFTConfig
from posttrain.engine.groups.port import Recorder
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import FromRows, open_learner, open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.publication import Roles
from posttrain.engine.loop.updates import Learning
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.recipes.algorithm import Column
from posttrain.engine.recipes.distill import Distill
from posttrain.engine.recipes.sft import SFT
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import OptimizerConfig
from posttrain.engine.trace import Trace
from posttrain.engine.wide import TopK, WideColumn

OPTIONS: dict[str, Any] = {
    "data": "d", "teacher": "t", "steps": 20, "prompts_per_step": 7, "group_size": 2, "max_new_tokens": 4, "top_k": 6,
    "optimizer": {"learning_rate": 2e-2, "warmup_steps": 0},
}  # fmt: skip


def config(**changes: Any) -> DistillConfig:
    return DistillConfig(**{**OPTIONS, **changes})


# --- the loss ---------------------------------------------------------------------------------------------------------


def distributions(rows: int = 5, words: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[R, V] probabilities of a teacher and a student, the teacher's sorted."""
    draws = np.random.default_rng(seed)
    teacher, student = (torch.from_numpy(draws.dirichlet(np.full(words, 0.5), rows)) for _ in range(2))
    return teacher.sort(-1, descending=True).values, student


def lumped(whole: Tensor, k: int) -> Tensor:
    return torch.cat([whole[:, :k], whole[:, k:].sum(-1, keepdim=True)], -1)


def by_definition(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    kl = lambda left, right: (left * (left / right).log()).sum(-1)  # noqa: E731
    mixed = beta * p + (1 - beta) * q
    every = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)}
    return every[kind]


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_divergence_and_its_gradient_are_those_of_the_definition(
    kind: str, beta: float, dtype: torch.dtype, close: float
) -> None:
    teacher, student = distributions()
    p, q = lumped(teacher, 4), lumped(student, 4)
    logits = student.log().clone().requires_grad_()
    wanted = by_definition(p, lumped(logits.softmax(-1), 4), kind, beta)
    (exact,) = torch.autograd.grad(wanted.sum(), [logits])
    own = student.log().to(dtype).requires_grad_()
    said = with_tail(own.log_softmax(-1)[:, :4])
    found = divergence(with_tail(teacher[:, :4].log().to(dtype)), said, kind, beta)
    assert float((found.detach().double() - wanted.detach()).abs().max()) <= close * float(wanted.detach().max())
    (gradient,) = torch.autograd.grad(found.sum(), [own])
    assert float((gradient.double() - exact).norm() / exact.norm()) <= close
    assert torch.allclose(said.detach().double().exp(), q, atol=1e-6)


@given(seed=st.integers(0, 500), k=st.integers(1, 12), beta=st.floats(0.01, 0.99), kind=st.sampled_from(DIVERGENCES))
@settings(max_examples=60, deadline=None)
def test_a_divergence_is_never_negative_nor_more_than_over_every_word(
    seed: int, k: int, beta: float, kind: str
) -> None:
    teacher, student = distributions(seed=seed)
    found = divergence(with_tail(teacher[:, :k].log()), with_tail(student[:, :k].log()), kind, beta)
    assert (found >= -1e-9).all()
    assert (found <= by_definition(teacher, student, kind, beta) + 1e-9).all()
    same = with_tail(teacher[:, :k].log())
    assert torch.allclose(divergence(same, same, kind, beta), torch.zeros(5, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_of_nothing_is_finite_and_so_is_its_gradient(kind: str, dtype: torch.dtype) -> None:
    """k is the whole vocabulary, or all of the probability."""
    sure = torch.tensor([[0.0, -200.0], [-0.5, -0.9327521]], dtype=dtype)
    student = sure.flip(1).clone().requires_grad_()
    found = divergence(with_tail(sure), with_tail(student), kind)
    (gradient,) = torch.autograd.grad(found.sum(), [student])
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()


def test_another_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match="divergence must be one of forward_kl, reverse_kl, jsd, got 'kl'"):
        divergence(torch.zeros(1, 2), torch.zeros(1, 2), "kl")


def taught(k: int = 3) -> tuple[TokenBatch, Tensor]:
    """A batch with a teacher's rows, and a student's log-probabilities of them."""
    found = sampled([3, 5, 0, 2, 4], [0.0] * 5, [0] * 5).batch
    counts = found.response_lengths.tolist()
    teacher, student = distributions(rows=sum(counts), seed=4)
    rows = TopK(torch.zeros(sum(counts), k, dtype=torch.int32), teacher[:, :k].log())
    starts = [sum(counts[:at]) for at in range(len(counts))]
    parts = tuple(rows.rows(start, start + count) for start, count in zip(starts, counts, strict=True))
    return found.with_wide("candidates", WideColumn(k, parts)), student[:, :k].log()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_loss_is_a_token_mean_however_the_batch_is_cut(kind: str) -> None:
    whole, student = taught()
    totals, logprobs = Totals.of(whole), whole.column("behaviour_logprobs").double()
    objective = DistillationObjective(totals, kind, 0.3)
    teacher = whole.wide("candidates").logprobs
    wanted = divergence(with_tail(teacher), with_tail(student), kind, 0.3).mean()
    parts = objective(whole, Predictions(logprobs, candidates=student))
    assert float(parts.loss) == pytest.approx(float(wanted), rel=1e-6)
    assert float(parts.sums["teacher_mass"]) == pytest.approx(float(teacher.exp().sum(-1).mean()), rel=1e-6)
    assert float(parts.sums["student_mass"]) == pytest.approx(float(student.exp().sum(-1).mean()), rel=1e-6)
    assert float(parts.sums["agreement"]) == pytest.approx(float((student.argmax(-1) == 0).double().mean()))
    assert float(parts.sums["mismatch_kl"]) == pytest.approx(0, abs=1e-12)
    numbered = torch.zeros(len(whole.tokens), dtype=torch.float64)
    numbered[whole.response_mask] = torch.arange(len(student), dtype=torch.float64)
    cut, again = whole.with_columns(row=numbered), torch.zeros((), dtype=torch.float64)
    for micro in pieces(cut, 7):
        rows = micro.column("row")[micro.response_mask].long()
        own = micro.column("behaviour_logprobs").double()
        again = again + objective(micro, Predictions(own, candidates=student[rows])).loss
    assert float(again) == pytest.approx(float(wanted), rel=1e-6)


# --- a student and its teacher ----------------------------------------------------------------------------------------

SAYS = {prompt.tokens[-1]: (7 + (prompt.tokens[-1] * 3) % 9, 7 + (prompt.tokens[-1] * 5) % 9, 2) for prompt in PROMPTS}


def teacher(steps: int = 60) -> LanguageModel:
    """One that learnt by demonstrations what to answer to each prompt."""
    size = TINY.model_copy(update={"hidden_size": 32, "intermediate_size": 32})
    model = adopt_module(initial_model(size, TOKENIZER, 5))
    made = SFTConfig(data="d", steps=steps, batch_size=7, optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=1))
    roles = open_learner(made, model, 3, inline())
    rows = [Document(prompt.tokens, SAYS[prompt.tokens[-1]]) for prompt in PROMPTS]
    recipe = FromRows(made, SFT(made), roles, rows, 3)
    for step in range(steps):
        recipe.step(step, quiet(step))
    return model


TEACHER = teacher()


def recipe(
    made: DistillConfig, pool_of: Callable[[str], ResourcePool] | None = None, taught_by: LanguageModel = TEACHER
) -> OnPolicy:
    student = adopt_module(initial_model(TINY, TOKENIZER, 0))
    roles = open_roles(made, student, 11, pool_of or inline(), sources={"teacher": taught_by})
    return OnPolicy(made, Distill(made), roles, PROMPTS, None, 11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_student_comes_to_say_what_its_teacher_says(kind: str) -> None:
    made = recipe(config(divergence=kind, steps=40, optimizer={"learning_rate": 3e-2, "warmup_steps": 0}))
    told = [made.step(step, quiet(step)).metrics for step in range(40)]
    last = {name: sum(metrics[name] for metrics in told[-5:]) / 5 for name in ("loss", "agreement")}
    assert last["loss"] < 0.6 * told[0]["loss"], kind
    assert last["agreement"] > told[0]["agreement"] + 0.25
    assert all(metrics["mismatch_kl"] < 1e-9 for metrics in told)
    assert all(0 < metrics["teacher_mass"] <= 1 + 1e-6 for metrics in told)


def test_it_is_the_same_step_however_it_is_cut_and_wherever_its_teacher_stands() -> None:
    def weights(made: OnPolicy) -> dict[str, Tensor]:
        made.step(0, quiet(0))
        (found,) = made.roles.made.each(_weights)
        return found

    whole = weights(recipe(config()))
    small = weights(recipe(config(runtime={"micro_batch_tokens": 12})))
    guard = Guard()
    pools = {"policy": ResourcePool(GuardedBackend(guard)), "teacher": ResourcePool(GuardedBackend(guard, 3))}
    homes = lambda role: pools.get(role, pools["policy"])  # noqa: E731
    apart = weights(recipe(config(), homes))
    fetched = guard.fetched
    stretches = weights(recipe(config(runtime={"micro_batch_tokens": 12}), homes))  # of a step, each with its parts
    assert guard.fetched - fetched > fetched
    for other in (small, apart, stretches):
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, atol=1e-5, rtol=0)


def _weights(worker: TrainWorker) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in worker.engine.model.module.named_parameters()}


def test_the_controller_never_holds_the_teachers_tokens() -> None:
    """Two mini-batches, a trace of every sample, and a teacher of two ranks: only who learns fetches."""
    guard, facts, recorder = Guard(), list[Fact](), Recorder()
    recorder.sink = facts.append
    shape = {"policy": 1, "teacher": 2}
    pools = {role: ResourcePool(GuardedBackend(guard, ranks, role), recorder) for role, ranks in shape.items()}
    made = recipe(config(mini_batches=2, trace={"groups": "all"}), lambda role: pools.get(role, pools["policy"]))
    made.step(0, Trace(facts.append, 0))
    assert guard.fetched == 4, "both parts for each mini-batch"
    calls = [fact.attributes["method"] for fact in facts if isinstance(fact, Span) and "method" in fact.attributes]
    assert calls.count("hold") == 1
    (columns,) = [fact for fact in facts if isinstance(fact, Span) and fact.name == "columns"]
    assert columns.attributes["columns"] == ["candidates"]
    samples = [fact for fact in facts if isinstance(fact, Sample)]
    assert len(samples) == 14
    assert all(sample.fate.startswith("update 0") and len(sample.logprobs) == len(sample.tokens) for sample in samples)


def test_a_teacher_whose_output_is_padded_names_no_token_that_the_student_lacks() -> None:
    size = TINY.model_copy(update={"characters": TINY.characters + "xyz"})
    module = initial_model(size, TOKENIZER, 5)
    module.config.vocab_size = len(TINY.characters) + 7
    module.resize_token_embeddings(len(TINY.characters) + 10)
    wider = adopt_module(module)
    assert wider.vocab_size == len(TINY.characters) + 10
    k = len(TINY.characters) + 7
    recipe(config(top_k=k, steps=1), taught_by=wider).step(0, quiet(0))
    with pytest.raises(InputError, match=rf"top_k must be from 1 to {k}, the size of the vocabulary, got {k + 1}"):
        recipe(config(top_k=k + 1, steps=1), taught_by=wider).step(0, quiet(0))


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (Column("candidates", "policy", "topk", wide=2), "from a frozen role, got policy, which is trained"),
        (Column("candidates", "teacher", "topk"), "of topk, got wide=0; set wide to 1 or more"),
        (Column("more", "teacher", "logprobs", wide=2), "of logprobs, got wide=2; set wide to 1 or more"),
        (Column("candidates", "tutor", "topk", wide=2), "needs the role tutor for candidates"),
    ],
)
def test_a_wide_column_that_nobody_can_fill_is_refused_before_anything_is_sampled(column: Column, told: str) -> None:
    made = config()
    roles = open_roles(
        made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline(), sources={"teacher": TEACHER}
    )
    algorithm = Distill(made)
    algorithm.requires = lambda step: (column,)  # type: ignore[method-assign]
    with pytest.raises(InputError, match=told):
        Learning(algorithm, roles, 2, 1)


def test_one_that_nobody_required_is_one_line() -> None:
    made = config()
    roles = open_roles(
        made, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline(), sources={"teacher": TEACHER}
    )
    algorithm = Distill(made)
    algorithm.requires = lambda step: ()  # type: ignore[method-assign]
    without = Roles(roles.learners, {}, roles.rollout)
    with pytest.raises(InputError, match="the batch must have a wide column candidates, got none"):
        OnPolicy(made, algorithm, without, PROMPTS, None, 11).step(0, quiet(0))


# --- what a stage may say ---------------------------------------------------------------------------------------------


def test_a_teacher_is_a_role_and_an_input_and_its_tokens_count() -> None:
    made = config(reward="r")
    assert made.roles() == (specs.POLICY, replace(specs.TEACHER, wide=48), specs.ROLLOUT, specs.REWARD)
    assert made.inputs()["teacher"] == ("model", "t")
    assert not config().has("reward")
    assert (made.documents, config(mini_batches=3).documents) == (14, 5)
    assert Distill(made).requires(0) == (Column("candidates", "teacher", "topk", wide=6),)
    objective = Distill(config(divergence="jsd", beta=0.2)).objective(Totals(1, 1, 1, 1))
    assert (objective.divergence, objective.beta) == ("jsd", 0.2)
    assert Distill(config(divergence="jsd")).objective(Totals(1, 1, 1, 1)).beta == 0.5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"beta": 0.3}, "beta requires divergence: jsd, got beta 0.3 with forward_kl; remove beta"),
        ({"divergence": "jsd", "beta": 1.0}, "less than 1"),
        ({"top_k": 0}, "greater than or equal to 1"),
        ({"lag": {"steps": 1}}, "Extra inputs are not permitted"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config(**changes)


def test_the_row_of_a_teacher_is_required() -> None:
    with pytest.raises(ValueError, match="teacher"):
        DistillConfig(**{name: value for name, value in OPTIONS.items() if name != "teacher"})
