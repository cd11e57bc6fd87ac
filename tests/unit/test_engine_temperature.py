"""The temperature that a response was sampled at travels with it, and whoever learns from it divides by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled_batches import EXACT, responses
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Note, Sample
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import GRPOConfig, KLConfig, TraceConfig
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.loop.recipe import Held, read_held, write_held
from posttrain.engine.models import logprobs as logprobs_module
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.logprobs import likeliest_tokens, predict
from posttrain.engine.recipes.algorithm import Drop, PromptSource, ScoredGroup, pack, with_temperature
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.samples import Group, Sample as Row, Trajectory
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import StepReport, Trace
from posttrain.sandbox.port import Score

TEMPERATURES = (0.5, 1.0, 1.7)


class Hot(GRPO):  # type: ignore[misc]
    """Samples at another temperature than its stage's; after a dropped group at one more."""

    warmth = 1.7

    @property
    def source(self) -> PromptSource:
        return replace(super().source, temperature=self.warmth, refills=1)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return None


class Mixed(Hot):
    """Replaces its second group by one that is sampled at another temperature."""

    def keep(self, group: ScoredGroup) -> Drop | None:
        if group.group.key != 1:
            return None
        self.warmth = 0.6
        return Drop("to have two temperatures in a batch")


def told(algorithm: type[GRPO], steps: int = 2) -> tuple[StepReport, list[Any]]:
    config = GRPOConfig(
        data="d", reward="r", steps=3, prompts_per_step=3, group_size=4, max_new_tokens=8, mini_batches=1,
        kl=KLConfig(coefficient=0.1), trace=TraceConfig(groups="all"),
        optimizer=PolicyGradientOptimizerConfig(learning_rate=1e-3, warmup_steps=0),
    )  # fmt: skip
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    recipe = OnPolicy(config, algorithm(config), roles, PROMPTS, EvenTokens(), 11)
    facts: list[Any] = []
    reports = [recipe.step(step, Trace(facts.append, step)) for step in range(steps)]
    return reports[0], facts


@pytest.mark.parametrize("algorithm", [Hot, Mixed])
def test_audit_15_an_algorithm_that_samples_at_its_own_temperature_trains_with_the_right_ratio(
    algorithm: type[GRPO],
) -> None:
    """Before the first update the policy is the one that sampled, and the reference too: ratio 1, distance 0."""
    report, facts = told(algorithm)
    assert [fact.message for fact in facts if isinstance(fact, Note)] == []
    assert report.metrics["mismatch_kl"] < 1e-9
    assert abs(report.metrics["kl"]) < 1e-9
    samples = [fact for fact in facts if isinstance(fact, Sample) and fact.step == 0 and fact.logprobs]
    # a replacement that joins a call is sampled as the call; one of a later call at the temperature of then
    assert {1.7} <= {one.temperature for one in samples} <= ({0.6, 1.7} if algorithm is Mixed else {1.7})
    for one in samples:
        assert list(one.ratios) == pytest.approx([1.0] * len(one.tokens), abs=1e-4)
        assert list(one.logprobs) == pytest.approx(list(one.reference_logprobs), abs=1e-5)


def exact_model() -> LanguageModel:
    model = initial_model(TINY, TOKENIZER, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # so that the temperature matters
    return adopt_module(model)


def test_a_batch_without_temperatures_is_at_that_of_its_stage_whoever_scores_it() -> None:
    """As of an engine that reports none."""
    config = GRPOConfig(
        data="d", reward="r", steps=1, prompts_per_step=2, group_size=4, temperature=0.5, kl=KLConfig(coefficient=0.1)
    )
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    batch = TokenBatch.pack([Document([1, 5], [3, 4, 6]), Document([1, 5], [7, 3])])
    there = adopt_module(initial_model(TINY, TOKENIZER, 0))
    expected = logprobs_module.token_logprobs(there, batch, temperature=0.5)
    for filled in (
        roles.frozen["reference"].map(FrozenWorker.fill, batch, "reference_logprobs", "logprobs"),
        roles.learners["policy"].map(TrainWorker.fill, batch, "reference_logprobs", "logprobs"),
    ):
        found = responses(batch, filled.column("reference_logprobs"))
        for one, wanted in zip(found, responses(batch, expected), strict=True):
            assert one.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def mixed_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 20, (length,), generator=generator).tolist() for length in (4, 7, 5)]
    return TokenBatch.pack(
        [Document([1, 5], row, temperature=warmth) for row, warmth in zip(rows, TEMPERATURES, strict=True)]
    )


def reference(model: LanguageModel, batch: TokenBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Per document: the log-probabilities of its response and the entropies, straight from the logits."""
    found: list[Tensor] = []
    entropies: list[Tensor] = []
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    for end, length, warmth in zip(ends, batch.lengths, TEMPERATURES, strict=True):
        tokens = batch.tokens[end - length : end]
        distribution = (model.module(input_ids=tokens[None]).logits[0].double() / warmth).log_softmax(-1)
        found.append(distribution[1:-1].gather(1, tokens[2:, None])[:, 0])
        entropies.append(-(distribution[1:-1].exp() * distribution[1:-1]).sum(-1))
    return found, entropies


@pytest.mark.parametrize("chunked", [False, True])
def test_audit_15_documents_of_several_temperatures_are_their_own_float64_softmax(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, entropies, candidates and the gradient of the clipped loss, in one batch."""
    if chunked:
        monkeypatch.setattr(logprobs_module, "CHUNKED_ABOVE", 0)
        monkeypatch.setattr(logprobs_module, "chunk_rows", lambda vocabulary, hidden: 3)
    model, batch = exact_model(), mixed_batch()
    predicted = predict(model, batch, {"logprobs", "entropy"}, temperature=0.9)
    wanted, entropies = reference(model, batch)
    for found, exact in ((predicted.of("logprobs"), wanted), (predicted.of("entropy"), entropies)):
        assert torch.cat(responses(batch, found)).tolist() == pytest.approx(torch.cat(exact).tolist(), **EXACT)
    top = likeliest_tokens(model, batch, 2, 0.9)
    mine = top.logprobs[(batch.tokens[batch.response_mask] == top.ids[:, 0])]
    same = torch.cat(wanted)[(batch.tokens[batch.response_mask] == top.ids[:, 0])]
    assert mine[:, 0].tolist() == pytest.approx(same.tolist(), **EXACT)
    advantages = batch.spread(torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)).double()
    old = batch.spread(torch.zeros(3, dtype=torch.float64)).double()
    old[batch.response_mask] = torch.cat(wanted).detach() - 0.05
    ready = batch.with_columns(advantages=advantages, behaviour_logprobs=old)
    options = {"data": "d", "reward": "r", "steps": 1, "max_new_tokens": 9}
    loss = GRPO(GRPOConfig(**options)).objective(Totals.of(ready))(ready, predicted).loss
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(loss, parameters)
    expected = torch.zeros((), dtype=torch.float64)
    for new, advantage in zip(wanted, (1.0, -0.5, 2.0), strict=True):
        ratio = (new - new.detach() + 0.05).exp()
        expected = expected - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    exact_gradient = torch.autograd.grad(expected / int(batch.response_mask.sum()), parameters)
    for one, other in zip(gradient, exact_gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def group(key: int, warmth: float | None) -> ScoredGroup:
    answers = [Trajectory.answer((1, 5), [7, 2], [-0.5, -0.25], truncated=False, version="0.3") for _ in range(2)]
    rows = tuple(Row(i, (a if warmth is None else a.sampled_with(temperature=warmth),)) for i, a in enumerate(answers))
    return ScoredGroup(PROMPTS[key], Group(key, rows), (Score(1.0), Score(0.0)), 4)


def test_audit_15_a_checkpoint_keeps_the_temperature_and_one_of_an_older_version_has_none(tmp_path: Path) -> None:
    groups = [group(0, 0.7), group(1, 1.3)]
    write_held(tmp_path, [Held(one.group.key, 4, 3, one) for one in groups], [], {})

    def read() -> list[ScoredGroup]:
        return [held.group for held in read_held(tmp_path, lambda key: PROMPTS[key])[0]]

    packed = [pack(found) for found in (groups, read())]
    assert all(batch is not None and batch.column("temperature").tolist() == [0.7, 0.7, 1.3, 1.3] for batch in packed)
    kept = json.loads((tmp_path / "buffer.json").read_text())
    for one in kept["groups"]:
        for sample in one["samples"]:
            for sequence in sample:
                sequence["segments"] = [segment and segment[:3] for segment in sequence["segments"]]
    (tmp_path / "buffer.json").write_text(json.dumps(kept))
    older = pack(read())
    assert older is not None
    assert "temperature" not in older.document_columns


def test_audit_15_documents_formed_without_a_temperature_get_that_of_their_groups() -> None:
    def formed(groups: Sequence[ScoredGroup]) -> TokenBatch:
        return TokenBatch.pack([Document(a.prompt, a.response, a.logprobs) for g in groups for a in g.answers])

    groups = [group(0, 0.7), group(1, 0.7)]
    found = with_temperature(formed(groups), groups)
    assert found is not None
    assert found.column("temperature").tolist() == [0.7] * 4
    mixed = [group(0, 0.7), group(1, 1.3)]
    batch = formed(mixed)
    with pytest.raises(InputError, match=r"must each have a temperature, got \[0\.7, 1\.3\]"):
        with_temperature(batch, mixed)
    with pytest.raises(InputError, match="must be given for all 2 documents or for none, but is given for 1"):
        TokenBatch.pack([Document([1], [2], temperature=0.5), Document([1], [2])])
    with pytest.raises(InputError, match=r"the temperature of a document must be > 0, got 0\.0"):
        predict(exact_model(), TokenBatch.pack([Document([1], [2], temperature=0.0)]), {"logprobs"})
