"""Generalised advantage estimation over packed documents, and whitening.

Only response tokens exist here: prompts, and observation tokens inside a response (holes of the mask), are skipped, so
the token after a hole follows the token before it. A document is an episode: nothing flows from one into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.engine.precision import precision

WHITEN_EPSILON = 1e-8  # added to the variance


def generalized_advantages(
    rewards: Tensor, values: Tensor, response_mask: Tensor, lengths: Sequence[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """A_t = Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γV_{t+1} − V_t; returns are A + V.

    After the last response token comes nothing, V = 0, whether the response ended by itself or the token limit cut it:
    what it was worth is in its reward.

    Args:
        rewards: [T]; what stands outside the mask is not read, NaN included.
        values: [T]: V before the token is emitted.
        response_mask: [T] bool.
        lengths: [documents], sum = T.
        gamma: γ, discount per response token.
        lam: λ; 1 gives the discounted return minus V, 0 the one-step temporal difference.

    Returns:
        Advantages and returns, both [T] without gradient, 0 outside the mask; computed in float64 (`precision`).

    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    index = response_mask.nonzero()[:, 0]
    advantages = torch.zeros(len(response_mask), dtype=precision(rewards, values), device=response_mask.device)
    returns = torch.zeros_like(advantages)
    if not len(index):
        return advantages, returns
    row, column, shape = _right_aligned(response_mask, index, lengths)
    # On the CPU: the loop over time is many small steps, which a GPU would only slow down.
    r, v = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    r[row, column] = rewards.detach()[index].double().cpu()
    v[row, column] = values.detach()[index].double().cpu()
    delta = r - v
    delta[:, :-1] += gamma * v[:, 1:]
    estimate = torch.zeros_like(delta)
    running = torch.zeros(shape[0], dtype=torch.float64)
    for t in reversed(range(shape[1])):
        running = delta[:, t] + gamma * lam * running
        estimate[:, t] = running
    advantages[index] = estimate[row, column].to(advantages)
    returns[index] = (estimate + v)[row, column].to(returns)
    return advantages, returns


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics to whiten with, e.g. over all ranks: `Moments(mean=0.1, variance=2.3)`."""

    mean: float
    variance: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Mean and unbiased variance of the masked [T] values; 0 where there are too few of them."""
        chosen = values.detach()[mask].double()
        mean = float(chosen.mean()) if len(chosen) else 0.0
        return cls(mean, float(chosen.var()) if len(chosen) > 1 else 0.0)


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None, *, centre: bool = True) -> Tensor:
    """(x − mean) / √(variance + 1e-8): positive stays above negative, whatever the sign of the mean.

    Args:
        values: [T]; what stands outside the mask is not read, NaN included.
        mask: [T] bool.
        moments: of everything that is whitened together; by default those of these values.
        centre: False keeps the mean where it is and only scales.

    Returns:
        [T] (`precision`), 0 outside the mask. A single value, which has no spread, becomes 0 (itself without
        centring).
    """
    found = moments or Moments.of(values, mask)
    centred = torch.where(mask, values.detach(), found.mean).double() - found.mean
    variance = found.variance if found.variance > 0 else 1.0 - WHITEN_EPSILON
    scaled = centred / (variance + WHITEN_EPSILON) ** 0.5 + (0.0 if centre else found.mean)
    return torch.where(mask, scaled, 0.0).to(precision(values))


def _right_aligned(mask: Tensor, index: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Row and column of every response token in a [documents, longest] view whose rows end together."""
    sizes = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(sizes)[index.cpu()]
    counts = torch.bincount(document, minlength=len(lengths))
    ends = counts.cumsum(0)
    longest = int(counts.max())
    column = longest - (ends[document] - torch.arange(len(document)))
    return document, column, (len(lengths), longest)
