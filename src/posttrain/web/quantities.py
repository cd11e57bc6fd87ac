"""What is known of a metric that is drawn: its words, and the range of its axis.

An axis that fits itself to the data makes a drama out of noise. So rates are drawn on 0 to 1, what cannot be negative
from 0, and of what may have either sign the noise from step to step fills a third of the height at the most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from posttrain.telemetry.curves import step_noise

REWARD = "reward/mean"
COMPONENTS = "reward components"  # one panel of all `reward/NAME/mean`
# metric → words; the first ones are drawn first
WORDS = {
    REWARD: "mean training reward",
    "probe/accuracy": "held-out accuracy (probe)",
    "loss": "training loss",
    "accuracy": "pairs ranked rightly",
    "agreement": "tokens where teacher and student would say the same",
    "response_tokens/mean": "mean response length, tokens",
    "entropy": "entropy per token, nats (from the samples)",
    "kl": "KL to the reference, nats per token",
    "grad_norm": "gradient norm, before clipping",
    "truncated": "responses cut at the longest allowed",
    "clip_fraction": "tokens that the ratio's clip cut",
    "groups/zero_std": "groups without signal",
    "groups/dropped": "groups dropped, of all that were sampled",
    "updates": "optimiser steps of a step",
    "rollout/rows": "responses that were decoded side by side, mean",
    "rollout/preemptions": "responses that made room for others and were taken up again",
    "rollout/recomputed_tokens": "tokens that were computed again for that",
    "rollout/prefilled_tokens": "tokens of prompts that were computed",
    "reward/overlong": "what long responses are punished by, mean",
    "lag/kl": "KL of the step's beginning to the policy that sampled, nats per token",
    "lag/ess": "tokens' worth under the weights of that lag, share",
    "margin": "preference: mean margin of the chosen",
    "reward/std": "reward: standard deviation",
    "learning_rate": "learning rate",
    "mismatch_kl": "KL of training to sampling, nats per token",
    "reward/unscored": "responses without a score",
    "reward/errors": "responses whose reward failed",
    "reward/timeouts": "responses whose reward took too long",
    "critic/loss": "critic: loss",
    "critic/grad_norm": "critic: gradient norm, before clipping",
    "tokens_per_second": "tokens per second",
    "memory/peak_resident_mib": "most memory of the job's process so far, MiB",
    "memory/peak_allocated_mib": "most memory of its CUDA device so far, MiB",
    COMPONENTS: "mean of each component of the reward",
}
_COMPONENT = re.compile(r"reward/(.+)/mean", re.DOTALL)
MAIN = 9  # of WORDS: what is looked at first
_RATES = (
    "accuracy",
    "agreement",
    "truncated",
    "groups/zero_std",
    "groups/dropped",
    "reward/unscored",
    "reward/errors",
    "reward/timeouts",
)
_SHARES = ("clip_fraction",)  # rates that are small when all is well
_LEAST_SHARE = 0.1  # to which their axis goes at the least
_NOISE_PART = 3.0  # the height is at least so many times the band that noise fills
_BAND = 4.0  # deviations, from the lower edge of noise to its upper


def rank(metric: str) -> tuple[int, str]:
    """The order in which metrics are drawn."""
    known = list(WORDS)
    return (known.index(metric) if metric in known else len(known), metric)


def component(metric: str) -> str:
    """The name of the reward's component whose mean it is; empty: of none."""
    found = _COMPONENT.fullmatch(metric)
    return found[1] if found else ""


def is_rate(metric: str) -> bool:
    """Whether its values are shares of 1."""
    if metric.startswith("reward/") and metric.endswith(("/errors", "/timeouts")):
        return True
    return metric.endswith(_RATES) or metric.partition("/")[2].startswith("pass@")


def extent(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper end of a metric's axis.

    Args:
        values: all that is drawn on it, in order of steps; limits of confidence too. What is not finite is passed over.
    """
    drawn = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not len(drawn):
        return 0.0, 1.0
    low, high = float(drawn.min()), float(drawn.max())
    mean = metric == REWARD or metric.startswith(COMPONENTS) or component(metric)
    if is_rate(metric) or (mean and low >= 0 and high <= 1):
        return min(0.0, low), max(1.0, high)
    if metric.endswith(_SHARES) and low >= 0:
        return 0.0, max(_LEAST_SHARE, 1.05 * high)
    if low >= 0:
        return 0.0, 1.05 * high or 1.0
    if high <= 0:
        return 1.05 * low, 0.0
    height = max(1.1 * (high - low), _NOISE_PART * _BAND * step_noise(drawn))
    middle = (low + high) / 2
    return middle - height / 2, middle + height / 2


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in [low, high], at most `most` and at least two where there is a range."""
    span = high - low
    if not (math.isfinite(span) and span > 1e-9 * max(abs(low), abs(high))):  # no two numbers to tell apart
        return [low]
    rough = span / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / pace - 1e-9)
    found: list[float] = []
    while first * pace <= high + 1e-9 * span and len(found) <= most:
        found.append(first * pace + 0.0)
        first += 1
    return found


def brief(value: float) -> str:
    """A number for a tick: `0.25`, `1.2k`, `3e-05`."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return f"{value:.2g}"
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if size >= 10 * scale or (size >= scale and unit == "M"):
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"
