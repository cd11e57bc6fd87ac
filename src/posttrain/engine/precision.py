"""How precisely the pure functions of algorithms answer: columns are float32, and references are held in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def precision(*inputs: Tensor) -> torch.dtype:
    """float64 where an input is float64, else float32, from bfloat16 too: `precision(rewards, values)`."""
    return torch.float64 if any(one.dtype == torch.float64 for one in inputs) else torch.float32
