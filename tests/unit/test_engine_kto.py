"""KTO against its paper in float64: reference point, loss and gradient, split and whole; what it learns and costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import pieces
from sampled_batches import responses
from test_engine_recipes import TINY, TOKENIZER, inline, quiet, run, same, weights
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Predictions, TokenBatch
from posttrain.engine.config import KTOConfig
from posttrain.engine.loop.controller import FromRows, open_learner
from posttrain.engine.loop.publication import Roles
from posttrain.engine.models.files import LabelledRow, initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.models.logprobs import predict
from posttrain.engine.recipes.kto import KTO
from posttrain.engine.settings import LossProbeConfig, OptimizerConfig, RuntimeConfig
from posttrain.execution.trainers.native import NativeTrainer

BETA, GOOD, BAD = 0.7, 1.5, 0.75
ROWS = [  # a desirable completion ends in 5, an undesirable one in 6; no two rows of a batch are alike
    LabelledRow((1, 2 + number % 3), (5 if number % 3 else 6,) * (1 + number % 4), number % 3 > 0)
    for number in range(12)
]


def config(**changes: Any) -> KTOConfig:
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=1)
    return KTOConfig(**{"data": "d", "steps": 5, "batch_size": 4, "optimizer": optimizer, **changes})


def opened(made: KTOConfig) -> FromRows[LabelledRow]:
    dtype = {"bfloat16": torch.bfloat16}.get(made.runtime.dtype, torch.float32)
    model = adopt_module(initial_model(TINY, TOKENIZER, 0).to(dtype))
    return FromRows(made, KTO(made), open_learner(made, model, 11, inline()), ROWS, 11, ROWS[:8])


def reference_point(rows: int, before: list[Tensor], anchor: list[Tensor]) -> float:
    """z₀ = max(0, mean of log π(y'|x) − log π_ref(y'|x)); the mismatched documents follow the rows."""
    return max(0.0, sum(float((a - b).sum()) for a, b in zip(before[rows:], anchor[rows:], strict=True)) / rows)


def paper(labels: list[bool], point: float, now: list[Tensor], anchor: list[Tensor]) -> Tensor:
    """arXiv 2402.01306, eq. 7: λ_y − v, mean over the rows, with v = λ_D·σ(β(r − z₀)) or λ_U·σ(β(z₀ − r))."""
    losses = []
    for label, a, b in zip(labels, now, anchor, strict=False):
        r = a.sum() - b.sum()
        value = GOOD / (1 + (-BETA * (r - point)).exp()) if label else BAD / (1 + (-BETA * (point - r)).exp())
        losses.append((GOOD if label else BAD) - value)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("moved", [0.3, -0.3], ids=["point above 0", "point is 0"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradient_are_those_of_the_paper_however_the_batch_is_split(dtype: torch.dtype, moved: float) -> None:
    exact = 1e-10 if dtype == torch.float64 else 1e-6
    generator = torch.Generator().manual_seed(0)
    algorithm = KTO(config(beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD))
    rows = ROWS[:5]
    batch = algorithm.form(rows, 0)
    anchor, before, now = (-torch.rand(len(batch.tokens), dtype=torch.float64, generator=generator) for _ in range(3))
    before = before + moved
    point = reference_point(5, responses(batch, before), responses(batch, anchor))
    assert (point > 0.05) == (moved > 0)
    wanted = now.clone().requires_grad_()
    expected = paper([row.label for row in rows], point, responses(batch, wanted), responses(batch, anchor))
    [slope] = torch.autograd.grad(expected, [wanted])
    columns = {"reference_logprobs": anchor.to(dtype), "proximal_logprobs": before.to(dtype)}
    for values in columns.values():
        values[~batch.response_mask] = math.nan  # what is not a response is never read
    ready = algorithm.credit(batch.with_columns(**columns))
    assert float(ready.column("point")[0]) == pytest.approx(point, rel=exact, abs=exact)
    logprobs = now.to(dtype).masked_fill(~batch.response_mask, math.nan).requires_grad_()
    [update] = algorithm.updates(0)
    trained = ready.select_items(update.computes(ready))
    for computed in (ready, trained):  # mismatched documents add nothing, computed or not
        totals = Totals.of(ready, computed, update.objective(Totals.ones()).denominators)
        assert totals.sums == {"labelled": 5.0}
        objective = update.objective(totals)
        own = logprobs if computed is ready else logprobs[: len(trained.tokens)]
        loss = objective(computed, Predictions(logprobs=own)).loss
        [gradient] = torch.autograd.grad(loss, [logprobs])
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)
        assert torch.allclose(gradient.double(), slope, rtol=10 * exact, atol=exact)
        split = [
            objective(micro, Predictions(logprobs=micro.column("own")))
            for micro in pieces(computed.with_columns(own=own.detach()), 9)
        ]
        assert len(split) > 2
        assert float(sum(part.loss for part in split)) == pytest.approx(float(expected.detach()), rel=exact, abs=exact)


def test_each_prompt_stands_once_more_with_the_next_completion_cut_to_the_longest_row() -> None:
    rows = [
        LabelledRow((1, 2, 3, 4), (5, 6), True),
        LabelledRow((1,), (6, 7, 8, 5), False),
        LabelledRow((9, 8), (7,), True),
    ]
    batch = KTO(config()).form(rows, 0)
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    documents = [batch.tokens[end - size : end].tolist() for end, size in zip(ends, batch.lengths, strict=True)]
    assert documents[:3] == [[1, 2, 3, 4, 5, 6], [1, 6, 7, 8, 5], [9, 8, 7]]
    assert documents[3:] == [[1, 2, 3, 4, 6, 7], [1, 7], [9, 8, 5, 6]], "the first is cut to 6 tokens"
    assert batch.response_lengths.tolist() == [2, 4, 1, 2, 1, 2]
    assert batch.column("label").tolist() == [1, -1, 1, 0, 0, 0]
    assert list(KTO(config()).updates(0)[0].computes(batch)) == [0, 1, 2]


def told(rows: list[LabelledRow], ratios: list[float], point: float) -> dict[str, float]:
    """The metrics of a batch of one-token responses whose log-ratios are `ratios`."""
    algorithm = KTO(config(beta=BETA))
    batch = algorithm.form(rows, 0)
    anchor = torch.full((len(batch.tokens),), -1.0)
    before = anchor + point
    ready = algorithm.credit(batch.with_columns(reference_logprobs=anchor, proximal_logprobs=before))
    gains = torch.tensor([*ratios, *[9.0] * len(rows)]).repeat_interleave(torch.tensor(batch.lengths))
    [update] = algorithm.updates(0)
    totals = Totals.of(ready, None, update.objective(Totals.ones()).denominators)
    parts = [
        update.objective(totals)(micro, Predictions(logprobs=micro.column("own")))
        for micro in pieces(ready.with_columns(own=anchor + gains), 3)
    ]
    return {name: float(sum(part.sums[name] for part in parts)) for name in parts[0].sums}


def test_metrics_are_means_over_the_rows_of_each_label() -> None:
    yes, no = LabelledRow((1,), (5,), True), LabelledRow((1,), (6,), False)
    found = told([yes, no, yes, yes], [0.25, -1.0, 0.5, 0.75], 0.125)
    assert found == pytest.approx(
        {"chosen": BETA * 0.5, "rejected": -BETA, "margin": BETA * 1.5, "reference_point": 0.125}
    )
    assert told([yes, yes], [0.25, 0.75], -1.0) == pytest.approx(
        {"chosen": BETA * 0.5, "rejected": 0.0, "margin": BETA * 0.5, "reference_point": 0.0}
    ), "a step may have rows of one label only"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_what_is_desirable_and_begins_at_the_reference(dtype: str) -> None:
    recipe = opened(config(steps=16, runtime=RuntimeConfig(dtype=dtype)))
    reports = [recipe.step(step, quiet(step)) for step in range(16)]
    first, last = reports[0].metrics, reports[-1].metrics
    assert first["loss"] == pytest.approx(0.5, abs=0.02), "the policy is its reference yet"
    assert first["reference_point"] == pytest.approx(0.0, abs=0.05)
    assert last["loss"] < 0.45
    assert last["margin"] > first["margin"] + 0.3
    assert last["chosen"] > last["rejected"]


def test_the_weights_after_a_step_are_the_same_in_small_micro_batches() -> None:
    """Also with a policy that has left its reference, so z₀ is not 0."""
    found: list[dict[str, Tensor]] = []
    for budget in (4096, 7):
        recipe = opened(config(beta=2.0, batch_size=6, runtime=RuntimeConfig(micro_batch_tokens=budget)))
        reports = [recipe.step(step, quiet(step)) for step in range(4)]
        assert max(report.metrics["reference_point"] for report in reports) > 0.01
        found.append(weights(recipe))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5)


def test_the_step_is_the_paper_on_the_models_own_log_probabilities() -> None:
    made = config(beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD, batch_size=6)
    recipe = opened(made)
    recipe.step(0, quiet(0))
    moved = initial_model(TINY, TOKENIZER, 0)
    moved.load_state_dict(
        {name.removeprefix("policy/"): value for name, value in weights(recipe).items()}, strict=False
    )
    policy, anchor = adopt_module(moved), adopt_module(initial_model(TINY, TOKENIZER, 0))
    rows = [ROWS[row] for row in recipe.journal.peek(6)]
    batch = KTO(made).form(rows, 0)
    now, old = (_logprobs(model, batch) for model in (policy, anchor))
    point = reference_point(6, now, old)
    expected = paper([row.label for row in rows], point, now, old)
    metrics = recipe.step(1, quiet(1)).metrics
    assert metrics["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert metrics["reference_point"] == pytest.approx(point, abs=1e-5)


def _logprobs(model: Any, batch: TokenBatch) -> list[Tensor]:
    with torch.no_grad():
        return responses(batch, predict(model, batch, frozenset({"logprobs"})).of("logprobs").double())


def test_resumed_equals_undisturbed(tmp_path: Path) -> None:
    whole = opened(config())
    expected = run(whole, tmp_path / "whole")
    assert run(opened(config()), tmp_path, stop_after=2).status == "stopped"
    again = opened(config())
    assert run(again, tmp_path / "again", resume=tmp_path / "step-00000002") == expected
    assert same(weights(again), weights(whole))


def test_a_step_costs_the_rows_that_it_trains_on() -> None:
    recipe = opened(config())
    rows = [ROWS[row] for row in recipe.journal.peek(4)]
    tokens = sum(len(row.prompt) + len(row.completion) for row in rows)
    assert recipe.max_tokens(0) == tokens == recipe.step(0, quiet(0)).tokens


def test_the_probe_is_the_objective_on_held_out_rows() -> None:
    made = config(probe=LossProbeConfig(data="p", every=1, items=8), keep_best=True)
    recipe = opened(made)
    before = recipe.probe(0, quiet(0))
    for step in range(5):
        recipe.step(step, quiet(step))
    after = recipe.probe(5, quiet(5))
    assert before is not None
    assert after is not None
    assert before.metrics["probe/loss"] == pytest.approx(0.5, abs=1e-4)
    assert before.metrics["probe/reference_point"] == pytest.approx(0.0, abs=1e-4)
    assert after.metrics["probe/loss"] < before.metrics["probe/loss"]
    assert after.metrics["probe/margin"] > 0.1
    assert (made.selects_by, made.lower_is_better) == ("probe/loss", True)


def test_without_a_reference_it_is_refused_before_anything_is_read() -> None:
    recipe, made = opened(config()), config()
    with pytest.raises(InputError, match="KTO needs the role reference for reference_logprobs"):
        FromRows(made, KTO(made), Roles(recipe.roles.learners), ROWS, 0)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"beta": 0}, "beta"),
        ({"desirable_weight": 0}, "desirable_weight"),
        ({"undesirable_weight": -1.0}, "undesirable_weight"),
        ({"loss": "apo"}, "loss"),
    ],
)
def test_fields_out_of_range_are_refused(params: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        NativeTrainer().check("kto", {"data": "d", "steps": 1, **params})


def test_a_plan_sizes_both_halves_of_a_batch_and_prices_the_rows() -> None:
    contract = NativeTrainer().check("kto", {"data": "d", "steps": 3, "batch_size": 8})
    assert contract.load is not None
    assert contract.load.documents == 16
    assert [role.name for role in contract.load.roles] == ["policy", "reference"]
    assert (contract.work["documents"], contract.work["least"]) == (24, 24)


def test_a_row_never_meets_itself_where_two_epochs_meet() -> None:
    a, b, c = ROWS[:3]
    own = [(row.prompt, row.completion) for row in (a, b, b, c)]
    batch = KTO(config(beta=BETA)).form([a, b, b, c], 0)
    found = list(zip(*([iter(batch.tokens.split(list(batch.lengths)))] * 1), strict=True))
    mismatched = [tuple(tokens.tolist()) for (tokens,) in found[4:]]
    assert len(mismatched) == 4
    assert not {(*prompt, *completion) for prompt, completion in own} & set(mismatched)
