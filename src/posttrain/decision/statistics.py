"""The statistics of gates: one-sided confidence limits, paired tests. Pure functions of arrays, no state.

Everything is written for the lower limit; an upper limit is the mirror image (`upper(x) = -lower(-x)`, and for rates
`upper(k, n) = 1 - lower(n - k, n)`), so that a rule and its mirror image can never disagree.

scipy is imported where it is used: it takes a third of a second that every command would pay.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

RESAMPLES = 9_999  # the 5 % quantile of the bootstrap distribution then has a standard error of about 0.02 deviations
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the bootstrap to some 32 MB, whatever the number of items


def wilson_lower(successes: int, items: int, confidence: float) -> float:
    """Lower one-sided limit of a binomial rate by the score test (Wilson 1927).

    Args:
        successes: items that are right, 0 ≤ successes ≤ items.
        items: ≥ 1.
        confidence: one-sided; 0.95 is the lower end of the two-sided 90 % interval.
    """
    z = _quantile(confidence)
    rate = successes / items
    centre = rate + z * z / (2 * items)
    spread = z * math.sqrt(rate * (1 - rate) / items + z * z / (4 * items * items))
    return max(0.0, (centre - spread) / (1 + z * z / items)) if successes else 0.0


def paired_score(better: ArrayLike, worse: ArrayLike, items: int, difference: float) -> Array:
    """Score statistic of "the paired difference of two rates equals `difference`" (Tango 1998, Stat. Med. 17, 891-908).

    With `q` the maximum-likelihood estimate of P(only the baseline is right) under that hypothesis,
    `Z = (better - worse - n δ) / sqrt(n (2 q + δ (1 - δ)))`. It falls as δ rises and is McNemar's statistic at δ = 0.

    Args:
        better: items that only the candidate gets right; any shape.
        worse: items that only the baseline gets right; same shape.
        items: all paired items, n.
        difference: δ in (-1, 1), candidate - baseline.

    Returns:
        Z, standard normal under the hypothesis, in the shape of `better`; 0 where nothing is discordant and δ = 0.
    """
    gained, lost = np.asarray(better, dtype=np.float64), np.asarray(worse, dtype=np.float64)
    linear = -gained - lost + (2 * items - gained + lost) * difference
    constant = -lost * difference * (1 - difference)
    root = np.sqrt(np.maximum(linear * linear - 8 * items * constant, 0.0))
    only_baseline = (root - linear) / (4 * items)
    variance = items * (2 * only_baseline + difference * (1 - difference))
    excess = gained - lost - items * difference
    deviation = np.sqrt(np.maximum(variance, 0.0))
    certain = np.where(excess == 0, 0.0, np.copysign(np.inf, excess))
    return np.divide(excess, deviation, out=np.asarray(certain, dtype=np.float64), where=deviation > 0)


def paired_lower(better: int, worse: int, items: int, confidence: float) -> float:
    """Lower one-sided limit of candidate - baseline for two rates measured on the same items (Tango 1998).

    Args:
        better: items that only the candidate gets right.
        worse: items that only the baseline gets right; better + worse ≤ items.
        items: all paired items.
        confidence: one-sided.
    """
    z = _quantile(confidence)
    estimate = (better - worse) / items

    def excess(difference: float) -> float:
        return float(paired_score(better, worse, items, difference)) - z

    floor = -1 + 1e-12
    if estimate <= floor or excess(floor) <= 0:
        return -1.0
    from scipy.optimize import brentq

    return float(brentq(excess, floor, estimate, xtol=1e-13, rtol=1e-13))


def mcnemar_p(better: int, worse: int) -> float:
    """Exact two-sided p-value of "the discordant items split evenly" (McNemar 1947); 1 when nothing is discordant."""
    discordant = better + worse
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(better, worse), discordant, 0.5)))


def bootstrap_lower(values: Array, confidence: float, seed: int, resamples: int = RESAMPLES) -> float:
    """Lower one-sided limit of a mean by the bias-corrected and accelerated bootstrap (Efron 1987, JASA 82).

    Whole items are drawn, so an item's samples stay together: a row is an item's mean over its samples, which makes
    this the clustered bootstrap with the item as cluster (Miller 2024, arXiv 2411.00640).

    It knows only the values it was given: where they are all equal the limit is that value, and where a rare bad item
    is missing from the sample it is far too high. Where the values have a worst, take `bounded_lower`.

    Args:
        values: one finite number per item, [items].
        confidence: one-sided.
        seed: of the resampling; the same seed and values give the same limit.
        resamples: bootstrap repetitions.
    """
    mean = float(values.mean())
    centred = values - mean
    scale = float(np.abs(centred).max())
    if scale == 0:
        return mean
    centred = centred / scale  # so that no power of it over- or underflows
    means = _resampled_means(centred, seed, resamples)
    below = float(np.count_nonzero(means < 0) + np.count_nonzero(means <= 0)) / (2 * resamples)
    from scipy.special import ndtr, ndtri

    bias = float(ndtri(min(max(below, 0.5 / resamples), 1 - 0.5 / resamples)))
    acceleration = float(np.sum(centred**3) / (6 * np.sum(centred**2) ** 1.5))
    shifted = bias - _quantile(confidence)
    # a single far outlier can take the denominator through zero; the lowest repetition is the cautious answer then
    level = float(ndtr(bias + shifted / max(1 - acceleration * shifted, 1e-9)))
    return mean + scale * float(np.quantile(means, level))


def bounded_lower(values: Array, worst: float, confidence: float, seed: int, resamples: int = RESAMPLES) -> float:
    """Lower one-sided limit of a mean of values that are never below `worst` (Gaffke 2005, Math. Methods Stat. 14).

    One more item of value `worst` is added, and the limit is a quantile of the mean under flat Dirichlet weights of the
    n + 1 items. Of zeros and ones this is the exact limit of Clopper and Pearson (1934), so it cannot collapse where
    all values are equal: 20 ones give 0.86, not 1. Elsewhere it takes the spread of the values into account as a
    bootstrap does, and covers at small n where a bootstrap does not; no distribution is known for which it fails to.

    Args:
        values: one finite number per item, each >= worst, [items].
        worst: the least a value can be.
        confidence: one-sided.
        seed: of the weights; the same seed and values give the same limit.
        resamples: weightings.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    distinct, counts = np.unique(values, return_counts=True)  # the weight of k equal items is one gamma variate
    scale = float(distinct[-1] - worst) or 1.0  # so that no product of it over- or underflows
    above = (distinct - worst) / scale
    step = max(1, _DRAWS_AT_ONCE // len(distinct))
    means = []
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        weights = generator.standard_gamma(counts.astype(np.float64), size=(draws, len(distinct)))
        means.append(weights @ above / (weights.sum(axis=1) + generator.standard_exponential(draws)))
    return worst + scale * float(np.quantile(np.concatenate(means), 1 - confidence))


def _resampled_means(values: Array, seed: int, resamples: int) -> Array:
    """Means of `resamples` draws with replacement, [resamples]."""
    generator = np.random.Generator(np.random.PCG64(seed))
    items = len(values)
    step = max(1, _DRAWS_AT_ONCE // items)
    chunks = [
        values[generator.integers(items, size=(min(step, resamples - start), items))].mean(axis=1)
        for start in range(0, resamples, step)
    ]
    return np.concatenate(chunks)


def _quantile(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(confidence))
