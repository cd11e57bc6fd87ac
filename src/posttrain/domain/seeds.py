"""Seeds are derived, never global: a seed is a hash of the run's seed and the words that say what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose.

    Args:
        seed: the manifest's seed.
        purpose: words and counters, e.g. `("grpo", "prompts", 3)`. Different purposes give independent seeds.
    """
    text = "\x1f".join([str(seed), *(f"{type(p).__name__}:{p}" for p in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
