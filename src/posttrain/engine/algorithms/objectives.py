"""What an optimiser step minimises: values that know the step's totals, called once per micro-batch.

They are data, not closures, so that they travel to ranks in other processes; each returns the plain sum of its
micro-batch's weighted losses, so that sums over micro-batches and ranks are the whole step's (`aggregation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.aggregation import Totals, token_weights
from posttrain.engine.algorithms.losses import (
    clipped_value_loss,
    corrected_kl_penalty,
    is_clipped,
    is_value_clipped,
    kl_penalty,
    negative_log_likelihood,
    ppo_clip,
)
from posttrain.engine.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class LossParts:
    """A micro-batch's share of the step's loss, and sums to report: `LossParts(loss, {"clip_fraction": tensor(.01)})`.

    Every sum is divided by the step's totals already, so that the shares of all micro-batches add up to the metric.
    """

    loss: Tensor  # scalar, differentiable
    sums: Mapping[str, Tensor]  # scalars without gradient


class Objective(Protocol):
    """A loss over what a model predicts for the tokens of a micro-batch: log-probabilities, or values."""

    def __call__(self, micro: TokenBatch, predicted: Tensor, /) -> LossParts:
        """[T] predictions → this micro-batch's share."""


@final
@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """−log π(completion | prompt), token mean over the step."""

    totals: Totals

    def __call__(self, micro: TokenBatch, predicted: Tensor, /) -> LossParts:
        """See `Objective`."""
        weights = token_weights(micro, self.totals, "token-mean")
        return LossParts((weights * negative_log_likelihood(predicted, micro.response_mask)).sum(), {})


@final
@dataclass(frozen=True, slots=True)
class KLTerm:
    """A penalty in the loss against the frozen reference: `KLTerm(0.05, "k3")`."""

    coefficient: float
    estimator: str  # k2, k3 (`losses.kl_penalty`) or k3-corrected (`losses.corrected_kl_penalty`)

    def penalty(self, logprobs: Tensor, behaviour: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """[T], without the coefficient; 0 outside the mask."""
        if self.estimator == "k3-corrected":
            return corrected_kl_penalty(logprobs, behaviour, reference, mask)
        return kl_penalty(logprobs, reference, mask, self.estimator)


@final
@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The clipped surrogate of PPO with clip-higher, and a KL term where one is asked for.

    ρ = exp(log π − log π_old), where π_old is the proximal policy if the batch has its log-probabilities and else the
    behaviour policy, then with no further importance weight. Source: PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476.
    """

    totals: Totals
    clip_low: float
    clip_high: float
    aggregation: str = "token-mean"
    norm: int = 1  # tokens; the constant length of seq-mean-token-sum-norm
    kl: KLTerm | None = None
    measured: int | None = None  # response tokens computed, which metrics are means over; None: all of `totals`

    def __call__(self, micro: TokenBatch, predicted: Tensor, /) -> LossParts:
        """See `Objective`.

        Raises:
            InputError: the batch lacks old log-probabilities, advantages, or (with a KL term) the reference's.
        """
        mask, old, advantages = micro.response_mask, old_logprobs(micro), micro.advantages
        if advantages is None:
            raise InputError("a policy update needs advantages, got a batch without; estimate them first")
        tokens = ppo_clip(predicted, old, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)
        clipped = is_clipped(predicted, old, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)
        count = max(self.totals.tokens if self.measured is None else self.measured, 1)
        sums = {
            "clip_fraction": clipped.sum() / count,
            "mismatch_kl": kl_penalty(old, predicted.detach(), mask, "k3").sum() / count,
        }
        if self.kl:
            if micro.reference_logprobs is None:
                raise InputError("a KL term needs the reference's log-probabilities, got a batch without; compute them")
            penalty = self.kl.penalty(predicted, old, micro.reference_logprobs, mask)
            sums["kl"] = penalty.detach().sum() / count
            tokens = tokens + self.kl.coefficient * penalty
        weights = token_weights(micro, self.totals, self.aggregation, norm=self.norm)
        return LossParts((weights * tokens).sum(), sums)


@final
@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's clipped squared error (`losses.clipped_value_loss`), token mean over the step."""

    totals: Totals
    clip: float | None

    def __call__(self, micro: TokenBatch, predicted: Tensor, /) -> LossParts:
        """See `Objective`.

        Raises:
            InputError: the batch lacks values or returns.
        """
        if micro.values is None or micro.returns is None:
            raise InputError("a critic's update needs values and returns, got a batch without; estimate them first")
        mask, arguments = micro.response_mask, (micro.values, micro.returns)
        loss = clipped_value_loss(predicted, *arguments, mask, self.clip)
        clipped = is_value_clipped(predicted, *arguments, mask, self.clip)
        weights = token_weights(micro, self.totals, "token-mean")
        return LossParts((weights * loss).sum(), {"clip_fraction": clipped.sum() / max(self.totals.tokens, 1)})


def old_logprobs(batch: TokenBatch) -> Tensor:
    """[T]: what the ratio divides by.

    Raises:
        InputError: neither proximal nor behaviour log-probabilities.
    """
    old = batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    if old is None:
        raise InputError("a policy update needs old log-probabilities, got a batch without; sample or score it first")
    return old
