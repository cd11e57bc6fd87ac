"""How the responses of evaluations are drawn, in words, from parameters alone: who shows a run loads no tables."""

from collections.abc import Mapping
from typing import Any


def sampling_words(suite: Mapping[str, Any]) -> str:
    """How the responses of a suite were sampled, from its parameters; what a manifest leaves out is as by default."""
    words = ["1 greedy response to each item"] if suite else []
    if suite.get("samples"):
        drawn = [f"temperature {suite.get('temperature', 1.0):g}"]
        drawn += [f"{name} {suite[name]:g}" for name in ("top_k", "top_p", "min_p") if name in suite]
        words.append(f"and {suite['samples']} sampled at {', '.join(drawn)}")
    if suite.get("stop"):
        words.append("each ends where it says " + " or ".join(repr(one) for one in suite["stop"]))
    return ", ".join(words)


def drawn_words(params: Mapping[str, Any]) -> tuple[str, ...]:
    """How a stage's suites are answered, each in a line; none of a suite whose responses are greedy, to their end."""
    suites = params.get("suites")  # of another kind it may be anything
    asked = (
        {name: one for name, one in suites.items() if isinstance(one, Mapping)} if isinstance(suites, Mapping) else {}
    )
    chosen = {name: one for name, one in asked.items() if one.get("samples") or one.get("stop")}
    return tuple(f"{name}: {sampling_words(one)}" for name, one in chosen.items())
