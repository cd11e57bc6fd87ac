"""The statistics of gates: one-sided confidence limits, valid for every number of items. Pure functions, no state.

With each of the three limits, a model exactly at the threshold passes with probability at most `1 - confidence`;
`python -m benchmarks.gates` enumerates or simulates the levels. The functions compute lower limits; an upper limit is
the mirror image (`upper(x) = -lower(-x)`, and for rates `upper(k, n) = 1 - lower(n - k, n)`), so a rule and its mirror
image always agree.

scipy is imported inside functions: the import takes a third of a second, which every command would pay.
"""

import math
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray


class _Json:
    """Pydantic's JSON form of an array: a list of numbers, which restores the same array."""

    def __get_pydantic_core_schema__(self, *_: object) -> Any:
        from pydantic_core import core_schema as kinds

        numbers = kinds.list_schema(kinds.float_schema())
        written = kinds.plain_serializer_function_ser_schema(lambda array: array.tolist(), return_schema=numbers)
        return kinds.no_info_after_validator_function(
            lambda found: np.asarray(found, dtype=np.float64), numbers, serialization=written
        )


Array = Annotated[NDArray[np.float64], _Json()]

RESAMPLES = 9_999  # RESAMPLES + 1 times every usual level is a whole number, so the quantile is exactly one draw
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the weights to about 32 MB, whatever the number of items
_NODES = 128  # nodes of the quadrature, whose error is below 1e-10 (tested)
_TAIL = 1e-15  # probability of discordant shares that the quadrature omits on each side


def rate_lower(successes: int, items: int, confidence: float) -> float:
    """Return the exact lower one-sided limit of a binomial rate (Clopper & Pearson 1934, Biometrika 26).

    The limit is the rate at which at least `successes` successes have probability `1 - confidence`: a beta quantile.

    Args:
        successes: number of items that are right, 0 ≤ successes ≤ items.
        items: number of items, ≥ 1.
        confidence: one-sided confidence; at 0.95, the limit is the lower end of the two-sided 90 % interval.
    """
    from scipy.special import betaincinv

    return float(betaincinv(successes, items - successes + 1, 1 - confidence)) if successes else 0.0


def paired_lower(better: int, worse: int, items: int, confidence: float) -> float:
    """Return the lower one-sided limit of candidate - baseline for two rates measured on the same items.

    The limit is Gaffke's limit for the mean of differences that are -1, 0 or 1 (see `mean_lower`), computed instead of
    drawn: the point at which `difference_chance` is `1 - confidence`. Against zero, the test is McNemar's exact test.
    Against other differences, no pair of rates is known for which the test passes too often.

    Args:
        better: number of items that only the candidate gets right.
        worse: number of items that only the baseline gets right; better + worse ≤ items.
        items: number of all paired items.
        confidence: one-sided confidence.
    """
    from scipy import optimize, special

    if better == 0:
        same = items - worse
        return -float(special.betaincinv(worse + 1, same, confidence)) if same else -1.0

    def excess(difference: float) -> float:
        return difference_chance(better, worse, items, difference) - (1 - confidence)

    return float(optimize.brentq(excess, -1.0, 1.0, xtol=1e-13, rtol=1e-13))


def difference_chance(better: int, worse: int, items: int, difference: float) -> float:
    """Return P(B - W < `difference`) for shares (B, W, rest) ~ Dirichlet(better, worse + 1, items - better - worse).

    With flat Dirichlet weights on the items and on one more item that only the baseline gets right, this is the
    probability that the weighted mean is below `difference`: a p-value of "the true difference is at most
    `difference`". B + W is a beta variate and is independent of B / (B + W), so one integral remains (Gauss-Legendre).

    Args:
        better: number of items that only the candidate gets right.
        worse: number of items that only the baseline gets right.
        items: number of all paired items.
        difference: the difference, in [-1, 1].
    """
    from scipy.special import betainc, betaincinv, betaln, xlog1py, xlogy

    same, discordant = items - better - worse, better + worse + 1
    if better == 0:  # B is 0
        return 1.0 if difference >= 0 or same == 0 else float(1 - betainc(worse + 1, same, -difference))
    if same == 0:  # B + W is 1
        return float(betainc(better, worse + 1, (1 + difference) / 2))
    certain = float(betainc(discordant, same, difference)) if difference > 0 else 0.0  # P(B + W < difference)
    low = max(float(betaincinv(discordant, same, _TAIL)), abs(difference))
    high = 1 - float(betaincinv(same, discordant, _TAIL))
    if low >= high:
        return certain
    nodes, weights = _quadrature()
    share = low + (high - low) * (nodes + 1) / 2
    density = np.exp(xlogy(discordant - 1, share) + xlog1py(same - 1, -share) - betaln(discordant, same))
    below = betainc(better, worse + 1, np.clip((1 + difference / share) / 2, 0, 1))
    return certain + float(weights @ (density * below)) * (high - low) / 2


def mcnemar_p(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of "discordant items split evenly" (McNemar 1947); 1 without such items."""
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(better, worse), better + worse, 0.5)))


def mean_lower(values: Array, worst: float, confidence: float, seed: int, resamples: int = RESAMPLES) -> float:
    """Return the lower one-sided limit of a mean of values >= `worst` (Gaffke 2005, Math. Methods Stat. 14).

    One more item of value `worst` is added, and the limit is a quantile of the mean under flat Dirichlet weights of the
    n + 1 items. For zeros and ones this is the limit of Clopper and Pearson. So the limit does not collapse when all
    values are equal, and allows for a rare bad item that the sample lacks: 20 ones give 0.86, not 1. No distribution is
    known for which the limit's coverage is too low. The quantile is the draw of rank ⌊(resamples + 1)(1 - confidence)⌋,
    so drawing instead of integrating does not raise the level either (Besag & Clifford 1989).

    Args:
        values: one finite number per item, each >= worst, [items].
        worst: the smallest possible value, as the metric declares it.
        confidence: one-sided confidence.
        seed: the seed of the weights; the same seed and values give the same limit.
        resamples: number of drawn weight vectors.
    """
    rank = math.floor((resamples + 1) * (1 - confidence) + 1e-9)
    if rank == 0:
        return worst
    generator = np.random.Generator(np.random.PCG64(seed))
    distinct, counts = np.unique(values, return_counts=True)  # the weight of k equal items is one gamma variate
    scale = float(distinct[-1] - worst) or 1.0  # prevents overflow and underflow in the products
    above = (distinct - worst) / scale
    step = max(1, _DRAWS_AT_ONCE // len(distinct))
    means = []
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        weights = generator.standard_gamma(counts.astype(np.float64), size=(draws, len(distinct)))
        means.append(weights @ above / (weights.sum(axis=1) + generator.standard_exponential(draws)))
    return worst + scale * float(np.partition(np.concatenate(means), rank - 1)[rank - 1])


@cache
def _quadrature() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights
