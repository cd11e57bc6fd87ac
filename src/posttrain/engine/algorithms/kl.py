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
from posttrain.engine.precision import precision

REWARD_ESTIMATORS = ("k1", "k2", "k3")


def score_rewards(scores: Tensor, mask: Tensor, lengths: Sequence[int], token_scores: Tensor | None = None) -> Tensor:
    """Every document's score at its last response token, end of sequence or not, but for what was earned before it.

    Args:
        scores: [documents]; that of a document without response tokens has no place and is dropped.
        mask: [T] bool, response tokens.
        lengths: [documents], sum = T.
        token_scores: [T]: what of each score stands at which token, e.g. at the ends of turns; None: all at the end.

    Returns:
        [T] (`precision`), 0 elsewhere; a document's sum is its score.

    Raises:
        ValueError: another shape, a score that is not finite (a response without a score must be dropped before, it is
            not worth 0), or one that stands outside the mask.
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
    given = (scores,) if token_scores is None else (scores, token_scores)
    rewards = torch.zeros(len(mask), dtype=precision(*given), device=mask.device)
    last, scores = index[ends], scores.detach().to(mask.device)
    if token_scores is None:
        return rewards.index_copy(0, last, scores.to(rewards.dtype)[document[ends]])
    if bool(token_scores[~mask].any()):
        first = int((token_scores.masked_fill(mask, 0)).nonzero()[0])
        raise ValueError(f"token scores must stand at response tokens, got one at token {first}; move it")
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
    """r_t = −β·kl_t + what of the score stands at t.

    Args:
        old_logprobs: [T]: of the policy that sampled, at the sampling temperature.
        reference_logprobs: [T]: of the frozen reference, at the same temperature.
        mask: [T] bool, response tokens; what stands outside is not read, NaN included.
        scores, lengths, token_scores: see `score_rewards`.
        coefficient: β.
        estimator: k1, k2 or k3 (see `kl_estimate`).

    Returns:
        [T] (`precision`) without gradient, 0 outside the mask.

    Raises:
        ValueError: see `score_rewards` and `kl_estimate`.

    Source: InstructGPT, arXiv 2203.02155, eq. 2; Ziegler et al., arXiv 1909.08593, section 2.
    """
    penalty = kl_estimate(old_logprobs.detach(), reference_logprobs.detach(), mask, estimator)
    rewards = score_rewards(scores, mask, lengths, token_scores)
    return rewards - coefficient * penalty.to(precision(rewards, penalty))


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
