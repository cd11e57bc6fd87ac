"""The experts of a mixture, read from its configuration; free of numpy, because servers plan too."""

from collections.abc import Mapping
from typing import Any


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of routed experts of a layer in a `config.json`, and the number that compute a token.

    Both are 0 for a dense model.
    """
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return experts, min(_first(config, "num_experts_per_tok", "moe_k", "moe_topk") or 1, experts)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these numbers that is set; 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int) and config[name]), 0)
