"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, *, peak: float, warmup: int, schedule: str, final_ratio: float) -> float:
    """Linear warm-up times decay.

    ::

        warm-up   min(1, (step + 1) / warmup)
        constant  1
        linear    1 − (1 − final)·step/total
        cosine    final + (1 − final)·(1 + cos(π·step/total))/2

    Args:
        step: 0-based optimiser step.
        total: steps of the whole stage.
        peak: learning rate at full scale.
        final_ratio: rate at the end as a share of the peak.

    Raises:
        ValueError: an unknown schedule.
    """
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = step / total
    if schedule == "constant":
        decay = 1.0
    elif schedule == "linear":
        decay = 1.0 - (1.0 - final_ratio) * done
    elif schedule == "cosine":
        decay = final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}")
    return peak * ramp * decay
