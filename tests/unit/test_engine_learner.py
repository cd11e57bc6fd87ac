"""What a learner minimises, draws and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine_training import DOCUMENTS, LossOf, gpt2, mean_loss, sft, worker
from torch import Tensor

from posttrain.domain.errors import IntegrityError
from posttrain.engine.algorithms.objectives import (
    KLTerm,
    LossParts,
    PolicyObjective,
    Predictions,
    Totals,
    ValueObjective,
    corrected_kl_penalty,
)
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.settings import OptimizerConfig


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_applied_though_its_gradient_is_finite(odd: float) -> None:
    policy, batch = worker(sft()), TokenBatch.pack(DOCUMENTS)
    before = {name: p.clone() for name, p in policy.engine.learner.parameters().items()}

    def objective(micro: TokenBatch, logprobs: Tensor) -> LossParts:
        return LossParts(mean_loss(batch).function(micro, logprobs).loss + odd, {})

    update: Any = policy.update
    with pytest.raises(DivergedError, match="training diverged at step 1"):
        update(batch, LossOf(objective), step=0)
    assert all(torch.equal(p, before[name]) for name, p in policy.engine.learner.parameters().items())
    assert policy.engine.learner.moments() == {}


@pytest.mark.parametrize("odd", ["name", "shape"])
def test_parameters_of_another_model_are_refused(odd: str) -> None:
    learner = worker(sft()).engine.learner
    given = dict(learner.parameters())
    name = min(given)
    given[name if odd == "shape" else "nobody"] = torch.zeros(1)
    with pytest.raises(
        IntegrityError, match=r"checkpoint does not fit the model: parameter .* differs in name or shape"
    ):
        learner.restore(given, {})


def test_dropout_draws_anew_in_every_step_and_every_micro_batch() -> None:
    """Two equal documents, each a micro-batch of its own; weights that stand still."""
    still = OptimizerConfig(learning_rate=1e-12, warmup_steps=0)
    policy = worker(sft(gpt2(), optimizer=still, runtime={"micro_batch_tokens": 6}))
    batch = TokenBatch.pack([Document([1, 5, 8], [7, 9, 2])] * 2)
    seen: list[Tensor] = []

    def objective(micro: TokenBatch, logprobs: Tensor) -> LossParts:
        seen.append(logprobs.detach().clone())
        return mean_loss(batch).function(micro, logprobs)

    update: Any = policy.update
    for step in (0, 1, 0):
        update(batch, LossOf(objective), step=step)
    assert len(seen) == 6
    assert not torch.equal(seen[0], seen[1]), "of two micro-batches"
    assert not torch.equal(seen[0], seen[2]), "of two steps"
    assert torch.allclose(seen[0], seen[4], atol=1e-6), "the same step draws the same"


def scored() -> tuple[TokenBatch, Tensor, Tensor]:
    """A batch with columns, log-probabilities that the policy finds now, and where its responses are."""
    batch = TokenBatch.pack(DOCUMENTS)
    generator = torch.Generator().manual_seed(3)
    columns = {
        name: -torch.rand(len(batch.response_mask), generator=generator)
        for name in ("behaviour_logprobs", "reference_logprobs", "advantages", "values", "returns")
    }
    now = -torch.rand(len(batch.response_mask), generator=generator)
    return batch.with_columns(**columns), now, batch.response_mask


@pytest.mark.parametrize("coefficient", [0.05, 0.7])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_term_adds_its_coefficient_times_its_estimate(coefficient: float, estimator: str) -> None:
    batch, now, mask = scored()
    totals = Totals.of(batch)
    plain = PolicyObjective(totals, clip_low=0.2, clip_high=0.2)(batch, Predictions(logprobs=now)).loss
    term = KLTerm(coefficient, estimator)
    held = PolicyObjective(totals, clip_low=0.2, clip_high=0.2, kl=term)(batch, Predictions(logprobs=now))
    d = (batch.column("reference_logprobs").double() - now.double())[mask]
    mean = float((d.square() / 2 if estimator == "k2" else d.exp() - d - 1).mean())
    assert float(held.loss - plain) == pytest.approx(coefficient * mean, rel=1e-4)
    assert float(held.sums["kl"]) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("norm", [4, 9])
def test_dr_grpo_divides_by_its_norm(norm: int) -> None:
    batch, now, _ = scored()
    totals = Totals.of(batch)
    mean = PolicyObjective(totals, clip_low=0.2, clip_high=0.3)(batch, Predictions(logprobs=now)).loss
    summed = PolicyObjective(totals, clip_low=0.2, clip_high=0.3, aggregation="seq-mean-token-sum-norm", norm=norm)(
        batch, Predictions(logprobs=now)
    ).loss
    assert float(summed) == pytest.approx(float(mean) * totals.tokens / (totals.sequences * norm), rel=1e-5)


def test_the_clip_is_as_wide_upwards_as_it_is_told() -> None:
    batch, now, mask = scored()
    totals = Totals.of(batch)
    ratio = (now.double() - batch.column("behaviour_logprobs").double()).exp()
    gain = batch.with_columns(advantages=torch.ones_like(now))
    for low, high in ((0.2, 0.2), (0.2, 0.5), (0.05, 0.5)):
        loss = PolicyObjective(totals, clip_low=low, clip_high=high)(gain, Predictions(logprobs=now)).loss
        assert float(loss) == pytest.approx(-float(ratio.clamp(max=1 + high)[mask].mean()), rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.05, 0.3])
def test_a_value_moves_no_further_than_its_clip(clip: float | None) -> None:
    batch, now, mask = scored()
    old, wanted, new = (x.double()[mask] for x in (batch.column("values"), batch.column("returns"), now))
    error = (new - wanted).square()
    held = error if clip is None else torch.maximum(error, (new.clamp(old - clip, old + clip) - wanted).square())
    found = ValueObjective(Totals.of(batch), clip)(batch, Predictions(values=now))
    assert float(found.loss) == pytest.approx(0.5 * float(held.mean()), rel=1e-5)
    assert float(found.sums["clip_fraction"]) == pytest.approx(float((held > error).double().mean()), abs=1e-6)


def test_the_ratio_divides_by_the_proximal_policy_where_there_is_one() -> None:
    batch, now, _ = scored()
    proximal = batch.with_columns(proximal_logprobs=now)
    even = proximal.with_columns(advantages=torch.ones_like(now))
    assert float(PolicyObjective(Totals.of(batch), 0.2, 0.2)(even, Predictions(logprobs=now)).loss) == pytest.approx(
        -1.0
    )


def test_the_corrected_estimator_is_another_than_the_plain_one() -> None:
    batch, now, mask = scored()
    old, reference = batch.column("behaviour_logprobs"), batch.column("reference_logprobs")
    found = KLTerm(0.1, "k3-corrected").penalty(now, old, reference, mask)
    assert torch.equal(found, corrected_kl_penalty(now, old, reference, mask))
    assert not torch.allclose(found, KLTerm(0.1, "k3").penalty(now, old, reference, mask))
