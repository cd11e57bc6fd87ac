"""Batched products whose rows have the same bits whatever stands beside or behind them.

Libraries choose how to add up by the size of the whole. Measured with torch 2.13 on the CPU in float32 (the test is
tests/unit/test_rollout_kernels.py): a product of one or two rows is another kernel; so are the last columns of scores
that are no multiple of 4; and a sum over more than 192 terms is cut into pieces whose size depends on their number. So
widths are multiples of 16, sums over positions are cut every 128, here, and no piece is narrower than 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NARROWEST = 32
_STEP = 16
_PIECE = 128


def padded_width(positions: int) -> int:
    """How many positions to attend over, where so many are to be seen; the others are masked."""
    step = _STEP if positions <= _PIECE else _NARROWEST
    return max(_NARROWEST, -(-positions // step) * step)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """[n, queries, width] of [n, width, head_dim] → [n, queries, head_dim], added up in pieces of a fixed size."""
    width = weights.shape[2]
    if width <= _PIECE:
        return torch.bmm(weights, values)
    out = torch.bmm(weights[:, :, :_PIECE], values[:, :_PIECE])
    for begin in range(_PIECE, width, _PIECE):
        end = begin + _PIECE
        out.baddbmm_(weights[:, :, begin:end], values[:, begin:end])
    return out
