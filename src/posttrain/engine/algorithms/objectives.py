"""Losses and rewards per token, objectives of an optimiser step, token weights, and the distillation loss.

An objective is the loss that the step minimises: an object that contains the step's totals and is called once per
micro-batch. Objectives are data, not closures, so they can be sent to ranks in other processes. Each call returns the
plain sum of its micro-batch's weighted losses; the sum over micro-batches and ranks is the loss of the whole step.

Per-token losses are aggregated so that gradients do not depend on how a batch is split. A mean inside each micro-batch
would make a token's weight depend on the other tokens of its micro-batch. Here every token gets its weight from totals
of the whole optimiser step, and a micro-batch's loss is the plain sum Σ weight·loss: every split has the same total
loss and gradient. Only response tokens count; prompts never enter a denominator. The caller that counts the totals
decides whether the totals include documents that are not computed. If they do, a document whose loss is zero may be
dropped without changing the result (`recipes.grpo`).

The distillation loss measures how far a student is from a teacher, over the teacher's likeliest tokens. At every
response token the vocabulary is split into k + 1 outcomes: the teacher's k likeliest tokens, and all others together,
the tail. Both models are proper distributions over these outcomes, so a divergence is never negative, and is 0 only
where the distributions agree. By the data processing inequality it is at most the divergence over the whole
vocabulary. Source: generalised knowledge distillation, Agarwal et al., arXiv 2306.13649, section 3.

Functions for losses and rewards per token take `[T]` tensors of a packed batch and a mask. They return `[T]`, 0 outside
the mask.

Inputs are masked *before* any non-linear step, so that neither the value nor the gradient of a masked token can leak,
not even a NaN (0 · NaN is NaN). The objective decides how tokens are summed.

A token's reward consists of the part of the score earned at that token (usually the whole score, at the last token) and
possibly a penalty for deviating from the reference. The penalty is in the reward or in the loss, never in both. In the
reward the penalty is a number without gradient. The natural estimator there is k1, which is unbiased and was the
original choice of PPO from human feedback. In the loss the expected gradient of k1 is zero (see `kl_penalty`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.batch import CANDIDATES, Need, Predictions, TokenBatch, precision

LOG_RATIO_LIMIT = 20.0  # e^20 ≈ 5e8: beyond it a ratio is meaningless, and float32 would overflow soon after
REWARD_ESTIMATORS = ("k1", "k2", "k3")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def negative_log_likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return −log π(token), the loss of supervised fine-tuning."""
    return torch.where(mask, -logprobs, 0.0)


def log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return log π − log π_reference, clamped to ±20; 0 outside the mask."""
    zero = logprobs.new_zeros(())
    return (torch.where(mask, logprobs, zero) - torch.where(mask, reference, zero)).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


def ppo_clip(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)) with ρ = exp(log π − log μ).

    Args:
        logprobs: log-probabilities under the current policy, differentiable.
        behaviour: log-probabilities recorded when the tokens were sampled, at the same temperature. They are the
            denominator of ρ; there is no second importance weight.
        advantages: one value per token, constant over a response.
        mask: response tokens.
        clip_low, clip_high: ε_low and ε_high; different values give clip-higher.

    Source: PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, eq. 10.
    """
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio(logprobs, behaviour, mask).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.where(mask, torch.maximum(-advantages * ratio, -advantages * clipped), 0.0)


def is_clipped(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the response tokens whose gradient the clip removed, `[T]` bool."""
    ratio = log_ratio(logprobs.detach(), behaviour, mask).exp()
    return mask & (((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low)))


def kl_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token: k2 = d²/2, k3 = e^d − d − 1, with d = log π_ref − log π.

    Both estimates are non-negative. As a loss over tokens that π sampled, k2 has the gradient of KL(π ‖ π_ref) in
    expectation. k3 has the gradient of KL(π_ref ‖ π), although its value estimates KL(π ‖ π_ref);
    `corrected_kl_penalty` has the value and the gradient of KL(π ‖ π_ref). k1 = −d has zero expected gradient as a loss
    and is not offered.
    Source: Schulman, "Approximating KL divergence" (2020).

    Raises:
        KeyError: an unknown estimator.
    """
    d = -log_ratio(logprobs, reference, mask)
    return {"k2": lambda: d.square() / 2, "k3": lambda: d.expm1() - d}[estimator]()


def corrected_kl_penalty(logprobs: Tensor, behaviour: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return ρ·(e^d − d − 1) with ρ = exp(log π − log μ); the gradient includes the gradient of ρ.

    Over tokens that μ sampled, the expected value is KL(π ‖ π_ref) and the expected gradient is that of KL(π ‖ π_ref),
    even after π has moved away from μ. Arguments: see `ppo_clip` and `kl_penalty`.

    Source: DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`.
    """
    return log_ratio(logprobs, behaviour, mask).exp() * kl_penalty(logprobs, reference, mask, "k3")


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Return ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²), or ½·(V − R)² without a clip.

    The larger of the two errors counts: a value that moved further than ε towards its return gets no gradient; a value
    that moved away from its return gets the full gradient. The factor ½ makes the gradient V − R.

    Args:
        values: the critic's values, differentiable.
        old_values: the critic's values before the update, from which advantages and returns were estimated.
        returns: A + V_old (`advantages.generalized_advantages`).
        mask: response tokens.
        clip: ε, in units of the value.

    Source: PPO2 of OpenAI baselines; Engstrom et al., arXiv 2005.12729, section 3.
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns.detach()))
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (torch.clamp(values, old_values - clip, old_values + clip) - returns).square())
    return 0.5 * error


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Return the response tokens whose gradient the clip of `clipped_value_loss` removed, `[T]` bool."""
    if clip is None:
        return torch.zeros_like(mask)
    values, old_values, returns = (torch.where(mask, x.detach(), 0.0) for x in (values, old_values, returns))
    held = torch.clamp(values, old_values - clip, old_values + clip)
    return mask & (held != values) & ((held - returns).square() > (values - returns).square())


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Return −log σ(r_chosen − r_rejected − m), the loss of a reward model, one value per pair.

    Args:
        chosen, rejected: [pairs] scores, differentiable.
        margin: [pairs] m, the required lead of the chosen score; None: 0 (Llama 2, arXiv 2307.09288, eq. 2).

    Returns:
        [pairs]. Only differences between scores are learnt: a constant added to all scores does not change the loss.

    Source: Bradley and Terry (1952); InstructGPT, arXiv 2203.02155, eq. 1.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def score_rewards(scores: Tensor, mask: Tensor, lengths: Sequence[int], token_scores: Tensor | None = None) -> Tensor:
    """Put every document's score at its last response token, except the parts earned at earlier tokens.

    Args:
        scores: [documents]; the score of a document without response tokens is dropped.
        mask: [T] bool, response tokens.
        lengths: [documents], sum = T.
        token_scores: [T], the part of each score earned at each token, e.g. at the ends of turns; None: the whole score
            is earned at the last token.

    Returns:
        [T] in the dtype that `precision` returns, 0 at all other tokens; the sum over a document is its score.

    Raises:
        ValueError: a wrong shape; a score that is not finite (a missing score does not count as 0, so the caller must
        drop a response without a score); a token score outside the mask.
    """
    if scores.shape != (len(lengths),):
        raise ValueError(
            f"scores must have shape [{len(lengths)}], got {list(scores.shape)}; give one score per document"
        )
    if not bool(scores.isfinite().all()):
        first = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"scores must be finite, got {scores[first].item()} at document {first}; drop the document first"
        )
    index = mask.nonzero()[:, 0]
    document = torch.arange(len(lengths), device=mask.device).repeat_interleave(
        torch.tensor(lengths, device=mask.device)
    )[index]
    ends = torch.ones_like(document, dtype=torch.bool)
    ends[:-1] = document[1:] != document[:-1]
    given = (scores,) if token_scores is None else (scores, token_scores)
    rewards = torch.zeros(len(mask), dtype=precision(*given), device=mask.device)
    last, scores = index[ends], scores.detach().to(mask.device)
    if token_scores is None:
        return rewards.index_copy(0, last, scores.to(rewards.dtype)[document[ends]])
    if bool(token_scores[~mask].any()):
        first = int((token_scores.masked_fill(mask, 0)).nonzero()[0])
        raise ValueError(f"token scores must belong to response tokens, got a score at token {first}; move the score")
    earned = token_scores.detach().double()[index]
    rest = scores.double().index_add(0, document, -earned)
    rewards[index] = earned.to(rewards.dtype)
    return rewards.index_add(0, last, rest.to(rewards.dtype)[document[ends]])


def kl_rewards(
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    scores: Tensor,
    lengths: Sequence[int],
    token_scores: Tensor | None = None,
    *,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """Return r_t = −β·kl_t + the part of the score earned at t.

    Args:
        old_logprobs: [T], log-probabilities under the policy that sampled, at the sampling temperature.
        reference_logprobs: [T], log-probabilities under the frozen reference, at the same temperature.
        mask: [T] bool, response tokens; values outside are not read, NaN included.
        scores, lengths, token_scores: see `score_rewards`.
        coefficient: β.
        estimator: k1, k2 or k3 (see `kl_estimate`).

    Returns:
        [T] without gradient, in the dtype that `precision` returns, 0 outside the mask.

    Raises:
        ValueError: see `score_rewards` and `kl_estimate`.

    Source: InstructGPT, arXiv 2203.02155, eq. 2; Ziegler et al., arXiv 1909.08593, section 2.
    """
    penalty = kl_estimate(old_logprobs.detach(), reference_logprobs.detach(), mask, estimator)
    rewards = score_rewards(scores, mask, lengths, token_scores)
    return rewards - coefficient * penalty.to(precision(rewards, penalty))


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token from one sample: k1 = −d, k2 = d²/2, k3 = e^d − d − 1 (d = log π_ref − log π).

    The estimate is a value, not a loss. d is clamped to ±20. k1 and k3 are unbiased; k1 may be negative.

    Returns:
        [T], 0 outside the mask. Source: Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator not in REWARD_ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(REWARD_ESTIMATORS)}, got {estimator!r}")
    if estimator == "k1":
        return log_ratio(logprobs, reference, mask)
    return kl_penalty(logprobs, reference, mask, estimator)


# aggregation → the total by which `token_weights` divides
DENOMINATORS: dict[str, str] = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
}
COUNTS = ("tokens", "sequences", "items")


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts of one optimiser step: `Totals(tokens=1832, sequences=96, items=96, computed=1832)`.

    Losses are divided by the counts of all documents, computed or not; metrics are means over computed tokens.
    """

    tokens: int  # response tokens
    sequences: int  # documents with at least one response token
    items: int  # units, or documents in a batch without units
    computed: int  # response tokens of documents with a gradient
    sums: Mapping[str, float] = field(default_factory=dict)  # column → its sum, if an objective divides by it

    @classmethod
    def of(cls, batch: TokenBatch, computed: TokenBatch | None = None, denominators: Iterable[str] = COUNTS) -> Totals:
        """Count a whole mini-batch, before it is split.

        Args:
            computed: the documents that have a gradient; None: all.
            denominators: see `Objective.denominators`.

        Raises:
            InputError: the batch lacks a column that is a denominator.
        """
        lengths = batch.response_lengths
        tokens = int(lengths.sum())
        part = tokens if computed is None else int(computed.response_mask.sum())
        sums = {name: batch.total(name) for name in denominators if name not in COUNTS}
        return cls(tokens, int((lengths > 0).sum()), len(batch.item_lengths), part, sums)

    @classmethod
    def ones(cls, denominators: Iterable[str] = COUNTS) -> Totals:
        """Return totals with which a loss is a plain sum."""
        return cls(1, 1, 1, 1, {name: 1.0 for name in denominators if name not in COUNTS})

    def divisor(self, name: str) -> float:
        """Return the total of this name: at least 1 for a count; 1 for a column whose sum is 0, so its term is 0."""
        return max(getattr(self, name), 1) if name in COUNTS else self.sums[name] or 1.0


def token_weights(
    batch: TokenBatch, totals: Totals, mode: str, *, norm: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the weight of every token in the loss of the whole step, `[T]`; 0 outside the response.

    ::

        token-mean               1 / tokens                         DAPO, arXiv 2503.14476
        seq-mean-token-mean      1 / (sequences · response length)  GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm  1 / (sequences · norm)             Dr. GRPO, arXiv 2503.20783

    Args:
        batch: the micro-batch.
        totals: the counts of the whole step.
        norm: the constant length of Dr. GRPO, in tokens (the generation limit).
        dtype: the dtype of the weights, which equals the dtype of the loss (`precision`).

    Raises:
        ValueError: an unknown mode.
    """
    mask = batch.response_mask
    if mode == "token-mean":
        return mask.to(dtype) / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return mask.to(dtype) / (max(totals.sequences, 1) * norm)
    if mode == "seq-mean-token-mean":
        each = 1.0 / (batch.response_lengths.clamp(min=1) * max(totals.sequences, 1)).to(dtype)
        return torch.where(mask, each[batch.document_index], 0.0)
    raise ValueError(f"aggregation must be one of {', '.join(MODES)}, got {mode!r}")


@dataclass(frozen=True, slots=True)
class LossParts:
    """A micro-batch's shares of the step's loss and metrics: `LossParts(loss, {"clip_fraction": tensor(.01)})`.

    Every sum is already divided by the step's totals: the shares of all micro-batches add up to the metric.
    """

    loss: Tensor  # scalar, differentiable
    sums: Mapping[str, Tensor]  # scalars without gradient


class Objective(Protocol):
    """A loss over a model's predictions on a micro-batch."""

    @property
    def needs(self) -> frozenset[Need]:
        """The names of the predictions that the objective reads."""

    @property
    def denominators(self) -> frozenset[str]:
        """The totals that divide the terms of the loss: `tokens`, `sequences`, `items`, or a column of `credit`.

        A column is summed over the response tokens, or the documents, of the whole mini-batch.
        """

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """Return the micro-batch's share of the step's loss.

        Raises:
            InputError: the batch lacks a column that the loss reads.
        """


@final
@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """−log π(completion | prompt), token mean over the step."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})
    totals: Totals

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        logprobs = predicted.of("logprobs")
        weights = token_weights(micro, self.totals, "token-mean", dtype=precision(logprobs))
        return LossParts((weights * negative_log_likelihood(logprobs, micro.response_mask)).sum(), {})


@final
@dataclass(frozen=True, slots=True)
class KLTerm:
    """A penalty in the loss against the frozen reference: `KLTerm(0.05, "k3")`."""

    coefficient: float
    estimator: str  # k2, k3 (`kl_penalty`) or k3-corrected (`corrected_kl_penalty`)

    def penalty(self, logprobs: Tensor, behaviour: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """Return the penalty, [T], without the coefficient; 0 outside the mask."""
        if self.estimator == "k3-corrected":
            return corrected_kl_penalty(logprobs, behaviour, reference, mask)
        return kl_penalty(logprobs, reference, mask, self.estimator)


def token_clip(micro: TokenBatch, logprobs: Tensor, old: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token (`ppo_clip`), and the clipped tokens, both [T]."""
    mask, advantages = micro.response_mask, micro.column("advantages")
    clip = {"clip_low": low, "clip_high": high}
    return ppo_clip(logprobs, old, advantages, mask, **clip), is_clipped(logprobs, old, advantages, mask, **clip)


def sequence_clip(micro: TokenBatch, logprobs: Tensor, old: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each response at each of its tokens, and the tokens of clipped responses, both [T].

    The loss is max(−A·s, −A·clip(s, 1 − ε_low, 1 + ε_high)) with s = exp(mean over tokens of log π − log π_old). With
    the aggregation seq-mean-token-mean, the step's loss is the mean over responses. Source: GSPO, arXiv 2507.18071,
    eq. 5.
    """
    mask = micro.response_mask
    advantages = torch.where(mask, micro.column("advantages"), 0.0)
    mean = micro.sum_by_document(log_ratio(logprobs, old, mask)) / micro.response_lengths.clamp(min=1)
    ratio = mean.exp()[micro.document_index]
    held = ratio.clamp(1.0 - low, 1.0 + high)
    clipped = ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))
    return torch.where(mask, torch.maximum(-advantages * ratio, -advantages * held), 0.0), mask & clipped


def weight_clip(micro: TokenBatch, logprobs: Tensor, old: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return −sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π of each token, and the tokens with a clipped weight, both [T].

    No token loses its gradient: the clip limits only the token's weight, through which no gradient flows (sg). Source:
    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    mask = micro.response_mask
    advantages = torch.where(mask, micro.column("advantages"), 0.0)
    ratio = log_ratio(logprobs.detach(), old, mask).exp()
    held = ratio.clamp(1.0 - low, 1.0 + high)
    return -held * advantages * torch.where(mask, logprobs, 0.0), mask & (held != ratio)


SURROGATES = {"token": token_clip, "sequence": sequence_clip, "weight": weight_clip}


@final
@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The clipped surrogate of PPO with clip-higher, and an optional KL term.

    ρ = exp(log π − log π_old), where π_old is the proximal policy if the batch has its log-probabilities, and otherwise
    the behaviour policy. With a proximal policy and `importance` set, tokens are also weighted by π_proximal /
    π_behaviour, truncated at `importance`. Source: PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476; decoupled: arXiv
    2110.00641.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    totals: Totals
    clip_low: float
    clip_high: float
    aggregation: str = "token-mean"
    norm: int = 1  # tokens; the constant length of seq-mean-token-sum-norm
    kl: KLTerm | None = None
    importance: float | None = None  # cap of the token weights π_proximal / π_behaviour; None: no weights
    surrogate: str = "token"  # of `SURROGATES`: the clip of a token's ratio, of a response's ratio, or of a weight
    imitation: float = 0.0  # weight of the mean of −log π over the tokens that the column `positive` marks with 1

    @property
    def denominators(self) -> frozenset[str]:
        """The total of the aggregation, and the number of positive tokens."""
        return frozenset({DENOMINATORS[self.aggregation], *(["positive"] if self.imitation else [])})

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        mask, old, logprobs = micro.response_mask, old_logprobs(micro), predicted.of("logprobs")
        tokens, clipped = SURROGATES[self.surrogate](micro, logprobs, old, self.clip_low, self.clip_high)
        count = max(self.totals.computed, 1)
        sums = {
            "clip_fraction": clipped.sum() / count,
            "mismatch_kl": kl_penalty(old, logprobs.detach(), mask, "k3").sum() / count,
        }
        if self.kl:
            penalty = self.kl.penalty(logprobs, old, micro.column("reference_logprobs"), mask)
            sums["kl"] = penalty.detach().sum() / count
            tokens = tokens + self.kl.coefficient * penalty
        if self.importance is not None:  # the penalty is also a mean over samples, so it needs the same weights
            behaviour = micro.column("behaviour_logprobs")
            tokens = tokens * log_ratio(old, behaviour, mask).exp().clamp(max=self.importance)
        weights = token_weights(micro, self.totals, self.aggregation, norm=self.norm, dtype=precision(tokens))
        loss = (weights * tokens).sum()
        if self.imitation:
            likelihood = (micro.column("positive") * negative_log_likelihood(logprobs, mask)).sum()
            imitated = likelihood / self.totals.divisor("positive")
            loss, sums["positive_nll"] = loss + self.imitation * imitated, imitated.detach()
        return LossParts(loss, sums)


@final
@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's clipped squared error (`clipped_value_loss`), token mean over the step."""

    needs: ClassVar[frozenset[Need]] = frozenset({"values"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})
    totals: Totals
    clip: float | None

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        mask, arguments = micro.response_mask, (micro.column("values"), micro.column("returns"))
        values = predicted.of("values")
        loss = clipped_value_loss(values, *arguments, mask, self.clip)
        clipped = is_value_clipped(values, *arguments, mask, self.clip)
        weights = token_weights(micro, self.totals, "token-mean", dtype=precision(loss))
        return LossParts((weights * loss).sum(), {"clip_fraction": clipped.sum() / max(self.totals.tokens, 1)})


@final
@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """−log σ(r_chosen − r_rejected), mean over the step's pairs. Source: Bradley and Terry 1952; arXiv 2203.02155."""

    needs: ClassVar[frozenset[Need]] = frozenset({"scores"})
    denominators: ClassVar[frozenset[str]] = frozenset({"items"})
    totals: Totals  # an item is a pair: the chosen response, then the rejected one

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        scores = predicted.of("scores")
        chosen, rejected = scores[0::2], scores[1::2]
        count = max(self.totals.items, 1)
        sums = {
            "accuracy": (chosen > rejected).float().sum().detach() / count,
            "margin": (chosen - rejected).sum().detach() / count,
        }
        return LossParts(bradley_terry(chosen, rejected).sum() / count, sums)


def old_logprobs(batch: TokenBatch) -> Tensor:
    """Return the log-probabilities of the ratio's denominator, [T].

    Raises:
        InputError: the batch has neither proximal nor behaviour log-probabilities.
    """
    return batch.column("proximal_logprobs" if "proximal_logprobs" in batch.token_columns else "behaviour_logprobs")


def with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens combined: [R, k] → [R, k + 1].

    The tail's probability is at least the dtype's machine epsilon; below that, 1 - Σ p is rounding noise.
    """
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], -1)


def divergence(teacher: Tensor, student: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Return the divergence between two [R, K] arrays of log-probabilities, [R] nats, differentiable in `student`.

    ::

        forward_kl  KL(teacher ‖ student)       covers all likely tokens of the teacher
        reverse_kl  KL(student ‖ teacher)       concentrates on the likeliest tokens of the teacher
        jsd         β KL(teacher ‖ M) + (1 - β) KL(student ‖ M),  M = β teacher + (1 - β) student

    Args:
        beta: β of jsd, between 0 and 1, both excluded.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "jsd":
        share = teacher.new_tensor(beta)
        mixed = torch.logaddexp(teacher + share.log(), student + (1 - share).log())
        return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)
    raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {kind!r}")


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


@final
@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """The divergence from the teacher, token mean over the step.

    It reports `teacher_mass` and `student_mass`, the total probability of the teacher's k likeliest tokens under each
    model, and `agreement`: the share of tokens at which both models rank the same of these k tokens first.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "candidates"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})
    totals: Totals
    divergence: str
    beta: float = 0.5

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        mask, student = micro.response_mask, predicted.of("candidates")
        teacher = micro.wide(CANDIDATES).logprobs.to(student.dtype)
        each = divergence(with_tail(teacher), with_tail(student), self.divergence, self.beta)
        weights = token_weights(micro, self.totals, "token-mean", dtype=precision(each))[mask]
        logprobs, count = predicted.of("logprobs").detach(), max(self.totals.computed, 1)
        now = student.detach()
        sums = {
            "agreement": (now.argmax(-1) == 0).sum() / count,
            "teacher_mass": teacher.exp().sum() / count,
            "student_mass": now.exp().sum() / count,
            "mismatch_kl": kl_penalty(old_logprobs(micro), logprobs, mask, "k3").sum() / count,
        }
        return LossParts((weights * each).sum(), sums)
