"""Advantage estimators over groups of rewards, generalised advantage estimation over packed documents, and whitening.

Rewards of groups are `[prompts, members]`; NaN marks a member without a score (the reward function timed out, failed or
declined). Such a member is left out of its group: it does not shift the group's baseline, and its advantage is 0. A
group with fewer than two scored members has no baseline, and a group whose scored members have equal rewards has no
signal: in both cases every advantage is 0.

Generalised advantage estimation and whitening read response tokens only. Prompts, and observation tokens inside a
response (holes of the mask), are skipped, so the token after a hole follows the token before it. A document is an
episode: no value crosses a document boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.engine.batch import precision

GRPO_EPSILON = 1e-4  # added to the deviation, as in TRL (verl: 1e-6); smaller reward differences are almost meaningless
WHITEN_EPSILON = 1e-8  # added to the variance


def grpo(rewards: Tensor) -> Tensor:
    """Return A = (r − mean) / (std + ε) with the unbiased standard deviation and ε = 1e-4.

    Args:
        rewards: `[prompts, members]`, NaN for members without a score.

    Returns:
        `[prompts, members]`, in the dtype that `precision` returns. Source: DeepSeekMath, arXiv 2402.03300, eq. 3
        (outcome supervision).
    """
    centred, scored, count = _centre(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return torch.where(scored, centred / (variance.sqrt() + GRPO_EPSILON), 0.0).to(precision(rewards))


def dr_grpo(rewards: Tensor) -> Tensor:
    """Return A = r − mean.

    Dividing by the deviation would over-weight prompts that are nearly solved or nearly hopeless.

    Use this estimator with the aggregation `seq-mean-token-sum-norm`. Arguments and result: see `grpo`. Source: Dr.
    GRPO, arXiv 2503.20783.
    """
    return _centre(rewards)[0].to(precision(rewards))


def rloo(rewards: Tensor) -> Tensor:
    """Return A = r − mean of the other members = n/(n−1)·(r − mean).

    Arguments and result: see `grpo`. Source: RLOO, arXiv 2402.14740.
    """
    centred, _, count = _centre(rewards)
    return (centred * count / (count - 1).clamp(min=1)).to(precision(rewards))


Estimator = Callable[[Tensor], Tensor]  # [prompts, members] → [prompts, members]
ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Return a penalty that is 0 up to `limit − buffer` tokens and then grows linearly to 1 at the limit.

    Args:
        lengths: `[documents]` generated tokens, at most `limit`.
        buffer: tokens before the limit, at least 1.

    Returns:
        `[documents]` float64. Source: DAPO, arXiv 2503.14476, eq. 13, with the opposite sign.
    """
    return ((lengths.double() - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def has_signal(rewards: Tensor) -> Tensor:
    """Return which groups have at least two scored members whose rewards differ, `[prompts]` bool.

    The other groups have no policy gradient.
    """
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return (scored.sum(dim=1) >= 2) & (highest > lowest)


def by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the rewards by group, `[groups, members]` with NaN for missing members, and each document's place.

    Args:
        rewards: [D]
        groups: [D] the number that identifies each document's group; members of a group need not be adjacent.

    Returns:
        The matrix, and the row and column of every document in the matrix: `matrix[place]` equals `rewards`.
    """
    names, row = torch.unique(groups, return_inverse=True)
    order = row.argsort(stable=True)
    counts = torch.bincount(row, minlength=len(names))
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row[order]]
    matrix = torch.full((len(names), int(counts.max())), torch.nan, dtype=rewards.dtype)
    matrix[row, column] = rewards
    return matrix, (row, column)


def _centre(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rewards minus the mean of their group, a mask of the scored members, and their counts [P, 1].

    The difference is 0 for a member without a score and in a group without a signal. It is computed in float64, because
    the rounded mean of equal float32 rewards could leave a remainder that the division by ε would amplify.
    """
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0.0).double()
    count = scored.sum(dim=1, keepdim=True)
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    return torch.where(scored & has_signal(rewards)[:, None], values - mean, 0.0), scored, count


def generalized_advantages(
    rewards: Tensor, values: Tensor, response_mask: Tensor, lengths: Sequence[int], gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute A_t = Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γV_{t+1} − V_t, and the returns A + V.

    V = 0 after the last response token, whether the response ended with an end token or at the token limit: no value is
    added for a continuation.

    Args:
        rewards: [T]; values outside the mask are not read, NaN included.
        values: [T], V before each token is emitted.
        response_mask: [T] bool.
        lengths: [documents], sum = T.
        gamma: γ, discount per response token.
        lam: λ, one for all documents or [documents]; 1 gives the discounted return minus V, 0 the one-step temporal
            difference.

    Returns:
        Advantages and returns, each [T] without gradient, 0 outside the mask. They are computed in float64 and returned
        in the dtype that `precision` returns.

    Raises:
        ValueError: λ is outside [0, 1], or has another shape.

    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    decay = torch.as_tensor(lam, dtype=torch.float64).cpu()
    if decay.shape not in ((), (len(lengths),)) or not bool(((decay >= 0) & (decay <= 1)).all()):
        raise ValueError(f"lam must be one number, or one for each document, between 0 and 1, got {lam}")
    index = response_mask.nonzero()[:, 0]
    advantages = torch.zeros(len(response_mask), dtype=precision(rewards, values), device=response_mask.device)
    returns = torch.zeros_like(advantages)
    if not len(index):
        return advantages, returns
    row, column, shape = _right_aligned(response_mask, index, lengths)
    # on the CPU, because the loop over time consists of many small steps, which would be slower on a GPU
    r, v = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    r[row, column] = rewards.detach()[index].double().cpu()
    v[row, column] = values.detach()[index].double().cpu()
    delta = r - v
    delta[:, :-1] += gamma * v[:, 1:]
    estimate = torch.zeros_like(delta)
    running = torch.zeros(shape[0], dtype=torch.float64)
    for t in reversed(range(shape[1])):
        running = delta[:, t] + gamma * decay * running
        estimate[:, t] = running
    advantages[index] = estimate[row, column].to(advantages)
    returns[index] = (estimate + v)[row, column].to(returns)
    return advantages, returns


def length_adaptive(lengths: Tensor, alpha: float) -> Tensor:
    """Return λ = 1 − 1/(α·length) for each response, so that γλ decays over a distance proportional to the length.

    Args:
        lengths: [documents] response tokens.
        alpha: α > 0; responses of at most 1/α tokens have λ = 0.

    Returns:
        [documents] float64. Source: VAPO, arXiv 2504.05118, eq. 8.
    """
    return (1.0 - 1.0 / (alpha * lengths.double()).clamp(min=1.0)).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics for whitening, e.g. over all ranks: `Moments(mean=0.1, variance=2.3)`."""

    mean: float
    variance: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Return mean and unbiased variance of the masked [T] values; 0 for too few values."""
        chosen = values.detach()[mask].double()
        mean = float(chosen.mean()) if len(chosen) else 0.0
        return cls(mean, float(chosen.var()) if len(chosen) > 1 else 0.0)


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None, *, centre: bool = True) -> Tensor:
    """Return (x − mean) / √(variance + 1e-8), which keeps the order of the values for a mean of either sign.

    Args:
        values: [T]; values outside the mask are not read, NaN included.
        mask: [T] bool.
        moments: statistics of all values that are whitened together; None: the statistics of `values`.
        centre: False keeps the mean and only scales.

    Returns:
        [T] in the dtype that `precision` returns, 0 outside the mask. A single value, which has no spread, becomes 0
        (with `centre=False`, the value is unchanged).
    """
    found = moments or Moments.of(values, mask)
    centred = torch.where(mask, values.detach(), found.mean).double() - found.mean
    variance = found.variance if found.variance > 0 else 1.0 - WHITEN_EPSILON
    scaled = centred / (variance + WHITEN_EPSILON) ** 0.5 + (0.0 if centre else found.mean)
    return torch.where(mask, scaled, 0.0).to(precision(values))


def _right_aligned(mask: Tensor, index: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return the row and column of every response token in a view [documents, longest] with right-aligned rows."""
    sizes = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(sizes)[index.cpu()]
    counts = torch.bincount(document, minlength=len(lengths))
    ends = counts.cumsum(0)
    longest = int(counts.max())
    return document, longest - (ends[document] - torch.arange(len(document))), (len(lengths), longest)
