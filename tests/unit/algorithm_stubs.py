"""Algorithms of the field, as far as a type checker sees them: what the protocol must hold before any is ported.

Each says where its numbers come from; none is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.engine.algorithms.advantages import generalized_advantages, whiten
from posttrain.engine.algorithms.objectives import (
    DistillationObjective,
    LossParts,
    PolicyObjective,
    Totals,
    ValueObjective,
    kl_rewards,
    token_weights,
)
from posttrain.engine.batch import CANDIDATES, Document, Need, Predictions, TokenBatch
from posttrain.engine.recipes.algorithm import (
    PROXIMAL,
    REFERENCE,
    VALUES,
    Column,
    Drop,
    PromptSource,
    RolloutAlgorithm,
    RowAlgorithm,
    RowSource,
    ScoredGroup,
    Update,
)

ONE, TWO, FOUR = (PromptSource(32, samples, 64) for samples in (1, 2, 4))
ROWS_OF_A_STEP = RowSource(64)


def packed(groups: Sequence[ScoredGroup], unit: int | None = None) -> TokenBatch:
    """Every sample, with its reward and its group as document columns."""
    documents = [sample.last.document for group in groups for sample in group.group.samples]
    rewards = torch.from_numpy(np.concatenate([group.rewards for group in groups]))
    number = torch.tensor([at for at, group in enumerate(groups) for _ in group.scores])
    return TokenBatch.pack(documents, unit=unit).with_document_columns(reward=rewards, group=number)


@dataclass(frozen=True)
class PPO(RolloutAlgorithm):
    """Four roles; the penalty in the reward (arXiv 1707.06347, 2203.02155)."""

    source: PromptSource = FOUR
    warmup: int = 0

    def requires(self, step: int) -> Sequence[Column]:
        return (VALUES, REFERENCE)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        return packed(groups)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        mask, old = batch.response_mask, batch.column("behaviour_logprobs")
        scores, reference = batch.column("reward"), batch.column("reference_logprobs")
        rewards = kl_rewards(old, reference, mask, scores, batch.lengths, coefficient=0.01)
        advantages, returns = generalized_advantages(rewards, batch.column("values"), mask, batch.lengths, 1.0, 0.95)
        return batch.with_columns(advantages=whiten(advantages, mask), returns=returns)

    def updates(self, step: int) -> Sequence[Update]:
        critic = Update("critic", partial(ValueObjective, clip=0.2), epochs=2, mini_batches=4)
        policy = Update("policy", partial(PolicyObjective, clip_low=0.2, clip_high=0.2), epochs=2, mini_batches=4)
        return (critic,) if step < self.warmup else (critic, policy)


@dataclass(frozen=True)
class VAPO(PPO):
    """Value pre-training, decoupled λ, clip-higher, a language-model loss on right answers (arXiv 2504.05118)."""

    pretraining: int = 50

    def credit(self, batch: TokenBatch) -> TokenBatch:
        mask, values = batch.response_mask, batch.column("values")
        ends = kl_rewards(values, values, mask, batch.column("reward"), batch.lengths, coefficient=0.0)
        _, returns = generalized_advantages(ends, values, mask, batch.lengths, 1.0, 1.0)
        decay = 1.0 - 1.0 / (0.05 * float(batch.response_lengths.float().mean()))
        advantages, _ = generalized_advantages(ends, values, mask, batch.lengths, 1.0, decay)
        right = batch.spread((batch.column("reward") > 0).float())
        return batch.with_columns(advantages=advantages, returns=returns, right=right)

    def updates(self, step: int) -> Sequence[Update]:
        critic = Update("critic", partial(ValueObjective, clip=0.2), mini_batches=4)
        return (critic,) if step < self.pretraining else (critic, Update("policy", RightAnswers, mini_batches=4))


@dataclass(frozen=True)
class RightAnswers:
    """Clip-higher, and the negative log-likelihood of what was right."""

    totals: Totals
    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
        surrogate = PolicyObjective(self.totals, clip_low=0.2, clip_high=0.28)(micro, predicted)
        weights = token_weights(micro, self.totals, "token-mean")
        likelihood = -(weights * micro.column("right") * predicted.of("logprobs")).sum()
        return LossParts(surrogate.loss + 0.1 * likelihood, {**surrogate.sums, "right_nll": likelihood.detach()})


@dataclass(frozen=True)
class FilteredPPO(PPO):
    """PF-PPO: the update sees the best and the worst of each group, drawn again by rank (arXiv 2409.06957)."""

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        batch = packed(groups)
        draws, chosen, start = np.random.default_rng(seed), [], 0
        for group in groups:
            order = np.argsort(group.rewards)
            weights = np.abs(np.linspace(-1, 1, len(order)))
            chosen += (start + order[draws.choice(len(order), len(order), p=weights / weights.sum())]).tolist()
            start += len(order)
        return batch.select(chosen)


@dataclass(frozen=True)
class Labelled:
    """A row of KTO: a completion somebody liked, or did not."""

    prompt: Sequence[int]
    completion: Sequence[int]
    liked: bool


@dataclass(frozen=True)
class KTO:
    """Unpaired labels against a reference point, the divergence on mismatched pairs (arXiv 2402.01306)."""

    source: RowSource = ROWS_OF_A_STEP
    beta: float = 0.1

    def max_tokens(self, row: Labelled) -> int:
        return 2 * (len(row.prompt) + len(row.completion))

    def requires(self, step: int) -> Sequence[Column]:
        return (REFERENCE, PROXIMAL)

    def form(self, rows: Sequence[Labelled], seed: int) -> TokenBatch:
        own = [Document(row.prompt, row.completion) for row in rows]
        others = [Document(row.prompt, rows[at - 1].completion) for at, row in enumerate(rows)]
        batch = TokenBatch.pack([*own, *others])
        labels = torch.tensor([1.0 if row.liked else -1.0 for row in rows] + [0.0] * len(rows))
        return batch.with_document_columns(label=labels)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        gains = batch.sum_by_document(batch.column("proximal_logprobs") - batch.column("reference_logprobs"))
        point = gains[batch.column("label") == 0].mean().clamp(min=0)
        return batch.with_document_columns(reference_point=point.expand(len(batch)))

    def updates(self, step: int) -> Sequence[Update]:
        def labelled(batch: TokenBatch) -> Sequence[int]:
            found: list[int] = batch.column("label").nonzero()[:, 0].tolist()
            return found

        return (Update("policy", partial(KTOObjective, beta=self.beta), computes=labelled),)


@dataclass(frozen=True)
class KTOObjective:
    """1 − σ(±β(gain − z)), mean over sequences."""

    totals: Totals
    beta: float
    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
        gain = micro.sum_by_document(predicted.of("logprobs") - micro.column("reference_logprobs"))
        margin = micro.column("label") * self.beta * (gain - micro.column("reference_point"))
        return LossParts((1 - margin.sigmoid()).sum() / max(self.totals.sequences, 1), {})


@dataclass(frozen=True)
class OnlineDPO(RolloutAlgorithm):
    """The best and the worst of each group are a pair (arXiv 2402.04792)."""

    source: PromptSource = TWO
    beta: float = 0.1

    def requires(self, step: int) -> Sequence[Column]:
        return (REFERENCE,)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return Drop("all rewards are equal") if np.ptp(group.rewards) == 0 else None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        pairs = [g.group.samples[int(at)] for g in groups for at in (g.rewards.argmax(), g.rewards.argmin())]
        return TokenBatch.pack([sample.last.document for sample in pairs], unit=2)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def updates(self, step: int) -> Sequence[Update]:
        return (Update("policy", partial(PairObjective, beta=self.beta)),)


@dataclass(frozen=True)
class PairObjective:
    """−log σ(β(Δ chosen − Δ rejected)), mean over pairs (DPO, arXiv 2305.18290)."""

    totals: Totals
    beta: float
    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions) -> LossParts:
        gain = micro.sum_by_document(predicted.of("logprobs") - micro.column("reference_logprobs"))
        loss = -F.logsigmoid(self.beta * (gain[0::2] - gain[1::2]))
        return LossParts(loss.sum() / max(self.totals.sequences // 2, 1), {})


@dataclass(frozen=True)
class Distillation(RolloutAlgorithm):
    """On the student's own responses, the teacher's likeliest tokens at every place (arXiv 2306.13649).

    What came of it is `posttrain.engine.recipes.distill`; the loss here is its own.
    """

    source: PromptSource = ONE

    def requires(self, step: int) -> Sequence[Column]:
        return (Column(CANDIDATES, "teacher", "topk", wide=64),)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        return packed(groups)

    def credit(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def updates(self, step: int) -> Sequence[Update]:
        return (Update("policy", partial(DistillationObjective, divergence="jsd", beta=0.5)),)


ROLLOUT: tuple[RolloutAlgorithm, ...] = (PPO(), VAPO(), FilteredPPO(), OnlineDPO(), Distillation())
ROWS: tuple[RowAlgorithm[Labelled], ...] = (KTO(),)
