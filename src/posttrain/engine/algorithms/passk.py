"""pass@k of one item, as a pure function."""

from __future__ import annotations


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct, from `samples` drawn of which `correct` are.

    Unbiased: 1 - C(n - c, k) / C(n, k), as a product that stays in floating-point range (Chen et al. 2021,
    arXiv 2107.03374, equation 1).

    Args:
        samples: n, >= k.
        correct: c, in [0, n].

    Raises:
        ValueError: counts out of range.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples, got {k=}, {samples=}, {correct=}"
        )
    if samples - correct < k:
        return 1.0
    miss = 1.0
    for i in range(samples - correct + 1, samples + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss
