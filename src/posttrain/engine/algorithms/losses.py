"""Losses and rewards per token.

Functions take `[T]` tensors of a packed batch and a mask and return `[T]`, 0 outside.

Inputs are masked *before* any non-linear step, so that neither the value nor the gradient of a masked token can leak,
not even a NaN (0 · NaN is NaN). How tokens are summed is decided in `algorithms.objectives`.

The reward of a token is the score at the end of a response and, before the end, the penalty for leaving the reference.
The penalty goes into the reward or into the loss, never into both. In the reward it is a number without gradient, and
k1 is the natural estimator there: unbiased, and what PPO from human feedback began with. In the loss k1 has no expected
gradient (see `kl_penalty`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.batch import precision

LOG_RATIO_LIMIT = 20.0  # e^20 ≈ 5e8: beyond it a ratio says nothing, and float32 would overflow soon after
REWARD_ESTIMATORS = ("k1", "k2", "k3")


def negative_log_likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """−log π(token): the loss of supervised fine-tuning."""
    return torch.where(mask, -logprobs, 0.0)


def log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """log π − log π_reference, clamped to ±20; 0 outside the mask."""
    zero = logprobs.new_zeros(())
    return (torch.where(mask, logprobs, zero) - torch.where(mask, reference, zero)).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


def ppo_clip(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)) with ρ = exp(log π − log μ).

    Args:
        logprobs: current policy, differentiable.
        behaviour: log-probabilities recorded when the tokens were sampled, at the same temperature. They are the
            denominator of ρ and appear once: no second importance weight.
        advantages: one value per token, constant over a response.
        mask: response tokens.
        clip_low, clip_high: ε_low and ε_high; clip-higher when they differ.

    Source: PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, eq. 10.
    """
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio(logprobs, behaviour, mask).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.where(mask, torch.maximum(-advantages * ratio, -advantages * clipped), 0.0)


def is_clipped(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`[T]` bool: response tokens whose gradient the clip removed."""
    ratio = log_ratio(logprobs.detach(), behaviour, mask).exp()
    return mask & (((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low)))


def kl_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(π ‖ π_ref) per token, d = log π_ref − log π: k2 = d²/2, k3 = e^d − d − 1.

    Both are non-negative. As a loss over tokens that π sampled, k2 has the gradient of KL(π ‖ π_ref) in expectation; k3
    has that of the other direction, KL(π_ref ‖ π), although its value estimates this one (`corrected_kl_penalty` has
    both right). k1 = −d has zero expected gradient as a loss and is not offered.
    Source: Schulman, "Approximating KL divergence" (2020).

    Raises:
        KeyError: another estimator.
    """
    d = -log_ratio(logprobs, reference, mask)
    return {"k2": lambda: d.square() / 2, "k3": lambda: d.expm1() - d}[estimator]()


def corrected_kl_penalty(logprobs: Tensor, behaviour: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """ρ·(e^d − d − 1) with ρ = exp(log π − log μ), differentiated through ρ too.

    Over tokens that μ sampled its value is KL(π ‖ π_ref) and its gradient that of KL(π ‖ π_ref), both in expectation,
    and also after π has moved away from μ. Arguments as `ppo_clip` and `kl_penalty`.

    Source: DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`.
    """
    return log_ratio(logprobs, behaviour, mask).exp() * kl_penalty(logprobs, reference, mask, "k3")


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²), or ½·(V − R)² without a clip.

    The larger of the two errors: a value that moved further than ε towards its return stops, one that moved away from
    it is pulled back in full. The factor ½ makes the gradient V − R.

    Args:
        values: the critic's, differentiable.
        old_values: what the critic said before the update, with which advantages and returns were estimated.
        returns: A + V_old (`gae.generalized_advantages`).
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
    """`[T]` bool: response tokens whose gradient the clip of `clipped_value_loss` removed."""
    if clip is None:
        return torch.zeros_like(mask)
    values, old_values, returns = (torch.where(mask, x.detach(), 0.0) for x in (values, old_values, returns))
    held = torch.clamp(values, old_values - clip, old_values + clip)
    return mask & (held != values) & ((held - returns).square() > (values - returns).square())


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """−log σ(r_chosen − r_rejected − m): the loss of a reward model, one per pair.

    Args:
        chosen, rejected: [pairs] scores, differentiable.
        margin: [pairs] m, by how much the chosen one should win; 0 when None (Llama 2, arXiv 2307.09288, eq. 2).

    Returns:
        [pairs]. The scores' common level is left open: only differences are learnt.

    Source: Bradley and Terry (1952); InstructGPT, arXiv 2203.02155, eq. 1.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


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
