"""Advantage estimators over groups of rewards.

Rewards are `[prompts, members]`; NaN marks a member without a score (its reward function timed out, failed or
declined). Such a member is left out of its group: it neither shifts the group's baseline nor gets an advantage (its
entry is 0). A group whose scored members are fewer than two has no baseline, and one whose scored members are equal
has no signal: both get 0 throughout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.engine.precision import precision

GRPO_EPSILON = 1e-4  # of the deviation, as TRL has it; verl has 1e-6. Rewards that differ by less say next to nothing


def grpo(rewards: Tensor) -> Tensor:
    """A = (r − mean) / (std + ε) with the unbiased standard deviation and ε = 1e-4.

    Args:
        rewards: `[prompts, members]`, NaN where unscored.

    Returns:
        `[prompts, members]` (`precision`). Source: DeepSeekMath, arXiv 2402.03300, eq. 3 (outcome supervision).
    """
    centred, scored, count = _centre(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return torch.where(scored, centred / (variance.sqrt() + GRPO_EPSILON), 0.0).to(precision(rewards))


def dr_grpo(rewards: Tensor) -> Tensor:
    """A = r − mean; dividing by the deviation would over-weight what is nearly solved or nearly hopeless.

    Pair it with the aggregation `seq-mean-token-sum-norm`. Args and returns as `grpo`. Source: Dr. GRPO, arXiv
    2503.20783.
    """
    return _centre(rewards)[0].to(precision(rewards))


def rloo(rewards: Tensor) -> Tensor:
    """A = r − mean of the other members = n/(n−1)·(r − mean).

    Args and returns as `grpo`. Source: RLOO, arXiv 2402.14740.
    """
    centred, _, count = _centre(rewards)
    return (centred * count / (count - 1).clamp(min=1)).to(precision(rewards))


Estimator = Callable[[Tensor], Tensor]  # [prompts, members] → [prompts, members]
ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """0 up to `limit − buffer` tokens, then linear up to 1 at the limit.

    Args:
        lengths: `[documents]` generated tokens, at most `limit`.
        buffer: tokens before the limit, at least 1.

    Returns:
        `[documents]` float64. Source: DAPO, arXiv 2503.14476, eq. 13, with the sign turned.
    """
    return ((lengths.double() - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def has_signal(rewards: Tensor) -> Tensor:
    """`[prompts]` bool.

    Groups of at least two scored members whose rewards differ. The others carry no policy gradient.
    """
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return (scored.sum(dim=1) >= 2) & (highest > lowest)


def by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rewards of documents, laid out by group: `[groups, members]`, NaN where a group has fewer, and where each stands.

    Args:
        rewards: [D]
        groups: [D] the number of each document's group; members of a group may stand anywhere.

    Returns:
        The matrix, and its row and column for every document: `matrix[place]` are the rewards again.
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
    """Rewards minus their group's mean (0 without score or signal), who is scored, and how many per group [P, 1].

    In float64: a mean of equal float32 rewards must not leave a rest that the division by ε would blow up.
    """
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0.0).double()
    count = scored.sum(dim=1, keepdim=True)
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    live = scored & has_signal(rewards)[:, None]
    return torch.where(live, values - mean, 0.0), scored, count
