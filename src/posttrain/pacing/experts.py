"""The experts of a mixture, read from its configuration; free of numpy, because servers plan too."""

from collections.abc import Mapping
from typing import Any


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of routed experts of a layer in a `config.json`, and the number that compute a token.

    Both are 0 for a dense model.
    """
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    return experts, min(int(config.get("num_experts_per_tok") or 1), experts)
