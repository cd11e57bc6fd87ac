"""Logits in float32 from weights in half precision, without a float32 copy of the head.

Rounded to bfloat16, logits of 16 and more lie 0.125 apart, and log-probabilities with them. The products of bfloat16
numbers are exact in float32, so what is left is the rounding of float32 sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 2**24  # values of the head that are widened at a time


def float32_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[N, hidden] of [vocabulary, hidden] in one type → [N, vocabulary] in float32, in float64 of float64."""
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return F.linear(hidden, head)
    if hidden.device.type == "cuda":
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    out = hidden.new_empty(len(hidden), len(head), dtype=torch.float32)
    wide, rows = hidden.float(), max(1, _BLOCK // head.shape[1])
    for begin in range(0, len(head), rows):
        out[:, begin : begin + rows] = F.linear(wide, head[begin : begin + rows].float())
    return out
