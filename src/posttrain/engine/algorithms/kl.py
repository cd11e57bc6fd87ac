"""Rewards per token: the score at the end of a response and, on its way, the price of leaving the reference.

A penalty goes into the reward or into the loss, never into both. In the reward it is a number without gradient, and
k1 is the natural estimator there: unbiased, and what PPO from human feedback began with. In the loss k1 has no expected
gradient (see `losses.kl_penalty`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.engine.algorithms.losses import kl_penalty, log_ratio

REWARD_ESTIMATORS = ("k1", "k2", "k3")


def score_rewards(scores: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every document's score at its last response token, end of sequence or not.

    Args:
        scores: [documents]; that of a document without response tokens has no place and is dropped.
        mask: [T] bool, response tokens.
        lengths: [documents], sum = T.

    Returns:
        [T] float32, 0 elsewhere.

    Raises:
        ValueError: another shape, or a score that is not finite: a response without a score must be dropped before, it
            is not worth 0.
    """
    if scores.shape != (len(lengths),):
        raise ValueError(f"scores must have shape [{len(lengths)}], got {list(scores.shape)}; give one per document")
    if not bool(scores.isfinite().all()):
        first = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(f"scores must be finite, got {scores[first].item()} at document {first}; drop it first")
    index = mask.nonzero()[:, 0]
    document = torch.arange(len(lengths), device=mask.device).repeat_interleave(
        torch.tensor(lengths, device=mask.device)
    )[index]
    ends = torch.ones_like(document, dtype=torch.bool)
    ends[:-1] = document[1:] != document[:-1]
    rewards = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    return rewards.index_copy(0, index[ends], scores.detach().to(mask.device, torch.float32)[document[ends]])


def kl_rewards(
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    scores: Tensor,
    lengths: Sequence[int],
    *,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """r_t = −β·kl_t + [t is the last response token]·score.

    Args:
        old_logprobs: [T]: of the policy that sampled, at the sampling temperature.
        reference_logprobs: [T]: of the frozen reference, at the same temperature.
        mask: [T] bool, response tokens; what stands outside is not read, NaN included.
        scores, lengths: see `score_rewards`.
        coefficient: β.
        estimator: k1, k2 or k3 (see `kl_estimate`).

    Returns:
        [T] float32 without gradient, 0 outside the mask.

    Raises:
        ValueError: see `score_rewards` and `kl_estimate`.

    Source: InstructGPT, arXiv 2203.02155, eq. 2; Ziegler et al., arXiv 1909.08593, section 2.
    """
    penalty = kl_estimate(old_logprobs.detach(), reference_logprobs.detach(), mask, estimator)
    return score_rewards(scores, mask, lengths) - coefficient * penalty.float()


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(π ‖ π_ref) per token from one sample, d = log π_ref − log π: k1 = −d, k2 = d²/2, k3 = e^d − d − 1.

    For values, not for gradients. d is clamped to ±20. k1 and k3 are unbiased; k1 may be negative.

    Returns:
        [T], 0 outside the mask. Source: Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: another estimator.
    """
    if estimator not in REWARD_ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(REWARD_ESTIMATORS)}, got {estimator!r}")
    if estimator == "k1":
        return log_ratio(logprobs, reference, mask)
    return kl_penalty(logprobs, reference, mask, estimator)
