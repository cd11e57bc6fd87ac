"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, *, peak: float, warmup: int, schedule: str, final_ratio: float) -> float:
    """Linear warm-up to the peak, then decay over the steps that remain.

    ::

        warm-up   (step + 1) / warmup        while step < warmup
        constant  1
        linear    1 − (1 − final)·x          x = (step − warmup) / (total − warmup)
        cosine    final + (1 − final)·(1 + cos(π·x))/2

    A warm-up as long as the stage leaves nothing to decay over.

    Args:
        step: 0-based optimiser step.
        total: steps of the whole stage.
        peak: learning rate at full scale.
        warmup: steps; the last of them is the first at the peak.
        final_ratio: rate at the end as a share of the peak.

    Raises:
        ValueError: an unknown schedule.
    """
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = max(step - warmup, 0) / max(total - warmup, 1)
    if schedule == "constant":
        decay = 1.0
    elif schedule == "linear":
        decay = 1.0 - (1.0 - final_ratio) * done
    elif schedule == "cosine":
        decay = final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}")
    return peak * ramp * decay
